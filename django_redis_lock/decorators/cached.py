"""``cached()``: a function whose results are cached, each computed once at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.core.cache import caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured

from ..cache import SETTING, OnWaitTimeout, RedisCache
from ..events import as_group, check_group
from .key_template import namer

__all__ = ["CachedFunction", "cached", "computing_cache"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class CachedFunction(Protocol[P, R_co]):
    """What ``cached()`` makes of a function. Of a coroutine function all three are awaited."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Forget the result for these arguments; whether there was one. A computation under way
        is not stored any more."""

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the result for these arguments anew, and keep it. Meanwhile others get the old
        one, or wait for this one if there is none."""


@overload
def cached(function: Callable[P, R], /) -> CachedFunction[P, R]: ...
@overload
def cached(
    template: str | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    timeout: float | None = DEFAULT_TIMEOUT,
    version: int | None = None,
    using: str = "default",
    stale: float = ...,
    wait: float = ...,
    on_wait_timeout: OnWaitTimeout = ...,
    jitter: float = ...,
    background: bool = ...,
    error_ttl: float = ...,
    group: str | None = None,
) -> Callable[[Callable[P, R]], CachedFunction[P, R]]: ...
def cached(target: Any = None, /, **options: Any) -> Any:
    """Keep what a function returns; a missing result is computed once, by one caller for all.

    ``@cached`` alone for a function without arguments, ``@cached("report-{year}", timeout=60)``
    for others, functions and coroutine functions alike::

        report(2024)             # from the cache, or computed
        report.refresh(2024)     # computed anew, and kept
        report.invalidate(2024)  # forgotten

    Args:
        key: the value's key, a template over the arguments of the call; or, by keyword, a callable
            that takes them. Left out: the dotted name of the function.
        using: the cache alias.
        timeout, version, stale, wait, on_wait_timeout, jitter, background, error_ttl: as for
            ``cache.get_or_set``.
        group: under which the results are counted in metrics; None: the template, or else the
            dotted name of the function.

    Raises:
        TypeError, ValueError: an option makes no sense, the template names an argument that the
            function does not have, or a function with arguments has no key.
    """
    if callable(target):
        return Cached().wrap(target)
    if target is not None:
        if options.get("key") is not None:
            raise TypeError("cached() takes the key once")
        options["key"] = target
    return Cached(**options).wrap


class Cached:
    """What ``cached()`` was told."""

    def __init__(
        self,
        *,
        key: str | Callable[..., str] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        using: str = "default",
        stale: float = SETTING,
        wait: float = SETTING,
        on_wait_timeout: OnWaitTimeout = SETTING,
        jitter: float = SETTING,
        background: bool = SETTING,
        error_ttl: float = SETTING,
        group: str | None = None,
    ) -> None:
        if key is not None and not callable(key) and not isinstance(key, str):
            raise TypeError(f"key must be a str, a callable or None, not {key!r}")
        if isinstance(key, str) and not key.strip():
            raise ValueError("key must not be empty")
        self.key = key
        self.group = check_group(group)
        self.using = using
        self.place: dict[str, Any] = {"timeout": timeout, "version": version}
        self.options: dict[str, Any] = {
            "stale": stale,
            "wait": wait,
            "on_wait_timeout": on_wait_timeout,
            "jitter": jitter,
            "background": background,
            "error_ttl": error_ttl,
        }

    def wrap(self, function: Callable[..., Any]) -> Any:
        if isinstance(function, type) or not hasattr(function, "__qualname__"):
            raise TypeError(f"cached() decorates functions, not {function!r}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(f"cached() cannot keep what {function!r} gives: it gives it only once")
        dotted = f"{function.__module__}.{function.__qualname__}"
        if self.key is None and inspect.signature(function).parameters:
            raise ValueError(f"{dotted} has arguments: give a key that names them, as in {{pk}}")
        name_of = namer(self.key, function, dotted)
        template = self.key if isinstance(self.key, str) else dotted
        self.options["group"] = self.group or as_group(template)
        return (self._tasks if iscoroutinefunction(function) else self._threads)(function, name_of)

    def _threads(self, function: Callable[..., Any], name_of: Callable[..., str]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            terms = {**self.place, **self.options}
            return computing_cache(self.using).get_or_set(name_of(args, kwargs), compute, **terms)

        def refresh(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            terms = {**self.place, **self.options}
            return computing_cache(self.using).compute(name_of(args, kwargs), compute, **terms)

        def invalidate(*args: Any, **kwargs: Any) -> bool:
            return bool(computing_cache(self.using).delete(name_of(args, kwargs), self._version))

        return _with(call, refresh=refresh, invalidate=invalidate)

    def _tasks(self, function: Callable[..., Any], name_of: Callable[..., str]) -> Any:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            terms = {**self.place, **self.options}
            cache = computing_cache(self.using)
            return await cache.aget_or_set(name_of(args, kwargs), compute, **terms)

        async def refresh(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            terms = {**self.place, **self.options}
            cache = computing_cache(self.using)
            return await cache.acompute(name_of(args, kwargs), compute, **terms)

        async def invalidate(*args: Any, **kwargs: Any) -> bool:
            cache = computing_cache(self.using)
            return bool(await cache.adelete(name_of(args, kwargs), self._version))

        return _with(call, refresh=refresh, invalidate=invalidate)

    @property
    def _version(self) -> int | None:
        version: int | None = self.place["version"]
        return version


def _with(function: Any, **methods: Callable[..., Any]) -> Any:
    for name, method in methods.items():
        setattr(function, name, method)
    return function


def computing_cache(alias: str) -> RedisCache:
    """The cache of that alias.

    Raises:
        ImproperlyConfigured: its backend is another.
    """
    cache = caches[alias]
    if not isinstance(cache, RedisCache):
        raise ImproperlyConfigured(
            f"the cache {alias!r} cannot compute a value once: its BACKEND must be "
            '"django_redis_lock.cache.RedisCache"'
        )
    return cache
