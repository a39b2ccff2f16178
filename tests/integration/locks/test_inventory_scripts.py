"""The scripts that look at locks for people, and those that keep figures: what each answers."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_redis_lock.contrib.limit import PLACE_RESET
from django_redis_lock.contrib.metrics.collecting import ADD_FIGURES
from django_redis_lock.contrib.metrics.report import READ_FIGURES
from django_redis_lock.history import note_call
from django_redis_lock.ops.inventory.scripts import (
    DESCRIBE,
    DESCRIBE_FLIGHTS,
    LATEST,
    LIST,
    LIST_FLIGHTS,
    WAITING,
)
from django_redis_lock.protocol.holder_scripts import (
    CLOCK,
    HEARTBEAT,
    HEARTBEATS,
    RECORD_EVENT,
    RESET,
)
from django_redis_lock.protocol.holders import Owner
from django_redis_lock.protocol.keys import LAST_FENCE, lock_keys
from django_redis_lock.protocol.script import Call, Script
from django_redis_lock.transport import run as run_call

KEYS = lock_keys(b"name")
OTHER = lock_keys(b"other")
DAY = 86_400_000
#: Of the form that this package and redis-py make.
TOKEN = "0123456789abcdef" * 2
LONG, TOLERANCE = 3_000_000, 100_000


class Scripts:
    """Calls of the scripts on one server."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run(self, script: Script, keys: tuple[Any, ...], *args: bytes | str | int) -> Any:
        names = tuple(key if isinstance(key, bytes) else key.encode() for key in keys)
        return run_call(self.client, Call(script, names, args)).value

    def now(self) -> int:
        """Milliseconds."""
        return self.run(CLOCK, ()) // 1000

    def is_now(self, micros: int | bytes) -> bool:
        return abs(int(micros) / 1000 - self.now()) < TOLERANCE

    def hold(self, keys: Any, token: str = "token") -> None:
        self.client.set(keys.lock, token, px=LONG)
        self.client.hset(keys.owner, "host", "here")


@pytest.fixture
def scripts(any_client: redis.Redis) -> Scripts:
    return Scripts(any_client)


# -- LIST and LIST_FLIGHTS -------------------------------------------------------------------------


@pytest.mark.parametrize("script", [LIST, LIST_FLIGHTS])
def test_list(scripts: Scripts, script: Script) -> None:
    at = scripts.now()
    ends = {"a:one": 1, "a:Two": 2, "b:two": 3, "a:three": 4, "xa:four": 5}
    for key, place in ends.items():
        scripts.client.set(key, "token")
        scripts.client.zadd("index", {key: at + place * LONG})

    def listed(prefix: str, wanted: str, start: int, count: int) -> Any:
        return scripts.run(script, ("index",), prefix, wanted, start, count)

    assert listed("a:", "", 0, 10) == [5, 0, [b"a:three", b"a:Two", b"a:one"]]
    assert listed("", "two", 0, 10) == [5, 0, [b"b:two", b"a:Two"]]
    assert listed("a:", "two", 0, 10) == [5, 0, [b"a:Two"]]
    assert listed("", "t.o", 0, 10) == [5, 0, []]
    assert listed("", "", 1, 2) == [3, 2, [b"a:three", b"b:two"]]


def test_list_passes_over_the_last_fence(scripts: Scripts) -> None:
    scripts.client.zadd("index", {"a": scripts.now(), LAST_FENCE: scripts.now() * 1000})
    scripts.client.set("a", "token")
    assert scripts.run(LIST, ("index",), "", "", 0, 10) == [2, 0, [b"a"]]
    assert scripts.run(LIST, ("index",), "", "", 0, 1) == [1, 1, []]
    assert scripts.client.zcard("index") == 2


def test_list_finds_a_place_by_the_name_of_its_lock(scripts: Scripts) -> None:
    for name in ("name", "{tag}:name", "a}b"):
        keys = lock_keys(name.encode())
        for key in (keys.lock, keys.at_place(12).lock):
            scripts.client.set(key, "token")
            scripts.client.zadd("index", {key: scripts.now()})
        found = scripts.run(LIST, ("index",), name, "", 0, 10)[2]
        assert {*found} == {keys.lock, keys.at_place(12).lock}


def test_list_drops_what_is_gone(scripts: Scripts) -> None:
    scripts.client.zadd("index", {"gone": scripts.now() + LONG, "a": scripts.now()})
    scripts.client.set("a", "token")
    assert scripts.run(LIST, ("index",), "", "", 0, 1) == [0, 1, []]
    assert scripts.client.zrange("index", 0, -1) == [b"a"]


