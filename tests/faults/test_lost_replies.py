"""The connection breaks between a request and its reply: S3 holds, and no lock is left
behind; nor by a request that reaches Redis after its caller has given it up.

The locks never expire where that would hide what was left behind, and grants live for a minute.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any

import pytest
import redis
import redis.asyncio

from django_redis_lock import (
    AsyncLock,
    Lock,
    LockError,
    LockLost,
    LockNotOwnedError,
    MultiLock,
    Redlock,
)
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib.limit import PLACE_ACQUIRE
from django_redis_lock.contrib.redlock.votes import VOTE
from django_redis_lock.contrib.several_names import ACQUIRE_ALL
from django_redis_lock.keeper import DeferredRelease
from django_redis_lock.locking import Renewal, waiting
from django_redis_lock.protocol import lock_keys
from django_redis_lock.protocol.holder_scripts import HELD, RESET, reset_call
from django_redis_lock.protocol.holders import HolderInfo
from django_redis_lock.protocol.lock_scripts import (
    ACQUIRE,
    EXTEND,
    LEAVE,
    RELEASE,
    RENEW,
    TAKE_GRANT,
)
from django_redis_lock.protocol.script import Call, Script
from django_redis_lock.transport import run as run_call
from tests.faults.proxy import HeldBack, Proxy
from tests.holding import deferred_releases, hurry, hurry_until, renew, until_released
from tests.moved_clock import moved_clock
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.backends import blocked
from tests.support.background import Background
from tests.support.tasks import in_tasks

pytestmark = pytest.mark.invariant("S3")

GRANT = 60.0


def free(client: redis.Redis) -> None:
    """The lock is free, or becomes free without anybody's help."""
    lock = Lock(client, "shaky", timeout=30, grant_timeout=GRANT)
    assert lock.acquire(blocking_timeout=PATIENCE / 2)
    lock.release()
    assert not lock.locked()


@pytest.fixture(params=["threads", "tasks"])
def make(request: pytest.FixtureRequest, shaky: redis.Redis) -> Iterator[Callable[..., Any]]:
    with in_tasks(shaky) as tasks:
        yield tasks.make_lock if request.param == "tasks" else partial(Lock, shaky)


@pytest.mark.parametrize("token", [None, "chosen"])
class TestAcquire:
    @pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
    def test_one_lost_reply_is_made_up_for(
        self, client: redis.Redis, make: Any, proxy: Proxy, token: str | None, kind: str
    ) -> None:
        lock = make("shaky")
        rules = [getattr(proxy, kind)(script) for script in (ACQUIRE, RELEASE)]
        assert lock.acquire(token=token) is True
        assert client.get("shaky") == lock.local.token
        assert lock.owned()
        lock.release()
        assert not any(rule.left for rule in rules)
        free(client)

    @pytest.mark.parametrize("wait", [0, 0.5, None])
    def test_nothing_is_left_behind(
        self,
        client: redis.Redis,
        make: Any,
        proxy: Proxy,
        token: str | None,
        wait: float | None,
        pace: int,
    ) -> None:
        """Both replies are lost, of a lock that never expires."""
        lock = make("shaky", blocking_timeout=wait and wait * pace)
        proxy.lose_reply(ACQUIRE, times=2)
        with pytest.raises(redis.ConnectionError):
            lock.acquire(token=token)
        assert lock.local.token is None
        free(client)

    def test_what_another_holds_by_the_same_token_is_left_alone(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, token: str | None
    ) -> None:
        holder = Lock(client, "shaky")
        holder.acquire(token=token)
        proxy.lose_reply(ACQUIRE, times=2)
        with pytest.raises(redis.ConnectionError):
            Lock(shaky, "shaky").acquire(token=holder.local.token)
        until_released()
        assert holder.owned()
        holder.release()
        free(client)

    def test_a_waiter_whose_question_was_lost_waits_on(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, token: str | None
    ) -> None:
        holder, lock = Lock(client, "shaky", grant_timeout=GRANT), Lock(shaky, "shaky")
        holder.acquire()
        rule = proxy.lose_reply(ACQUIRE)

        def wait() -> bool:
            with_it = lock.acquire(token=token)
            lock.release()
            return with_it

        waiter = Background(wait)
        assert rule.applied.acquire(timeout=PATIENCE)
        until(lambda: client.zcard("{shaky}:waiters") and client.info("clients")["blocked_clients"])
        holder.release()
        assert waiter.result() is True
        free(client)

    def test_a_waiter_asks_again_until_its_deadline_and_leaves_nothing_behind(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, token: str | None, pace: int
    ) -> None:
        """It gets the lock without hearing of it, and in the end not even through."""
        holder = Lock(client, "shaky")
        holder.acquire()
        lock = Lock(shaky, "shaky", grant_timeout=GRANT)
        waiter = Background(lambda: lock.acquire(blocking_timeout=0.8 * pace, token=token))
        until(lambda: blocked(client))
        lost = proxy.lose_reply(ACQUIRE, times=2)
        client.delete("shaky")
        proxy.cut()
        assert lost.applied.acquire(timeout=PATIENCE)
        assert lost.applied.acquire(timeout=PATIENCE)
        assert client.exists("shaky")
        with proxy.away(), pytest.raises(redis.ConnectionError):
            waiter.result()
        free(client)


