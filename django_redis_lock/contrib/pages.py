"""Whole pages: Django's cache middleware, in which one caller computes a missing page.

Django decides what is stored, at which key and for how long: its own code runs, with ``_Notes`` in
place of the cache.
"""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponseBase
from django.middleware.cache import CacheMiddleware
from django.utils import cache as django_cache
from django.utils.cache import get_max_age
from django.utils.http import parse_http_date_safe
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ..cache import MISSING, lock_cache
from ..conf import GetOrSetOptions
from ..transport import Steps, adrive, drive

if TYPE_CHECKING:
    from ..conf import GetOrSetArguments

#: Seconds after a response that cannot be cached in which the callers for its page do not wait for
#: each other.
NOT_CACHEABLE_SECONDS = 5.0
#: ``clear()`` deletes this key; a page whose computation began before that is not stored. Its name
#: matches the patterns that match all pages.
GENERATION = "views.decorators.cache.cache_page.{}.generation"

#: Where Django makes the keys. Its public function makes both keys in one call, and reads between
#: them, which must not block an event loop.
_KEYS: Any = django_cache
#: Options that the names of headers do without.
_OF_PAGES = {"stale", "soft_timeout", "background", "jitter"}
_NOTHING: Any = object()
_FAILED = (ConnectionInterrupted, RedisError, OSError)
#: What Django answers with 4xx when a view raises it.
_REFUSALS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


