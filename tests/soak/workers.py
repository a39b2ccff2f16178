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

import asyncio
import encodings.idna  # noqa: F401, connecting needs it; an interrupted import would stay broken.
import faulthandler
import gc
import importlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import django
import psutil
import redis
import redis.asyncio
from django.conf import settings
from django.core.cache import cache
from redis.exceptions import RedisError

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    LockNotAcquired,
    LockNotOwnedError,
    MultiLock,
    Redlock,
    events,
)
from django_redis_lock.singleflight.flight import Leader
from tests.redis_topologies import SentinelServers

from .checker import BLOCKING_TIMEOUT, LIFETIME
from .history import History
from .stacks import on_demand

NAMES = 3
LOCKS = [f"soak-{number}" for number in range(NAMES)]
#: Those of the workload in which a process takes two at a time.
MORE_LOCKS = [f"soak-{number}" for number in range(5)]
#: The file with the Unix time at which all end. It appears when all are ready to begin.
DEADLINE = "deadline"
#: Seconds. Short, so that a frozen leader's flight is taken over within the run.
LOCK_FLIGHT_TIMEOUT = 2.0
#: Seconds without a reply after which redis-py gives up.
SOCKET_TIMEOUT = 1.0
LOCK_OPTIONS: dict[str, Any] = {
    "timeout": LIFETIME,
    "renew": True,
    "blocking_timeout": BLOCKING_TIMEOUT,
}
#: How many may hold a lock at a time, in one workload.
LIMIT = 2
#: The share of sections and computations that fail, and of locks that somebody else tries to end.
FAILING = 0.05
#: Takes the next number if nobody with a greater fence has been here. KEYS: the greatest fence, the
#: number. ARGV: fence, the number that was read ('' to read it).
LEDGER = """
if tonumber(ARGV[1]) < tonumber(redis.call('GET', KEYS[1]) or '0') then return -1 end
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] == '' then return tonumber(redis.call('GET', KEYS[2]) or '0') end
redis.call('SET', KEYS[2], ARGV[2])
return tonumber(ARGV[2])
"""


#: Of the computation that runs here: when the request was sent that made it the leader, and what
#: its event is to say.
TAKEN: ContextVar[float] = ContextVar("taken", default=0.0)
COMPUTED: ContextVar[dict[str, Any]] = ContextVar("computed")


class Interrupted(BaseException):
    """From the signal handler of the workload ``signals``."""


class Failed(Exception):
    """What a section or a computation raises; its caller must get this one and no other."""


