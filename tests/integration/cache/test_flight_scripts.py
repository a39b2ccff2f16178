"""The scripts of computations, one by one: what they answer, and what is in Redis afterwards."""

from __future__ import annotations

import time
from typing import Any

import pytest
import redis

from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.protocol.keys import FLIGHTS, flight_key, flight_leader, flight_stream
from django_redis_lock.protocol.script import Call, Script
from django_redis_lock.singleflight.scripts import (
    DELETE,
    END_FLIGHT,
    END_SEEN,
    EXPIRE_AT,
    LET_GO,
    MARK_STALE,
    READ,
    RENEW_FLIGHT,
    STORE,
    TAKE_FLIGHT,
    TAKE_OVER,
    WRITE,
)
from django_redis_lock.transport import run as run_call
from tests.redis_server import RedisServer

KEY = b"value"
FLIGHT, LEADER = flight_key(KEY), flight_leader(KEY)
MINE, OTHERS = flight_stream(KEY, b"mine"), flight_stream(KEY, b"others")
LONG, SHORT = 500_000, 100_000


class Redis:
    """The keys of one value and its flight."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run(self, script: Script, keys: tuple[bytes, ...], *args: Any) -> Any:
        return run_call(self.client, Call(script, keys, args)).value

    def take(self, token: str = "mine", stale: int = 0, followed: bool = True) -> Any:
        reply = self.run(TAKE_FLIGHT, (KEY, FLIGHT), token, LONG, stale)
        if reply[0] == 1 and followed:
            assert self.take("a follower", stale)[0] == 0
        return reply

    def take_after(self, stream: bytes) -> Any:
        """A third caller's take, which has waited for the flight with this stream."""
        return self.run(TAKE_FLIGHT, (KEY, FLIGHT, stream), "a third", LONG, 0)

    def store(self, *seen: Any, value: str = "new", lifetime: int = LONG) -> Any:
        return self.run(STORE, (KEY, FLIGHT, MINE), "mine", value, lifetime, 9000, *seen)

    def outcomes(self, stream: bytes = MINE) -> list[bytes]:
        """What followers learn; a stream always has a lifetime."""
        entries = [fields[b"outcome"] for _, fields in self.client.xrange(stream)]
        assert not entries or 0 < self.client.pttl(stream) <= (10_000 if entries[1:] else LONG)
        return [outcome for outcome in entries if outcome != b"awaited"]

    def lasts(self, key: bytes, milliseconds: int) -> bool:
        return milliseconds - 60_000 < self.client.pttl(key) <= milliseconds


@pytest.fixture
def server(any_client: redis.Redis) -> Redis:
    return Redis(any_client)


# -- the beginning ---------------------------------------------------------------------------------


def test_one_leads_and_the_others_follow(server: Redis) -> None:
    assert server.take() == [1]
    assert server.lasts(FLIGHT, LONG)
    leader, token, left = server.take("others")
    assert (leader, token) == (0, b"mine")
    assert LONG - 60_000 < left <= LONG
    assert server.lasts(MINE, LONG), "else nothing would wake the others"
    assert server.take() == [1], "sent again"


def test_there_is_a_value_after_all_unless_it_is_stale(server: Redis) -> None:
    server.client.set(KEY, "old", px=LONG)
    assert server.take(stale=SHORT) == [2, b"old"]
    server.client.set(KEY, "old")
    assert server.take(stale=SHORT) == [2, b"old"], "without a lifetime nothing is stale"
    assert not server.client.exists(FLIGHT)
    server.client.set(KEY, "old", px=SHORT)
    assert server.take(stale=LONG)[0] == 1
    assert server.client.get(FLIGHT) == b"mine"


