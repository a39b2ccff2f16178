"""The flight of one value: lead or follow, then store or read the result."""

from __future__ import annotations

from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..events import RefreshFailed, Shared
from ..exceptions import LockError
from ..threads import get_logger
from .in_process import InProcessFlight, LeaderRef, join, leave
from .leader import Leader, Producer
from .many import CoordinationError, MultiFlight
from .runners import Overtaken, ProducerFailed, Runner, Steps, being_computed

logger = get_logger("django_redis_lock.flights")

#: The result of ``get_or_compute`` if another computation takes longer than the caller waits.
TOO_LATE = object()


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

    def _flight(self, producer: Producer, shared: InProcessFlight | None = None) -> MultiFlight:
        return MultiFlight(self._runner, self._flight_timeout, producer, shared=shared)

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
                return value
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
        """As ``MultiFlight.compute_anyway``.

        Args:
            outage: as for ``get_or_compute``.
        """
        flight = self._flight(producer)
        if outage:
            return (yield from flight.compute_alone([key], outage))[key]
        return (yield from flight.compute_anyway([key]))[key]

    def refresh(self, key: bytes, old: Any, producer: Producer, wait: float | None) -> Steps:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value as Redis stores it.
            wait: compute in the background, and return the old value if that takes more seconds;
                None: compute here.
        """
        flight = self._flight(producer)
        leader = flight.leader([key])
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
        refreshing = self._lead_or_return_old(flight, leader, old)
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

    def _lead_or_return_old(self, flight: MultiFlight, leader: Leader, old: Any) -> Steps:
        producer = leader.producer
        try:
            return (yield from flight.lead(leader))[leader.keys[0]]
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

    def _found(self, shared: InProcessFlight, producer: Producer) -> Any:
        """The value that another caller of this process got."""
        self.was_there = not shared.computed
        if shared.computed:
            waited = time.monotonic() - self._began
            producer.emit(self._server, Shared, False, 1, waited, shared.trace)
        return producer.decode(shared.found)

    def _ask_redis(
        self,
        key: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps:
        """The value, or TOO_LATE. What the other callers of this process get is in ``shared``."""
        flight = self._flight(producer, shared)
        if outage:
            leader = flight.leader([key])
            values = yield from leader.compute(outage)
            shared.found, shared.computed = leader.encoded(values)[key], True
            shared.asked += 1
            return values[key]
        found, late = yield from flight.get_or_compute([key], deadline)
        self.was_there = bool(flight.were_there)
        return TOO_LATE if late else found[key]

    def _final_read(self, key: bytes, producer: Producer) -> Steps:
        """The value, or TOO_LATE. The caller we waited for may have found a value in Redis."""
        try:
            stored = yield self._runner.read(key)
        except (RedisError, OSError):
            return TOO_LATE
        return TOO_LATE if stored is None else producer.decode(stored[0])
