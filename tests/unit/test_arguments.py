"""W1: what makes no sense is refused at the call, with a sentence that says what is allowed."""

from __future__ import annotations

import itertools
import math
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any
from uuid import UUID

import pytest
import redis
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from django_redis_lock import Lock, cached, cached_page, idempotent, locked, unique_task
from django_redis_lock.cache import LocMemCache, check_using
from django_redis_lock.protocol.validation import (
    MAX_SECONDS,
    check_name,
    check_name_in_cache,
    check_seconds,
    milliseconds,
)

pytestmark = pytest.mark.invariant("W1")


def test_the_caches_of_a_lock_are_three_aliases_or_more() -> None:
    assert check_using(["a", "b", "c"]) == ("a", "b", "c")
    for value in (5, "default", {"a", "b", "c"}, ["a", "b", 5]):
        with pytest.raises(TypeError, match="using must be a list of cache aliases"):
            check_using(value)
    for value in ([], ["a", "b"], ["a", "b", "b"]):
        with pytest.raises(ValueError, match="using must have three different caches or more"):
            check_using(value)


async def acoroutine(*args: object) -> str:
    return "a"


class Awaited:
    async def __call__(self, *args: object) -> str:
        return "a"


#: What nobody would await.
PLAIN: dict[str, Any] = {
    "locked, key": lambda f: locked(key=f),
    "locked, on_lost": lambda f: locked("a", on_lost=f)(len),
    "locked, on_conflict": lambda f: locked("a", on_conflict=f)(len),
    "lock, on_lost": lambda f: Lock(redis.Redis(), "a", timeout=5, on_lost=f),
    "cached, key": lambda f: cached(key=f),
    "get_or_set, timeout": lambda f: LocMemCache("plain", {}).get_or_set("a", 5, f),
    "cached_page, timeout": cached_page,
    "idempotent, key": lambda f: idempotent(key=f, scope=None),
    "idempotent, scope": lambda f: idempotent(scope=f),
    "unique_task, key": lambda f: unique_task(f, timeout=5),
}


@pytest.mark.parametrize(
    "function",
    [acoroutine, Awaited(), partial(acoroutine, 1)],
    ids=["function", "object", "partial"],
)
@pytest.mark.parametrize("name", PLAIN)
def test_a_coroutine_function_is_refused_where_nothing_awaits_it(name: str, function: Any) -> None:
    with pytest.raises(TypeError, match="must be a plain function"):
        PLAIN[name](function)


@pytest.mark.parametrize("value", [1, 0.5, 30, 0.001, 86400.0, MAX_SECONDS])
def test_seconds_become_a_float(value: float) -> None:
    seconds = check_seconds("timeout", value)
    assert seconds == value
    assert type(seconds) is float


NO_NUMBERS = ["5", b"5", "", True, False, [], {}, ..., 1j, timedelta(seconds=5)]
NO_NUMBERS += [Decimal(5), Fraction(5)]
NO_LENGTHS = [math.nan, -math.inf, -1, -0.001, -1e300]
TOO_LONG = [math.inf, 1e12, MAX_SECONDS * 1.001, 10**18]
TOO_SHORT = [1e-9, 0.0009, 1e-300]


@pytest.mark.parametrize("zero", [False, True])
def test_what_are_no_seconds_is_refused(zero: bool) -> None:
    allowed = "of 0 or more" if zero else "greater than 0"
    for values, error, words in (
        (NO_NUMBERS, TypeError, f"a number of seconds {allowed}, not "),
        (NO_LENGTHS, ValueError, f"a number of seconds {allowed}, not "),
        (TOO_LONG, ValueError, "at most a hundred years, given in sec"),
        ([10**400, -(10**400)], ValueError, ""),
        ([] if zero else [0, 0.0, -0.0], ValueError, "a number of seconds greater than 0, not"),
        ([] if zero else TOO_SHORT, ValueError, r"at least a millisecond, 0\.001, not"),
    ):
        for value in values:
            with pytest.raises(error, match=f"wait must be {words}"):
                check_seconds("wait", value, zero=zero)
    if zero:
        for value in (0, 0.0, -0.0, *TOO_SHORT):
            assert check_seconds("wait", value, zero=True) == value


