"""Key names: every companion of a lock shares its cluster slot, and no key is another's companion.

What holds: let ``names`` be the keys that are not refused, for locks and cache values alike, and
``companions`` all that is kept beside any of them. (1) No name is a companion. (2) A companion
belongs to one name and is one part of it. (3) Neither is a key of the whole database.
"""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from django_redis_lock.protocol.keys import (
    FIGURES,
    FLIGHTS,
    INDEX,
    events_key,
    flight_key,
    flight_leader,
    flight_stream,
    flights_pattern,
    index_key,
    is_reserved,
    key_of_companion,
    keys_at,
    lock_keys,
    process_key,
    quorum_fence_key,
    wake_key,
)
from tests.lanes import examples

TOKEN = b"b7e1d2"

#: Names with and without a hash tag, and with everything that only looks like one.
NAMES = [
    b"report",
    b":lock:1:report",
    b"{shop:7}:report",
    b"shop{7}report",
    b"{a}{b}",
    b"{",
    b"}",
    b"{}",
    b"}{",
    b"{}a",
    b"{}{a}",
    b"a{b",
    b"a}b",
    b"a}b{c",
    b"a}{b}c",
    b"{{a}}",
    b"{a{b}c}",
    b"a b\r\n",
    "Zwölf Boxkämpfer".encode(),
    b"\x00\xff",
    b"x" * 10_000,
]

PARTS = (
    b"grants waiters fence owner events flight leader wake: done: wake:a done:a place:3 trial"
).split()

#: What looks like a key of ours, and nearly so: pieces of all forms, put together at random.
hostile = st.lists(
    st.sampled_from([b"{", b"}", b"{}", b"|", b":", b"a", b"b", b"7", b"%7C", b"\n", *PARTS]),
    min_size=1,
    max_size=9,
).map(b"".join)
candidates = st.one_of(st.sampled_from(NAMES), hostile, st.binary(min_size=1, max_size=20))
names = candidates.filter(lambda key: not is_reserved(key))
thorough = settings(max_examples=examples(400), derandomize=True, database=None, deadline=None)


def companions(name: bytes, token: bytes = TOKEN) -> list[bytes]:
    """All keys that are kept for a lock, or a cache key, called ``name``."""
    return [
        *lock_keys(name)[1:4],
        *(key for number in (2, 13) for key in lock_keys(name).at_place(number)[0:4:3]),
        quorum_fence_key(name),
        events_key(name),
        wake_key(name, token),
        flight_key(name),
        flight_leader(name),
        flight_stream(name, TOKEN),
    ]


def shown(name: bytes) -> str:
    return repr(name[:20])


def test_each_lock_has_companions_of_its_own_in_its_slot() -> None:
    assert not any(map(is_reserved, NAMES))
    for name in NAMES:
        assert {key_slot(key) for key in companions(name)} == {key_slot(name)}
    everything = [key for name in NAMES for key in (name, *companions(name))]
    assert len(set(everything)) == len(everything)


@thorough
@given(names)
def test_companions_share_the_slot_of_any_lock(name: bytes) -> None:
    assert {key_slot(key) for key in companions(name)} == {key_slot(name)}


@thorough
@given(names, names, candidates)
def test_no_two_names_share_a_companion(one: bytes, other: bytes, token: bytes) -> None:
    kept = companions(one, token)
    assert len({one, *kept}) == 1 + len(kept)
    assert one == other or not set(kept) & set(companions(other, token))


@thorough
@given(names, st.integers(1, 1000))
def test_the_keys_of_a_place_say_which_it_is(name: bytes, number: int) -> None:
    keys = lock_keys(name).at_place(number)
    assert (keys.name, keys.place) == (name, number)
    assert keys_at(keys.lock) == keys
    assert lock_keys(name)[1:3] == keys[1:3]


@thorough
@given(names, candidates)
def test_a_companion_is_read_in_one_way(name: bytes, token: bytes) -> None:
    """So it is no other name's, and no name: see the next test."""
    assert {key_of_companion(key) for key in companions(name, token)} == {name}


@thorough
@given(candidates)
def test_no_name_is_a_companion(key: bytes) -> None:
    belongs_to = key_of_companion(key)
    if belongs_to is None:
        assume(not is_reserved(key))
        assert companions(key)
        return
    for build in (lock_keys, flight_key, flight_leader, events_key):
        with pytest.raises(ValueError, match="no name for a lock or a cache value"):
            build(key)


@thorough
@given(names, candidates, candidates)
def test_no_name_is_a_companion_of_a_name_built_around_it(
    name: bytes, token: bytes, more: bytes
) -> None:
    for companion in companions(name, token):
        for key in (companion, companion + more, more + companion):
            if key_of_companion(key) is None:
                assert key not in companions(name, token)
            else:
                assert is_reserved(key)


@pytest.mark.parametrize(
    "key",
    [
        b"{a}:fence",
        b"{}:grants",
        b"{a{b}:owner",
        b"{a}:wake:x",
        b"{a}:done:x",
        b"{a}|{a}|fence",
        b"{a}|b{a}:c|d|flight",
        INDEX,
        FLIGHTS,
        index_key(INDEX, 77),
        *FIGURES.values(),
        process_key("a"),
    ],
    ids=shown,
)
def test_reserved_keys(key: bytes) -> None:
    assert is_reserved(key)
    with pytest.raises(ValueError, match="no name for a lock or a cache value"):
        lock_keys(key)


@pytest.mark.parametrize(
    "key", [b"{a}:fences", b"{a}::fence", b":1:{a}:fence", b"{a}|b|fence", b"x}:fence"], ids=shown
)
def test_keys_that_only_look_reserved(key: bytes) -> None:
    assert not is_reserved(key)


def test_the_names_an_operator_sees() -> None:
    assert lock_keys(b"report") == (
        b"report",
        b"{report}:grants",
        b"{report}:waiters",
        b"{report}:owner",
        INDEX,
    )
    assert lock_keys(b"{shop:7}:report").grants == b"{shop:7}|{shop:7}:report|grants"
    assert flight_key(b"report") == b"{report}:flight"


def test_flights_are_found_by_a_pattern_of_their_keys() -> None:
    glob = flights_pattern(b"a*c").decode()
    assert glob == "{*a*c[}|]*flight"
    for key in (b"abc", b"{a}c", b"a}c"):
        assert fnmatch.fnmatchcase(flight_key(key).decode(), glob)


def test_names_are_not_remembered_forever() -> None:
    for number in range(3000):
        lock_keys(b"report-%d" % number)
    assert lock_keys.cache_info().currsize <= 1024
