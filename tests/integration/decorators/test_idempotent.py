"""``idempotent()``: the same request twice gives the same answer once, for each kind of view."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
import redis
from django.contrib.auth.models import AnonymousUser, User
from django.contrib.sessions.backends.signed_cookies import SessionStore
from django.core.cache import caches
from django.core.exceptions import BadRequest, ImproperlyConfigured
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.http import HttpRequest, HttpResponse, QueryDict, StreamingHttpResponse
from django.template import Context, Template, engines
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.gzip import gzip_page
from rest_framework.decorators import api_view
from rest_framework.parsers import BaseParser, FormParser
from rest_framework.permissions import BasePermission
from rest_framework.response import Response
from rest_framework.views import APIView

from django_redis_lock import current_lock, idempotent
from django_redis_lock.contrib.idempotency import field, header
from tests.processes import Link, processes, until
from tests.redis_server import RedisServer

#: What a view does, and how often it did.
runs: list[str] = []
Act = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def none_yet() -> Iterator[None]:
    runs.clear()
    yield
    runs.clear()


def pay(request: Any) -> HttpResponse:
    runs.append(request.user.pk)
    body = json.dumps({"payment": len(runs), "attempt": request.idempotency.attempt})
    response = HttpResponse(body, status=201, content_type="application/json")
    response["Location"] = f"/payments/{len(runs)}"
    response["X-Secret"] = "not kept"
    response.set_cookie("session", "of the first client")
    return response


def function(act: Act, **options: Any) -> Any:
    @idempotent(**options)
    def view(request: HttpRequest) -> Any:
        return act(request)

    return view


def coroutine_function(act: Act, **options: Any) -> Any:
    @idempotent(**options)
    async def view(request: HttpRequest) -> Any:
        return act(request)

    return lambda request: asyncio.run(view(request))


def class_of_views(act: Act, **options: Any) -> Any:
    @idempotent(**options)
    class Payments(View):
        def post(self, request: HttpRequest) -> Any:
            return act(request)

        get = post

    return Payments.as_view()


def class_of_coroutines(act: Act, **options: Any) -> Any:
    @idempotent(**options)
    class Payments(View):
        async def post(self, request: HttpRequest) -> Any:
            return act(request)

        async def get(self, request: HttpRequest) -> Any:
            return act(request)

    return lambda request: asyncio.run(Payments.as_view()(request))


def method(act: Act, **options: Any) -> Any:
    class Payments(View):
        @idempotent(**options)
        def post(self, request: HttpRequest) -> Any:
            return act(request)

        get = post

    return Payments.as_view()


def dispatch(act: Act, **options: Any) -> Any:
    @method_decorator(idempotent(**options), name="dispatch")
    class Payments(View):
        def post(self, request: HttpRequest) -> Any:
            return act(request)

        get = post

    return Payments.as_view()


def _for_rest_framework(act: Act) -> Any:
    def handle(self: Any, request: Any) -> Any:
        made = act(request)
        if type(made) is not HttpResponse or not made["Content-Type"].endswith("json"):
            return made
        headers = {name: made[name] for name in ("Location", "X-Secret") if name in made}
        response = Response(json.loads(made.content), made.status_code, headers=headers)
        response.cookies = made.cookies
        return response

    return handle


def rest_framework(act: Act, **options: Any) -> Any:
    @idempotent(**options)
    class Payments(APIView):
        post = get = _for_rest_framework(act)

    return Payments.as_view()


def method_of_rest_framework(act: Act, **options: Any) -> Any:
    class Payments(APIView):
        post = get = idempotent(**options)(_for_rest_framework(act))

    return Payments.as_view()


def below_api_view(act: Act, **options: Any) -> Any:
    handle = _for_rest_framework(act)

    @idempotent(**options)
    def view(request: Any) -> Any:
        return handle(None, request)

    return api_view(["GET", "POST"])(view)


KINDS = (
    *(function, coroutine_function, class_of_views, class_of_coroutines, method, dispatch),
    *(rest_framework, method_of_rest_framework, below_api_view),
)
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def sent(
    key: str | None = "k-1",
    user: str = "7",
    body: Any = '{"amount": 5}',
    verb: str = "post",
    **more: Any,
) -> Any:
    headers = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
    more.setdefault("content_type", "application/json")
    if verb == "get":
        body = None
    request = getattr(RequestFactory(), verb)("/pay", body, **more, **headers)
    request.user = SimpleNamespace(pk=user, is_authenticated=True, is_active=True)
    request._dont_enforce_csrf_checks = True
    return request


BY_USER: dict[str, Any] = {"scope": "{request.user.pk}"}


def of(response: Any) -> tuple[int, Any]:
    return response.status_code, json.loads(response.content or "null")


def kind_of(response: Any) -> str:
    """Of what content. Django REST framework has yet to render it."""
    return str(getattr(response, "accepted_media_type", response["Content-Type"]))


# -- a repeat ------------------------------------------------------------------------------------


@of_each_kind
def test_a_repeat_gets_the_kept_response(kind: Any) -> None:
    """The same of another user, or with another key, is another request; another body or query
    with this key is refused."""
    view = kind(pay, **BY_USER)
    first, again = view(sent()), view(sent())
    assert of(first) == of(again) == (201, {"payment": 1, "attempt": 1})
    assert (again["Location"], again["Content-Type"]) == ("/payments/1", "application/json")
    assert again["Idempotency-Replayed"] == "true"
    assert "Idempotency-Replayed" not in first.headers
    assert "X-Secret" not in again.headers
    assert not again.cookies
    assert runs == ["7"]
    for other in ({"body": '{"amount": 6}'}, {"QUERY_STRING": "twice"}):
        assert view(sent(**other)).status_code == 422
    view(sent(user="8"))
    view(sent("k-2"))
    assert runs == ["7", "8", "7"]


@of_each_kind
def test_a_repeat_while_the_first_runs(kind: Any) -> None:
    """It gets 409, or waits; and another body is refused even then."""
    begun, go_on = threading.Event(), threading.Event()

    def slow(request: Any) -> HttpResponse:
        begun.set()
        go_on.wait(30)
        return pay(request)

    view, waiting = kind(slow, **BY_USER), []
    first = threading.Thread(target=lambda: waiting.append(view(sent())))
    first.start()
    try:
        assert begun.wait(30)
        refused = view(sent())
        assert (refused.status_code, kind_of(refused)) == (409, "application/json")
        assert int(refused["Retry-After"]) >= 1
        assert view(sent(body="{}")).status_code == 422
    finally:
        go_on.set()
        first.join()
    assert waiting[0].status_code == 201
    assert view(sent())["Idempotency-Replayed"] == "true"
    assert runs == ["7"]


@of_each_kind
def test_a_repeat_waits_if_it_may(kind: Any) -> None:
    begun, answers = threading.Event(), []

    def slow(request: Any) -> HttpResponse:
        begun.set()
        second.start()
        return pay(request)

    view = kind(slow, **BY_USER, wait=30)
    second = threading.Thread(target=lambda: answers.append(view(sent())))
    view(sent())
    second.join()
    assert answers[0]["Idempotency-Replayed"] == "true"
    assert runs == ["7"]


# -- what did not end well -----------------------------------------------------------------------


@of_each_kind
@pytest.mark.parametrize("outcome", ["raises", 500, 503])
def test_a_failure_is_not_kept(kind: Any, outcome: Any) -> None:
    def fail_once(request: Any) -> HttpResponse:
        if request.idempotency.attempt == 1:
            if outcome == "raises":
                raise ZeroDivisionError
            return HttpResponse(status=outcome)
        return pay(request)

    view = kind(fail_once, **BY_USER)
    try:
        view(sent())
    except ZeroDivisionError:
        assert outcome == "raises"
    assert of(view(sent())) == (201, {"payment": 1, "attempt": 2})


@of_each_kind
@pytest.mark.parametrize(("status", "options"), [(499, {}), (500, {"keep_errors": True})])
def test_a_clients_error_is_kept_and_a_servers_if_asked(
    kind: Any, status: int, options: Any
) -> None:
    view = kind(lambda r: runs.append("ran") or HttpResponse(status=status), **BY_USER, **options)
    assert [view(sent()).status_code for _ in range(2)] == [status] * 2
    assert runs == ["ran"]


def dies(link: Link, url: str) -> None:
    def die(request: Any) -> HttpResponse:
        link.say("began")
        link.hear()
        raise AssertionError

    function(die, **BY_USER, timeout=1)(sent())


def test_a_request_whose_process_died_runs_again(redis_server: RedisServer) -> None:
    with processes(dies, redis_server.url) as (worker,):
        worker.go()
        assert worker.hear() == "began"
        worker.kill()
    view = function(pay, **BY_USER, timeout=60, wait=30)
    assert of(view(sent())) == (201, {"payment": 1, "attempt": 2})


@of_each_kind
@pytest.mark.parametrize("another", [True, False])
def test_a_request_that_has_lost_its_lock_replaces_no_answer(kind: Any, another: bool) -> None:
    """If another has run and was answered, its client's repeats must get the same."""
    answers: list[Any] = []

    def lose(request: Any) -> HttpResponse:
        if not answers:
            answers.append(None)
            assert caches["default"].reset_all() == 1
            until(lambda: current_lock().lost)
            if another:
                thread = threading.Thread(target=lambda: answers.append(of(view(sent()))))
                thread.start()
                thread.join()
        return pay(request)

    view = kind(lose, **BY_USER)
    answers.append(of(view(sent())))
    assert of(view(sent())) == answers[1]
    assert len(runs) == 1 + another


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("rolled_back", [False, True])
def test_in_a_transaction_the_commit_decides(rolled_back: bool) -> None:
    view = function(pay, **BY_USER)
    with transaction.atomic():
        view(sent())
        assert "status" not in caches["default"].get(name_in_cache())
        transaction.set_rollback(rolled_back)
    again = view(sent())
    assert of(again)[1]["attempt"] == (2 if rolled_back else 1)
    assert len(runs) == (2 if rolled_back else 1)


