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
from django_redis_lock.protocol.holders import HolderInfo, Owner
from django_redis_lock.protocol.identity import fingerprint

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
        (
            Conflict("x", Owner("abc123"), 56.7, resting=True),
            "x was released, and its min_hold ends in 57 seconds",
        ),
        (
            Conflict("x", Owner("abc123"), 0.3, resting=True),
            "x was released, and its min_hold ends in less than a second",
        ),
        (
            Conflict("x", HOLDER, 0.2, 0.4),
            "x is held by web-1, process 42, thread MainThread (nightly) for less than a second; "
            "its lock ends in less than a second unless renewed",
        ),
        (Conflict("x"), "x is held by another caller, or was a moment ago"),
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


def held(ttl: float, held_for: float | None, **fields: str) -> HolderInfo:
    """As Redis says it: a renewed lock with a lifetime of 30 s, unless ``fields`` say otherwise."""
    token = b"token"
    owner = {"id": fingerprint(token), "host": "web-1", "lifetime": "30000", "renews": "1"}
    said = {**owner, "since": "1000", **fields}
    pttl = -1 if math.isinf(ttl) else int(ttl * 1000)
    if held_for is None:
        said = {}
    reply = [text.encode() for pair in said.items() if pair[1] for text in pair]
    return HolderInfo([token, pttl, reply, int((1000 + (held_for or 0)) * 1e6), 1])


ONCE = {"renews": ""}


@pytest.mark.parametrize(
    ("held", "usual_hold", "seconds"),
    [
        pytest.param(None, None, 2, id="nothing is known"),
        pytest.param(held(29, None), None, 2, id="the holder is not known yet"),
        pytest.param(held(29, None), 0.3, 1, id="but what is usual is"),
        pytest.param(held(29, 1), 0.3, 2, id="longer than usual"),
        pytest.param(held(29, 1), 200, 199, id="shorter than usual"),
        pytest.param(held(29, 20), None, 20, id="as long again"),
        pytest.param(held(29, 5000), None, 60, id="but a minute at most"),
        pytest.param(held(29, 5000), 9000, 3600, id="and never more than an hour"),
        pytest.param(held(14, 5000), 0.3, 14, id="a silent holder"),
        pytest.param(held(7, 23, **ONCE), 200, 7, id="it is not renewed"),
        pytest.param(held(math.inf, 10, **ONCE, lifetime="0"), None, 10, id="it never expires"),
        pytest.param(held(40, 20, **ONCE, rests="token"), 0.1, 40, id="it rests"),
    ],
)
def test_when_to_come_again(
    held: HolderInfo | None, usual_hold: float | None, seconds: int
) -> None:
    conflict = Conflict.of("x", held, usual_hold=usual_hold)
    assert conflict.retry_after == seconds
    answer = conflict.response(RequestFactory().get("/"))
    assert answer["Retry-After"] == str(seconds)
    assert b"in a moment" in answer.content


@pytest.mark.parametrize(("given", "seconds"), [(0.1, 1), (7, 7), (7.1, 8), (1e9, 3600)])
def test_what_the_code_says_goes(given: float, seconds: int) -> None:
    assert Conflict.of("x", held(29, 20), "default", given, 5).retry_after == seconds


def test_the_error_carries_the_facts() -> None:
    error = Conflict("x", HOLDER, 12.5, 60, retry_after=13).error()
    assert str(error) == str(Conflict("x", HOLDER, 12.5, 60))
    assert error.lock_name == "x"
    assert isinstance(error, LockNotAcquired)
    assert (error.lock_name, error.holder, error.retry_after) == ("x", HOLDER, 13)
    assert "web-1, process 42" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.holder, again.retry_after) == (str(error), HOLDER, 13)


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
    conflict = Conflict("x", HOLDER, retry_after=13)
    answer = conflict.response(RequestFactory().get("/"), 423)
    assert answer.content == b"again in 13"
    assert answer.status_code == 423


def test_no_time_has_the_separators_of_a_language() -> None:
    with translation.override("de"):
        answer = Conflict("x", retry_after=3000).response(RequestFactory().get("/"))
    assert answer["Retry-After"] == "3000"
