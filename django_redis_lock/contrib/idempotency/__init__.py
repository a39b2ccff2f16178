"""The same request twice gives the same answer once.

A client sends a payment again after a time-out, or a webhook is delivered three times. The first
request runs under a lock, and the cache keeps its response for the repeats. The answers follow
draft-ietf-httpapi-idempotency-key-header.

The record of a request, in the cache, has what was sent (a hash), how often the view began, and,
once it has ended, the response. It is written before the lock is released, and after the commit if
a transaction is open then.
"""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from uuid import UUID

from django.http import HttpResponse, HttpResponseBase, JsonResponse
from django.utils.translation import gettext as _
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ...activity import request_of
from ...cache import lock_cache
from ...conf import SETTING, Conf
from ...contention import Conflict, service_unavailable
from ...decorators import current_lock, locked
from ...decorators.key_template import Args, Kwargs, Template
from ...decorators.section import by_steps, called, in_thread
from ...decorators.targets import Target, view_of
from ...decorators.transactions import after_commit
from ...protocol.validation import check_count, check_seconds
from ...steps import Steps
from ...threads import check_plain, get_logger
from .requests import Scope, digest, field, header, of_django, what_is_sent

if TYPE_CHECKING:
    from ...cache import CurrentLock, RedisCache

__all__ = ["Idempotency", "field", "header", "idempotent"]

logger = get_logger("django_redis_lock.idempotency")

V = TypeVar("V")

#: Always kept: without them the body means something else.
_OF_BODY = ("Content-Type", "Content-Encoding")
#: Of a response that is kept. Cookies are its first client's.
KEPT_HEADERS = (
    *("Content-Type", "Content-Language", "Content-Disposition", "Content-Location"),
    *("Location", "ETag", "Last-Modified", "Link", "Cache-Control", "Retry-After", "Vary"),
)
#: What a repeat's response has in addition.
REPLAYED = "Idempotency-Replayed"
#: The longest key that a client may send, in characters.
MAX_KEY_LENGTH = 255
#: An attribute of a request: its visits, by view.
_VISITS = "_idempotent"
#: In place of an answer: the view is to run.
_RUN = object()
_FAILED = (ConnectionInterrupted, RedisError)


class Idempotency(NamedTuple):
    """What a view finds as ``request.idempotency``.

    Attributes:
        key: as the client sent it.
        attempt: 1, or more if the view began before for this key and did not end well: it raised,
            answered with a server error, or its process died, perhaps after it had done its work.
        fence: the fence of the lock under which it runs; see ``Lock.fence``.
    """

    key: str
    attempt: int
    fence: int | None


def idempotent(
    *,
    scope: str | Callable[..., object] | None,
    key: Callable[[Any], str | None] = header("Idempotency-Key"),  # noqa: B008  # it is immutable
    ttl: float = 86_400,
    methods: Sequence[str] = ("POST", "PATCH"),
    required: bool = False,
    wait: float = 0,
    timeout: float | None = SETTING,
    using: str | None = None,
    keep_errors: bool = False,
    headers: Sequence[str] = KEPT_HEADERS,
    max_body: int = 262_144,
) -> Callable[[V], V]:
    """Run a view once for each key that clients send: ``@idempotent(scope="{request.user.pk}")`` on
    a function or coroutine function, on a class of views, or on a method of one.

    * The first request runs, and its response is kept.
    * A repeat gets the kept response, with the header ``Idempotency-Replayed: true``.
    * A repeat while the first request runs waits for ``wait`` seconds, and then gets 409 with
      ``Retry-After``.
    * The same key with another method, path or body gets 422.
    * A view that raises or answers with a server error (5xx) has not ended: a repeat runs it
      again, and ``request.idempotency.attempt`` says so. So does a request whose process died,
      when its lock's lifetime has ended.

    Within a transaction (ATOMIC_REQUESTS) the response is kept after the commit, and the lock is
    released after that. Redis must be up: otherwise the answer is 503, and nothing runs.

    Args:
        scope: whose keys these are: a template over ``request`` and the arguments of the URL, or a
            callable that takes the view's arguments. Two users may send the same key. If a field,
            or what the callable returns, is empty (no user, no such header), the cookie of the
            session or of forms and the ``Authorization`` of the request tell its client from
            others; without these it is refused. None, or a text without a field: all clients have
            one space of keys, as the deliveries of a webhook do; then an authenticated request is
            refused.
        key: takes the request and returns its key; None or empty: it has none.
        ttl: seconds for which a response is kept.
        methods: the HTTP methods that are protected.
        required: answer a request without a key with 400, instead of running it unprotected.
        wait: seconds that a repeat waits for the first request.
        timeout: seconds; the lifetime of the lock, which is renewed while the view runs. Default:
            the setting TIMEOUT.
        using: the cache alias. Default: the setting USING.
        keep_errors: keep responses with 5xx, too.
        headers: the names of the headers that are kept.
        max_body: bytes of a response that are kept. Of a longer one, and of one that is streamed,
            only the status is: a repeat does not run, and gets 409.

    Raises:
        TypeError, ValueError: an argument is invalid.
        ImproperlyConfigured: at the call: there is no scope, and the request is authenticated; or
            nothing in the request says whose it is (Django answers with 400); or the cache cannot
            lock.
    """
    check_seconds("ttl", ttl)
    check_seconds("wait", wait, zero=True)
    check_count("max_body", max_body)
    if not callable(key):
        raise TypeError(f'key must be a callable, such as header("Idempotency-Key"), not {key!r}')
    if not (scope is None or callable(scope) or isinstance(scope, str)):
        raise TypeError(f"scope must be a str, a callable or None, not {scope!r}")
    check_plain("key", key)
    check_plain("scope", scope)
    if isinstance(methods, str) or not all(isinstance(method, str) for method in methods):
        raise TypeError(f"methods must be a list of names, not {methods!r}")
    verbs = frozenset(map(str.upper, methods))
    whose = Scope(scope)
    all_headers = tuple(dict.fromkeys((*_OF_BODY, *headers)))
    rules = _Rules(whose, key, ttl, verbs, required, using, keep_errors, all_headers, max_body)
    options: Any = {"timeout": timeout, "using": using, "critical": True}
    if wait:
        options.update(blocking=True, blocking_timeout=wait)

    def decorate(target: object) -> Any:
        return Target("idempotent", target).wrap(
            lambda function, dotted: _View(rules, function, options, dotted).wrapper()
        )

    return decorate