def name_in_cache() -> str:
    [name] = caches["default"].keys("idempotent-*")
    return str(name)


# -- what is sent --------------------------------------------------------------------------------


def test_a_form_has_a_field_for_it() -> None:
    shown = Template("{% load redis_lock %}{% idempotency_key %}").render(Context())
    assert shown.startswith('<input type="hidden" name="idempotency_key" value="')


@of_each_kind
def test_without_a_key_or_by_another_method(kind: Any) -> None:
    """It runs each time, or is refused."""

    def act(request: Any) -> HttpResponse:
        assert not hasattr(request, "idempotency")
        runs.append("ran")
        return HttpResponse()

    view = kind(act, **BY_USER)
    for request in (sent(None), sent(""), sent(" "), sent(verb="get"), sent(verb="get")):
        assert view(request).status_code == 200
    assert len(runs) == 5
    assert kind(act, **BY_USER, required=True)(sent(None)).status_code == 400
    assert kind(act, **BY_USER)(sent("k" * 256)).status_code == 400
    assert len(runs) == 5


@of_each_kind
@pytest.mark.parametrize("scope", [None, "", "payments"])
def test_a_scope_that_says_nothing_is_for_clients_without_accounts(kind: Any, scope: Any) -> None:
    view = kind(lambda request: runs.append("ran") or HttpResponse(), scope=scope)
    with pytest.raises(ImproperlyConfigured, match="authenticated"):
        view(sent())
    assert not runs
    anonymous, without_user = sent(), sent()
    anonymous.user = AnonymousUser()
    del without_user.user
    assert [view(each).status_code for each in (anonymous, without_user)] == [200, 200]
    assert runs == ["ran"]