@pytest.mark.parametrize("token", [None, "chosen"])
class TestGrant:
    @pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
    @pytest.mark.parametrize("timeout", [30, None])
    def test_the_waiter_has_the_lock_for_its_full_lifetime(
        self,
        client: redis.Redis,
        make: Any,
        proxy: Proxy,
        kind: str,
        timeout: float | None,
        token: str | None,
        pace: int,
    ) -> None:
        """TAKE_GRANT, or its answer, is lost; a short grant must not become a short lock."""
        holder = Lock(client, "shaky", grant_timeout=2 * pace)
        holder.acquire()
        lock = make("shaky", timeout=timeout, grant_timeout=2 * pace)

        def wait() -> tuple[bool, bool]:
            acquired = lock.acquire(token=token)
            until(lambda: lock.lost or lock.ttl() > 20)
            return acquired, lock.lost

        waiter = Background(wait)
        until(lambda: blocked(client))
        getattr(proxy, kind)(TAKE_GRANT)
        holder.release()
        assert waiter.result() == (True, False)

    def test_nothing_is_left_behind(
        self,
        client: redis.Redis,
        shaky: redis.Redis,
        proxy: Proxy,
        token: str | None,
        monkeypatch: pytest.MonkeyPatch,
        pace: int,
    ) -> None:
        """The holder goes on after the waiter has given up."""
        # Else the keeper looks before that whether the lock is free.
        monkeypatch.setattr(waiting, "WATCH_INTERVAL_SECONDS", 2 * PATIENCE)
        holder = Lock(client, "shaky", grant_timeout=GRANT)
        holder.acquire()
        lock = Lock(shaky, "shaky", grant_timeout=GRANT)
        waiter = Background(lambda: lock.acquire(blocking_timeout=0.5 * pace, token=token))
        until(lambda: blocked(client))
        proxy.lose_reply(LEAVE, times=10**6)
        proxy.lose_request(ACQUIRE, times=10**6)
        client.delete("shaky")
        # On a busy machine, its last connection may take longer than it waits.
        with pytest.raises((redis.ConnectionError, redis.TimeoutError)):
            waiter.result()
        free(client)