class _Rules(NamedTuple):
    """The arguments of ``idempotent``."""

    scope: Scope
    key: Callable[[object], str | None]
    ttl: float
    methods: frozenset[str]
    required: bool
    using: str | None
    keep_errors: bool
    headers: tuple[str, ...]
    max_body: int

    def storable(self, response: object) -> bool:
        return self.keep_errors or _status_of(response) < 500

    def stored(self, response: object) -> dict[str, object]:
        """What a record has of ``response``; without its body if that is too long. What is no
        response becomes one later, as the results of Django Ninja's operations do."""
        stored: dict[str, object] = {"status": _status_of(response), "body": None}
        if not isinstance(response, HttpResponseBase):
            return {**stored, "result": response}
        if isinstance(response, HttpResponse) and len(response.content) <= self.max_body:
            present = [name for name in self.headers if name in response.headers]
            stored["headers"] = [(name, response.headers[name]) for name in present]
            stored["body"] = base64.b64encode(response.content).decode()
        return stored


class _Visit:
    """One request with a key that can be used.

    Attributes:
        name: of the lock, and of the record.
        sent: a hash of what its repeats must send, too.
        began: whether the view may have run.
    """

    def __init__(self, rules: _Rules, request: Any, key: str, of: Sequence[str]) -> None:
        self.request, self.key, self.began = request, key, False
        self.name = f"idempotent-{digest([json.dumps([*of, key]).encode()])}"
        self.sent = digest(what_is_sent(request))
        self.cache: Any = lock_cache(rules.using or Conf().USING)

    def answer(self, record: Any) -> object:
        """What ``record``, of an earlier request, says; _RUN: the view is to run."""
        if record is None:
            return _RUN
        if record["sent"] != self.sent:
            return _problem(422, _("This idempotency key was used for another request."))
        if "status" not in record:
            return _RUN
        if "result" in record:
            return record["result"]
        if record["body"] is None:
            return _problem(409, _("This operation was carried out; its response was not kept."))
        response = HttpResponse(base64.b64decode(record["body"]), status=record["status"])
        for name, value in record["headers"]:
            response.headers[name] = value
        response.headers[REPLAYED] = "true"
        return response

    def next(self, record: Any) -> dict[str, object]:
        """The record of the request that begins now."""
        attempt = record["attempt"] + 1 if record else 1
        mine = Idempotency(self.key, attempt, getattr(current_lock(), "fence", None))
        self.request.idempotency = of_django(self.request).idempotency = mine
        return {"sent": self.sent, "attempt": attempt}