def test_a_value_is_stale_from_the_last_millisecond_on(monkeypatch: pytest.MonkeyPatch) -> None:
    database = Database("memory")
    database._tell_time()
    monkeypatch.setattr(database, "_tell_time", lambda: None)  # It does not pass.
    server = Redis(client_of(database))
    server.client.set(KEY, "old", px=SHORT + 1)
    assert server.take(stale=SHORT) == [2, b"old"]
    server.client.set(KEY, "old", px=SHORT)
    assert server.take(stale=SHORT)[0] == 1


@pytest.mark.parametrize("pause", [0, SHORT])
def test_after_a_failure_no_caller_tries_again_for_a_while(server: Redis, pause: int) -> None:
    server.take()
    assert server.run(END_FLIGHT, (KEY, FLIGHT, MINE), "mine", 9000, "it broke", pause) == 1
    assert server.outcomes() == [b"failed"]
    if pause:
        assert server.take("others") == [3, b"it broke"]
        assert server.lasts(FLIGHT, SHORT)
    else:
        assert not server.client.exists(FLIGHT)


def test_taking_over(server: Redis) -> None:
    server.take("others")
    server.client.set(KEY, "old", px=LONG)
    seen = server.run(TAKE_OVER, (KEY, FLIGHT), "mine", LONG)
    assert server.client.get(FLIGHT) == b"mine"
    assert server.lasts(FLIGHT, LONG)
    assert server.store(*seen) == 1


@pytest.mark.parametrize("leader", ["others", "mine"])
def test_taking_over_from_one_leader(server: Redis, leader: str) -> None:
    """Also if the request is sent again."""
    server.take(leader)
    assert server.run(TAKE_OVER, (KEY, FLIGHT), "mine", LONG, "others") is not None
    assert server.client.get(FLIGHT) == b"mine"


@pytest.mark.parametrize("leader", [None, "a third"])
def test_taking_over_from_a_leader_whose_flight_has_ended(
    server: Redis, leader: str | None
) -> None:
    """It may have stored the value, or somebody else; or another leads by now."""
    if leader:
        server.take(leader)
    assert server.run(TAKE_OVER, (KEY, FLIGHT), "mine", LONG, "others") is None
    assert server.client.get(FLIGHT) == (leader and leader.encode())


def test_leading_with_another(server: Redis) -> None:
    """Who is first stores the value for the followers of both."""
    server.take("others")
    digest, at, token = server.run(TAKE_OVER, (KEY, FLIGHT), "mine", LONG, "")
    assert token == server.client.get(FLIGHT) == b"others"
    assert server.run(STORE, (KEY, FLIGHT, OTHERS), token, "new", LONG, 9000, digest, at) == 1
    assert server.outcomes(OTHERS) == [b"stored"]


@pytest.mark.parametrize("leader", [None, "mine", "failed"])
def test_leading_where_there_is_no_other(server: Redis, leader: str | None) -> None:
    if leader:
        server.take("mine")
    if leader == "failed":
        server.run(END_FLIGHT, (KEY, FLIGHT, MINE), "mine", 9000, "it broke", SHORT)
    seen = server.run(TAKE_OVER, (KEY, FLIGHT), "mine", LONG, "")
    assert server.client.get(FLIGHT) == b"mine"
    assert server.store(*seen) == 1


# -- the end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lifetime", "value"), [(LONG, b"new"), (0, b"new"), (-1, None)], ids=["some", "none", "not"]
)
def test_storing(server: Redis, lifetime: int, value: bytes | None) -> None:
    server.take()
    assert server.store(lifetime=lifetime) == 1
    assert server.client.get(KEY) == value
    if lifetime > 0:
        assert server.lasts(KEY, lifetime)
    else:
        assert server.client.pttl(KEY) == (-2 if lifetime else -1)
    assert not server.client.exists(FLIGHT)
    assert server.outcomes() == [b"stored"]


