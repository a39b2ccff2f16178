"""``Lock`` on Redis: the contract, and what is seen of it in Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import redis

from django_redis_lock import Lock, LockNotOwnedError
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.locking import hold as hold_module
from django_redis_lock.protocol.lock_scripts import RELEASE
from django_redis_lock.protocol.script import Call
from tests.holding import Renewals, renew
from tests.lock_contract import LockContract
from tests.processes import PATIENCE, until
from tests.support.backends import Backend, OnRedis
from tests.support.background import Background


class TestLock(LockContract):
    @pytest.fixture
    def backend(self, client: redis.Redis) -> Backend:
        return OnRedis(client)

    def test_it_is_renewed_in_real_time(
        self, backend: Backend, make: Callable[..., Any], pace: int
    ) -> None:
        lock = make(timeout=1.2 * pace, renew=True)
        lock.acquire()
        # Renewed once, after a third of its lifetime, it would be gone after 1.6 s.
        ends = time.monotonic() + 1.7 * pace
        while time.monotonic() < ends:
            assert backend.value(self.name) == lock.local.token
            assert not lock.lost
            time.sleep(0.05)
        assert lock.owned()
        lock.release()


@pytest.mark.sample(7)
class TestLockInMemory(TestLock):
    @pytest.fixture
    def backend(self) -> Backend:
        return OnRedis(client_of(Database("memory")))


@pytest.mark.parametrize("dropped", [True, False])
def test_a_lock_whose_object_is_gone_expires(
    client: redis.Redis, caplog: pytest.LogCaptureFixture, dropped: bool, pace: int
) -> None:
    """Its handle was dropped, or the thread has ended that alone could use it."""
    lock = Lock(client, "forgotten", timeout=0.2 * pace, renew=True)
    if dropped:
        assert lock.acquire()
        del lock
    else:
        assert Background(lock.acquire).result()
    until(lambda: not client.exists("forgotten"))
    assert "Lock forgotten was garbage-collected without release()" in caplog.text


class TestSharedHandle:
    """``thread_local=False``: what one thread does costs the next holder nothing."""

    @pytest.fixture
    def lock(self, client: redis.Redis) -> Lock:
        return Lock(client, "shared", timeout=30, renew=True, thread_local=False)

    @pytest.mark.parametrize("interrupted", [False, True])
    def test_a_release_that_is_answered_late(
        self, lock: Lock, monkeypatch: pytest.MonkeyPatch, interrupted: bool
    ) -> None:
        run = lock._run

        def next_before_the_answer(call: Call, *args: Any) -> Any:
            answer = run(call, *args)
            if call.script is RELEASE:
                monkeypatch.undo()
                assert Background(lock.acquire, None, False).result()
                if interrupted:
                    raise KeyboardInterrupt
            return answer

        monkeypatch.setattr(lock, "_run", next_before_the_answer)
        try:
            with lock:
                pass
        except KeyboardInterrupt:
            assert interrupted
        lock.ensure_held()
        assert lock.owned()
        lock.release()

    def test_a_wait_that_fails(self, lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
        def next_before_the_failure(*args: Any) -> Any:
            monkeypatch.undo()
            assert Background(lock.acquire).result()
            raise ConnectionError

        monkeypatch.setattr(lock, "_obtain", next_before_the_failure)
        with pytest.raises(ConnectionError), lock:
            pass
        lock.ensure_held()
        assert lock.owned()
        lock.release()


def test_on_lost_never_runs_in_the_keepers_thread(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor if the lock is lost as soon as the keeper knows of it."""
    called: list[int] = []
    over = threading.Event()

    def on_lost() -> None:
        called.append(threading.get_ident())
        over.set()

    losing = SimpleNamespace(add=lambda job: job.hold.lose("it was lost at once"))
    monkeypatch.setattr(hold_module, "keeper", lambda: losing)
    assert Lock(client, "lost", timeout=30, on_lost=on_lost).acquire()
    assert over.wait(PATIENCE)
    assert called != [threading.get_ident()], "it stands for the keeper's here"


def test_a_lock_that_was_extended_is_renewed_no_more_often(client: redis.Redis, pace: int) -> None:
    extended, other = (Lock(client, name, 0.9 * pace, renew=True) for name in ("extended", "other"))
    assert extended.acquire()
    assert other.acquire()
    for _ in range(20):
        extended.extend(0.9 * pace, replace_ttl=True)
        time.sleep(0.02)  # So that the renewals would come at different times.
    often, usual = Renewals(client, "extended"), Renewals(client, "other")
    until(lambda: often.count() >= 0 and usual.count() == 3)
    assert often.count() <= 6


def test_a_lifetime_that_was_shortened_is_renewed_in_time(client: redis.Redis) -> None:
    lock = Lock(client, "shortened", timeout=60, renew=True)
    lock.acquire()
    renew(client, "shortened")  # The keeper has looked just now.
    lock.extend(0.5, replace_ttl=True)
    until(lambda: client.pttl("shortened") > 10_000)
    lock.release()


def test_a_release_does_not_end_a_later_lock_of_the_same_token(client: redis.Redis) -> None:
    first, second = (Lock(client, "shared", timeout=30) for _ in range(2))
    assert first.acquire(token="chosen")
    client.delete("shared")
    assert second.acquire(token="chosen")
    with pytest.raises(LockNotOwnedError):
        first.release()
    assert second.owned()


def test_acquiring_again_with_the_same_object_waits_for_the_end_of_the_first(
    client: redis.Redis,
    pace: int,
) -> None:
    """As with redis-py."""
    lock = Lock(client, "name", timeout=0.3 * pace)
    assert lock.acquire()
    first = lock.fence
    assert lock.acquire()
    assert lock.fence != first
    lock.release()