class _View:
    """A view that is idempotent."""

    def __init__(self, rules: _Rules, function: Any, options: dict[str, Any], dotted: str) -> None:
        self.rules, self.function, self.dotted = rules, function, dotted
        self._given = ""  # By it, two partials of one view are two operations.
        if isinstance(function, functools.partial) and (function.args or function.keywords):
            with suppress(ValueError):  # Some have no text that is the same in each process.
                given = [*function.args, *sorted(function.keywords.items())]
                self._given = Template("{given}", typed=True).fill({"given": given})
        options = {**options, "label": self.dotted, "group": f"idempotent {self.dotted}"[:100]}
        self._locked: Any = locked(key=self._name, on_conflict=self._conflict, **options)(
            self._wrapped(self._steps)
        )

    def wrapper(self) -> Any:
        return functools.wraps(self._locked)(self._wrapped(self._choose))

    def _wrapped(self, steps: Callable[..., Steps[object]]) -> Any:
        return functools.wraps(self.function)(by_steps(self.function, steps))

    def _choose(self, asynchronous: bool, args: Args, kwargs: Kwargs) -> Steps[object]:
        visit = yield in_thread(asynchronous, self._visit, args, kwargs)
        if isinstance(visit, HttpResponse):
            return visit
        call = self._locked if visit else self.function
        try:
            answer = called(call, *args, **kwargs)
            return (yield answer) if asynchronous else answer
        except _FAILED as error:
            if visit is None or visit.began:
                raise
            return service_unavailable(visit.request, visit.name, error, None, json=True)

    def _visit(self, args: Args, kwargs: Kwargs) -> _Visit | HttpResponse | None:
        """The visit; or the answer to a request whose key cannot be used; None: no protection."""
        request, rules = request_of(args, kwargs), self.rules
        if request is None:
            raise TypeError(f"idempotent() needs a request among the arguments of {self.dotted}")
        if request.method not in rules.methods:
            return None
        sent: object = rules.key(request)
        if not isinstance(sent, (str, int, UUID, type(None))):
            raise TypeError(f"key must return a str or None, not {sent!r}")
        key = "" if sent is None else str(sent).strip()
        if len(key) > MAX_KEY_LENGTH:
            return _problem(400, _("The idempotency key is too long."))
        if not key:
            missing = _("This operation needs an idempotency key.")
            return _problem(400, missing) if rules.required else None
        scope = rules.scope.of(request, args, kwargs)
        visit = _Visit(rules, request, key, (f"{self.dotted}{self._given}", *scope))
        vars(of_django(request)).setdefault(_VISITS, {})[self] = visit
        return visit

    def _noted(self, args: Args, kwargs: Kwargs) -> _Visit:
        visit: _Visit = vars(of_django(request_of(args, kwargs)))[_VISITS][self]
        return visit

    def _name(self, *args: object, **kwargs: object) -> str:
        return self._noted(args, kwargs).name

    def _conflict(self, conflict: Conflict, *args: object, **kwargs: object) -> object:
        """Another request with this key runs, or was answered a moment ago."""
        visit = self._noted(args, kwargs)
        try:
            answer = visit.answer(visit.cache.get(visit.name))
        except _FAILED:
            answer = _RUN  # The lock could be requested, so this passes: the client tries again.
        return conflict.response(visit.request, 409, json=True) if answer is _RUN else answer

    def _steps(self, asynchronous: bool, args: Args, kwargs: Kwargs) -> Steps[object]:
        """Run the view, under the lock."""
        visit, rules = self._noted(args, kwargs), self.rules
        cache = visit.cache
        # The cache's own method may hide an outage (IGNORE_EXCEPTIONS).
        record = yield in_thread(asynchronous, cache.client.get, visit.name)
        answer = visit.answer(record)
        if answer is not _RUN:
            return answer
        record = visit.next(record)
        if not (yield (cache.aset if asynchronous else cache.set)(visit.name, record, rules.ttl)):
            raise RedisConnectionError("the beginning of the request could not be stored")
        visit.began = True
        response = called(self.function, *args, **kwargs)
        response = (yield response) if asynchronous else response
        response = self._rendered(response, args, kwargs)
        if rules.storable(response):
            record.update(rules.stored(response))
            keep = functools.partial(_keep, current_lock(), cache, visit.name, record, rules.ttl)
            if asynchronous:  # Django has no transactions for it.
                yield in_thread(True, keep)
            else:
                after_commit(keep)
        return response

    def _rendered(self, response: Any, args: Args, kwargs: Kwargs) -> object:
        if getattr(response, "is_rendered", True):
            return response
        request = request_of(args, kwargs)
        of_api_view = (getattr(request, "parser_context", None) or {}).get("view")
        view: Any = view_of(self.function, args) or of_api_view
        if hasattr(view, "finalize_response"):  # Of Django REST framework.
            response = view.finalize_response(view.request, response, **kwargs)
        return response.render()


def _keep(
    lock: CurrentLock, cache: RedisCache, name: str, record: dict[str, Any], ttl: float
) -> None:
    """The work is done, and its client gets the response: a failure here is not the client's. Who
    has lost the lock does not replace what another attempt has stored since."""
    try:
        stored: Any = cache.get(name) if lock.lost else None
        if stored is not None and stored["attempt"] != record["attempt"]:
            return
        if not cache.set(name, record, ttl):
            raise RedisConnectionError("the response could not be stored")
    except Exception:  # Also of a result that cannot be encoded.
        logger.exception(
            "The response for %(record)s was not kept: a repeat of the request runs again",
            {"record": name},
        )


def _status_of(response: object) -> int:
    """Of a view's response, or of what an operation of Django Ninja returns: ``(status, result)``,
    or a result."""
    if isinstance(response, tuple) and response and isinstance(response[0], int):
        return response[0]
    return int(getattr(response, "status_code", 200))


def _problem(status: int, detail: str) -> HttpResponse:
    response = JsonResponse({"detail": detail}, status=status)
    response.headers["Cache-Control"] = "no-store"
    return response