@pytest.mark.parametrize("lifetime", [LONG, 0, -1])
@pytest.mark.parametrize("followed", [False, True])
def test_only_a_followed_computation_has_a_stream(
    server: Redis, lifetime: int, followed: bool
) -> None:
    """It would fill the memory for ten seconds; and a value that is stored is not kept twice."""
    server.take(followed=followed)
    assert server.client.exists(MINE) == followed
    assert server.store("", "0", "", "a trace", lifetime=lifetime) == 1
    assert server.outcomes() == ([b"stored"] if followed else [])
    assert server.client.exists(MINE) == followed
    server.client.delete(KEY)
    assert server.take_after(MINE) == ([2, b"new"] if followed and lifetime < 0 else [1])


def test_a_value_that_may_not_be_kept_replaces_a_stale_one(server: Redis) -> None:
    server.client.set(KEY, "old", px=SHORT)
    _, *seen = server.take(stale=LONG)
    assert server.store(*seen, lifetime=-1) == 1
    assert not server.client.exists(KEY)


# -- a value that is not stored --------------------------------------------------------------------


@pytest.mark.parametrize("trace", [(), ("a trace",)])
def test_who_has_waited_gets_a_value_that_is_not_stored(
    server: Redis, trace: tuple[str, ...]
) -> None:
    server.take()
    assert server.store("", "0", "", *trace, lifetime=-1) == 1
    assert server.take_after(MINE) == [2, b"new"]
    assert server.take_after(MINE) == [2, b"new"], "sent again"
    *_, (_, fields) = server.client.xrange(MINE)
    assert fields.get(b"trace") == (trace[0].encode() if trace else None)
    assert server.take_after(OTHERS) == [1], "it has waited for another"
    assert server.take_after(MINE) == [2, b"new"], "also while the next leader computes"


def test_a_newer_value_counts_more(server: Redis) -> None:
    server.take()
    server.store(lifetime=-1)
    server.client.set(KEY, "newest", px=LONG)
    assert server.take_after(MINE) == [2, b"newest"]


@pytest.mark.parametrize("how", ["failed", "written", "other's", "under way"])
def test_a_flight_that_has_stored_nothing_has_no_value(server: Redis, how: str) -> None:
    server.take()
    if how == "failed":
        server.run(END_FLIGHT, (KEY, FLIGHT, MINE), "mine", 9000, "value", 0)
    elif how == "written":
        server.run(LET_GO, (FLIGHT,))
    elif how == "other's":
        server.client.set(FLIGHT, "others", px=LONG)
        assert server.store(lifetime=-1) == 0
    reply = server.take_after(MINE)
    assert reply[0] == (0 if how in ("other's", "under way") else 1)


@pytest.mark.parametrize("flight", [None, "others"])
def test_nothing_is_stored_or_ended_in_anothers_flight(server: Redis, flight: str | None) -> None:
    server.take()
    server.client.delete(FLIGHT)
    if flight:
        server.take(flight)
    assert server.store() == 0
    assert server.run(END_FLIGHT, (KEY, FLIGHT, MINE), "mine", 9000, "it broke", SHORT) == 0
    assert server.run(RENEW_FLIGHT, (FLIGHT, LEADER, FLIGHTS), *RENEWED) == 0
    assert server.client.get(KEY) is None
    assert server.client.get(FLIGHT) == (flight and flight.encode())
    assert not flight or server.lasts(FLIGHT, LONG)
    assert not server.client.exists(LEADER, FLIGHTS)
    assert server.outcomes() == [b"ended", b"failed"]


def test_who_leads_no_more_learns_so_although_memory_is_full(own_server: RedisServer) -> None:
    """If it did not, the callers of its process would get a value from before the write."""
    with own_server.client() as client:
        server = Redis(client)
        server.take()
        server.run(LET_GO, (FLIGHT,))
        client.config_set("maxmemory", 1)
        assert server.store() == 0


