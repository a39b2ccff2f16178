"""Values in a cache of another backend, such as Django's DummyCache in tests: each caller computes
its own. Loaded when there is one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.conf import settings
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache

from ..conf import SETTING, Conf, GetOrSetOptions, Timeout
from ..threads import get_logger
from .lock_factory import BACKEND, LockCache, lock_cache
from .on_commit import OnCommit
from .reading import MISSING

logger = get_logger("django_redis_lock.flights")

#: What raises BackendCannotLock.
_OF_LOCKS = frozenset(
    ("lock", "alock", "command_lock", "held_locks", "locked_get_or_set", "reset_all")
)
#: Aliases and backends of which the log knows.
_logged: set[tuple[str, str]] = set()


class PlainCache:
    """The methods of ``RedisCache`` for values, without one computation for all callers. All others
    are those of ``cache``.

    Args:
        alias: in CACHES.
        cache: any of Django's caches.
    """

    computes_once = False

    def __init__(self, alias: str, cache: BaseCache) -> None:
        self._alias, self._cache = alias, cache
        self.conf = Conf(settings.CACHES[alias].get("OPTIONS"))

    def __getattr__(self, name: str) -> Any:
        return getattr(lock_cache(self._alias) if name in _OF_LOCKS else self._cache, name)

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    # -- one value -----------------------------------------------------------------------------

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> Any:
        self._check(timeout, options)
        value = self._cache.get(key, MISSING, version)
        if value is MISSING:
            value = self.compute(key, default, timeout, version)
        return value

    async def aget_or_set(
        self,
        key: str,
        default: Any,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> Any:
        self._check(timeout, options)
        value = await self._cache.aget(key, MISSING, version)
        if value is MISSING:
            value = await self.acompute(key, default, timeout, version)
        return value

    def compute(
        self,
        key: str,
        default: Any,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> Any:
        self._check(timeout, options)
        value = default() if callable(default) else default
        self._cache.set(key, value, _lifetime(timeout, value), version)
        return value

    async def acompute(
        self,
        key: str,
        default: Any,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> Any:
        self._check(timeout, options)
        value = await _called(default) if callable(default) else default
        await self._cache.aset(key, value, _lifetime(timeout, value), version)
        return value

    # -- several -------------------------------------------------------------------------------

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, Any]],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        self._check(timeout, options)
        names = list(dict.fromkeys(keys))
        values = self._cache.get_many(names, version)
        if missing := [name for name in names if name not in values]:
            for name, value in default_many(missing).items():
                if name in missing:
                    values[name] = value
                    self._cache.set(name, value, _lifetime(timeout, value), version)
        return {name: values[name] for name in names if name in values}

    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        self._check(timeout, options)
        names = list(dict.fromkeys(keys))
        values = await self._cache.aget_many(names, version)
        if missing := [name for name in names if name not in values]:
            for name, value in (await _called(default_many, missing)).items():
                if name in missing:
                    values[name] = value
                    await self._cache.aset(name, value, _lifetime(timeout, value), version)
        return {name: values[name] for name in names if name in values}

    # -- what is not true any more: there is no stale value to serve -----------------------------

    def mark_stale(self, key: str, version: int | None = None, *, stale: float = SETTING) -> bool:
        return self._cache.delete(key, version)

    async def amark_stale(
        self, key: str, version: int | None = None, *, stale: float = SETTING
    ) -> bool:
        return await self._cache.adelete(key, version)

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        return sum(self._cache.delete(key, version) for key in keys)

    async def amark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        return sum([await self._cache.adelete(key, version) for key in keys])

    def on_commit(self, using: str | None = None, *, robust: bool = False) -> OnCommit:
        return PlainOnCommit(self, using, robust)

    def _check(self, timeout: Any, options: dict[str, Any]) -> None:
        """What is refused in production is refused in a test."""
        if timeout is not SETTING and timeout is not DEFAULT_TIMEOUT:
            GetOrSetOptions.check_timeout(timeout)
        GetOrSetOptions.check(**options)
        self.log_backend()

    def log_backend(self) -> None:
        """Once in a process, that values are computed more often than the project expects."""
        kind = type(self._cache.client if isinstance(self._cache, LockCache) else self._cache)
        name = kind.__qualname__
        if (self._alias, name) not in _logged:
            _logged.add((self._alias, name))
            logger.warning(
                "Each caller computes its own values of the cache %r: callers of a %s cannot wait "
                "for each other. In CACHES[%r] write BACKEND: %r, with one primary server",
                *(self._alias, name, self._alias, BACKEND),
            )


class PlainOnCommit(OnCommit):
    """Keys of another backend are made when they are used."""

    def delete_many(self, keys: Iterable[str], version: int | None = None) -> None:
        names = list(keys)
        self.call(lambda: self._cache.delete_many(names, version))

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> None:
        self.delete_many(keys, version)


def _lifetime(timeout: Any, value: Any) -> Any:
    if timeout is SETTING:
        return DEFAULT_TIMEOUT
    return timeout(value) if callable(timeout) else timeout


async def _called(function: Callable[..., Any], *args: Any) -> Any:
    value = function(*args) if iscoroutinefunction(function) else sync_to_async(function)(*args)
    while inspect.isawaitable(value):
        value = await value
    return value
