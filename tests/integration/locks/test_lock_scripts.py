"""What lock scripts promise beyond ``test_script_model``, which drives them at random beside a
reference and compares each answer and each key: numbers and texts of others, resets, what an index
drops, what Redis without memory must not refuse, and the scripts that it does not drive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.contrib.redlock.votes import VOTE
from django_redis_lock.protocol.holder_scripts import CLOCK, RESET
from django_redis_lock.protocol.keys import LAST_FENCE, lock_keys, process_key, quorum_fence_key
from django_redis_lock.protocol.lock_scripts import (
    ACQUIRE,
    EXTEND,
    LEAVE,
    MARK,
    RELEASE,
    RENEW,
    TAKE_GRANT,
    WATCH,
)
from django_redis_lock.protocol.script import Call, Script
from django_redis_lock.transport import run as run_call
from django_redis_lock.transport import server_of
from tests.holding import table_of
from tests.redis_server import RedisServer

KEYS = lock_keys(b"name")
VOTE_KEYS = (*KEYS, quorum_fence_key(b"name"))
WAKE = b"wake"
DAY = 86_400_000
#: Milliseconds; so far apart that no delay of the machine can confuse them.
LIFETIME, GRANT, ALIVE = 3_000_000, 1_000_000, 500_000
TOLERANCE = 100_000


class State(NamedTuple):
    """What there is in Redis, with lifetimes in milliseconds (-1 none, -2 no such key). ``fence``:
    the last one."""

    lock: bytes | None
    left: int
    grants: list[bytes]
    waiters: list[bytes]
    fence: float | None
    owner: dict[bytes, bytes]
    index: list[bytes]


class Scripts:
    """Calls of the scripts on one server."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run(self, script: Script, *args: bytes | str | int, keys: tuple[bytes, ...] = KEYS) -> Any:
        return run_call(self.client, Call(script, keys, args)).value

    def acquire(
        self, token: str, lifetime: int = LIFETIME, attempt: str = "", waiter: str = ""
    ) -> Any:
        return table_of(self.run(ACQUIRE, token, lifetime, attempt, waiter, ALIVE))

    def release(self, token: str, fence: int = 0, attempt: str = "") -> int:
        return self.run(RELEASE, token, "next", GRANT, 0, fence, attempt)

    def grant(self) -> int:
        """Make a grant that lies on the list: the token is ``next``. Returns its fence."""
        self.acquire("holder")
        self.acquire("waiting", waiter="w")
        assert self.release("holder") == 1
        return int(self.state().grants[0].split(b":")[1])

    def now(self) -> int:
        return self.run(CLOCK, keys=())

    def lasts(self, key: bytes, milliseconds: int) -> bool:
        return abs(self.client.pttl(key) - milliseconds) < TOLERANCE

    def state(self) -> State:
        client = self.client
        return State(
            client.get(KEYS.lock),
            client.pttl(KEYS.lock),
            client.lrange(KEYS.grants, 0, -1),
            client.zrange(KEYS.waiters, 0, -1),
            client.zscore(KEYS.held_index, LAST_FENCE),
            client.hgetall(KEYS.owner),
            [name for name in client.zrange(KEYS.held_index, 0, -1) if name != LAST_FENCE],
        )

    def ends(self, name: bytes = b"name") -> float:
        """Milliseconds from now to the end the index has for a lock."""
        return float(self.client.zscore(KEYS.held_index, name)) - self.now() / 1000


@pytest.fixture
def scripts(any_client: redis.Redis) -> Scripts:
    return Scripts(any_client)


# -- ACQUIRE ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("lifetime", [LIFETIME, 0])
def test_acquire_free(scripts: Scripts, lifetime: int) -> None:
    before = scripts.now()
    won, fence, at = scripts.acquire("a", lifetime)
    assert won == 1
    assert before <= fence <= at <= scripts.now()
    state = scripts.state()
    assert (state.lock, state.fence) == (b"a", fence)
    assert set(scripts.client.keys()) == {KEYS.lock, KEYS.held_index}
    if lifetime:
        assert scripts.lasts(KEYS.lock, LIFETIME)
        assert abs(scripts.ends() - LIFETIME) < TOLERANCE
    else:
        assert state.left == -1
        assert scripts.ends() == float("inf")