LARGE = "x" * 10_000


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize(
    ("before", "after", "stored"),
    [
        (None, None, 1),
        (None, ("theirs", SHORT), 0),
        (("old", SHORT), ("old", SHORT), 1),
        (("old", SHORT), ("theirs", SHORT), 0),
        (("old", SHORT), None, 0),
        (("old", 1), None, 1),
    ],
    ids=["nothing", "written", "as it was", "overwritten", "deleted", "expired"],
)
def test_a_write_by_others_during_the_computation_wins(
    server: Redis, before: Any, after: Any, stored: int, size: str
) -> None:
    filler = LARGE if size == "large" else ""
    if before:
        server.client.set(KEY, before[0] + filler, px=before[1] + 50)
    reply = server.take(stale=LONG)
    if before != after:
        server.client.delete(KEY)
        if after:
            server.client.set(KEY, after[0] + filler, px=after[1])
    assert server.store(*reply[1:]) == stored
    assert server.client.exists(FLIGHT) == 0
    assert server.outcomes() == [b"stored" if stored else b"ended"]
    expected = "new" if stored else after and after[0] + filler
    assert server.client.get(KEY) == (expected and expected.encode())


@pytest.mark.parametrize("part", ["head", "tail", "length", "expiry"])
def test_a_large_value_is_seen_to_be_another(server: Redis, part: str) -> None:
    server.client.set(KEY, LARGE, px=SHORT)
    _, *seen = server.take(stale=LONG)
    others = {"head": "y" + LARGE[1:], "tail": LARGE[1:] + "y", "length": LARGE + "x"}
    server.client.set(KEY, others.get(part, LARGE), px=SHORT * (2 if part == "expiry" else 1))
    assert server.store(*seen) == 0


# -- while it goes on ------------------------------------------------------------------------------


RENEWED = ("mine", SHORT, KEY, 5000, "host", "here")


def test_renewing(server: Redis) -> None:
    server.take()
    server.client.zadd(FLIGHTS, {"over": 1, "goes on": 1e15})
    server.client.hset(LEADER, "of", "a leader before")
    before = time.time()
    for _ in range(2):
        assert server.run(RENEW_FLIGHT, (FLIGHT, LEADER, FLIGHTS), *RENEWED) == 1
    assert server.lasts(FLIGHT, SHORT)
    assert server.lasts(LEADER, SHORT)
    leader = server.client.hgetall(LEADER)
    assert set(leader) == {b"since", b"host", b"seen"}
    assert abs(float(leader[b"since"]) - (before - 5)) < 4
    assert abs(int(leader[b"seen"]) / 1e6 - before) < 60
    assert server.client.zrange(FLIGHTS, 0, -1) == [KEY, b"goes on"]
    ends = server.client.zscore(FLIGHTS, KEY) / 1000
    assert abs(ends - before - SHORT / 1000) < 60


def test_renewing_takes_few_that_are_over_off_the_index_at_once(server: Redis) -> None:
    server.take()
    server.client.zadd(FLIGHTS, {f"over {number}": 1 for number in range(100)})
    assert server.run(RENEW_FLIGHT, (FLIGHT, LEADER, FLIGHTS), *RENEWED) == 1
    assert 1 < server.client.zcard(FLIGHTS) < 100
    assert server.run(RENEW_FLIGHT, (FLIGHT, LEADER, FLIGHTS), *RENEWED) == 1
    assert server.client.zrange(FLIGHTS, 0, -1) == [KEY]


def test_reading(server: Redis) -> None:
    assert server.run(READ, (KEY,)) is None
    server.client.set(KEY, "old", px=SHORT)
    value, left = server.run(READ, (KEY,))
    assert value == b"old"
    assert 0 < left <= SHORT


