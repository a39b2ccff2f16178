"""``cached()`` and ``cached_page()``."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from ..activity import request_of
from ..cache import NamedKey, value_cache
from ..conf import SETTING, GetOrSetOptions, Timeout
from ..events import as_group
from ..extension import part
from ..protocol.validation import check_seconds
from ..threads import check_plain
from .key_template import Args, Kwargs, Template, made_for_task, namer, short
from .section import like
from .targets import STORED, Target

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache import FunctionOnCommit, GetOrSetArguments

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
V = TypeVar("V", bound=Callable[..., object])
R_co = TypeVar("R_co", covariant=True)


class _Cached(Protocol[P, R_co]):
    """What ``cached()`` adds to a function; for a coroutine function all of it is awaited."""

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Delete the result for these arguments; returns whether there was one. If a computation of
        it is running, its result is not stored."""

    def mark_stale(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Let the result for these arguments be stale; returns whether there is one. See
        ``cache.mark_stale``."""

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute and store the result for these arguments, even if there is one. Until then other
        callers get the old result, or wait if there is none."""

    def on_commit(self, using: str | None = None, *, robust: bool = False) -> FunctionOnCommit[P]:
        """``invalidate``, ``mark_stale`` and ``refresh`` after the commit. Of the open transaction
        of the database ``using``, as by ``cache.on_commit``."""


class CachedFunction(_Cached[P, R_co], Protocol[P, R_co]):
    """A function that ``cached()`` decorates."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> CachedFunction[P, R_co]: ...
    @overload
    def __get__(
        self: CachedFunction[Concatenate[Any, Q], R], instance: object, owner: type | None = None, /
    ) -> CachedMethod[Q, P, R]: ...


class CachedMethod(_Cached[P, R_co], Protocol[Q, P, R_co]):
    """The same of an object: its methods take that as their first argument."""

    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> R_co: ...


@overload
def cached(function: Callable[P, R], /) -> CachedFunction[P, R]: ...
@overload
def cached(
    template: str | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    timeout: Timeout = SETTING,
    version: int | None = None,
    using: str = "default",
    **options: Unpack[GetOrSetArguments],
) -> Callable[[Callable[P, R]], CachedFunction[P, R]]: ...
def cached(
    target: object = None,
    /,
    *others: object,
    key: object = None,
    timeout: Timeout = SETTING,
    version: int | None = None,
    using: str = "default",
    **options: object,
) -> Any:
    """Cache the results of a function. One caller computes a missing result, the others wait.

    ``@cached`` alone for a function without arguments, ``@cached("report-{year}", timeout=60)``
    for others, functions and coroutine functions alike::

        report(2024)             # from the cache, or computed
        report.refresh(2024)     # computed and stored, even if there is one
        report.invalidate(2024)  # deleted
        report.mark_stale(2024)  # computed again at the next call; others get the old one
        report.on_commit().invalidate(2024)  # after the commit of the database transaction

    Args:
        key: the value's key, a template over the arguments of the call; or, by keyword, a callable
            that takes them. Default: the dotted name of the function.
        using: the cache alias.
        timeout, version, stale, background, soft_timeout, wait, on_wait_timeout, jitter, error_ttl:
            as for ``cache.get_or_set``.
        group: the metrics group. Default: the template, or else the dotted name of the function.

    Raises:
        TypeError, ValueError: an option is invalid, the template names an argument that the
            function does not have, or a function with arguments has no key, or one that names none;
            or the key does not say whose value it is: that of a method must name ``self`` or
            ``cls``, and a function that reads variables around it needs a callable.
    """
    if others:
        raise TypeError('cached() takes its options by name: @cached("report-{year}", timeout=300)')
    decorates = callable(target) or isinstance(target, classmethod)
    if target is not None and not decorates:
        if key is not None:
            raise TypeError("cached() takes the key once")
        key = target
    if key is not None and not callable(key) and not isinstance(key, str):
        raise TypeError(
            f"key must be a str, a callable or None, not {key!r}: write it first, and the rest by "
            'name, @cached("report-{year}", timeout=300)'
        )
    check_plain("key", key)
    if isinstance(key, str) and not key.strip():
        raise ValueError("key must not be empty")
    given = {"timeout": timeout, "version": version, **GetOrSetOptions.check(**options)}

    def decorate(function: object) -> object:
        target = Target("cached", function)
        target.check_named(key)
        return target.wrap(lambda each, dotted: _cached_function(each, dotted, key, using, given))

    return decorate(target) if decorates else decorate


def _cached_function(
    function: Any,
    dotted: str,
    key: str | Callable[..., str] | None,
    using: str,
    options: dict[str, object],
) -> object:
    arguments = inspect.signature(function).parameters
    name: Any
    if key is None and list(arguments) == ["cls"]:
        name = functools.partial(_name_in_class, function.__name__)
    elif key is None and arguments:
        raise ValueError(f"{dotted} has arguments: give a key that names them, as in {{pk}}")
    else:
        name = namer(key, function, dotted, typed=True)
        _check_whose(function, key, dotted)
    if isinstance(name, str) and arguments:
        raise ValueError(
            f"{key!r} names no argument of {dotted}, so all calls would get the same value: name "
            "one, as in {pk}, or give the key as a function, key=lambda ..."
        )
    group = options.get("group") or as_group(key if isinstance(key, str) else dotted)
    options, version = {**options, "group": group}, options["version"]
    stale = options.get("stale", SETTING)

    def key_of(args: Args, kwargs: Kwargs) -> str:
        if not callable(name):
            return str(name)
        return NamedKey.of(name, args, kwargs) if callable(key) else str(name(args, kwargs))

    def method(name: str, computes: bool, **options: object) -> Callable[..., object]:
        def call(args: Args, kwargs: Kwargs) -> object:
            compute = (functools.partial(function, *args, **kwargs),) if computes else ()
            return getattr(value_cache(using), name)(key_of(args, kwargs), *compute, **options)

        async def acall(args: Args, kwargs: Kwargs) -> object:
            compute = (functools.partial(function, *args, **kwargs),) if computes else ()
            made = await made_for_task(key_of, args, kwargs, by_function=callable(key))
            return await getattr(value_cache(using), f"a{name}")(made, *compute, **options)

        return functools.wraps(function)(like(function, call, acall))

    cache_alias = using

    def on_commit(using: str | None = None, *, robust: bool = False) -> FunctionOnCommit[...]:
        cache = value_cache(cache_alias)
        of_cache = cache.on_commit(using, robust=robust)
        return of_cache.of_function(wrapped, key_of, version=version, stale=stale)

    wrapped: Any = method("get_or_set", True, **options)
    wrapped.refresh = method("compute", True, **options)
    wrapped.invalidate = method("delete", False, version=version)
    wrapped.mark_stale = method("mark_stale", False, version=version, stale=stale)
    wrapped.on_commit = on_commit
    wrapped.__doc__ = _describe(wrapped, function)
    setattr(wrapped, STORED, True)
    return wrapped


def _check_whose(function: Callable[..., object], key: object, dotted: str) -> None:
    """
    Raises:
        ValueError: the key does not say whose value it is, so that one would get that of another.
    """
    if callable(key):
        return
    within = inspect.unwrap(function)
    code: Any = getattr(within, "__code__", None)
    # A function that calls itself, and super() in a method.
    free = set(getattr(code, "co_freevars", ())) - {"__class__", within.__name__}
    if free:
        raise ValueError(
            f"{dotted} reads {', '.join(sorted(free))} of the code around it, which no key names, "
            "so that one would get the value of another: make it an argument that the key names, "
            "or give the key as a function, key=lambda ..."
        )
    first = next(iter(inspect.signature(function).parameters), "")
    fields = list(Template(str(key)).fields()) if key is not None else []
    if first in ("self", "cls") and not any(re.match(rf"{first}\b", field) for field in fields):
        example = "{self.pk}" if first == "self" else "{cls.__name__}"
        raise ValueError(
            f"{key!r} does not name {first}, whose {dotted} it is, so that one would get the value "
            f"of another: name it, as in {example}, or decorate a @staticmethod, or give the key "
            "as a function, key=lambda ..."
        )
    if key is None and function.__module__ == "__main__":
        raise ValueError(
            f"{dotted} may be another function in another script: give a key, as in "
            f'@cached("{function.__name__}")'
        )


def _name_in_class(name: str, args: Args, kwargs: Kwargs) -> str:
    """The default key of a class method: two classes may inherit it."""
    of: Any = args[0] if args else kwargs["cls"]
    return short(f"{of.__module__}.{of.__qualname__}.{name}")


def _describe(wrapped: object, function: Callable[..., object]) -> str:
    """Name the methods as ``help()`` shows them; returns the description of the function."""
    lines = []
    for name in ("refresh", "invalidate", "mark_stale", "on_commit"):
        method, of_all = getattr(wrapped, name), getattr(CachedFunction, name)
        method.__name__, method.__doc__ = name, of_all.__doc__
        method.__qualname__ = f"{function.__qualname__}.{name}"
        doc = of_all.__doc__ or ""  # There is none under python -OO.
        first = " ".join(doc.split()).partition(". ")[0].rstrip(".").replace("`", "")
        lines.append(f"{function.__name__}.{name}(…)" + (f": {first}." if first else ""))
    return "\n".join([inspect.getdoc(function) or "", "", "Cached:", *lines]).lstrip()


def cached_page(
    timeout: float | Callable[[Any], float | None] | None,
    *,
    cache: str | None = None,
    key_prefix: str | None = None,
    **options: Unpack[GetOrSetArguments],
) -> Callable[[V], V]:
    """Cache the pages of a view by Django's rules, as its ``cache_page`` does. One caller computes
    a missing page, the others wait for it::

        @cached_page(300, stale=3600)
        def report(request, year): ...

    For a class of views: ``@method_decorator(cached_page(300), name="dispatch")``.

    Args:
        timeout: seconds, or a function of the response that returns them. None: the max-age of the
            response, or else CACHE_MIDDLEWARE_SECONDS; 0: the page is not stored.
        cache: the cache alias. Default: ``"default"``.
        key_prefix: the beginning of the page's key. Default: none.
        stale, wait, on_wait_timeout, jitter, background, error_ttl: as for ``cache.get_or_set``.
            A refresh that raises or answers with a server error (5xx) has failed.
        group: the metrics group. Default: the dotted name of the view.

    Raises:
        TypeError, ValueError: an option is invalid.
        ImproperlyConfigured: at the first call: there is no such cache.
    """
    check_plain("timeout", timeout)
    if not callable(timeout):
        check_seconds("timeout", timeout, zero=True, none="that of the response")
    given: dict[str, Any] = {**GetOrSetOptions.check(**options)}

    def make(view: Any, dotted: str) -> Any:
        middleware = part("pages").CachedPageMiddleware(
            view,
            page_timeout=timeout,
            cache_alias=cache,
            key_prefix=key_prefix,
            options={**given, "group": given.get("group") or as_group(dotted)},
        )

        def respond(args: Args, kwargs: Kwargs, asynchronous: bool = False) -> Any:
            if not (args and hasattr(args[0], "META")):
                first = repr(args[0]) if args else "none"
                raise TypeError(
                    f"cached_page() needs a request as the first argument of {dotted}, not {first}."
                    " For a method write @method_decorator(cached_page(300))"
                )

            def call(request: object) -> object:
                return view(request, *args[1:], **kwargs)

            return middleware.respond(args[0], call, asynchronous=asynchronous)

        decorated = like(view, respond, functools.partial(respond, asynchronous=True))
        setattr(decorated, STORED, True)
        return functools.update_wrapper(decorated, view)

    def decorate(view: V) -> V:
        if request_of((view,), {}) is not None:
            raise TypeError("@cached_page needs a timeout: write @cached_page(300)")
        decorated: V = Target("cached_page", view).wrap(make)
        return decorated

    return decorate