class CachedPageMiddleware(CacheMiddleware):
    """Caches the pages of the whole site by Django's rules. One caller computes a missing page, the
    others wait for it.

    The settings CACHE_MIDDLEWARE_ALIAS, CACHE_MIDDLEWARE_KEY_PREFIX and CACHE_MIDDLEWARE_SECONDS
    apply, and those of ``get_or_set`` (STALE, …). In MIDDLEWARE it belongs before all that set
    cookies or Vary (sessions, CSRF, messages), and after LocaleMiddleware.

    Raises:
        ImproperlyConfigured: the cache is not one of ours.
    """

    def __init__(
        self,
        get_response: Callable[..., Any],
        cache_timeout: float | None = None,
        page_timeout: Any = None,
        options: GetOrSetArguments | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(get_response, cache_timeout, page_timeout, **kwargs)
        self.page_timeout: Any = page_timeout
        self.options: GetOrSetArguments = options or {}
        self.header_options: Any = {
            **{name: value for name, value in self.options.items() if name not in _OF_PAGES},
            "stale": 0,
        }
        self._notes: _Notes | None = None
        if options is None:  # The decorator is used before the settings are complete.
            lock_cache(self.cache_alias)

    @property
    def cache(self) -> Any:
        return self._notes or lock_cache(self.cache_alias)

    def __call__(self, request: HttpRequest) -> Any:
        return self.respond(request, self.get_response, asynchronous=self.async_mode)

    def respond(
        self, request: HttpRequest, view: Callable[[HttpRequest], Any], *, asynchronous: bool
    ) -> Any:
        """The response to ``request``: a page, or what ``view`` returns; or an awaitable of it."""
        if request.method not in ("GET", "HEAD"):
            request._cache_update_cache = False  # type: ignore[attr-defined]  # Django reads it
            return view(request)
        steps = _Visit(self, request, view, asynchronous).steps()
        return adrive(steps) if asynchronous else drive(steps)

    def process_response(self, request: HttpRequest, response: Any) -> Any:
        """As Django's. ``page_timeout`` may be a function of the response."""
        if not callable(self.page_timeout):
            return super().process_response(request, response)
        rules = copy.copy(self)
        rules.page_timeout = self.page_timeout(response)
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

    def set(self, key: str, value: Any, timeout: float) -> None:
        self.stored.append((key, value, timeout))


class _Visit:
    """One request for a page. A flight is at the key of the page or, as long as it is unknown what
    the pages of the URL vary on, at that of the headers. None there means that the page cannot be
    cached: callers do not wait for each other. (For Django that is nothing.)"""

    def __init__(
        self,
        middleware: CachedPageMiddleware,
        request: HttpRequest,
        view: Callable[[HttpRequest], Any],
        asynchronous: bool,
    ) -> None:
        self.middleware = middleware
        self.request: Any = request
        self.view = view
        self.asynchronous = asynchronous
        self.cache: Any = lock_cache(middleware.cache_alias)
        self.caller = self._here()
        self.timeout = 0.0
        #: The response, or an exception instead, if this caller has computed it.
        self.computed = _NOTHING

    def _here(self) -> Any:
        return asyncio.current_task() if self.asynchronous else threading.get_ident()

    def _do(self, name: str, *args: Any, **options: Any) -> Any:
        return getattr(self.cache, f"a{name}" if self.asynchronous else name)(*args, **options)

    def steps(self) -> Steps[Any]:
        request, middleware = self.request, self.middleware
        scopes = getattr(request, "_cached_pages", ())
        scope = middleware.cache_alias, middleware.key_prefix
        request._cache_update_cache = True
        if scope in scopes:  # Another cached_page() around this one stores the page.
            response = yield from self._respond(request)
            middleware.storable(request, response)
            return response
        self.scopes = request._cached_pages = (*scopes, scope)
        try:
            page = yield from self._find()
            if page is None and self.computed is _NOTHING:
                yield from self._compute()
        except PageFailed as failed:
            self.computed = failed.response
        finally:
            request._cached_pages = scopes
        if isinstance(self.computed, Exception):
            raise self.computed
        if self.computed is not _NOTHING:
            return self._marked(self.computed, "miss")
        request._cache_update_cache = False
        return self._hit(page)

    def _find(self) -> Steps[Any]:
        """A stored page. None if there is none, or this caller has computed it."""
        tried: set[str] = set()
        middleware, request = self.middleware, self.request
        prefix = middleware.key_prefix
        header_key = _KEYS._generate_cache_header_key(prefix, request)
        while True:
            headers = yield from self._read(header_key)
            if headers is MISSING:
                headers = yield self._get_or_compute(
                    header_key, self._headers_lifetime, middleware.header_options
                )
            if headers is None or self.computed is not _NOTHING:
                return None
            key = _KEYS._generate_cache_key(request, "GET", headers, prefix)
            if request.method == "HEAD":
                page = yield from self._read(key)
                if page is not MISSING and page is not None:
                    return page
                key = _KEYS._generate_cache_key(request, "HEAD", headers, prefix)
            if key in tried:
                return None
            tried.add(key)
            page = yield self._get_or_compute(key, self._page_lifetime, middleware.options)
            if page is not None or self.computed is not _NOTHING:
                return page
            # Its response cannot be cached, or varies on other headers by now.

    def _read(self, key: str) -> Steps[Any]:
        """What is at ``key``, or MISSING. Unlike ``get_or_set`` it is not counted as a read."""
        cache = self.cache
        try:
            if self.asynchronous:
                return (yield cache.aget(key, MISSING))
            return cache._read_or_join(key, None)
        except _FAILED:
            return MISSING
        except Exception as error:
            runner = cache._async_runner() if self.asynchronous else cache._thread_runner()
            yield runner.do(cache._check_decoding(runner, error, key, None))
            return MISSING

    def _get_or_compute(self, key: str, timeout: Callable[[Any], float], options: Any) -> Any:
        if self.asynchronous:
            return self.cache.aget_or_set(key, partial(self._acompute, key), timeout, **options)
        return self.cache.get_or_set(key, lambda: drive(self._compute(key)), timeout, **options)

    async def _acompute(self, key: str) -> Any:
        return await adrive(self._compute(key))

    def _hit(self, page: Any) -> Any:
        """``page`` with its Age, by Django's rule."""
        expires = parse_http_date_safe(page.get("Expires", ""))
        max_age, now = get_max_age(page), time.time()
        if max_age is not None and expires is not None:
            page["Age"] = max(0, max_age - (expires - int(now)))
        return self._marked(page, "stale" if now > getattr(page, "_fresh_until", now) else "hit")

    def _marked(self, response: Any, status: str) -> Any:
        header = self.cache.conf.PAGE_STATUS_HEADER
        if header and isinstance(response, HttpResponseBase):
            response.headers[header] = status
        return response

    def _compute(self, key: str = "") -> Steps[Any]:
        """The value to store at ``key``: the flight that this caller leads; empty without one."""
        if self._here() == self.caller:
            value, self.computed = yield from self._computed_for(self.request, key)
            return value
        copied = _copied(self.request)
        copied._cached_pages = self.scopes  # The request's own have ended with its response.
        value, _ = yield from self._computed_for(copied, key)
        return value

    def _computed_for(self, request: Any, key: str) -> Steps[tuple[Any, Any]]:
        generation = yield from self._generation()
        try:
            response = yield from self._respond(request)
        except _REFUSALS as refusal:
            return None, refusal
        if key and getattr(response, "status_code", 0) >= 500:
            old = yield from self._read(key)
            if old is not MISSING and old is not None:
                raise PageFailed(response)  # The old page is served.
        page = None
        if not _is_unfinished(response) and isinstance(response, HttpResponseBase):
            page = self.middleware.storable(request, response)
        if page is None:
            return None, response
        self.timeout = page.timeout
        response._fresh_until = time.time() + page.timeout
        if (yield from self._generation()) == generation:  # Redis answers, too.
            with suppress(*_FAILED):
                yield from self._store_aside(key, page, response, generation)
        return {page.page_key: response, page.header_key: page.headers}.get(key), response

    def _respond(self, request: Any) -> Steps[Any]:
        response = self.view(request)
        if self.asynchronous:
            response = yield response
        if _is_unfinished(response):
            response.add_post_render_callback(
                lambda rendered: self.middleware.process_response(request, rendered)
            )
        elif not getattr(response, "is_rendered", True):
            render = sync_to_async(response.render) if self.asynchronous else response.render
            response = yield render()
        return response

    def _store_aside(self, key: str, page: Storable, response: Any, generation: str) -> Steps[None]:
        """What the flight of ``key`` does not store: the page, or the names of its headers. Their
        keys have other flights, or none, which ``clear()`` would end."""
        if key != page.page_key:
            options = GetOrSetOptions.of(self.cache.conf, page.timeout, **self.middleware.options)
            lifetime = options.lifetime(page.timeout)(response) / 1000
            yield self._do("set", page.page_key, response, lifetime)
            if (yield from self._generation()) != generation:
                yield self._do("delete", page.page_key)
        if key != page.header_key:
            lifetime = self._headers_lifetime(page.headers)
            yield self._do("set", page.header_key, page.headers, lifetime)

    def _generation(self) -> Steps[Any]:
        """A random value that is there until ``clear()``; another one while Redis is down."""
        key = GENERATION.format(self.middleware.key_prefix)
        found = yield from self._read(key)
        if found is not MISSING:
            return found
        return (yield self._do("get_or_set", key, uuid4().hex, None, group="page generation"))

    def _page_lifetime(self, page: Any) -> float:
        return NOT_CACHEABLE_SECONDS if page is None else self.timeout

    def _headers_lifetime(self, headers: list[str] | None) -> float:
        """When that of a page is over, the key of each next one is known."""
        if headers is None:
            return NOT_CACHEABLE_SECONDS
        options = GetOrSetOptions.of(self.cache.conf, self.timeout, **self.middleware.options)
        return 2 * (self.timeout + options.stale)


class PageFailed(Exception):
    """The view answered with a server error, and there is a page to serve instead."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"status {response.status_code}")
        self.response = response


def _is_unfinished(response: Any) -> bool:
    """Whether only Django REST framework can render it, once a method of its view has returned."""
    module = sys.modules.get("rest_framework.response")
    return (
        module is not None
        and isinstance(response, module.Response)
        and not hasattr(response, "accepted_renderer")
    )


def _copied(request: Any) -> Any:
    """A copy for the background: what a view changes is not seen by the request's middleware."""
    copied: Any = object.__new__(type(request))
    vars(copied).update(vars(request))
    copied.META = dict(request.META)
    copied._cache_update_cache = True
    return copied