@pytest.mark.parametrize("ahead", [2**52, 2**53 - 1])
@pytest.mark.parametrize("attempt", ["", "first"])
def test_fence_follows_the_last_one(scripts: Scripts, ahead: int, attempt: str) -> None:
    """Of whichever lock it was."""
    scripts.client.zadd(KEYS.held_index, {LAST_FENCE: ahead})
    assert scripts.acquire("a", attempt=attempt)[1] == ahead + 1
    assert scripts.state().fence == ahead + 1


@pytest.mark.parametrize("unusable", [2**53, 1e30, float("inf")])
def test_fence_that_cannot_be_counted_on_from_is_replaced(
    scripts: Scripts, unusable: float
) -> None:
    scripts.client.zadd(KEYS.held_index, {LAST_FENCE: unusable})
    fence = scripts.acquire("a")[1]
    assert scripts.now() - 10**9 < fence <= scripts.now()
    assert scripts.state().fence == fence


def test_acquire_leaves_a_grant_that_was_popped(scripts: Scripts) -> None:
    scripts.grant()
    scripts.client.lpop(KEYS.grants)
    scripts.client.rpush(KEYS.grants, "nextother:1", "next:2")
    assert scripts.acquire("b")[0] == 0


@pytest.mark.parametrize("script", ["ACQUIRE", "WATCH"])
def test_register(scripts: Scripts, script: str) -> None:
    scripts.acquire("a")
    at = scripts.now() // 1000
    scripts.client.zadd(KEYS.waiters, {"dead": at - 1, "alive": at + TOLERANCE})
    scripts.client.hset(KEYS.grants, "another", "type")
    if script == "ACQUIRE":
        scripts.acquire("b", waiter="w")
    else:
        scripts.run(WATCH, "w", ALIVE, "next", GRANT)
    assert scripts.state().waiters == [b"alive", b"w"]
    assert abs(scripts.client.zscore(KEYS.waiters, "w") - at - ALIVE) < TOLERANCE
    assert scripts.lasts(KEYS.waiters, ALIVE)
    assert scripts.state().grants == []


@pytest.mark.parametrize("limit", [1, 2])
def test_a_refusal_by_a_lock_with_a_great_lifetime(any_client: redis.Redis, limit: int) -> None:
    """Another program's. Lua would write so great a number with an exponent."""
    places = [lock_keys(b"name").at_place(number).lock for number in range(1, limit + 1)]
    for key in places:
        any_client.set(key, "token", px=10**15)
    assert not Lock(any_client, "name", timeout=30, limit=limit).acquire(blocking=False)
    lock = Lock(any_client, "name", timeout=30, limit=limit)
    assert not lock.acquire(blocking_timeout=0.01)


def test_index_loses_what_has_ended(scripts: Scripts) -> None:
    """One use in 64 looks through it."""
    at = scripts.now() // 1000
    dead = {f"dead {number}": at - 7_200_000 for number in range(400)}
    scripts.client.zadd(KEYS.held_index, {**dead, "extended": at - 2, "endless": at - 1})
    scripts.client.zadd(KEYS.held_index, {"current": at + LIFETIME})
    scripts.client.set("extended", "token", px=LIFETIME)
    scripts.client.set("endless", "token")
    sizes = [scripts.client.zcard(KEYS.held_index)]
    while scripts.client.zcard(KEYS.held_index) > 5:
        scripts.acquire("a")
        sizes.append(scripts.client.zcard(KEYS.held_index))
        assert len(sizes) < 5000
    assert any(5 < size < 400 for size in sizes), "128 of them at a time"
    assert scripts.ends(b"endless") == float("inf")
    for name in (b"extended", b"current", b"name"):
        assert abs(scripts.ends(name) - LIFETIME) < TOLERANCE


# -- LEAVE -----------------------------------------------------------------------------------------


def test_leave_leaves_one_word(scripts: Scripts) -> None:
    scripts.client.rpush(WAKE, "old")
    scripts.run(LEAVE, "", LIFETIME, "", "w", keys=(*KEYS, WAKE))
    assert scripts.client.lrange(WAKE, 0, -1) == [b"leave"]