# -- writes end flights ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "how", "written"),
    [(None, "", 1), (None, "NX", 1), (None, "XX", 0), ("old", "NX", 0), ("old", "XX", 1)],
)
def test_writing(server: Redis, before: str | None, how: str, written: int) -> None:
    server.take("others")
    if before:
        server.client.set(KEY, before)
    assert server.run(WRITE, (KEY, FLIGHT), "theirs", SHORT, how) == written
    if written:
        assert server.client.get(KEY) == b"theirs"
        assert server.lasts(KEY, SHORT)
        assert server.run(WRITE, (KEY, FLIGHT), "theirs", "", "") == 1
        assert server.client.pttl(KEY) == -1
    assert server.client.exists(FLIGHT) == 1 - written
    assert server.outcomes(OTHERS) == [b"ended"] * written


def test_a_computations_own_write_does_not_end_its_flight(server: Redis) -> None:
    server.take()
    for own, left in ((("others", "mine"), 1), (("others",), 0)):
        assert server.run(WRITE, (KEY, FLIGHT), "mine", "", "", *own) == 1
        assert server.client.exists(FLIGHT) == left


def test_a_write_ends_a_remembered_failure(server: Redis) -> None:
    server.client.set(FLIGHT, "!it broke", px=LONG)
    assert server.run(LET_GO, (FLIGHT,)) == 1
    assert server.client.keys() == []


def test_deleting(server: Redis) -> None:
    server.take("others")
    other = b"other"
    server.client.set(other, "x")
    server.client.set(flight_key(other), "mine")
    keys = (KEY, other, b"third")
    assert server.run(DELETE, (*keys, *map(flight_key, keys))) == 1
    assert not server.client.exists(*keys, *map(flight_key, keys))
    assert server.outcomes(OTHERS) == [b"ended"]
    assert server.outcomes(flight_stream(other, b"mine")) == [b"ended"]


@pytest.mark.parametrize(
    ("before", "after"), [(None, SHORT), (LONG, SHORT), (SHORT + 90_000, SHORT), (9000, 9000)]
)
def test_marking_stale(server: Redis, before: int | None, after: int) -> None:
    server.client.set(KEY, "old", px=before)
    server.client.set(FLIGHT, "others", px=LONG)
    assert server.run(MARK_STALE, (KEY, FLIGHT), SHORT) == 1
    assert server.client.get(KEY) == b"old"
    assert 0 < server.client.pttl(KEY) <= after
    assert after < SHORT or server.lasts(KEY, after)
    assert not server.client.exists(FLIGHT)
    assert server.outcomes(OTHERS) == [b"ended"]


def test_ending_a_flight_that_was_seen(server: Redis) -> None:
    server.take()
    assert server.run(END_SEEN, (FLIGHT,), "another's") == 0
    assert server.run(END_SEEN, (FLIGHT,), "mine") == 1
    assert server.outcomes() == [b"ended"]
    assert server.run(END_SEEN, (FLIGHT,), "mine") == 0


def test_marking_nothing_stale(server: Redis) -> None:
    server.take("others")
    assert server.run(MARK_STALE, (KEY, FLIGHT), SHORT) == 0
    assert not server.client.exists(KEY, FLIGHT)
    assert server.outcomes(OTHERS) == [b"ended"]


@pytest.mark.parametrize(("command", "unit"), [("EXPIREAT", 1), ("PEXPIREAT", 1000)])
@pytest.mark.parametrize("value", [None, "old"])
def test_expiring_at_a_time(server: Redis, command: str, unit: int, value: str | None) -> None:
    if value:
        server.client.set(KEY, value)
    server.take("others", stale=LONG)
    server.client.set(FLIGHT, "others", px=LONG)
    later = int(time.time() + 300) * unit
    assert server.run(EXPIRE_AT, (KEY, FLIGHT), command, later) == bool(value)
    assert server.client.exists(FLIGHT)
    assert not value or server.lasts(KEY, 301_000)
    assert server.run(EXPIRE_AT, (KEY, FLIGHT), command, int(time.time() - 1) * unit) == bool(value)
    assert not server.client.exists(FLIGHT, KEY)
    assert server.outcomes(OTHERS) == [b"ended"]
