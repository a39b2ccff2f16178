"""One computation, however many processes and threads ask at once (C1); and its leader's death."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from django_redis_lock.cache import RedisCache, values
from django_redis_lock.protocol.keys import flight_key
from django_redis_lock.singleflight import flight
from tests import lanes
from tests.processes import PATIENCE, Crew, Link, in_threads, processes, until, waiting_in
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import KEY, Broken, Producer, blocked, make

pytestmark = pytest.mark.invariant("C1")


#: Nothing but the leader's word may end a wait.
UNLOOKED = {"LOCK_FLIGHT_TIMEOUT": 3600}


def ask(
    link: Link, url: str, threads: int = 1, options: dict[str, Any] = UNLOOKED, look: bool = False
) -> list[Any]:
    """Ask for the report in ``threads`` threads at once. Who computes it says so, and then hears
    what it is to be.

    Args:
        look: whether followers look now and then whether their leader is alive.
    """
    if not look:
        flight.FOLLOWER_CHECK_SECONDS = 3600.0

    def compute() -> Any:
        link.say("computing")
        value = link.hear()
        if isinstance(value, BaseException):
            raise value
        return value

    def get() -> Any:
        return RedisCache(url, {"OPTIONS": options}).get_or_set("report", compute)

    return in_threads(threads, get)


def ask_impatiently(link: Link, url: str) -> Any:
    def compute() -> Any:
        link.say("computing")
        return link.hear()

    return RedisCache(url, {}).get_or_set("report", compute, wait=0.1)


def leader_of(crew: Crew) -> Any:
    """The one that computes; nobody else does."""
    speaking: list[Any] = []
    until(lambda: [speaking.append(w) for w in crew if w.speaks()] or speaking)
    (leader,) = speaking
    assert leader.hear() == "computing"
    return leader


@pytest.mark.sample(4, 1)
@pytest.mark.parametrize(
    "value",
    [None, False, 0, "", 12, -(2**80), b"", {"rows": [1, 2]}, "x" * 20_000_000],
    ids=lambda value: repr(value)[:20],
)
def test_all_get_the_one_value(redis_server: RedisServer, client: redis.Redis, value: Any) -> None:
    with processes(ask, redis_server.url, 4, count=3) as crew:
        crew.go()
        leader = leader_of(crew)
        until(lambda: blocked(client) == 2)
        leader.say(value)
        # Had another computed too, it would have said so instead.
        assert crew.results() == [[value] * 4] * 3


def ask_all_aboard(link: Link, url: str, threads: int = 9) -> list[Any]:
    """As ``ask``; when the leader has spoken and all others wait, it says so. The keeper does not
    describe the computation meanwhile."""
    flight.DESCRIBE_AFTER_SECONDS = 3600.0

    def watch() -> None:
        until(lambda: waiting_in("django_redis_lock.singleflight.runners") == threads - 1)
        link.say("aboard")

    threading.Thread(target=watch, daemon=True).start()
    return ask(link, url, threads)


@pytest.mark.sample(4)
@pytest.mark.parametrize("stale", [0, 60])
@pytest.mark.parametrize("threads", [8, 48, 200])
def test_a_crowd_needs_no_crowd_of_connections(
    redis_server: RedisServer, client: redis.Redis, threads: int, stale: float
) -> None:
    """Not even one that arrives in the same instant, when all have still to look for the value."""
    with processes(crowd, redis_server.url, threads, stale) as (worker,):
        worker.go()
        # To read, for scripts, the keeper's: and a few for who came between two steps of another.
        assert worker.result() <= 6


def crowd(link: Link, url: str, threads: int, stale: float) -> int:
    """How many connections are opened by ``threads`` that ask at once for one missing value."""

    values.COLD_READ_TIMEOUT_SECONDS = PATIENCE  # However slow the machine is.

    def compute() -> Any:
        until(lambda: waiting_in("django_redis_lock.singleflight.runners") == threads - 1)
        return "the report"

    def opened() -> int:
        return int(counting.info("stats")["total_connections_received"])

    with redis.Redis.from_url(url) as counting:
        before = opened()
        cache = RedisCache(url, {})
        found = in_threads(threads, lambda: cache.get_or_set("report", compute, 60, stale=stale))
        assert found == ["the report"] * threads
        return opened() - before


@pytest.mark.slow
def test_processes_of_nine_threads_share_one_read_each(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    count = 9 if lanes.everything else 4
    with processes(ask_all_aboard, redis_server.url, count=count) as crew:
        crew.go()
        heard = {worker: {worker.hear()} for worker in crew}
        until(lambda: blocked(client) == count - 1)
        until(lambda: any(worker.speaks() or heard[worker] == {"computing"} for worker in crew))
        (leader,) = (worker for worker in crew if worker.speaks() or heard[worker] == {"computing"})
        assert heard[leader] | {leader.hear()} == {"computing", "aboard"}
        client.config_resetstat()
        leader.say("the report")
        assert crew.results() == [["the report"] * 9] * count
        scripts = client.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert scripts == count


@pytest.mark.parametrize("end", ["fails", "is killed"])
def test_followers_take_over_one_at_a_time_when_their_leader(
    redis_server: RedisServer, client: redis.Redis, pace: int, end: str
) -> None:
    options = UNLOOKED if end == "fails" else {"LOCK_FLIGHT_TIMEOUT": 2 * pace}
    with processes(ask, redis_server.url, 1, options, count=4) as crew:
        crew.go()
        first = leader_of(crew)
        until(lambda: blocked(client) == 3)
        if end == "fails":
            first.say(Broken("no data"))
            (error,) = first.result()
            assert isinstance(error, Broken)
            assert error.args == ("no data",)
        else:
            first.kill()
        others = Crew(worker for worker in crew if worker is not first)
        second = leader_of(others)
        until(lambda: blocked(client) == 2)
        second.say("the report")
        assert others.results() == [["the report"]] * 3


def test_a_computation_longer_than_its_flight_is_one_computation(
    redis_server: RedisServer, client: redis.Redis, pace: int
) -> None:
    options = {"LOCK_FLIGHT_TIMEOUT": 1.5 * pace}
    with processes(ask, redis_server.url, 1, options, True, count=3) as crew:
        crew.go()
        leader = leader_of(crew)
        see_renewals(client)
        leader.say("the report")
        assert crew.results() == [["the report"]] * 3


def see_renewals(client: redis.Redis) -> None:
    """More of them than a lifetime needs."""
    token = client.get(flight_key(KEY))
    for _ in range(5):
        left = client.pttl(flight_key(KEY))
        until(lambda at=left: at - client.pttl(flight_key(KEY)) > 50)
        left = client.pttl(flight_key(KEY))
        until(lambda at=left: client.pttl(flight_key(KEY)) > at)
    assert client.get(flight_key(KEY)) == token


def test_a_refresh_longer_than_its_flight_keeps_it(
    redis_server: RedisServer, client: redis.Redis, pace: int
) -> None:
    cache, anew = make(redis_server, LOCK_FLIGHT_TIMEOUT=1.5 * pace), Producer("anew")
    anew.finish.clear()
    refresh = Background(lambda: cache.compute("report", anew, 60))
    anew.begun.wait()
    see_renewals(client)
    anew.finish.set()
    assert refresh.result() == cache.get("report") == "anew"


@pytest.mark.parametrize("is_first", ["leader", "hasty"])
def test_who_will_not_wait_longer_computes_and_the_first_value_is_kept(
    redis_server: RedisServer, is_first: str
) -> None:
    """If the last one's were, a value would never be kept that takes longer than callers wait: the
    next of them would always be too early for the one before."""
    with (
        processes(ask, redis_server.url) as crew,
        processes(ask_impatiently, redis_server.url) as (hasty,),
    ):
        crew.go()
        leader = leader_of(crew)
        hasty.go()
        assert hasty.hear() == "computing"
        if is_first == "leader":
            leader.say("leader")
            assert leader.result() == ["leader"]
            hasty.say("hasty")
            assert hasty.result() == "hasty"
        else:
            hasty.say("hasty")
            assert hasty.result() == "hasty"
            leader.say("leader")
            assert leader.result() == ["leader"]
    assert RedisCache(redis_server.url, {}).get("report") == is_first


def test_redis_dies_under_followers_and_all_get_a_value(own_server: RedisServer) -> None:
    with (
        processes(ask, own_server.url, 1, count=3) as crew,
        own_server.client() as client,
    ):
        crew.go()
        leader = leader_of(crew)
        until(lambda: blocked(client) == 2)
        own_server.kill()
        others = [worker for worker in crew if worker is not leader]
        for worker in others:
            # Without Redis nobody can know of the other processes.
            assert worker.hear() == "computing"
            worker.say("of its own")
        leader.say("the report")
        assert leader.result() == ["the report"]
        assert [worker.result() for worker in others] == [["of its own"]] * 2


def test_a_frozen_leader_is_replaced_and_still_gets_its_own_value(
    redis_server: RedisServer, client: redis.Redis, pace: int
) -> None:
    options = {"LOCK_FLIGHT_TIMEOUT": 2 * pace}
    with processes(ask, redis_server.url, 1, options, True, count=2) as crew:
        crew.go()
        first = leader_of(crew)
        first.pause()
        (second,) = others = Crew(worker for worker in crew if worker is not first)
        assert leader_of(others) is second
        second.say("newer")
        assert second.result() == ["newer"]
        first.say("older")
        first.resume()
        assert first.result() == ["older"]
    assert RedisCache(redis_server.url, {}).get("report") == "newer"