# -- RELEASE and RESET -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "attempt", "known", "fence", "released"),
    [
        ("a", "", True, 0, 1),
        ("a", "x", True, 0, 1),
        ("a", "y", True, 1, 0),
        ("a", "y", False, 1, 1),
        ("a", "y", False, 0, 0),
        ("b", "", True, 1, 0),
        ("next", "", True, 1, 0),
    ],
)
def test_release_asks_whose_it_is(
    scripts: Scripts, token: str, attempt: str, known: bool, fence: int, released: int
) -> None:
    """If that is not on record, it believes who knows the fence."""
    scripts.acquire("a", attempt="x")
    if not known:
        scripts.client.delete(KEYS.owner)
    before = scripts.state()
    assert scripts.release(token, fence=fence, attempt=attempt) == released
    assert (scripts.state().lock is None) == released
    if not released:
        assert scripts.state()._replace(left=before.left) == before


@pytest.mark.parametrize(("token", "fence"), [("a", -1), ("b", 0), ("b", 5)])
@pytest.mark.parametrize("described", [True, False])
def test_reset_ends_only_what_it_names(
    scripts: Scripts, token: str, fence: int, described: bool
) -> None:
    """``fence``: beside the holder's, of a chosen token at once, of others with the description."""
    at = scripts.acquire("a", attempt="" if described else "x")[1]
    if described:
        scripts.client.hset(KEYS.owner, "fence", at)
    before = scripts.state()
    assert scripts.run(RESET, "next", GRANT, token, at + fence) == 0
    assert scripts.state()._replace(left=before.left) == before


@pytest.mark.parametrize(
    "owner", [*({"fence": each} for each in ("1e18", "9" * 30, "x", "nan", "")), {"host": "h"}, {}]
)
def test_reset_ends_a_holder_with_an_unusable_description(
    scripts: Scripts, owner: dict[str, str]
) -> None:
    fence = scripts.acquire("a")[1]
    if owner:
        scripts.client.hset(KEYS.owner, mapping=owner)
    else:
        scripts.client.set(KEYS.owner, "not a hash")
    assert scripts.run(RESET, "next", GRANT, "a", 5 if "fence" in owner else fence) == 1
    assert scripts.state().lock is None


def test_reset_of_an_untaken_grant(scripts: Scripts) -> None:
    fence = scripts.grant()
    assert scripts.run(RESET, "other", GRANT, "next", fence) == 0
    assert scripts.state().lock == b"next"


def test_release_and_reset_of_nothing(scripts: Scripts) -> None:
    assert scripts.release("a") == 0
    scripts.client.zadd(KEYS.held_index, {"name": 1, "other": 2})
    assert scripts.run(RESET, "next", GRANT, "a", 2**53) == 0
    assert scripts.state().index == [b"other"]


def test_reset_publishes_to_the_process_of_the_holder(scripts: Scripts) -> None:
    fence, channel = scripts.acquire("a")[1], process_key("holder's")
    scripts.client.hset(KEYS.owner, "process", "holder's")
    connection = server_of(scripts.client).connect(protocol=2)
    for _ in range(2):
        connection.send_command("SUBSCRIBE", channel)
        assert connection.read_response() == [b"subscribe", channel, 1]  # And nothing before.
        assert scripts.run(RESET, "next", GRANT, "b", fence) == 0
    assert scripts.run(RESET, "next", GRANT, "a", fence) == 1
    assert connection.read_response() == [b"message", channel, KEYS.lock]
    connection.disconnect()


@pytest.mark.parametrize("noted", [None, "+inf", 1])
def test_the_index_has_the_true_end_of_a_grant(scripts: Scripts, noted: str | int | None) -> None:
    """Whatever it had for the holder: it was lost, or the lock had no end, or is redis-py's."""
    scripts.acquire("a")
    scripts.acquire("waiting", waiter="w")
    if noted is None:
        scripts.client.delete(KEYS.held_index)
    else:
        scripts.client.zadd(KEYS.held_index, {"name": noted})
    assert scripts.release("a") == 1
    assert scripts.state().lock == b"next"
    assert abs(scripts.ends() - GRANT) < TOLERANCE


