"""Key names: every companion of a lock shares its cluster slot, and is no other lock's."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from django_redis_lock.locking import keys
from django_redis_lock.locking.keys import (
    INDEX,
    companion,
    flight_key,
    flight_stream,
    key_of_flight,
    lock_keys,
    wake_key,
)

WAITER = b"5a0f3c"
TOKEN = b"b7e1d2"

#: Names with and without a hash tag, and with everything that only looks like one.
NAMES = [
    b"report",
    b":1:lock:report",
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

braced = st.text("{}:a1", min_size=1, max_size=8).map(str.encode)
names = st.one_of(st.sampled_from(NAMES), braced, st.binary(min_size=1, max_size=20))
thorough = settings(max_examples=500, derandomize=True, database=None, deadline=None)


def companions(name: bytes) -> list[bytes]:
    """All keys that are kept for a lock, or a cache key, called ``name``."""
    lock = lock_keys(name)
    return [
        *(lock.grants, lock.waiters, lock.fence, lock.owner),
        wake_key(name, WAITER),
        flight_key(name),
        flight_stream(name, TOKEN),
    ]


def shown(name: bytes) -> str:
    return repr(name[:20])


@pytest.mark.parametrize("name", NAMES, ids=shown)
def test_companions_share_the_slot_of_their_lock(name: bytes) -> None:
    assert {key_slot(key) for key in companions(name)} == {key_slot(name)}


@thorough
@given(names)
def test_companions_share_the_slot_of_any_lock(name: bytes) -> None:
    assert {key_slot(key) for key in companions(name)} == {key_slot(name)}


@pytest.mark.parametrize("name", NAMES, ids=shown)
def test_the_companions_of_a_lock_are_distinct(name: bytes) -> None:
    assert len({name, *companions(name)}) == 1 + len(companions(name))


def test_no_two_locks_share_a_companion() -> None:
    everything = [key for name in NAMES for key in companions(name)]
    assert len(set(everything)) == len(everything)


@thorough
@given(names, names)
def test_no_two_locks_of_any_names_share_a_companion(one: bytes, other: bytes) -> None:
    if one != other:
        assert not set(companions(one)) & set(companions(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a", b"{a}"),
        (b"a", b"{a}:"),
        (b"a:", b"{a}"),
        (b"{a}", b"{a}:"),
        (b"a", b"{a}:grants"),
        (b"a}b", b"{a}b"),
    ],
    ids=shown,
)
def test_names_that_look_like_companions_of_another(one: bytes, other: bytes) -> None:
    assert not set(companions(one)) & set(companions(other))


@pytest.mark.parametrize("name", [b"a}b:", b"a}b::", b"a}b}:"], ids=shown)
def test_a_name_that_looks_like_the_long_form_of_another(name: bytes) -> None:
    prefix = lock_keys(name).grants.removesuffix(b"grants")
    other = prefix.removesuffix(b"|")
    assert not set(companions(name)) & set(companions(other))


def test_the_names_an_operator_sees() -> None:
    assert lock_keys(b"report") == (
        b"report",
        b"{report}:grants",
        b"{report}:waiters",
        b"{report}:fence",
        b"{report}:owner",
        INDEX,
    )
    assert lock_keys(b"{shop:7}:report").grants == b"{shop:7}:report::grants"
    assert companion(b"report", "flight") == flight_key(b"report") == b"{report}:flight"


@thorough
@given(names)
def test_whose_flight_it_is(name: bytes) -> None:
    assert key_of_flight(flight_key(name)) == name
    assert key_of_flight(name + b":flight") is None or name[-1:] in (b":", b"}")


def test_names_are_not_remembered_for_ever() -> None:
    for number in range(3000):
        lock_keys(b"report-%d" % number)
    assert keys._prefix.cache_info().currsize <= 1024
    assert lock_keys.cache_info().currsize <= 1024
