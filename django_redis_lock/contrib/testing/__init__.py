"""Locks and caches without Redis, for the tests of projects: ``override()`` keeps those of this
process in memory, on a clock that the tests move."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import time as real
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from asgiref.sync import AsyncToSync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.test.utils import TestContextDecorator
from redis.exceptions import RedisError

from ...cache import lock_cache, lock_caches
from ...clock import Clock, time
from ...extension import PartMissing, part
from ...keeper import Job, Keeper, keeper, use_keeper
from ...locking import Renewal
from ...ops.inventory import list_held
from ...protocol.keys import INDEX
from ...singleflight import FlightRenewal, use_background
from ...threads import InCaller, Mutex
from ...transport import Server, server_of
from ...transport.server import standing_in
from ..locmem import TESTING, Database, client_of, databases

__all__ = ["MemoryServer", "RedisLocksMixin", "VirtualClock", "override"]

#: How often, in real time, a wait looks whether the clock may move.
PAUSE_SECONDS = 0.002
#: How often the keeper is asked in one move; a year of renewals, or a job that is due forever.
MAX_ROUNDS = 1_000_000
#: The longest piece of a wait without a deadline.
LONGEST_PIECE = 3600.0
#: More locks than a test holds.
MAX_LOCKS = 100_000

#: What else of a cache's settings holds in memory.
_KEPT = ("KEY_PREFIX", "KEY_FUNCTION", "REVERSE_KEY_FUNCTION", "VERSION", "TIMEOUT", "OPTIONS")

_ENDLESS = (
    "nobody can end this wait, so it would never end: only the test moves a virtual clock. Release "
    "the lock before, or wait with blocking_timeout="
)
_numbers = itertools.count(1)

#: The setting CACHES.
Configs = dict[str, dict[str, Any]]


def _caller() -> object:
    """The task that runs in this thread, else the thread."""
    task = asyncio.current_task() if asyncio._get_running_loop() else None
    return task or threading.current_thread()


#: The task or thread that has a lock, its thread, and the real time since when; None if somebody is
#: about to have it.
_Holder = tuple[Any, Any, float]


class SteppedKeeper(Keeper):
    """Does its jobs in the thread that moves the clock."""

    #: Returns the tokens of all locks that the server has.
    tokens: Callable[[], set[bytes]] = set

    def __init__(self) -> None:
        super().__init__()
        self._holders: dict[object, _Holder] = {}

    def add(self, job: Job) -> None:
        super().add(job)
        if isinstance(job, (Renewal, FlightRenewal)):
            holder = _caller(), threading.current_thread(), Clock.monotonic()
            self._holders[_held_by(job)] = holder

    def holders(self, since: float) -> list[_Holder]:
        """Those of all locks, until a release has reached the server, and of all flights; of ended
        ones, whose followers may still have to be told, if they are younger than ``since``."""
        jobs = [job for job in self.jobs() if isinstance(job, (Renewal, FlightRenewal))]
        held = {*self.tokens(), *map(_held_by, jobs)}
        for each, (_, _, began) in self._holders.copy().items():
            if each not in held and (isinstance(each, bytes) or began <= since):
                self._holders.pop(each, None)
        for each in held - self._holders.keys():
            self._holders.setdefault(each, (None, None, Clock.monotonic()))
        return list(self._holders.values())

    def start(self, background: object) -> None:
        """Nothing needs a thread. One that waits for messages would move the clock by that."""

    def next_due(self) -> float:
        """The monotonic time of the next job."""
        with self.mutex:
            return min((worker.next_due() for worker in self.workers()), default=math.inf)

    def do_due(self, now: float) -> None:
        for worker in self.workers():
            with self.mutex:
                batch = worker.take_due(now)
            worker.serve(*batch)

    def hurry(self) -> None:
        super().hurry()
        self.do_due(time.monotonic())


def _held_by(job: Renewal | FlightRenewal) -> object:
    return job.hold.token if isinstance(job, Renewal) else job


def _forget_figures(of: Callable[[Server], bool]) -> None:
    with suppress(PartMissing):
        part("metrics").forget(of)


class _Wait(NamedTuple):
    """A wait on the clock.

    Attributes:
        who: the task or thread that waits; a thread stops its tasks, too.
        ready: whether it ends before ``end``.
        stopped: the thread of the one who waits, and one that waits for that by ``async_to_sync``.
    """

    who: object
    end: float
    ready: Callable[[], object]
    stopped: tuple[object, object]


class VirtualClock(Clock):
    """A clock that stands still unless it is moved: by ``advance()``; and by a wait, to what ends
    it, when all who hold a lock or compute a value wait on the clock, too. Renewals and the like
    happen as the time for them comes.
    """

    #: The seconds of real time in which others wait for a holder that does something else.
    real_wait = 2.0

    def __init__(self) -> None:
        #: Whole seconds; not far from the real time, by which locks from before the override end.
        self._now = float(int(Clock.monotonic()))
        self._unix_time = real.time() - self._now
        self._moving = Mutex()
        #: By their ids: a thread waits twice if a listener waits while it moves the clock.
        self._waits: dict[int, _Wait] = {}
        #: When, in real time, each began who waits without a deadline and for nobody.
        self._endless: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
        self.keeper = SteppedKeeper()

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        self._move_to(self._now + seconds)

    def _move_to(self, end: float) -> None:
        with self._moving:
            for _ in range(MAX_ROUNDS):
                if (due := self.keeper.next_due()) > end:
                    break
                self._now = max(due, self._now)
                self.keeper.do_due(self._now)
            self._now = max(end, self._now)

    def _move_on(self, me: object) -> bool:
        """Until something may have happened: a job of the keeper, or the end of a wait. Returns
        whether that was tried: not if somebody may end a wait otherwise."""
        with self._moving:
            waits = list(self._waits.copy().values())
            others = [wait for wait in waits if wait.who is not me]
            if any(wait.end <= self._now or wait.ready() for wait in others):
                return False  # It will go on at once.
            since = Clock.monotonic() - self.real_wait
            for caller, thread, began in self.keeper.holders(since):
                if caller is None:
                    alive = True
                else:
                    alive = thread.is_alive() if caller is thread else not caller.done()
                stopped = caller and any(
                    caller in (wait.who, *wait.stopped) or thread is wait.who for wait in waits
                )
                if alive and began > since and not stopped:
                    return False
            end = min((*(wait.end for wait in waits), self.keeper.next_due()))
            if not math.isinf(end):
                self._move_to(end)
            return True

    def _pauses(
        self, seconds: float, me: object, ready: Callable[[], object] = bool
    ) -> Generator[float]:
        """The pauses of a wait, in real time; in between it moves the clock."""
        executor = getattr(AsyncToSync.executors, "current", None)  # Where a thread waits for me.
        stopped = threading.current_thread(), getattr(executor, "_work_thread", None)
        wait = _Wait(me, self._now + seconds, ready, stopped)
        self._waits[id(wait)] = wait
        try:
            yield PAUSE_SECONDS  # Another thread or task may just begin.
            while self._now < wait.end and not ready():
                tried = self._move_on(me)
                if seconds < LONGEST_PIECE or not tried:
                    self._endless.pop(me, None)
                elif Clock.monotonic() > self._endless.setdefault(me, Clock.monotonic()) + 2:
                    raise AssertionError(_ENDLESS)
                yield 0.0 if tried and not math.isinf(self.keeper.next_due()) else PAUSE_SECONDS
        finally:
            del self._waits[id(wait)]

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._unix_time + self._now

    def parts(self, seconds: float) -> Iterator[float]:
        yield min(seconds, threading.TIMEOUT_MAX)

    def sleep(self, seconds: float) -> None:
        for pause in self._pauses(seconds, threading.current_thread()):
            real.sleep(pause)

    async def asleep(self, seconds: float) -> None:
        for pause in self._pauses(seconds, _caller()):
            await asyncio.sleep(pause)

    async def wait(self, tasks: Collection[Any], seconds: float) -> Any:
        def ready() -> bool:
            return any(task.done() for task in tasks)

        with closing(self._pauses(seconds, _caller(), ready)) as pauses:
            for pause in pauses:
                await asyncio.wait(tasks, timeout=pause or 0.001)
        return await asyncio.wait(tasks, timeout=0)

    def wait_for(
        self, condition: threading.Condition, ready: Callable[[], object], seconds: float | None
    ) -> bool:
        seconds = math.inf if seconds is None else seconds
        with closing(self._pauses(seconds, threading.current_thread(), ready)) as pauses:
            while not ready():
                condition.release()  # What the time brings may be for this wait.
                try:
                    pause = next(pauses, None)
                finally:
                    condition.acquire()
                if pause is None:
                    break
                condition.wait_for(ready, pause)
        return bool(ready())


class MemoryServer:
    """The server in memory that replaces all servers and caches.

    Args:
        clock: default: the real one.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock: Any = clock or Clock()
        self._prefix = f"{TESTING}{os.getpid()}-{next(_numbers)} "
        self._away = False
        #: The LOCATION in memory of what takes the place of a server.
        self._places: dict[tuple[object, ...], str] = {}
        if clock is not None:
            clock.keeper.tokens = self._tokens

    def _tokens(self) -> set[bytes]:
        found = set()
        for database in self._databases():
            with database.mutex:
                found |= {database.get(key) or b"" for key in database.zrange(INDEX, b"0", b"-1")}
        return found - {b""}

    @property
    def away(self) -> bool:
        """While true, every call that asks a server raises redis-py's ``ConnectionError``."""
        return self._away

    @away.setter
    def away(self, away: bool) -> None:
        self._away = away
        for database in self._databases():
            database.away = away
            if away:
                database.close_all()

    def held(self) -> list[str]:
        """The keys of all locks that are held, in alphabetical order."""
        found = {
            lock.key.decode(errors="surrogateescape")
            for database in self._databases()
            if not database.away
            for lock in list_held(client_of(database), b"", MAX_LOCKS).locks
        }
        return sorted(found)

    def lose(self, name: str | bytes) -> None:
        """End the lock at the key ``name``, as by a loss of data; its holder learns of it.

        Raises:
            KeyError: no lock is held there.
        """
        key = name if isinstance(name, bytes) else name.encode(errors="surrogateescape")
        if key.decode(errors="surrogateescape") not in (held := self.held()):
            raise KeyError(f"no lock is held at the key {name!r}; held are: {held}")
        for database in self._databases():
            with database.mutex:
                database.delete(key)
        keeper().hurry()

    def _databases(self) -> list[Database]:
        return [found for name, found in databases.copy().items() if name.startswith(self._prefix)]

    def _find_places(self) -> None:
        """Note which servers the caches lead to: a cache object that was made before the override
        must share its locks with the alias."""
        for alias in lock_caches():
            with suppress(ImproperlyConfigured, RedisError):
                place = server_of(lock_cache(alias)._lock_client()).database
                self._places[place] = self._location(alias, settings.CACHES[alias])

    def _location(self, alias: str, kept: dict[str, object]) -> str:
        return f"{self._prefix}{kept.get('LOCATION') or alias}"

    def _server(self, place: tuple[object, ...]) -> Server | None:
        """What takes the place of the server at ``place``; None for one of these."""
        if any(database in place for database in self._databases()):
            return None
        name = self._places.get(place, f"{self._prefix}{place}")
        database = databases.setdefault(
            name, Database(f"the memory of test server {self._prefix[8:-1]}")
        )
        database.away = self._away
        found = Server(client_of(database).connection_pool)
        found.stands_in = True
        return found

    def _caches(self, configs: Configs) -> Configs:
        """``configs`` with each in memory. Those with one LOCATION still share it."""
        return {
            alias: {
                **{name: kept[name] for name in _KEPT if name in kept},
                "BACKEND": "django_redis_lock.cache.LocMemCache",
                "LOCATION": self._location(alias, kept),
            }
            for alias, kept in configs.items()
        }

    def _has(self, server: Server) -> bool:
        return server.address.connection_kwargs.get("database") in self._databases()

    def _end(self) -> None:
        _forget_figures(self._has)
        if not isinstance(keeper(), SteppedKeeper):  # It has no thread, and may be used again.
            for job in keeper().jobs():
                keeper().discard(job)

    def _forget(self) -> None:
        for name in [name for name in list(databases) if name.startswith(self._prefix)]:
            del databases[name]


