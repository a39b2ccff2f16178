"""Several handles on one lock, driven at random, beside a model of what must hold.

The model knows only who holds the lock by the server's word. What may break it is part of the
game: the lifetime runs out, the key is deleted, the holder is reset, a reply is lost.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_redis_lock import Lock, LockError, LockNotOwnedError
from django_redis_lock.transport import Server
from tests.lanes import examples

pytestmark = pytest.mark.invariant("S1")

HANDLES = st.integers(min_value=0, max_value=2)


class Locks(RuleBasedStateMachine):
    """Three handles without renewal, so that nothing happens but what the rules do."""

    client: redis.Redis

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.handles = [Lock(self.client, "model", timeout=1000) for _ in range(3)]
        self.holder: int | None = None
        #: Handles that think they hold what has ended without them.
        self.deceived: set[int] = set()
        self.fences: list[int] = []

    def _acquired(self, who: int) -> None:
        self.deceived.discard(who)
        self.holder = who
        fence = self.handles[who].fence
        assert fence is not None
        self.fences.append(fence)

    @rule(who=HANDLES)
    def acquire(self, who: int) -> None:
        got = self.handles[who].acquire(blocking=False)
        assert got == (self.holder is None)
        if got:
            self._acquired(who)

    @rule(who=HANDLES)
    def acquire_although_the_first_reply_is_lost(self, who: int) -> None:
        with losing_a_reply():
            got = self.handles[who].acquire(blocking=False)
        assert got == (self.holder is None)
        if got:
            self._acquired(who)

    @rule(who=HANDLES)
    def release(self, who: int) -> None:
        if who == self.holder:
            self.handles[who].release()
            self.holder = None
        elif who in self.deceived:
            with pytest.raises(LockNotOwnedError):
                self.handles[who].release()
            self.deceived.discard(who)
        else:
            with pytest.raises(LockError):
                self.handles[who].release()

    @precondition(lambda self: self.holder is not None)
    @rule()
    def release_although_the_first_reply_is_lost(self) -> None:
        with losing_a_reply():
            self.handles[self.holder].release()
        self.holder = None

    @rule(who=HANDLES, seconds=st.floats(min_value=1, max_value=1000))
    def extend(self, who: int, seconds: float) -> None:
        if who == self.holder:
            assert self.handles[who].extend(seconds, replace_ttl=True)
            ttl = self.client.pttl("model")
            assert seconds * 1000 - 500 < ttl <= seconds * 1000 + 1
        elif who in self.deceived:
            with pytest.raises(LockNotOwnedError):
                self.handles[who].extend(seconds)
        else:
            with pytest.raises(LockError):
                self.handles[who].extend(seconds)

    def _ended(self) -> None:
        if self.holder is not None:
            self.deceived.add(self.holder)
            self.holder = None

    @rule()
    def the_key_is_deleted(self) -> None:
        self.client.delete("model")
        self._ended()

    @rule()
    def everything_is_forgotten(self) -> None:
        self.client.flushall()
        self._ended()

    @rule(who=HANDLES)
    def reset(self, who: int) -> None:
        assert self.handles[who].reset() == (self.holder is not None)
        self._ended()

    @rule()
    def another_library_takes_it(self) -> None:
        """And gives it back: a plain redis-py lock sees ours, and ours sees it."""
        theirs = self.client.lock("model", timeout=1000)
        assert theirs.acquire(blocking=False) == (self.holder is None)
        if self.holder is None:
            assert not self.handles[0].acquire(blocking=False)
            theirs.release()

    @invariant()
    def the_server_knows_the_holder(self) -> None:
        if not hasattr(self, "handles"):
            return
        assert self.handles[0].locked() == (self.holder is not None)
        assert [h.owned() for h in self.handles] == [n == self.holder for n in range(3)]
        token = self.client.get("model")
        assert token == (None if self.holder is None else self.handles[self.holder].local.token)

    @invariant()
    def fences_strictly_increase(self) -> None:
        fences = getattr(self, "fences", [])
        assert all(a < b for a, b in itertools.pairwise(fences))

    @invariant()
    def only_holders_are_told_to_go_on(self) -> None:
        for number, handle in enumerate(getattr(self, "handles", [])):
            if number == self.holder:
                handle.ensure_held()
            elif number not in self.deceived:
                with pytest.raises(LockError):
                    handle.ensure_held()


class losing_a_reply:
    """The next script is carried out, but its reply never arrives."""

    def __enter__(self) -> None:
        self.lost = False
        self._exchange: Any = Server.exchange

        def lose(*args: Any, **options: Any) -> Any:
            self._exchange(*args, **options)  # After NOSCRIPT it is called once more.
            Server.exchange = self._exchange
            self.lost = True
            raise redis.ConnectionError("the reply was lost")

        Server.exchange = lose

    def __exit__(self, *exc: object) -> None:
        Server.exchange = self._exchange
        assert self.lost or exc[0] is not None


def test_the_locks_behave_as_their_model(client: redis.Redis) -> None:
    Locks.client = client
    run_state_machine_as_test(
        Locks,
        settings=settings(
            max_examples=examples(60),
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