class Order(NamedTuple):
    """What a process is to do.

    Attributes:
        work: the method of ``Work``.
        topology: see ``servers.Servers``.
        servers: URLs; more than one for Redlock.
        ledger: URL of a server that nothing happens to.
    """

    workload: str
    work: str
    name: str
    folder: str
    topology: str
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

    def goes_on(self) -> bool:
        return time.time() < self.deadline

    def new_ledger(self) -> redis.Redis:
        # With protocol 3 redis-py begins with HELLO and a whole number: see ``count``.
        return redis.Redis.from_url(self.order.ledger, protocol=2)

    def client(self, number: int = 0) -> Any:
        limits = {"socket_timeout": SOCKET_TIMEOUT, "socket_connect_timeout": SOCKET_TIMEOUT}
        parts = [urlsplit(url) for url in self.order.servers]
        addresses = [(str(part.hostname), int(part.port or 0)) for part in parts]
        if self.order.topology == "sentinel":
            return redis.Sentinel(addresses, **limits).master_for(SentinelServers.name, **limits)
        if self.order.topology == "cluster":
            nodes = [redis.cluster.ClusterNode(*address) for address in addresses]
            return redis.RedisCluster(startup_nodes=nodes, **limits)
        return redis.Redis.from_url(self.order.servers[number], **limits)

    def lock_factory(self) -> Callable[[str], Any]:
        options = LOCK_OPTIONS
        if self.order.workload == "redlock":
            clients = [self.client(number) for number in range(len(self.order.servers))]
            return lambda name: Redlock(clients, name, **options)
        if self.order.topology == "sentinel":
            # Renewals do not wait for replicas: with them a failover may shorten a lifetime.
            options = {**options, "renew": False, "replicas": 2}
        client = self.client()
        return lambda name: Lock(client, name, **options)

    def section(self, make: Callable[[str], Any]) -> None:
        """Take a lock, count up in the ledger, and say while it is held that it is."""
        name = self.random.choice(LOCKS)
        lock = make(name)
        visit = Visit(self, lock, name)
        with visit, lock:
            visit.begin()
            time.sleep(self.random.random() * 0.02)
            visit.end()

    def pair(self, client: Any) -> None:
        """The same with two locks as one."""
        lock = MultiLock(client, self.random.sample(MORE_LOCKS, 2), **LOCK_OPTIONS)
        one, other = (Visit(self, member, member.name) for member in lock.members)
        with one, other, lock:
            one.begin()
            other.begin()
            time.sleep(self.random.random() * 0.02)
            one.end()
            other.end()

    async def asection(self, client: Any) -> None:
        """The same in a task."""
        name = self.random.choice(LOCKS)
        lock = AsyncLock(client, name, **LOCK_OPTIONS)
        visit = Visit(self, lock, name)
        with visit:
            async with lock:
                visit.begin()
                await asyncio.sleep(self.random.random() * 0.02)
                visit.end()

    def steal(self, make: Callable[[str], Any]) -> None:
        """Try to end a lock that another one holds."""
        name = self.random.choice(LOCKS)
        lock = make(name)
        lock.local.token = b"of nobody"
        asked = time.time()
        # After a lost reply a release may be taken for done. It is wrong only if a holder lost it.
        with suppress(LockNotOwnedError):
            lock.release()
            self.history.write("released", lock=name, asked=asked)

    def disturb(self) -> None:
        """What one may do with a cache in the database of the locks; no lock may notice."""
        name = self.random.choice(LOCKS)
        change: Callable[[], Any] = self.random.choice(
            [
                cache.clear,
                lambda: cache.delete_pattern("*"),
                lambda: cache.delete(name),
                lambda: cache.set(name, "value", 1),
            ]
        )
        change()

    def count(self, name: str, fence: int, number: int | str) -> int:
        """What LEDGER returns."""
        # Bytes: a signal while hiredis packs a whole number may end the process (hiredis 3.5).
        keys = f"{name}-fence".encode(), f"{name}-number".encode()
        numbers = b"%d" % fence, str(number).encode()
        return int(self.ledger.execute_command("EVAL", LEDGER.encode(), b"2", *keys, *numbers))

    def place(self, make: Callable[[str], Any]) -> None:
        """Take a place of a lock, and say while it is held that it is."""
        name = self.random.choice(LOCKS)
        lock = make(name)
        asked = time.time()
        with lock:
            fence, since = lock.fence, time.time()
            time.sleep(self.random.random() * 0.02)
            at = time.time()
            if not lock.lost:
                values = {"asked": asked, "since": since, "at": at, "limit": LIMIT}
                self.history.write("held", lock=name, fence=fence, **values)

    # -- the workloads -------------------------------------------------------------------------

    def locks(self) -> None:
        make = self.lock_factory()
        while self.goes_on():
            self.attempt(lambda: self.section(make))
            if self.random.random() < FAILING and self.order.workload != "redlock":
                self.attempt(lambda: self.steal(make))
            if self.random.random() < FAILING and self.order.topology == "single":
                self.attempt(self.disturb)

    def places(self) -> None:
        client = self.client()
        while self.goes_on():
            self.attempt(
                lambda: self.place(lambda name: Lock(client, name, limit=LIMIT, **LOCK_OPTIONS))
            )
            if self.random.random() < FAILING:
                self.attempt(self.disturb)

    def names(self) -> None:
        client = self.client()
        while self.goes_on():
            self.attempt(lambda: self.pair(client))
            if self.random.random() < FAILING:
                self.attempt(self.disturb)

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

    def asyncio(self) -> None:
        """Tasks, of which some are cancelled wherever they wait."""
        asyncio.run(self._tasks())

    async def _tasks(self) -> None:
        self._note_computations()
        on_demand(Path(self.order.folder), self.order.name, asyncio.get_running_loop())
        client = redis.asyncio.Redis.from_url(
            self.order.servers[0],
            socket_timeout=SOCKET_TIMEOUT,
            socket_connect_timeout=SOCKET_TIMEOUT,
        )

        async def work(act: Callable[[], Any]) -> None:
            while self.goes_on():
                ended = "nothing"
                try:
                    await act()
                except (RedisError, LockError, OSError) as error:
                    ended = repr(error)[:60]
                    self._failed(error)
                except Exception as error:
                    ended = repr(error)
                    self.raised(repr(error))
                task = asyncio.current_task()
                if sys.version_info >= (3, 11) and task is not None and task.cancelling():
                    self.raised(f"a cancellation was swallowed by {act.__name__}: {ended}")
                    return
                await asyncio.sleep(0.002)

        async def section() -> None:
            await self.asection(client)

        acts: list[Callable[[], Any]] = [section, self._aread] * 3
        tasks = [asyncio.create_task(work(act)) for act in acts]
        while self.goes_on():
            await asyncio.sleep(self.random.random() * 0.05)
            victim = self.random.randrange(len(tasks))
            tasks[victim].cancel()
            tasks[victim] = asyncio.create_task(work(acts[victim]))
        await asyncio.wait(tasks, timeout=10)
        await client.aclose()

    def cache(self) -> None:
        """Read through ``get_or_set``, and write and delete what others compute."""
        self._note_computations()
        while self.goes_on():
            self.attempt(self._write if self.random.random() < 0.1 else self._read)
            time.sleep(0.002)

    def _note_computations(self) -> None:
        events.subscribe(self._on_event)
        query = Leader.query

        def noted_query(*arguments: Any, **options: Any) -> Any:
            TAKEN.set(time.time())
            return query(*arguments, **options)

        Leader.query = noted_query  # counted in this process

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
        reading = Reading(self)

        def compute() -> str:
            value = reading.begin()
            time.sleep(0.02)
            return reading.end(value)

        with reading:
            reading.got(cache.get_or_set(reading.key, compute, 1, stale=reading.stale))

    async def _aread(self) -> None:
        reading = Reading(self)

        async def compute() -> str:
            value = reading.begin()
            await asyncio.sleep(0.02)
            return reading.end(value)

        with reading:
            reading.got(await cache.aget_or_set(reading.key, compute, 1, stale=reading.stale))

    def _on_event(self, event: object) -> None:
        """Between a computation and the storing of its value."""
        if isinstance(event, events.Computed) and event.error is None:
            kind = "alone" if event.without_redis else "computed"
            self.history.write(kind, took=TAKEN.get(), **COMPUTED.get())

    # -- optional parts --------------------------------------------------------------------------

    def idempotent(self) -> None:
        """Requests, each of which is sent several times."""
        requests = self._optional_parts().Requests(self.history, self.order.name, self.random)
        while self.goes_on():
            self.attempt(requests.send)
            time.sleep(0.002)

    def unique(self) -> None:
        """Queue tasks, and run them."""
        parts = self._optional_parts()
        parts.Queue.ledger, parts.Queue.history = self.ledger, self.history
        while self.goes_on():
            if self.random.random() < 0.6:
                self.attempt(lambda: parts.enqueue(self.history, self.random))
            else:
                self.attempt(lambda: parts.work_off(self.ledger, self.history))
            time.sleep(0.002)

    @staticmethod
    def _optional_parts() -> Any:
        return importlib.import_module("tests.soak.optional_parts")

    # -- its end -------------------------------------------------------------------------------

    def attempt(self, act: Callable[[], Any]) -> None:
        """Outages, cuts and full servers are part of it; everything else is a finding."""
        try:
            act()
        except (RedisError, LockError, OSError) as error:
            self._failed(error)
            time.sleep(0.01)
        except Exception as error:
            self.raised(repr(error))

    def _failed(self, error: Exception) -> None:
        self.history.write("failed", error=f"{type(error).__name__}: {error}"[:200])

    def raised(self, text: str) -> None:
        """Note a finding."""
        self.history.write("raised", error=text[:500])

    def run(self) -> None:
        self.history.write("began", pid=os.getpid())
        deadline = Path(self.order.folder, DEADLINE)
        while not deadline.exists():
            time.sleep(0.01)
        self.deadline = float(deadline.read_text())
        before = resources()
        getattr(self, self.order.work)()
        self.history.write("ended", before=before, after=resources())


