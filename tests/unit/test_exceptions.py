"""The errors: caught by what caught redis-py's, and carrying what a handler wants to know."""

from __future__ import annotations

import copy
import pickle

import pytest
from redis import exceptions as redis_exceptions

from django_redis_lock import LockError, LockLost, LockNotAcquired, LockNotOwnedError
from django_redis_lock.exceptions import TooFewReplicas, TooFewServers
from django_redis_lock.protocol.holders import Owner

ALL = [LockError, LockLost, LockNotAcquired, LockNotOwnedError]
HOLDER = Owner("c0ffee", "web-1", 4711, "MainThread", "nightly", 5.0)


@pytest.mark.parametrize("error", ALL)
def test_one_base_and_redis_pys(error: type[LockError]) -> None:
    assert issubclass(error, LockError)
    assert issubclass(error, redis_exceptions.LockError)
    assert issubclass(error, redis_exceptions.RedisError)
    # redis-py's is one too: it replaced threading's, which raises it.
    assert issubclass(error, ValueError)


def test_what_counts_as_not_owned() -> None:
    for error in (LockNotOwnedError, LockLost):
        assert issubclass(error, LockNotOwnedError)
        assert issubclass(error, redis_exceptions.LockNotOwnedError)
    assert not issubclass(LockNotAcquired, redis_exceptions.LockNotOwnedError)


@pytest.mark.parametrize("error", ALL)
def test_the_lock_is_named(error: type[LockError]) -> None:
    raised = error("Busy", "report", HOLDER)
    assert str(raised) == "Busy (lock 'report')"
    assert (raised.lock_name, raised.holder) == ("report", HOLDER)
    assert repr(raised) == f"{error.__name__}(\"Busy (lock 'report')\")"
    assert raised.message == str(raised), "Sentry reads it"


@pytest.mark.parametrize("error", ALL)
def test_nothing_need_be_known(error: type[LockError]) -> None:
    assert str(error()) == ""
    assert repr(error()) == f"{error.__name__}('')"
    assert str(error("Busy")) == "Busy"
    assert error().lock_name is error().holder is None


@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"report", "'report'"), ("zwölf\n", r"'zwölf\n'"), (b"\xff", "'\N{REPLACEMENT CHARACTER}'")],
)
def test_any_name_can_be_shown(name: str | bytes, shown: str) -> None:
    assert str(LockError("Busy", name)) == f"Busy (lock {shown})"


@pytest.mark.parametrize(
    "again",
    [
        copy.copy,
        lambda e: pickle.loads(pickle.dumps(e)),
        lambda e: pickle.loads(pickle.dumps(e, 0)),
    ],
)
@pytest.mark.parametrize(
    "raised",
    [
        *(error("Busy", "report", HOLDER) for error in ALL),
        *(error() for error in ALL),
        LockNotAcquired("Busy", b"report", HOLDER, retry_after=2.5),
        TooFewReplicas(1, 2, "report"),
        TooFewServers(1, 3, lock_name="report"),
    ],
    ids=lambda e: f"{type(e).__name__} {e}",
)
def test_errors_travel_between_processes(raised, again) -> None:
    copied = again(raised)
    assert type(copied) is type(raised)
    assert (str(copied), copied.args, vars(copied)) == (str(raised), raised.args, vars(raised))
