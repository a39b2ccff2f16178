"""Settings: read when they are needed, overridden for an alias, refused with a sentence."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from django_redis_lock.conf import Conf

DEFAULTS = {
    "TIMEOUT": 30.0,
    "FLIGHT_TIMEOUT": 10.0,
    "WAIT": 60.0,
    "GRANT_TIMEOUT": 2.0,
    "LOCK_PREFIX": "lock:",
    "USING": "default",
    "SLOW_ACQUISITION": 0.005,
    "HOLDER_USER": False,
    "STALE": 0.0,
    "BACKGROUND": False,
    "BACKGROUND_CONTEXT": None,
    "SOFT_TIMEOUT": None,
    "ON_WAIT_TIMEOUT": "compute",
    "VALUES_ON_REDIS_DOWN": "compute",
    "CLEAR": "database",
    "JITTER": 0.0,
    "ERROR_TTL": 0.0,
    "METRICS": True,
    "PAGE_STATUS_HEADER": None,
    "EXPORTERS": (),
    "WARN_SHARE": 0.8,
    "WARN_AFTER": None,
    "ON_REDIS_DOWN": "raise",
    "LOCAL_LOCK_FOLDER": None,
    "REPLICAS": 0,
    "BREAKER_FAILURES": 2,
    "BREAKER_PAUSE": 2.0,
}
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


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, "0.5", None, True])
def test_a_share_is_from_0_to_1(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"JITTER": value}
    with pytest.raises(ImproperlyConfigured, match="JITTER must be a number from 0 to 1"):
        _ = Conf().JITTER


@pytest.mark.parametrize("name", ["ON_WAIT_TIMEOUT", "VALUES_ON_REDIS_DOWN", "CLEAR"])
@pytest.mark.parametrize("value", ["skip", "", None, True, ["compute"]])
def test_a_choice_is_one_of_those_there_are(settings: Any, name: str, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {name: value}
    with pytest.raises(ImproperlyConfigured, match=f"{name} must be one of '"):
        getattr(Conf(), name)


@pytest.mark.parametrize("value", ["prometheus", ["statsd"], [["prometheus"]], None])
def test_exporters_are_a_list_of_those_there_are(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"EXPORTERS": value}
    with pytest.raises(ImproperlyConfigured, match="EXPORTERS must be a list of 'prometheus'"):
        _ = Conf().EXPORTERS


@pytest.mark.parametrize("value", [-1, 1.5, "2", None, True])
def test_a_number_of_failures_is_whole(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"BREAKER_FAILURES": value}
    with pytest.raises(ImproperlyConfigured, match="must be a whole number of 0 or more"):
        _ = Conf().BREAKER_FAILURES


def test_every_setting_has_its_default(settings: Any) -> None:
    if hasattr(settings, "DJANGO_REDIS_LOCK"):
        del settings.DJANGO_REDIS_LOCK
    found = {name: getattr(Conf(), name) for name in dir(Conf) if name.isupper()}
    assert found == DEFAULTS
    assert all(type(found[name]) is type(default) for name, default in DEFAULTS.items())


def test_every_setting_is_documented() -> None:
    lines = [line.strip() for line in inspect.getsource(Conf).splitlines()]
    settings = (at for at, line in enumerate(lines) if " = Setting(" in line)
    above = {lines[at].split()[0].rstrip(":"): lines[at - 1] for at in settings}
    assert sorted(above) == sorted(DEFAULTS)
    assert all(comment.startswith("#: ") for comment in above.values())


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


@pytest.mark.parametrize("value", [None, "", ["a", "b", "c"]])
def test_the_cache_for_locks_is_an_alias(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"USING": value}
    with pytest.raises(ImproperlyConfigured, match="USING must be the alias of a cache"):
        _ = Conf().USING


@pytest.mark.parametrize("value", [None, 5, b"lock:"])
def test_a_wrong_prefix_is_refused(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": value}
    with pytest.raises(ImproperlyConfigured, match="LOCK_PREFIX must be a str"):
        _ = Conf().LOCK_PREFIX


@pytest.mark.parametrize("value", ["1:", "12lock:", "-1:lock"])
def test_a_prefix_that_looks_like_a_version_is_refused(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"LOCK_PREFIX": value}
    with pytest.raises(ImproperlyConfigured, match="LOCK_PREFIX must not begin as the version"):
        _ = Conf().LOCK_PREFIX


def test_a_wrong_option_is_named_as_it_was_given() -> None:
    with pytest.raises(ImproperlyConfigured, match="LOCK_TIMEOUT must be"):
        _ = Conf({"LOCK_TIMEOUT": 0}).TIMEOUT


@pytest.mark.parametrize("value", [None, [], "TIMEOUT=3", {"TIMEOUT"}])
def test_what_is_no_dict_is_refused(settings: Any, value: Any) -> None:
    settings.DJANGO_REDIS_LOCK = value
    with pytest.raises(ImproperlyConfigured, match="DJANGO_REDIS_LOCK must be a dict"):
        _ = Conf().TIMEOUT