class Visit:
    """One section, from the call that acquires the lock; a context manager around both."""

    def __init__(self, work: Work, lock: Any, name: str) -> None:
        self._work, self._lock, self._name = work, lock, name
        self._asked = time.time()
        self._fails = work.random.random() < FAILING
        self._failure: Failed | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if type(error) is LockNotAcquired:
            self._work.history.write("gave-up", lock=self._name, asked=self._asked)
        if self._failure is None or not isinstance(error, Exception):
            return False
        if error is not self._failure:
            self._work.raised(f"C4: {error!r} hid the section's own exception")
        return True

    def begin(self) -> None:
        """The lock has been acquired."""
        self._fence, self._since, self._number = self._lock.fence, time.time(), -1
        if self._held():
            self._number = self._work.count(self._name, self._fence, "")

    def end(self) -> None:
        """The lock is about to be released."""
        if self._number >= 0:
            number = self._number + 1
            if self._work.count(self._name, self._fence, number) >= 0:
                self._write("wrote", number=number)
            self._held()
        if self._fails:
            self._failure = Failed("in the section")
            raise self._failure

    def _held(self) -> bool:
        at = time.time()
        held, since = not self._lock.lost, min(self._since, at)
        if held:
            self._write("held", asked=self._asked, since=since, at=at)
        else:
            self._write("lost", since=since, at=at)
        return held

    def _write(self, kind: str, **values: Any) -> None:
        self._work.history.write(kind, lock=self._name, fence=self._fence, **values)


