"""``cached()``: a function whose results are cached, each computed once at a time."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast, overload

from asgiref.sync import iscoroutinefunction
from django.core.cache.backends.base import DEFAULT_TIMEOUT

from ..cache import GetOrSetOptions, RedisCache, lock_cache
from ..events import as_group
from .key_template import namer

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache import GetOrSetArguments

__all__ = ["CachedFunction", "cached"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class CachedFunction(Protocol[P, R_co]):
    """What ``cached()`` makes of a function. Of a coroutine function all three are awaited."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Delete the result for these arguments; returns whether there was one. The result of a
        computation under way is not stored."""

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute and store the result for these arguments, even if there is one. Until it is
        stored, other callers get the old one, or wait if there is none."""


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
    **options: Unpack[GetOrSetArguments],
) -> Callable[[Callable[P, R]], CachedFunction[P, R]]: ...
def cached(target: Any = None, /, **options: Any) -> Any:
    """Cache the results of a function; each missing result is computed once, by one caller for all.

    ``@cached`` alone for a function without arguments, ``@cached("report-{year}", timeout=60)``
    for others, functions and coroutine functions alike::

        report(2024)             # from the cache, or computed
        report.refresh(2024)     # computed and stored, even if there is one
        report.invalidate(2024)  # deleted

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
    """The options of one use of ``cached()``."""

    def __init__(
        self,
        *,
        key: str | Callable[..., str] | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        using: str = "default",
        **options: Unpack[GetOrSetArguments],
    ) -> None:
        if key is not None and not callable(key) and not isinstance(key, str):
            raise TypeError(f"key must be a str, a callable or None, not {key!r}")
        if isinstance(key, str) and not key.strip():
            raise ValueError("key must not be empty")
        self.key = key
        self.using = using
        self.version = version
        self.options = {"timeout": timeout, "version": version, **GetOrSetOptions.check(**options)}

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
        self.options["group"] = self.options.get("group") or as_group(template)
        return (self._tasks if iscoroutinefunction(function) else self._threads)(function, name_of)

    def _threads(self, function: Callable[..., Any], name_of: Callable[..., str]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            return _cache(self.using).get_or_set(name_of(args, kwargs), compute, **self.options)

        def refresh(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            return _cache(self.using).compute(name_of(args, kwargs), compute, **self.options)

        def invalidate(*args: Any, **kwargs: Any) -> bool:
            return bool(_cache(self.using).delete(name_of(args, kwargs), self.version))

        return _with(call, refresh=refresh, invalidate=invalidate)

    def _tasks(self, function: Callable[..., Any], name_of: Callable[..., str]) -> Any:
        @functools.wraps(function)
        async def call(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            cache = _cache(self.using)
            return await cache.aget_or_set(name_of(args, kwargs), compute, **self.options)

        async def refresh(*args: Any, **kwargs: Any) -> Any:
            compute = functools.partial(function, *args, **kwargs)
            cache = _cache(self.using)
            return await cache.acompute(name_of(args, kwargs), compute, **self.options)

        async def invalidate(*args: Any, **kwargs: Any) -> bool:
            cache = _cache(self.using)
            return bool(await cache.adelete(name_of(args, kwargs), self.version))

        return _with(call, refresh=refresh, invalidate=invalidate)


def _with(function: Any, **methods: Callable[..., Any]) -> Any:
    for name, method in methods.items():
        setattr(function, name, method)
    return function


def _cache(alias: str) -> RedisCache:
    return cast(RedisCache, lock_cache(alias))
