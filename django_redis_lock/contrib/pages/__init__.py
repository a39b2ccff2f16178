"""Whole pages: Django's cache middleware, in which one caller computes a missing page.

Django decides what is stored, at which key and for how long: its own code runs, with ``_Notes`` in
place of the cache. A response that is rendered after its view has returned keeps its flight open
until then (``responses``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

from asgiref.sync import sync_to_async
from django.http import HttpRequest
from django.middleware.cache import CacheMiddleware

from ...cache import value_cache
from ...conf import checked_timeout
from ...middleware import Conditions
from ...steps import Steps, adrive, drive
from .responses import Rendering, Stopped, call_view, conditional, is_unrendered
from .visit import Visit

if TYPE_CHECKING:
    from django.http.response import HttpResponseBase

    from ...cache import GetOrSetArguments

#: Options that the names of headers do without.
_OF_PAGES = {"stale", "soft_timeout", "background", "jitter"}


class CachedPageMiddleware(CacheMiddleware):
    """Caches the pages of the whole site by Django's rules. One caller computes a missing page, the
    others wait for it.

    The settings CACHE_MIDDLEWARE_ALIAS, CACHE_MIDDLEWARE_KEY_PREFIX and CACHE_MIDDLEWARE_SECONDS
    apply, and those of ``get_or_set`` (STALE, …). In MIDDLEWARE it belongs before all that set
    cookies or Vary (sessions, CSRF, messages), and after LocaleMiddleware.

    Raises:
        ImproperlyConfigured: there is no such cache.
    """

    def __init__(
        self,
        get_response: Callable[..., Any],
        cache_timeout: float | None = None,
        page_timeout: Any = None,
        options: GetOrSetArguments | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(get_response, cache_timeout, page_timeout, **kwargs)
        self.page_timeout: Any = page_timeout
        self.options: GetOrSetArguments = options or {}
        self.header_options: object = {
            **{name: value for name, value in self.options.items() if name not in _OF_PAGES},
            "stale": 0,
        }
        self._notes: _Notes | None = None
        if options is None:  # The decorator is used before the settings are complete.
            value_cache(self.cache_alias)

    @property
    def cache(self) -> Any:
        return self._notes or value_cache(self.cache_alias)

    def __call__(self, request: HttpRequest) -> Any:
        return self.respond(request, self.get_response, asynchronous=self.async_mode)

    def respond(
        self, request: HttpRequest, view: Callable[[HttpRequest], object], *, asynchronous: bool
    ) -> object:
        """The response to ``request``: a page, or what ``view`` returns; or an awaitable of it."""
        if request.method not in ("GET", "HEAD"):
            request._cache_update_cache = False  # type: ignore[attr-defined]  # Django reads it
            return view(request)
        steps = self._alone(request, view, asynchronous)
        if self.cache.computes_once:
            steps = Visit(self, request, view, asynchronous).steps()
        if asynchronous:
            return adrive(steps)
        try:
            return drive(steps)
        except Stopped as stopped:
            raise stopped.error from None

    def _alone(
        self, request: HttpRequest, view: Callable[[HttpRequest], object], asynchronous: bool
    ) -> Steps[object]:
        """With a cache of another backend: no caller waits for this page."""

        def store(response: HttpResponseBase) -> object:
            conditions.complete(response)
            page = self.storable(request, response)
            if page is not None and not conditions.of_client:
                self.cache.set(page.header_key, page.headers, page.timeout)
                self.cache.set(page.page_key, response, page.timeout)
            return conditional(request, response)

        def call(function: Callable[..., object], argument: object) -> object:
            return sync_to_async(function)(argument) if asynchronous else function(argument)

        self.cache.log_backend()
        page = yield call(self.process_request, request)
        if page is not None:
            return conditional(request, page)
        conditions = Conditions(request)
        conditions.take_out()
        try:
            response = yield call_view(view, request)
        finally:
            conditions.put_back()
        if is_unrendered(response):
            Rendering(response, conditions, lambda made, _: store(made), lambda error, _: None)
            return response
        return (yield call(store, response))

    def process_response(self, request: HttpRequest, response: Any) -> Any:
        """As Django's. ``page_timeout`` may be a function of the response."""
        if not callable(self.page_timeout):
            return super().process_response(request, response)
        rules = copy.copy(self)
        seconds = checked_timeout(self.page_timeout(response))
        rules.page_timeout = None if seconds is None else ceil(seconds)  # As max-age has them.
        return rules.process_response(request, response)

    def storable(self, request: HttpRequest, response: Any) -> Storable | None:
        """What Django would store of ``response``, whose headers it completes. A response with a
        cookie is not stored, whatever it varies on: the cookie may be its first caller's."""
        rules = copy.copy(self)
        rules._notes = notes = _Notes()
        rules.process_response(request, response)
        if not notes.stored or response.cookies:
            return None
        (header_key, headers, _), (page_key, _, timeout) = notes.stored
        return Storable(header_key, headers, page_key, timeout)


class Storable(NamedTuple):
    """A page that can be cached: ``headers``, at ``header_key``, are what the pages of its URL vary
    on."""

    header_key: str
    headers: list[str]
    page_key: str
    timeout: float


class _Notes:
    def __init__(self) -> None:
        self.stored: list[tuple[str, Any, float]] = []

    def set(self, key: str, value: object, timeout: float) -> None:
        self.stored.append((key, value, timeout))
