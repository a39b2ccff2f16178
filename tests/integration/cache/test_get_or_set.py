"""``get_or_set`` in one process: values, threads, failures, recursion, and what others' flights do.

Another process is stood in for by its flight in Redis; real processes are in ``test_stampede``.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from django_redis.serializers.json import JSONSerializer
from django_redis.serializers.pickle import PickleSerializer

from django_redis_lock import LockError, LockNotAcquired, events
from django_redis_lock.cache import RedisCache
from django_redis_lock.conf import GetOrSetOptions
from django_redis_lock.keeper import DeferredRelease, keeper
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import flight
from tests.processes import PATIENCE, until, waiting_in
from tests.redis_server import FOR_COMMAND, RedisServer
from tests.support.background import Background
from tests.support.values import (
    KEY,
    RAISE,
    TERMS,
    VALUES,
    Asking,
    Broken,
    Producer,
    age,
    blocked,
    elsewhere,
    lands_elsewhere,
    make,
    renewals,
    slow,
    waiting_in_memory,
)

__all__ = ["slow"]

#: Each way to ask for a value, once: given the cache and the function that computes it.
WAYS_TO_ASK: dict[str, Callable[[RedisCache, Callable[[], Any]], Any]] = {
    "get_or_set": lambda c, f: c.get_or_set("report", f),
    "stale": lambda c, f: c.get_or_set("report", f, 60, stale=60),
    "get_or_set_many": lambda c, f: c.get_or_set_many(["report"], lambda _: {"report": f()})[
        "report"
    ],
    "aget_or_set": lambda c, f: asyncio.run(c.aget_or_set("report", f)),
    "aget_or_set_many": lambda c, f: asyncio.run(
        c.aget_or_set_many(["report"], lambda _: {"report": f()})
    )["report"],
}


# -- values ------------------------------------------------------------------------------------


class Texts(PickleSerializer):
    """A serializer of the project's own."""

    def loads(self, value: bytes) -> Any:
        return f"stored {super().loads(value)}"


WAYS_TO_COMPUTE = WAYS_TO_ASK | {
    "compute": lambda c, f: c.compute("report", f),
    "acompute": lambda c, f: asyncio.run(c.acompute("report", f)),
    "not stored": lambda c, f: c.get_or_set("report", f, 0),
}


@pytest.mark.parametrize(
    ("serializer", "stored"),
    [
        (f"{JSONSerializer.__module__}.JSONSerializer", {"1": [1, 2]}),
        (f"{__name__}.Texts", "stored {1: (1, 2)}"),
    ],
)
@pytest.mark.parametrize("way", WAYS_TO_COMPUTE)
def test_the_caller_that_computes_gets_what_all_others_get(
    redis_server: RedisServer, way: str, serializer: str, stored: Any
) -> None:
    """Of what is stored: JSON has no tuples, and its keys are texts."""
    cache = make(redis_server, SERIALIZER=serializer)
    ask = WAYS_TO_COMPUTE[way]
    assert ask(cache, lambda: {1: (1, 2)}) == stored
    if way not in ("not stored", "compute", "acompute"):
        assert ask(cache, lambda: "computed twice") == stored


