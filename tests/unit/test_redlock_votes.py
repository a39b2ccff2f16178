"""A lock on several servers: what each reply and each round of replies means, and what is sent
next. No server runs, and time stands still."""

from __future__ import annotations

import math
from typing import Any

import pytest
from redis.exceptions import BusyLoadingError
from redis.exceptions import ConnectionError as RedisConnectionError

from django_redis_lock.contrib.redlock.votes import Ballot, drift
from django_redis_lock.protocol import Refused, Taken
from tests.events import no_listeners
from tests.support.clock import FakeClock, clock

__all__ = ["clock", "no_listeners"]

# Quick cells, each of which is another decision.
pytestmark = [pytest.mark.sample(1), pytest.mark.usefixtures("no_listeners")]


def replies(text: str) -> dict[int, Any]:
    """Of one server after the other: a grant with the fence 7 (g) or 9 (G), a refusal (r), no
    answer (x), and one that does not answer for now (b)."""
    kinds = {
        "g": Taken(1, 7, 0, 1000.0),
        "G": Taken(1, 9, 0, 1000.0),
        "r": Refused(5000, 0, 1000.0),
        "x": RedisConnectionError("away"),
        "b": BusyLoadingError("LOADING"),
    }
    return {place: kinds[letter] for place, letter in enumerate(text)}


@pytest.mark.parametrize(("lifetime", "seconds"), [(math.inf, 0), (10, 0.102), (100, 1.002)])
def test_a_hundredth_and_two_milliseconds_of_a_lifetime_do_not_count(
    lifetime: float, seconds: float
) -> None:
    assert drift(lifetime) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("ggg", "passes won stored"),
        ("ggr", "passes won stored"),
        ("gGr", "passes won"),
        ("gGG", "passes won stored"),
        ("grr", "passes"),
        ("rgg", "passes"),
        ("xgg", "passes won stored"),
        ("xrg", "passes"),
        ("xxg", "too_few"),
        ("xbg", "passes too_few"),
        ("rxb", "passes too_few"),
        ("xxx", "too_few"),
        ("bbx", "passes too_few"),
        ("ggxx", "too_few"),
        ("gggx", "passes won stored"),
        ("ggxxr", "passes"),
        ("gggxx", "passes won stored"),
        ("gggGG", "passes won"),
        ("ggGGG", "passes won stored"),
        ("xxrgg", "passes"),
    ],
)
def test_what_a_round_of_votes_means(clock: FakeClock, text: str, outcome: str) -> None:
    ballot = Ballot(len(text), replies(text), clock.now, 10)
    names = ("passes", "too_few", "won", *(("stored",) if ballot.won else ()))
    assert [name for name in names if getattr(ballot, name)] == sorted(
        outcome.split(), key=names.index
    )
    counts = [letter in "gG" for letter in text]
    assert [vote > 0 for vote in ballot.votes] == counts
    if any(counts):
        assert ballot.fence == (9 if "G" in text else 7)


@pytest.mark.parametrize(("lifetime", "lasts"), [(10, 9.898), (None, math.inf)])
def test_a_round_is_won_within_its_lifetime(
    clock: FakeClock, lifetime: float | None, lasts: float
) -> None:
    ballot = Ballot(3, replies("grg"), clock.now, lifetime)
    assert ballot.deadline == pytest.approx(1000 + lasts)
    assert ballot.votes == (ballot.deadline, -math.inf, ballot.deadline)
    clock.now = min(ballot.deadline - 0.001, 1e12)
    assert ballot.won
    clock.now = ballot.deadline
    assert not ballot.won


def test_the_first_in_order_is_that_which_counts(clock: FakeClock) -> None:
    by_place = replies("rgg")
    assert not Ballot(3, {n: by_place[n] for n in (0, 1, 2)}, clock.now, 10).won
    assert Ballot(3, {n: by_place[n] for n in (1, 2, 0)}, clock.now, 10).won
