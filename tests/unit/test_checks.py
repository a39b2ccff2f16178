"""The system checks, each seen to find what it is for and to leave what is right alone."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from django.core.checks import ERROR, run_checks
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.urls import include, path, re_path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from rest_framework.decorators import api_view
from rest_framework.viewsets import ViewSet

from django_redis_lock import cached, cached_page, locked, unique_task
from django_redis_lock.apps import CHECKS_TAG
from django_redis_lock.ops import checks
from tests.support.python import python

PACKAGE = Path(checks.__file__).parents[1]
TEXT = (Path(__file__).parents[2] / "docs" / "checks.md").read_text()


pytestmark = pytest.mark.usefixtures("nothing_is_declared")


def messages(**kwargs: Any) -> list[Any]:
    return run_checks(tags=[CHECKS_TAG], **kwargs)


def numbers() -> list[str]:
    return [message.id.removeprefix("django_redis_lock.") for message in messages()]


def only() -> Any:
    """The one message there is."""
    (message,) = messages()
    return message


def deploy_errors() -> list[str]:
    found = messages(include_deployment_checks=True)
    return [m.id.removeprefix("django_redis_lock.") for m in found if m.level >= ERROR]


@pytest.fixture
def cache(settings: Any) -> Any:
    """Sets what is given on the one cache there is."""

    def set_cache(options: dict[Any, Any] | None = None, **config: Any) -> None:
        backend = "django_redis_lock.cache.RedisCache"
        location = "redis://127.0.0.1:1/0"
        default = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options or {}, **config}
        settings.CACHES = {"default": default}

    return set_cache


def test_a_project_without_mistakes_has_no_messages() -> None:
    assert messages(include_deployment_checks=False) == []


# -- settings ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("configured", "number", "words"),
    [
        (None, "E001", "None"),
        ([], "E001", "[]"),
        ("TIMEOUT=3", "E001", "'TIMEOUT=3'"),
        ({"TIMEOUT": None}, "E003", "forever"),
        ({"TIMEOUT": math.inf}, "E003", "forever"),
        ({"TIMOUT": 5}, "W001", "'TIMOUT' Did you mean 'TIMEOUT'?"),
        ({"timeout": 5}, "W001", "'timeout' Did you mean 'TIMEOUT'?"),
        ({"LOCK_TIMEOUT": 5}, "W001", "'LOCK_TIMEOUT' Did you mean 'TIMEOUT'?"),
        ({"COLOUR": 5}, "W001", "'COLOUR' The known settings are: BACKGROUND, "),
        ({5: 5}, "W001", "5 The known settings are: BACKGROUND, "),
    ],
)
def test_settings_that_make_no_sense(
    settings: Any, configured: Any, number: str, words: str
) -> None:
    settings.DJANGO_REDIS_LOCK = configured
    assert numbers() == [number]
    assert words in " ".join(f"{only().msg} {only().hint}".replace(".", "").split())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WAIT", "60"),
        ("JITTER", 2),
        ("BACKGROUND", "no"),
        ("LOCK_PREFIX", 1),
        ("BACKGROUND_CONTEXT", "no.such"),
    ],
)
def test_a_value_that_cannot_be(settings: Any, cache: Any, name: str, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {name: value}
    message = only()
    assert message.id == "django_redis_lock.E002"
    assert message.msg.startswith(f"DJANGO_REDIS_LOCK: {name} must be")
    settings.DJANGO_REDIS_LOCK = {}
    cache({f"LOCK_{name}": value})
    message = only()
    assert message.id == "django_redis_lock.E002"
    assert message.msg.startswith(f"the cache's option LOCK_{name} must be")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("LOCK_TIMEOUTS", "Did you mean 'LOCK_TIMEOUT'?"),
        ("LOCK_FOO", "The known settings are: LOCK_BACKGROUND, "),
        ("STALE", "Use the name 'LOCK_STALE'."),
        ("BREAKER_PAUSE", "It applies to the whole process: set it in DJANGO_REDIS_LOCK."),
        ("LOCK_BREAKER_PAUSE", "It applies to the whole process: set it in DJANGO_REDIS_LOCK."),
    ],
)
def test_an_option_that_is_no_setting(cache: Any, key: str, hint: str) -> None:
    cache({key: 5, "SOCKET_TIMEOUT": 5, "SERIALIZER": "x"})
    message = only()
    assert message.id == "django_redis_lock.W002"
    assert "'default'" in message.msg
    assert message.hint.startswith(hint)


# -- caches ------------------------------------------------------------------------------------


def test_no_cache_that_can_lock(settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    message = only()
    assert message.id == "django_redis_lock.W003"
    assert "django_redis_lock.cache.RedisCache" in message.hint


SHARED = "redis://127.0.0.1:6379/3"
OTHER: dict[str, Any] = {"BACKEND": "django_redis.cache.RedisCache"}
AS_TEXT = "redis://127.0.0.1:1/0?decode_responses=True"


def keys(function: str) -> dict[str, str]:
    return {"KEY_FUNCTION": f"tests.key_functions.{function}"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "config", "number", "words"),
    [
        ({"CLIENT_CLASS": "django_redis.client.ShardClient"}, {}, "E004", "ShardClient"),
        ({"CLIENT_CLASS": "django_redis.client.HerdClient"}, {}, "W004", "HerdClient"),
        # What django-environ makes of ``unix:///run/redis.sock?db=3``.
        ({"DB": 3}, {"LOCATION": "unix:///run/redis.sock"}, "W024", "which django-redis ignores"),
        ({"CONNECTION_POOL_KWARGS": {"decode_responses": True}}, {}, "W019", "decode_responses"),
        ({}, {"LOCATION": AS_TEXT}, "W019", "decode_responses"),
        ({}, {"LOCATION": ["redis://h:1/0", "redis://h:2/0?decode_responses=1"]}, "W019", ""),
        (
            {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
            {"LOCATION": AS_TEXT},
            "W019",
            "",
        ),
        ({"LOCK_LOCK_PREFIX": ""}, {}, "W016", 'LOCK_PREFIX is ""'),
        ({}, keys("hashed"), "W017", ""),
        ({}, keys("last"), "W017", ""),
        ({}, keys("unchanged"), "W026", ""),
        ({}, {"VERSION": "lock:1"}, "W026", ""),
    ],
)
def test_a_cache_that_contradicts_itself(
    cache: Any, options: dict[str, Any], config: dict[str, Any], number: str, words: str
) -> None:
    cache(options, **config)
    message = only()
    assert message.id == f"django_redis_lock.{number}"
    assert words in message.msg


@pytest.mark.parametrize(
    ("number", "location"),
    [
        *(("W014", location) for location in (None, "", [])),
        ("E011", "127.0.0.1:6379"),
        ("E011", "redis:/127.0.0.1:6379/1"),
        ("E011", "redis://:p@ss:SECRET/word#1@127.0.0.1:6379/1"),
        ("E011", ["redis://127.0.0.1:6379/1", "replica:6379"]),
    ],
)
def test_a_location_that_is_none(cache: Any, settings: Any, number: str, location: Any) -> None:
    cache(LOCATION=location)
    message = only()
    assert message.id == f"django_redis_lock.{number}"
    if number == "W014":
        assert message.msg == "The cache 'default' has no LOCATION."
        assert "redis://" in message.hint
        settings.CACHES["default"]["BACKEND"] = "django_redis_lock.cache.LocMemCache"
    else:
        assert message.msg == "The LOCATION of the cache 'default' is no URL."
        assert "percent-encoded" in message.hint
        settings.DJANGO_REDIS_CONNECTION_FACTORY = "ours.Factory"
    assert messages() == []


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("options", "config", "other"),
    [
        ({}, {"LOCATION": "redis://:a;b@127.0.0.1/1"}, None),
        ({}, {"LOCATION": "unix:///run/redis.sock?db=2"}, None),
        ({}, {"LOCATION": ["rediss://a/0", "redis://b/0"]}, None),
        ({}, {"VERSION": "locker"}, None),
        ({"CONNECTION_POOL_KWARGS": {"decode_responses": False}}, {}, None),
        ({"SERIALIZER": "tests.unit.test_checks.Text"}, {"LOCATION": AS_TEXT}, None),
        # Another cache that ``clear()`` does not empty.
        ({}, {"LOCATION": SHARED}, {"LOCATION": "redis://127.0.0.1:6379/4"}),
        ({}, {"LOCATION": SHARED}, {"LOCATION": "redis://127.0.0.1:6380/3"}),
        ({}, {"LOCATION": SHARED}, {"LOCATION": "redis://elsewhere:6379/3"}),
        ({}, {"LOCATION": SHARED}, {"LOCATION": "/var", "BACKEND": "django.core.cache.filebased"}),
        ({}, {"LOCATION": SHARED}, {}),
    ],
)
def test_caches_that_are_right(
    settings: Any, cache: Any, options: dict[str, Any], config: dict[str, Any], other: Any
) -> None:
    cache(options, **config)
    if other is not None:
        settings.CACHES = {**settings.CACHES, "pages": {**OTHER, **other}}
        settings.CELERY_BROKER_URL = "amqp://guest@localhost//"
    assert messages() == []


class Text:
    """A serializer that reads texts, and bytes."""

    def __init__(self, options: object) -> None:
        pass

    def dumps(self, value: object) -> bytes:
        return json.dumps(value).encode()

    def loads(self, value: str | bytes) -> object:
        return json.loads(value)


def test_errors_that_are_ignored(settings: Any, cache: Any) -> None:
    cache({"IGNORE_EXCEPTIONS": True})
    assert only().id == "django_redis_lock.W005"
    cache({})
    settings.DJANGO_REDIS_IGNORE_EXCEPTIONS = True
    assert only().id == "django_redis_lock.W005"
    settings.DJANGO_REDIS_LOCK = {"ON_REDIS_DOWN": "raise"}
    assert messages() == []
    settings.DJANGO_REDIS_LOCK = {}
    cache({"LOCK_ON_REDIS_DOWN": "local"})
    assert messages() == []
    cache({"IGNORE_EXCEPTIONS": False})
    assert messages() == []


def test_locks_in_memory_are_for_development(settings: Any) -> None:
    settings.CACHES = {"default": {"BACKEND": "django_redis_lock.cache.LocMemCache"}}
    assert messages() == []
    (message,) = messages(include_deployment_checks=True)
    assert message.id == "django_redis_lock.W105"
    assert "RedisCache" in message.hint


@pytest.mark.parametrize(
    ("options", "location", "why"),
    [
        (
            {
                "CLIENT_CLASS": "django_redis.client.SentinelClient",
                "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
            },
            "redis://main/0",
            "SENTINELS must be provided",
        ),
        (
            {"CLIENT_CLASS": "django_redis_lock.clients.ClusterClient"},
            "redis://127.0.0.1:1/1",
            "the database 0 and no other",
        ),
    ],
)
def test_options_with_which_each_use_fails(
    cache: Any, options: dict[Any, Any], location: str, why: str
) -> None:
    cache(options, LOCATION=location)
    assert messages() == []
    (message,) = messages(include_deployment_checks=True)
    assert message.id == "django_redis_lock.E108"
    assert why in message.msg
    cache(options, LOCATION="")  # W014 says it.
    assert deploy_errors() == []


# -- declared locks ----------------------------------------------------------------------------


def work(view_or_command: object = None) -> None: ...


@pytest.mark.parametrize(
    ("options", "number", "words"),
    [
        ({"using": "nope"}, "E005", "CACHES has no 'nope'; caches that can lock: 'default'"),
        ({"on_conflict": lambda: None}, "E006", "on_conflict takes no argument"),
        ({"timeout": None}, "W008", "never expires"),
        (
            {"timeout": 30_000},
            "W021",
            "timeout=30000 is 8:20:00 (h:mm:ss): all times are in seconds",
        ),
        ({"blocking": True, "blocking_timeout": 5000}, "W021", "write blocking_timeout=5"),
        ({"timeout": 60, "max_hold": 600_000}, "W021", "max_hold=600000 is 6 days, 22:40:00"),
        ({"timeout": 5, "min_hold": 60}, "W009", "min_hold, 60 seconds, is longer than timeout, 5"),
    ],
)
def test_a_declared_lock_that_contradicts_itself(
    options: dict[str, Any], number: str, words: str
) -> None:
    decorated = locked("work", **options)(work)
    message = only()
    assert message.id == f"django_redis_lock.{number}"
    assert message.msg.startswith("locked() of tests.unit.test_checks.work: ")
    assert words in message.msg
    assert decorated is not work


def test_declared_locks_that_are_right() -> None:
    decorated: list[Any] = [
        locked(f"of-{seconds}", timeout=seconds)(work)
        for seconds in (30, 999, 3600, 14_400, 36_000, 86_400, 604_800, 2_592_000)
    ]
    # One name twice, with the same settings or by other means.
    decorated.append(locked("work", timeout=5, exit_code=3)(work))
    decorated.append(locked("work", timeout=5, blocking=True, label="other")(other_work))
    decorated.append(locked(key=lambda: "work")(work))
    assert messages() == []


def test_using_that_names_no_cache_is_reported_once(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"USING": "nope"}
    decorated: Callable[[], None] = locked("work")(work)
    message = only()
    assert message.id == "django_redis_lock.E007"
    assert message.msg.startswith("DJANGO_REDIS_LOCK: USING: CACHES has no 'nope'")
    settings.DJANGO_REDIS_LOCK = {"USING": "default"}
    assert messages() == []
    assert decorated is not work


@pytest.mark.parametrize("backend", ["dummy.DummyCache", "locmem.LocMemCache", "db.DatabaseCache"])
def test_a_backend_that_cannot_lock_lets_the_site_start(settings: Any, backend: str) -> None:
    """A laptop or a CI job often has no Redis; the settings of production must have one."""
    backend = f"django.core.cache.backends.{backend}"
    settings.CACHES = {**settings.CACHES, "plain": {"BACKEND": backend, "LOCATION": "table"}}
    settings.DJANGO_REDIS_LOCK = {"USING": "plain"}
    message = only()
    assert message.id == "django_redis_lock.W012"
    assert message.msg.startswith("DJANGO_REDIS_LOCK: USING: the cache 'plain' cannot lock")
    assert deploy_errors() == ["E007"]
    settings.DJANGO_REDIS_LOCK = {}
    decorated = [locked("work", using="plain")(each) for each in (work, other_work)]
    message = only()
    assert message.id == "django_redis_lock.W012"
    assert message.level < ERROR
    for words in ("'plain'", backend, '"BACKEND": "django_redis_lock.cache.LocMemCache"'):
        assert words in message.msg
    assert "tests.unit.test_checks.other_work and 1 more" in message.msg
    assert deploy_errors() == ["E005"]
    assert decorated[0] is not work


@pytest.mark.parametrize(("using", "number"), [("nope", "E005"), ("plain", "W012")])
def test_a_unique_task_names_a_cache_too(settings: Any, using: str, number: str) -> None:
    settings.CACHES = {
        **settings.CACHES,
        "plain": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }
    task = unique_task("sync", timeout=1, using=using)(Celery("shop").task(work))
    assert numbers() == [number]
    assert only().msg.startswith(f"unique_task() of {task.name}: ")
    assert deploy_errors() == ["E005"]


def other_work() -> None: ...


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"using": "third"}, "using is 'default' and 'third', so they do not exclude each other"),
        ({"timeout": 60}, "timeout is left out and 60"),
        ({"min_hold": 5}, "min_hold is left out and 5"),
        ({"max_hold": 5}, "max_hold is left out and 5"),
    ],
)
def test_a_name_that_is_used_twice_with_different_settings(
    settings: Any, options: dict[str, Any], words: str
) -> None:
    settings.CACHES = {**settings.CACHES, "third": settings.CACHES["default"]}
    first, second = locked("work")(other_work), locked("work", **options)(work)
    message = only()
    assert message.id == "django_redis_lock.W010"
    here = "tests.unit.test_checks"
    assert f"locked() of {here}.other_work and of {here}.work" in message.msg
    assert "both name the lock 'work'" in message.msg
    assert words in message.msg
    assert first is not second


def page(request: object) -> HttpResponse:
    return HttpResponse()


def page_class() -> Any:
    def get(self: object, request: object) -> HttpResponse:
        return HttpResponse()

    return type("Page", (View,), {"get": get})


lock: Any = locked("work")
store: Any = cached_page(60)


def around(name: str, *decorators: Any) -> Any:
    return method_decorator(decorators[0] if len(decorators) == 1 else decorators, name=name)


#: Views, and whether ``locked()`` is above what is stored.
STACKS: dict[str, tuple[Callable[[], Any], bool]] = {
    "above": (lambda: lock(store(page)), True),
    "below": (lambda: store(lock(page)), False),
    "with another between": (lambda: lock(never_cache(store(page))), True),
    "alone": (lambda: lock(page), False),
    "no lock": (lambda: store(page), False),
    "a class": (lambda: lock(around("dispatch", store)(page_class())).as_view(), True),
    "a class, below": (lambda: around("dispatch", store)(lock(page_class())).as_view(), False),
    "dispatch": (
        lambda: around("dispatch", lock)(around("dispatch", store)(page_class())).as_view(),
        True,
    ),
    "dispatch, below": (
        lambda: around("dispatch", store)(around("dispatch", lock)(page_class())).as_view(),
        False,
    ),
    "a list": (lambda: around("dispatch", lock, store)(page_class()).as_view(), True),
    "a list, below": (lambda: around("dispatch", store, lock)(page_class()).as_view(), False),
    "get": (lambda: around("get", lock)(around("get", store)(page_class())).as_view(), True),
    "a class with get": (lambda: lock(around("get", store)(page_class())).as_view(), True),
    "a view with get": (lambda: lock(around("get", store)(page_class()).as_view()), True),
    "a view, below": (lambda: store(around("get", lock)(page_class()).as_view()), False),
    "a value": (lambda: lock(cached(work_alone)), True),
    "a value, below": (lambda: cached(lock(work_alone)), False),
}


def for_request(request: object) -> HttpResponse:
    return HttpResponse()


def for_request_of_view(self: object, request: object) -> HttpResponse:
    return HttpResponse()


def in_class(method: object) -> Any:
    return type("Page", (View,), {"get": method}).as_view()


def in_view_set(method: object) -> Any:
    return type("Pages", (ViewSet,), {"report": method}).as_view({"get": "report"})


#: What takes a request, what its URL leads to, and whether it would raise without the middleware.
CALLED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], bool]] = {
    "a view": (lambda: lock(for_request), lambda view: view, False),
    "decorated": (lambda: lock(for_request), never_cache, False),
    "partial": (lambda: lock(for_request), lambda view: functools.partial(view, pk=1), False),
    "not a view": (lambda: lock(for_request), lambda view: page, True),
    "of rest framework": (lambda: lock(for_request), api_view(["GET"]), True),
    "with an answer": (lambda: locked(default=1)(for_request), lambda view: page, False),
    "a handler": (lambda: lock(for_request_of_view), in_class, False),
    "an action": (lambda: lock(for_request_of_view), in_view_set, False),
    "a helper": (lambda: lock(for_request_of_view), lambda view: page, True),
}


@pytest.mark.parametrize("place", CALLED)
def test_what_raises_for_a_request(settings: Any, place: str) -> None:
    make, view_of, wrong = CALLED[place]
    decorated = make()
    settings.ROOT_URLCONF = (path("page", view_of(decorated)),)
    assert numbers() == (["W022"] if wrong else [])
    settings.MIDDLEWARE = ["django_redis_lock.middleware.RefusalMiddleware"]
    assert numbers() == []


@pytest.mark.parametrize(
    ("name", "url", "wrong"),
    [
        ("work", "pages/<int:pk>", True),
        ("work-{pk}", "pages/<int:pk>", False),
        ("work", "pages", False),
        (None, "pages/<int:pk>", False),
    ],
)
def test_a_literal_name_where_the_url_has_arguments(
    settings: Any, name: Any, url: str, wrong: bool
) -> None:
    class Page(View):
        @locked(name)
        def get(self, request: object, pk: int = 1) -> HttpResponse:
            return HttpResponse()

    @locked(name)
    def view(request: object, pk: int = 1) -> HttpResponse:
        return HttpResponse()

    settings.MIDDLEWARE = ["django_redis_lock.middleware.RefusalMiddleware"]
    for each in (view, never_cache(view), Page.as_view()):
        settings.ROOT_URLCONF = (path(url, each),)
        assert numbers() == (["W023"] if wrong else [])
        settings.ROOT_URLCONF = (path(url, include([path("more", each)])),)
        assert numbers() == (["W023"] if wrong else [])
        settings.ROOT_URLCONF = (re_path("^" + url.replace("<int:pk>", "(.*)"), each),)
        assert numbers() == (["W023"] if wrong else [])


def work_alone() -> None: ...


@pytest.mark.parametrize("place", STACKS)
def test_a_lock_above_what_is_stored(settings: Any, place: str) -> None:
    make, wrong = STACKS[place]
    settings.ROOT_URLCONF = (path("page", make()),)
    settings.MIDDLEWARE = ["django_redis_lock.middleware.RefusalMiddleware"]
    assert numbers() == (["W020"] if wrong else [])


# -- what clear() deletes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "other"),
    [
        (SHARED, {"LOCATION": SHARED}),
        (SHARED, {"LOCATION": "redis://user:secret@localhost/3"}),
        (SHARED, {"LOCATION": ["redis://elsewhere/3", "rediss://localhost:6379?db=3"]}),
        (SHARED, {"LOCATION": "redis://localhost", "OPTIONS": {"db": "3"}}),
        ("redis://a:1/0,redis://b:1/0", {"LOCATION": "redis://b:1"}),
        ("unix:///run/redis.sock?db=2", {"LOCATION": "unix:///run/redis.sock?db=2"}),
        (
            SHARED,
            {"LOCATION": "redis://localhost", "OPTIONS": {"CONNECTION_POOL_KWARGS": {"db": 3}}},
        ),
    ],
)
def test_another_cache_in_the_database_that_clear_empties(
    settings: Any, cache: Any, location: Any, other: dict[str, Any]
) -> None:
    cache(LOCATION=location)
    settings.CACHES = {**settings.CACHES, "pages": {**OTHER, **other}}
    message = only()
    assert message.id == "django_redis_lock.W013"
    assert message.msg.endswith(
        "the cache 'default' empties its database. That also contains the cache 'pages'."
    )
    cache({"LOCK_CLEAR": "prefix"}, LOCATION=location)
    settings.CACHES = {**settings.CACHES, "pages": {**OTHER, **other}}
    assert messages() == []


@pytest.mark.parametrize("name", ["CELERY_BROKER_URL", "BROKER_URL"])
@pytest.mark.parametrize("url", [SHARED, [SHARED], f"redis://down:1/0;{SHARED}"])
def test_a_broker_in_the_database_that_clear_empties(
    settings: Any, cache: Any, name: str, url: Any
) -> None:
    cache(LOCATION=SHARED)
    setattr(settings, name, url)
    assert f"That also contains Celery's messages ({name})." in only().msg
    cache({"LOCK_CLEAR": "prefix"}, LOCATION=SHARED)
    assert messages() == []


def test_sessions_in_the_database_that_clear_empties(settings: Any, cache: Any) -> None:
    cache(LOCATION=SHARED)
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cached_db"
    assert messages() == [], "they are in Django's database, too"
    settings.SESSION_ENGINE = "django.contrib.sessions.backends.cache"
    assert "That also contains the sessions (SESSION_ENGINE)." in only().msg
    assert "set SESSION_CACHE_ALIAS to a cache with another KEY_PREFIX" in only().hint
    settings.CACHES = {**settings.CACHES, "sessions": {**OTHER, "LOCATION": SHARED}}
    settings.SESSION_CACHE_ALIAS = "sessions"
    assert "the cache 'sessions', the sessions (SESSION_ENGINE)." in only().msg
    assert "SESSION_CACHE_ALIAS" not in only().hint


@pytest.mark.parametrize(
    "key_function", [lambda key, *_: key, lambda key, *_: str(hash(key)), lambda *_: "the same"]
)
def test_a_key_function_that_clear_cannot_work_with(
    settings: Any, cache: Any, key_function: Any
) -> None:
    cache({"LOCK_CLEAR": "prefix"}, KEY_FUNCTION=key_function)
    [message] = [each for each in messages() if each.id == "django_redis_lock.E009"]
    assert "KEY_FUNCTION makes keys that do not show whose they are" in message.msg
    cache({}, KEY_FUNCTION=key_function)
    assert "E009" not in numbers()


@pytest.mark.parametrize("function", [None, "tests.key_functions.hashed"])
@pytest.mark.parametrize("backend", [OTHER["BACKEND"], "django_redis_lock.cache.RedisCache"])
def test_prefixes_that_lead_to_locks_of_another_cache(
    settings: Any, cache: Any, backend: str, function: Any
) -> None:
    settings.SILENCED_SYSTEM_CHECKS = ["django_redis_lock.W013", "django_redis_lock.W017"]
    cache({}, LOCATION=SHARED, KEY_PREFIX="shop", KEY_FUNCTION=function)
    beside = {"BACKEND": backend, "LOCATION": SHARED, "KEY_FUNCTION": function}
    for prefix, reported in [
        *(("shop:lock", True), ("shop:lock:1", True), ("shop", False), ("shop-lock", False)),
        *(("lock", False), ("", False), ("shop:blocks", False)),
    ]:
        settings.CACHES = {**settings.CACHES, "beside": {**beside, "KEY_PREFIX": prefix}}
        found = [each for each in numbers() if each not in ("W013", "W017")]
        assert found == ["W025"] * reported, prefix
    settings.CACHES["beside"] |= {"KEY_PREFIX": "shop:lock", "LOCATION": f"{SHARED}5"}
    assert "W025" not in numbers()


@pytest.mark.parametrize("policy", ["local", "raise"])
def test_a_folder_that_can_have_no_locks_of_this_host(
    cache: Any, tmp_path: Path, policy: str
) -> None:
    folder = tmp_path / "a file"
    folder.touch()
    cache({"LOCK_ON_REDIS_DOWN": policy, "LOCK_LOCAL_LOCK_FOLDER": str(folder)})
    assert numbers() == ["W015"] * (policy == "local")


# -- the list ----------------------------------------------------------------------------------


def test_the_docs_list_each_number_once() -> None:
    rows = re.findall(r"^\| `([A-Z]\d+)` \| [^|]+ \|", TEXT, re.MULTILINE)
    code = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    given = set(re.findall(r"[(\s=]\"([EWI]\d{3})\"[,)]", code))
    assert len(rows) > 30
    assert sorted(given) == sorted(rows)


PAGES = "django_redis_lock.middleware.CachedPageMiddleware"
LOCALE = "django.middleware.locale.LocaleMiddleware"
SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
CSRF = "django.middleware.csrf.CsrfViewMiddleware"


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([LOCALE, PAGES, SESSIONS, CSRF], []),
        ([PAGES, SESSIONS], []),
        ([SESSIONS, LOCALE, "no.such.middleware"], []),
        ([PAGES, LOCALE], ["before LocaleMiddleware"]),
        ([SESSIONS, CSRF, PAGES], ["after SessionMiddleware", "after CsrfViewMiddleware"]),
    ],
)
def test_the_place_of_the_middleware_for_pages(
    settings: Any, order: list[str], words: list[str]
) -> None:
    settings.MIDDLEWARE = order
    found = [m for m in messages() if m.id == "django_redis_lock.E010"]
    assert len(found) == len(words)
    for message, text in zip(found, words, strict=True):
        assert text in message.msg


def test_one_fact_is_one_message(settings: Any) -> None:
    """That a cache cannot lock; and which one can."""
    ours = settings.CACHES["default"]
    plain = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
    decorated = [locked("work", using="plain")(each) for each in (work, other_work)]
    both = {"default": ours, "plain": plain}
    for number, caches in {"W003": {"default": plain, "plain": plain}, "W012": both}.items():
        settings.CACHES = caches
        assert numbers() == [number]
        assert deploy_errors() == ["E005"]
        assert not {"W003", "W012"} & {m.id[-4:] for m in messages(include_deployment_checks=True)}
        assert numbers() == [number]
    with pytest.raises(ImproperlyConfigured, match="cannot lock") as raised:
        decorated[0]()
    message = only()
    for words in ('using="default"', 'DJANGO_REDIS_LOCK = {"USING": "default"}'):
        assert words in message.msg
        assert words in str(raised.value)


def run_in_process(code: str, *, app: bool = True, **configured: Any) -> str:
    """What a process with these settings writes on stderr."""
    apps = ["django.contrib.contenttypes", "django.contrib.auth", *["django_redis_lock"] * app]
    cache = {"BACKEND": "django_redis_lock.cache.LocMemCache"}
    given = {"INSTALLED_APPS": apps, "CACHES": {"default": cache}, **configured}
    whole = f"import django\nfrom django.conf import settings\nsettings.configure(**{given!r})\n"
    whole += f"django.setup()\nfrom django.core.cache import cache, caches\n{code}"
    return python("-c", whole).stderr


TWICE = """
for name in "ab":
    with cache.lock(name): pass
    from django_redis_lock import locked
    with locked(name): pass
