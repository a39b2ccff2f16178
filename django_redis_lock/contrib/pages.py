"""Whole pages: Django's cache middleware, in which one caller computes a missing page.

Django decides what is stored, at which key and for how long: its own code runs, with ``_Notes`` in
place of the cache. A response that is rendered after its view has returned keeps its flight open
until then (``Rendering``).
"""

from __future__ import annotations

import asyncio
import copy
import threading
import time as system
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from logging import DEBUG
from math import ceil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from uuid import uuid4

from django.core.exceptions import BadRequest, PermissionDenied, SuspiciousOperation
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.cache import CacheMiddleware
from django.utils import cache as django_cache
from django.utils.cache import (
    get_conditional_response,
    get_max_age,
    has_vary_header,
    patch_vary_headers,
)
from django.utils.http import parse_http_date_safe
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ..cache import MISSING, value_cache
from ..conditions import Conditions
from ..conf import GetOrSetOptions, checked_timeout
from ..decorators.section import called, in_thread, run_steps
from ..events import RefreshFailed
from ..keeper import keeper
from ..protocol import Call, as_bytes, script
from ..protocol.keys import flight_key
from ..singleflight import Postponed, computing, innermost_flight
from ..steps import Steps, adrive, drive
from ..threads import get_logger, may_log

if TYPE_CHECKING:
    from ..cache import GetOrSetArguments

logger = get_logger("django_redis_lock.pages")
_logged_at: dict[str, float] = {}

#: Seconds after a response that cannot be cached in which the callers for its page do not wait for
#: each other.
NOT_CACHEABLE_SECONDS = 5.0
#: ``clear()`` deletes this key; a page whose computation began before that is not stored. Its name
#: matches the patterns that match all pages.
GENERATION = "views.decorators.cache.cache_page.{}.generation"

#: Makes the keys. Django's public function makes both at once, and reads in between, which must not
#: block an event loop.
_KEYS: Any = django_cache
#: Who leads.
#:
#: KEYS  a flight        ARGV  none        returns its token, nil without one
FLIGHT_TOKEN = script("return redis.call('GET', KEYS[1])")
_NOTHING: Any = object()
_FAILED = (ConnectionInterrupted, RedisError)
#: By caller, cache alias and key: flights that are open until a response is rendered. Their callers
#: must not wait for them.
_open: weakref.WeakValueDictionary[tuple[object, str, str], OpenFlight]
_open = weakref.WeakValueDictionary()

#: Options that the names of headers do without.
_OF_PAGES = {"stale", "soft_timeout", "background", "jitter"}
#: Partial Content, Not Modified, Precondition Failed, Range Not Satisfiable.
_ANSWERS_TO_CONDITIONS = {206, 304, 412, 416}
#: Request Timeout, Too Early, Too Many Requests; and all from 500 on, with ``Retry-After``, or
#: because a lock was taken.
_TEMPORARY = {408, 425, 429}
#: What Django answers with 4xx when a view raises it.
REFUSALS = (Http404, PermissionDenied, SuspiciousOperation, BadRequest)


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
        return run_steps(asynchronous, steps)

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

        self.cache.log_backend()
        page = yield in_thread(asynchronous, self.process_request, request)
        if page is not None:
            return conditional(request, page)
        conditions = Conditions(request)
        conditions.take_out()
        try:
            response = yield called(view, request)
        finally:
            conditions.put_back()
        if is_unrendered(response):
            rendering = Rendering(conditions, lambda _, made, error: None if error else store(made))
            return rendering.of(response)
        return (yield in_thread(asynchronous, store, response))

    def storable(self, request: HttpRequest, response: Any) -> Storable | None:
        """What Django would store of ``response``, whose headers it completes. A response with a
        cookie is not stored, whatever it varies on: the cookie may be its first caller's."""
        rules = copy.copy(self)
        rules._notes = notes = _Notes()
        if callable(self.page_timeout):
            seconds = checked_timeout(self.page_timeout(response))
            rules.page_timeout = None if seconds is None else ceil(seconds)  # As max-age has them.
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


