"""Locks with ``limit=2``: processes die or freeze, replies are lost, Redis loses its data.

Place 1 is held throughout where the test is about place 2, whose number a caller without a reply
does not know. Grants live for a minute where one that nobody takes would otherwise not be noticed.
"""

from __future__ import annotations

from typing import Any

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.contrib.limit import (
    PLACE_ACQUIRE,
    PLACE_EXTEND,
    PLACE_RELEASE,
    PLACE_TAKE_GRANT,
)
from django_redis_lock.locking import Renewal
from django_redis_lock.locking.lock import PendingReply, ThreadQueue
from django_redis_lock.protocol import lock_keys
from django_redis_lock.protocol.lock_scripts import RENEW
from tests.faults.proxy import Proxy
from tests.faults.test_processes import NAME, until_blocked, wait
from tests.holding import hurry_until, renew
from tests.processes import PATIENCE, processes, until
from tests.redis_server import RedisServer
from tests.support.backends import places as waiting
from tests.support.background import Background
from tests.support.interrupts import Interrupt

pytestmark = [pytest.mark.invariant("S7"), pytest.mark.usefixtures("watched_often")]

GRANT = 60.0
KEYS = lock_keys(NAME.encode())
SECOND = KEYS.at_place(2).lock
OPTIONS: dict[str, Any] = {"timeout": 60, "limit": 2, "thread_local": False}


def lock_of(client: redis.Redis, **options: Any) -> Lock:
    return Lock(client, NAME, **{**OPTIONS, **options})


def held(client: redis.Redis, **options: Any) -> Lock:
    lock = lock_of(client, **options)
    assert lock.acquire(blocking=False)
    return lock


def waiter(client: redis.Redis, **options: Any) -> Background:
    """Waits for a place; its result is the lock that it has acquired."""
    lock, before = lock_of(client, **options), waiting(NAME)
    background = Background(lambda: lock.acquire(blocking_timeout=PATIENCE) and lock)
    until(lambda: waiting(NAME) > before or background.done)
    return background


def free(client: redis.Redis) -> None:
    """Place 2 is free, or becomes free without anybody's help."""
    lock = lock_of(client, grant_timeout=GRANT)
    assert lock.acquire(blocking_timeout=PATIENCE / 2)
    assert lock.place == 2
    lock.release()
    assert [holder.place for holder in lock.holders()] == [1]


# -- processes ---------------------------------------------------------------------------------


def test_a_frozen_waiter_keeps_one_place_from_the_others_and_does_not_believe_it_holds(
    client: redis.Redis, redis_server: RedisServer
) -> None:
    brief = {"grant_timeout": 0.5}
    holders = [held(client, **brief) for _ in range(2)]
    with processes(wait, redis_server.url, {"timeout": 60, "limit": 2, **brief}) as (frozen,):
        frozen.go()
        until_blocked(client)
        second = waiter(client, **brief)
        until_blocked(client, 2)
        third = waiter(client, **brief)
        frozen.pause()
        for lock in holders:
            lock.release()
        taken = [second.result(), third.result()]
        assert {lock.place for lock in taken} == {1, 2}
        assert min(lock.fence for lock in taken) > holders[1].fence
        frozen.resume()
        # It asks, learns that its grant is over, and waits again.
        until_blocked(client)
        assert not client.exists("log")
        assert all(lock.owned() for lock in taken)
        taken[0].release()
        assert frozen.hear() == "holds"
        assert frozen.result() > max(lock.fence for lock in taken)


# -- lost replies ------------------------------------------------------------------------------


@pytest.fixture
def first(client: redis.Redis) -> Lock:
    """Holds place 1, and never expires."""
    return held(client, timeout=None)


tokens = pytest.mark.parametrize("token", [None, "chosen"])


@tokens
def test_a_lost_reply_to_acquire_is_made_up_for(
    client: redis.Redis, shaky: redis.Redis, proxy: Proxy, first: Lock, token: str | None
) -> None:
    rules = [proxy.lose_reply(PLACE_ACQUIRE), proxy.lose_reply(PLACE_RELEASE)]
    lock = lock_of(shaky, timeout=None, id=token)
    assert lock.acquire(blocking=False)
    assert lock.place == 2
    assert lock.fence > first.fence
    assert client.get(SECOND) == lock.local.token
    lock.release()
    assert not any(rule.left for rule in rules)
    free(client)
    assert first.owned()