class _CachesInMemory:
    """A context manager: the setting CACHES in the memory of ``server``, also if it changes. Unlike
    ``override_settings`` it may end before the changes that began within it, as pytest's fixtures
    do."""

    #: Those that are entered; the last one follows changes.
    _entered: ClassVar[list[_CachesInMemory]] = []

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        #: What has the setting, and what it was there.
        self._before: list[tuple[Any, object]] = []
        self._made: list[Configs] = []

    def __enter__(self) -> None:
        self._entered.append(self)
        setting_changed.connect(self._changed, weak=False)
        self._replace()

    def __exit__(self, *exc_info: object) -> None:
        setting_changed.disconnect(self._changed)
        self._entered.remove(self)
        while self._before:
            holder, value = self._before.pop()
            if value is None:
                del holder.CACHES
            else:
                holder.CACHES = value
        self._announce(enter=False)

    def _changed(self, *, setting: str, **kwargs: object) -> None:
        is_own = any(settings.CACHES is made for made in self._made)
        if setting == "CACHES" and not is_own and self is self._entered[-1]:
            self._replace()

    def _replace(self) -> None:
        holder = settings._wrapped
        self._before.append((holder, vars(holder).get("CACHES")))
        holder.CACHES = self._server._caches(settings.CACHES)
        self._made.append(holder.CACHES)
        self._announce(enter=True)
        for alias in settings.CACHES:
            # Its server must be there before the first question.
            lock_cache(alias)._lock_client()
        self._server.away = self._server.away

    def _announce(self, *, enter: bool) -> None:
        vars(settings).pop("CACHES", None)  # As each change of ``_wrapped`` does.
        setting_changed.send(type(self), setting="CACHES", value=settings.CACHES, enter=enter)


