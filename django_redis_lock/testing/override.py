"""``override()``: the locks and caches of this process in memory, for the tests of projects."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, suppress
from typing import Any

from django.conf import settings
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.test.utils import TestContextDecorator, override_settings
from redis.exceptions import RedisError

from ..cache import lock_cache, lock_caches
from ..clock import Clock, time
from ..inventory import list_held
from ..keeper import Keeper, keeper, use_keeper
from ..memory import Database, client_of, databases
from ..transport import Server, server_of, standing_in
from .clock import VirtualClock

#: More locks than a test holds.
MAX_LOCKS = 100_000

_numbers = itertools.count(1)


class MemoryServer:
    """What takes the place of all servers and caches.

    Args:
        clock: left out, the real one.
    """

    def __init__(self, clock: VirtualClock | None = None) -> None:
        self.clock: Any = clock or Clock()
        self._prefix = f"testing {next(_numbers)} "
        self._away = False
        #: The LOCATION in memory of what takes the place of a server.
        self._places: dict[tuple[Any, ...], str] = {}

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
        """End the lock at the key ``name`` as a server that forgot it would; its holder is told.

        Raises:
            KeyError: no lock is held there.
        """
        key = name if isinstance(name, bytes) else name.encode(errors="surrogateescape")
        if (held := self.held()) and key.decode(errors="surrogateescape") in held:
            for database in self._databases():
                with database.mutex:
                    database.delete(key)
            keeper().hurry(time.monotonic())
            return
        raise KeyError(f"no lock is held at the key {name!r}; held are: {held}")

    def _databases(self) -> list[Database]:
        return [found for name, found in databases.items() if name.startswith(self._prefix)]

    def _find_places(self) -> None:
        """Note which servers the caches lead to: a cache object that was made before the override
        must share its locks with the alias."""
        for alias in lock_caches():
            with suppress(ImproperlyConfigured, RedisError):
                place = server_of(lock_cache(alias)._lock_client()).database
                self._places[place] = self._location(alias, settings.CACHES[alias])

    def _location(self, alias: str, kept: dict[str, Any]) -> str:
        return f"{self._prefix}{kept.get('LOCATION') or alias}"

    def _server(self, place: tuple[Any, ...]) -> Server | None:
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

    def _caches(self) -> dict[str, dict[str, Any]]:
        """CACHES with each in memory. Those with one LOCATION still share it."""
        return {
            alias: {
                **{name: kept[name] for name in _KEPT if name in kept},
                "BACKEND": "django_redis_lock.cache.LocMemCache",
                "LOCATION": self._location(alias, kept),
            }
            for alias, kept in settings.CACHES.items()
        }

    def _forget(self) -> None:
        for name in [name for name in databases if name.startswith(self._prefix)]:
            del databases[name]


#: What else of a cache's settings holds in memory.
_KEPT = ("KEY_PREFIX", "KEY_FUNCTION", "VERSION", "TIMEOUT", "OPTIONS")


class override(TestContextDecorator):
    """Keep all locks and caches of this process in memory: those of each alias in CACHES, whatever
    its BACKEND is, and the locks made by hand. Time passes only when the test says so, or waits.

    A context manager, and a decorator of functions, coroutine functions and ``TestCase`` classes::

        with override() as server:
            nightly_report()                      # takes its lock in memory
            server.lose(":1:lock:nightly")        # the holder is told, as by an expired lock
            server.away = True                    # every call raises redis-py's ConnectionError
            server.clock.advance(60)              # a minute later

    Args:
        server: left out, a new one with a ``VirtualClock``.
    """

    def __init__(self, server: MemoryServer | None = None) -> None:
        super().__init__()
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
            use_keeper(getattr(server.clock, "keeper", None) or Keeper())
            if settings.configured:
                server._find_places()
            undo.enter_context(standing_in(server._server))
            if settings.configured:
                undo.enter_context(override_settings(CACHES=server._caches()))
                for alias in settings.CACHES:
                    caches[alias]  # So that its server is there before the first question to it.
                server.away = server.away
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
