"""What a lock is: one suite that every lock of this package passes.

A subclass says where its locks live::

    class TestLock(LockContract):
        @pytest.fixture
        def backend(self, client):
            return OnRedis(client)
"""

from __future__ import annotations

import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import pytest
import redis

from django_redis_lock import LockError, LockLost, LockNotAcquired, LockNotOwnedError, events
from django_redis_lock.events import Acquired, Contended, Lost, Rejected, Released, TimedOut
from tests.events import RecordedEvents, recording_events
from tests.holding import hurry
from tests.moved_clock import moved_clock
from tests.processes import PATIENCE, in_threads, until
from tests.support.backends import Backend
from tests.support.background import Background, elsewhere
from tests.support.logs import logged

YEAR = 365 * 24 * 3600
#: A wait in vain: a busy machine has begun it before it is over.
LONG_ENOUGH = 0.2


@contextmanager
def nothing_raised_by_the_body_is_hidden() -> Iterator[None]:
    """For a block that raises ``ZeroDivisionError``."""
    with pytest.raises(ZeroDivisionError):
        yield


class LockContract:
    """The tests. ``backend`` is for subclasses to say."""

    name = "contract"
    #: What errors of the lock as a whole call it.
    shown = "contract"

    @staticmethod
    def fence_of(lock: Any) -> int | None:
        """The fence of ``name``."""
        fence: int | None = lock.fence
        return fence

    @pytest.fixture
    def backend(self) -> Backend:
        raise NotImplementedError

    @pytest.fixture
    def make(self, backend: Backend) -> Callable[..., Any]:
        """Makes handles of one and the same lock."""

        def make(**options: Any) -> Any:
            return backend.make_lock(self.name, **options)

        return make

    @pytest.fixture
    def pass_time(self) -> Iterator[Callable[[float], None]]:
        """Lets so many seconds pass in this process, but not where the locks live."""
        with moved_clock() as pass_time:
            yield pass_time

    def wait_for_waiters(self, backend: Backend, count: int = 1) -> None:
        until(lambda: backend.waiting(self.name) >= count)

    # -- taking and giving back ----------------------------------------------------------------

    def test_a_handle_that_is_collected_within_its_block_releases(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An interrupt at the entry of ``__exit__`` leaves the block without a release."""
        lock = make(timeout=60)
        lock.__enter__()
        del lock
        gc.collect()
        other = make(timeout=60)
        assert other.acquire(blocking_timeout=PATIENCE)
        until(lambda: logged(caplog, "keeper", "garbage-collected inside its with block"))
        other.release()

    def test_one_that_is_collected_outside_of_a_block_is_kept(self, make: Any) -> None:
        lock = make(timeout=60)
        lock.acquire()
        del lock
        gc.collect()
        assert not make(timeout=60).acquire(blocking_timeout=0.1)

    def test_it_is_taken_and_given_back_once(self, backend: Backend, make: Any) -> None:
        lock = make(timeout=30)
        assert not lock.locked()
        assert not lock.owned()
        assert lock.local.token is None
        assert lock.acquire() is True
        assert lock.locked()
        assert lock.owned()
        assert isinstance(lock.local.token, bytes)
        assert backend.value(self.name) == lock.local.token
        assert lock.release() is None
        assert not lock.locked()
        assert not lock.owned()
        assert lock.local.token is None
        assert backend.value(self.name) is None
        with pytest.raises(LockError):
            lock.release()

    @pytest.mark.invariant("S1")
    def test_it_is_held_by_one_at_a_time(self, make: Any) -> None:
        one, two = make(timeout=30), make(timeout=30)
        assert one.acquire()
        assert two.acquire(blocking=False) is False
        assert two.locked()
        assert not two.owned()
        one.release()
        assert two.acquire(blocking=False) is True
        two.release()

    def test_different_names_are_different_locks(self, backend: Backend) -> None:
        one, two = backend.make_lock("one", timeout=30), backend.make_lock("two", timeout=30)
        assert one.acquire(blocking=False)
        assert two.acquire(blocking=False)
        one.release()
        assert two.owned()
        two.release()

    @pytest.mark.parametrize("name", [b"\xff\x00 bytes", "naïve {x}y} name\n", "{tag}", "a" * 5000])
    def test_any_name_will_do(self, backend: Backend, name: Any) -> None:
        lock = backend.make_lock(name, timeout=30)
        assert lock.name == name
        assert lock.acquire(blocking=False)
        assert not backend.make_lock(name, timeout=30).acquire(blocking=False)
        lock.release()
        assert not lock.locked()

    def test_taking_it_twice_does_not_lose_it(self, make: Any) -> None:
        lock = make(timeout=30)
        assert lock.acquire()
        token, fence = lock.local.token, lock.fence
        assert lock.acquire(blocking=False) is False
        assert lock.acquire(blocking_timeout=0.05) is False
        assert lock.owned()
        assert (lock.local.token, lock.fence) == (token, fence)
        lock.release()

    @pytest.mark.parametrize("options", [{"renew": True, "timeout": 30}, {"timeout": None}])
    def test_it_does_not_wait_for_itself_forever(self, make: Any, options: Any) -> None:
        lock = make(**options)
        assert lock.acquire()
        with pytest.raises(LockError, match="already"):
            lock.acquire()
        assert lock.owned()
        lock.release()

    @pytest.mark.parametrize("options", [{"renew": True, "timeout": 30}, {"timeout": None}])
    def test_nor_does_another_handle_of_its_caller(self, make: Any, options: Any) -> None:
        lock, other = make(**options), make(**options)
        assert lock.acquire()
        with pytest.raises(LockError, match=r"for itself forever: .*reentrant=True"):
            other.acquire()
        assert not other.acquire(blocking_timeout=0.01)
        assert lock.owned()
        lock.release()
        assert other.acquire()
        other.release()

    def test_a_wait_for_oneself_is_logged(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with make(timeout=30):
            other = make(timeout=30)
            other.acquire(blocking=False)
            elsewhere(lambda: other.acquire(blocking_timeout=LONG_ENOUGH))
            assert not make(timeout=30, thread_local=False).acquire(blocking_timeout=LONG_ENOUGH)
            assert not logged(caplog, "lock")
            assert not other.acquire(blocking_timeout=LONG_ENOUGH)
        [said] = logged(caplog, "lock")
        assert said.startswith(f"The lock {self.name} is held by the same ")
        assert "reentrant=True" in said

    def test_what_was_never_taken_cannot_be_released(self, make: Any) -> None:
        lock = make(timeout=30)
        with pytest.raises(LockError) as caught:
            lock.release()
        assert isinstance(caught.value, redis.exceptions.LockError)
        assert not isinstance(caught.value, LockNotOwnedError)
        assert caught.value.lock_name == self.shown

    @pytest.mark.invariant("S2")
    def test_a_lock_of_another_owner_cannot_be_released(self, make: Any) -> None:
        one, two = make(timeout=30), make(timeout=30)
        one.acquire()
        with pytest.raises(LockError):
            two.release()
        assert one.owned()
        one.release()

    def test_what_has_expired_cannot_be_released(self, backend: Backend, make: Any) -> None:
        lock = make(timeout=30)
        lock.acquire()
        backend.expire_now(self.name)
        assert not lock.owned()
        with pytest.raises(LockNotOwnedError) as caught:
            lock.release()
        assert isinstance(caught.value, redis.exceptions.LockNotOwnedError)
        assert caught.value.lock_name == self.name

    @pytest.mark.invariant("S2")
    def test_what_is_anothers_by_now_is_left_alone(self, backend: Backend, make: Any) -> None:
        one, two = make(timeout=30), make(timeout=30)
        one.acquire()
        backend.expire_now(self.name)
        two.acquire()
        with pytest.raises(LockNotOwnedError):
            one.release()
        assert two.owned()
        two.release()

    # -- with ----------------------------------------------------------------------------------

    @pytest.mark.parametrize("raises", [False, True])
    def test_with_holds_it(self, make: Any, raises: bool) -> None:
        lock = make(timeout=30)
        with nothing_raised_by_the_body_is_hidden() if raises else nullcontext(), lock as entered:
            assert entered is lock
            assert lock.owned()
            if raises:
                raise ZeroDivisionError
        assert not lock.locked()

    def test_with_says_when_it_cannot_be_had(self, make: Any) -> None:
        holder = make(timeout=30)
        holder.acquire()
        for refused in (make(blocking=False), make(blocking_timeout=0.05)):
            with pytest.raises(LockNotAcquired, match="Unable to acquire") as caught, refused:
                raise AssertionError("the body ran without the lock")
            assert caught.value.lock_name == self.name
            assert caught.value.holder is not None
            assert f"is held by {caught.value.holder}" in str(caught.value)
            assert 0 < caught.value.retry_after <= 30
        holder.release()

    def test_with_says_when_it_was_lost_or_released_inside(
        self, backend: Backend, make: Any
    ) -> None:
        lock = make(timeout=30)
        with pytest.raises(LockNotOwnedError), lock:
            backend.delete_key(self.name)
        with pytest.raises(LockError), lock:
            lock.release()

    def test_with_is_silent_about_it_if_asked_to(self, backend: Backend, make: Any) -> None:
        lock = make(timeout=30, raise_on_release_error=False)
        with lock:
            backend.delete_key(self.name)
        with lock:
            lock.release()

    @pytest.mark.parametrize("name", ["contract", b"\xff\x00 bytes"])
    @pytest.mark.parametrize("raise_on_release_error", [True, False])
    @pytest.mark.invariant("C4")
    def test_what_the_body_raised_comes_before_the_loss(
        self, backend: Backend, name: Any, raise_on_release_error: bool
    ) -> None:
        lock = backend.make_lock(name, timeout=30, raise_on_release_error=raise_on_release_error)
        with nothing_raised_by_the_body_is_hidden(), lock:
            backend.delete_key(name)
            raise ZeroDivisionError

    # -- waiting -------------------------------------------------------------------------------

    def test_one_try_is_one_try(self, make: Any) -> None:
        holder, other = make(timeout=30), make(timeout=30)
        assert other.acquire(blocking_timeout=0) is True
        other.release()
        holder.acquire()
        assert other.acquire(blocking_timeout=0) is False
        assert other.acquire(blocking=False, blocking_timeout=60) is False
        assert make(blocking=False).acquire() is False
        assert make(blocking_timeout=0).acquire() is False
        holder.release()

    @pytest.mark.parametrize("wait", [0.001, 0.19])
    @pytest.mark.invariant("L5")
    def test_a_wait_ends_at_its_deadline(self, make: Any, wait: float) -> None:
        holder, other = make(timeout=30), make(timeout=30)
        holder.acquire()
        began = time.monotonic()
        assert other.acquire(blocking_timeout=wait) is False
        waited = time.monotonic() - began
        assert wait * 0.95 - 0.001 <= waited < wait + PATIENCE
        holder.release()
        assert other.acquire(blocking_timeout=wait) is True
        other.release()

    def test_the_call_says_how_long_before_the_handle_does(self, make: Any) -> None:
        holder = make(timeout=30)
        holder.acquire()
        assert make(blocking_timeout=60).acquire(blocking_timeout=0.02) is False
        patient = make(blocking=False, timeout=30)
        waiter = Background(lambda: patient.acquire(blocking=True, blocking_timeout=PATIENCE))
        holder.release()
        assert waiter.result() is True

    def test_the_last_try_counts(self, backend: Backend, make: Any, pace: int) -> None:
        """Free since a moment before the deadline, and nobody said so."""
        holder, other = make(timeout=30), make(timeout=30)
        assert holder.acquire()
        waiter = Background(lambda: other.acquire(blocking_timeout=0.5 * pace))
        until(lambda: backend.waiting(self.name) or waiter.done)
        backend.delete_key(self.name)
        assert waiter.result() is True

    def test_a_waiter_has_it_at_the_release(self, backend: Backend, make: Any) -> None:
        holder, other = make(timeout=30), make(timeout=30)
        holder.acquire()

        def wait() -> tuple[bool, bool, int, bytes]:
            return other.acquire(), other.owned(), other.fence, other.local.token

        waiter = Background(wait)
        self.wait_for_waiters(backend)
        assert not waiter.done
        fence = holder.fence
        holder.release()
        acquired, owned, later, token = waiter.result()
        assert acquired is True
        assert owned
        assert later > fence
        assert token == backend.value(self.name)
        assert not holder.owned()
        assert not make().acquire(blocking=False)

    @pytest.mark.parametrize("same_handle", [True, False])
    @pytest.mark.invariant("L1")
    def test_waiters_have_it_in_the_order_they_came(
        self, backend: Backend, make: Any, same_handle: bool
    ) -> None:
        holder, shared = make(timeout=30), make(timeout=30)
        holder.acquire()
        order: list[int] = []

        def wait(number: int) -> None:
            with shared if same_handle else make(timeout=30):
                order.append(number)

        waiters = []
        for number in range(7):
            waiters.append(Background(wait, number))
            self.wait_for_waiters(backend, number + 1)
        holder.release()
        for waiter in waiters:
            waiter.result()
        assert order == list(range(7))

    @pytest.mark.invariant("L1")
    def test_who_gave_up_is_passed_over(self, backend: Backend, make: Any, pace: int) -> None:

        def wait(seconds: float) -> bool:
            lock = make(timeout=30, blocking_timeout=seconds)
            acquired: bool = lock.acquire()
            if acquired:
                lock.release()
            return acquired

        waiters: list[Background] = []
        with make(timeout=30):
            for each in (0.4 * pace, PATIENCE, 0.2 * pace):
                waiters.append(Background(wait, each))
                until(lambda: backend.waiting(self.name) == len(waiters) or waiters[-1].done)
            first, second, third = waiters
            assert first.result() is False
            assert third.result() is False
            assert not second.done
        assert second.result() is True

    @pytest.mark.invariant("L2")
    def test_a_waiter_has_it_when_the_holders_lifetime_is_over(
        self, backend: Backend, make: Any
    ) -> None:
        holder, other = make(timeout=0.3), make(timeout=30)
        holder.acquire()
        began = time.monotonic()
        assert other.acquire(blocking_timeout=PATIENCE) is True
        assert time.monotonic() - began < PATIENCE / 2
        assert holder.lost
        other.release()

    @pytest.mark.invariant("L2")
    def test_a_waiter_has_it_when_the_key_is_deleted(self, backend: Backend, make: Any) -> None:
        holder, other = make(timeout=30), make(timeout=30)
        holder.acquire()
        waiter = Background(lambda: other.acquire(blocking_timeout=PATIENCE))
        self.wait_for_waiters(backend)
        backend.delete_key(self.name)
        hurry()
        assert waiter.result() is True

    def test_threads_take_turns(self, make: Any) -> None:
        shared = make(timeout=30, grant_timeout=30)
        inside: list[int] = []

        def work() -> int:
            for _ in range(10):
                with shared:
                    inside.append(1)
                    assert len(inside) == 1
                    inside.pop()
            return 10

        assert in_threads(8, work) == [10] * 8

    # -- tokens --------------------------------------------------------------------------------

    def test_each_time_it_is_taken_its_token_is_another(self, make: Any) -> None:
        lock, tokens = make(timeout=30), set()
        for _ in range(20):
            assert lock.acquire(blocking=False) is True
            tokens.add(lock.local.token)
            lock.release()
        assert len(tokens) == 20

    @pytest.mark.parametrize("token", ["chosen", b"chosen", "a:b c", b"\xff\x00"])
    def test_a_token_can_be_chosen(self, backend: Backend, make: Any, token: Any) -> None:
        as_bytes = token if isinstance(token, bytes) else token.encode()
        lock = make(timeout=30)
        assert lock.acquire(token=token)
        assert lock.local.token == as_bytes
        assert backend.value(self.name) == as_bytes
        assert lock.owned()
        lock.release()
        assert not lock.locked()

    def test_the_same_token_is_not_the_same_holder(self, backend: Backend, make: Any) -> None:
        one, two = make(timeout=30), make(timeout=30)
        assert one.acquire(token="same")
        assert two.acquire(blocking=False, token="same") is False
        assert two.acquire(blocking_timeout=0.05, token="same") is False
        assert one.owned()

        def wait() -> Any:
            return two.acquire(token="same"), two.owned(), two.local.token

        waiter = Background(wait)
        self.wait_for_waiters(backend)
        assert not waiter.done
        one.release()
        assert waiter.result() == (True, True, b"same")
        assert backend.value(self.name) == b"same"

    def test_another_handle_acts_for_a_token(self, backend: Backend, make: Any) -> None:
        holder = make(timeout=30)
        holder.acquire()
        agent = make(timeout=30, id=holder.local.token)
        assert agent.owned()
        agent.extend(1000)
        assert agent.ttl() > 900
        agent.reacquire()
        assert agent.ttl() <= 30
        agent.release()
        assert not holder.locked()
        with pytest.raises(LockNotOwnedError):
            holder.release()

    def test_a_handle_with_a_token_takes_the_lock_with_it(
        self, backend: Backend, make: Any
    ) -> None:
        lock = make(timeout=30, id="mine")
        assert not lock.owned()
        for _ in range(2):
            assert lock.acquire(blocking=False)
            assert backend.value(self.name) == b"mine"
            lock.release()

    # -- fences --------------------------------------------------------------------------------

    @pytest.mark.invariant("S4")
    def test_fences_strictly_increase(self, backend: Backend, make: Any) -> None:
        fences = []

        def take(lock: Any) -> None:
            lock.acquire()
            fences.append(lock.fence)

        assert make().fence is None
        lock = make(timeout=30)
        for _ in range(3):
            take(lock)
            lock.release()
        take(make(timeout=30))
        for lose in (backend.delete_key, backend.expire_now):
            lose(self.name)
            hurry()  # A holder of several names that has lost one keeps the others until it looks.
            take(make(timeout=30))
        backend.forget_everything()
        take(make(timeout=30))
        assert all(isinstance(fence, int) for fence in fences)
        assert fences == sorted(set(fences))

    # -- lifetimes -----------------------------------------------------------------------------

    def test_ttl(self, make: Any) -> None:
        lock = make(timeout=30)
        assert lock.ttl() is None
        lock.acquire()
        assert 20 < lock.ttl() <= 30
        assert 20 < make().ttl() <= 30
        lock.release()
        forever = make()
        forever.acquire()
        assert forever.ttl() == math.inf
        assert not forever.lost
        forever.release()

    def test_a_lifetime_of_less_than_a_millisecond(self, make: Any) -> None:
        """It would be over at once, and so a wrong unit."""
        with pytest.raises(ValueError, match="timeout must be at least"):
            make(timeout=0.0004)

    @pytest.mark.parametrize("renew", [True, False])
    def test_a_lifetime_of_a_year(self, make: Any, renew: bool) -> None:
        lock = make(timeout=YEAR, renew=renew)
        lock.acquire()
        assert YEAR - 60 < lock.ttl() <= YEAR
        lock.extend(YEAR)
        assert 2 * YEAR - 60 < lock.ttl() <= 2 * YEAR
        lock.ensure_held()
        lock.release()

    def test_extend(self, make: Any) -> None:
        lock = make(timeout=30)
        lock.acquire()
        assert lock.extend(100) is True
        assert 100 < lock.ttl() <= 130
        assert lock.extend(50, replace_ttl=True) is True
        assert 30 < lock.ttl() <= 50
        assert lock.extend(0.5) is True
        assert lock.reacquire() is True
        assert 0 < lock.ttl() <= 30
        lock.release()

    def test_what_is_extended_counts_longer(self, make: Any, pass_time: Any) -> None:
        lock = make(timeout=30)
        lock.acquire()
        lock.extend(60)
        pass_time(75)
        assert not lock.lost
        lock.ensure_held()
        lock.release()

    def test_what_is_shortened_counts_shorter(self, backend: Backend, make: Any) -> None:
        """Also right after a grant, when its full lifetime is just being confirmed."""
        holder, other = make(timeout=30), make(timeout=300)
        holder.acquire()

        def wait() -> None:
            other.acquire()
            with suppress(LockNotOwnedError):  # On a busy machine it is over before all is done.
                other.extend(0.05, replace_ttl=True)
            until(lambda: other.lost)

        waiter = Background(wait)
        self.wait_for_waiters(backend)
        holder.release()
        waiter.result()

    @pytest.mark.parametrize(("verb", "args"), [("extend", (5,)), ("reacquire", ())])
    @pytest.mark.invariant("S2")
    def test_who_may_not_extend(
        self, backend: Backend, make: Any, verb: str, args: tuple[Any, ...]
    ) -> None:
        lock = make(timeout=30)
        with pytest.raises(LockError, match="not owned") as caught:
            getattr(lock, verb)(*args)
        assert not isinstance(caught.value, LockNotOwnedError)
        lock.acquire()
        backend.expire_now(self.name)
        with pytest.raises(LockNotOwnedError, match="no longer owned"):
            getattr(lock, verb)(*args)
        other = make(timeout=30)
        other.acquire()
        with pytest.raises(LockNotOwnedError):
            getattr(lock, verb)(*args)
        assert other.ttl() <= 30
        other.release()
        forever = make()
        forever.acquire()
        with pytest.raises(LockError, match="no timeout") as caught:
            getattr(forever, verb)(*args)
        assert not isinstance(caught.value, LockNotOwnedError)
        assert caught.value.lock_name == self.name
        forever.release()

    def expect_renewal(self, backend: Backend, lock: Any, pass_time: Any) -> None:
        """The next one, a third of the lifetime of 30 s after the last."""
        backend.expire_in(self.name, 20)
        assert lock.ttl() <= 20
        pass_time(10.1)
        assert lock.ttl() > 20
        assert backend.value(self.name) == lock.local.token
        assert not lock.lost

    def test_it_is_renewed(self, backend: Backend, make: Any, pass_time: Any) -> None:
        lock = make(timeout=30, renew=True)
        lock.acquire()
        # Renewed once, it would be lost after 40 s.
        for _ in range(5):
            self.expect_renewal(backend, lock, pass_time)
        assert lock.owned()
        lock.release()
        assert not lock.locked()
        assert not lock.lost

    def test_it_is_renewed_after_waiting_for_it(
        self, backend: Backend, make: Any, pass_time: Any
    ) -> None:
        holder = make(timeout=30)
        holder.acquire()

        def wait() -> bool:
            with make(timeout=30, renew=True) as lock:
                until(lambda: lock.ttl() > 25)  # The grant is confirmed.
                self.expect_renewal(backend, lock, pass_time)
                return bool(lock.owned())

        waiter = Background(wait)
        self.wait_for_waiters(backend)
        holder.release()
        assert waiter.result()

    def test_it_is_renewed_for_so_long_and_no_longer(
        self, backend: Backend, make: Any, pass_time: Any
    ) -> None:
        told = threading.Event()
        lock = make(timeout=300, renew=True, max_hold=500, on_lost=told.set)
        lock.acquire()
        for left, renewed in ((180, 300), (180, 260), (100, 140)):
            backend.expire_in(self.name, left)
            pass_time(120)
            assert left < lock.ttl() <= renewed
        assert not lock.lost
        assert not told.is_set()
        pass_time(150)
        assert told.wait(PATIENCE)
        assert lock.lost
        assert make().ttl() <= 140

    def test_released_early_it_stays_taken_for_so_long(
        self, backend: Backend, make: Any, pace: int
    ) -> None:
        lock, other = make(timeout=30, min_hold=0.4 * pace), make(timeout=30)
        began = time.monotonic()
        lock.acquire()
        lock.release()
        assert not lock.owned()
        assert lock.locked()
        assert other.acquire(blocking=False) is False
        assert other.acquire(blocking_timeout=PATIENCE) is True
        assert time.monotonic() - began >= 0.38 * pace
        other.release()

    def test_released_late_it_is_free_at_once(self, make: Any) -> None:
        lock = make(timeout=30, min_hold=0.1)
        lock.acquire()
        ends = time.monotonic() + 0.15
        until(lambda: time.monotonic() > ends)
        lock.release()
        assert make().acquire(blocking=False) is True

    # -- losing it -----------------------------------------------------------------------------

    @pytest.mark.invariant("S5")
    def test_it_is_lost_at_its_deadline(self, backend: Backend, make: Any, pass_time: Any) -> None:
        calls: list[int] = []
        lock = make(timeout=30, on_lost=lambda: calls.append(1))
        assert not lock.lost
        with pytest.raises(LockError) as never:
            lock.ensure_held()
        assert not isinstance(never.value, LockLost)
        lock.acquire()
        pass_time(20)
        lock.ensure_held()
        backend.expire_now(self.name)
        pass_time(10.1)
        assert lock.lost
        with pytest.raises(LockLost) as caught:
            lock.ensure_held()
        assert caught.value.lock_name == self.shown
        assert not lock.owned()
        until(lambda: calls)
        until(lambda: not lock.locked())  # Of several names, the others are released.
        with pytest.raises(LockNotOwnedError):
            lock.release()
        assert calls == [1]

    def test_what_was_lost_can_be_taken_again(
        self, backend: Backend, make: Any, pass_time: Any
    ) -> None:
        lock = make(timeout=30)
        lock.acquire()
        backend.expire_now(self.name)
        pass_time(31)
        assert lock.lost
        assert lock.acquire()
        assert not lock.lost
        lock.extend(30)
        lock.ensure_held()
        lock.release()

    def test_released_is_not_lost(self, make: Any, pass_time: Any) -> None:
        calls: list[int] = []
        lock = make(timeout=30, renew=True, on_lost=lambda: calls.append(1))
        lock.acquire()
        lock.release()
        pass_time(31)
        assert not lock.lost
        assert not calls
        with pytest.raises(LockLost):
            lock.ensure_held()

    def test_a_failing_on_lost_affects_no_other_lock(
        self, make: Any, heard: RecordedEvents
    ) -> None:
        def on_lost() -> None:
            raise RuntimeError("on_lost is broken")

        lock = make(timeout=0.1, on_lost=on_lost)
        lock.acquire()
        until(lambda: lock.lost)
        lock = make(timeout=30)
        assert lock.acquire(blocking_timeout=PATIENCE)
        assert not make().acquire(blocking=False)
        until(lambda: heard.only(Lost))
        lock.release()

    # -- what others are told of it --------------------------------------------------------------

    @pytest.fixture
    def heard(self) -> Iterator[RecordedEvents]:
        with recording_events(self.name) as heard:
            yield heard

    def test_an_acquisition_emits_an_event(self, make: Any, heard: RecordedEvents) -> None:
        lock = make(timeout=30, label="nightly report")
        lock.acquire()
        fence = self.fence_of(lock)
        assert not make().acquire(blocking=False)
        assert not make().acquire(blocking_timeout=LONG_ENOUGH)
        lock.release()
        assert heard.kinds == [Acquired, Contended, Rejected, Contended, TimedOut, Released]
        acquired, contended, _, _, timed_out, released = heard
        assert contended.keys == lock.keys
        assert (acquired.contended, acquired.fence, released.fence) == (False, fence, fence)
        assert 0 <= acquired.waited < PATIENCE
        assert LONG_ENOUGH * 0.9 < timed_out.waited < released.held < PATIENCE
        assert acquired.subject.label == "nightly report"

    def test_a_wait_emits_an_event(
        self, backend: Backend, make: Any, heard: RecordedEvents
    ) -> None:
        lock = make(timeout=30)
        lock.acquire()
        waiter = Background(make(timeout=30).acquire)
        self.wait_for_waiters(backend)
        lock.release()
        waiter.result()
        until(lambda: len(heard) == 4)
        assert heard.kinds[:2] == [Acquired, Contended]
        assert [event.contended for event in heard.only(Acquired)] == [False, True]

    @pytest.mark.parametrize("how", ["delete_key", "expire_now", "reset"])
    def test_a_loss_is_told_to_the_holder_and_to_listeners(
        self, backend: Backend, make: Any, heard: RecordedEvents, how: str
    ) -> None:
        told = threading.Event()
        lock = make(timeout=30, renew=True, on_lost=told.set)
        lock.acquire()
        fence = self.fence_of(lock)

        def losses() -> list[Lost]:
            # A reset also ends the other holders of a lock with places.
            return [event for event in heard.only(Lost) if event.fence == fence]

        if how == "reset":
            assert make().reset() is True
        else:
            getattr(backend, how)(self.name)
        hurry()
        assert told.wait(PATIENCE)
        assert lock.lost
        with pytest.raises(LockLost):
            lock.ensure_held()
        until(losses)
        with pytest.raises(LockNotOwnedError):
            lock.release()
        [lost] = losses()
        assert lost.reason
        assert Released not in heard.kinds

    def test_a_late_release_emits_a_loss(
        self, backend: Backend, make: Any, heard: RecordedEvents
    ) -> None:
        lock = make(timeout=30)
        lock.acquire()
        backend.delete_key(self.name)
        with pytest.raises(LockNotOwnedError):
            lock.release()
        assert heard.kinds == [Acquired, Lost]

    def test_it_is_counted_with_its_like(self, backend: Backend, make: Any) -> None:
        assert make().subject.group == self.name
        assert make(group="contract-{kind}").subject.group == "contract-{kind}"
        name = "invoice-17-1b4e28ba-2fa1-11d2-883f-0016d3cca427"
        assert backend.make_lock(name).subject.group == "invoice-*-*"

    def test_a_listener_that_fails_touches_no_lock(
        self, make: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def broken(event: Any) -> None:
            raise RuntimeError("the listener is broken")

        events.subscribe(broken)
        try:
            for _ in range(2):
                lock = make(timeout=30)
                assert lock.acquire()
                assert not make().acquire(blocking=False)
                lock.release()
            assert not lock.locked()
            lock = make(timeout=0.05)
            lock.acquire()
            until(lambda: lock.lost)
        finally:
            events.unsubscribe(broken)
        assert len(logged(caplog, "events")) == 1, "once a minute is enough"

    # -- who has it, and ending it by force ----------------------------------------------------

    def test_the_holder_is_named(self, make: Any) -> None:
        lock = make(timeout=30, label="nightly report")
        assert lock.holder() is None
        lock.acquire()
        first = make().holder()
        assert first.id
        assert first.id.encode() != lock.local.token
        assert lock.local.token.decode() not in repr(first)
        hurry()
        until(lambda: make().holder().label == "nightly report")
        holder = make().holder()
        assert holder.id == first.id
        assert holder.pid == os.getpid()
        assert holder.host
        assert holder.thread
        assert holder.since is not None
        lock.release()
        assert lock.holder() is None

    def test_it_can_be_ended_by_force(self, make: Any) -> None:
        lock = make(timeout=30)
        assert lock.reset() is False
        lock.acquire()
        assert make().reset() is True
        assert not lock.locked()
        assert not lock.owned()
        with pytest.raises(LockNotOwnedError):
            lock.release()

    def test_ended_by_force_it_is_the_first_waiters(self, backend: Backend, make: Any) -> None:
        holder = make(timeout=30)
        holder.acquire()
        waiter = Background(lambda: make(timeout=30).acquire())
        self.wait_for_waiters(backend)
        assert make().reset() is True
        assert waiter.result() is True
        assert not holder.owned()
        assert holder.locked()

    # -- threads -------------------------------------------------------------------------------

    def test_what_one_thread_holds_is_not_anothers(self, make: Any) -> None:
        lock = make(timeout=30)
        lock.acquire()

        def look() -> None:
            assert not lock.owned()
            assert lock.locked()
            assert lock.local.token is None
            assert lock.fence is None
            assert not lock.lost
            for verb in (lock.release, lock.reacquire, lock.ensure_held):
                with pytest.raises(LockError):
                    verb()
            assert lock.acquire(blocking=False) is False

        elsewhere(look)
        assert lock.owned()
        lock.release()

    def test_threads_share_it_if_asked_to(self, make: Any) -> None:
        lock = make(timeout=30, thread_local=False)
        lock.acquire()
        token, fence = lock.local.token, lock.fence

        def look() -> None:
            assert lock.owned()
            assert (lock.local.token, lock.fence) == (token, fence)
            lock.ensure_held()
            lock.release()

        elsewhere(look)
        assert not lock.owned()
        assert lock.local.token is None
        assert not lock.locked()
