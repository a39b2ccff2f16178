"""A holder that has lost its lock is told why: in one line of the log, one event, and the
exception. Each cause, for each kind of lock, noticed by the keeper or by the holder itself."""

from __future__ import annotations

import asyncio
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, LockLost, LockNotOwnedError, Redlock, events
from django_redis_lock.clock import time
from django_redis_lock.contrib.redlock.votes import majority
from django_redis_lock.contrib.several_names import MultiLock
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import keeper
from django_redis_lock.ops.inventory import Outcome, inspect, list_held, release
from django_redis_lock.protocol.identity import process_id
from django_redis_lock.protocol.keys import lock_keys, process_key
from tests.faults.proxy import Proxy
from tests.holding import Renewals, hurry, settle
from tests.processes import until
from tests.redis_server import RedisServer
from tests.support.redlocks import AMPLE, clients, five

__all__ = ["clients", "five"]

NAME = "why"


def by_a_person(client: redis.Redis) -> None:
    (lock,) = (each for each in list_held(client, b"").locks if each.key.startswith(b"why"))
    assert release(client, lock.key, lock.owner.id, by="ops (admin): it hangs") is Outcome.RELEASED


def by_code(client: redis.Redis) -> None:
    assert Lock(client, NAME).reset()


def by_del(client: redis.Redis) -> None:
    assert client.delete(NAME)


def by_set(client: redis.Redis) -> None:
    assert client.set(NAME, "of another program")


def by_flushdb(client: redis.Redis) -> None:
    assert client.flushdb()


def by_flushdb_and_others(client: redis.Redis) -> None:
    """The index begins anew, with a later fence."""
    assert client.flushdb()
    with Lock(client, "other", 60):
        pass


DELETED = "its key was deleted or replaced by another program, or evicted"
NO_DATA = "Redis has lost its data: a restart, a failover, FLUSHDB or an eviction"
CAUSES: dict[Callable[[redis.Redis], None], str] = {
    by_a_person: "released by force by ops (admin): it hangs",
    by_code: "released by force by reset() in ",
    by_del: DELETED,
    by_set: DELETED,
    by_flushdb: NO_DATA,
    by_flushdb_and_others: NO_DATA,
}
ends = pytest.mark.parametrize("end", CAUSES, ids=lambda end: end.__name__)


class Losses:
    def __init__(self, caplog: Any) -> None:
        self._caplog = caplog
        self.events: list[events.Lost] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, events.Lost):
            self.events.append(event)

    @property
    def lines(self) -> list[str]:
        lost = (r for r in self._caplog.records if r.name == "django_redis_lock.lost")
        return [record.getMessage() for record in lost]

    def expect(self, reason: str, number: int = 1) -> None:
        until(lambda: self.events)
        until(lambda: min(len(self.lines), len(self.events)) >= number)
        assert len(self.lines) == len(self.events) == number
        assert all(reason in line for line in self.lines)
        assert all(reason in event.reason for event in self.events)


@pytest.fixture
def losses(caplog: Any) -> Iterator[Losses]:
    caplog.set_level(logging.ERROR, "django_redis_lock.lost")
    found = Losses(caplog)
    events.subscribe(found)
    yield found
    events.unsubscribe(found)


def described(client: redis.Redis, key: bytes = NAME.encode()) -> None:
    """Its holder has described itself, and its process has sent a heartbeat."""
    hurry()
    until(lambda: client.exists(lock_keys(key).owner))
    since = time.monotonic()

    def answered() -> bool:
        beats = [job for job in keeper().jobs() if isinstance(job, Heartbeat)]
        late = [beat for beat in beats if beat.sent_at < since]
        for beat in late:
            keeper().reschedule(beat, time.monotonic())
        # One that is still to come would be sent after the loss.
        quiet = not keeper().under_way() and all(beat.due > time.monotonic() for beat in beats)
        return bool(beats) and not late and quiet

    until(answered)
    until(lambda: client.exists(process_key(process_id())))


def last_events(client: redis.Redis) -> list[tuple[str, str]]:
    return [(event.what, event.note) for event in inspect(client, NAME.encode()).events]