# -- DESCRIBE and DESCRIBE_FLIGHTS -----------------------------------------------------------------


def test_describe(scripts: Scripts) -> None:
    scripts.hold(OTHER, TOKEN)
    scripts.client.zadd(OTHER.waiters, {"dead": scripts.now() - LONG, "w": scripts.now() + LONG})
    at, lock = scripts.run(DESCRIBE, (*KEYS, *OTHER), 1, 1)
    assert scripts.is_now(at)
    place, token, left, owner, broken, waiters, known = lock
    assert (place, token, owner, broken) == (2, TOKEN.encode(), [b"host", b"here"], [])
    assert (waiters, known) == (1, 1)
    assert abs(left - LONG) < TOLERANCE


@pytest.mark.parametrize(
    ("grant", "owned"), [("token:1", False), ("token", True), ("tokens:1", True)]
)
def test_describe_passes_over_a_grant_on_its_way(scripts: Scripts, grant: str, owned: bool) -> None:
    scripts.hold(KEYS)
    scripts.client.rpush(KEYS.grants, grant)
    assert (len(scripts.run(DESCRIBE, KEYS, 0)) == 2) == owned


def test_describe_names_what_is_broken(scripts: Scripts) -> None:
    scripts.hold(KEYS, TOKEN)
    scripts.hold(OTHER, TOKEN)
    for part in ("grants", "waiters", "owner"):
        scripts.client.delete(getattr(KEYS, part))
        scripts.client.set(getattr(KEYS, part), "x")
    [_, lock, other] = scripts.run(DESCRIBE, (*KEYS, *OTHER), 1, 1)
    assert lock[3:] == [[], lock[4], 0, 1]
    assert sorted(lock[4]) == [b"grants", b"owner", b"waiters"]
    assert other[4] == []


@pytest.mark.parametrize(("number", "readable"), [(64, True), (65, False)])
def test_describe_reads_no_large_description(scripts: Scripts, number: int, readable: bool) -> None:
    scripts.client.set(KEYS.lock, TOKEN)
    scripts.client.hset(KEYS.owner, mapping={f"field {n}": n for n in range(number)})
    [_, lock] = scripts.run(DESCRIBE, KEYS, 1)
    assert len(lock[3]) == (128 if readable else 0)
    assert lock[4] == ([] if readable else [b"owner"])


def test_describe_flights(scripts: Scripts) -> None:
    scripts.client.set("flight", TOKEN, px=LONG)
    scripts.client.hset("leader", "host", "here")
    scripts.client.set("failed", "!why")
    scripts.client.rpush("list", "x")
    scripts.client.set("broken", TOKEN)
    scripts.client.set("other", "a value")
    keys = ("none", "x", "failed", "x", "list", "x", "flight", "leader", "broken", "list")
    keys += ("other", "leader")
    at, flight, broken = scripts.run(DESCRIBE_FLIGHTS, keys)
    assert scripts.is_now(at)
    assert (flight[:2], flight[3:]) == ([4, TOKEN.encode()], [[b"host", b"here"], []])
    assert abs(flight[2] - LONG) < TOLERANCE
    assert broken == [5, TOKEN.encode(), -1, [], [b"leader"]]


#: A value, the end of its lock on the index, the fields of its description, whether only locks are
#: stored there; and whether it is a lock: by what is there, or if the description is of it.
KNOWN: dict[str, tuple[str, str | None, dict[str, str], int, bool, bool]] = {
    "a token": (TOKEN, None, {}, 0, False, False),
    "a token on the index": (TOKEN, "later", {}, 0, True, True),
    "a token that another program has extended": (TOKEN, "earlier", {}, 0, True, True),
    "a token without an end": (TOKEN, "+inf", {}, 0, True, True),
    "a token among locks": (TOKEN, None, {}, 1, True, True),
    "a described token": (TOKEN, None, {"id": "id"}, 0, False, True),
    "a token with a name": (f"{TOKEN} 7 host Thread", None, {}, 1, True, True),
    "a token of several grants": (f"{TOKEN}.2", None, {}, 1, True, True),
    "a longer text": (f"{TOKEN}a", "later", {}, 1, False, False),
    "other letters": (f"{TOKEN[:-1]}g", "later", {}, 1, False, False),
    "capital letters": (TOKEN.upper(), "later", {}, 1, False, False),
    "a value": ("271828", None, {}, 1, False, False),
    "an empty value": ("", "+inf", {}, 1, False, False),
    "a value on the index": ("271828", "later", {}, 1, False, False),
    "a chosen token": ("chosen", "later", {"attempt": "x"}, 0, True, True),
    "a chosen token, described": ("chosen", "later", {"attempt": "x", "id": "id"}, 0, False, True),
    "a value after a crash": ("271828", "earlier", {"attempt": "x"}, 0, False, False),
    "a value and another's description": ("271828", "later", {"id": "no"}, 1, False, False),
}