class Visit:
    """One request for a page. A flight is at the key of the page or, as long as it is unknown what
    the pages of the URL vary on, at that of the headers. None there means that the page cannot be
    cached: callers do not wait for each other. (For Django that is nothing.)"""

    timeout: float  # Seconds; of the page that this caller has computed.
    own: Any  # For ``computing``: what the view has deleted itself of the key GENERATION.

    def __init__(
        self,
        middleware: CachedPageMiddleware,
        request: HttpRequest,
        view: Callable[[HttpRequest], object],
        asynchronous: bool,
    ) -> None:
        self.middleware = middleware
        self.request: Any = request
        self.view = view
        self.asynchronous = asynchronous
        self.cache = value_cache(middleware.cache_alias)
        self.caller = self._here()
        #: The flight that this caller leads: the key in Redis, and the token.
        self.flight: tuple[bytes, bytes] | None = None
        #: Why the page that this caller has computed is not stored, if so.
        self.skipped = ""
        #: The response, or an exception instead, if this caller has computed it.
        self.computed = _NOTHING

    def _here(self) -> object:
        return asyncio.current_task() if self.asynchronous else threading.get_ident()

    def _do(self, name: str, *args: object, **options: object) -> object:
        return getattr(self.cache, f"a{name}" if self.asynchronous else name)(*args, **options)

    def steps(self) -> Steps[object]:
        request, middleware = self.request, self.middleware
        scopes = getattr(request, "_cached_pages", ())
        scope = middleware.cache_alias, middleware.key_prefix
        request._cache_update_cache = True
        if scope in scopes:  # Another cached_page() around this one stores the page.
            response = yield from self._respond(request)
            if is_unrendered(response):
                response.add_post_render_callback(self._complete_headers)
            else:
                middleware.storable(request, response)
            return response
        self.scopes = request._cached_pages = (*scopes, scope)
        try:
            page = yield from self._find()
            if page is None and self.computed is _NOTHING:
                yield from self._compute()
        except (PageFailed, NotThePage) as failed:
            self.computed = failed.response
        except Postponed as postponed:
            postponed.__traceback__ = None  # It refers to the response.
        finally:
            request._cached_pages = scopes
        computed, self.computed = self.computed, _NOTHING  # Only its caller refers to it.
        if isinstance(computed, Exception):
            raise computed
        if computed is not _NOTHING:
            return self._marked(computed)
        request._cache_update_cache = False
        return self._hit(page)

    def _complete_headers(self, response: HttpResponseBase) -> None:
        self.middleware.storable(self.request, response)

    def _find(self) -> Steps[object]:
        """A stored page. None if there is none, or this caller has computed it."""
        tried: set[str] = set()
        middleware, request = self.middleware, self.request
        prefix = middleware.key_prefix
        header_key = _KEYS._generate_cache_header_key(prefix, request)
        while True:
            headers = yield from self._read(header_key)
            if headers is MISSING:
                headers = yield from self._get_or_compute(
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
            page = yield from self._get_or_compute(key, self._page_lifetime, middleware.options)
            if page is not None or self.computed is not _NOTHING:
                return page
            # Its response cannot be cached, or varies on other headers by now.

    def _read(self, key: str) -> Steps[object]:
        """What is at ``key``, or MISSING. Unlike ``get_or_set`` it is not counted as a read."""
        cache = self.cache
        try:
            if not self.asynchronous:
                return cache._values.read(key, None)
            if cache._connections.replica() is not None:  # ``aget`` would not ask the primary.
                return (yield in_thread(True, cache._values.read, key, None))
            return (yield cache.aget(key, MISSING))
        except _FAILED:
            return MISSING
        except Exception as error:
            yield self._runner().do(cache._values.check_decoding(self._runner(), error, None, key))
            return MISSING

    def _get_or_compute(
        self, key: str, timeout: Callable[[Any], float], options: Any
    ) -> Steps[object]:
        flight = _open.pop(self._open_flight(key), None)
        leader = flight and flight.closed()
        if leader:  # The response to this caller's last request is not rendered.
            yield from leader.fail()
        compute = partial(self._acompute if self.asynchronous else self._compute_here, key)
        return (yield called(self._do, "get_or_set", key, compute, timeout, **options))

    def _open_flight(self, key: str) -> tuple[object, str, str]:
        return self.caller, self.middleware.cache_alias, key

    def _compute_here(self, key: str) -> object:
        return run_steps(False, self._compute(key))

    async def _acompute(self, key: str) -> object:
        return await adrive(self._compute(key))

    def _hit(self, page: Any) -> object:
        """``page`` with its Age, by Django's rule."""
        expires = parse_http_date_safe(page.get("Expires", ""))
        max_age, now = get_max_age(page), system.time()
        if max_age is not None and expires is not None:
            page["Age"] = max(0, max_age - (expires - int(now)))
        status = "stale" if now > getattr(page, "_fresh_until", now) else "hit"
        return self._marked(conditional(self.request, page), status)

    def _marked(self, response: Any, status: str = "") -> Any:
        header = self.cache.conf.PAGE_STATUS_HEADER
        if header and is_unrendered(response):  # The header is not stored.
            response.add_post_render_callback(self._marked)
        elif header and isinstance(response, HttpResponseBase):
            status = status or (f"skip; {self.skipped}" if self.skipped else "miss")
            response.headers[header] = status
        return response

    def _compute(self, key: str = "") -> Steps[object]:
        """The value to store at ``key``: the flight that this caller leads; empty without one."""
        mine = self._here() == self.caller
        request = self.request
        if not mine:
            request = copied(request)
            request._cached_pages = self.scopes  # The request's own have ended with its response.
        self.flight = innermost_flight() if key else None
        self.own = SimpleNamespace(token=b"", own_writes={})
        generation = yield from self._generation()
        names = [GENERATION.format(self.middleware.key_prefix)]
        [at] = yield from self.cache._values.keys(self._runner(), names, None)
        conditions = Conditions(request) if key else Conditions(request, ())
        conditions.in_background = not mine
        conditions.take_out()
        try:
            with computing(None, [at], self.own):
                response = yield from self._respond(request)
            if not mine:
                response = yield from self._complete_as_before(key, request, response)
        except REFUSALS as refusal:
            self.computed = refusal if mine else self.computed
            return None
        finally:
            conditions.put_back()
        decide = partial(self._decide, key, request, conditions, mine)
        if not is_unrendered(response):
            return (yield from decide(generation, response))
        rendering = Rendering(conditions, partial(self._rendered, key, decide, generation))
        self.computed = rendering.of(response)
        if not key:
            return None
        _open[self._open_flight(key)] = rendering.flight
        raise rendering.flight

    def _decide(
        self,
        key: str,
        request: HttpRequest,
        conditions: Conditions,
        mine: bool,
        generation: str,
        response: Any,
    ) -> Steps[object]:
        """Whether ``response`` is a page, by now. Returns the value for ``key``."""
        page = self._storable(request, response, conditions)
        if key:
            raise_unless_about_the_page(response, mine)
            is_part = page is None and mine and "HTTP_RANGE" in conditions
            if is_part and getattr(response, "streaming", False):  # Its client seeks in a video.
                close_without_signal(response)
                response = yield from self._respond(request)
        value = yield from self._store(key, page, response, generation)
        if mine:
            self.computed = conditional(request, response) if key else response
        return value

    def _respond(self, request: HttpRequest) -> Steps[Any]:
        response = called(self.view, request)
        return (yield response) if self.asynchronous else response

    def _complete_as_before(self, key: str, request: Any, response: Any) -> Steps[object]:
        """In the background: rendered, with the headers of the old page that decide what is stored.
        No decorator around the view sets them there, and it is not known who has read the session.
        """
        old = yield from self._read(key)
        unrendered = is_unrendered(response)
        if isinstance(response, HttpResponseBase):
            if isinstance(old, HttpResponseBase):
                if "Vary" in old:
                    patch_vary_headers(response, old["Vary"].split(", "))
                if unrendered and "Cache-Control" in old and self.middleware.page_timeout is None:
                    response.headers.setdefault("Cache-Control", old["Cache-Control"])
            elif unrendered or getattr(getattr(request, "session", None), "accessed", False):
                raise PageFailed(response)
        if unrendered:
            response = yield in_thread(self.asynchronous, response.render)
        return response

    def _rendered(
        self,
        key: str,
        decide: Callable[[str, object], Steps[object]],
        generation: str,
        flight: OpenFlight,
        response: HttpResponseBase | None,
        error: BaseException | None,
    ) -> object:
        """End the flight of ``key`` after the rendering, which is synchronous, and has raised
        ``error`` if that is not None."""
        self.asynchronous, leader = False, flight.closed()
        # Without a leader, Redis is down, or the flight ended before: nothing is stored.
        at = generation if leader is not None or not key else ""

        def compute() -> object:
            if error is None:
                return drive(decide(at, response))
            if isinstance(error, REFUSALS):
                return None
            raise error

        try:
            if leader is None:
                compute()
            else:
                runner = self.cache._values.thread_runner()
                runner.do(leader.resume(runner, compute))
        except NotThePage:
            pass
        except BaseException as failed:
            if not (failed is error or isinstance(failed, PageFailed)):
                raise
            instead = self._old_page(key, leader, failed)
            if instead is not None or error is not None:
                return instead
        computed, self.computed = self.computed, _NOTHING
        return response if computed is _NOTHING else computed

    def _old_page(self, key: str, leader: Any, error: BaseException) -> object:
        """The page at ``key``, if there is one, in place of what failed."""
        if leader is not None and isinstance(error, Exception):
            with suppress(*_FAILED):
                old = self.cache.get(key)
                if isinstance(old, HttpResponseBase):
                    words = "The refresh of %s failed; the stale value is served"
                    logger.warning(words, leader, exc_info=error)
                    leader.producer.emit(leader.server, RefreshFailed, error)
                    return self._hit(old)
        return None

    def _storable(self, request: Any, response: Any, conditions: Conditions) -> Storable | None:
        if not isinstance(response, HttpResponseBase):
            return None
        conditions.complete(response)
        page = self.middleware.storable(request, response)
        if page is not None and not conditions.of_client:
            return page
        self.skipped = why_not_stored(self.request, response, conditions.of_client)
        view = self.middleware.options.get("group") or self.request.path
        if logger.isEnabledFor(DEBUG) and may_log(view, _logged_at):  # Once a minute.
            logger.debug("A page of %s is not stored: %s", view, self.skipped)
        return None

    def _store(self, key: str, page: Storable | None, response: Any, generation: str) -> Steps[Any]:
        """Store what the flight of ``key`` does not store; returns the value for ``key``."""
        if page is None:
            return None
        self.timeout = page.timeout
        response._fresh_until = system.time() + page.timeout
        if (yield from self._is_of(generation)):  # Redis answers, too.
            with suppress(*_FAILED):
                yield from self._store_aside(key, page, response, generation)
        return {page.page_key: response, page.header_key: page.headers}.get(key)

    def _store_aside(
        self, key: str, page: Storable, response: HttpResponseBase, generation: str
    ) -> Steps[None]:
        """What the flight of ``key`` does not store: the page, or the names of its headers. Their
        keys have other flights, or none, which ``clear()`` would end."""
        if key != page.page_key:
            options = GetOrSetOptions.of(self.cache.conf, page.timeout, **self.middleware.options)
            lifetime = options.lifetime(page.timeout)(response) / 1000
            yield self._do("set", page.page_key, response, lifetime)
            if not (yield from self._is_of(generation)):
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
        made = uuid4().hex
        with suppress(*_FAILED):
            if not (yield self._do("add", key, made, None)):
                found = yield from self._read(key)
                if found is MISSING:  # What is there cannot be decoded.
                    yield self._do("set", key, made, None)
        return made if found is MISSING else found

    def _is_of(self, generation: str) -> Steps[bool]:
        """Whether the cache has not been emptied since, except by the view itself while its flight
        is under way: its page is newer than that."""
        now = yield from self._read(GENERATION.format(self.middleware.key_prefix))
        if now == generation or not self.own.own_writes or self.flight is None:
            return bool(now == generation)
        key, token = self.flight
        runner, found = self._runner(), None
        with suppress(*_FAILED):
            [found] = yield runner.run(Call(FLIGHT_TOKEN, (flight_key(key),), ()))
        return found is not None and as_bytes(found) == token

    def _runner(self) -> Any:
        values = self.cache._values
        return values.async_runner() if self.asynchronous else values.thread_runner()

    def _page_lifetime(self, page: object) -> float:
        return NOT_CACHEABLE_SECONDS if page is None else self.timeout

    def _headers_lifetime(self, headers: list[str] | None) -> float:
        """When that of a page is over, the key of each next one is known."""
        if headers is None:
            return NOT_CACHEABLE_SECONDS
        options = GetOrSetOptions.of(self.cache.conf, self.timeout, **self.middleware.options)
        return 2 * (self.timeout + options.stale)


# -- responses -------------------------------------------------------------------------------------


class PageFailed(Exception):
    """The view answered with a temporary error, which says nothing about the page."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"status {response.status_code}")
        self.response = response


class NotThePage(BaseException):
    """The view answered to a condition of the request, which says nothing about the page."""

    def __init__(self, response: object) -> None:
        super().__init__()
        self.response = response


def raise_unless_about_the_page(response: object, mine: bool) -> None:
    """
    Args:
        mine: whether the client of the request gets this response.

    Raises:
        PageFailed, NotThePage: the status depends on the moment, or on a condition of the request.
    """
    status, headers = getattr(response, "status_code", 200), getattr(response, "headers", ())
    if status in _ANSWERS_TO_CONDITIONS and mine:
        raise NotThePage(response)
    if status >= 500 or status in _TEMPORARY or status in _ANSWERS_TO_CONDITIONS:
        raise PageFailed(response)
    if "Retry-After" in headers or hasattr(response, "is_of_this_moment"):
        raise PageFailed(response)


def why_not_stored(request: object, response: HttpResponseBase, of_client: str) -> str:
    """Why ``response`` is no page: ``sets a cookie``. The rules are Django's."""
    cache_control = response.get("Cache-Control", "").lower()
    says = [name for name in ("private", "no-cache", "no-store") if name in cache_control]
    if of_client:
        why = "is of a user" if of_client == "a user" else f"has {of_client}"
    elif response.streaming:
        why = "is a stream"
    elif response.status_code != 200:
        why = f"status {response.status_code}"
    elif response.cookies:
        why = "sets a cookie"
    elif says:
        why = f"Cache-Control: {says[0]}"
    elif has_vary_header(response, "*"):
        why = "Vary: *"
    elif not getattr(request, "_cache_update_cache", True):
        why = "its request says so"
    else:
        why = "max-age=0" if get_max_age(response) == 0 else "timeout 0"
    return why


def conditional(request: HttpRequest, response: object) -> object:
    """``response``, or what Django answers instead to the conditions of ``request``: that its
    client has this page."""
    if not isinstance(response, HttpResponseBase) or response.status_code != 200:
        return response
    etag, modified = response.get("ETag"), response.get("Last-Modified")
    date = parse_http_date_safe(modified) if modified else None
    if not etag and date is None:
        return response
    return get_conditional_response(request, etag, date, cast(HttpResponse, response))


def close_without_signal(response: Any) -> None:
    """Close the files of a response that is not sent. Its own ``close()`` would tell Django that
    the request has ended."""
    for closer in response._resource_closers:
        with suppress(Exception):
            closer()


def is_unrendered(response: object) -> bool:
    return not getattr(response, "is_rendered", True)


class OpenFlight(Postponed):
    """The flight of a page that is not rendered: it goes on for its timeout, and longer with
    ``renew``, until it is ``closed``. (Without a leader, Redis was down when it began.)"""

    def renew(self) -> None:
        """The rest of the computation begins: the keeper renews the flight."""
        for renewal in self.leader.renewals if self.leader else ():
            keeper().add(renewal)

    def closed(self) -> Any:
        """Its leader, who ends it: with ``resume`` or without a value. Only the first call has
        it."""
        leader, self.leader = self.leader, None
        return leader

    def drop(self) -> None:
        """End the flight without a value: the rest of the computation will never begin. The garbage
        collector may call this, so the keeper does it."""
        leader = self.closed()
        if leader is not None:
            leader.end_later()


class Rendering:
    """A response that is rendered after its view has returned. By then the decorators around the
    view have set their headers, so Django decides after the rendering what is stored.

    Args:
        conditions: of the request; the rendering does not see them.
        ended: called with the flight, and with the rendered response and None, or None and the
            exception that the rendering raised; returns the response to send, or None to let that
            exception be raised.
    """

    inner: Rendering | None

    def __init__(
        self,
        conditions: Conditions,
        ended: Callable[[OpenFlight, Any, BaseException | None], object],
    ) -> None:
        self.flight = OpenFlight()
        self._conditions, self._ended = conditions, ended

    def of(self, response: Any) -> Any:
        """``response``, whose ``render`` is this."""
        #: That of a page within this one.
        self.inner = vars(response).get("_rendering")
        if self.inner is None:
            kind: object = type(response)
            response = _as(_with_rendering(kind), response)
        response._rendering = self
        response.add_post_render_callback(self._decide)
        # Of the flight, not of this: a request may refer to its response, which is to be freed.
        weakref.finalize(response, self.flight.drop).atexit = False
        return response

    def render(self, response: Any) -> object:
        self._conditions.take_out()
        self.flight.renew()
        try:
            return response.render()
        except BaseException as error:
            self._conditions.put_back()
            instead = self._ended(self.flight, None, error)
            if instead is None:
                raise
            return instead
        finally:
            self._conditions.put_back()

    def _decide(self, response: HttpResponseBase) -> object:
        self._conditions.put_back()
        return self._ended(self.flight, response, None)


@cache
def _with_rendering(kind: Any) -> Any:
    """A class of responses whose ``render`` begins with that of a ``Rendering``; what that renders
    is of ``kind`` again."""

    def render(response: Any) -> object:
        rendering = vars(response).pop("_rendering")
        if rendering.inner is not None:
            response._rendering = rendering.inner
            return rendering.render(response)
        return rendering.render(_as(kind, response))  # The flight ends if ``response`` is freed.

    return type(kind.__name__, (kind,), {"render": render, "__module__": kind.__module__})


def _as(kind: Any, response: object) -> Any:
    """``response``, with all its attributes, as one of ``kind``."""
    same = object.__new__(kind)
    same.__dict__ = vars(response)
    return same


def copied(request: HttpRequest) -> Any:
    """A copy for the background: what a view changes is not seen by the request's middleware."""
    copy: Any = object.__new__(type(request))
    vars(copy).update(vars(request))
    copy.META = dict(request.META)
    if hasattr(request, "_request"):  # Django REST framework wraps Django's.
        copy._request = copied(request._request)
    copy._cache_update_cache = True
    return copy
