"""A stored value that cannot be decoded (a deploy renamed a class, another serializer wrote it)
counts as missing, except for ``get``, which is django-redis's."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.http import HttpResponse
from django.test import RequestFactory

from django_redis_lock.cache import RedisCache
from django_redis_lock.decorators import cached_page
from tests.processes import in_threads, until
from tests.redis_server import RedisServer

pytestmark = pytest.mark.invariant("C6")


class Failing:
    def __setstate__(self, state: Any) -> None:
        raise KeyError("field of an older version")


def pickled_class(module: str, keep_module: bool) -> bytes:
    """An object of a class that is not there any more."""
    sys.modules[module] = made = ModuleType(module)
    cls = type("Renamed", (), {"__module__": module, "__qualname__": "Renamed"})
    made.Renamed = cls
    stored = pickle.dumps(cls())
    if keep_module:
        del made.Renamed
    else:
        del sys.modules[module]
    return stored


class MissingFile(Failing):
    def __setstate__(self, state: Any) -> None:
        raise FileNotFoundError("a file of the older version")


failing, missing_file = Failing(), MissingFile()
missing_file.__dict__["a"] = 1
failing.__dict__["a"] = 1
UNDECODABLE: dict[str, bytes] = {
    "a class that is gone": pickled_class("tests_gone_class", True),
    "a module that is gone": pickled_class("tests_gone_module", False),
    "a __setstate__ that raises": pickle.dumps(failing),
    "a __setstate__ that opens a file": pickle.dumps(missing_file),
    "empty": b"",
    "cut off": pickle.dumps({"a": list(range(50))})[:20],
    "JSON": json.dumps({"a": 1}).encode(),
    "compressed": zlib.compress(pickle.dumps("x" * 100)),
    "garbage": b"\xff\x00\x80" * 9,
    "large": b"\xff" * 20_000,
}


def one() -> str:
    return "computed"


async def aone() -> str:
    return "computed"


def many(keys: list[str]) -> dict[str, str]:
    return dict.fromkeys(keys, "computed")


WAYS: dict[str, Callable[[Any], Any]] = {
    "get_or_set": lambda c: c.get_or_set("report", one, 60),
    "no wait": lambda c: c.get_or_set("report", one, 60, wait=0, on_wait_timeout="raise"),
    "stale": lambda c: c.get_or_set("report", one, 60, stale=3600),
    "background": lambda c: c.get_or_set("report", one, 60, stale=3600, background=True),
    "soft_timeout": lambda c: c.get_or_set("report", one, 60, stale=3600, soft_timeout=5),
    "compute": lambda c: c.compute("report", one, 60),
    "many": lambda c: c.get_or_set_many(["a", "report", "b"], many, 60)["report"],
    "locked_get_or_set": lambda c: c.locked_get_or_set("report", one),
    "aget_or_set": lambda c: asyncio.run(c.aget_or_set("report", aone, 60)),
    "astale": lambda c: asyncio.run(c.aget_or_set("report", aone, 60, stale=3600)),
    "acompute": lambda c: asyncio.run(c.acompute("report", one, 60)),
    "amany": lambda c: asyncio.run(c.aget_or_set_many(["a", "report"], many, 60))["report"],
}


def put(cache: Any, stored: bytes, key: str = ":1:report", px: int | None = None) -> None:
    cache.client.get_client(write=True).set(key, stored, px=px)


@pytest.mark.sample(7)
@pytest.mark.parametrize("stored", UNDECODABLE)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_computed_and_stored(cache: Any, way: str, stored: str) -> None:
    put(cache, UNDECODABLE[stored])
    assert WAYS[way](cache) == "computed"
    assert cache.get("report") == "computed"


@pytest.mark.parametrize("way", ["stale", "background", "soft_timeout", "astale", "get_or_set"])
def test_a_stale_one(cache: Any, way: str) -> None:
    put(cache, UNDECODABLE["garbage"], px=1_800_000)
    assert WAYS[way](cache) == "computed"
    assert cache.get("report") == "computed"


def test_get_raises_as_django_redis_does(cache: Any) -> None:
    put(cache, UNDECODABLE["a class that is gone"])
    with pytest.raises(AttributeError):
        cache.get("report")
    with pytest.raises(AttributeError):
        cache.get_many(["report"])


def test_the_error_of_the_computation_is_raised(cache: Any) -> None:
    put(cache, UNDECODABLE["garbage"], px=1_800_000)

    def fails() -> None:
        calls.append(1)
        raise LookupError("no report")

    for terms in ({}, {"stale": 3600}):
        calls: list[int] = []
        with pytest.raises(LookupError):
            cache.get_or_set("report", fails, 60, **terms)
        assert calls == [1]


def test_a_herd_computes_once(redis_server: RedisServer) -> None:
    caches = [RedisCache(redis_server.url, {}), RedisCache(redis_server.url, {})]
    put(caches[0], UNDECODABLE["garbage"])
    calls, begun = [], threading.Barrier(12)

    def slow() -> str:
        calls.append(1)
        until(lambda: True)
        return "computed"

    def ask(cache: Any = None) -> str:
        begun.wait(30)
        found: str = caches[threading.get_ident() % 2].get_or_set("report", slow, 60)
        return found

    assert in_threads(12, ask) == ["computed"] * 12
    assert len(calls) == 1


def test_the_others_of_many_are_read(cache: Any) -> None:
    cache.set_many({"a": 1, "b": 2})
    put(cache, UNDECODABLE["garbage"])
    asked: list[str] = []

    def default_many(keys: list[str]) -> dict[str, int]:
        asked.extend(keys)
        return dict.fromkeys(keys, 3)

    found = cache.get_or_set_many(["a", "report", "b"], default_many, 60)
    assert (found, asked) == ({"a": 1, "report": 3, "b": 2}, ["report"])


def test_one_warning_for_a_group(cache: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "django_redis_lock.flights"):
        for number in range(5):
            put(cache, UNDECODABLE["garbage"], f":1:page-{number}")
            cache.get_or_set(f"page-{number}", one, 60, group=f"pages {id(cache)}")
    messages = [r.getMessage() for r in caplog.records if "cannot be decoded" in r.getMessage()]
    assert len(messages) == 1
    assert "page-0" in messages[0]


@pytest.fixture
def default(settings: Any, redis_server: RedisServer) -> Iterator[Any]:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": redis_server.url}}
    yield caches["default"]
    caches.close_all()


def spoil(client: redis.Redis) -> int:
    """Make every value of the cache undecodable."""
    keys = [key for key in client.keys(":1:*") if client.type(key) == b"string"]
    for key in keys:
        client.set(key, UNDECODABLE["a class that is gone"], keepttl=True)
    return len(keys)


@pytest.mark.parametrize("method", ["get", "head"])
@pytest.mark.parametrize("stale", [0, 3600])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_page(
    default: Any, client: redis.Redis, method: str, stale: int, asynchronous: bool
) -> None:
    calls: list[int] = []

    def page(request: Any) -> HttpResponse:
        calls.append(1)
        return HttpResponse(f"page {len(calls)}")

    async def apage(request: Any) -> HttpResponse:
        return page(request)

    view: Any = cached_page(60, stale=stale)(apage if asynchronous else page)

    def visit() -> bytes:
        request = getattr(RequestFactory(), method)("/report")
        response = asyncio.run(view(request)) if asynchronous else view(request)
        return bytes(response.content)

    assert [visit(), visit()] == [b"page 1"] * 2
    assert spoil(client) >= 2
    assert [visit(), visit()] == [b"page 2"] * 2