"""
IN_TWO = f"import os\nchild = os.fork()\n{TWICE}\nif child: os.waitpid(child, 0)"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("code", "configured", "lines"),
    [
        (TWICE, {"DEBUG": False}, 1),
        (IN_TWO, {"DEBUG": False}, 2),
        (TWICE, {"DEBUG": True}, 0),
        (TWICE, {"SILENCED_SYSTEM_CHECKS": ["django_redis_lock.W105"]}, 0),
        ("cache.get_or_set('a', 1)", {"DEBUG": False}, 0),
        (f"from django.test.utils import *\nsetup_test_environment()\n{TWICE}", {}, 0),
        (f"from django_redis_lock.testing import override\noverride().enable()\n{TWICE}", {}, 0),
    ],
)
def test_locks_in_memory_say_so_where_there_may_be_several_workers(
    code: str, configured: dict[str, Any], lines: int
) -> None:
    written = run_in_process(code, **configured).splitlines()
    assert len([line for line in written if "memory of this process" in line]) == lines
    assert len(written) == lines


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("app", [True, False])
def test_the_app_is_installed(app: bool) -> None:
    """The check is there as soon as the backend is imported; a cache that is made before it runs,
    and without it, says so once."""
    both = {"default": {"BACKEND": "django_redis_lock.cache.LocMemCache"}}
    both["other"] = both["default"]
    calls = "from django.core.management import call_command\ncall_command('check')"
    uses = "caches['default'].get('a'), caches['other'].get('a')"
    alone = "import os, sys\nif os.fork() == 0:\n    import django_redis_lock.cache\n"
    alone += "".join(f"    {line}\n" for line in calls.splitlines())
    alone += f"else:\n    os.wait(), print('END', file=sys.stderr), {uses}"
    checked, _, used = run_in_process(alone, app=app, CACHES=both).partition("END\n")
    for written in (checked, used):
        told = [line for line in written.splitlines() if "is not in INSTALLED_APPS" in line]
        assert len(told) == (0 if app else 1)
    assert ("django_redis_lock.W018" in checked) is not app
