"""``locked()`` on views: what runs, and what the others are answered."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.views import View

from django_redis_lock import events, locked
from django_redis_lock.contention import raise_error, skip
from django_redis_lock.contrib import metrics
from tests.holding import hold
from tests.redis_server import RedisServer


def request(accept: str = "", sent: str = "", **attributes: Any) -> HttpRequest:
    headers = {"Accept": accept} if accept else {}
    if sent:
        made = RequestFactory().post("/", "{}", content_type=sent, headers=headers)
    else:
        made = RequestFactory().get("/", headers=headers)
    vars(made).update(attributes)
    return made


@locked("export")
def export(request: HttpRequest) -> HttpResponse:
    assert caches["default"].lock("export").locked()
    return HttpResponse("exported")


# -- it runs -----------------------------------------------------------------------------------


def test_a_free_view_runs_and_gives_its_lock_back() -> None:
    assert [export(request()).content for _ in range(2)] == [b"exported"] * 2
    assert not caches["default"].lock("export").locked()


# -- it does not -------------------------------------------------------------------------------


def test_the_answer_to_a_browser() -> None:
    with hold("export", timeout=20):
        answer = export(request("text/html,application/xhtml+xml,*/*;q=0.8"))
    assert answer.status_code == 409
    assert answer["Content-Type"] == "text/html; charset=utf-8"
    assert answer["Retry-After"] == "2"
    assert answer["Cache-Control"] == "no-store"
    assert b"<html" in answer.content
    assert b"<style" not in answer.content  # A content security policy forbids it.
    assert b'href="/static/django_redis_lock/conflict.css"' in answer.content


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("accept", "sent", "kind"),
    [
        ("application/json", "", "json"),
        ("application/json, text/html;q=0.5", "", "json"),
        ("text/html, application/json;q=0.5", "", "html"),
        ("*/*", "", "html"),
        ("", "", "html"),
        ("image/png", "", "html"),
        ("nonsense", "", "html"),
        ("*/*", "application/json", "json"),
        ("", "application/json; charset=utf-8", "json"),
        ("*/*", "application/vnd.api+json", "json"),
        ("text/html", "application/json", "html"),
        ("*/*", "application/x-www-form-urlencoded", "html"),
    ],
)
def test_the_kind_of_answer_is_the_clients_choice(accept: str, sent: str, kind: str) -> None:
    with hold("export", timeout=20):
        answer = locked("export", status_code=503)(never)(request(accept, sent))
    assert (answer.status_code, answer["Cache-Control"]) == (503, "no-store")
    if kind == "json":
        assert answer["Content-Type"] == "application/json"
        body = json.loads(answer.content)
        assert body["retry_after"] == int(answer["Retry-After"])
        assert set(body) == {"detail", "retry_after"}
    else:
        assert answer["Content-Type"] == "text/html; charset=utf-8"


def test_a_project_without_django_templates_gets_plain_text(settings: Any) -> None:
    settings.TEMPLATES = []
    with hold("export"):
        answer = export(request("text/html"))
    assert answer.status_code == 409
    assert answer["Content-Type"] == "text/plain; charset=utf-8"
    assert answer.content == b"This operation is already in progress."


@pytest.mark.parametrize("accept", ["text/html", "application/json"])
def test_the_response_does_not_name_the_holder(accept: str) -> None:
    with hold("export", label="secret customer") as lock:
        answer = export(request(accept))
        shown = answer.content.decode() + str(answer.headers)
        assert "secret" not in shown
        assert lock.local.token.decode() not in shown
        assert lock.holder().id not in shown


def test_it_says_when_to_come_again_by_how_long_it_usually_takes() -> None:
    """Not by the lifetime left: it is renewed while the work goes on."""
    before = caches["default"].lock("export-7", group="export-{pk}")
    events.emit(events.Released(before.subject, 100.0, 1))

    @locked("export-{pk}")
    def export_one(request: HttpRequest, pk: int) -> HttpResponse: ...

    @locked("export-{pk}", retry_after=7)
    def export_later(request: HttpRequest, pk: int) -> HttpResponse: ...

    with hold("export-8"):
        assert 95 < int(export_one(request(), pk=8)["Retry-After"]) <= 101
        metrics.flush()  # What was written is known still.
        assert 95 < int(export_one(request(), pk=8)["Retry-After"]) <= 101
        assert export_later(request(), pk=8)["Retry-After"] == "7"


# -- keys --------------------------------------------------------------------------------------


class User:
    pk = 5


@pytest.mark.parametrize(
    "key",
    [
        "invoice-{pk}-{request.user.pk}",
        lambda request, pk: f"invoice-{pk}-{request.user.pk}",
    ],
)
def test_one_lock_for_each_object_and_user(key: Any) -> None:
    @locked(key=key)
    def pay(request: HttpRequest, pk: int) -> HttpResponse:
        return HttpResponse()

    made = request(user=User())
    with hold("invoice-7-5"):
        assert pay(made, 7).status_code == 409
        assert pay(made, pk=7).status_code == 409
        assert pay(made, pk=8).status_code == 200


# -- waiting -----------------------------------------------------------------------------------


def test_it_may_wait() -> None:
    @locked("export", blocking=True, blocking_timeout=0.05)
    def patient(request: HttpRequest) -> HttpResponse:
        return HttpResponse("exported")

    with hold("export"):
        assert patient(request()).status_code == 409
    assert patient(request()).content == b"exported"


# -- where it cannot work ----------------------------------------------------------------------


@pytest.fixture
def server_of_the_cache(own_server: RedisServer, settings: Any) -> RedisServer:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": own_server.url}}
    return own_server


@pytest.fixture
def redis_down(server_of_the_cache: RedisServer, settings: Any) -> None:
    settings.CACHES["default"]["OPTIONS"] = {"IGNORE_EXCEPTIONS": True}
    server_of_the_cache.stop()


def never(request: Any, *args: Any) -> Any:
    raise AssertionError("it ran without its lock")


async def anever(request: HttpRequest) -> HttpResponse:
    return never(request)


class Never(View):
    get = never


@pytest.mark.usefixtures("redis_down")
@pytest.mark.parametrize("view", [never, Never, anever], ids=["function", "class", "coroutine"])
def test_without_redis_it_answers_503_and_the_log_says_why(
    view: Any, caplog: pytest.LogCaptureFixture
) -> None:
    decorated: Any = locked("export")(view if view is not Never else type("Own", (Never,), {}))
    decorated = decorated.as_view() if isinstance(decorated, type) else decorated
    answer = decorated(request("text/html"))
    answer = asyncio.run(answer) if inspect.iscoroutine(answer) else answer
    assert answer.status_code == 503
    assert answer["Retry-After"] == "10"
    assert answer["Cache-Control"] == "no-store"
    assert b"<h1>This operation is not available at the moment.</h1>" in answer.content
    assert b"progress" not in answer.content
    (record,) = [r for r in caplog.records if r.name == "django_redis_lock.locked"]
    assert record.levelname == "ERROR"
    assert "the lock export could not be requested" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], redis.ConnectionError)


@pytest.mark.usefixtures("redis_down")
def test_without_redis_a_program_gets_json() -> None:
    answer = locked("export", retry_after=30, status_code=423)(never)(request("application/json"))
    assert (answer.status_code, answer["Retry-After"]) == (503, "30")
    detail = "This operation is not available at the moment."
    assert json.loads(answer.content) == {"detail": detail, "retry_after": 30}


@pytest.mark.usefixtures("redis_down")
@pytest.mark.parametrize(
    "options", [{"on_conflict": raise_error}, {"on_conflict": skip}, {"default": None}]
)
def test_what_is_no_view_raises_the_error_without_redis(options: dict[str, Any]) -> None:
    with pytest.raises(redis.ConnectionError):
        locked("export", **options)(never)(request())


def test_an_error_that_is_no_outage_is_raised(client: redis.Redis) -> None:
    client.rpush(caches["default"].lock("export").name, "other data")
    with pytest.raises(redis.ResponseError):
        locked("export")(never)(request())


@pytest.mark.parametrize("fails", [False, True])
def test_redis_dies_while_it_runs(
    server_of_the_cache: RedisServer, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """What is done is done: its result, or its own exception, is not thrown away."""

    @locked("export")
    def view(request: HttpRequest) -> HttpResponse:
        server_of_the_cache.kill()
        if fails:
            raise RuntimeError("no disk")
        return HttpResponse("exported")

    if fails:
        with pytest.raises(RuntimeError, match="no disk"):
            view(request())
    else:
        assert view(request()).content == b"exported"
    assert "export" in caplog.text


def test_a_lock_lost_while_it_runs_does_not_cost_the_result(client: redis.Redis) -> None:
    @locked("export")
    def view(request: HttpRequest) -> HttpResponse:
        client.flushdb()
        return HttpResponse("exported")

    assert view(request()).content == b"exported"