def test_a_scope_may_be_a_function() -> None:
    view = function(pay, scope=lambda request: request.user.pk, key=header("X-Delivery"))
    for user in ("7", "7", "8"):
        view(sent(None, user, HTTP_X_DELIVERY="d"))
    assert runs == ["7", "8"]


# -- whose it is, and what was sent --------------------------------------------------------------


class Someone:
    """A user whose text is not theirs alone."""

    is_authenticated = True

    def __init__(self, pk: int, name: str) -> None:
        self.pk, self.name = pk, name


def sams(**more: Any) -> list[Any]:
    return [{"user": User(pk=pk, username="sam"), **more} for pk in (1, 2)]


def nobodies(header: str, *values: str) -> list[Any]:
    return [{"user": AnonymousUser(), header: value} for value in values]


#: A scope, and the two clients that send the same with one key.
SCOPES: dict[str, Any] = {
    "parts that could be read in two ways": (
        "{request.user.name}-{request.org}",
        [{"user": Someone(1, "a-b"), "org": "c"}, {"user": Someone(2, "a"), "org": "b-c"}],
    ),
    "a number and its text": (
        "{request.org}",
        [{"user": Someone(1, "a"), "org": org} for org in (1, "1")],
    ),
    "the text of a user": ("{request.user}", sams()),
    "a user by a function": (lambda request: request.user, sams()),
    "several by a function": (lambda request: [request.org, request.user], sams(org=1)),
    "visitors with cookies": (
        "{request.user.pk}",
        nobodies("HTTP_COOKIE", f"csrftoken={'a' * 32}", f"csrftoken={'b' * 32}"),
    ),
    "visitors with sessions": (
        lambda request: request.user,
        nobodies("HTTP_COOKIE", "sessionid=a", "sessionid=b"),
    ),
    "clients whose token is read later": (
        "{request.user.pk}",
        nobodies("HTTP_AUTHORIZATION", "Token a", "Token b"),
    ),
    "keys in a header": (
        "{request.headers[X-Api-Key]}",
        nobodies("HTTP_X_API_KEY", "a", "b"),
    ),
    "keys in a header, by a function": (
        lambda request: request.user.pk or request.headers["X-Api-Key"],
        nobodies("HTTP_X_API_KEY", "a", "b"),
    ),
    "visitors by a function that knows none": (
        lambda request: request.user.pk,
        nobodies("HTTP_AUTHORIZATION", "Token a", "Token b"),
    ),
}


