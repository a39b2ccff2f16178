"""W1, for each kind of lock: what makes no sense is refused at the call. No server is needed: the
locks live in memory, and a refusal comes before anything is sent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.sentinel import Sentinel

from django_redis_lock import AsyncLock, AsyncMultiLock, AsyncRedlock, Lock, MultiLock, Redlock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.transport.aio_client import asyncio_client
from tests.support.logs import logged
from tests.support.tasks import ForThreads, Tasks

pytestmark = pytest.mark.invariant("W1")

YEAR = 365 * 24 * 3600

NO_SECONDS: list[Any] = [
    -1,
    -0.001,
    math.nan,
    math.inf,
    -math.inf,
    True,
    "5",
    b"5",
    [5],
    101 * YEAR,
]
NO_NAMES: list[Any] = ["", b"", None, 5, ["name"]]
NO_TOKENS: list[Any] = ["", b"", 5, True, ["token"]]
NO_OPTIONS: list[dict[str, Any]] = [
    {"timeout": None, "renew": True},
    {"timeout": None, "max_hold": 5},
    {"timeout": 5, "max_hold": 60},
    {"timeout": 5, "renew": True, "max_hold": 5, "min_hold": 6},
    {"timeout": 5, "on_lost": "print"},
    {"timeout": 5, "label": 5},
    {"timeout": 5, "label": b"bytes"},
    {"timeout": 5, "group": 5},
    {"timeout": 5, "group": ""},
    {"timeout": 5, "group": "x" * 201},
    {"timeout": 5, "group": "two\nlines"},
]

#: A class, where its locks live, and its options. What a topology adds is below the arguments.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "one name": (Lock, {}),
    "one name, in tasks": (AsyncLock, {}),
    "several holders": (Lock, {"limit": 3}),
    "several holders, in tasks": (AsyncLock, {"limit": 3}),
    "reentrant": (Lock, {"reentrant": True}),
    "reentrant, in tasks": (AsyncLock, {"reentrant": True}),
    "with a fallback": (Lock, {"on_redis_down": "local"}),
    "with a fallback, in tasks": (AsyncLock, {"on_redis_down": "local"}),
    "several names": (MultiLock, {"lock_class": Lock}),
    "several names, in tasks": (AsyncMultiLock, {"lock_class": AsyncLock}),
    "several names, with a fallback": (
        MultiLock,
        {"lock_class": Lock, "on_redis_down": "local"},
    ),
    "several servers": (Redlock, {}),
    "several servers, in tasks": (AsyncRedlock, {}),
}
#: Of those with several names, a name is checked elsewhere, and a token is always refused.
WITH_ONE_NAME = [kind for kind in KINDS if not kind.startswith("several names")]


@pytest.fixture(scope="module")
def tasks() -> Iterator[Tasks]:
    tasks = Tasks()
    yield tasks
    tasks.close()


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    kind: str = request.param
    return kind


@pytest.fixture
def make(kind: str, tasks: Tasks, tmp_path: Path) -> Callable[..., Any]:
    """Makes handles of one lock, of one kind."""
    lock_class, fixed = KINDS[kind]
    databases = [Database(str(number)) for number in range(3)]
    clients: list[Any] = [client_of(database) for database in databases]
    if is_async := lock_class.__name__.startswith("Async"):
        clients = tasks.do(lambda: _asyncio_clients(clients))
    where: Any = clients if "Redlock" in lock_class.__name__ else clients[0]
    if "on_redis_down" in fixed:
        fixed = {**fixed, "local_folder": str(tmp_path)}

    def make(name: Any = "contract", **options: Any) -> Any:
        if "lock_class" in fixed:
            name = [name, "another"]
        lock = lock_class(where, name, **{**fixed, **options})
        return ForThreads(tasks, lock) if is_async else lock

    return make


async def _asyncio_clients(clients: list[Any]) -> list[Any]:
    return [asyncio_client(client) for client in clients]


of_each_kind = pytest.mark.parametrize("kind", KINDS, indirect=True)
of_each_kind_with_one_name = pytest.mark.parametrize("kind", WITH_ONE_NAME, indirect=True)


def refuses(words: str, call: Callable[..., Any], *args: Any, **options: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call(*args, **options)


@of_each_kind
@pytest.mark.parametrize("argument", ["timeout", "max_hold", "grant_timeout"])
def test_lifetimes_that_make_no_sense(make: Callable[..., Any], argument: str) -> None:
    for value in (0, 0.0, *NO_SECONDS):
        refuses(
            f"^{argument} must be .*second", make, **{"timeout": 30, "renew": True, argument: value}
        )


@of_each_kind
@pytest.mark.parametrize("argument", ["sleep", "blocking_timeout", "min_hold"])
def test_waits_that_make_no_sense(make: Callable[..., Any], argument: str) -> None:
    for value in NO_SECONDS:
        refuses(f"^{argument} must be .*second", make, **{"timeout": 30, argument: value})
        if argument != "min_hold":
            lock = make(timeout=30)
            refuses(f"^{argument} must be .*second", lock.acquire, **{argument: value})
            assert not lock.locked()
    if argument != "min_hold":
        assert make(timeout=30).acquire(**{argument: 0})


@of_each_kind
def test_extensions_that_make_no_sense(make: Callable[..., Any]) -> None:
    lock = make(timeout=30)
    lock.acquire()
    for value in (0, None, *NO_SECONDS):
        refuses(r"^additional_time must be .*second", lock.extend, value)
    assert lock.ttl() <= 30
    lock.release()


@of_each_kind_with_one_name
def test_names_that_are_none(make: Callable[..., Any]) -> None:
    for value in NO_NAMES:
        refuses("name must", make, value, timeout=30)


@of_each_kind_with_one_name
def test_tokens_that_are_none(make: Callable[..., Any]) -> None:
    for value in NO_TOKENS:
        refuses("token must", make, timeout=30, id=value)
        lock = make(timeout=30)
        refuses("token must", lock.acquire, token=value)
        assert not lock.locked()


@of_each_kind
def test_options_that_make_no_sense(make: Callable[..., Any]) -> None:
    for options in NO_OPTIONS:
        refuses(r"must|need", make, **options)


#: Times in milliseconds, each of which is logged once.
_milliseconds = itertools.count(101_000, 1000)


@of_each_kind
@pytest.mark.parametrize("time", ["timeout", "blocking_timeout", "min_hold", "warn_after"])
def test_times_that_look_like_milliseconds(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture, time: str
) -> None:
    """They are taken, as by redis-py, and logged."""
    value = next(_milliseconds)
    for _ in range(2):
        assert getattr(make(**{"timeout": 30, time: value}), time) == value
    [said] = logged(caplog, "lock", "milliseconds")
    assert said.startswith(f"{time}={value} is 1 day, ")
    assert said.endswith(f"write {time}={value / 1000:g}")


@of_each_kind_with_one_name
def test_times_of_calls_that_look_like_milliseconds(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    wait, more = next(_milliseconds), next(_milliseconds)
    lock = make(timeout=30)
    assert lock.acquire(blocking_timeout=wait)
    assert lock.extend(more)
    lock.release()
    said = logged(caplog, "lock", "milliseconds")
    assert [text.split()[0] for text in said] == [
        f"blocking_timeout={wait}",
        f"additional_time={more}",
    ]


@of_each_kind
def test_times_that_are_natural_in_seconds(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    for seconds in (0.5, 30, 999, 1800, 3600, 7200, 14_400, 36_000, 86_400, 604_800, 2_592_000):
        make(timeout=seconds, blocking_timeout=seconds, warn_after=seconds, min_hold=seconds)
    assert not logged(caplog, "lock", "milliseconds")


@pytest.mark.parametrize("lock", [Lock, AsyncLock])
@pytest.mark.parametrize("client", [None, "redis://localhost", object()])
def test_what_is_no_client_is_refused(lock: Any, client: Any) -> None:
    with pytest.raises(TypeError, match="needs a redis-py client"):
        lock(client, "report")


NODE = redis.Redis(port=1)
OTHERS = [redis.Redis(port=2), redis.Redis(port=3)]


@pytest.mark.parametrize("lock", [Redlock, AsyncRedlock])
@pytest.mark.parametrize(
    ("clients", "error", "text"),
    [
        ("redis://localhost", TypeError, "needs their clients"),
        (NODE, TypeError, "needs their clients"),
        ([1, 2, 3], TypeError, "needs a redis-py client"),
        ([NODE, OTHERS[0]], ValueError, "at least 3 of them, not 2"),
        ([NODE, *OTHERS, redis.Redis(port=1, socket_timeout=9)], ValueError, "different ones"),
        ([*OTHERS, Sentinel([("localhost", 4)]).master_for("main")], TypeError, "no Sentinel"),
    ],
)
def test_what_are_no_independent_servers_is_refused(
    lock: Any, clients: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        lock(clients, "report", timeout=5)


def test_limits_of_a_server_that_make_no_sense() -> None:
    for value in (0, *NO_SECONDS):
        refuses(
            "^server_timeout must be", Redlock, [NODE, *OTHERS], "report", 5, server_timeout=value
        )


def test_on_several_servers_clocks_may_drift_by_a_hundredth_of_a_second() -> None:
    refuses("at least 0.01 seconds", Redlock, [NODE, *OTHERS], "report", 0.009)
    assert Redlock([NODE, *OTHERS], "report", 0.01).timeout == 0.01
    assert Redlock([NODE, *OTHERS], "report", 0.01).timeout == 0.01


def test_numbers_of_replicas_that_make_no_sense() -> None:
    for value in (-1, True, 1.0, "1", None):
        refuses("whole number of 0 or more", Lock, NODE, "report", 5, replicas=value)