class override(TestContextDecorator):
    """Keep all locks and caches of this process in memory: those of each alias in CACHES, whatever
    its BACKEND is, and the locks made by hand. Time passes only when the test says so, or waits.

    A context manager, and a decorator of functions, coroutine functions and ``TestCase`` classes::

        with override() as server:
            nightly_report()                      # takes its lock in memory
            server.lose(":lock:1:nightly")        # its holder learns of the loss
            server.away = True                    # every call raises redis-py's ConnectionError
            server.clock.advance(60)              # a minute later

    Args:
        server: default: a new one with a ``VirtualClock``.
    """

    def __init__(self, server: MemoryServer | None = None) -> None:
        super().__init__()
        if not isinstance(server, (MemoryServer, type(None))):
            raise TypeError(f"override() takes a MemoryServer, not {server!r}; write @override()")
        self._given = server
        self._undo = ExitStack()

    def __enter__(self) -> MemoryServer:  # type: ignore[override]  # Django's gives anything
        return self.enable()

    def enable(self) -> MemoryServer:
        server = self._given or MemoryServer(VirtualClock())
        with ExitStack() as undo:
            if self._given is None:
                undo.callback(server._forget)
            undo.callback(time.use, time.clock)
            time.use(server.clock)
            undo.callback(use_keeper, keeper())
            _forget_figures(server._has)  # Its keeper gets what was counted before.
            use_keeper(getattr(server.clock, "keeper", None) or Keeper())
            undo.callback(server._end)
            # A thread would have another database connection, outside the test's transaction.
            undo.callback(use_background, use_background(InCaller()))
            if settings.configured:
                server._find_places()
            undo.enter_context(standing_in(server._server))
            if settings.configured:
                undo.enter_context(_CachesInMemory(server))
            self._undo = undo.pop_all()
        return server

    def disable(self) -> None:
        self._undo.close()


class RedisLocksMixin:
    """For ``unittest.TestCase``: each test runs in ``override()``; the server is
    ``self.redis_locks``."""

    redis_locks: MemoryServer

    def setUp(self) -> None:
        overriding = override()
        self.redis_locks = overriding.enable()
        self.addCleanup(overriding.disable)  # type: ignore[attr-defined]  # of the TestCase
        super().setUp()  # type: ignore[misc]  # of the TestCase