@pytest.mark.parametrize("case", SCOPES.values(), ids=SCOPES)
def test_no_client_gets_the_answer_to_another(case: Any) -> None:
    scope, clients = case

    def act(request: Any) -> Any:
        runs.append("")
        return HttpResponse(str(len(runs)))

    view = function(act, scope=scope)

    def answer(user: Any, org: Any = None, **headers: Any) -> Any:
        request = sent(**headers)
        request.user, request.org = user, org
        return view(request)

    answers = [answer(**client) for client in (*clients, *clients)]
    assert [each.content for each in answers] == [b"1", b"2", b"1", b"2"]
    assert ["Idempotency-Replayed" in each for each in answers] == [False, False, True, True]


@pytest.mark.parametrize("key", [7, UUID(int=7), "7"])
def test_a_key_from_the_body_may_be_a_number(key: Any) -> None:
    view = function(pay, **BY_USER, key=lambda request: key)
    assert of(view(sent())) == of(view(sent()))
    with pytest.raises(TypeError, match="key must return"):
        function(pay, **BY_USER, key=lambda request: [key])(sent())
    assert len(runs) == 1


def test_a_result_that_cannot_be_encoded_reaches_its_client(caplog: Any) -> None:
    result = threading.Lock()
    assert function(lambda request: result, **BY_USER)(sent()) is result
    assert "was not kept" in caplog.text


@pytest.mark.parametrize("headers", [{}, {"headers": ("Location",)}], ids=["usual", "chosen"])
def test_what_the_body_is_stays_with_it(headers: Any) -> None:
    """Otherwise a compressed body would be no text, and JSON would be HTML."""

    def act(request: Any) -> Any:
        runs.append("")
        return HttpResponse(json.dumps(["<b>"] * 300), content_type="application/json")

    view = function(gzip_page(act), **BY_USER, **headers)
    first, repeat = (view(sent(HTTP_ACCEPT_ENCODING="gzip")) for _ in range(2))
    assert len(runs) == 1
    assert repeat.content == first.content
    for name in ("Content-Type", "Content-Encoding"):
        assert repeat[name] == first[name]