@pytest.mark.parametrize("case", KNOWN)
def test_what_is_known_as_a_lock(scripts: Scripts, case: str) -> None:
    value, end, owner, only, known, is_lock = KNOWN[case]
    ends = {"later": scripts.now() + LONG, "earlier": scripts.now() - LONG, "+inf": "+inf"}
    scripts.client.set(KEYS.lock, value)
    if end is not None:
        scripts.client.zadd(KEYS.held_index, {KEYS.lock: ends[end]})
    if owner:
        scripts.client.hset(KEYS.owner, mapping=owner)
    [_, found] = scripts.run(DESCRIBE, KEYS, only)
    assert found[6:] == ([int(known)] if known or owner else [])
    for script, limit in ((RESET, ()), (PLACE_RESET, (3,))):
        scripts.client.set(KEYS.lock, value)
        if owner:
            scripts.client.hset(KEYS.owner, mapping=owner)
        if end is not None:
            scripts.client.zadd(KEYS.held_index, {KEYS.lock: ends[end]})
        args = ("next", 2000, value, 2**53, "id", only, *limit)
        assert scripts.run(script, KEYS, *args) == int(is_lock)
        assert scripts.client.exists(KEYS.lock) == (not is_lock)


def test_only_strings_are_locks(scripts: Scripts) -> None:
    scripts.client.rpush(KEYS.lock, TOKEN)
    assert len(scripts.run(DESCRIBE, KEYS, 1)) == 1


# -- WAITING, NOTE, HEARTBEAT ----------------------------------------------------------------------


def test_waiting(scripts: Scripts) -> None:
    keys = (*KEYS[:4], b"events")
    assert scripts.run(WAITING, keys, 5)[1:] == [[], b"", b""]
    scripts.hold(KEYS)
    scripts.client.set("events", "lines")
    at = scripts.now()
    ends = {"dead": at - LONG, "one": at + LONG, "two": at + 2 * LONG, "three": at + 3 * LONG}
    scripts.client.zadd(KEYS.waiters, ends)
    said = scripts.run(WAITING, keys, 2)
    assert scripts.is_now(said[0])
    assert said[1:] == [[b"one", b"two"], b"lines", b""]
    scripts.client.delete(KEYS.lock)
    scripts.client.pexpire(KEYS.owner, DAY)
    gone_at, owner = scripts.run(WAITING, keys, 2)[4]
    assert scripts.is_now(gone_at)
    assert owner == [b"host", b"here"]


def test_waiting_reads_what_it_can(scripts: Scripts) -> None:
    for key in (KEYS.lock, KEYS.waiters, KEYS.owner, b"events"):
        scripts.client.rpush(key, "x")
    *known, other = scripts.run(WAITING, (*KEYS[:4], b"events"), 2)[1:]
    assert known == [[], b""]
    assert other in (b"list", b"?")  # The server in memory does not know types.


def test_note(scripts: Scripts) -> None:
    for number, when in enumerate(("", "5", "6", "7")):
        assert scripts.run(RECORD_EVENT, ("events",), f"line {number}", 3, LONG, when, "") == 1
    lines = scripts.client.get("events").split(b"\n")
    assert lines == [b"7 line 3", b"6 line 2", b"5 line 1"]
    assert abs(scripts.client.pttl("events") - LONG) < TOLERANCE
    scripts.run(RECORD_EVENT, ("events",), "brief", 3, 1000, "", "line 0")
    assert abs(scripts.client.pttl("events") - LONG) < TOLERANCE
    [first, *_] = kept = scripts.client.get("events").split(b" ")
    assert scripts.is_now(first)
    assert scripts.run(RECORD_EVENT, ("events",), "less", 3, LONG, "", "line 3") == 0
    assert scripts.client.get("events").split(b" ") == kept


