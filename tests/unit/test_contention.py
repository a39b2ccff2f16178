"""``Conflict``: what it says to people, and when to come again."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
from django.core.management import CommandError
from django.test import RequestFactory
from django.utils import translation

from django_redis_lock.contention import Conflict
from django_redis_lock.exceptions import LockNotAcquired
from django_redis_lock.locking.owner import Owner

HOLDER = Owner("abc123", "web-1", 42, "MainThread", "nightly", 1000.0)


@pytest.mark.parametrize(
    ("conflict", "words"),
    [
        (
            Conflict("x", HOLDER, 12.4, 63.6),
            "x is held by web-1, process 42, thread MainThread (nightly) for 64 seconds; "
            "its lock ends in 12 seconds unless renewed",
        ),
        (
            Conflict("x", HOLDER, math.inf, 1.0),
            "x is held by web-1, process 42, thread MainThread (nightly) for 1 second",
        ),
        (
            Conflict("x", HOLDER, 240, 7200),
            "x is held by web-1, process 42, thread MainThread (nightly) for 120 minutes; "
            "its lock ends in 4 minutes unless renewed",
        ),
        (
            Conflict("x", Owner("abc123"), 30),
            "x is held by an unnamed holder (abc123); its lock ends in 30 seconds unless renewed",
        ),
        (Conflict("x"), "x is held by another, or was a moment ago"),
        (
            Conflict("100%s", Owner("abc"), math.inf),
            "100%s is held by an unnamed holder (abc)",
        ),
    ],
)
def test_its_words(conflict: Conflict, words: str) -> None:
    assert str(conflict) == words


def test_its_words_are_one_line_whatever_a_holder_calls_itself() -> None:
    holder = Owner("abc", "web-1", 42, "Thread\n1", "nightly\r\nreport", 1000.0)
    assert len(str(Conflict("a\nb", holder, 5, 5)).splitlines()) == 1


@pytest.mark.parametrize(
    ("ttl", "seconds"),
    [(None, 1), (0, 1), (0.2, 1), (1, 1), (1.01, 2), (59.9, 60), (1e9, 3600), (math.inf, 3600)],
)
def test_when_to_come_again(ttl: float | None, seconds: int) -> None:
    conflict = Conflict("x", HOLDER, ttl)
    assert conflict.retry_after == seconds
    answer = conflict.response(RequestFactory().get("/"))
    assert answer["Retry-After"] == str(seconds)


def test_the_error_carries_the_facts() -> None:
    error = Conflict("x", HOLDER, 12.5, 60).error()
    assert isinstance(error, LockNotAcquired)
    assert (error.lock_name, error.holder, error.retry_after) == ("x", HOLDER, 12.5)
    assert "web-1, process 42" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.holder, again.retry_after) == (str(error), HOLDER, 12.5)


@pytest.mark.parametrize("ttl", [None, math.inf])
def test_an_error_that_does_not_know_when(ttl: float | None) -> None:
    assert Conflict("x", HOLDER, ttl).error().retry_after is None


def test_the_commands_error() -> None:
    error = Conflict("x", HOLDER, 12.5).command_error(7)
    assert isinstance(error, CommandError)
    assert error.returncode == 7
    assert str(error) == f"{Conflict('x', HOLDER, 12.5)}. More: manage.py locks show x"
    line = Conflict("a b\n", HOLDER, 12.5, using="locks").line()
    assert line.endswith(". More: manage.py locks show 'a b ' --using locks")


def test_the_page_can_be_replaced(settings: Any, tmp_path: Any) -> None:
    folder = tmp_path / "django_redis_lock"
    folder.mkdir()
    (folder / "conflict.html").write_text("again in {{ retry_after }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [str(tmp_path)]}]
    answer = Conflict("x", HOLDER, 12.5).response(RequestFactory().get("/"), 423)
    assert answer.content == b"again in 13"
    assert answer.status_code == 423


def test_no_time_is_told_with_the_separators_of_a_language() -> None:
    with translation.override("de"):
        answer = Conflict("x", HOLDER, 3000).response(RequestFactory().get("/"))
    assert answer["Retry-After"] == "3000"