#: Bodies and queries that say the same, and such as do not.
SAME: list[tuple[Any, Any]] = [
    ('{"a": 1, "b": [1, {"c": 2, "d": 3}]}', '{"b":[1,{"d":3,"c":2}],\n"a":1}'),
    ('{"a": "\u00e9"}', '{"a": "\\u00e9"}'),
    ('{"\\ud83d\\ude00": "\\/"}', '{"\U0001f600": "/"}'),
    ("?b=2&a=1&a=0", "?a=1&a=0&b=2"),
    ("?a=%41+b", "?a=A%20b"),
]
OTHER: list[tuple[Any, Any]] = [
    *itertools.combinations(
        ("1", "1.0", '"1"', "true", "[1]", '{"1": 1}', "null", '""', "1e0", "{}", "[]", "0", "-0"),
        2,
    ),
    ("9007199254740993", "9007199254740992"),
    ("0.1", "0.10000000000000000001"),
    ("1e400", "2e400"),
    ("1" * 5000, "1" * 4999 + "2"),
    ('{"a": 1, "a": 2}', '{"a": 2}'),
    ('{"a": 1, "a": 2}', '{"a": 2, "a": 1}'),
    ('{"number": "1"}', "1"),
    ('{"pairs": [["a", 1]]}', '{"a": 1}'),
    ('{"a": [1, 2]}', '{"a": [2, 1]}'),
    ('{"a": " "}', '{"a": ""}'),
    ("{a: 1}", "{a:  1}"),
    ("[" * 100_000, "[" * 100_001),
    (b'"\xff"', b'"\xfe"'),
    ("?a=1&a=0", "?a=0&a=1"),
    ("?a=%FF", "?a=%FE"),
    ("?a", "?b"),
]
CONTENT_TYPES = ("application/json", "application/vnd.api+json", "application/json; charset=utf-8")


def of_rest_framework_that_was_read(act: Act, **options: Any) -> Any:
    class Payments(APIView):
        permission_classes = (WithData,)

        @idempotent(**options)
        def post(self, request: Any) -> Any:
            return act(request)

    return Payments.as_view()


@pytest.mark.parametrize("kind", [function, of_rest_framework_that_was_read])
@pytest.mark.parametrize("content_type", CONTENT_TYPES)
def test_a_repeat_may_be_written_in_another_way(kind: Any, content_type: str) -> None:
    if kind is of_rest_framework_that_was_read:
        content_type = CONTENT_TYPES[0]
    view, keys = kind(pay, **BY_USER), map(str, itertools.count())

    def answers(first: Any, second: Any) -> list[int]:
        key, found = next(keys), []
        for each in (first, second):
            is_query = isinstance(each, str) and each.startswith("?")
            what = {"QUERY_STRING": each[1:]} if is_query else {"body": each}
            found.append(view(sent(key, content_type=content_type, **what)).status_code)
        return found

    for same in SAME:
        assert answers(*same) == [201, 201], same
    assert len(runs) == len(SAME)
    if kind is function:
        for other in OTHER:
            assert answers(*other) == [201, 422], other
    else:
        assert answers('{"a": 1}', '{"a": 1.0}') == [201, 422]


class Stream(BaseParser):
    """Reads the stream, as the parsers of uploads do."""

    media_type = "text/plain"

    def parse(self, stream: Any, *of: object) -> Any:
        return {"text": stream.read().decode()}


class WithData(BasePermission):
    def has_permission(self, request: Any, view: object) -> bool:
        return bool(request.data)


@pytest.mark.parametrize("permissions", [(), (WithData,)], ids=["unread", "read"])
@pytest.mark.parametrize("size", [10, 900_000])
def test_a_body_that_django_does_not_hold(permissions: Any, size: int) -> None:
    """It has been read as a stream, or is longer than DATA_UPLOAD_MAX_MEMORY_SIZE."""

    @idempotent(**BY_USER)
    class Imports(APIView):
        parser_classes = (Stream,)
        permission_classes = permissions

        def post(self, request: Any) -> Any:
            runs.append("")
            return Response({"length": len(request.data["text"]), "run": len(runs)}, 201)

    def send(text: str) -> Any:
        return Imports.as_view()(sent(body=text, content_type="text/plain"))

    first, repeat, other = send("abc" * size), send("abc" * size), send("abd" * size)
    assert (first.status_code, repeat.status_code, other.status_code) == (201, 201, 422)
    assert first.data == json.loads(repeat.content) == {"length": 3 * size, "run": 1}


@pytest.mark.parametrize("command", ["get", "set"])
@pytest.mark.parametrize("kind", [function, coroutine_function])
def test_an_outage_that_the_cache_hides_runs_nothing(
    kind: Any, command: str, settings: Any, client: redis.Redis, redis_server: RedisServer
) -> None:
    """IGNORE_EXCEPTIONS: a record that cannot be read looks like one that is not there."""
    may = {"commands": ["+@all", f"-{command}"], "keys": ["*"], "channels": ["*"]}
    client.acl_setuser("some", True, passwords=["+pw"], reset=True, **may)
    view = kind(pay, **BY_USER)
    if command == "get":
        assert view(sent()).status_code == 201
    before = settings.CACHES["default"]
    settings.CACHES = {
        "default": {
            **before,
            "LOCATION": before["LOCATION"].replace("://", "://some:pw@"),
            "OPTIONS": {**before.get("OPTIONS", {}), "IGNORE_EXCEPTIONS": True},
        }
    }
    ran = len(runs)
    assert view(sent()).status_code == 503
    assert len(runs) == ran