def test_a_stale_value_and_its_refresh_have_the_same_types(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = make(redis_server, SERIALIZER=f"{JSONSerializer.__module__}.JSONSerializer")
    assert cache.get_or_set("report", lambda: (1,), **TERMS) == [1]
    age(client)
    assert cache.get_or_set("report", lambda: (2,), **TERMS) == [2]
    assert cache.get("report") == [2]


@pytest.mark.parametrize("way", WAYS_TO_COMPUTE)
def test_without_redis_the_types_are_those_of_stored_values(stopped: RedisServer, way: str) -> None:
    cache = make(stopped, SERIALIZER=f"{JSONSerializer.__module__}.JSONSerializer")
    assert WAYS_TO_COMPUTE[way](cache, lambda: (1,)) == [1]


class Unreadable(PickleSerializer):
    def loads(self, value: bytes) -> Any:
        raise ValueError("not ours")


def test_a_value_that_can_be_stored_but_not_read_is_returned_as_computed(
    redis_server: RedisServer,
) -> None:
    cache = make(redis_server, SERIALIZER=f"{__name__}.Unreadable")
    assert cache.get_or_set("report", lambda: (1,)) == (1,)


@pytest.mark.sample(3)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
def test_a_value_of_any_kind_is_computed_once_and_kept(cache: RedisCache, value: Any) -> None:
    producer = Producer(value)
    found = [cache.get_or_set("report", producer) for _ in range(3)]
    assert found == [value] * 3
    assert [type(each) for each in found] == [type(value)] * 3
    assert producer.calls == 1
    assert cache.get("report", "missing") == value


def test_each_caller_gets_a_separate_copy(cache: RedisCache, slow: Producer) -> None:
    slow.value = {"rows": []}
    threads = [Asking(cache.get_or_set, "report", slow) for _ in range(4)]
    until(lambda: waiting_in_memory() == 3)
    slow.finish.set()
    found = [thread.found() for thread in threads]
    assert len({id(each) for each in found}) == len({id(each["rows"]) for each in found}) == 4


@pytest.mark.parametrize(
    ("timeout", "lowest", "highest"),
    [((), 290_000, 300_000), ((None,), -1, -1), ((60,), 50_000, 60_000), ((0.5,), 0, 500)],
)
def test_a_value_lives_as_long_as_set_would_keep_it(
    ask: Any, client: redis.Redis, timeout: tuple[Any, ...], lowest: int, highest: int
) -> None:
    ask("report", 1, *timeout)
    assert lowest <= client.pttl(KEY) <= highest
    # Nothing but the value stays behind.
    for key in client.keys():
        assert key == KEY or 0 < client.pttl(key) <= 10_000


@pytest.mark.parametrize("timeout", [0, -1, 0.0001])
def test_a_value_without_a_lifetime_is_returned_and_not_kept(
    ask: Any, client: redis.Redis, timeout: float
) -> None:
    assert ask("report", lambda: 1, timeout) == 1
    assert not client.exists(KEY, flight_key(KEY))


def test_the_caches_own_version_prefix_and_lifetime(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = RedisCache(redis_server.url, {"KEY_PREFIX": "site", "VERSION": 3, "TIMEOUT": None})
    assert cache.get_or_set("report", "of 3") == "of 3"
    assert client.pttl("site:3:report") == -1
    assert cache.get_or_set("report", "of 4", version=4) == "of 4"
    assert asyncio.run(cache.aget_or_set("report", "again", 60, 4)) == "of 4"
    assert cache.get_or_set("report", "again", 60, 3) == "of 3"
    assert RedisCache(redis_server.url, {"VERSION": 3}).get_or_set("report", "free") == "free"


@pytest.mark.parametrize(
    "options",
    [
        {"SERIALIZER": "django_redis.serializers.json.JSONSerializer"},
        {"COMPRESSOR": "django_redis.compressors.zlib.ZlibCompressor"},
        {"PICKLE_VERSION": 2},
        {"SOCKET_TIMEOUT": 5},
    ],
    ids=lambda options: next(iter(options)),
)
def test_values_are_kept_as_django_redis_keeps_them(
    redis_server: RedisServer, options: dict[str, Any]
) -> None:
    cache = make(redis_server, **options)
    value = {"rows": ["x" * 1000]}
    cache.get_or_set("ours", lambda: value)
    cache.set("theirs", value)
    raw = cache.client.get_client()
    assert raw.get(":1:ours") == raw.get(":1:theirs")
    assert cache.get_or_set("theirs", 1) == cache.get_or_set("ours", 1) == value


@pytest.mark.parametrize(
    "key", ["a b", "ключ", "{tag}:x", "a}b", "{", "", "x" * 2000, "line\nbreak", "*", 42]
)
def test_any_key_will_do(cache: RedisCache, key: Any) -> None:
    producer = Producer()
    assert [cache.get_or_set(key, producer) for _ in range(2)] == ["computed"] * 2
    assert producer.calls == 1


@pytest.mark.on_redis
def test_a_hit_is_one_get_and_a_miss_three_commands(
    cache: RedisCache, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A connection that was idle for longer is checked first.
    monkeypatch.setattr("django_redis_lock.transport.server.TRUSTED_SECONDS", PATIENCE)
    cache.get_or_set("warm", 1)
    client.config_resetstat()
    cache.get_or_set("report", 1)
    counted = client.info("commandstats")
    assert counted["cmdstat_evalsha"]["calls"] == 1
    # Beside those in the script: GET; SET of the flight, and GET once more in the same trip.
    assert counted["cmdstat_set"]["calls"] == 2
    assert counted["cmdstat_get"]["calls"] == 3
    client.config_resetstat()
    cache.get_or_set("report", 1)
    counted = client.info("commandstats")
    others = {name: each["calls"] for name, each in counted.items() if "config" not in name}
    assert others == {"cmdstat_get": 1}


# -- failures of the producer ------------------------------------------------------------------


def test_the_producers_exception_reaches_its_caller_unchanged(
    ask: Any, cache: RedisCache, client: redis.Redis
) -> None:
    error = Broken("no data")
    with pytest.raises(Broken) as caught:
        ask("report", Producer(error))
    assert caught.value is error
    assert caught.value.__cause__ is None
    assert not client.exists(KEY, flight_key(KEY))
    assert ask("report", 1) == 1


def test_after_a_failure_another_thread_takes_over(cache: RedisCache, slow: Producer) -> None:
    slow.value = Broken()
    first = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    good = Producer()
    others = [Asking(cache.get_or_set, "report", good) for _ in range(5)]
    until(lambda: waiting_in_memory() == 5)
    slow.finish.set()
    assert first.found() is slow.value
    assert [thread.found() for thread in others] == ["computed"] * 5
    assert good.calls == 1


def test_the_error_of_a_value_that_cannot_be_encoded_names_its_key(
    cache: RedisCache, client: redis.Redis
) -> None:
    value, both = (lambda: None), {"fine": 1, "report": lambda: None}
    kinds = set()
    for write in (
        lambda: cache.set("report", value),
        lambda: cache.add("report", value),
        lambda: cache.set_many(both),
        lambda: cache.get_or_set("report", lambda: value),
        lambda: cache.get_or_set_many(["fine", "report"], lambda keys: both),
        lambda: cache.compute("report", lambda: value, 60),
        lambda: asyncio.run(cache.aset("report", value)),
        lambda: asyncio.run(cache.aadd("report", value)),
        lambda: asyncio.run(cache.aset_many(both)),
        lambda: asyncio.run(cache.aget_or_set("report", lambda: value)),
    ):
        with pytest.raises(Exception, match=r"\(the value of 'report'\)$") as caught:
            write()
        kinds.add(caught.type)
        assert not client.exists(KEY, flight_key(KEY))
    assert len(kinds) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("when", ["computing", "encoding"])
def test_a_computation_broken_off_ends_its_flight(
    cache: RedisCache, client: redis.Redis, error: type[BaseException], when: str
) -> None:
    class Unfinished:
        def __reduce__(self) -> Any:
            raise error

    with pytest.raises(error):
        cache.get_or_set("report", Producer(error()) if when == "computing" else Unfinished)
    assert not client.exists(KEY, flight_key(KEY))
    assert not renewals()
    assert cache.get_or_set("report", 1) == 1


@pytest.mark.on_redis
def test_a_value_that_redis_refuses_is_returned_and_frees_the_followers(
    cache: RedisCache,
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GetOrSetOptions, "_milliseconds", lambda *_: 2**63)
    assert cache.get_or_set("report", lambda: 1) == 1
    assert "Could not store :1:report: " in caplog.text
    assert cache.get_or_set_many(["a", "b"], lambda keys: dict.fromkeys(keys, 1))
    assert "Could not store :1:a and 1 more: " in caplog.text
    assert not client.exists(KEY, flight_key(KEY))


def test_a_forked_child_leaves_the_flight_to_its_parent(cache: RedisCache) -> None:
    def fork() -> str:
        child = os.fork()
        if not child:
            raise SystemExit
        requests = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert requests == 0, "its keeper would end the flight"
        return "the parent's"

    parent = os.getpid()
    try:
        found = cache.get_or_set("report", fork)
    finally:
        if os.getpid() != parent:
            os._exit(sum(isinstance(job, DeferredRelease) for job in keeper().jobs()))
    assert found == cache.get("report") == "the parent's"


# -- coroutines --------------------------------------------------------------------------------


async def coroutine_function(*args: Any) -> Any:
    return 5


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.get_or_set("report", coroutine_function),
        lambda cache: cache.get_or_set("report", lambda: coroutine_function(5)),
        lambda cache: cache.get_or_set("report", coroutine_function()),
        lambda cache: cache.get_or_set("report", coroutine_function, stale=60),
        lambda cache: cache.compute("report", coroutine_function),
        lambda cache: cache.get_or_set_many(["report"], coroutine_function),
    ],
)
def test_a_thread_does_not_await(cache: RedisCache, call: Callable[[RedisCache], Any]) -> None:
    with pytest.raises(TypeError, match=r"coroutine.*aget_or_set\(\)"):
        call(cache)
    assert cache.get_or_set("report", 1) == 1


# -- recursion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", [["report"], ["part", "report"]], ids=["itself", "another"])
def test_a_value_that_needs_itself_is_refused(cache: RedisCache, needed: list[str]) -> None:
    def recursive() -> Any:
        return cache.get_or_set(next(keys), recursive)

    keys = itertools.cycle(needed)
    with pytest.raises(LockError, match=r"requests the value.*report"):
        cache.get_or_set("report", recursive)
    assert cache.get_or_set("report", 1) == cache.get_or_set("part", 1) == 1


def test_a_value_may_need_others(cache: RedisCache) -> None:
    def nested(depth: int) -> int:
        return cache.get_or_set(f"part-{depth}", lambda: nested(depth - 1) + 1) if depth else 0

    assert nested(10) == 10
    assert cache.get("part-10") == 10


# -- flights of others -------------------------------------------------------------------------


def test_a_computation_slower_than_the_time_out_of_the_socket_is_waited_for_in_one_wait(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    cache = make(redis_server, SOCKET_TIMEOUT=0.1)
    elsewhere(client, 0.5)
    client.config_resetstat()
    assert cache.get_or_set("report", "mine") == "mine"
    # Redis may count it once more when it goes on.
    assert client.info("commandstats")["cmdstat_xread"]["calls"] <= 2


@pytest.mark.on_redis
@pytest.mark.parametrize("broken", ["wait", "connection"])
def test_a_follower_whose_wait_breaks_off_goes_on_waiting(
    cache: RedisCache, client: redis.Redis, broken: str
) -> None:
    elsewhere(client)
    producer = Producer()
    thread = Asking(cache.get_or_set, "report", producer)
    until(lambda: blocked(client) == 1)
    [waiting] = followers(client)
    if broken == "wait":
        # As a primary does that becomes a replica.
        client.client_unblock(waiting, error=True)
    else:
        client.client_kill_filter(_id=waiting)
    until(lambda: set(followers(client)) - {waiting})
    lands_elsewhere(client, 5)
    assert thread.found() == 5
    assert not producer.calls


def followers(client: redis.Redis) -> list[str]:
    """The ids of the connections that wait for a computation; one that has waited before, and is
    idle, has the same last command."""
    return [c["id"] for c in client.client_list() if c["cmd"] == "xread" and "b" in c["flags"]]


@pytest.fixture
def late_landing(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The first thread that has a value is held up before it can tell the others."""
    go_on, land, first = threading.Event(), flight.leave, iter([True])

    def held_up(*args: Any) -> None:
        if next(first, False):
            assert go_on.wait(PATIENCE)
        land(*args)

    monkeypatch.setattr(flight, "leave", held_up)
    yield go_on
    go_on.set()


@pytest.mark.parametrize("first_of", ["this process", "another process"])
def test_who_asks_after_a_delete_gets_nothing_from_before_it(
    cache: RedisCache, client: redis.Redis, late_landing: threading.Event, first_of: str
) -> None:
    """Neither what was stored before it nor what was read."""
    if first_of == "another process":
        elsewhere(client)
        first = Asking(cache.get_or_set, "report", 1)
        until(lambda: blocked(client) == 1)
        lands_elsewhere(client, 5)
        until(lambda: blocked(client) == 0)
        until(lambda: waiting_in(__name__) == 1)
    else:
        first = Asking(cache.get_or_set, "report", 5)
        until(lambda: client.exists(KEY))
    cache.delete("report")
    second = Asking(cache.get_or_set, "report", "newer")
    until(lambda: waiting_in_memory() == 1)
    late_landing.set()
    assert (first.found(), second.found()) == (5, "newer")


# -- the wait has an end -----------------------------------------------------------------------


@pytest.fixture(params=["another process", "another thread", "another thread without Redis"])
def busy(
    request: pytest.FixtureRequest,
    cache: RedisCache,
    client: redis.Redis,
    slow: Producer,
) -> Iterator[RedisCache]:
    """A cache in which the report is being computed."""
    if request.param == "another process":
        elsewhere(client)
        yield cache
        return
    if request.param == "another thread without Redis":
        server = request.getfixturevalue("own_server")
        cache = make(server, IGNORE_EXCEPTIONS=True)
        server.stop()
    leader = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    yield cache
    slow.finish.set()
    assert leader.found() == "computed"


def test_too_late_and_raise_or_compute(busy: RedisCache) -> None:
    with pytest.raises(LockNotAcquired, match="still computing") as caught:
        busy.get_or_set("report", 1, wait=0.05, on_wait_timeout="raise")
    assert caught.value.lock_name == "report"
    assert busy.get_or_set("report", lambda: "mine", wait=0.05) == "mine"


@pytest.mark.parametrize(("default", "found"), [(1, 1), (None, None), (lambda: 1, None)])
def test_too_late_and_default(busy: RedisCache, default: Any, found: Any) -> None:
    assert busy.get_or_set("report", default, wait=0, on_wait_timeout="default") == found
    assert busy.get("report") is None


def test_who_comes_too_late_keeps_what_it_computes(
    ask: Any, cache: RedisCache, client: redis.Redis
) -> None:
    elsewhere(client)
    assert ask("report", 1, wait=0, on_wait_timeout="default") == 1
    assert cache.get("report") is None
    assert ask("report", lambda: "mine", 60, wait=0.05) == "mine"
    assert cache.get("report") == "mine"
    assert 50_000 < client.pttl(KEY) <= 60_000


# -- wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"wait": -1}, "wait must be a number of seconds of 0 or more"),
        ({"wait": None}, "wait must be"),
        ({"on_wait_timeout": "skip"}, "one of 'compute', 'raise', 'default'"),
        ({"on_wait_timeout": None}, "one of 'compute', 'raise', 'default'"),
        ({"timeout": "60"}, "timeout must be"),
        ({"timeout": True}, "timeout must be"),
        ({"timeout": float("nan")}, "timeout must be"),
        ({"timeout": float("inf"), "stale": 60}, "timeout must be"),
    ],
)
def test_wrong_arguments_are_refused_even_for_a_hit(
    ask: Any, cache: RedisCache, arguments: dict[str, Any], words: str
) -> None:
    cache.set("report", 1)
    with pytest.raises((TypeError, ValueError), match=words):
        ask("report", 1, **arguments)


# -- the pool is used up -----------------------------------------------------------------------


def of_one(server: RedisServer) -> str:
    """Address of a pool of one connection. (django-redis has one pool for each address.)"""
    return f"{server.url}{'&' if '?' in server.url else '?'}max_connections=1"


@pytest.fixture(params=[False, True], ids=["", "errors ignored"])
def narrow(request: pytest.FixtureRequest, redis_server: RedisServer) -> Iterator[RedisCache]:
    """A cache whose pool has one connection, which the application has taken."""
    cache = RedisCache(of_one(redis_server), {"OPTIONS": {"IGNORE_EXCEPTIONS": request.param}})
    connections = cache.client.get_client(write=True).connection_pool
    connection = connections.get_connection(*FOR_COMMAND)
    yield cache
    connections.release(connection)


def test_without_a_connection_a_value_is_computed_and_kept(
    narrow: RedisCache, cache: RedisCache, client: redis.Redis
) -> None:
    assert narrow.get_or_set("report", lambda: "computed", 60) == "computed"
    assert cache.get("report") == "computed"
    assert not client.exists(flight_key(KEY))


def test_one_connection_will_do_for_a_crowd_behind_a_leader(
    redis_server: RedisServer, slow: Producer
) -> None:
    cache = RedisCache(of_one(redis_server), {})
    leader = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    threads = [Asking(cache.get_or_set, "report", slow) for _ in range(50)]
    until(lambda: waiting_in_memory() == 50)
    slow.finish.set()
    assert [thread.found() for thread in (leader, *threads)] == ["computed"] * 51
    assert slow.calls == 1


@pytest.mark.parametrize("too_late", ["raise", "compute", "default"])
def test_a_value_written_by_other_software_while_a_caller_waits_is_found(
    cache: RedisCache, client: redis.Redis, slow: Producer, too_late: str, pace: int
) -> None:
    """It ends no flight, so the caller waits until its wait is over, but not in vain."""
    leader = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    waiting = Asking(cache.get_or_set, "report", 1, wait=0.3 * pace, on_wait_timeout=too_late)
    until(lambda: waiting_in_memory() == 1)
    client.set(KEY, pickle.dumps("newer"))
    assert waiting.found() == "newer"
    slow.finish.set()
    assert leader.found() == "computed"


# -- Redis is away -----------------------------------------------------------------------------


@pytest.mark.parametrize("ignore", [True, False])
@pytest.mark.parametrize("name", WAYS_TO_ASK)
def test_without_redis_values_are_computed_or_the_error_shows(
    own_server: RedisServer, name: str, ignore: bool
) -> None:
    """Whatever django-redis is told to do with errors."""
    computing, raising = (
        make(own_server, IGNORE_EXCEPTIONS=ignore, **options) for options in ({}, RAISE)
    )
    own_server.stop()
    producer = Producer()
    assert WAYS_TO_ASK[name](computing, producer) == "computed"
    with pytest.raises(redis.ConnectionError):
        WAYS_TO_ASK[name](raising, producer)
    assert producer.calls == 1


@pytest.mark.parametrize("name", WAYS_TO_ASK)
def test_redis_that_refuses_to_answer_costs_no_value(own_server: RedisServer, name: str) -> None:
    with own_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "nobody", "on", "nopass", "-@all")
    url = own_server.url.replace("://", "://nobody:@")
    computing, raising = (RedisCache(url, {"OPTIONS": options}) for options in ({}, RAISE))
    assert WAYS_TO_ASK[name](computing, Producer()) == "computed"
    with pytest.raises(redis.RedisError):
        WAYS_TO_ASK[name](raising, Producer())


def test_values_computed_without_redis_are_counted_and_logged_once_a_minute(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make(own_server)
    own_server.stop()
    told: list[Any] = []
    events.subscribe(told.append)
    try:
        for way in WAYS_TO_ASK.values():
            way(cache, Producer())
    finally:
        events.unsubscribe(told.append)
    computed = [event for event in told if type(event) is events.Computed]
    assert [event.without_redis for event in computed] == [True] * len(WAYS_TO_ASK)

    def lines() -> list[str]:
        every = (r.getMessage() for r in caplog.records if r.name == "django_redis_lock.outage")
        return [line for line in every if "computes without it" in line]

    [line] = lines()
    assert "computes without it: :1:report (" in line
    monkeypatch.setattr("django_redis_lock.threads.LOG_PAUSE_SECONDS", 0.0)
    cache.get_or_set("other", 1)
    assert "computes without it: :1:other (" in lines()[-1]


def test_without_redis_a_failure_reaches_its_caller_only(
    own_server: RedisServer, slow: Producer
) -> None:
    cache = make(own_server, IGNORE_EXCEPTIONS=True)
    own_server.stop()
    slow.value = Broken()
    first = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    second = Asking(cache.get_or_set, "report", 5)
    until(lambda: waiting_in_memory() == 1)
    slow.finish.set()
    assert first.found() is slow.value
    assert second.found() == 5


def test_redis_dies_while_the_leader_computes(own_server: RedisServer, slow: Producer) -> None:
    cache = make(own_server)
    slow.value = None
    threads = [Asking(cache.get_or_set, "report", slow) for _ in range(4)]
    until(lambda: waiting_in_memory() == 3)
    assert slow.begun.wait(PATIENCE)
    own_server.kill()
    slow.finish.set()
    assert [thread.found() for thread in threads] == [None] * 4
    assert slow.calls == 1


def test_redis_dies_and_comes_back_while_the_leader_computes(
    own_server: RedisServer, slow: Producer
) -> None:
    cache = make(own_server)
    leader = Asking(cache.get_or_set, "report", slow)
    assert slow.begun.wait(PATIENCE)
    own_server.restart()
    slow.finish.set()
    assert leader.found() == "computed"
    assert cache.get_or_set("report", 5) == 5


def test_redis_is_frozen_while_followers_wait(own_server: RedisServer, pace: int) -> None:
    cache = make(own_server, IGNORE_EXCEPTIONS=True, SOCKET_TIMEOUT=0.3)
    with own_server.client() as client:
        elsewhere(client, 1 * pace)
        threads = [Asking(cache.get_or_set, "report", lambda: "computed") for _ in range(8)]
        until(lambda: blocked(client) == 1 and waiting_in_memory() == 7)
    own_server.pause()
    assert [thread.found() for thread in threads] == ["computed"] * 8
    own_server.resume()


def test_redis_that_may_be_read_but_not_coordinate_costs_no_value(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    with own_server.client() as admin:
        admin.acl_setuser(
            "reader", enabled=True, nopass=True, keys="*", categories=["+@all"], commands=["-eval"]
        )
        admin.execute_command("ACL", "SETUSER", "reader", "-evalsha")
    cache = RedisCache(own_server.url.replace("://", "://reader:@"), {})
    assert cache.get_or_set("report", lambda: "computed") == "computed"


@pytest.mark.parametrize("name", WAYS_TO_ASK)
def test_a_user_who_may_not_read_streams_polls(
    own_server: RedisServer, client: redis.Redis, name: str
) -> None:
    with own_server.client() as admin:
        admin.acl_setuser(
            "hasty", enabled=True, nopass=True, keys="*", categories=["+@all"], commands=["-xread"]
        )
        elsewhere(admin)
        cache = RedisCache(own_server.url.replace("://", "://hasty:@"), {})
        producer = Producer()
        asking = Asking(WAYS_TO_ASK[name], cache, producer)
        until(lambda: admin.keys("*:done:*"))
        lands_elsewhere(admin, 5)
        assert asking.found() == 5
    assert not producer.calls


@pytest.mark.parametrize("leader", ["another process", "another thread"])
def test_a_delete_wins_over_a_late_computation_too(
    cache: RedisCache, client: redis.Redis, slow: Producer, leader: str
) -> None:
    """C2, for a follower that has waited long enough and computes on its own."""
    first = Producer("first")
    first.finish.clear()
    if leader == "another thread":
        leading = Asking(cache.get_or_set, "report", first)
        assert first.begun.wait(PATIENCE)
    else:
        elsewhere(client)
    late = Asking(cache.get_or_set, "report", slow, wait=0)
    assert slow.begun.wait(PATIENCE)
    cache.delete("report")
    slow.finish.set()
    assert late.found() == "computed"
    first.finish.set()
    if leader == "another thread":
        assert leading.found() == "first"
    assert cache.get("report") is None


def test_a_listener_delays_no_other_caller(cache: RedisCache) -> None:
    """What figures and exporters do with an event, they do when the others have the value."""
    followed, computing, told = threading.Event(), threading.Event(), []

    def listen(event: object) -> None:
        if isinstance(event, events.Stored):
            told.append(followed.wait(10))

    def compute() -> str:
        computing.set()
        until(lambda: waiting_in_memory() == 1)
        return "computed"

    events.subscribe(listen, reads=True)
    try:
        leader = Background(lambda: cache.get_or_set("value", compute, 60))
        assert computing.wait(10)
        follower = Background(lambda: cache.get_or_set("value", str, 60))
        assert follower.result() == "computed"
        followed.set()
        assert leader.result() == "computed"
    finally:
        events.unsubscribe(listen)
    assert told == [True]
