"""The flights of one value or several, in four steps: query who leads; compute what this caller
leads; store that; follow the others. Each step takes one round trip for all values."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from ..clock import time
from ..events import Shared
from ..exceptions import ComputationFailed
from ..protocol import as_bytes, printable
from ..protocol.keys import flight_stream
from ..steps import Steps
from ..threads import get_logger
from ..transport.refusals import redis_errors
from .in_process import (
    InProcessFlight,
    Overtaken,
    SharedValue,
    computes_in,
    join,
    leave,
    overtake,
    refuse_recursion,
    waits_for_itself,
)
from .leader import Leader, Producer, Undecodable
from .runners import Runner
from .scripts import NOTHING, Before, Failed, Follows, Found, Leads, State

logger = get_logger("django_redis_lock.flights")

#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


class Round:
    """The replies to one query, for each key whose value is still missing.

    Attributes:
        led: what is at the keys that this caller leads.
        present: the values that there are.
        overtaken: the tokens of leaders of this process that have not begun.
        streams: of the flights that this caller follows; empty where it is to query again.
        ends_at: the monotonic time at which the first of those must be checked.
        leaders: the tokens of those flights.
        failed: the error of a caller that comes shortly after a failure.
    """

    __slots__ = ("ends_at", "failed", "leaders", "led", "overtaken", "present", "streams")

    def __init__(self) -> None:
        self.led: dict[bytes, Before] = {}
        self.present: dict[bytes, object] = {}
        self.overtaken: dict[bytes, bytes] = {}
        self.streams: dict[bytes, bytes] = {}
        self.leaders: dict[bytes, bytes] = {}
        self.ends_at = math.inf
        self.failed: ComputationFailed | None = None

    def add(self, key: bytes, reply: State, overtakes: bool) -> None:
        match reply:
            case Leads(before):
                self.led[key] = before
            case Found(value):
                self.present[key] = value
            case Failed(message):
                text = as_bytes(message).decode(errors="replace")
                self.failed = ComputationFailed(text)
            case Follows(leader, ends_at):
                if overtakes and overtake(leader):
                    self.overtaken[key] = leader
                else:
                    self.streams[key] = flight_stream(key, leader)
                    self.leaders[key] = leader
                    self.ends_at = min(self.ends_at, ends_at)


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
        #: Of a single key, what the other callers of this process get.
        self._shared = SharedValue()
        #: Whether there is probably no value: a read has just returned none.
        self.unseen = False
        #: How many values were there at the first request.
        self.were_there = 0
        #: The SHA-1 of values that cannot be decoded, by key: they count as missing.
        self._undecodable: dict[bytes, str] = {}
        #: Events that wait until the callers have their values.
        self._told: list[Callable[[], object]] = []
        #: The values so far: they count also if a request fails later.
        self.values: dict[bytes, object] = {}

    def leader(self, keys: list[bytes]) -> Leader:
        shared = self._shared if isinstance(self._shared, InProcessFlight) else None
        timeout, producer = self._flight_timeout, self._producer
        return Leader(self._runner, timeout, keys, producer, shared, self._names)

    def get_values(self, keys: list[bytes], deadline: float) -> Steps[list[bytes]]:
        """Sets ``values``; returns the keys that others were still computing at ``deadline``
        (monotonic seconds).

        Raises: as ``SingleFlight.get_value``.
        """
        refuse_recursion(self._server, keys)
        try:
            return (yield from self._get_values(keys, deadline))
        finally:
            self._tell()

    def _get_values(self, missing: list[bytes], deadline: float) -> Steps[list[bytes]]:
        """As ``get_values``. A caller computes the values it leads before it waits, so two callers
        never wait for each other."""
        began, followed = time.monotonic(), dict[bytes, bytes]()
        in_thread = self._runner.in_thread
        while missing:
            leader = self.leader(missing)
            replies = yield from self._query(leader, followed, in_thread)
            if followed and replies.failed is None:
                shared = len(missing) - len(replies.led) - len(replies.streams)
                waited = time.monotonic() - began
                tell = partial(self._emit_shared, shared, waited, self._shared.trace)
                self._told.append(tell)
            if replies.led:
                leader.begin(replies.led)
                try:
                    self.values.update((yield from self._compute(leader)))
                except Overtaken:  # Another thread leads these now.
                    in_thread = False
                    replies.streams.update(dict.fromkeys(replies.led, b""))
            # Decoding may fail, so first compute the values for which others wait.
            undecodable = bool(replies.present) and self._decode(replies, is_first=not followed)
            if replies.failed is not None:
                raise replies.failed
            missing = list(replies.streams)
            if self._waits_for_itself(replies):
                break
            if time.monotonic() >= deadline and not undecodable:
                break
            if missing and all(replies.streams.values()):
                followed = replies.streams
                yield from self._follow(followed, min(replies.ends_at, deadline))
        return missing

    def _query(
        self, leader: Leader, followed: Mapping[bytes, bytes], overtakes: bool
    ) -> Steps[Round]:
        """Query who leads."""
        replies, keys, unseen = Round(), leader.keys, self.unseen
        self.unseen = False
        self._shared.requests += 1
        try:
            answers = yield from leader.query(followed, self._undecodable, unseen)
            for key, reply in zip(keys, answers, strict=True):
                replies.add(key, reply, overtakes)
            if replies.overtaken:
                for key, before in (yield from leader.take_over(replies.overtaken)).items():
                    if before is not None:
                        replies.led[key] = before
                    else:  # The flight has ended, or another caller overtook it.
                        replies.streams[key] = b""
        except redis_errors() as error:
            raise self._failed(error) from error
        for value in replies.present.values():
            self._shared.encoded = value
        if replies.streams:
            replies.ends_at = min(replies.ends_at, time.monotonic() + FOLLOWER_CHECK_SECONDS)
        return replies

    def _compute(self, leader: Leader) -> Steps[dict[bytes, object]]:
        """Compute the values, store them, and hand that of a single key to the callers of this
        process that wait for it.

        Raises:
            Overtaken: another thread leads instead.
        """
        values = yield from leader.lead()
        shared = self._shared
        shared.requests += 1
        leader.told = self._told
        stored = yield from leader.store()
        for key, is_stored in zip(leader.keys, stored, strict=True):
            if is_stored is False:
                # A write, a delete or another result came first: only the caller gets this one.
                text = "%s was written, deleted or stored while it was computed; not stored"
                logger.info(text, printable(key))
            elif key in leader.encoded:
                shared.encoded, shared.computed = leader.encoded[key].value, True
                shared.trace = leader.trace
        return values

    def _decode(self, replies: Round, is_first: bool) -> bool:
        """Decode the values that there are; returns whether some of them count as missing."""
        undecodable = False
        for key, value in replies.present.items():
            try:
                self.values[key] = self._producer.decode(value)
                self.were_there += is_first
            except Undecodable:
                self._undecodable[key] = hashlib.sha1(as_bytes(value)).hexdigest()
                undecodable, replies.streams[key], self._shared.encoded = True, b"", None
        return undecodable

    def _waits_for_itself(self, replies: Round) -> bool:
        """Whether a wait for one of the leaders would stop it."""
        return self._runner.group is None and any(
            waits_for_itself(self._server, key, computes_in.get(leader))
            for key, leader in replies.leaders.items()
        )

    def _follow(self, streams: Mapping[bytes, bytes], until: float) -> Steps[None]:
        """Wait for the end of one of the flights with these ``streams``."""
        self._shared.computed = True
        try:
            self._shared.trace = yield self._runner.wait_for_leader((*streams.values(),), until)
        except redis_errors() as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CoordinationError:
        self._shared.outage = error
        return CoordinationError()

    def _tell(self) -> None:
        """Emit what has happened, now that all callers of this process have their value."""
        while self._told:
            self._told.pop(0)()

    def _emit_shared(self, values: int, waited: float, trace: str) -> None:
        if values:
            self._producer.emit(self._server, Shared, False, values, waited, trace)

    def compute_anyway(
        self, keys: list[bytes], *, replace: bool = False
    ) -> Steps[dict[bytes, object]]:
        """The values, computed by this caller even if others are computing them. The first result
        is stored: if each caller that has waited long enough replaced the one before, no result
        might ever be. With ``replace`` the results of earlier leaders are not stored. A write wins
        over all."""
        leader = self.leader(keys)
        try:
            before = yield from leader.take_over(None if replace else dict.fromkeys(keys, b""))
        except redis_errors() as error:
            return (yield from leader.without_redis(error))
        leader.begin({key: seen or NOTHING for key, seen in before.items()})
        try:
            return (yield from self._compute(leader))
        except Overtaken:
            yield from self.get_values(keys, math.inf)
            return self.values
        finally:
            self._tell()


#: The result of ``get_value`` if another computation takes longer than the caller waits.
TOO_LATE = object()


class SingleFlight(MultiFlight):
    """Computes the value at ``key``; also for the other callers of this process that want it."""

    def __init__(
        self, runner: Runner, flight_timeout: float, producer: Producer, key: bytes
    ) -> None:
        super().__init__(runner, flight_timeout, producer)
        self._key = key

    def get_value(self, deadline: float, outage: BaseException | None = None) -> Steps[object]:
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
        refuse_recursion(self._server, [self._key])
        began, requests_before = time.monotonic(), -1
        while True:
            shared = mine = InProcessFlight(self._runner, self._key)
            self._shared = mine
            self._runner.begun.append(mine)
            try:
                shared = join(mine)
                if shared is mine:
                    if outage:
                        return (yield from self._compute_without_redis(mine, outage))
                    late = yield from self._get_values([self._key], deadline)
                    return TOO_LATE if late else self.values[self._key]
            finally:
                if shared is mine:
                    leave(mine)
                    self._tell()
            # A reply to a request sent before this caller joined may be older than a write before
            # that. Requests of the leaders after the first one are later.
            requests_before = shared.requests if requests_before < 0 else 0
            in_a_thread = self._runner.group is None
            if in_a_thread and waits_for_itself(self._server, self._key, shared.thread):
                return TOO_LATE
            if not (yield self._runner.wait_for_event(shared.ended, deadline)):
                return TOO_LATE if outage else (yield from self._final_read())
            if shared.encoded is not None and requests_before < shared.requests:
                with suppress(Undecodable):  # Then this caller queries Redis.
                    value = self._producer.decode(shared.encoded)
                    self.were_there = int(not shared.computed)
                    if shared.computed:
                        self._emit_shared(1, time.monotonic() - began, shared.trace)
                    return value
            if shared.outage is not None and not outage:
                raise CoordinationError from shared.outage

    def compute_value(self, outage: BaseException | None = None) -> Steps[object]:
        """As ``compute_anyway``. ``outage``: as for ``get_value``."""
        if outage:
            return (yield from self.leader([self._key]).without_redis(outage))[self._key]
        return (yield from self.compute_anyway([self._key]))[self._key]

    def _compute_without_redis(self, shared: InProcessFlight, outage: BaseException) -> Steps[Any]:
        leader = self.leader([self._key])
        values = yield from leader.without_redis(outage, shared=True)
        shared.encoded, shared.computed = leader.encoded[self._key].value, True
        shared.requests += 1
        return values[self._key]

    def _final_read(self) -> Steps[object]:
        """The value, or TOO_LATE. The caller we waited for may have read a value in Redis."""
        try:
            stored = yield self._runner.read(self._key)
        except redis_errors():
            return TOO_LATE
        with suppress(Undecodable):
            return TOO_LATE if stored is None else self._producer.decode(stored[0])
        return TOO_LATE