@ends
@pytest.mark.parametrize(
    "options",
    [{}, {"limit": 3}, {"reentrant": True}, {"renew": False}, {"lock_class": Lock}],
    ids=["plain", "places", "reentrant", "not renewed", "several names"],
)
def test_what_a_thread_is_told(
    client: redis.Redis, losses: Losses, end: Any, options: dict[str, Any]
) -> None:
    told = threading.Event()
    reasons: list[str] = []

    def on_lost() -> None:
        reasons.append(lock.lost_reason)
        told.set()

    several = "lock_class" in options
    kind, name = (MultiLock, [NAME, "with"]) if several else (Lock, NAME)
    given = {"renew": True, "on_lost": on_lost, "thread_local": False, **options}
    lock: Any = kind(client, name, 60, **given)
    assert lock.acquire()
    described(client)
    end(client)
    hurry()
    until(told.is_set)
    reason = CAUSES[end]
    losses.expect(reason, number=2 if several else 1)  # One for each lock.
    assert reason in reasons[0]
    assert several or reasons[0].startswith(reason)
    with pytest.raises(LockLost, match="not held any more") as caught:
        lock.ensure_held()
    assert reason in str(caught.value)
    assert caught.value.reason == reasons[0]
    assert pickle.loads(pickle.dumps(caught.value)).reason == reasons[0]
    with pytest.raises(LockNotOwnedError, match="no longer owned") as caught:
        lock.release()
    assert several or caught.value.reason == reasons[0]
    if not several:  # Of several, the event is kept of the name whose loss was noticed first.
        keeper().flush()
        kept = [what for what, _ in last_events(client)]
        assert kept == (["reset"] if end in (by_a_person, by_code) else ["lost"])