# -- RENEW, EXTEND, CLOCK --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("had", "wanted", "left"),
    [
        (GRANT, LIFETIME, LIFETIME),
        (LIFETIME, GRANT, LIFETIME),
        (100_000_000, 100_500_000, 100_000_000),  # It has just been renewed.
        (LIFETIME, 0, LIFETIME),
        (LIFETIME, -1, -1),
        (0, LIFETIME, -1),
        (0, -1, -1),
    ],
)
def test_renew(scripts: Scripts, had: int, wanted: int, left: int) -> None:
    scripts.acquire("a", had)
    scripts.client.hset(KEYS.owner, "kept", "field")
    scripts.client.pexpire(KEYS.owner, GRANT)
    scripts.client.delete(KEYS.held_index)
    renewed = scripts.run(RENEW, "a", wanted, "", "", "", "host", "here")
    state = scripts.state()
    owner = state.owner
    assert abs(int(owner.pop(b"seen")) - scripts.now()) < TOLERANCE * 1000
    assert owner == {b"kept": b"field", b"host": b"here"}
    if left < 0:
        assert (renewed, state.left, scripts.client.pttl(KEYS.owner)) == (-1, -1, -1)
        assert scripts.ends() == float("inf")
    else:
        assert abs(renewed - left) < TOLERANCE
        assert scripts.lasts(KEYS.lock, left)
        assert scripts.lasts(KEYS.owner, left + DAY)
        assert abs(scripts.ends() - left) < TOLERANCE


OTHERS = [
    pytest.param("b", "", True, False, id="another token"),
    pytest.param("a", "y", True, False, id="another attempt"),
    pytest.param("a", "x", True, True, id="this attempt"),
    pytest.param("a", "", True, True, id="any attempt"),
    pytest.param("a", "y", False, True, id="attempt not on record"),
]


@pytest.mark.parametrize(("token", "attempt", "known", "mine"), OTHERS)
def test_renew_and_extend_ask_whose_it_is(
    scripts: Scripts, token: str, attempt: str, known: bool, mine: bool
) -> None:
    scripts.acquire("a", GRANT, attempt="x")
    if not known:
        scripts.client.delete(KEYS.owner)
    before = scripts.state()
    renewed = scripts.run(RENEW, token, LIFETIME, attempt, "", "")
    assert isinstance(renewed, int) == mine
    if mine:
        assert renewed > GRANT
    if not mine:
        assert scripts.state()._replace(left=before.left) == before
        assert scripts.lasts(KEYS.lock, GRANT)
    for replace in ("0", "1"):
        assert scripts.run(EXTEND, token, LIFETIME, replace, attempt, "call") == mine
        if not mine:
            assert scripts.lasts(KEYS.lock, GRANT)


def test_clock(scripts: Scripts) -> None:
    seconds, micros = scripts.client.time()
    assert 0 <= scripts.now() - (seconds * 1_000_000 + micros) < TOLERANCE * 1000


# -- MARK ------------------------------------------------------------------------------------------


def test_mark_is_a_write_for_the_holder_only(scripts: Scripts) -> None:
    """What replicas confirm is that this token holds the lock."""
    fence = scripts.acquire("a")[1]
    for token, written in (("b", 0), ("a", 1)):
        before = scripts.state()
        assert scripts.run(MARK, token) == written
        after = scripts.state()
        assert after._replace(left=before.left, fence=fence) == before
        assert ((after.fence or 0) > fence) == written


# -- VOTE ------------------------------------------------------------------------------------------


def test_vote(scripts: Scripts) -> None:
    floor, own = 2**52, VOTE_KEYS[-1]
    for _ in range(2):
        won, fence, at = scripts.run(VOTE, "a", LIFETIME, "attempt", floor, keys=VOTE_KEYS)
        assert (won, fence) == (1, floor)
        assert abs(at - scripts.now()) < TOLERANCE * 1000
        assert scripts.client.get(own) == b"%d" % floor
        assert scripts.state().owner == {b"attempt": b"attempt"}
        assert scripts.lasts(KEYS.lock, LIFETIME)
        assert scripts.lasts(own, DAY)
        scripts.client.pexpire(KEYS.lock, GRANT)
        floor += 1
    lost, left, at = scripts.run(VOTE, "a", LIFETIME, "another", floor, keys=VOTE_KEYS)
    assert lost == 0
    assert abs(left - GRANT) < TOLERANCE
    assert abs(at - scripts.now()) < TOLERANCE * 1000
    assert scripts.lasts(KEYS.lock, GRANT)
    assert scripts.lasts(own, DAY)


