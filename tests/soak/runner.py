"""Soak runs: ``make soak MINUTES=10 ARGS="plain redlock cache"``.

Each workload runs in several processes against servers of its own, while processes are killed and
frozen, servers restarted and frozen, and the network is cut. Afterwards the histories of all
processes are checked, and what is left in Redis.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import redis

from tests.faults.proxy import Proxy
from tests.redis_server import RedisServer

from .checker import check
from .history import Event, History, read_histories
from .workers import DEADLINE

__all__ = ["WORKLOADS", "Run", "main"]

#: The workloads, and what becomes of their server when its memory is full.
WORKLOADS = {
    "plain": "",
    "signals": "",
    "redlock": "",
    "cache": "",
    "gevent": "",
    "noeviction": "noeviction",
    "allkeys-lru": "allkeys-lru",
}
ROOT = Path(__file__).parents[2]
#: Seconds before the end in which nothing is done any more, so that all must have recovered.
CALM = 4.0
#: Seconds after which nothing of a process that has ended may be left.
LIFETIMES = 10.0
#: Values of 20 kB; all of them are more than a server with a limit has room for.
FILLERS = 400
#: A process may keep its connections, its keeper and the threads behind them.
MOST_FILES, MOST_THREADS = 40, 12


class Run:
    """One run of one workload."""

    def __init__(self, workload: str, seconds: float, seed: int, count: int = 4) -> None:
        self.workload, self.seconds, self.seed, self.count = workload, seconds, seed, count
        self._random = random.Random(seed)
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    def violations(self) -> list[str]:
        """Run it; what is wrong afterwards, a sentence each."""
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            self._history = History(self._folder, "runner")
            self._ledger = stack.enter_context(RedisServer())
            policy = WORKLOADS[self.workload]
            config = {"maxmemory": "4mb", "maxmemory-policy": policy} if policy else {}
            number = 3 if self.workload == "redlock" else 1
            self._servers = [
                # What has been acknowledged must survive: else nobody could exclude anybody.
                stack.enter_context(RedisServer(persistent=True, config=config))
                for _ in range(number)
            ]
            self._proxies = [stack.enter_context(Proxy(server)) for server in self._servers]
            stack.callback(self._end_workers)
            for _ in range(self.count):
                self._start_worker()
            self._begin()
            self._disturb()
            self._await_workers()
            events = read_histories(self._folder)
            found = check(events, exclusive=policy != "allkeys-lru")
            found += self._misbehaviour(events)
            if policy != "allkeys-lru":
                found += self._leftovers()
            self.summary = Counter(event.kind for event in events)
            return found

    # -- the processes -------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self._started += 1
        order = {
            "workload": self.workload,
            "name": f"worker-{self._started}",
            "folder": str(self._folder),
            "servers": [f"redis://127.0.0.1:{proxy.port}/0" for proxy in self._proxies],
            "ledger": self._ledger.url,
            "seed": self._random.randrange(2**32),
        }
        self._workers[order["name"]] = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.workers", json.dumps(order)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=(self._folder / f"{order['name']}.errors").open("wb"),
        )

    def _begin(self) -> None:
        """Once all are ready."""
        patience = time.time() + 60
        while sum(event.kind == "began" for event in read_histories(self._folder)) < self.count:
            if time.time() > patience:
                raise RuntimeError("the processes do not start")
            time.sleep(0.05)
        self._deadline = time.time() + self.seconds
        ready = self._folder / "not-yet"
        ready.write_text(str(self._deadline))
        ready.rename(self._folder / DEADLINE)

    def _await_workers(self) -> None:
        for name, worker in self._workers.items():
            try:
                code = worker.wait(max(0.0, self._deadline - time.time()) + 30)
            except subprocess.TimeoutExpired:
                code = None
            if code != 0:
                errors = (self._folder / f"{name}.errors").read_text()[-1000:]
                self._history.write("raised", error=f"{name} ended with {code}: {errors}")

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()

    # -- the faults ----------------------------------------------------------------------------

    def _disturb(self) -> None:
        faults = [self._kill, self._freeze, self._cut, self._away, self._server_freezes]
        faults += [self._server_restarts, self._server_crashes]
        if WORKLOADS[self.workload]:
            faults = [self._kill, self._freeze, self._fill, self._fill, self._fill]
        shown = time.time()
        while (now := time.time()) < self._deadline - CALM:
            time.sleep(min(self._random.random() * 1.5, self._deadline - CALM - now))
            fault = self._random.choice(faults)
            fault()
            self._history.write("fault", what=fault.__name__)
            if time.time() > shown + 10:
                shown = time.time()
                print(f"{self.workload}: {self._deadline - shown:.0f} s to go", flush=True)

    def _kill(self) -> None:
        name = self._random.choice(sorted(self._workers))
        self._workers[name].kill()
        self._workers.pop(name).wait()
        self._start_worker()

    def _freeze(self) -> None:
        name = self._random.choice(sorted(self._workers))
        began = time.time()
        self._workers[name].send_signal(signal.SIGSTOP)
        time.sleep(self._random.random() * 3)
        self._workers[name].send_signal(signal.SIGCONT)
        self._history.write("frozen", began=began, worker=name)

    def _cut(self) -> None:
        self._random.choice(self._proxies).cut()

    def _away(self) -> None:
        with self._random.choice(self._proxies).away():
            time.sleep(self._random.random())

    def _server_freezes(self) -> None:
        server = self._random.choice(self._servers)
        server.pause()
        time.sleep(self._random.random())
        server.resume()

    def _server_restarts(self) -> None:
        self._random.choice(self._servers).restart()

    def _server_crashes(self) -> None:
        server = self._random.choice(self._servers)
        server.kill()
        server.start()

    def _fill(self) -> None:
        """Memory is full for a while."""
        with self._servers[0].client() as client:
            try:
                for number in range(FILLERS):
                    client.set(f"filler-{number}", b"x" * 20_000, px=20_000)
            except redis.ResponseError:
                pass
            time.sleep(self._random.random() * 3)
            client.delete(*(f"filler-{number}" for number in range(FILLERS)))

    # -- what is left --------------------------------------------------------------------------

    def _misbehaviour(self, events: list[Event]) -> Iterator[str]:
        for event in events:
            if event.kind == "raised":
                yield f"{event.process}: {event.values['error']}"
            if event.kind == "ended":
                after = event.values["after"]
                if after["files"] > MOST_FILES or after["threads"] > MOST_THREADS:
                    yield f"{event.process}: {event.values['before']} became {after}"
        working = "read" if self.workload == "cache" else "held"
        if not any(e.kind == working and e.at > self._deadline - CALM for e in events):
            yield "nobody had anything done at the end, long after the last fault"

    def _leftovers(self) -> Iterator[str]:
        """When all lifetimes are over, nothing may be left but what expires within days."""
        patience = time.time() + LIFETIMES
        while (left := list(self._left_now())) and time.time() < patience:
            time.sleep(0.2)
        yield from left

    def _left_now(self) -> Iterator[str]:
        for server in self._servers:
            with server.client() as client:
                for key in client.scan_iter():
                    left = client.pttl(key)
                    if b"soak-" in key and not key.endswith((b":fence", b":owner", b":events")):
                        yield f"{key!r} is left behind ({left} ms)"
                    elif left == -1 and key not in PERMANENT:
                        yield f"{key!r} has no lifetime"
                blocked = client.info("clients")["blocked_clients"]
                if blocked:
                    yield f"{blocked} connections are still blocked"


#: Keys that have no lifetime, and are emptied by their use.
PERMANENT = (b"django_redis_lock:locks", b"django_redis_lock:flights")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workloads", nargs="*", metavar="workload", help=", ".join(WORKLOADS))
    parser.add_argument("--minutes", type=float, default=10, help="for each workload")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="to repeat a run")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args(argv)
    unknown = set(options.workloads) - set(WORKLOADS)
    if unknown:
        parser.error(f"no such workload: {', '.join(sorted(unknown))}")
    failed = False
    for workload in options.workloads or WORKLOADS:
        print(f"{workload}: {options.minutes:g} minutes, seed {options.seed}", flush=True)
        run = Run(workload, options.minutes * 60, options.seed, options.processes)
        found = run.violations()
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(run.summary.items()))
        print(f"{workload}: {len(found)} violations; {counts}")
        for violation, number in Counter(found).most_common(50):
            print(f"  {number} times: {violation}")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
