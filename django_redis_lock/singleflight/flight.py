"""The flight of one value: lead or follow, then store or read the result."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..events import RefreshFailed, Shared
from ..exceptions import ComputationFailed, LockError
from ..protocol import as_bytes, flight_stream
from ..threads import get_logger
from .in_process import InProcessFlight, LeaderRef, join, leave
from .leader import NOTHING, Leader, Producer
from .runners import Overtaken, ProducerFailed, Runner, Steps, being_computed, overtake

logger = get_logger("django_redis_lock.flights")

#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0

#: The result of ``get_or_compute`` if another computation takes longer than the caller waits.
TOO_LATE = object()
#: The caller leads; the value is in Redis.
LEAD, FOUND = object(), object()


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


def failure(message: Any) -> ComputationFailed:
    """The error of a caller that comes shortly after a computation failed with ``message``."""
    return ComputationFailed(as_bytes(message).decode(errors="replace"))


def expiry(pttl: int) -> float:
    """The monotonic time at which a key that now has ``pttl`` milliseconds left will be gone."""
    # Redis rounds down, and a key with 0 ms left is still there.
    return time.monotonic() + (max(pttl, 0) + 1) / 1000


class Flights:
    """Computes missing values of one database, each by one caller at a time.

    Args:
        runner: executes the steps.
        flight_timeout: seconds after which the followers of a dead leader take over.
    """

    def __init__(self, runner: Runner, flight_timeout: float) -> None:
        self._runner = runner
        self._server = runner.server
        self._flight_timeout = flight_timeout
        self._began = time.monotonic()
        #: Whether ``get_or_compute`` found the value, so that no caller had to compute it.
        self.was_there = False

    def _leader(self, key: bytes, producer: Producer) -> Leader:
        return Leader(self._runner, self._flight_timeout, [key], producer)

    def get_or_compute(
        self, key: bytes, producer: Producer, deadline: float, outage: BaseException | None = None
    ) -> Steps:
        """The value at ``key``, computed by this caller or by another; or ``TOO_LATE``.

        Args:
            deadline: monotonic time until which to wait for another caller's computation.
            outage: why Redis is unavailable; then only this process shares the computation.

        Raises:
            LockError: the producer of this key requested the key again.
            ComputationFailed: another computation has just failed, and ``error_ttl`` is not over.
            CoordinationError: a request to Redis failed, and nothing was computed.
            Exception: whatever the producer raises, to the caller that ran it.
        """
        if (self._server, key) in being_computed():
            raise LockError("the function that computes this value requests the value", key)
        asked: int | None = None
        leader_ref = LeaderRef()
        while True:
            shared = mine = InProcessFlight(self._runner, key, leader_ref)
            try:
                shared = join(mine)
                if shared is mine:
                    value = yield from self._ask_redis(key, shared, producer, deadline, outage)
            finally:
                if shared is mine:
                    leave(mine)
            if shared is mine:
                return self._found(shared, producer) if value is FOUND else value
            # A reply to a request sent before this caller joined may be older than a write before
            # that. Requests of the leaders after the first one are later.
            asked = shared.asked if asked is None else 0
            if not (yield self._runner.wait_for_event(shared.ended, deadline)):
                return TOO_LATE if outage else (yield from self._final_read(key, producer))
            if shared.found is not None and asked < shared.asked:
                return self._found(shared, producer)
            if shared.outage is not None and not outage:
                raise CoordinationError from shared.outage

    def compute_anyway(
        self, key: bytes, producer: Producer, outage: BaseException | None = None
    ) -> Steps:
        """The value, computed by this caller even if another is computing it. This caller leads
        from now on; the result of the earlier leader is not stored. A write wins over both."""
        leader = self._leader(key, producer)
        if outage:
            return (yield from leader.compute(outage))[key]
        replaced = NOTHING
        try:
            [replaced] = yield from leader.take_over()
        except (RedisError, OSError) as error:
            logger.warning("Could not take over the computation of %s: %s", leader, error)
        leader.begin({key: replaced})
        try:
            return (yield from self._lead(leader))
        except Overtaken:
            return (yield from self.get_or_compute(key, producer, math.inf))

    def refresh(self, key: bytes, old: Any, producer: Producer, wait: float | None) -> Steps:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value as Redis stores it.
            wait: compute in the background, and return the old value if that takes more seconds;
                None: compute here.
        """
        leader = self._leader(key, producer)
        try:
            [(status, *news)] = yield from leader.take()
        except (RedisError, OSError) as error:
            logger.warning("Could not refresh %s: %s", leader, error)
            return producer.decode(old)
        if status == 2:
            return producer.decode(news[0])
        if status != 1:
            producer.emit(self._server, Shared, True, 1)
            return producer.decode(old)
        leader.begin({key: news})
        refreshing = self._lead_or_return_old(leader, old)
        if wait is None:
            return (yield from refreshing)
        ended, results = self._runner.new_event(), []

        def in_background() -> Steps:
            try:
                results.append((yield from refreshing))
            finally:
                ended.set()

        if not (yield self._runner.run_in_background(in_background(), leader.renewals[0])):
            logger.warning("Too many refreshes in the background: %s is not refreshed now", leader)
            yield from leader.fail()
        elif wait:
            yield self._runner.wait_for_event(ended, time.monotonic() + wait)
        return results[0] if results else producer.decode(old)

    def _lead_or_return_old(self, leader: Leader, old: Any) -> Steps:
        producer = leader.producer
        try:
            return (yield from self._lead(leader))
        except Overtaken:
            return producer.decode(old)
        except ProducerFailed as failed:
            if not isinstance(failed.error, Exception):
                raise
            logger.warning(
                "The refresh of %s failed; the stale value is served", leader, exc_info=failed.error
            )
            producer.emit(self._server, RefreshFailed, failed.error)
            return producer.decode(old)

    def _lead(self, leader: Leader, shared: InProcessFlight | None = None) -> Steps:
        """Compute the value, store it, and hand it to the callers of this process that wait for it.

        Raises:
            Overtaken: another thread leads instead.
        """
        [key] = leader.keys
        shared = leader.shared = shared or InProcessFlight(self._runner, key)
        values, encoded = yield from leader.lead()
        shared.asked += 1
        [stored] = yield from leader.store(encoded)
        if stored is False:
            # A write or a delete came in between: only the caller gets the result.
            logger.info("%s was written while it was computed; not stored", leader)
        else:
            shared.found, shared.computed, shared.trace = encoded[key], True, leader.trace
        return values[key]

    def _found(self, shared: InProcessFlight, producer: Producer) -> Any:
        """The value that another caller of this process got."""
        self.was_there = not shared.computed
        if shared.computed:
            waited = time.monotonic() - self._began
            producer.emit(self._server, Shared, False, 1, waited, shared.trace)
        return producer.decode(shared.found)

    # -- asking Redis ------------------------------------------------------------------------

    def _ask_redis(
        self,
        key: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps:
        """The value, TOO_LATE, or FOUND with the value in ``shared``."""
        leader = self._leader(key, producer)
        if outage:
            values = yield from leader.compute(outage)
            shared.found, shared.computed = leader.encoded(values)[key], True
            shared.asked += 1
            return values[key]
        overtakes = self._runner.in_thread
        while True:
            try:
                outcome = yield from self._find(leader, shared, deadline, overtakes)
            except (RedisError, OSError) as error:
                shared.outage = error
                raise CoordinationError from error
            if outcome is not LEAD:
                return outcome
            with suppress(Overtaken):
                return (yield from self._lead(leader, shared))
            overtakes = False  # Else two could overtake each other for ever.
            leader = self._leader(key, producer)  # The old token is the overtaker's to replace.

    def _find(
        self, leader: Leader, shared: InProcessFlight, deadline: float, overtakes: bool
    ) -> Steps:
        """LEAD; FOUND when Redis has a value; or TOO_LATE."""
        [key] = leader.keys
        followed: dict[bytes, bytes] = {}
        while True:
            shared.asked += 1
            [(status, *news)] = yield from leader.take(followed)
            if status == 1:
                leader.begin({key: news})
                return LEAD
            if status == 2:
                shared.found = news[0]
                return FOUND
            if status == 3:
                raise failure(news[0])
            if time.monotonic() >= deadline:
                return TOO_LATE
            token, pttl = as_bytes(news[0]), int(news[1])
            followed = {key: flight_stream(key, token)}
            if overtakes and overtake(token):
                [replaced] = yield from leader.take_over({key: token})
                if replaced is not None:
                    leader.begin({key: replaced})
                    return LEAD
                continue  # The flight has ended, or another caller overtook it.
            next_check = min(time.monotonic() + FOLLOWER_CHECK_SECONDS, expiry(pttl))
            shared.computed = True
            until = min(next_check, deadline)
            shared.trace = yield self._runner.wait_for_leader(tuple(followed.values()), until)

    def _final_read(self, key: bytes, producer: Producer) -> Steps:
        """The value, or TOO_LATE. The caller we waited for may have found a value in Redis."""
        try:
            stored = yield self._runner.read(key)
        except (RedisError, OSError):
            return TOO_LATE
        return TOO_LATE if stored is None else producer.decode(stored[0])
