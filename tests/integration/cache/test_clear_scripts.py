"""The scripts that empty a database: what each answers, and what is in Redis afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_redis_lock.ops.inventory import CLEAR, DELETE_UNHELD
from django_redis_lock.ops.inventory.listing import EXISTING
from django_redis_lock.protocol.keys import INDEX, LAST_FENCE, index_key, lock_keys, slot_tag
from django_redis_lock.protocol.lock_scripts import ACQUIRE
from django_redis_lock.protocol.script import Script, script

ONE, OTHER = lock_keys(b"one"), lock_keys(b"other")
#: Replaces, in a script after it, the answer to one command.
ANSWERING = """
local real = redis
local function answer(call)
  return function(command, ...)
    if command == '%s' then return %s end
    return real[call](command, ...)
  end
end
local redis = {call = answer('call'), pcall = answer('pcall')}
"""


class Database:
    """Two locks that are held, one of them for ever, and a value."""

    def __init__(self, client: redis.Redis, on_cluster: bool) -> None:
        self.client, self.on_cluster = client, on_cluster
        self.indexes = [index_key(INDEX, slot) if on_cluster else INDEX for slot in (1, 2)]
        for keys, index, lifetime in zip((ONE, OTHER), self.indexes, (60_000, None), strict=True):
            client.set(keys.lock, "token", px=lifetime)
            client.set(keys.owner, "7", px=60_000)
            client.zadd(index, {keys.lock: 1, LAST_FENCE: 7})
        client.set("value", "stays not")
        client.set(slot_tag(1), "nor this")
        self.kept = {*self.indexes, ONE.lock, ONE.owner, OTHER.lock, OTHER.owner}

    def size(self, *keys: bytes) -> int:
        return sum(len(self.client.dump(key) or b"") for key in {*keys} or self.kept)

    def clear(self, most: int = 9, room: int = 10**6, script: Script = CLEAR) -> Any:
        companions = ONE.owner, ONE.grants, OTHER.owner
        if self.on_cluster:
            tags = slot_tag(1), slot_tag(2), slot_tag(3)
            words = (most, room, 3, INDEX, *tags, *companions)
            return self.client.eval(script.source, 0, *words)
        return self.client.eval(script.source, 1, INDEX, most, room, 0, *companions)

    def keys(self) -> set[bytes]:
        return set(self.client.keys())


@pytest.fixture(params=[False, True], ids=["one server", "a cluster"])
def database(client: redis.Redis, request: pytest.FixtureRequest) -> Database:
    return Database(client, request.param)


def test_clear_keeps_the_locks_as_they_are(database: Database) -> None:
    assert database.clear() == 1
    assert database.keys() == database.kept
    client = database.client
    assert 0 < client.pttl(ONE.lock) <= 60_000
    assert 0 < client.pttl(OTHER.owner) <= 60_000
    assert client.pttl(OTHER.lock) == -1
    assert (client.get(ONE.lock), client.get(OTHER.owner)) == (b"token", b"7")
    assert client.zrange(database.indexes[0], 0, 0) == [ONE.lock]
    assert client.zscore(database.indexes[1], LAST_FENCE) == 7


def test_clear_needs_no_room_for_indexes_without_locks(database: Database) -> None:
    """A cluster's slot keeps its index when it has been used once."""
    for keys, index in zip((ONE, OTHER), database.indexes, strict=True):
        database.client.delete(*keys)
        database.client.zrem(index, keys.lock)
    assert database.clear(room=0) == 1
    assert database.keys() == set()


def test_clear_keeps_at_most_so_many_locks(database: Database) -> None:
    before, most = database.keys(), 1 if database.on_cluster else 2
    assert database.clear(most=most - 1) == 0
    assert database.keys() == before
    assert database.clear(most=most) == 1


def test_clear_keeps_at_most_so_many_bytes(database: Database) -> None:
    before = database.keys()
    for room in (0, database.size(*database.indexes), database.size() - 1):
        assert database.clear(room=room) == 0
        assert database.keys() == before
    assert database.clear(room=database.size()) == 1


def test_clear_needs_no_room_for_locks_that_have_ended(database: Database) -> None:
    database.client.delete(*database.kept - {*database.indexes})
    assert database.clear(room=database.size(*database.indexes)) == 1


def test_clear_that_may_not_read_a_lock_leaves_everything(database: Database) -> None:
    before = database.keys()
    refused = script(ANSWERING % ("DUMP", "{err = 'NOPERM no permissions'}") + CLEAR.source)
    with pytest.raises(redis.ResponseError, match="NOPERM"):
        database.clear(script=refused)
    assert database.keys() == before


def test_clear_leaves_out_what_another_node_has(database: Database) -> None:
    answer = "{err = 'ERR Script attempted to access a non local key in a cluster node'}"
    moved = script(ANSWERING % ("DUMP", answer) + CLEAR.source)
    assert database.clear(script=moved) == 1
    assert database.keys() == set()


def test_a_lock_in_its_last_millisecond_still_ends(database: Database) -> None:
    """It has 0 ms left, which as a lifetime would mean none at all."""
    ending = script(ANSWERING % ("PTTL", "0") + CLEAR.source)
    assert database.clear(script=ending) == 1
    assert -1 not in [database.client.pttl(key) for key in database.kept]


def test_a_lock_in_its_last_millisecond_does_not_stay_on_the_index(client: redis.Redis) -> None:
    """Without an end it would not be looked at any more. One use in 64 looks."""
    client.zadd(INDEX, {"ending": 1})
    client.set("ending", "token", px=60_000)
    time = ANSWERING % ("TIME", "{'1700000000', '000064'}")
    source = time + ANSWERING % ("PTTL", "0") + ACQUIRE.source
    assert client.eval(source, 5, *ONE, "token", 60_000, "", "", 0)[0] == 1
    assert client.zscore(INDEX, "ending") == 1_700_000_000_000


def test_what_belongs_to_a_held_lock_is_not_deleted(client: redis.Redis) -> None:
    client.mset({"free": 1, "held": 1, "of the held one": 1, "of a free one": 1})
    client.zadd(INDEX, {"held": 1})
    keys = "free", "held", "of the held one", "of a free one", "missing"
    locks = "free", "held", "held", "gone", "missing"
    assert client.eval(DELETE_UNHELD.source, 6, *keys, INDEX, *locks) == 2
    assert {*client.keys()} == {b"held", b"of the held one", INDEX}


def test_which_indexes_have_locks(client: redis.Redis) -> None:
    for slot in (1, 3):
        client.zadd(index_key(INDEX, slot), {"lock": 1})
    client.zadd(index_key(INDEX, 3), {LAST_FENCE: 7})
    client.zadd(index_key(INDEX, 4), {LAST_FENCE: 7})
    tags = [slot_tag(slot) for slot in range(5)]
    assert client.eval(EXISTING.source, 0, INDEX, *tags) == [2, 4]