def test_none_only_where_it_means_something() -> None:
    assert check_seconds("timeout", None, none="a lock that never expires") is None
    with pytest.raises(TypeError, match="not None"):
        check_seconds("timeout", None)
    with pytest.raises(TypeError, match="greater than 0, or None for a wait without end, not 'x'"):
        check_seconds("wait", "x", none="a wait without end")


@pytest.mark.parametrize("name", ["report", b"report", "ü", b"\xff", " ", "\n", "{}"])
def test_names(name: str | bytes) -> None:
    assert check_name(name) == name
    for wrong in (None, 5, ["report"], bytearray(b"report"), ...):
        with pytest.raises(TypeError, match="a lock's name must be a str or bytes, not "):
            check_name(wrong)
    for empty in ("", b""):
        with pytest.raises(ValueError, match="a lock's name must not be empty"):
            check_name(empty)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report", "report"),
        (b"report", "report"),
        ("ü".encode(), "ü"),
        (memoryview(b"report"), "report"),
        (5, "5"),
        (0.5, "0.5"),
        (Decimal("1.50"), "1.50"),
        (UUID(int=7), "00000000-0000-0000-0000-000000000007"),
        (gettext_lazy("report"), "report"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_names_in_a_cache_are_texts(name: Any, text: str) -> None:
    assert check_name_in_cache(name) == text


def test_what_is_no_name_in_a_cache() -> None:
    for name in (True, ("a", 1), ["a"], {"a"}, {}, print):
        with pytest.raises(TypeError, match="a lock's name must be a str, bytes or number, not "):
            check_name_in_cache(name)
    for name in ("", None, b"", b"\xff", gettext_lazy("")):
        with pytest.raises(ValueError, match="a lock's name must "):
            check_name_in_cache(name)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (None, 0),
        (0.0000001, 1),
        (0.0004, 1),
        (0.001, 1),
        (0.0011, 2),
        (0.1 + 0.2, 300),
        (1.1, 1100),
        (2.0001, 2001),
        (30, 30_000),
        (MAX_SECONDS, 3_153_600_000_000),
    ],
)
def test_milliseconds_are_rounded_up(seconds: float | None, expected: int) -> None:
    assert milliseconds(seconds) == expected


@hypothesis_settings(derandomize=True, database=None, deadline=None)
@given(st.integers(1, 10**9))
def test_whole_milliseconds_are_kept(count: int) -> None:
    assert milliseconds(count / 1000) == count


FLAGS = ("blocking", "thread_local", "raise_on_release_error", "renew", "reentrant")


def test_what_is_not_true_or_false_is_no_flag() -> None:
    wrong: Any
    for flag, wrong in itertools.product(FLAGS, ("no", 0, None)):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, not {wrong!r}"):
            Lock(redis.Redis(), "name", timeout=5, **{flag: wrong})
    wrong = "no"
    with pytest.raises(TypeError, match="blocking must be True or False, not 'no'"):
        Lock(redis.Redis(), "name").acquire(blocking=wrong)
    with pytest.raises(TypeError, match="blocking must be True or False, not 'no'"):
        locked("name", blocking=wrong)
    with pytest.raises(TypeError, match="background must be True or False, not 'no'"):
        cached("name", timeout=5, stale=5, background=wrong)


