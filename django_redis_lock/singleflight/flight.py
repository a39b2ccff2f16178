"""The flight of one value: lead or follow, then store or read the result."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..exceptions import ComputationFailed, LockError
from ..keeper import keeper
from ..notices import get_logger
from ..protocol import Call, flight_key, flight_stream, milliseconds, printable
from ..transport import Server
from .in_process import (
    FlightKey,
    InProcessFlight,
    LeaderRef,
    being_computed,
    computing,
    join,
    leave,
    overtake,
    token_for,
)
from .leader import NOTHING, Completion, FlightRenewal, Seen, run_or_abort
from .producer import (
    Overtaken,
    Producer,
    ProducerFailed,
    computation_events,
    emit_refresh_failed,
    emit_shared,
    log_without_redis,
)
from .scripts import READ, TAKE_FLIGHT, TAKE_OVER
from .steps import (
    FOLLOWER_CHECK_SECONDS,
    FOUND,
    LEAD,
    TOO_LATE,
    Compute,
    CoordinationError,
    Run,
    RunInBackground,
    Steps,
    WaitForEvent,
    WaitForLeader,
    retry_during_failover,
    text,
)

logger = get_logger("django_redis_lock.flights")


class Flights:
    """Computes missing values of one database, each by one caller at a time.

    Args:
        server: where the values are.
        flight_timeout: seconds after which the followers of a dead leader take over.
        event: makes what the others of this process wait for.
        group: stands for the callers that wait for each other in memory, such as the tasks of an
            event loop; None for threads.
        in_thread: a thread waits for the caller: it is the caller, or has asyncio run it.
    """

    def __init__(
        self,
        server: Server,
        flight_timeout: float,
        event: Callable[[], Any],
        group: Any = None,
        in_thread: bool = True,
    ) -> None:
        self._server = server
        self._flight_timeout = flight_timeout
        self._event = event
        self._group = group
        self._in_thread = in_thread

    def flight_id(self, key: bytes) -> FlightKey:
        """Identifies the flight that callers of this process share for ``key``."""
        return self._server, key, self._group

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
        flight_id = self.flight_id(key)
        if flight_id[:2] in being_computed():
            raise LockError("the function that computes this value requests the value", key)
        asked: int | None = None
        leader_ref = LeaderRef()
        while True:
            shared = mine = InProcessFlight(self._event(), leader_ref)
            try:
                shared = join(flight_id, mine)
                if shared is mine:
                    value = yield from self._ask_redis(key, shared, producer, deadline, outage)
            finally:
                if shared is mine:
                    leave(flight_id, mine)
            if shared is mine:
                return self._found(shared, producer) if value is FOUND else value
            # A reply to a request sent before this caller joined may be older than a write before
            # that. Requests of the leaders after the first one are later.
            asked = shared.asked if asked is None else 0
            if not (yield WaitForEvent(shared.ended, deadline)):
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
        if outage:
            return (yield from self._compute(key, producer, outage))[0]
        token = token_for(producer.compute)
        replaced = NOTHING
        try:
            replaced = yield from self._take_over(key, token)
        except (RedisError, OSError) as error:
            logger.warning("Could not take over the computation of %s: %s", printable(key), error)
        shared = InProcessFlight(self._event())
        flight = self._flight(key, token, shared, producer)
        try:
            return (yield from self._lead(flight, shared, producer, replaced))
        except Overtaken:
            return (yield from self.get_or_compute(key, producer, math.inf))

    def refresh(self, key: bytes, old: Any, producer: Producer, background: bool) -> Steps:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value as Redis stores it.
            background: return the old value at once, and compute in the background.
        """
        token = token_for(producer.compute)
        try:
            status, *news = yield from self._take(key, token, producer)
        except (RedisError, OSError) as error:
            logger.warning("Could not refresh %s: %s", printable(key), error)
            return producer.decode(old)
        if status == 2:
            return producer.decode(news[0])
        if status != 1:
            emit_shared(self._server, producer, stale=True)
            return producer.decode(old)
        shared = InProcessFlight(self._event())
        flight = self._flight(key, token, shared, producer)
        refreshing = self._lead_or_return_old(flight, shared, old, producer, news)
        if not background:
            return (yield from refreshing)
        if not (yield RunInBackground(refreshing, flight)):
            logger.warning(
                "Too many refreshes in the background: %s is not refreshed now", printable(key)
            )
            yield from self._completion(key, token).fail()
        return producer.decode(old)

    def _lead_or_return_old(
        self,
        flight: FlightRenewal,
        shared: InProcessFlight,
        old: Any,
        producer: Producer,
        replaced: Seen,
    ) -> Steps:
        try:
            return (yield from self._lead(flight, shared, producer, replaced))
        except Overtaken:
            return producer.decode(old)
        except ProducerFailed as failed:
            if not isinstance(failed.error, Exception):
                raise
            logger.warning(
                "The refresh of %s failed; the stale value is served",
                printable(flight.key),
                exc_info=failed.error,
            )
            emit_refresh_failed(self._server, producer, failed.error)
            return producer.decode(old)

    def _lead(
        self, flight: FlightRenewal, shared: InProcessFlight, producer: Producer, replaced: Seen
    ) -> Steps:
        """Compute the value, store it, and hand it to the callers that share this flight.

        Args:
            replaced: what was at the key when the flight began.

        Raises:
            Overtaken: another thread leads instead.
        """
        key, token = flight.key, flight.token
        try:
            keeper().add(flight)
            value, encoded = yield from self._compute(key, producer)
        except ProducerFailed as failed:
            if isinstance(failed.error, Overtaken):
                yield from self._completion(key, token).fail()
                raise failed.error from None
            pause = producer.error_ttl if isinstance(failed.error, Exception) else 0
            yield from self._completion(key, token).fail(failed.describe(), pause)
            raise
        finally:  # In every case: followers would wait for ever for a flight that is renewed.
            keeper().discard(flight)
        shared.asked += 1
        [stored] = yield from self._completion(key, token).store(
            {key: encoded}, producer, {key: replaced}
        )
        if stored is False:
            # A write or a delete came in between: only the caller gets the result.
            logger.info("%s was written while it was computed; not stored", printable(key))
        else:
            shared.found, shared.computed = encoded, True
        return value

    def _found(self, shared: InProcessFlight, producer: Producer) -> Any:
        """The value that another caller of this process got."""
        if shared.computed:
            emit_shared(self._server, producer)
        return producer.decode(shared.found)

    # -- the parts ---------------------------------------------------------------------------

    @property
    def _lifetime(self) -> int:
        return milliseconds(self._flight_timeout)

    def _flight(
        self, key: bytes, token: bytes, shared: InProcessFlight, producer: Producer
    ) -> FlightRenewal:
        about = (key, token, self._flight_timeout, shared, producer.group)
        return FlightRenewal(self._server, *about)

    def _completion(self, key: bytes, token: bytes) -> Completion:
        return Completion(self._server, [key], token, self._flight_timeout)

    def _compute(
        self, key: bytes, producer: Producer, outage: BaseException | None = None
    ) -> Steps:
        """The value, and the value as Redis stores it."""
        if outage:
            log_without_redis(self._server, key, outage)
        without_redis = outage is not None
        with (
            computing(self._server, (key,)),
            computation_events(self._server, producer, 1, without_redis),
        ):
            value = yield Compute(producer.compute)
        try:
            return value, producer.encode(value)
        except BaseException as error:  # It cannot be stored, so it cannot be shared.
            raise ProducerFailed(error) from error

    def _ask_redis(
        self,
        key: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps:
        """The value, TOO_LATE, or FOUND with the value in ``shared``."""
        if outage:
            value, shared.found = yield from self._compute(key, producer, outage)
            shared.asked += 1
            shared.computed = True
            return value
        token = token_for(producer.compute)
        overtakes = self._in_thread
        while True:
            try:
                finding = self._find(key, token, shared, producer, deadline, overtakes)
                outcome, replaced = yield from finding
            except (RedisError, OSError) as error:
                shared.outage = error
                raise CoordinationError from error
            if outcome is not LEAD:
                return outcome
            flight = self._flight(key, token, shared, producer)
            with suppress(Overtaken):
                return (yield from self._lead(flight, shared, producer, replaced))
            overtakes = False  # Else two could overtake each other for ever.
            token = token_for(producer.compute)  # The old one is the overtaker's to replace.

    def _find(
        self,
        key: bytes,
        token: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        overtakes: bool,
    ) -> Steps:
        """LEAD and what is at the key now; FOUND when Redis has a value; or TOO_LATE."""
        while True:
            shared.asked += 1
            take = partial(self._take, key, token, producer)
            following = shared.computed
            status, *news = yield from (
                retry_during_failover(self._server, take) if following else take()
            )
            if status == 1:
                return LEAD, news
            if status == 2:
                shared.found = news[0]
                return FOUND, NOTHING
            if status == 3:
                raise ComputationFailed(text(news[0]))
            if time.monotonic() >= deadline:
                return TOO_LATE, NOTHING
            leader, pttl = text(news[0]).encode(), news[1]
            if overtakes and overtake(leader):
                replaced = yield from self._take_over(key, token, leader)
                if replaced is not None:
                    return LEAD, replaced
                overtakes = False
                continue
            next_check = time.monotonic() + min(FOLLOWER_CHECK_SECONDS, max(int(pttl), 1) / 1000)
            shared.computed = True
            yield WaitForLeader((flight_stream(key, leader),), min(next_check, deadline))

    def _final_read(self, key: bytes, producer: Producer) -> Steps:
        """The value, or TOO_LATE. The caller we waited for may have found a value in Redis."""
        try:
            [stored] = yield Run((Call(READ, (key,), ()),))
        except (RedisError, OSError):
            return TOO_LATE
        return TOO_LATE if stored is None else producer.decode(stored[0])

    def _take_over(self, key: bytes, token: bytes, *leader: bytes) -> Steps:
        """Lead from now on, in place of any leader or of ``leader``; returns what is at the key
        now, or None if yet another caller leads."""
        call = Call(TAKE_OVER, (key, flight_key(key)), (token, self._lifetime, *leader))
        [replaced] = yield from run_or_abort([key], token, call)
        return replaced

    def _take(self, key: bytes, token: bytes, producer: Producer) -> Steps:
        taking = (token, self._lifetime, producer.stale)
        call = Call(TAKE_FLIGHT, (key, flight_key(key)), taking)
        [(status, *news)] = yield from run_or_abort([key], token, call)
        return (int(status), *news)