class TestRelease:
    def test_one_lost_reply_is_made_up_for_when_it_is_anothers_by_then(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy
    ) -> None:
        lock, other = Lock(shaky, "shaky"), Lock(client, "shaky", timeout=30)
        lock.acquire()
        waiter = Background(lambda: other.acquire() and other.local.token)
        until(lambda: blocked(client))
        proxy.lose_reply(RELEASE)
        lock.release()
        token = waiter.result()
        assert client.get("shaky") == token

    @pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
    @pytest.mark.parametrize("token", [None, "chosen"])
    def test_what_failed_can_be_done_again(
        self, client: redis.Redis, make: Any, proxy: Proxy, kind: str, token: str | None
    ) -> None:
        """And takes nothing from who holds the lock by then, even by the same chosen token."""
        lock, other = make("shaky"), Lock(client, "shaky", timeout=30)
        lock.acquire(token=token)
        getattr(proxy, kind)(RELEASE, times=2)
        with pytest.raises(redis.ConnectionError):
            lock.release()
        has_run = kind == "lose_reply"
        assert other.acquire(blocking=False, token=token) == has_run
        lock.release()
        assert lock.local.token is None
        if has_run:
            assert other.owned()
            other.release()
        free(client)

    @pytest.mark.parametrize(
        ("kind", "raised"),
        [
            *((kind, None) for kind in ("one", "reentrant", "places", "names", "cache")),
            ("one", ZeroDivisionError),
        ],
    )
    def test_the_keeper_releases_what_a_block_could_not(
        self,
        client: redis.Redis,
        shaky: redis.Redis,
        proxy: Proxy,
        kind: str,
        raised: type[Exception] | None,
    ) -> None:
        """What the body of ``with`` has raised comes first."""

        def fail(outage: ExitStack) -> None:
            outage.enter_context(proxy.away())
            if raised is not None:
                raise raised

        lock: Any = Lock(shaky, "shaky", timeout=60, reentrant=kind == "reentrant")
        if kind == "places":
            lock = Lock(shaky, "shaky", timeout=60, limit=3)
        elif kind == "names":
            lock = MultiLock(shaky, ["shaky", "other"], timeout=60)
        elif kind == "cache":
            cache = RedisCache(f"redis://127.0.0.1:{proxy.port}", {"KEY_PREFIX": "shaky"})
            lock = cache.lock("shaky", timeout=60, on_redis_down="local")
        with ExitStack() as outage:
            with pytest.raises(raised or redis.ConnectionError), lock:
                fail(outage)
            assert client.keys("*shaky")
            with pytest.raises(LockError):
                lock.release()
        until(lambda: not client.keys("*shaky"))

    @pytest.fixture
    def sent_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also to a frozen server: the connection is not checked first, though it was idle."""
        monkeypatch.setattr("django_redis_lock.transport.server.TRUSTED_SECONDS", PATIENCE)

    @pytest.mark.usefixtures("sent_at_once")
    def test_the_keeper_gives_up_a_server_that_stays_away(
        self, own_server: RedisServer, pace: int
    ) -> None:
        timeout = 0.2 * pace
        with own_server.client(socket_timeout=timeout) as client, moved_clock() as pass_time:
            lock = Lock(client, "shaky", timeout=300)
            with lock:
                pass  # There is a connection now.
            own_server.pause()
            with pytest.raises(redis.TimeoutError):
                lock.acquire(blocking=False)
            assert deferred_releases()
            pass_time(3601)
            until(lambda: not deferred_releases())
            own_server.resume()

    def test_the_keeper_of_before_is_not_the_next_holders(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy
    ) -> None:
        """Ended by force, and taken again by the same token: the old holder is told."""
        lock = Lock(shaky, "shaky", timeout=30, renew=True, id="chosen")
        lock.acquire()
        other = Lock(client, "shaky", timeout=30, id="chosen")
        assert other.reset()
        assert other.acquire(blocking=False)
        until(lambda: lock.lost)
        assert other.owned()

    def test_the_keeper_bears_a_lasting_refusal_as_long_as_the_lock_lives(
        self, own_server: RedisServer
    ) -> None:
        with own_server.client() as client, moved_clock() as pass_time:
            with pytest.raises(redis.ResponseError), Lock(client, "shaky", timeout=300):
                own_server.asking.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha")
            for _ in range(4):
                hurry(DeferredRelease)
            assert deferred_releases()
            pass_time(301)
            until(lambda: (hurry(DeferredRelease), not deferred_releases())[1])

    @pytest.mark.parametrize("reply", ["ERR upstream failure", "UNKILLABLE Sorry", "NOPERM No"])
    def test_what_a_proxy_or_a_script_refuses_is_released_later(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, reply: str
    ) -> None:
        locks = [Lock(shaky, "shaky"), Lock(shaky, "places", limit=2), MultiLock(shaky, ["a", "b"])]
        assert all(lock.acquire(blocking=False) for lock in locks)
        with proxy.refusing(reply.encode()):
            for lock in locks:
                with pytest.raises(redis.ResponseError):
                    lock.__exit__(None, None, None)
            refused = proxy.refused
            hurry_until(lambda: proxy.refused > refused + 8, DeferredRelease)
        until_released()
        assert is_free(client, "shaky", "places", "a", "b")


class TestReset:
    @pytest.mark.parametrize("token", [None, "chosen"])
    def test_the_next_holder_keeps_the_lock(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, token: str | None
    ) -> None:
        """The reply is lost, the reset is sent again, and by then the lock has passed on."""
        options: dict[str, Any] = {"timeout": 30, "grant_timeout": GRANT, "thread_local": False}
        holder, waiter = Lock(client, "shaky", **options), Lock(client, "shaky", **options)
        assert holder.acquire(token=token)
        waiting = Background(lambda: waiter.acquire(token=token))
        until(lambda: blocked(client))
        held = run_call(client, Call(HELD, holder.keys, ())).value
        late = reset_call(holder.keys, HolderInfo(held), GRANT)
        rule = proxy.lose_reply(RESET)
        assert Lock(shaky, "shaky", grant_timeout=GRANT).reset() is True
        assert rule.left == 0
        assert waiting.result() is True
        assert waiter.owned()
        assert run_call(client, late).value == 0, "also if it arrives late"
        assert waiter.owned()
        waiter.release()


class TestExtend:
    def test_it_is_added_once(self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy) -> None:
        lock = Lock(shaky, "shaky", timeout=10)
        assert lock.acquire()
        for expected in (20, 30):
            rule = proxy.lose_reply(EXTEND)
            lock.extend(10)
            assert rule.left == 0
            assert expected - 5 < lock.ttl() <= expected
        lock.release()


class TestRenewal:
    @pytest.mark.parametrize("kind", ["lose_reply", "lose_request"])
    def test_it_is_tried_again(
        self, client: redis.Redis, shaky: redis.Redis, proxy: Proxy, kind: str
    ) -> None:
        lock = Lock(shaky, "shaky", timeout=60, renew=True)
        lock.acquire()
        rule = getattr(proxy, kind)(RENEW, times=2)
        for _ in range(2):
            hurry_until(lambda: rule.applied.acquire(blocking=False), Renewal)
        renew(client, "shaky")
        lock.ensure_held()
        lock.release()


class TestInterrupted:
    """A release that is cancelled is finished by the keeper."""

    def test_it_ends_with_min_hold_and_not_before(self, client: redis.Redis, proxy: Proxy) -> None:
        async def main() -> float:
            async with redis.asyncio.Redis(port=proxy.port) as shaky:
                lock = AsyncLock(shaky, "shaky", min_hold=0.5)
                await lock.acquire()
                began = time.monotonic()
                await cancelled(lock.release(), proxy)
                assert lock.local.token is None
                return began

        began = asyncio.run(main())
        free(client)
        assert time.monotonic() - began > 0.45

    def test_who_takes_it_again_by_the_same_token_keeps_it(
        self, client: redis.Redis, proxy: Proxy
    ) -> None:
        async def main() -> None:
            async with redis.asyncio.Redis(port=proxy.port) as shaky:
                lock = AsyncLock(shaky, "shaky", timeout=30, id="chosen")
                await lock.acquire()
                await cancelled(lock.release(), proxy)
                assert await lock.acquire(blocking_timeout=PATIENCE)
                await asyncio.to_thread(until_released)
                assert await lock.owned()
                await lock.release()

        asyncio.run(main())


async def cancelled(work: Any, proxy: Proxy) -> None:
    """Cancel ``work`` while it waits for its answer."""
    with proxy.stalled():
        task = asyncio.ensure_future(work)
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait([task])
    assert task.cancelled()


class TestTasks:
    def test_one_that_ends_with_an_error_keeps_no_grant_from_the_next(
        self, client: redis.Redis, redis_server: RedisServer, pace: int
    ) -> None:
        holder = Lock(client, "shaky", id="holder", grant_timeout=GRANT)

        async def main() -> None:
            async with redis.asyncio.Redis(port=redis_server.port) as aclient:
                first, second = AsyncLock(aclient, "shaky"), AsyncLock(aclient, "shaky")
                client.set("shaky", "holder", px=60_000)
                fails = asyncio.create_task(first.acquire(blocking_timeout=0.3 * pace))
                await asyncio.to_thread(until, lambda: blocked(client))
                waits = asyncio.create_task(second.acquire(blocking_timeout=PATIENCE))
                client.delete("shaky")
                client.lpush("shaky", "other data")
                with pytest.raises(redis.ResponseError):
                    await fails
                client.delete("shaky")
                client.set("shaky", "holder", px=60_000)
                await asyncio.to_thread(until, lambda: blocked(client))
                await asyncio.to_thread(holder.release)
                assert await waits
                await second.release()

        asyncio.run(main())


def test_a_connection_that_owes_a_reply_is_read_by_one_thread(
    client: redis.Redis, shaky: redis.Redis, proxy: Proxy
) -> None:
    """The way to Redis stalls just after a grant: the next call goes over the connection of that
    wait, while the holder, and the keeper, ask whether the lock is theirs."""
    holder = Lock(client, "shaky", timeout=30)
    holder.acquire()
    lock = Lock(shaky, "shaky", timeout=30, thread_local=False, grant_timeout=1.5)
    frozen = proxy.freeze_after_reply(b"BLPOP", b"}:grants")
    waiter = Background(lock.acquire)
    until(lambda: blocked(client))
    holder.release()
    assert waiter.result()
    assert frozen.applied.acquire(timeout=60)
    others = [Lock(shaky, name, timeout=30, thread_local=False) for name in ("a", "b")]
    callers = [Background(partial(each.acquire, blocking_timeout=60)) for each in others]
    asking = [Background(lambda: until(lambda: lock.lost)) for _ in range(2)]
    for each in asking:
        each.result()
    with pytest.raises(LockLost):
        lock.ensure_held()
    proxy._flows.set()
    assert all(caller.result() for caller in callers)
    assert all(each.owned() for each in others)


# -- requests that come late --------------------------------------------------------------------


#: Of all replies here.
SECONDS = 0.4


@pytest.fixture
def late(proxy: Proxy) -> Any:
    """A client by way of the proxy with an idle connection: what is sent there is sent again,
    because the silence may be its own fault."""
    with proxy.client(socket_timeout=SECONDS) as client:
        assert Lock(client, "before", timeout=30).locked() is False
        yield client


@pytest.fixture
def others() -> Iterator[list[redis.Redis]]:
    """Of two more servers."""
    with ExitStack() as stack:
        servers = [stack.enter_context(closing(RedisServer())) for _ in range(2)]
        for server in servers:
            server.start()
        yield [server.client() for server in servers]


def is_free(client: redis.Redis, *keys: str) -> bool:
    return not client.exists(*keys)


def deliver(held: HeldBack, client: redis.Redis, *keys: str) -> None:
    """The late requests take what is free; then it is free again, and soon."""
    until(lambda: is_free(client, *keys))
    assert not any(reply.startswith(b"-") for reply in held.deliver())
    until(lambda: is_free(client, *keys))


class OwnConnection(redis.asyncio.Connection):
    """A project's: redis-py's parser reads its replies."""


KINDS_OF_TASKS = [redis.asyncio.Connection, OwnConnection]


@pytest.mark.parametrize("timeout", [60, None])
@pytest.mark.parametrize("token", [None, "chosen"])
@pytest.mark.parametrize("kind", [None, *KINDS_OF_TASKS])
def test_a_lock_is_free_after_a_late_acquire(
    client: redis.Redis,
    proxy: Proxy,
    late: redis.Redis,
    timeout: float | None,
    token: str | None,
    kind: type | None,
) -> None:
    """Its connection is given up by a reset: so the system drops what it has not delivered yet."""
    with in_tasks(late, kind or redis.asyncio.Connection) as tasks:
        lock = (tasks.make_lock if kind else partial(Lock, late))("late", timeout=timeout)
        assert not lock.locked()  # It is connected.
        held = proxy.hold_back(ACQUIRE)
        assert lock.acquire(token=token)
        until(lambda: held.resets)
        assert held.resets == [True]
        lock.release()
        deliver(held, client, "late")


@pytest.mark.parametrize("kind", KINDS_OF_TASKS)
def test_what_is_no_reply_ends_the_connection_of_tasks(
    proxy: Proxy, shaky: redis.Redis, kind: type
) -> None:
    with in_tasks(shaky, kind) as tasks:
        lock = tasks.make_lock("shaky", timeout=30)
        with proxy.refusing(b"*?\r\n"), pytest.raises(redis.ConnectionError, match="broke: "):
            lock.locked()
        assert not lock.locked()


def test_who_holds_the_lock_by_then_keeps_it(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    held = proxy.hold_back(ACQUIRE)
    with Lock(late, "late", timeout=None) as lock:
        held.deliver()  # While its caller holds it by the second try.
        assert lock.owned()
    with Lock(client, "late", timeout=30) as another:
        until_released()
        assert another.owned()
    until(lambda: is_free(client, "late"))


def test_a_lost_lock_stays_free(client: redis.Redis, proxy: Proxy, late: redis.Redis) -> None:
    held = proxy.hold_back(ACQUIRE)
    with suppress(LockNotOwnedError), Lock(late, "late", timeout=None):
        client.delete("late")
    deliver(held, client, "late")


@pytest.mark.parametrize(
    ("kind", "script", "tries"),
    [("place", PLACE_ACQUIRE, 1), ("names", ACQUIRE_ALL, 1), ("vote", VOTE, 1), ("vote", VOTE, 2)],
)
def test_a_part_is_free_after_a_late_acquire(
    client: redis.Redis,
    proxy: Proxy,
    late: redis.Redis,
    others: list[redis.Redis],
    kind: str,
    script: Script,
    tries: int,
) -> None:
    first = Lock(client, "late", timeout=30, limit=2)
    keys: list[Any] = ["late"]
    if kind == "place":
        assert first.acquire()
        keys = [lock_keys(b"late").at_place(2).lock]
        lock: Any = Lock(late, "late", timeout=None, limit=2)
    elif kind == "names":
        keys = ["{late}1", "{late}2"]
        lock = MultiLock(late, keys, timeout=None)
    else:
        lock = Redlock([late, *others], "late", timeout=None, server_timeout=2 * SECONDS)
    held = proxy.hold_back(script, times=tries)
    with lock:
        pass
    deliver(held, client, *keys)


@pytest.mark.parametrize("given_up", ["before the release", "after it", "never"])
def test_a_part_is_free_after_a_late_vote_for_the_holder(
    client: redis.Redis,
    proxy: Proxy,
    late: redis.Redis,
    others: list[redis.Redis],
    given_up: str,
) -> None:
    """The keeper asks a server for it that did not grant it at first."""
    client.set("late", "another's")
    with Redlock([*others, late], "late", timeout=60, renew=True, server_timeout=PATIENCE):
        client.delete("late")
        held = proxy.hold_back(VOTE)
        hurry_until(lambda: not held.left)
        until(lambda: held.resets or given_up != "before the release")
    until(lambda: held.resets or given_up != "after it")
    if held.resets:
        until_released()
    deliver(held, client, "late")


@pytest.mark.parametrize("tries", [1, 2])
def test_a_late_release_of_a_part_ends_no_later_acquisition(
    client: redis.Redis, proxy: Proxy, late: redis.Redis, others: list[redis.Redis], tries: int
) -> None:
    """Who waits at one server releases what those after it have granted."""
    holder = Lock(others[0], "late", timeout=60)
    holder.acquire()
    held = proxy.hold_back(RELEASE, times=tries)
    waiter = Background(Redlock([*others, late], "late", 60, server_timeout=5 * SECONDS).acquire)
    until(lambda: others[0].exists("{late}:waiters"))
    holder.release()
    assert waiter.result()
    token = others[1].get("late")
    granted = client.get("late") == token  # Or it was not asked, because it had not answered.
    held.deliver()
    assert not granted or client.get("late") == token


def test_a_lock_is_free_after_a_failed_acquire(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    held = proxy.hold_back(ACQUIRE, times=2)
    with pytest.raises(redis.TimeoutError):
        Lock(late, "late", timeout=None).acquire(blocking=False)
    until_released()
    deliver(held, client, "late")


def waits(late: redis.Redis, **options: Any) -> Callable[[], bool]:
    return lambda: Lock(late, "late", timeout=None, **options).acquire()


def test_a_lock_is_free_after_a_wait_that_ended(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    with Lock(client, "late", timeout=30):
        held = proxy.hold_back(ACQUIRE)
        waiter = Background(waits(late, blocking_timeout=5 * SECONDS))
        assert held.kept.acquire(timeout=PATIENCE)
        assert waiter.result() is False
    deliver(held, client, "late")


def test_a_lock_is_free_after_a_late_last_try(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    with Lock(client, "late", timeout=30):
        held = proxy.hold_back(LEAVE, times=2)
        assert waits(late, blocking_timeout=SECONDS)() is False
        until_released()
    deliver(held, client, "late")


def test_what_a_last_try_has_taken_is_released(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    """Its reply comes after the wait has ended."""
    assert Lock(client, "late", timeout=30).acquire()
    waiter = Background(waits(late, blocking_timeout=SECONDS))
    until(lambda: client.zcard("{late}:waiters"))
    proxy.delay_reply(PATIENCE, LEAVE.sha.encode(), times=10**6)
    held = proxy.hold_back(RELEASE, times=10**6)
    client.delete("late")
    assert waiter.result() is False
    assert held.kept.acquire(timeout=PATIENCE)
    assert client.exists("late")
    held.left = 0
    until_released()
    assert not client.exists("late")


def test_a_lock_that_was_waited_for_is_free(
    client: redis.Redis, proxy: Proxy, late: redis.Redis
) -> None:
    """The grant has another token than the late request."""
    holder, lock = Lock(client, "late", timeout=30), Lock(late, "late", timeout=None)
    assert holder.acquire()
    held = proxy.hold_back(ACQUIRE)

    def hold() -> None:
        with lock:
            pass

    waiter = Background(hold)
    until(lambda: client.zcard("{late}:waiters"))
    holder.release()
    waiter.result()
    deliver(held, client, "late")
