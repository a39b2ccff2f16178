"""Values in a cache of another backend, such as Django's DummyCache in tests: each caller computes
its own. Loaded when there is one."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache

from ..cache import BACKEND, MISSING, OnCommit, RedisCache, lock_cache
from ..conf import SETTING, GetOrSetOptions, Timeout
from ..steps import Steps, adrive, drive
from ..threads import get_logger

R = TypeVar("R")

logger = get_logger("django_redis_lock.flights")


#: What raises BackendCannotLock.
_OF_LOCKS = {"lock", "alock", "command_lock", "held_locks", "locked_get_or_set", "reset_all"}
#: Aliases and backends of which the log knows.
_logged: dict[tuple[str, str], object] = {}


class Do(NamedTuple):
    """Calls a method of a cache, or a function of the user."""

    cache: BaseCache

    def method(self, name: str, *args: object) -> object:
        return getattr(self.cache, name)(*args)

    def call(self, function: Callable[..., object], *args: object) -> object:
        return function(*args)


class AsyncDo(Do):
    def method(self, name: str, *args: object) -> object:
        return getattr(self.cache, f"a{name}")(*args)

    async def call(self, function: Callable[..., object], *args: object) -> object:
        is_async = iscoroutinefunction(function)
        value = function(*args) if is_async else sync_to_async(function)(*args)
        while inspect.isawaitable(value):
            value = await value
        return value


def _twins(steps: Callable[..., Steps[R]]) -> tuple[Callable[..., R], Callable[..., Awaitable[R]]]:
    """The method that runs ``steps``, for threads and for tasks."""

    def method(self: PlainCache, *args: object, **options: object) -> R:
        return drive(steps(self, Do(self._cache), *args, **options))

    async def amethod(self: PlainCache, *args: object, **options: object) -> R:
        return await adrive(steps(self, AsyncDo(self._cache), *args, **options))

    return method, amethod


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

    def __getattr__(self, name: str) -> Any:
        return getattr(lock_cache(self._alias) if name in _OF_LOCKS else self._cache, name)

    def __contains__(self, key: str) -> bool:
        return key in self._cache

    # -- the steps of the methods ---------------------------------------------------------------

    def _get_or_set(
        self,
        do: Do,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: object,
    ) -> Steps[object]:
        self._check(timeout, options)
        value = yield do.method("get", key, MISSING, version)
        if value is MISSING:
            value = yield from self._compute(do, key, default, timeout, version)
        return value

    def _compute(
        self,
        do: Do,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: object,
    ) -> Steps[object]:
        self._check(timeout, options)
        value = (yield do.call(default)) if callable(default) else default
        yield do.method("set", key, value, _lifetime(timeout, value), version)
        return value

    def _get_or_set_many(
        self,
        do: Do,
        keys: Iterable[str],
        default_many: Callable[[list[str]], object],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: object,
    ) -> Steps[dict[str, object]]:
        self._check(timeout, options)
        names = list(dict.fromkeys(keys))
        values = yield do.method("get_many", names, version)
        if missing := [name for name in names if name not in values]:
            for name, value in (yield do.call(default_many, missing)).items():
                if name in missing:
                    values[name] = value
                    yield do.method("set", name, value, _lifetime(timeout, value), version)
        return {name: values[name] for name in names if name in values}

    # What is not true any more: there is no stale value to serve.
    def _mark_stale_many(
        self, do: Do, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> Steps[int]:
        deleted = 0
        for key in keys:
            deleted += bool((yield do.method("delete", key, version)))  # None, of some backends.
        return deleted

    def _mark_stale(self, do: Do, key: str, *args: Any, **options: Any) -> Steps[bool]:
        return bool((yield from self._mark_stale_many(do, [key], *args, **options)))

    get_or_set, aget_or_set = _twins(_get_or_set)
    compute, acompute = _twins(_compute)
    get_or_set_many, aget_or_set_many = _twins(_get_or_set_many)
    mark_stale, amark_stale = _twins(_mark_stale)
    mark_stale_many, amark_stale_many = _twins(_mark_stale_many)

    def on_commit(self, using: str | None = None, *, robust: bool = False) -> OnCommit:
        return PlainOnCommit(self, using, robust)

    def _check(self, timeout: Timeout, options: dict[str, object]) -> None:
        """What is refused in production is refused in a test."""
        if timeout is not SETTING and timeout is not DEFAULT_TIMEOUT:
            GetOrSetOptions.check_timeout(timeout)
        GetOrSetOptions.check(**options)
        self.log_backend()

    def log_backend(self) -> None:
        """Once in a process, that values are computed more often than the project expects."""
        kind = type(self._cache.client if isinstance(self._cache, RedisCache) else self._cache)
        name = kind.__qualname__
        if _logged.setdefault((self._alias, name), mine := object()) is mine:
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


def _lifetime(timeout: Timeout, value: object) -> object:
    if timeout is SETTING:
        return DEFAULT_TIMEOUT
    return timeout(value) if callable(timeout) else timeout