@pytest.mark.parametrize(
    ("name", "lowest", "highest"),
    [
        ("status_code", 100, 599),
        ("exit_code", 0, 255),
        ("lost_exit_code", 0, 255),
        ("unavailable_exit_code", 0, 255),
    ],
)
def test_codes_are_whole_numbers_from_the_first_to_the_last(
    name: str, lowest: int, highest: int
) -> None:
    for code in (lowest, highest):
        locked("a", **{name: code})
    words = f"{name} must be a whole number from {lowest} to {highest}, not "
    for wrong in (lowest - 1, highest + 1, True, float(lowest), str(lowest), None):
        with pytest.raises(ValueError, match=words):
            locked("a", **{name: wrong})


THREE = ["a", "b", "c"]

#: Options of ``locked()``, and words of the error, empty if they are right.
OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"key": 5}, "key must be a str"),
    ({"key": " "}, "key must not be empty"),
    ({"key": ["a", " "]}, "key must not be empty"),
    ({"timeout": 0}, "timeout must be a number of seconds greater than 0, or None"),
    ({"timeout": None}, ""),
    ({"timeout": None, "max_hold": 5}, "max_hold needs a timeout"),
    ({"timeout": 0.5, "max_hold": 60}, ""),
    ({"max_hold": 0}, "max_hold must be"),
    ({"key": ["a", "b"], "reentrant": True}, "reentrant is for a lock with one name"),
    ({"key": ["a", "b"], "limit": 2}, "limit is for a lock with one name"),
    ({"key": ["a", "b"], "using": THREE}, "several names are for a lock on one server"),
    ({"key": ["a", "b"], "reentrant": False, "limit": 1}, ""),
    ({"using": 5}, "using must be the alias of a cache"),
    ({"using": THREE, "replicas": 1}, "replicas are for a lock on one server"),
    ({"using": THREE, "replicas": 0}, ""),
    ({"using": THREE, "limit": 2}, "limit must be 1"),
    ({"using": THREE, "limit": 1}, ""),
    ({"replicas": 1, "limit": 2}, ""),
    ({"replicas": -1}, "replicas must be a whole number of 0 or more"),
    ({"replicas": True}, "replicas must be a whole number of 0 or more"),
    ({"limit": 0}, "limit must be a whole number from 1 to"),
    ({"critical": True, "on_redis_down": "run"}, "critical"),
    ({"label": 5}, "label must be a str"),
    ({"group": 5}, "group must be a str or None"),
    ({"group": "a\nb"}, "group must have 1 to 200 printable characters"),
    ({"group": ""}, "group must have 1 to 200 printable characters"),
    ({"warn_after": 0}, "warn_after must be"),
    ({"warn_after": "5"}, "warn_after must be"),
    ({"release": "later"}, "release must be"),
    ({"release": "now"}, ""),
    ({"on_conflict": 5}, "on_conflict must be callable"),
    ({"on_conflict": print, "default": None}, "either on_conflict or default"),
    ({"on_conflict": print}, ""),
    ({"default": None}, ""),
    ({"on_lost": "stop"}, "on_lost must be callable"),
    ({"on_lost": "terminate"}, ""),
    ({"wait_for_redis": 1}, "wait_for_redis must be True or False"),
    ({"wait_for_redis": True}, "wait_for_redis needs blocking"),
    ({"wait_for_redis": True, "blocking": True}, ""),
    ({"blocking_timeout": 5}, "blocking_timeout needs blocking"),
    ({"blocking_timeout": 0, "blocking": True}, ""),
    ({"blocking_timeout": -1, "blocking": True}, "blocking_timeout must be"),
    ({"retry_after": 0}, "retry_after must be"),
    ({"min_hold": 6, "max_hold": 5}, "min_hold"),
    ({"min_hold": 5, "max_hold": 5}, ""),
    ({"min_hold": -1}, "min_hold must be"),
    ({"min_hold": None}, "min_hold must be"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("options", "words"), OPTIONS, ids=lambda value: str(value)[:40])
def test_options_of_locked(options: dict[str, Any], words: str) -> None:
    options = {"key": "a", **options}
    if not words:
        assert callable(locked(**options))
        return
    with pytest.raises((TypeError, ValueError), match=words):
        locked(**options)