@tokens
@pytest.mark.parametrize("patience", [0, 0.5])
def test_nothing_is_left_of_an_acquire_without_replies(
    client: redis.Redis,
    shaky: redis.Redis,
    proxy: Proxy,
    first: Lock,
    token: str | None,
    patience: float,
    pace: int,
) -> None:
    proxy.lose_reply(PLACE_ACQUIRE, times=2)
    with pytest.raises(redis.ConnectionError):
        lock_of(shaky, timeout=None, id=token).acquire(blocking_timeout=patience * pace)
    free(client)
    assert first.owned()


@tokens
@pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
def test_a_granted_place_has_its_full_lifetime(
    client: redis.Redis,
    shaky: redis.Redis,
    proxy: Proxy,
    first: Lock,
    token: str | None,
    kind: str,
    pace: int,
) -> None:
    holder = held(client)
    background = waiter(shaky, timeout=600, grant_timeout=2 * pace, id=token)
    until_blocked(client)
    getattr(proxy, kind)(PLACE_TAKE_GRANT)
    holder.release()
    lock = background.result()
    until(lambda: lock.lost or client.pttl(SECOND) > 500_000)
    assert lock.owned()
    lock.release()
    free(client)


@tokens
def test_a_lost_reply_to_release_takes_nothing_from_the_next_holders(
    client: redis.Redis, shaky: redis.Redis, proxy: Proxy, first: Lock, token: str | None
) -> None:
    """The waiter has place 2, and then a lock with the same chosen token has place 1."""
    lock = held(shaky, id=token)
    background = waiter(client)
    until_blocked(client)
    proxy.lose_reply(PLACE_RELEASE, times=2)
    with pytest.raises(redis.ConnectionError):
        lock.release()
    taken = background.result()
    first.release()
    again = held(client, id=token)
    assert (taken.place, again.place) == (2, 1)
    lock.release()
    assert taken.owned()
    assert again.owned()


def test_what_a_holder_sends_is_done_once(
    client: redis.Redis, shaky: redis.Redis, proxy: Proxy, first: Lock
) -> None:
    lock = held(shaky, timeout=600)
    rule = proxy.lose_reply(PLACE_EXTEND)
    lock.extend(600)
    assert rule.left == 0
    assert 1100 < client.pttl(SECOND) / 1000 <= 1200
    lock.release()
    renewed = held(shaky, timeout=60, renew=True)
    rules = [proxy.lose_reply(RENEW), proxy.lose_request(RENEW)]
    for rule in rules:
        hurry_until(lambda rule=rule: rule.applied.acquire(blocking=False), Renewal)
    renew(client, SECOND)
    renewed.ensure_held()


# -- a waiter with a smaller limit gets a place above it, and is interrupted ---------------------


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("when", ["unread", "taken", "taken by a chosen token"])
def test_a_grant_above_the_limit_is_given_back(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch, limit: int, when: str
) -> None:
    """No script of this limit looks for a token there."""

    def interrupted(*args: Any) -> None:
        raise Interrupt

    confirmed = PendingReply.confirmed

    def interrupted_later(self: PendingReply) -> None:
        assert confirmed(self)
        raise Interrupt

    holders = [held(client, limit=3, grant_timeout=GRANT) for _ in range(3)]
    lock = lock_of(
        client,
        limit=limit,
        timeout=None,
        grant_timeout=GRANT,
        id="chosen" if "by" in when else None,
    )
    with monkeypatch.context() as patch:
        if when == "unread":
            patch.setattr(ThreadQueue, "reply", interrupted)
        else:
            patch.setattr(PendingReply, "confirmed", interrupted_later)
            patch.setattr("django_redis_lock.locking.waiting.MAX_GRANT_AGE_SECONDS", 0.0)
        background = Background(lock.acquire)
        until_blocked(client)
        holders[2].release()
        with pytest.raises(Interrupt):
            background.result()
    until(lambda: not client.exists(KEYS.at_place(3).lock))
    assert all(holder.owned() for holder in holders[:2])
