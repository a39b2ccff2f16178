"""``"BACKEND": "django_redis_lock.cache.LocMemCache"``, for those who have no Redis."""

from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, ClassVar

from django.conf import settings
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.cache.backends.locmem import LocMemCache as DjangoLocMemCache

from ..clock import time
from ..fallback import FallbackLock
from ..inventory import delete_matching, empty
from ..locking import Lock
from ..memory import Database, client_of, databases
from ..protocol import Call, check_name_in_cache, flight_key, is_reserved
from ..singleflight import LET_GO, ON_VALUES
from ..threads import free_after_fork
from ..transport import run
from .methods import Writes
from .reading import MISSING, originals

_ON_VALUES = frozenset(script.source for script in ON_VALUES)


class LocMemServer(Database):
    """The server of one LOCATION, to which the values of Django's cache are strings."""

    def __init__(self, cache: Any) -> None:
        super().__init__("the memory of this process")
        self.client = client_of(self)
        self.cache = cache
        self._of_locks = False  # Whether a script of locks is running.

    def _run_script(self, source: str, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        self._of_locks = source not in _ON_VALUES
        try:
            return super()._run_script(source, keys, args)
        finally:
            self._of_locks = False

    def _is_value(self, key: bytes) -> bool:
        """Whether ``key`` is one of Django's, and not a lock's."""
        return not (self._of_locks or key in self._values or is_reserved(key))

    def _value(self, key: bytes) -> Any:
        if not self._is_value(key):
            return super()._value(key)
        with self.cache._lock:
            name = key.decode()
            return None if self.cache._has_expired(name) else self.cache._cache[name]

    def _end(self, key: bytes) -> float | None:
        if not self._is_value(key):
            return super()._end(key)
        end = self.cache._expire_info.get(key.decode())
        return None if end is None else end * 1000

    def _put(self, key: bytes, value: Any, end: float | None) -> None:
        if not self._is_value(key):
            super()._put(key, value, end)
            return
        with self.cache._lock:
            self.cache._set(key.decode(), value)
        self._set_end(key, end)

    def _set_end(self, key: bytes, end: float | None) -> None:
        if not self._is_value(key):
            super()._set_end(key, end)
            return
        with self.cache._lock:
            self.cache._expire_info[key.decode()] = None if end is None else end / 1000

    def _drop(self, key: bytes) -> None:
        super()._drop(key)
        if self._is_value(key):
            with self.cache._lock:
                self.cache._delete(key.decode())


_mutex = free_after_fork(threading.Lock())


@lru_cache(maxsize=1)
def _host() -> Any:
    """A client of no server, so that this host's lock is taken instead."""
    project = getattr(settings, "BASE_DIR", None) or settings.SETTINGS_MODULE
    nowhere = Database(f"this host, for {project}")
    nowhere.away = True
    return client_of(nowhere)


class LocMemCache(Writes, DjangoLocMemCache):
    """Django's cache in local memory, with the locks and the ``get_or_set`` of ``RedisCache``.
    Caches with the same LOCATION share values and locks, also between threads and event loops."""

    in_memory = True
    _cache: Any
    _expire_info: dict[str, float | None]
    _lock: threading.Lock

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        with _mutex:
            if location not in databases:
                databases[location] = LocMemServer(self)
            self._server: Any = databases[location]

    def _lock_client(self) -> Any:
        return self._server.client

    def _check_client(self, client: Any) -> None:
        if client is not None:
            raise ValueError("client needs Redis: leave it out, this cache's locks are in memory")

    def command_lock(self, key: str, **options: Any) -> Lock:
        """A lock of this host: a file, as with ``ON_REDIS_DOWN = "local"``. Other processes cannot
        see this one's memory."""
        timeout = options.pop("timeout", self.conf.TIMEOUT)
        del options["replicas"]
        folder = self.conf.LOCAL_LOCK_FOLDER
        name = self._lock_name(check_name_in_cache(key), None)
        lock = FallbackLock(
            _host(), name, timeout, on_redis_down="local", local_folder=folder, **options
        )
        return self._configured(lock, key)

    # -- reading -----------------------------------------------------------------------------

    _methods: ClassVar = originals(DjangoLocMemCache, "get")

    def _get_observed(
        self, key: str, version: int | None, read: Callable[..., Any]
    ) -> tuple[Any, Any]:
        return read(None), self.get(key, MISSING, version)

    def _read_or_join(self, key: str, version: int | None) -> Any:
        if self._is_replaced("get"):
            return self.get(key, MISSING, version)
        made = self.make_key(key, version)  # A key that is there need not be validated again.
        with self._lock:
            if self._has_expired(made):
                return MISSING
            pickled = self._cache[made]
            self._cache.move_to_end(made, last=False)
        return pickle.loads(pickled)

    def _read_many(self, names: list[str], version: int | None) -> tuple[dict[str, Any], None]:
        return self.get_many(names, version), None

    def _encode(self, value: Any) -> bytes:
        return pickle.dumps(value, self.pickle_protocol)

    def _decode(self, stored: bytes) -> Any:
        return pickle.loads(stored)

    def _has_expired(self, key: str) -> bool:
        end = self._expire_info.get(key, -1)
        return end is not None and end <= time.time()

    def get_backend_timeout(self, timeout: float | None = DEFAULT_TIMEOUT) -> float | None:
        timeout = self._timeout(timeout)
        if timeout is None:
            return None
        return time.time() + (timeout or -1)

    # -- writes end flights ------------------------------------------------------------------

    def _end_flight(self, key: str, version: int | None) -> None:
        flight = flight_key(self._encoded_key(key, version))
        if self._server.exists(flight):
            run(self._server.client, Call(LET_GO, (flight,), ()))

    def set(  # type: ignore[override]  # says whether it was set, as RedisCache's
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: Any = None,
        nx: bool = False,
        xx: bool = False,
    ) -> bool:
        """As of ``RedisCache``; ``client`` is refused."""
        self._check_client(client)
        if nx and xx:
            raise ValueError("nx and xx are mutually exclusive")
        with self._server.mutex:
            if (nx or xx) and self.has_key(key, version) == nx:
                return False
            seconds = self._timeout(timeout)
            if nx and seconds is not None and seconds <= 0:
                return True  # As in django-redis: there is nothing to store or to delete.
            super().set(key, value, timeout, version)
            self._end_flight(key, version)
            return True

    def add(
        self,
        key: str,
        value: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
    ) -> bool:
        return self.set(key, value, timeout, version, nx=True)

    def delete(self, key: str, version: int | None = None) -> bool:
        with self._server.mutex:
            deleted: bool = super().delete(key, version)
            self._end_flight(key, version)
            return deleted

    def incr(self, key: str, delta: int = 1, version: int | None = None) -> Any:
        with self._server.mutex:
            value = super().incr(key, delta, version)
            self._end_flight(key, version)
            return value

    def incr_version(self, key: str, delta: int = 1, version: int | None = None) -> int:
        """As of ``RedisCache``: the value keeps its lifetime."""
        with self._server.mutex:
            return self._change_version(self, key, delta, version, {})

    async def aincr_version(self, key: str, delta: int = 1, version: int | None = None) -> int:
        """``incr_version`` for asyncio; Django's own does not keep the lifetime."""
        return self.incr_version(key, delta, version)

    def touch(
        self, key: str, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None
    ) -> bool:
        with self._server.mutex:
            touched: bool = super().touch(key, timeout, version)
            seconds = self._timeout(timeout)
            if seconds is not None and seconds <= 0:  # It deletes the value.
                self._end_flight(key, version)
            return touched

    def clear(self) -> None:
        """Delete all values at this LOCATION, with ``CLEAR = "prefix"`` only those with this
        cache's KEY_PREFIX and VERSION. Held locks stay. Raises as that of ``RedisCache``."""
        with self._server.mutex:
            if self.conf.CLEAR == "database":
                super().clear()
                empty(self._server.client)
                return
            start, end = self._affixes()
            with self._lock:
                for key in [k for k in self._cache if k.startswith(start) and k.endswith(end)]:
                    del self._cache[key], self._expire_info[key]
            delete_matching(self._server.client, self.own_pattern().encode())

    # -- the names of django-redis -------------------------------------------------------------

    def pttl(self, key: str, version: int | None = None) -> int | None:
        """Milliseconds left; None without end, 0 if there is no such value."""
        made = self.make_and_validate_key(key, version)
        with self._lock:
            if self._has_expired(made):
                return 0
            end = self._expire_info[made]
        return None if end is None else math.ceil((end - time.time()) * 1000)

    def ttl(self, key: str, version: int | None = None) -> int | None:
        """``pttl`` in seconds."""
        left = self.pttl(key, version)
        return None if left is None else (left + 500) // 1000

    def persist(self, key: str, version: int | None = None) -> bool:
        """Keep the value without end."""
        return bool(self.pttl(key, version)) and self.touch(key, None, version)

    def expire(self, key: str, timeout: float | timedelta, version: int | None = None) -> bool:
        """Keep the value for ``timeout`` (seconds) from now on."""
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        return self.touch(key, seconds, version)

    def pexpire(self, key: str, timeout: float | timedelta, version: int | None = None) -> bool:
        """``expire`` in milliseconds."""
        whole = timeout if isinstance(timeout, timedelta) else timedelta(milliseconds=timeout)
        return self.expire(key, whole, version)

    def expire_at(self, key: str, when: float | datetime, version: int | None = None) -> bool:
        """Keep the value until ``when`` (a Unix time in seconds)."""
        at = when.timestamp() if isinstance(when, datetime) else when
        return self.touch(key, at - time.time(), version)

    def pexpire_at(self, key: str, when: float | datetime, version: int | None = None) -> bool:
        """``expire_at`` in milliseconds."""
        at = when if isinstance(when, datetime) else when / 1000
        return self.expire_at(key, at, version)

    def keys(self, search: str, version: int | None = None) -> list[str]:
        """The keys that match a pattern, such as ``"report-*"``."""
        pattern = self.make_key(search, version)
        start = len(pattern) - len(search)
        with self._lock:
            found = [key for key in self._cache if fnmatchcase(key, pattern)]
            return [key[start:] for key in found if not self._has_expired(key)]

    def iter_keys(
        self, search: str, itersize: int | None = None, version: int | None = None
    ) -> Iterator[str]:
        return iter(self.keys(search, version))

    def delete_pattern(
        self, pattern: str, version: int | None = None, itersize: int | None = None
    ) -> int:
        """Returns how many values were deleted."""
        with self._server.mutex:
            deleted = sum(self.delete(key, version) for key in self.keys(pattern, version))
            delete_matching(self._server.client, self._encoded_key(pattern, version))
            return deleted