# -- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [function, class_of_views, dispatch])
def test_a_template_response_is_kept_as_rendered(kind: Any) -> None:
    template = engines["django"].from_string("paid {{ n }}")
    view = kind(lambda r: TemplateResponse(r, template, {"n": len(runs)}), **BY_USER)
    assert view(sent()).content == view(sent()).content == b"paid 0"


@pytest.mark.parametrize(
    "response", [lambda: HttpResponse(b"x" * 11), lambda: StreamingHttpResponse([b"x"])]
)
def test_what_is_too_long_to_keep_does_not_run_again(response: Any) -> None:
    view = function(lambda request: runs.append("ran") or response(), **BY_USER, max_body=10)
    assert [view(sent()).status_code for _ in range(2)] == [200, 409]
    assert runs == ["ran"]
    longest = function(lambda request: HttpResponse(b"x" * 10), **BY_USER, max_body=10)
    assert [longest(sent("k-2")).content for _ in range(2)] == [b"x" * 10] * 2


def test_a_response_is_kept_for_its_ttl() -> None:
    function(pay, **BY_USER, ttl=100)(sent())
    assert 90 < caches["default"].ttl(name_in_cache()) <= 100


# -- Redis is down -------------------------------------------------------------------------------


@of_each_kind
def test_without_redis_nothing_runs(kind: Any, settings: Any) -> None:
    """Whatever the setting says."""
    nowhere = {**settings.CACHES["default"], "LOCATION": "redis://127.0.0.1:1/0"}
    settings.CACHES = {"default": nowhere}
    settings.DJANGO_REDIS_LOCK = {"ON_REDIS_DOWN": "run"}
    answer = kind(pay, **BY_USER)(sent())
    assert (answer.status_code, kind_of(answer)) == (503, "application/json")
    assert not runs


@of_each_kind
@pytest.mark.parametrize("verb", ["post", "get"])
def test_an_outage_in_the_view_is_the_views(kind: Any, verb: str) -> None:
    """It may have done its work."""

    def fail(request: Any) -> Any:
        runs.append("ran")
        raise redis.ConnectionError("of the view")

    with pytest.raises(redis.ConnectionError, match="of the view"):
        kind(fail, **BY_USER)(sent(verb=verb))
    assert runs == ["ran"]


def test_what_could_not_be_kept_is_logged(caplog: Any, monkeypatch: Any) -> None:
    view = function(pay, **BY_USER)
    cache = caches["default"]
    store = cache.set

    def fail(name: str, record: Any, *args: Any) -> Any:
        if "status" in record:
            raise ConnectionError
        return store(name, record, *args)

    monkeypatch.setattr(cache, "set", fail)
    assert view(sent()).status_code == 201
    assert "was not kept" in caplog.text


