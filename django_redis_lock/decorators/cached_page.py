"""``cached_page()``: caches the pages of a view; each page is computed once at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import iscoroutinefunction
from django.views import View

from ..cache import GetOrSetOptions
from ..events import as_group
from ..middleware import CachedPageMiddleware
from ..protocol import check_seconds
from .key_template import bound_method

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..cache import GetOrSetArguments

V = TypeVar("V", bound=Callable[..., Any])


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
        ImproperlyConfigured: at the first call: the cache is not one of ours.
    """
    if not callable(timeout):
        check_seconds("timeout", timeout, zero=True, none="that of the response")
    given: Any = GetOrSetOptions.check(**options)

    def decorate(view: V) -> V:
        if isinstance(view, type) or not callable(view):
            raise TypeError(
                f"@cached_page(300) decorates functions, not {view!r}. For a class of views write "
                '@method_decorator(cached_page(300), name="dispatch")'
            )
        decorated: V = _decorated(view, timeout, cache, key_prefix, given)
        return decorated

    return decorate


def _decorated(
    view: Any, timeout: Any, cache: str | None, key_prefix: str | None, options: Any
) -> Any:
    dotted = f"{view.__module__}.{view.__qualname__}" if hasattr(view, "__qualname__") else ""
    options = {**options, "group": options.get("group") or as_group(dotted) or None}
    middleware = CachedPageMiddleware(
        view, page_timeout=timeout, cache_alias=cache, key_prefix=key_prefix, options=options
    )
    instance = getattr(bound_method(view), "__self__", None)
    asynchronous = iscoroutinefunction(view) or (
        isinstance(instance, View) and instance.view_is_async
    )

    def call(request: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(request, "META"):
            raise TypeError(
                f"cached_page() needs a request as the first argument of {dotted}, not "
                f"{request!r}. For a method use Django's method_decorator"
            )
        return middleware.respond(
            request, lambda request: view(request, *args, **kwargs), asynchronous=asynchronous
        )

    async def acall(request: Any, *args: Any, **kwargs: Any) -> Any:
        return await call(request, *args, **kwargs)

    return functools.update_wrapper(acall if asynchronous else call, view)
