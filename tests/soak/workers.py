"""One process of a soak run: ``python -m tests.soak.workers '{"workload": "plain", ...}'``.

It works until its deadline, whatever Redis does meanwhile, and notes what it did.
"""

from __future__ import annotations

import json
import sys

if '"workload": "gevent"' in sys.argv[-1]:
    import gevent
    from gevent import monkey

    monkey.patch_all()

import encodings.idna  # noqa: F401, connecting needs it; an interrupted import would stay broken.
import faulthandler
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import django
import redis
from django.conf import settings
from django.core.cache import cache
from redis.exceptions import RedisError

from django_redis_lock import Lock, LockError, Redlock, events
from django_redis_lock.singleflight.leader import Leader

from .history import History

NAMES = 3
#: The file with the Unix time at which all end. It appears when all are ready to begin.
DEADLINE = "deadline"
#: Seconds. Short, so that locks of those who were killed are free again within the run, and that a
#: frozen leader's flight is taken over.
TIMEOUT = LOCK_FLIGHT_TIMEOUT = 2.0
#: Takes the next number if nobody with a greater fence has been here. KEYS: the greatest fence, the
#: number. ARGV: fence, the number that was read ('' to read it).
LEDGER = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[1]) or '0') then return -1 end
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] == '' then return tonumber(redis.call('GET', KEYS[2]) or '0') end
redis.call('SET', KEYS[2], ARGV[2])
return tonumber(ARGV[2])
"""


class Interrupted(BaseException):
    """From the signal handler of the workload ``signals``."""


class Order(NamedTuple):
    """What a process is to do.

    Attributes:
        servers: URLs; more than one for Redlock.
        ledger: URL of a server that nothing happens to.
    """

    workload: str
    name: str
    folder: str
    servers: list[str]
    ledger: str
    seed: int


class Work:
    """What all workloads share."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.history = History(Path(order.folder), order.name)
        self.random = random.Random(order.seed)
        self.ledger = self.new_ledger()
        self.deadline = 0.0
        self._took = 0.0

    def goes_on(self) -> bool:
        return time.time() < self.deadline

    def new_ledger(self) -> redis.Redis:
        # With protocol 3 redis-py begins with HELLO and a whole number: see ``_ledger``.
        return redis.Redis.from_url(self.order.ledger, protocol=2)

    def client(self, number: int = 0) -> redis.Redis:
        return redis.Redis.from_url(
            self.order.servers[number], socket_timeout=1, socket_connect_timeout=1
        )

    def lock_factory(self) -> Callable[[str], Any]:
        options: dict[str, Any] = {"timeout": TIMEOUT, "renew": True, "blocking_timeout": 3.0}
        if self.order.workload == "redlock":
            clients = [self.client(number) for number in range(len(self.order.servers))]
            return lambda name: Redlock(clients, name, **options)
        client = self.client()
        return lambda name: Lock(client, name, **options)

    def section(self, make: Callable[[str], Any]) -> None:
        """Take a lock, count up in the ledger, and say while it is held that it is."""
        name = f"soak-{self.random.randrange(NAMES)}"
        lock = make(name)
        asked = time.time()
        with lock:
            fence = lock.fence
            since = self._held(lock, name, fence, asked, time.time())
            if since is not None:
                number = self._ledger(name, fence, "")
                time.sleep(self.random.random() * 0.02)
                if number >= 0 and self._ledger(name, fence, number + 1) >= 0:
                    self.history.write("wrote", lock=name, fence=fence, number=number + 1)
                self._held(lock, name, fence, asked, since)

    def _held(self, lock: Any, name: str, fence: int, asked: float, since: float) -> float | None:
        at = time.time()
        if lock.lost:
            return None
        self.history.write("held", lock=name, fence=fence, asked=asked, since=min(since, at), at=at)
        return since

    def _ledger(self, name: str, fence: int, number: int | str) -> int:
        # Bytes: a signal while hiredis packs a whole number may end the process (hiredis 3.5).
        keys = f"{name}-fence".encode(), f"{name}-number".encode()
        numbers = b"%d" % fence, str(number).encode()
        return int(self.ledger.execute_command("EVAL", LEDGER.encode(), b"2", *keys, *numbers))

    # -- the workloads -------------------------------------------------------------------------

    def locks(self) -> None:
        make = self.lock_factory()
        while self.goes_on():
            self.attempt(lambda: self.section(make))

    def signals(self) -> None:
        """Every few milliseconds a signal handler raises, wherever the process is."""

        def interrupt(*_: Any) -> None:
            raise Interrupted

        signal.signal(signal.SIGALRM, interrupt)
        make = self.lock_factory()
        while self.goes_on():
            try:
                signal.setitimer(signal.ITIMER_REAL, self.random.random() * 0.05)
                try:
                    self.attempt(lambda: self.section(make))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupted:
                # Whatever it left in the ledger's connection is not to be read as an answer; and a
                # pool of redis-py that has been interrupted counts connections that are no more.
                self.ledger.close()
                self.ledger = self.new_ledger()

    def gevent(self) -> None:
        """Greenlets, of which some are killed wherever they wait."""
        make = self.lock_factory()

        def work() -> None:
            while self.goes_on():
                self.attempt(lambda: self.section(make))

        greenlets = [gevent.spawn(work) for _ in range(5)]
        while self.goes_on():
            gevent.sleep(self.random.random() * 0.05)
            victim = self.random.randrange(len(greenlets))
            greenlets[victim].kill(block=False)
            greenlets[victim] = gevent.spawn(work)
        gevent.joinall(greenlets, timeout=10)

    def cache(self) -> None:
        """Read through ``get_or_set``, and write and delete what others compute."""
        events.subscribe(self._on_event)
        take = Leader.take

        def noted_take(*arguments: Any, **options: Any) -> Any:
            self._took = time.time()
            return take(*arguments, **options)

        Leader.take = noted_take
        while self.goes_on():
            self.attempt(self._write if self.random.random() < 0.1 else self._read)
            time.sleep(0.002)

    def _write(self) -> None:
        key = f"key-{self.random.randrange(NAMES)}"
        value = f"{self.order.name} {time.time():.6f}"
        began = time.time()
        self.history.write("writing", key=key, id=value)
        if self.random.random() < 0.5:
            cache.set(key, value, 5)
        else:
            cache.delete(key)
        self.history.write("written", key=key, began=began, id=value)

    def _read(self) -> None:
        key = f"key-{self.random.randrange(NAMES)}"

        def compute() -> str:
            began = time.time()
            value = f"{self.order.name} {began:.6f} {self.random.random()}"
            time.sleep(0.02)
            self._computed = {"key": key, "asked": asked, "began": began, "id": value}
            return value

        asked = time.time()
        value = cache.get_or_set(key, compute, 1)
        self.history.write("read", key=key, began=asked, id=value)

    def _on_event(self, event: object) -> None:
        """Between a computation and the storing of its value."""
        if isinstance(event, events.Computed):
            kind = "alone" if event.without_redis else "computed"
            self.history.write(kind, took=self._took, **self._computed)

    # -- its end -------------------------------------------------------------------------------

    def attempt(self, act: Callable[[], Any]) -> None:
        """Outages, cuts and full servers are part of it; everything else is a finding."""
        try:
            act()
        except (RedisError, LockError, OSError) as error:
            self.history.write("failed", error=f"{type(error).__name__}: {error}"[:200])
            time.sleep(0.01)
        except Exception as error:
            self.history.write("raised", error=f"{type(error).__name__}: {error}"[:500])

    def run(self) -> None:
        self.history.write("began", pid=os.getpid())
        deadline = Path(self.order.folder, DEADLINE)
        while not deadline.exists():
            time.sleep(0.01)
        self.deadline = float(deadline.read_text())
        locks = {"plain": self.locks, "redlock": self.locks, "noeviction": self.locks}
        work = {**locks, "allkeys-lru": self.locks}.get(self.order.workload)
        before = resources()
        (work or getattr(self, self.order.workload))()
        self.history.write("ended", before=before, after=resources())


def resources() -> dict[str, int]:
    """What a process must not use more and more of."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return {
        "threads": threading.active_count(),
        "files": len(list(folder.iterdir())) if folder.exists() else 0,
    }


def main() -> None:
    faulthandler.enable()  # If the process crashes, its errors say where.
    order = Order(**json.loads(sys.argv[-1]))
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    os.environ["REDIS_URL"] = order.servers[0]
    django.setup()
    settings.CACHES["default"]["OPTIONS"]["LOCK_FLIGHT_TIMEOUT"] = LOCK_FLIGHT_TIMEOUT
    Work(order).run()


if __name__ == "__main__":
    main()
