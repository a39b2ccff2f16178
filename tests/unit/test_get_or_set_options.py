"""The options of one ``get_or_set``: the settings fill the gaps, nonsense is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from django_redis_lock.conf import SETTING, Conf, GetOrSetOptions


def of(*, timeout: float | None = 60, **given: Any) -> GetOrSetOptions:
    return GetOrSetOptions.of(Conf(), timeout, **given)


def lifetime(timeout: Any, **given: Any) -> int:
    """Of some value, in milliseconds."""
    return of(**given).lifetime(timeout)("a value")


def test_what_is_left_out_comes_from_the_settings(settings: Any) -> None:
    settings.DJANGO_REDIS_LOCK = {"STALE": 5, "WAIT": 7, "BACKGROUND": True, "ERROR_TTL": 1}
    terms = of(wait=1, stale=SETTING)
    assert (terms.stale, terms.wait, terms.background, terms.error_ttl) == (5, 1, True, 1)
    assert GetOrSetOptions.of(Conf({"LOCK_STALE": 6}), 60).stale == 6
    assert of(timeout=None).stale == 0


NO_SECONDS = [-1, float("nan"), float("inf"), "1", True]
#: What an option cannot be.
WRONG: dict[str, list[Any]] = {
    "stale": [*NO_SECONDS, None],
    "wait": [*NO_SECONDS, None],
    "error_ttl": [*NO_SECONDS, None],
    "soft_timeout": NO_SECONDS,
    "jitter": [-0.1, 1.1, float("nan"), "0.5", None, True],
    "timeout": ["60", [], True, False, float("nan"), float("inf"), -float("inf")],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WRONG)
def test_what_an_option_cannot_be(name: str) -> None:
    for value in WRONG[name]:
        with pytest.raises((TypeError, ValueError), match=f"{name} must be"):
            of(**{"stale": 5, name: value})


def test_a_soft_timeout_needs_stale(settings: Any) -> None:
    for timeout, given in [(60, {}), (60, {"stale": 0}), (None, {})]:
        with pytest.raises(ValueError, match="soft_timeout needs stale"):
            of(timeout=timeout, soft_timeout=0.2, **given)
    assert of(soft_timeout=None).refresh_wait is None
    settings.DJANGO_REDIS_LOCK = {"STALE": 5}
    assert of(soft_timeout=0.2).refresh_wait == 0.2
    settings.DJANGO_REDIS_LOCK = {"SOFT_TIMEOUT": 0.3}
    assert of().stale == 0, "a setting asks for nothing"


def test_a_soft_timeout_and_background_exclude_each_other(settings: Any) -> None:
    with pytest.raises(ValueError, match="give soft_timeout or background"):
        of(soft_timeout=0.2, background=True, stale=5)
    assert of(soft_timeout=0.2, background=False, stale=5).refresh_wait == 0.2
    assert of(soft_timeout=None, background=True, stale=5).refresh_wait == 0
    settings.DJANGO_REDIS_LOCK = {"BACKGROUND": True, "SOFT_TIMEOUT": 0.3}
    assert of(stale=5).refresh_wait == 0, "of two settings, that which waits less"
    assert of(soft_timeout=0.2, stale=5).refresh_wait == 0.2, "a call counts more than both"
    assert of(background=False, stale=5).refresh_wait == 0.3


@pytest.mark.parametrize(
    ("timeout", "milliseconds"), [(None, 0), (10, 10_000), (0.5, 500), (0, -1), (-1, -1)]
)
def test_a_lifetime(timeout: float | None, milliseconds: int) -> None:
    assert lifetime(timeout) == milliseconds
    assert lifetime(lambda _: timeout) == milliseconds


def test_a_lifetime_depends_on_the_value() -> None:
    of_value = of(stale=2).lifetime({"good": 60, "bad": 0}.get)
    assert [of_value("good"), of_value("bad")] == [62_000, -1]
    assert of_value("for ever") == 0, "it is never stale, and so that is no error"


@pytest.mark.parametrize("returned", ["soon", True, False, [], float("nan"), float("inf"), 1e15])
def test_a_function_that_returns_no_timeout(returned: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="what timeout returns must be"):
        lifetime(lambda _: returned)


@pytest.mark.parametrize("timeout", [None, 0, -1, -0.5, 10**10, lambda value: value])
def test_a_timeout_that_django_allows_is_no_error(timeout: Any) -> None:
    of(timeout=timeout)


def test_a_value_that_may_be_stale_is_kept_longer() -> None:
    assert lifetime(10, stale=2.5) == 12_500
    # One that is not to be kept at all is not kept as a stale one either.
    assert lifetime(0, stale=2.5) == -1


def test_a_value_without_a_timeout_is_never_stale() -> None:
    with pytest.raises(ValueError, match="stale needs a timeout"):
        of(timeout=None, stale=1)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999])
def test_jitter_shortens_the_timeout_and_not_the_stale_time(
    monkeypatch: pytest.MonkeyPatch, drawn: float
) -> None:
    monkeypatch.setattr(random, "random", lambda: drawn)
    assert lifetime(100, jitter=0.2) == int(100_000 * (1 - 0.2 * drawn))
    assert lifetime(100, jitter=0.2, stale=5) == int(100_000 * (1 - 0.2 * drawn)) + 5000
    assert lifetime(None, jitter=0.2) == 0


@pytest.mark.parametrize("timeout", [100, lambda _: 100])
def test_jitter_spreads_the_values_of_one_call(timeout: Any) -> None:
    of_value = of(jitter=0.5).lifetime(timeout)
    lifetimes = {of_value(number) for number in range(100)}
    assert len(lifetimes) > 50
    assert all(50_000 <= lifetime <= 100_000 for lifetime in lifetimes)