@pytest.mark.parametrize(
    ("kept", "fence"),
    [(2**52 + 7, 2**52 + 8), *((each, 2**52) for each in ("x", "nan", "inf", 2**53, None))],
)
def test_the_fence_of_a_vote_follows_the_last_vote(
    scripts: Scripts, kept: str | int | None, fence: int
) -> None:
    """If one can count on from that, and whatever other locks of one of the servers have increased
    its last fence to: else those of several servers would not be equal."""
    scripts.client.zadd(KEYS.held_index, {LAST_FENCE: 2**52 + 70})
    if kept is None:
        scripts.client.hset(VOTE_KEYS[-1], "another", "type")
    else:
        scripts.client.set(VOTE_KEYS[-1], kept)
    assert scripts.run(VOTE, "a", LIFETIME, "x", 2**52, keys=VOTE_KEYS)[1] == fence


@pytest.mark.parametrize("grants", [[], ["void:1"]])
def test_vote_for_a_random_token_keeps_no_attempt(scripts: Scripts, grants: list[str]) -> None:
    for each in grants:
        scripts.client.rpush(KEYS.grants, each)
    for _ in range(2):
        assert scripts.run(VOTE, "a", LIFETIME, "", 1, keys=VOTE_KEYS)[0] == 1
    assert (scripts.state().lock, scripts.state().grants) == (b"a", [])
    assert (scripts.state().owner, scripts.state().index) == ({}, [b"name"])
    assert scripts.run(VOTE, "b", LIFETIME, "", 1, keys=VOTE_KEYS)[0] == 0


# -- Redis out of memory ---------------------------------------------------------------------------


@pytest.fixture
def full(own_server: RedisServer) -> Iterator[Scripts]:
    """``a`` holds the lock, ``w`` waits, the owner is described, and there is no room for more."""
    with own_server.client() as client:
        scripts = Scripts(client)
        scripts.acquire("a", GRANT)
        scripts.acquire("waiting", waiter="w")
        client.hset(KEYS.owner, "kept", "field")
        client.config_set("maxmemory", 1)
        yield scripts


@pytest.mark.parametrize("how", ["RELEASE", "RESET", "WATCH"])
def test_a_lock_is_passed_on_and_taken_out_of_memory(full: Scripts, how: str) -> None:
    if how == "RELEASE":
        assert full.release("a") == 1
    elif how == "RESET":
        assert full.run(RESET, "next", GRANT, "a", 2**53) == 1
    else:
        full.client.delete(KEYS.lock)
        assert full.run(WATCH, "w", ALIVE, "next", GRANT)[2] == 1
    assert full.state().grants
    assert full.run(TAKE_GRANT, "next", LIFETIME, "w", "chosen", "x", 2**52) == 1
    assert full.state().lock == b"chosen"


@pytest.mark.parametrize("lifetime", [0, LIFETIME])
def test_a_holder_keeps_its_lock_and_description_out_of_memory(
    full: Scripts, lifetime: int
) -> None:
    assert full.run(RENEW, "a", lifetime, "", "", "", "host", "here") > 0
    assert set(full.state().owner) == {b"kept", b"host", b"seen"}
    assert full.run(MARK, "a") == 1
    assert full.acquire("a")[0] == 1


@pytest.mark.parametrize("token", ["", "b"])
def test_leave_wakes_out_of_memory(full: Scripts, token: str) -> None:
    full.run(LEAVE, token, LIFETIME, "", "w", keys=(*KEYS, WAKE))
    assert full.client.lrange(WAKE, 0, -1) == [b"leave"]


def test_vote_out_of_memory(full: Scripts) -> None:
    """The lock is passed on by one server only: the others must not refuse its next holder."""
    full.client.delete(KEYS.lock)
    assert full.run(VOTE, "b", LIFETIME, "attempt", 1, keys=VOTE_KEYS)[0] == 1


def test_acquire_is_refused_as_a_whole_out_of_memory(full: Scripts) -> None:
    full.release("a")
    full.client.delete(KEYS.lock, KEYS.grants)
    before = full.state()
    with pytest.raises(redis.exceptions.RedisError):
        full.acquire("b")
    assert full.state() == before
