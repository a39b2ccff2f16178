"""Soak runs: ``make soak MINUTES=10 ARGS="plain redlock cache"``.

Each workload runs in several processes against servers of its own, while processes are killed and
frozen, servers restarted and frozen, and the network is cut. Afterwards the histories of all
processes are checked, and what is left in Redis.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.redis_server import RedisServer

from .checker import check
from .history import Event, History, read_histories
from .servers import Clustered, Proxied, Replicated, Servers, SteppedClock
from .stacks import Watch, read_stacks
from .workers import DEADLINE, LOCKS

__all__ = ["WORKLOADS", "Run", "Workload", "main"]


class Workload(NamedTuple):
    """What runs against which servers.

    Attributes:
        work: the method of ``workers.Work``.
        exclusive: False if the servers may lose locks: then two may hold one at a time, but
            fences still increase, and the ledger that compares them loses nothing.
    """

    work: str
    servers: Callable[[random.Random], Servers]
    exclusive: bool = True


WORKLOADS = {
    "plain": Workload("locks", Proxied),
    "signals": Workload("signals", Proxied),
    "asyncio": Workload("asyncio", Proxied),
    "gevent": Workload("gevent", Proxied),
    "cache": Workload("cache", Proxied),
    "redlock": Workload("locks", partial(Proxied, number=3)),
    "sentinel": Workload("locks", Replicated),
    "cluster": Workload("locks", partial(Clustered, names=LOCKS)),
    "data-loss": Workload("locks", partial(Proxied, persistent=False), exclusive=False),
    "clock": Workload("locks", SteppedClock, exclusive=False),
    "limit": Workload("places", Proxied),
    "names": Workload("names", Proxied),
    "idempotent": Workload("idempotent", Proxied),
    "unique": Workload("unique", Proxied),
    "noeviction": Workload("locks", partial(Proxied, policy="noeviction")),
    "allkeys-lru": Workload("locks", partial(Proxied, policy="allkeys-lru"), exclusive=False),
}
#: By the method of ``workers.Work``, the event that says that a process got what it wants.
PROGRESS = {"cache": "read", "idempotent": "answered", "unique": "started"}
ROOT = Path(__file__).parents[2]
#: Seconds after which nothing of a process that has ended may be left.
LIFETIMES = 15.0
#: A process may keep its connections, its keeper and the threads behind them.
MOST_FILES, MOST_THREADS = 40, 12
#: The bytes by which it may have grown: modules that it imports when they are needed.
MOST_GROWTH = 40 * 2**20
#: Seconds between two pictures of the progress, and what is after each: on a terminal they replace
#: each other.
SHOW_EVERY, LINE_END = (1.0, "\r") if sys.stdout.isatty() else (10.0, "\n")
#: The process that is never killed: it would show a leak.
ELDEST = "worker-1"


class Run:
    """One run of one workload."""

    def __init__(self, workload: str, seconds: float, seed: int, count: int = 4) -> None:
        self.name, self.workload = workload, WORKLOADS[workload]
        self.seconds, self.seed, self.count = seconds, seed, count
        self._random = random.Random(seed)
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    def violations(self) -> list[str]:
        """Run it; what is wrong afterwards, a sentence each."""
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
            self._history = History(self._folder, "runner")
            self._ledger = stack.enter_context(RedisServer())
            self._servers = stack.enter_context(self.workload.servers(self._random))
            stack.callback(self._end_workers)
            for _ in range(self.count):
                self._start_worker()
            self._begin()
            with Watch(self._folder, [self._progress], self._pids):
                self._disturb()
                self._await_workers()
            events = read_histories(self._folder)
            found = check(events, exclusive=self.workload.exclusive)
            found += self._misbehaviour(events)
            found += self._leftovers()
            self.summary = Counter(event.kind for event in events)
            self.faults = Counter(e.values["what"] for e in events if e.kind == "fault")
            return found

    @property
    def _progress(self) -> str:
        return PROGRESS.get(self.workload.work, "held")

    def _pids(self) -> list[int]:
        """Of the processes that have begun."""
        workers = list(self._workers.items())
        return [w.pid for name, w in workers if (self._folder / f"{name}.history").exists()]

    # -- the processes -------------------------------------------------------------------------

    def _start_worker(self) -> None:
        self._started += 1
        order = {
            "workload": self.name,
            "work": self.workload.work,
            "name": f"worker-{self._started}",
            "folder": str(self._folder),
            "topology": self._servers.topology,
            "servers": self._servers.urls,
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
                worker.send_signal(signal.SIGUSR1)
                time.sleep(1)
            if code != 0:
                errors = (self._folder / f"{name}.errors").read_text()[-1000:]
                stacks = "" if code is not None else f"\n{read_stacks(self._folder)}"
                self._history.write("raised", error=f"{name} ended with {code}: {errors}{stacks}")

    def _end_workers(self) -> None:
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.kill()
                worker.wait()

    # -- the faults ----------------------------------------------------------------------------

    def _disturb(self) -> None:
        faults = [self.process_killed, self.process_frozen, *self._servers.faults]
        ending = self._deadline - self._servers.calm
        shown = 0.0
        while (now := time.time()) < ending:
            if now > shown + SHOW_EVERY:
                shown = now
                self._show_progress(self._deadline - now)
            time.sleep(min(self._random.random() * 1.5, ending - now))
            fault = self._random.choice(faults)
            began = time.time()
            fault()
            self._history.write("fault", what=fault.__name__, began=began)
        self._servers.recover()

    def _show_progress(self, left: float) -> None:
        done = round(30 * (1 - left / self.seconds))
        bar = "#" * done + "." * (30 - done)
        print(f"{self.name}: [{bar}] {left:.0f} s to go", end=LINE_END, flush=True)

    def process_killed(self) -> None:
        name = self._random.choice(sorted(self._workers.keys() - {ELDEST}))
        self._workers[name].kill()
        self._workers.pop(name).wait()
        self._start_worker()

    def process_frozen(self) -> None:
        name = self._random.choice(sorted(self._workers))
        began = time.time()
        self._workers[name].send_signal(signal.SIGSTOP)
        time.sleep(self._random.random() * 3)
        self._workers[name].send_signal(signal.SIGCONT)
        self._history.write("frozen", began=began, worker=name)

    # -- what is left --------------------------------------------------------------------------

    def _misbehaviour(self, events: list[Event]) -> Iterator[str]:
        for event in events:
            if event.kind == "raised":
                yield f"{event.process}: {event.values['error']}"
            if event.kind == "ended":
                after = event.values["after"]
                growth = after["memory"] - event.values["before"]["memory"]
                many = after["files"] > MOST_FILES or after["threads"] > MOST_THREADS
                if many or growth > MOST_GROWTH:
                    yield f"{event.process}: {event.values['before']} became {after}"
        calm = self._deadline - self._servers.calm
        if not any(event.kind == self._progress and event.at > calm for event in events):
            yield (
                "nobody had anything done at the end, long after the last fault\n"
                f"load {os.getloadavg()}\n{read_stacks(self._folder)}"
            )

    def _leftovers(self) -> Iterator[str]:
        """When all lifetimes are over, nothing may be left but what expires within days."""
        patience = time.time() + LIFETIMES
        while (left := list(self._left_now())) and time.time() < patience:
            time.sleep(0.2)
        yield from left

    def _left_now(self) -> Iterator[str]:
        for client in self._servers.clients():
            with client:
                for key in client.scan_iter():
                    left = client.pttl(key)
                    if b"soak-" in key and not key.endswith((b":fence", b":owner", b":events")):
                        yield f"{key!r} is left behind ({left} ms)"
                    elif left == -1 and not key.startswith(PERMANENT):
                        yield f"{key!r} has no lifetime"
                blocked = client.info("clients")["blocked_clients"]
                if blocked:
                    yield f"{blocked} connections are still blocked"


#: Keys that have no lifetime, and are emptied by their use; on a cluster each has many.
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
    # Otherwise its servers would outlive it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    failed = False
    for name in options.workloads or WORKLOADS:
        if name == "clock" and not SteppedClock.can_run():
            print("clock: NOT RUN, it needs Linux and a C compiler")
            continue
        print(f"{name}: {options.minutes:g} minutes, seed {options.seed}", flush=True)
        run = Run(name, options.minutes * 60, options.seed, options.processes)
        found = run.violations()
        for what, counted in (("events", run.summary), ("faults", run.faults)):
            listed = ", ".join(f"{number} {kind}" for kind, number in sorted(counted.items()))
            print(f"{name}: {what}: {listed}")
        print(f"{name}: {len(found)} violations", flush=True)
        for violation, number in Counter(found).most_common(50):
            print(f"  {number} times: {violation}")
        failed = failed or bool(found)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
