"""One computation of one value: who leads, who follows, what becomes of the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from redis.exceptions import RedisError

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

__all__ = ["Flights"]

logger = get_logger("django_redis_lock.flights")


class Flights:
    """Computes missing values of one database, each once at a time.

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
        """Where those of this process meet who are after the value at ``key``."""
        return self._server, key, self._group

    def get_or_compute(
        self, key: bytes, producer: Producer, deadline: float, outage: BaseException | None = None
    ) -> Steps:
        """The value at ``key``, computed here or by whoever already does; or ``TOO_LATE``.

        Args:
            deadline: monotonic time until which to wait for another's computation.
            alone: why Redis cannot be asked; only those of this process share the computation.

        Raises:
            LockError: the producer of this key asked for this key again.
            ComputationFailed: another's computation has just failed, and nobody is to try again.
            CoordinationError: Redis could not be asked who computes.
            Exception: whatever the producer raises, to the caller that ran it.
        """
        flight_id = self.flight_id(key)
        if flight_id[:2] in being_computed():
            raise LockError("get_or_set needs the value it is just computing", key)
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
            # An answer to what was asked before we came may be older than a write before we came.
            # Those who speak after the first that we have waited for ask later than that.
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
        """The value, computed here although another computes it. This caller leads from now on:
        the result of who began last is kept, and a write meanwhile wins over both."""
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
        """A stale value computed anew, unless somebody does that already; otherwise the old one.

        Args:
            old: the value as Redis keeps it.
            background: give the old one at once, and compute behind the caller's back.
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
        refreshing = self._lead_or_keep(flight, shared, old, producer, news)
        if not background:
            return (yield from refreshing)
        if not (yield RunInBackground(refreshing, flight)):
            logger.warning(
                "Too many refreshes in the background: %s is not refreshed now", printable(key)
            )
            yield from self._completion(key, token).fail()
        return producer.decode(old)

    def _lead_or_keep(
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
        """The value, computed and stored; and for those shared what they may have of it.

        Args:
            replaced: what was at its key when the flight began.

        Raises:
            Overtaken: another thread leads instead.
        """
        key, token = flight.key, flight.token
        try:
            keeper().add(flight)
            value, kept = yield from self._compute(key, producer)
        except ProducerFailed as failed:
            if isinstance(failed.error, Overtaken):
                yield from self._completion(key, token).fail()
                raise failed.error from None
            pause = producer.error_ttl if isinstance(failed.error, Exception) else 0
            yield from self._completion(key, token).fail(failed.describe(), pause)
            raise
        finally:  # However it ends: a flight that is renewed for ever would be followed for ever.
            keeper().discard(flight)
        shared.asked += 1
        [stored] = yield from self._completion(key, token).store(
            {key: kept}, producer, {key: replaced}
        )
        if stored is False:
            # A write or a delete came in between: what we computed is for our caller alone.
            logger.info("%s was written while it was computed; not stored", printable(key))
        else:
            shared.found, shared.computed = kept, True
        return value

    def _found(self, shared: InProcessFlight, producer: Producer) -> Any:
        """What those shared have not computed themselves."""
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
        """The value, and the value as Redis is to keep it."""
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
        except BaseException as error:  # It cannot be kept, and so not be shared either.
            raise ProducerFailed(error) from error

    def _ask_redis(
        self,
        key: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps:
        """The value, TOO_LATE, or FOUND; and for those shared what they may have."""
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

    def _find(
        self,
        key: bytes,
        token: bytes,
        shared: InProcessFlight,
        producer: Producer,
        deadline: float,
        overtakes: bool,
    ) -> Steps:
        """LEAD and what is there to be replaced; FOUND as soon as Redis keeps a value at ``key``;
        or TOO_LATE."""
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
                return LEAD, (yield from self._take_over(key, token))
            look_again = time.monotonic() + min(FOLLOWER_CHECK_SECONDS, max(int(pttl), 1) / 1000)
            shared.computed = True
            yield WaitForLeader((flight_stream(key, leader),), min(look_again, deadline))

    def _final_read(self, key: bytes, producer: Producer) -> Steps:
        """The value, or TOO_LATE: whom we have waited for may have been a mere reader of it."""
        try:
            [kept] = yield Run((Call(READ, (key,), ()),))
        except (RedisError, OSError):
            return TOO_LATE
        return TOO_LATE if kept is None else producer.decode(kept[0])

    def _take_over(self, key: bytes, token: bytes) -> Steps:
        """Lead from now on; what is there to be replaced."""
        call = Call(TAKE_OVER, (key, flight_key(key)), (token, self._lifetime))
        [replaced] = yield from run_or_abort([key], token, call)
        return replaced

    def _take(self, key: bytes, token: bytes, producer: Producer) -> Steps:
        taking = (token, self._lifetime, producer.stale)
        call = Call(TAKE_FLIGHT, (key, flight_key(key)), taking)
        [(status, *news)] = yield from run_or_abort([key], token, call)
        return (int(status), *news)
