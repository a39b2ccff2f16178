"""The flights of one value or several: lead or follow, then store or read the result. Each step
takes one round trip for all values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from redis.exceptions import RedisError

from ..clock import time
from ..events import RefreshFailed, Shared
from ..exceptions import ComputationFailed, LockError
from ..protocol import as_bytes, printable
from ..protocol.keys import flight_stream
from ..threads import get_logger
from .in_process import InProcessFlight, LeaderRef, Overtaken, being_computed, join, leave, overtake
from .leader import Leader, Producer, Seen, Undecodable
from .runners import ProducerFailed, Runner, Steps

logger = get_logger("django_redis_lock.flights")

#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


def failure(message: Any) -> ComputationFailed:
    """The error of a caller that comes shortly after a computation failed with ``message``."""
    return ComputationFailed(as_bytes(message).decode(errors="replace"))


def expiry(pttl: int) -> float:
    """The monotonic time at which a key that now has ``pttl`` milliseconds left will be gone."""
    # Redis rounds down, and a key with 0 ms left is still there.
    return time.monotonic() + (max(pttl, 0) + 1) / 1000


class MultiFlight:
    """Computes the missing ones of some values, each by one caller at a time.

    Args:
        runner: executes the steps.
        flight_timeout: seconds after which the followers of a dead leader take over.
        producer: how to compute and store the values.
        names: of several keys, see ``Leader``.
    """

    def __init__(
        self,
        runner: Runner,
        flight_timeout: float,
        producer: Producer,
        names: Mapping[bytes, str] | None = None,
    ) -> None:
        self._runner = runner
        self._server = runner.server
        self._flight_timeout = flight_timeout
        self._producer = producer
        self._names = names
        #: Of a single key, what the other callers of this process wait for.
        self._shared = InProcessFlight(runner, b"")
        #: Whether a read has just found no value.
        self.unseen = False
        #: How many values were there at the first request.
        self.were_there = 0
        #: The SHA-1 of values that cannot be decoded, by key: they count as missing.
        self._unreadable: dict[bytes, str] = {}
        #: The values so far: they count also if a request fails later.
        self.found: dict[bytes, Any] = {}

    def leader(self, keys: list[bytes]) -> Leader:
        timeout, producer = self._flight_timeout, self._producer
        return Leader(self._runner, timeout, keys, producer, self._shared, self._names)

    def _refuse_to_wait_for_itself(self, keys: list[bytes]) -> None:
        for key in keys:
            if (self._server, key) in being_computed():
                raise LockError("the function that computes this value requests the value", key)

    def get_or_compute(self, keys: list[bytes], deadline: float) -> Steps:
        """The values, and the keys that others were still computing at ``deadline`` (monotonic
        seconds). A caller computes the values it leads before it waits, so two callers never wait
        for each other.

        Raises: as ``SingleFlight.get_value``.
        """
        self._refuse_to_wait_for_itself(keys)
        found, followed = self.found, dict[bytes, bytes]()
        began, mine, in_thread = time.monotonic(), self._shared, self._runner.in_thread
        while keys:
            leader = self.leader(keys)
            mine.asked += 1
            with self._coordination():
                replies = yield from leader.take(followed, self._unreadable, self.unseen)
                self.unseen = False
            led: dict[bytes, Seen] = {}
            overtaken: dict[bytes, bytes] = {}
            failed, streams, next_check = None, {}, time.monotonic() + FOLLOWER_CHECK_SECONDS
            there: dict[bytes, Any] = {}
            unreadable = False
            for key, (status, *news) in zip(keys, replies, strict=True):
                if status == 1:
                    led[key] = news
                elif status == 2:
                    there[key] = mine.found = news[0]
                elif status == 3:
                    failed = failure(news[0])
                elif in_thread and overtake(token := as_bytes(news[0])):
                    overtaken[key] = token
                else:
                    streams[key] = flight_stream(key, as_bytes(news[0]))
                    next_check = min(next_check, expiry(int(news[1])))
            if overtaken:
                with self._coordination():
                    taken = yield from leader.take_over(overtaken)
                for key, seen in zip(overtaken, taken, strict=True):
                    if seen is not None:
                        led[key] = seen
                    else:  # The flight has ended, or another caller overtook it.
                        streams[key] = b""
            shared = len(keys) - len(led) - len(streams)
            if followed and shared and failed is None:
                waited = time.monotonic() - began
                self._producer.emit(self._server, Shared, False, shared, waited, mine.trace)
            if led:
                leader.begin(led)
                try:
                    found.update((yield from self.lead(leader)))
                except Overtaken:  # Another thread leads these now.
                    in_thread = False
                    streams.update(dict.fromkeys(led, b""))
            # Decoding may fail, so first compute the values for which others wait.
            for key, value in there.items():
                try:
                    found[key] = self._producer.decode(value)
                    self.were_there += not followed
                except Undecodable:
                    self._unreadable[key] = hashlib.sha1(as_bytes(value)).hexdigest()
                    unreadable = True
                    streams[key], mine.found = b"", None
            if failed is not None:
                raise failed
            keys = list(streams)
            if keys and time.monotonic() >= deadline and not unreadable:
                break
            if keys and all(streams.values()):
                followed, mine.computed = streams, True
                awaited, until = tuple(streams.values()), min(next_check, deadline)
                with self._coordination():
                    mine.trace = yield self._runner.wait_for_leader(awaited, until)
        return found, keys

    @contextmanager
    def _coordination(self) -> Iterator[None]:
        """A request in the ``with`` block that fails raises CoordinationError."""
        try:
            yield
        except (RedisError, OSError) as error:
            self._shared.outage = error
            raise CoordinationError from error

    def compute_anyway(self, keys: list[bytes], *, replace: bool = False) -> Steps:
        """The values, computed by this caller even if others are computing them. The first result
        is stored: if each caller that has waited long enough replaced the one before, no result
        might ever be. With ``replace`` the results of earlier leaders are not stored. A write wins
        over all."""
        leader = self.leader(keys)
        try:
            taken = yield from leader.take_over(None if replace else dict.fromkeys(keys, b""))
        except (RedisError, OSError) as error:
            return (yield from leader.compute(error))
        leader.begin(dict(zip(keys, taken, strict=True)))
        try:
            return (yield from self.lead(leader))
        except Overtaken:
            return (yield from self.get_or_compute(keys, math.inf))[0]

    def lead(self, leader: Leader) -> Steps:
        """Compute the values, store them, and hand that of a single key to the callers of this
        process that wait for it.

        Raises:
            Overtaken: another thread leads instead.
        """
        shared = self._shared
        values, encoded = yield from leader.lead()
        shared.asked += 1
        stored = yield from leader.store(encoded)
        for key, is_stored in zip(leader.keys, stored, strict=True):
            if is_stored is False:
                # A write, a delete or another result came first: only the caller gets this one.
                text = "%s was written, deleted or stored while it was computed; not stored"
                logger.info(text, printable(key))
            else:
                shared.found, shared.computed = encoded.get(key), True
                shared.trace = leader.trace
        return values


#: The result of ``get_or_compute`` if another computation takes longer than the caller waits.
TOO_LATE = object()


class SingleFlight(MultiFlight):
    """Computes the value at ``key``; also for the other callers of this process that want it."""

    def __init__(
        self, runner: Runner, flight_timeout: float, producer: Producer, key: bytes
    ) -> None:
        super().__init__(runner, flight_timeout, producer)
        self._key = key
        self._began = time.monotonic()

    def get_value(self, deadline: float, outage: BaseException | None = None) -> Steps:
        """The value, computed by this caller or by another; or ``TOO_LATE``.

        Args:
            deadline: monotonic time until which to wait for another caller's computation.
            outage: why Redis is unavailable; then only this process shares the computation.

        Raises:
            LockError: the producer of this key requested the key again.
            ComputationFailed: another computation has just failed, and ``error_ttl`` is not over.
            CoordinationError: a request to Redis failed, and nothing was computed.
            Exception: whatever the producer raises, to the caller that ran it.
        """
        self._refuse_to_wait_for_itself([self._key])
        asked: int | None = None
        leader_ref = LeaderRef()
        while True:
            shared = mine = self._shared = InProcessFlight(self._runner, self._key, leader_ref)
            try:
                shared = join(mine)
                if shared is mine:
                    value = yield from self._ask_redis(deadline, outage)
            finally:
                if shared is mine:
                    leave(mine)
            if shared is mine:
                return value
            # A reply to a request sent before this caller joined may be older than a write before
            # that. Requests of the leaders after the first one are later.
            asked = shared.asked if asked is None else 0
            if not (yield self._runner.wait_for_event(shared.ended, deadline)):
                return TOO_LATE if outage else (yield from self._final_read())
            if shared.found is not None and asked < shared.asked:
                with suppress(Undecodable):  # Then this caller asks Redis.
                    return self._found_by(shared)
            if shared.outage is not None and not outage:
                raise CoordinationError from shared.outage

    def compute_value(self, outage: BaseException | None = None) -> Steps:
        """As ``compute_anyway``. ``outage``: as for ``get_value``."""
        self._shared = InProcessFlight(self._runner, b"")
        if outage:
            return (yield from self.leader([self._key]).compute(outage))[self._key]
        return (yield from self.compute_anyway([self._key]))[self._key]

    def refresh(self, old: Any, wait: float | None) -> Steps:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value.
            wait: compute in the background, and return the old value if that takes more seconds;
                None: compute here.
        """
        leader, producer = self.leader([self._key]), self._producer
        try:
            [(status, *news)] = yield from leader.take()
        except (RedisError, OSError) as error:
            logger.warning("Could not refresh %s: %s", leader, error)
            return old
        if status == 2:
            return producer.decode(news[0])
        if status != 1:
            producer.emit(self._server, Shared, True, 1)
            return old
        leader.begin({self._key: news})
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
        return results[0] if results and wait else old

    def _lead_or_return_old(self, leader: Leader, old: Any) -> Steps:
        try:
            return (yield from self.lead(leader))[self._key]
        except Overtaken:
            return old
        except ProducerFailed as failed:
            if not isinstance(failed.error, Exception):
                raise
            logger.warning(
                "The refresh of %s failed; the stale value is served", leader, exc_info=failed.error
            )
            self._producer.emit(self._server, RefreshFailed, failed.error)
            return old

    def _found_by(self, shared: InProcessFlight) -> Any:
        """The value that another caller of this process got."""
        value = self._producer.decode(shared.found)
        self.were_there = int(not shared.computed)
        if shared.computed:
            waited = time.monotonic() - self._began
            self._producer.emit(self._server, Shared, False, 1, waited, shared.trace)
        return value

    def _ask_redis(self, deadline: float, outage: BaseException | None) -> Steps:
        """The value, or TOO_LATE. What the other callers of this process get is in ``_shared``."""
        key, shared = self._key, self._shared
        if outage:
            leader = self.leader([key])
            values = yield from leader.compute(outage)
            shared.found, shared.computed = leader.encoded(values)[key], True
            shared.asked += 1
            return values[key]
        found, late = yield from self.get_or_compute([key], deadline)
        return TOO_LATE if late else found[key]

    def _final_read(self) -> Steps:
        """The value, or TOO_LATE. The caller we waited for may have found a value in Redis."""
        try:
            stored = yield self._runner.read(self._key)
        except (RedisError, OSError):
            return TOO_LATE
        with suppress(Undecodable):
            return TOO_LATE if stored is None else self._producer.decode(stored[0])
        return TOO_LATE