class Reading:
    """One read through ``get_or_set``; a context manager around it."""

    def __init__(self, work: Work) -> None:
        number = work.random.randrange(NAMES)
        #: One of them is stale before it is gone.
        self.key, self.stale = f"key-{number}", 3 if number == 0 else 0
        self._work = work
        self._asked = time.time()
        self._fails = work.random.random() < FAILING
        self._failure: Failed | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if isinstance(error, Exception) and error is not self._failure:
            self._work.raised(f"C3: get_or_set raised {type(error).__name__}: {error}")
        return isinstance(error, Exception)

    def begin(self) -> str:
        """The computation begins; what it is to return."""
        self._began = time.time()
        return f"{self._work.order.name} {self._began:.6f} {self._work.random.random()}"

    def end(self, value: str) -> str:
        """The computation returns."""
        if self._fails:
            self._failure = Failed("in the computation")
            raise self._failure
        COMPUTED.set({"key": self.key, "asked": self._asked, "began": self._began, "id": value})
        return value

    def got(self, value: object) -> None:
        self._work.history.write("read", key=self.key, began=self._asked, id=value)


def resources() -> dict[str, int]:
    """What a process must not use more and more of."""
    gc.collect()
    folder = Path("/proc/self/fd")
    return {
        "threads": threading.active_count(),
        "files": len(list(folder.iterdir())) if folder.exists() else 0,
        "memory": psutil.Process().memory_info().rss,
    }


def main() -> None:
    faulthandler.enable()  # If the process crashes, its errors say where.
    order = Order(**json.loads(sys.argv[-1]))
    on_demand(Path(order.folder), order.name)
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    os.environ["REDIS_URL"] = order.servers[0]
    django.setup()
    settings.TASKS = {"default": {"BACKEND": "tests.soak.optional_parts.Queue"}}
    options = settings.CACHES["default"]["OPTIONS"]
    options["LOCK_FLIGHT_TIMEOUT"] = LOCK_FLIGHT_TIMEOUT
    if order.workload != "clock":
        # clear() empties the whole database, but for the locks that are held. What a free lock's
        # last fence was is forgotten: then the clock must not be set back.
        del options["LOCK_CLEAR"]
    Work(order).run()


if __name__ == "__main__":
    main()