@ends
@pytest.mark.parametrize("verb", ["release", "extend", "reacquire"])
def test_what_a_holder_is_told_that_notices_first(
    client: redis.Redis, losses: Losses, end: Any, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(client, NAME, 60, renew=True)
    assert lock.acquire()
    described(client)
    for job in keeper().jobs():  # It is a moment late.
        monkeypatch.setattr(type(job), "call", lambda self, now: keeper().discard(self))
    end(client)
    call = {"release": lock.release, "extend": lambda: lock.extend(5), "reacquire": lock.reacquire}
    with pytest.raises(LockNotOwnedError) as caught:
        call[verb]()
    assert caught.value.reason.startswith(CAUSES[end])
    assert CAUSES[end] in str(caught.value)


@ends
def test_what_a_task_is_told(
    client: redis.Redis, redis_server: RedisServer, losses: Losses, end: Any
) -> None:
    async def work() -> None:
        async with redis.asyncio.Redis.from_url(redis_server.url) as connected:
            lock = AsyncLock(connected, NAME, 60, renew=True, cancel_on_lost=True)
            async with lock:
                await asyncio.to_thread(described, client)
                await asyncio.to_thread(end, client)
                hurry()
                await asyncio.sleep(60)

    with pytest.raises(LockLost, match="task was cancelled") as caught:
        asyncio.run(work())
    assert caught.value.reason.startswith(CAUSES[end])
    losses.expect(CAUSES[end])


def test_one_that_expired(client: redis.Redis, losses: Losses) -> None:
    told = threading.Event()
    lock = Lock(client, NAME, 0.3, on_lost=told.set, thread_local=False)
    assert lock.acquire()
    until(told.is_set)
    losses.expect("it expired before it was released")
    with pytest.raises(LockLost, match="it expired before it was released"):
        lock.ensure_held()
    until(lambda: not client.exists(NAME))  # Redis counts from a moment later.
    with pytest.raises(LockNotOwnedError, match="it expired before it was released"):
        lock.release()


def test_a_restart_from_an_older_snapshot(own_server: RedisServer, losses: Losses) -> None:
    """It knows the holder and its process, but not that the lock was renewed since."""
    told, client = threading.Event(), own_server.client()
    lock = Lock(client, NAME, 2, renew=True, on_lost=told.set, thread_local=False)
    assert lock.acquire()
    described(client)
    client.save()
    renewals = Renewals(client, NAME)
    until(lambda: renewals.count() > 3)  # More than its lifetime is over.
    own_server.kill()
    own_server.start()
    until(told.is_set)
    losses.expect(NO_DATA)
    with pytest.raises(LockNotOwnedError, match="Redis has lost its data"):
        lock.release()


@pytest.mark.parametrize("end", [by_a_person, by_code, by_del, by_flushdb])
def test_what_the_holder_of_a_redlock_is_told(
    clients: list[redis.Redis], losses: Losses, end: Any
) -> None:
    told = threading.Event()
    options = {"renew": True, "thread_local": False, "server_timeout": AMPLE}
    lock = Redlock(clients, NAME, 60, on_lost=told.set, **options)
    assert lock.acquire()
    for client in clients:
        described(client)
    for client in clients:
        if end is not by_code:
            end(client)
    if end is by_code:
        assert Redlock(clients, NAME, 60, server_timeout=AMPLE).reset()
    hurry()
    until(told.is_set)
    losses.expect(CAUSES[end])
    with pytest.raises(LockNotOwnedError, match="no longer owned") as caught:
        lock.release()
    assert caught.value.reason.startswith(CAUSES[end])


def test_a_user_without_the_right_to_events_is_told(own_server: RedisServer) -> None:
    told = threading.Event()
    with own_server.client() as admin:
        keys = [*lock_keys(NAME.encode())]
        admin.acl_setuser("narrow", enabled=True, nopass=True, categories=["+@all"], keys=keys)
        client = redis.Redis.from_url(own_server.url, username="narrow", password="x")
        lock = Lock(client, NAME, 60, renew=True, thread_local=False, on_lost=told.set)
        assert lock.acquire()
        hurry()
        until(lambda: admin.exists(lock.keys.owner))
        hurry()
        assert not lock.lost
        by_del(admin)
        hurry()
        assert told.wait(60)
        assert lock.lost_reason == DELETED


# -- Redis freezes after the reply by which the keeper learns of the loss --------------------------


def of_a_task(clients: list[redis.Redis], told: threading.Event) -> Any:
    """Its event loop runs in a thread until the task hears of the loss."""
    acquired = threading.Event()

    async def hold() -> None:
        address = clients[0].connection_pool.connection_kwargs
        async with redis.asyncio.Redis(port=address["port"]) as connected:
            lost = asyncio.Event()
            lock = AsyncLock(connected, NAME, 60, renew=True, on_lost=lost.set)
            assert await lock.acquire()
            acquired.set()
            await lost.wait()
            reasons.append(lock.lost_reason)
            told.set()

    reasons: list[str] = []
    threading.Thread(target=lambda: asyncio.run(hold()), daemon=True).start()
    assert acquired.wait(60)
    return lambda: reasons[0]


def of_a_thread(kind: Any, *name: Any, **options: Any) -> Any:
    def take(clients: list[redis.Redis], told: threading.Event) -> Any:
        given = {"renew": True, "thread_local": False, "on_lost": told.set, **options}
        where = clients if kind is Redlock else clients[0]
        lock = kind(where, *(name or (NAME,)), 60, **given)
        assert lock.acquire()
        return lambda: lock.lost_reason

    return take


KINDS = {
    "thread": of_a_thread(Lock),
    "task": of_a_task,
    "one of three places": of_a_thread(Lock, limit=3),
    "not renewed": of_a_thread(Lock, renew=False),
    "several names": of_a_thread(MultiLock, [NAME, "with"], lock_class=Lock),
    "several servers": of_a_thread(Redlock, server_timeout=AMPLE),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("end", [by_a_person, by_del, by_flushdb])
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_freezes_then_does_not_delay_on_lost(
    kind: str, end: Any, five: list[RedisServer], losses: Losses
) -> None:
    servers = five[: 3 if kind == "several servers" else 1]
    told = threading.Event()
    with ExitStack() as stack:
        behind = [server.client() for server in servers]
        for client in behind:
            client.flushall()
        proxies = [stack.enter_context(Proxy(server)) for server in servers]
        reason = KINDS[kind]([proxy.client() for proxy in proxies], told)
        for client in behind:
            described(client)
        settle()
        refused = b"*5\r\n"  # See ``history.cause``.
        frozen = [proxy.freeze_after_reply(b"\r\nwhy\r\n", refused) for proxy in proxies]
        for client in behind:
            end(client)
        hurry()
        others = list(frozen)

        def most_are_frozen() -> bool:
            """Which ones is a matter of speed: after that many, no other is called."""
            others[:] = [rule for rule in others if not rule.applied.acquire(blocking=False)]
            return len(frozen) - len(others) >= majority(len(frozen))

        until(most_are_frozen)
        assert told.wait(60)
        assert CAUSES[end] in reason()
        until(lambda: losses.events)
        assert CAUSES[end] in losses.events[0].reason
