"""Holders and waiters that are killed or frozen, each a real process.

Grants live for a minute where one that went to a dead process would otherwise not be noticed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import redis
import redis.asyncio

from django_redis_lock import AsyncLock, Lock, LockLost
from django_redis_lock.keeper import keeper
from django_redis_lock.locking.lock import PendingReply
from tests.holding import hurry
from tests.lanes import examples
from tests.processes import PATIENCE, Link, processes, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.values import blocked

pytestmark = pytest.mark.usefixtures("watched_often")

NAME = "processes"


def use_a_parents_grant(lock: Any, run: Callable[[Any], Any]) -> None:
    hold = lock.local.hold
    assert hold.pending is not None
    until(lambda: time.monotonic() > hold.deadline)
    assert lock.lost, "it is no more than the grant, as far as a child can know"
    hold.confirm(wait=True)
    for act in (lock.release, lambda: lock.extend(60)):
        with pytest.raises(redis.exceptions.LockNotOwnedError):
            run(act)
    assert hold.pending is not None


async def fork_in_a_task(url: str, own: dict[str, Any]) -> dict[str, Any]:
    lock = AsyncLock(redis.asyncio.Redis.from_url(url), NAME, **own)
    await lock.acquire()
    pending: Any = lock.local.hold.pending
    pid = os.fork()
    if pid == 0:
        in_a_child(lambda: use_a_parents_grant(lock, lambda act: asyncio.run(act())))
    _, status = os.waitpid(pid, 0)
    await lock.extend(60)
    answer = await pending.confirmed()
    await lock.release()
    return {"child": status, "answer": "the parent's" if answer else answer}


def fork_with_an_answer_to_come(link: Link, url: str, tasks: bool, pace: int) -> dict[str, Any]:
    own = {"timeout": 60, "grant_timeout": 1.2 * pace, "thread_local": False}
    if tasks:
        return asyncio.run(fork_in_a_task(url, own))
    lock = Lock(redis.Redis.from_url(url), NAME, **own)
    has_come = PendingReply._has_come
    PendingReply._has_come = lambda self: False  # The parent's keeper does not read it either.
    lock.acquire()
    pending: Any = lock.local.hold.pending
    pid = os.fork()
    if pid == 0:
        PendingReply._has_come = has_come
        in_a_child(lambda: use_a_parents_grant(lock, lambda act: act()))
    _, status = os.waitpid(pid, 0)
    PendingReply._has_come = has_come
    lock.extend(60)
    answer = pending.read_reply(True)
    lock.release()
    return {"child": status, "answer": "the parent's" if answer else answer}


def until_blocked(client: redis.Redis, count: int = 1) -> None:
    until(lambda: blocked(client) >= count)


def hold(link: Link, url: str, options: dict[str, Any]) -> None:
    """Hold the lock, say so, say when it is lost, and whether it is when asked."""
    with redis.Redis.from_url(url) as client:
        lock = Lock(client, NAME, on_lost=lambda: link.say("lost"), **options)
        lock.acquire()
        link.say(lock.fence)
        link.hear()
        link.say(lock.lost)


def wait(link: Link, url: str, options: dict[str, Any]) -> int | None:
    """Wait for the lock, note in Redis when it was held, and give it back."""
    with redis.Redis.from_url(url) as client, Lock(client, NAME, **options) as lock:
        client.rpush("log", f"enter {os.getpid()}")
        link.say("holds")
        time.sleep(0.01)
        client.rpush("log", f"leave {os.getpid()}")
        return lock.fence


@pytest.mark.invariant("L1", "L2")
class TestKilled:
    @pytest.mark.parametrize("renew", [True, False])
    def test_a_holders_lock_is_the_waiters_when_its_lifetime_is_over(
        self, client: redis.Redis, redis_server: RedisServer, renew: bool
    ) -> None:
        with processes(hold, redis_server.url, {"timeout": 60, "renew": renew}) as (holder,):
            holder.go()
            fence = holder.hear()
            waiter = Lock(client, NAME, timeout=30)
            waiting = Background(lambda: waiter.acquire(blocking_timeout=PATIENCE) and waiter.fence)
            until_blocked(client)
            holder.kill()
            client.pexpire(NAME, 300)
            assert waiting.result() > fence  # Before its patience ends, half of the first lifetime.

    def test_a_waiter_is_passed_over(self, client: redis.Redis, redis_server: RedisServer) -> None:
        first = Lock(client, NAME, timeout=30, grant_timeout=60)
        first.acquire()
        options = {"timeout": 30, "grant_timeout": 60}
        with processes(wait, redis_server.url, options, count=2) as crew:
            for count, waiter in enumerate(crew, start=1):
                waiter.go()
                until_blocked(client, count)
            crew[0].kill()
            until(lambda: blocked(client) == 1)
            first.release()
            assert crew[1].hear() == "holds"
            assert crew[1].result() > first.fence

    def test_the_last_waiter_leaves_a_free_lock(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        """Nobody waits any more, but Redis does not know it for a while."""
        first = Lock(client, NAME, timeout=30)
        first.acquire()
        with processes(wait, redis_server.url, {"timeout": 30}) as (waiter,):
            waiter.go()
            until_blocked(client)
            waiter.kill()
        until(lambda: not blocked(client))
        first.release()
        assert not first.locked()
        assert Lock(client, NAME, timeout=30, blocking=False).acquire()


@pytest.mark.invariant("S5", "L2")
class TestFrozen:
    def test_the_first_waiter_delays_the_others_and_does_not_believe_it_holds(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        options = {"timeout": 60, "grant_timeout": 0.5}
        first = Lock(client, NAME, **options)
        first.acquire()
        with processes(wait, redis_server.url, options) as (frozen,):
            frozen.go()
            until_blocked(client)
            second = Lock(client, NAME, **options)
            waiting = Background(lambda: second.acquire(blocking_timeout=PATIENCE) and second.fence)
            until_blocked(client, 2)
            frozen.pause()
            first.release()
            fence = waiting.result()
            assert fence > first.fence  # And not False: before its patience ends.
            frozen.resume()
            # It asks, learns that its grant is over, and waits again.
            until_blocked(client)
            assert not client.exists("log")
            agent = Lock(client, NAME, timeout=60, id=client.get(NAME))
            agent.release()
            assert frozen.hear() == "holds"
            assert frozen.result() > fence

    def test_a_holder_that_lost_the_lock_calls_on_lost(
        self, client: redis.Redis, redis_server: RedisServer
    ) -> None:
        options = {"timeout": 1, "renew": True}
        with processes(hold, redis_server.url, options) as (frozen,):
            frozen.go()
            fence = frozen.hear()
            frozen.pause()
            waiter = Lock(client, NAME, timeout=30)
            assert waiter.acquire(blocking_timeout=PATIENCE)
            assert waiter.fence > fence
            frozen.resume()
            assert frozen.hear() == "lost"
            frozen.say("and you know it?")
            assert frozen.hear() is True
            assert waiter.owned()
            waiter.release()


class TestInterrupted:
    """Ctrl-C, or any exception from a signal handler, in a thread that waits."""

    def test_in_redis(self, client: redis.Redis, redis_server: RedisServer) -> None:
        first = Lock(client, NAME, timeout=60, grant_timeout=60)
        first.acquire()
        options = {"timeout": 60, "grant_timeout": 60}
        for _ in range(examples(4)):
            with processes(wait, redis_server.url, options, spawned=True) as (waiter,):
                waiter.go()
                until_blocked(client)
                os.kill(waiter.pid, signal.SIGINT)
                with pytest.raises(KeyboardInterrupt):
                    waiter.result()
                # It ends at once; its keeper still takes it off the register.
                until(lambda pid=waiter.pid: not alive(pid))
                assert not client.exists(f"{{{NAME}}}:waiters")
            until(lambda: not blocked(client))
        first.release()
        assert not client.exists(NAME)


class TestEnding:
    @pytest.mark.sample(2)
    @pytest.mark.parametrize("renew", [True, False])
    def test_a_process_ends_although_it_holds_locks(
        self, client: redis.Redis, redis_server: RedisServer, renew: bool
    ) -> None:
        with processes(leave_held, redis_server.url, renew, spawned=True) as (worker,):
            worker.go()
            assert worker.result() == "done"
            until(lambda: not alive(worker.pid))
        assert Lock(client, NAME, timeout=5).acquire(blocking_timeout=PATIENCE)


def leave_held(link: Link, url: str, renew: bool) -> str:
    client = redis.Redis.from_url(url)
    Lock(client, NAME, timeout=1, renew=renew).acquire()
    return "done"


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestForked:
    """A child of a process that holds locks."""

    @pytest.mark.sample(3, 1)
    @pytest.mark.parametrize("case", ["leaves", "asks", "locks", "lives on", "waits"])
    def test_it_leaves_its_parents_locks_alone(
        self, client: redis.Redis, redis_server: RedisServer, case: str
    ) -> None:
        with processes(fork, redis_server.url, case) as (parent,):
            parent.go()
            said = parent.result()
            assert said == {"child": 0, "held": True, "renewed": True}


def fork(link: Link, url: str, case: str) -> dict[str, Any]:
    """What a child found out, and whether its parent's lock has suffered from it."""
    client = redis.Redis.from_url(url)
    lock = Lock(client, NAME, timeout=60, renew=True)
    with lock:
        token = lock.local.token
        client.pexpire(NAME, 30_000)
        pid = os.fork()
        if pid == 0:
            in_a_child(lambda: in_the_child(lock, client, case))
        hurry()
        _, status = os.waitpid(pid, 0)
        held = client.get(NAME) == token and lock.owned()
        client.pexpire(NAME, 30_000)
        until(lambda: (hurry(), client.pttl(NAME) > 40_000)[1])
        renewed = client.get(NAME) == token and not lock.lost
    return {"child": status, "held": held, "renewed": renewed}