def test_releases_push_out_no_other_event(scripts: Scripts) -> None:
    def record(event: str) -> None:
        scripts.run(RECORD_EVENT, ("events",), event, 10, LONG, "5", "")

    def release() -> str:
        return note_call(b"key", "released", Owner("id")).args[0]

    record("lost")
    for _ in range(20):
        record(release())
    lines = scripts.client.get("events").decode().splitlines()
    assert lines == [*[f"5 {release()}"] * 9, "5 lost"]
    for number in range(5):
        record(str(number))
    lines = scripts.client.get("events").decode().splitlines()
    assert lines == [*(f"5 {number}" for number in (4, 3, 2, 1, 0)), *[f"5 {release()}"] * 5]
    record(release())
    lines = scripts.client.get("events").decode().splitlines()
    assert lines == [
        f"5 {release()}",
        *(f"5 {n}" for n in (4, 3, 2, 1, 0)),
        *[f"5 {release()}"] * 4,
    ]


def test_note_replaces_a_key_of_another_kind(scripts: Scripts) -> None:
    scripts.client.rpush("events", "x")
    scripts.run(RECORD_EVENT, ("events",), "line", 3, LONG, "5", "known")
    assert scripts.client.get("events") == b"5 line"


def test_news_are_those_of_a_day_and_no_more_than_a_thousand(scripts: Scripts) -> None:
    def record(event: object, at: object) -> None:
        scripts.run(RECORD_EVENT, ("events", "news"), event, 3, LONG, at, "")

    now = scripts.now() * 1000
    record("of yesterday", now - DAY * 1000 - 1_000_000)
    for number in range(1001):
        record(number, now - number * 1000)
    kept = scripts.client.zrange("news", 0, -1, withscores=True)
    assert [event for event, _ in kept] == [b"%d" % number for number in reversed(range(1000))]
    record("just now", "")
    [(event, at)] = scripts.client.zrange("news", -1, -1, withscores=True)
    assert event == b"just now"
    assert scripts.is_now(at)
    assert abs(scripts.client.pttl("news") - DAY) < TOLERANCE
    scripts.client.zadd("news", {"of yesterday": now - DAY * 1000 - 1_000_000})
    told = scripts.run(LATEST, ("news",), 2000)
    assert told[::2] == [*(b"%d" % number for number in reversed(range(999))), b"just now"]
    scripts.client.set("other", "x")
    assert scripts.run(LATEST, ("other",), 2000) == []


def test_heartbeats(scripts: Scripts) -> None:
    assert [scripts.run(HEARTBEAT, ("beat",), LONG) for _ in range(2)] == [0, 1]
    assert abs(scripts.client.pttl("beat") - LONG) < TOLERANCE
    scripts.client.rpush("list", "x")
    at, none, broken, beat = scripts.run(HEARTBEATS, ("none", "list", "beat"))
    assert (none, broken) == (b"", b"")
    assert scripts.is_now(at)
    assert scripts.is_now(beat)


# -- figures ---------------------------------------------------------------------------------------


#: What is added to the hash of each hour, one call after the other, and what is kept of that.
FIGURES: dict[str, tuple[list[list[str]], dict[str, str]]] = {
    "sums and maxima": (
        [["s\na", "1 0 m5 m5"], ["s\na", "2 3 m4 m6 9", "s\nb", "1"]],
        {"s\na": "3 3 m5 m6 9", "s\nb": "1"},
    ),
    "nothing": ([["s\na", "1 m5 0 0"], ["s\na", "0 0 m2 0"]], {"s\na": "1 m5 m2 0"}),
    "too many names": (
        [["s\na", "1", "s\nb", "1", "s\nc", "2", "t\nd", "4", "s\ne", "8", "s\na", "16"]],
        {"s\na": "17", "s\nb": "1", "s\nrest": "10", "t\nrest": "4"},
    ),
}


@pytest.mark.parametrize("case", FIGURES)
def test_figures_are_added(scripts: Scripts, case: str) -> None:
    """Each hash has buckets of a day, keeps three, and two names of each."""
    calls, kept = FIGURES[case]
    for named in calls:
        periods = (DAY // 1000, 3) * 2
        assert scripts.run(ADD_FIGURES, ("hour", "week"), 2, "rest", *periods, *named) == 1
    today = str(scripts.now() // DAY)
    names = min(len(kept), 2)
    expected = {"now": today, today: f"{names}", **{f"{today} {k}": v for k, v in kept.items()}}
    for key in ("hour", "week"):
        at, flat = scripts.run(READ_FIGURES, (key,))
        assert abs(at - scripts.now() / 1000) < TOLERANCE / 1000
        found = {str(k, "utf8"): str(v, "utf8") for k, v in zip(flat[::2], flat[1::2], strict=True)}
        assert found == expected
        assert abs(scripts.client.pttl(key) - 4 * DAY) < TOLERANCE
