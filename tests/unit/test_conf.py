"""Settings: read when they are needed, overridden for an alias, refused with a sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_redis_lock.conf import Conf

#: Seconds of which there must be some.
SECONDS = ["TIMEOUT", "FLIGHT_TIMEOUT", "WAIT", "GRANT_TIMEOUT", "BREAKER_PAUSE"]
#: Seconds of which there may be none.
NO_SECONDS = ["STALE", "ERROR_TTL", "SLOW_ACQUISITION"]


@pytest.mark.parametrize("name", NO_SECONDS)
def test_no_seconds_will_do(settings: Any, name: str) -> None:
    settings.DJANGO_REDIS_LOCK = {name: 0}
    assert getattr(Conf(), name) == 0.0
    settings.DJANGO_REDIS_LOCK = {name: -1}
    with pytest.raises(ImproperlyConfigured, match=f"{name} must be a number of seconds of 0"):
        getattr(Conf(), name)


NO_CHOICES = ["skip", "", None, True, ["compute"]]
#: What a setting cannot be, and words of the error.
WRONG: dict[str, tuple[list[Any], str]] = {
    "JITTER": ([-0.1, 1.1, math.nan, "0.5", None, True], "must be a number from 0 to 1"),
    "ON_WAIT_TIMEOUT": (NO_CHOICES, "must be one of '"),
    "VALUES_ON_REDIS_DOWN": (NO_CHOICES, "must be one of '"),
    "CLEAR": (NO_CHOICES, "must be one of '"),
    "EXPORTERS": (
        ["prometheus", ["statsd"], [["prometheus"]], None],
        "must be a list of 'prometheus'",
    ),
    "BREAKER_FAILURES": ([-1, 1.5, "2", None, True], "must be a whole number of 0 or more"),
    "USING": ([None, "", ["a", "b", "c"]], "must be the alias of a cache"),
    "LOCK_PREFIX": ([None, 5, b"lock:"], "must be a str"),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WRONG)
def test_what_a_setting_cannot_be(settings: Any, name: str) -> None:
    values, words = WRONG[name]
    for value in values:
        settings.DJANGO_REDIS_LOCK = {name: value}
        with pytest.raises(ImproperlyConfigured, match=f"{name} {words}"):
            getattr(Conf(), name)


@pytest.mark.parametrize("value", ["1:", "12lock:", "-1:lock"])
def test_a_prefix_that_looks_like_a_version_is_refused(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": value}
    with pytest.raises(ImproperlyConfigured, match="LOCK_PREFIX must not begin as the version"):
        _ = Conf().LOCK_PREFIX


@pytest.mark.parametrize("name", SECONDS)
def test_a_setting_is_read_when_it_is_needed(settings: Any, name: str) -> None:
    conf = Conf()
    settings.DJANGO_REDIS_LOCK = {name: 7}
    assert getattr(conf, name) == 7.0
    settings.DJANGO_REDIS_LOCK = {name: 0.5}
    assert getattr(conf, name) == 0.5


@pytest.mark.parametrize("name", SECONDS)
def test_an_option_of_the_cache_wins(settings: Any, name: str) -> None:
    settings.DJANGO_REDIS_LOCK = {name: 7}
    assert getattr(Conf({f"LOCK_{name}": 8}), name) == 8.0
    assert getattr(Conf({name: 8}), name) == 7.0


def test_the_prefix(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": ""}
    assert Conf().LOCK_PREFIX == ""
    assert Conf({"LOCK_LOCK_PREFIX": "mutex:"}).LOCK_PREFIX == "mutex:"


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "30", None, True, [], 10**12])
@pytest.mark.parametrize("name", SECONDS)
def test_a_wrong_value_is_refused(settings: Any, name: str, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {name: value}
    with pytest.raises(ImproperlyConfigured, match=f"DJANGO_REDIS_LOCK: {name} must be"):
        getattr(Conf(), name)


def test_a_wrong_option_is_named_as_it_was_given() -> None:
    with pytest.raises(ImproperlyConfigured, match="LOCK_TIMEOUT must be"):
        _ = Conf({"LOCK_TIMEOUT": 0}).TIMEOUT