def in_the_child(lock: Lock, client: redis.Redis, case: str) -> None:
    assert not keeper().jobs()
    if case == "leaves":
        lock.__exit__(None, None, None)
    elif case == "asks":
        assert not lock.owned()
        assert not lock.lost
        assert lock.locked()
        for act in (lock.release, lock.reacquire, lambda: lock.extend(60)):
            with pytest.raises(redis.exceptions.LockNotOwnedError):
                act()
        with pytest.raises(LockLost):
            lock.ensure_held()
    elif case == "locks":
        mine = Lock(client, "the child's own", timeout=60, renew=True)
        with mine:
            client.pexpire("the child's own", 30_000)
            until(lambda: (hurry(), client.pttl("the child's own") > 40_000)[1])
            assert mine.owned()
    elif case == "lives on":
        # While the parent renews alone.
        until(lambda: client.pttl(NAME) > 40_000)
    elif case == "waits":
        assert not lock.acquire(blocking=False)
        assert not lock.acquire(blocking_timeout=0.3)
        assert not Lock(client, NAME, timeout=5).acquire(blocking_timeout=0.3)


def in_a_child(work: Callable[[], None]) -> NoReturn:
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


@pytest.mark.parametrize("tasks", [False, True])
def test_a_child_leaves_an_unread_answer_to_its_parent(
    client: redis.Redis, redis_server: RedisServer, tasks: bool, pace: int
) -> None:
    """That to TAKE_GRANT, for which a waiter that gets a lock does not wait if its grant is new."""
    holder = Lock(client, NAME, timeout=30)
    holder.acquire()
    with processes(fork_with_an_answer_to_come, redis_server.url, tasks, pace) as (parent,):
        parent.go()
        until(lambda: client.exists(f"{{{NAME}}}:waiters"))
        holder.release()
        assert parent.result() == {"child": 0, "answer": "the parent's"}
    assert not client.exists(NAME)