# -- it is used wrongly --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scope": 1}, "scope must be"),
        ({"scope": "{request.user.pk}{request.org}"}, "put a separator"),
        ({"key": "Idempotency-Key"}, 'header\\("Idempotency-Key"\\)'),
        ({"methods": "POST"}, "methods must be"),
        ({"methods": [5]}, "methods must be"),
        ({"ttl": 0}, "ttl must be"),
        ({"wait": -1}, "wait must be"),
        ({"max_body": -1}, "max_body must be"),
    ],
)
def test_bad_arguments_are_refused(options: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        idempotent(**{**BY_USER, **options})


def test_only_views_are_decorated() -> None:
    for target in (5, dict):
        with pytest.raises(TypeError, match="decorates views"):
            idempotent(**BY_USER)(target)
    with pytest.raises(TypeError, match="needs a request"):
        function(pay, **BY_USER)("no request")


#: Scopes that name the client, and what two clients without an account send besides one key and one
#: body. ``None``: nothing in the request tells it.
UNKNOWN: dict[str, Any] = {
    "keys in a header": ("{request.user.pk}", [{"HTTP_X_API_KEY": key} for key in "ab"]),
    "signed cookies": ("{request.user.pk}", [{"HTTP_COOKIE": f"account={name}"} for name in "ab"]),
    "an argument besides": ("{request.user.pk}-{request.path}", [{"HTTP_X_API_KEY": "a"}]),
    "the text of a user": ("{request.user}", [{"HTTP_X_API_KEY": "a"}]),
    "a user by a function": (lambda request: request.user, [{"HTTP_X_API_KEY": "a"}]),
    "several by a function": (lambda request: ["shop", request.user], [{"HTTP_X_API_KEY": "a"}]),
    "none by a function": (lambda request: [], [{}]),
    "no session yet": ("{request.session.session_key}", [{}]),
    "a header that is not sent": ("{request.headers[X-Api-Key]}", [{}]),
    "an empty header": ("{request.headers[X-Api-Key]}", [{"HTTP_X_API_KEY": ""}]),
    "a cookie that is not sent": ("{request.COOKIES[account]}", [{"HTTP_X_API_KEY": "a"}]),
    "an attribute of a user": ("{request.user.profile.pk}", [{}]),
}


def without_account(**headers: str) -> Any:
    request = sent(**headers)
    request.user, request.session = AnonymousUser(), SessionStore()
    return request


@pytest.mark.parametrize("case", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("kind", [function, coroutine_function])
def test_clients_that_nothing_tells_apart_need_another_scope(kind: Any, case: Any) -> None:
    scope, clients = case
    view = kind(pay, scope=scope)
    for client in clients:
        with pytest.raises(ImproperlyConfigured, match="must say whose each request is") as caught:
            view(without_account(**client))
        assert issubclass(caught.type, BadRequest)  # It may be the client's fault: no key.
    assert not runs


class LeavesFieldsOut(FormParser):
    def parse(self, stream: Any, *args: Any, **kwargs: Any) -> Any:
        return QueryDict(super().parse(stream, *args, **kwargs).urlencode()[:3])


def of_rest_framework_with_its_parser(act: Act, **options: Any) -> Any:
    class Payments(APIView):
        parser_classes = (LeavesFieldsOut,)
        post = idempotent(**options)(_for_rest_framework(act))

    return Payments.as_view()


@pytest.mark.parametrize("kind", [function, of_rest_framework_with_its_parser])
def test_the_fields_of_a_form_and_their_values_are_told_apart(kind: Any) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    view = kind(pay, **BY_USER)
    bodies = ("a=1&b=2", "b=2&a=1", "a=1&a=b&a=2", "a=1&a=%5B%22b%22%5D&a=2")
    answers = [view(sent(body=body, **form)).status_code for body in bodies]
    assert answers == [201, 201, 422, 422]
    assert len(runs) == 1


def test_a_form_is_its_fields_and_files() -> None:
    """The boundary and the CSRF token differ from one sending to the next."""
    view = function(pay, scope=None, key=field())
    answers = []
    for token, content in (("one", b"x"), ("two", b"x"), ("three", b"y")):
        data = {"idempotency_key": "f", "csrfmiddlewaretoken": token}
        request = RequestFactory().post("/", {**data, "file": SimpleUploadedFile("a", content)})
        request.user = SimpleNamespace(pk=None, is_authenticated=False)
        answers.append(view(request).status_code)
        assert answers[-1] == 422 or request.FILES["file"].read() == content
    assert answers == [201, 201, 422]
    assert len(runs) == 1


@pytest.mark.parametrize("kind", [function, coroutine_function])
@pytest.mark.parametrize(
    "result",
    [{"payment": 5}, (201, {"payment": 5}), ("600", {}), (), None, [1], "text", 0],
)
def test_what_becomes_a_response_later(kind: Any, result: Any) -> None:
    """As the results of Django Ninja's operations do."""

    def act(request: Any) -> Any:
        runs.append("")
        return result

    view = kind(act, **BY_USER)
    assert [view(sent()), view(sent()), runs] == [result, result, [""]]
    assert view(sent(body="{}")).status_code == 422


def test_an_error_that_becomes_a_response_later_is_not_kept() -> None:
    def act(request: Any) -> Any:
        runs.append("")
        return (500, {"detail": "no"}) if len(runs) == 1 else {"payment": 5}

    view = function(act, **BY_USER)
    assert [view(sent())[0], view(sent()), view(sent())] == [500, {"payment": 5}, {"payment": 5}]
    assert len(runs) == 2
