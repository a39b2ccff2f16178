"""The flights of one value or several, from this process to Redis.

Of the callers of this process that want one value, one asks Redis and the others wait for it. A
flight has four steps, each of which takes one round trip for all its values: query who leads;
compute what this caller leads; store that; follow the others (``Flight``). A ``Leader`` is
what it leads in one such round: it begins the flights, has the keeper renew them, and ends them
with a value, without one, or after an interruption.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from asgiref.sync import sync_to_async
from redis.exceptions import BusyLoadingError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from .. import events, protocol
from ..clock import time
from ..events import Computed, Computing, RefreshFailed, Shared, Stored, Subject
from ..exceptions import ComputationFailed, LockError
from ..keeper import DeferredRelease, Job, keeper
from ..protocol import (
    Call,
    Reply,
    as_bytes,
    encodable,
    fingerprint,
    hostname,
    milliseconds,
    new_token,
    printable,
)
from ..protocol.keys import FLIGHTS, flight_key, flight_keys, flight_leader, flight_stream
from ..steps import Steps
from ..threads import (
    Mutex,
    Repeated,
    after_fork,
    free_after_fork,
    get_logger,
    may_log,
    this_process,
)
from ..transport import Server, is_outage, is_refusal, pack_words
from .runners import Computation, ProducerFailed, ThreadRunner, under_computation
from .scripts import END_FLIGHT, NOTHING, READ, RENEW_FLIGHT, STORE, TAKE_FLIGHT, TAKE_OVER, Before

if TYPE_CHECKING:
    from .tasks import AsyncRunner

R = TypeVar("R")

logger = get_logger("django_redis_lock.flights")
outage_logger = get_logger("django_redis_lock.outage")

#: Milliseconds for which followers can read the end of a flight.
STREAM_LIFETIME_MILLISECONDS = 10_000
#: The same if they get a value there that is not stored: it may be large.
SHARED_LIFETIME_MILLISECONDS = 2_000
#: Seconds after which a follower checks whether its flight still exists.
FOLLOWER_CHECK_SECONDS = 2.0
#: Seconds a follower pauses after a wait that was cut short.
RETRY_PAUSE_SECONDS = 0.05
#: Seconds after which a computation is listed in the admin.
DESCRIBE_AFTER_SECONDS = 0.5

_not_asked = Repeated(logger, "Could not refresh %s: %s")
_too_many = Repeated(logger, "Too many refreshes in the background: %s is not refreshed now")
_failed = Repeated(logger, "The refresh of %s failed; the stale value is served")
_logged_at: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()
_NONE: Mapping[bytes, Any] = MappingProxyType({})
Runner: TypeAlias = "ThreadRunner | AsyncRunner"

# -- the callers of one value ----------------------------------------------------------------------


class InProcessFlight:
    """The callers of this process that want one value; the first queries Redis for all of them, and
    tells the others what follows."""

    requests = 0  #: How many it has sent.
    encoded: object = None  #: The value as Redis stores it; None: query Redis again.
    trace = ""  #: Of the computation; see ``events.trace_parent``.
    computed = False  #: Whether the value was computed, not only read.
    outage: Exception | None = None  #: Why a request failed.

    def __init__(self, runner: Runner, key: bytes) -> None:
        self.flight_id = (runner.server, key, runner.group)
        self.ended = runner.new_event()
        self.thread = threading.get_ident()

    def left(self) -> None:
        """The call that has made this has ended, however."""
        if in_flight.get(self.flight_id) is self:
            leave(self)


#: The flights of this process, by key and what stands for the callers: the ``group`` of their
#: runners. Each operation of a dict is atomic.
in_flight: dict[tuple[Server, bytes, object], InProcessFlight] = {}
after_fork(in_flight.clear)
_leaving = free_after_fork(Mutex())


def leave(shared: InProcessFlight) -> None:
    """End the flight ``shared`` of this process, and wake its other callers."""
    try:
        with _leaving:  # Else the keeper, which may do the same, removes the next flight.
            if in_flight.get(shared.flight_id) is shared:
                in_flight.pop(shared.flight_id, None)
    finally:
        shared.ended.set()


# -- what is being computed ------------------------------------------------------------------------


class Overtaken(Exception):
    """The call had not begun, and another thread computes the value instead."""


class Postponed(BaseException):
    """Raised by a producer whose value will be complete later, perhaps in another thread: the
    flight goes on for its timeout. See ``contrib.pages``."""

    #: None: Redis was down when the computation began, or the flight has ended.
    leader: Leader | None = None


class DeferredCall:
    """A function that runs in another thread: Django's thread for synchronous code. If that thread
    itself waits for the value, the function would never begin. So a thread that would wait for a
    function that has not begun may ``overtake`` it, and computes the value instead.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function
        self._mutex = Mutex()
        self._begun = self._overtaken = False

    def __call__(self, *args: object) -> object:
        return sync_to_async(self._begin)(*args)

    def _begin(self, *args: object) -> object:
        with self._mutex:
            if self._overtaken:
                self._overtaken = False
                raise Overtaken
            self._begun = True
        try:
            return self.function(*args)
        except StopIteration as error:  # A future refuses it, and its task would wait forever.
            raise RuntimeError("the function raised StopIteration") from error

    def overtake(self) -> bool:
        """Whether the function has not begun. Then it never will, and its caller follows."""
        with self._mutex:
            self._overtaken = not self._begun
            return self._overtaken


#: Deferred calls of this process by the tokens of their flights.
_deferred: weakref.WeakValueDictionary[bytes, DeferredCall] = weakref.WeakValueDictionary()
after_fork(_deferred.clear)


#: The threads in which this process computes, by the tokens of the flights.
computes_in: dict[bytes, int] = {}
after_fork(computes_in.clear)


_warned_at: weakref.WeakKeyDictionary[Server, float] = weakref.WeakKeyDictionary()


def refuse_recursion(server: Server, keys: Iterable[bytes]) -> None:
    """Raises LockError if this thread or task, or the one that started it, is computing one of
    these ``keys``: it would wait for itself."""
    for here in under_computation.get():
        for key in keys:
            if (server, key) in here:
                raise LockError("the function that computes this value requests the value", key)


def innermost_flight() -> tuple[bytes, bytes] | None:
    """The key that the caller itself computes, and the token of its flight."""
    for here in reversed(under_computation.get()):
        for (server, key), computation in [*here.items()]:
            if server is not None:
                return key, computation.token
    return None


def own_flights(keys: Iterable[bytes] | None = None, did: str = "written") -> dict[bytes, bytes]:
    """The keys among ``keys`` (None: all) that the caller is part of the computation of, each with
    the token of its flight. A write to them by the caller is older than the computation's result,
    so it must not end the flight, and STORE must expect it: the caller is about to have ``did`` it.
    """
    computations = under_computation.get()
    if not computations:  # As in almost every write.
        return {}
    wanted, own = None if keys is None else set(keys), {}
    for here in computations:
        for (_, key), computation in [*here.items()]:
            if wanted is None or key in wanted:
                own[key] = computation.token
                if computation.own_writes.get(key) != "written":
                    computation.own_writes[key] = did
    return own


class computing:
    """In this block, the caller is part of the ``computation`` of the values at ``keys``: this has
    the ``token`` of the flight, and by key in ``own_writes`` what it has done itself (see STORE).
    """

    __slots__ = ("_here", "_mark")

    def __init__(self, server: Server | None, keys: Iterable[bytes], computation: Any) -> None:
        self._here = {(server, key): computation for key in keys}

    def __enter__(self) -> None:
        self._mark = under_computation.set((*under_computation.get(), self._here))

    def __exit__(self, *error: object) -> None:
        self._here.clear()  # A task that began in this block may outlive it, with its context.
        try:
            under_computation.reset(self._mark)
        except ValueError:
            pass  # The garbage collector closes the generator in another context.


# -- the leader ------------------------------------------------------------------------------------


class Undecodable(Exception):
    """A stored value cannot be decoded, so it counts as missing: it is from another version of the
    project, or from another serializer."""


def encode_value(encode: Callable[[object], R], key: object, value: object) -> R:
    """What ``encode`` makes of ``value``; an error of a serializer names its ``key``."""
    try:
        return encode(value)
    except Exception as error:
        if error.args and isinstance(error.args[0], str):
            error.args = (f"{error.args[0]} (the value of {key!r})", *error.args[1:])
        raise


class Producer(NamedTuple):
    """What to compute and how to store it.

    Attributes:
        compute: returns the value; or, given a list of names, those of several, as a dict.
        encode: turns the value into what Redis stores.
        decode: turns that into the value, or raises Undecodable.
        lifetime: returns the milliseconds to store a value; 0 without end, negative not at all.
        stale: at the end of its lifetime, the milliseconds for which it is stale.
        keeps_objects: whether decoding what is stored gives an equal object, as with pickle. Else
            the caller that computes a value gets it decoded, as all others do.
        error_ttl: milliseconds after a failure in which others do not try again; 0 for none.
        name, group, cache: see ``events.Subject``.
    """

    compute: Callable[..., object]
    encode: Callable[[object], bytes | int]
    decode: Callable[[object], object]
    lifetime: Callable[[object], int]
    stale: int = 0
    error_ttl: int = 0
    keeps_objects: bool = True
    name: str = ""
    group: str = ""
    cache: object = None

    def subject(self, server: Server) -> Subject:
        return Subject.of(self.name, self.group, "", server, self.cache)

    def emit(self, server: Server, kind: Callable[..., object], *details: object) -> None:
        if events.listeners:
            events.emit(kind(self.subject(server), *details))


class Encoded(NamedTuple):
    """A computed value as Redis stores it, for so many milliseconds; see ``Producer.lifetime``."""

    value: bytes | int
    lifetime: int


class Leader:
    """A caller that leads the flights of some ``keys``, or wants to, in one round of ``flight``: it
    queries who leads, and computes and stores the values."""

    #: The trace of the computation; see ``events.trace_parent``.
    trace = ""
    #: When the last request to lead was sent: the lifetimes of the flights began no earlier.
    sent_at = 0.0
    #: Whether there may be flights that it leads: see ``left``.
    may_lead = False

    def __init__(self, flight: Flight, keys: list[bytes]) -> None:
        self.flight, self.keys = flight, keys
        self.server, self.timeout = flight.server, flight.timeout
        self.producer, self._runner = flight.producer, flight.runner
        self._shared = flight.shared
        self.token = new_token()
        if isinstance(self.producer.compute, DeferredCall):
            _deferred[self.token] = self.producer.compute
        self.renewals: list[FlightRenewal] = []
        self.own_writes: dict[bytes, str] = {}
        #: What was computed.
        self.encoded: Mapping[bytes, Encoded] = _NONE
        #: The replies to ``query``: what is at the keys that it leads; the values that there are.
        self.led: dict[bytes, Before] = {}
        self.present: dict[bytes, object] = {}
        #: The streams of the flights that it follows, empty where it is to query again; the tokens
        #: of their leaders; the monotonic time at which the first must be checked.
        self.streams: dict[bytes, bytes] = {}
        self.leaders: dict[bytes, bytes] = {}
        self.ends_at = math.inf
        #: The error of a caller that comes shortly after a failure.
        self.failed: ComputationFailed | None = None
        self._process = this_process()
        self._runner.begun.append(self.left)

    def __str__(self) -> str:
        first = printable(self.keys[0])
        return first if len(self.keys) == 1 else f"{first} and {len(self.keys) - 1} more"

    def name_of(self, key: bytes) -> str:
        """The name for people, where ``key`` may not show it; else empty."""
        producer = self.producer
        if getattr(producer.cache, "_has_plain_keys", True):
            return ""
        return producer.name if self.flight.names is None else self.flight.names[key]

    # -- to query Redis ----------------------------------------------------------------------

    def query(
        self,
        followed: Mapping[bytes, bytes] = _NONE,
        undecodable: Mapping[bytes, str] = _NONE,
        overtakes: bool = False,
    ) -> Steps[None]:
        """Ask who leads the flight of each key, or for its value.

        Args:
            followed: the streams of the flights that this caller has waited for, by key. Then it
                wants the value and not an error, so an outage is retried until a failover would be
                complete.
            undecodable: the SHA-1 of what is at a key and cannot be decoded.
            overtakes: see ``DeferredCall``.
        """
        args = self.token, milliseconds(self.timeout), self.producer.stale
        calls = [
            Call(
                TAKE_FLIGHT,
                (key, flight_key(key), *([followed[key]] if key in followed else ())),
                (*args, undecodable.get(key, "")),
            )
            for key in self.keys
        ]
        until = time.monotonic() + (self.server.FAILOVER_SECONDS if followed else 0.0)
        while True:
            try:
                answers = yield from self._ask_to_lead(*calls)
                break
            except RedisError as error:
                if len(self.keys) > 1 and not is_outage(error):  # Some may have been taken.
                    yield from self.fail()
                self.may_lead = False  # Or else the flight expires.
                if not is_outage(error) or time.monotonic() >= until:
                    raise
            yield self._runner.pause(0.1)
        now, overtaken = time.monotonic(), dict[bytes, bytes]()
        for key, reply in zip(self.keys, answers, strict=True):
            match [int(reply[0]), *reply[1:]]:
                case [1, *before]:
                    self.led[key] = Before(*before) if before else NOTHING
                case [2, value]:
                    self.present[key] = value
                case [3, message]:
                    text = as_bytes(message).decode(errors="replace")
                    self.failed = ComputationFailed(text)
                case [_, token, pttl]:
                    leader = as_bytes(token)
                    deferred = _deferred.get(leader) if overtakes else None
                    if deferred is not None and deferred.overtake():
                        overtaken[key] = leader
                        continue
                    self.streams[key], self.leaders[key] = flight_stream(key, leader), leader
                    # Redis rounds down, and a key with 0 ms left is still there.
                    left = (max(int(pttl), 0) + 1) / 1000
                    self.ends_at = min(self.ends_at, now + min(left, FOLLOWER_CHECK_SECONDS))
        self.may_lead = bool(self.led)
        if overtaken:
            for key, seen in (yield from self.take_over(overtaken)).items():
                if seen is not None:
                    self.led[key] = seen
                else:  # The flight has ended, or another caller overtook it.
                    self.streams[key] = b""

    def take_unseen(self) -> Steps[bool]:
        """Lead the flight of a value that is still missing and that no caller computes: by plain
        commands, which cost the server less than a script. Returns False if TAKE_FLIGHT has to
        decide."""
        server, [key, *others] = self.server, self.keys
        if others or server.is_topology or server.breaker.failing:
            return False
        lifetime = b"%d" % milliseconds(self.timeout)
        command = pack_words(b"SET", flight_key(key), self.token, b"PX", lifetime, b"NX")
        command += pack_words(b"GET", key)
        self.sent_at, self.may_lead = time.monotonic(), True
        try:
            taken, value = yield self._runner.exchange(command, 2)
        except (ResponseError, BusyLoadingError) as error:
            taken, value = not is_refusal(error), b""  # There may be another type of value.
        if taken and value is not None:
            with suppress(RedisError):
                yield self._runner.run(*self._endings())
        if not taken or value is not None or self._may_be_over():
            return False
        self.led[key] = NOTHING
        return True

    def take_over(
        self, leaders: Mapping[bytes, bytes] | None = None
    ) -> Steps[dict[bytes, Before | None]]:
        """Lead from now on, for each key in place of this leader (b"": of none, but together with
        it), or of any; returns what is at the keys now, None where it does not lead any more."""
        args = (self.token, milliseconds(self.timeout))
        keys = list(leaders or self.keys)
        replies = yield from self._ask_to_lead(
            *(
                Call(TAKE_OVER, (key, flight_key(key)), (*args, leaders[key]) if leaders else args)
                for key in keys
            )
        )
        return {
            key: None if reply is None else Before(*reply)
            for key, reply in zip(keys, replies, strict=True)
        }

    def _ask_to_lead(self, *calls: Call) -> Steps[list[Reply]]:
        """Once more if the replies come so late that the flights may be others' by now."""
        for _ in range(2):
            self.sent_at, self.may_lead = time.monotonic(), True
            replies: list[Reply] = yield self._runner.run(*calls)
            if not self._may_be_over():
                break
        return replies

    def _may_be_over(self) -> bool:
        return time.monotonic() > self.sent_at + self.timeout / 2

    # -- to compute --------------------------------------------------------------------------

    def begin(self) -> None:
        """The caller leads the flights of the keys in ``led``."""
        self.keys = list(self.led)
        self.renewals = [FlightRenewal(self, key) for key in self.keys]

    def lead(self) -> Steps[dict[bytes, object]]:
        """Compute the values, while the keeper renews the flights; if that fails, they end. Sets
        ``encoded``, for ``store``. Raises Overtaken if another thread leads instead."""
        keeping = keeper()
        try:
            computes_in[self.token] = threading.get_ident()
            for renewal in self.renewals:
                keeping.add(renewal)
            values = yield from self.compute()
            self.encoded = self._encode(values)
            return self._as_stored(values)
        except ProducerFailed as failed:
            error = failed.error
            if isinstance(error, Overtaken):
                yield from self.fail()
                raise error from None
            if isinstance(error, Postponed):
                error.leader, self.may_lead = self, False
                raise
            pause = self.producer.error_ttl if isinstance(error, Exception) else 0
            yield from self.fail(failed.describe(), pause)
            raise
        finally:  # In every case: followers would wait forever for a flight that is renewed.
            computes_in.pop(self.token, None)
            for renewal in self.renewals:
                keeping.discard(renewal)

    def resume(self, runner: Runner, compute: Callable[[], object]) -> Steps[None]:
        """As ``lead`` and ``store``, after the computation was postponed."""
        self._runner, self.producer = runner, self.producer._replace(compute=compute)
        self.may_lead = True
        runner.begun.append(self.left)
        yield from self.lead()
        yield from self.store()
        self.flight.tell()

    def lose(self) -> None:
        """The flight has ended before the computation: the callers of this process that wait for it
        look again at once, as those of other processes do. The keeper calls this."""
        self._runner.call_soon(leave, self._shared)

    def compute(self, outage: BaseException | None = None) -> Steps[dict[bytes, object]]:
        """The values by key; ``outage`` is why Redis is unavailable."""
        if outage and may_log(self.server, _logged_at):  # Once a minute for each server.
            text = "Redis is unavailable, get_or_set computes without it: %(key)s (%(error)s)"
            outage_logger.warning(text, {"key": printable(self.keys[0]), "error": outage})
        compute, names = self.producer.compute, self.flight.names
        if names is not None:
            compute = partial(compute, [names[key] for key in self.keys])
        count, error = len(self.keys), None
        with computing(self.server, self.keys, self):
            subject, began = None, 0.0
            if events.listeners:
                subject = self.producer.subject(self.server)
                events.emit(Computing(subject))
                if events.trace_parent is not None:
                    self.trace = events.trace_parent()
                began = time.monotonic()
            try:
                value = yield Computation(compute)
                return {self.keys[0]: value} if names is None else self._by_key(value, names)
            except BaseException as failed:
                error = getattr(failed, "error", failed)  # As the producer raised it.
                if isinstance(error, (Overtaken, Postponed)):
                    error, count = None, 0
                raise
            finally:
                if subject is not None:
                    seconds = time.monotonic() - began
                    event = Computed(subject, seconds, error, count, outage is not None)
                    self.flight.told.append(partial(events.emit, event))

    def without_redis(
        self, outage: BaseException, shared: bool = False
    ) -> Steps[dict[bytes, object]]:
        """Compute the values, which are not stored; callers get the same as if they were. If they
        are ``shared``, sets ``encoded``."""
        values = yield from self.compute(outage)
        if shared or not self.producer.keeps_objects:
            self.encoded = self._encode(values)
        return self._as_stored(values)

    def _by_key(self, values: object, names: Mapping[bytes, str]) -> dict[bytes, object]:
        if not isinstance(values, Mapping):
            wrong = f"default_many must return a dict by key, not {values!r}"
            raise ProducerFailed(TypeError(wrong))
        try:
            return {key: values[names[key]] for key in self.keys if names[key] in values}
        except BaseException as error:  # It may compute its values only now.
            raise ProducerFailed(error) from error

    def _encode(self, values: Mapping[bytes, object]) -> dict[bytes, Encoded]:
        """The values as Redis stores them; without one of these none can be stored."""
        encode, lifetime = self.producer.encode, self.producer.lifetime
        names = self.flight.names or dict.fromkeys(values, self.producer.name)
        try:
            return {
                key: Encoded(encode_value(encode, names[key], value), lifetime(value))
                for key, value in values.items()
            }
        except BaseException as error:  # Of a function of the user's.
            raise ProducerFailed(error) from error

    def _as_stored(self, values: dict[bytes, object]) -> dict[bytes, object]:
        """The ``values`` as everybody gets them. One that cannot be decoded stays as it is: it
        counts as missing for others."""
        if self.producer.keeps_objects:
            return values
        decoded = dict(values)
        for key, encoded in self.encoded.items():
            with suppress(Undecodable):
                decoded[key] = self.producer.decode(encoded.value)
        return decoded

    # -- to store, or to end without a value -------------------------------------------------

    def store(self) -> Steps[list[bool | None]]:
        """End the flights, each with its value if there is one, in one round trip. Does not raise
        if Redis is down: the caller still gets the computed values.

        Returns: for each key whether the value was stored; None: unknown.
        """
        calls = [
            self._storing(key) if key in self.encoded else self._ending(key) for key in self.keys
        ]
        began = time.monotonic()
        try:
            stored = [bool(reply) for reply in (yield self._runner.run(*calls))]
            self.may_lead = False
        except RedisError as error:
            logger.warning("Could not store %s: %s", self, error)
            if is_outage(error) and not is_refusal(error):
                self.end_later(calls)
            else:  # Redis refuses the value, so the followers must not wait for it.
                yield from self.fail()
            return [None for _ in self.keys]
        if events.read_listeners and (count := sum(stored)):
            seconds = time.monotonic() - began
            self.flight.told.append(
                partial(self.producer.emit, self.server, Stored, seconds, count)
            )
        return [*stored]

    def _storing(self, key: bytes) -> Call:
        value, lifetime = self.encoded[key]
        before, did = self.led.get(key, NOTHING), self.own_writes.get(key, "")
        token = as_bytes(before.leader) if before.leader else self.token
        stream = SHARED_LIFETIME_MILLISECONDS if lifetime < 0 else STREAM_LIFETIME_MILLISECONDS
        args: tuple[bytes | str | int, ...] = token, value, lifetime, stream
        if self.trace:
            args += before.digest, before.expires_at, did, self.trace
        elif did or before is not NOTHING:
            args += before.digest, before.expires_at, did
        return Call(STORE, flight_keys(key, token), args)

    def fail(self, message: str = "", pause: int = 0) -> Steps[None]:
        """End the flights without a value. For ``pause`` ms other callers do not compute, but get
        an error with ``message``."""
        calls = self._endings(message, pause)
        try:
            yield self._runner.run(*calls)
        except RedisError as error:
            logger.warning("Could not end the computation of %s: %s", self, error)
            if is_outage(error):
                self.end_later(calls)
        self.may_lead = False

    def _endings(self, message: str = "", pause: int = 0) -> list[Call]:
        return [self._ending(key, message, pause) for key in self.keys]

    def _ending(self, key: bytes, message: str = "", pause: int = 0) -> Call:
        args = (self.token, STREAM_LIFETIME_MILLISECONDS, message if pause else "", pause)
        return Call(END_FLIGHT, flight_keys(key, self.token), args)

    def end_later(self, calls: Sequence[Call] = ()) -> None:
        """Have the keeper end the flights, or repeat ``calls``, which failed: until then the
        followers wait. Not in a forked child, because its parent leads."""
        for call in calls or self._endings() if this_process() is self._process else ():
            keeper().add(DeferredRelease(self.server, call))
        self.may_lead = False

    def left(self) -> None:
        """The public method has ended, however. A caller may be interrupted (by a time limit,
        Ctrl-C, cancellation) at any line, and then cannot know whether it leads."""
        if self.may_lead:
            self.end_later()


# -- the renewal -----------------------------------------------------------------------------------


class FlightRenewal(Job):
    """Renews the flight of the cache key ``key`` during the computation, as long as its leader is
    not garbage-collected."""

    def __init__(self, leader: Leader, key: bytes) -> None:
        self.key, self.token = key, leader.token
        self.deadline_scale = leader.timeout
        self._leader_ref = weakref.ref(leader)
        self._began = time.monotonic()
        self._thread = threading.current_thread()
        due = leader.sent_at + min(leader.timeout / 3, DESCRIBE_AFTER_SECONDS)
        super().__init__(leader.server, due)

    def call(self, now: float) -> Call | None:
        leader = self._leader_ref()
        if leader is None:  # A signal handler's exception kept it from that.
            keeper().discard(self)
            return None
        key = self.key
        keys = flight_key(key), flight_leader(key), self.server.index_of(FLIGHTS, key)
        args = self.token, milliseconds(self.deadline_scale), key
        return Call(RENEW_FLIGHT, keys, (*args, *self._owner(leader, now)))

    def _owner(self, leader: Leader, now: float) -> tuple[str, ...]:
        """The milliseconds since the computation began, and the description of the leader."""
        owner = protocol.Owner(
            fingerprint(self.token), hostname(), os.getpid(), encodable(self._thread.name)
        )
        described = {
            "lifetime": str(milliseconds(self.deadline_scale)),
            "renews": "1",
            "group": leader.producer.group,
            "name": leader.name_of(self.key),
        }
        known = {name: encodable(text) for name, text in described.items() if text}
        return (f"{(now - self._began) * 1000:.0f}", *owner.fields(), *chain(*known.items()))

    def replied(self, value: Reply, sent_at: float) -> None:
        self.due = sent_at + self.deadline_scale / 3
        if not value:  # A write has ended the flight. STORE will tell the leader.
            keeper().discard(self)
            if (leader := self._leader_ref()) is not None:
                leader.lose()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self.deadline_scale / 12, 1.0)


# -- the steps -------------------------------------------------------------------------------------


class CoordinationError(Exception):
    """A request to Redis failed, and nothing was computed; has the error as its cause."""


#: The result of ``get_value`` if another computation takes longer than the caller waits.
TOO_LATE = object()


class Flight:
    """Computes the missing ones of some values, each by one caller at a time; that of a single key
    also for the other callers of this process that want it.

    Args:
        runner: executes the steps.
        timeout: seconds after which the followers of a dead leader take over.
        producer: how to compute and store the values.
        key: of a single value.
        names: of several by key, as ``producer.compute`` is given them; it returns a dict by name.
    """

    def __init__(
        self,
        runner: Runner,
        timeout: float,
        producer: Producer,
        key: bytes = b"",
        names: Mapping[bytes, str] | None = None,
    ) -> None:
        self.runner, self.server = runner, runner.server
        self.timeout, self.producer = timeout, producer
        self._key, self.names = key, names
        #: What the other callers of this process get; of several values, there are none.
        self.shared = InProcessFlight(runner, key)
        #: Whether there is probably no value: a read has just returned none.
        self.unseen = False
        #: How many values were there at the first request.
        self.were_there = 0
        #: The SHA-1 of values that cannot be decoded, by key: they count as missing.
        self._undecodable: dict[bytes, str] = {}
        #: Events that wait until the callers have their values.
        self.told: list[Callable[[], object]] = []
        #: The values so far: they count also if a request fails later.
        self.values: dict[bytes, object] = {}

    def get_values(self, keys: list[bytes], deadline: float) -> Steps[list[bytes]]:
        """Sets ``values``; returns the keys that others were still computing at ``deadline``
        (monotonic seconds). Raises as ``get_value``."""
        refuse_recursion(self.server, keys)
        try:
            return (yield from self._get_values(keys, deadline))
        finally:
            self.tell()

    def _get_values(self, missing: list[bytes], deadline: float) -> Steps[list[bytes]]:
        """As ``get_values``. A caller computes the values it leads before it waits, so two callers
        never wait for each other."""
        began, followed = time.monotonic(), dict[bytes, bytes]()
        in_thread = self.runner.in_thread
        while missing:
            leader = Leader(self, missing)
            yield from self._query(leader, followed, in_thread)
            if followed and leader.failed is None:
                shared = len(missing) - len(leader.led) - len(leader.streams)
                waited = time.monotonic() - began
                tell = partial(self._emit_shared, shared, waited, self.shared.trace)
                self.told.append(tell)
            if leader.led:
                leader.begin()
                try:
                    self.values.update((yield from self._compute(leader)))
                except Overtaken:  # Another thread leads these now.
                    in_thread = False
                    leader.streams.update(dict.fromkeys(leader.led, b""))
            # Decoding may fail, so first compute the values for which others wait.
            undecodable = bool(leader.present) and self._decode(leader, is_first=not followed)
            if leader.failed is not None:
                raise leader.failed
            missing = list(leader.streams)
            leaders = leader.leaders.items()
            if any(self._waits_for_itself(key, computes_in.get(token)) for key, token in leaders):
                break
            if time.monotonic() >= deadline and not undecodable:
                break
            if missing and all(leader.streams.values()):
                followed = leader.streams
                yield from self._follow(followed, min(leader.ends_at, deadline))
        return missing

    def _query(
        self, leader: Leader, followed: Mapping[bytes, bytes], overtakes: bool
    ) -> Steps[None]:
        unseen, self.unseen = self.unseen, False
        self.shared.requests += 1
        try:
            if not (unseen and (yield from leader.take_unseen())):
                yield from leader.query(followed, self._undecodable, overtakes)
        except RedisError as error:
            raise self._failed(error) from error
        for value in leader.present.values():
            self.shared.encoded = value

    def _compute(self, leader: Leader) -> Steps[dict[bytes, object]]:
        """Compute the values, store them, and hand that of a single key to the callers of this
        process that wait for it. Raises as ``lead``."""
        values = yield from leader.lead()
        shared = self.shared
        shared.requests += 1
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

    def _decode(self, leader: Leader, is_first: bool) -> bool:
        """Decode the values that there are; returns whether some of them count as missing."""
        undecodable = False
        for key, value in leader.present.items():
            try:
                self.values[key] = self.producer.decode(value)
                self.were_there += is_first
            except Undecodable:
                self._undecodable[key] = hashlib.sha1(as_bytes(value)).hexdigest()
                undecodable, leader.streams[key], self.shared.encoded = True, b"", None
        return undecodable

    def _waits_for_itself(self, key: bytes, thread: int | None) -> bool:
        """Whether the ``thread`` that computes a value, perhaps in a task of its event loop, is the
        calling thread: it would stop the computation by a wait for it."""
        if self.runner.group is not None or thread != threading.get_ident():
            return False
        if may_log(self.server, _warned_at):
            text = "The value %s is requested by the thread that computes it, which cannot wait "
            text += "for it and computes it twice: in a coroutine use aget_or_set() and the like"
            logger.warning(text, printable(key))
        return True

    def _follow(self, streams: Mapping[bytes, bytes], until: float) -> Steps[None]:
        """Wait for the end of one of the flights with these ``streams``."""
        runner, shared, reply = self.runner, self.shared, None
        shared.computed = True
        try:
            reply = yield runner.read_streams((*streams.values(),), until)
        except RedisError as error:
            self.server.on_error(error)
            # Where there are no blocking commands, it polls.
            if not (isinstance(error, ResponseError) or is_outage(error)):
                raise self._failed(error) from error
        if not reply:
            yield runner.pause(max(0.0, min(RETRY_PAUSE_SECONDS, until - time.monotonic())))
        shared.trace = _trace_in(reply)

    def _failed(self, error: Exception) -> CoordinationError:
        self.shared.outage = error
        return CoordinationError()

    def tell(self) -> None:
        """Emit what has happened, now that all callers of this process have their value."""
        while self.told:
            self.told.pop(0)()

    def _emit_shared(self, values: int, waited: float, trace: str) -> None:
        if values:
            self.producer.emit(self.server, Shared, False, values, waited, trace)

    def compute_anyway(
        self, keys: list[bytes], *, replace: bool = False
    ) -> Steps[dict[bytes, object]]:
        """The values, computed by this caller even if others are computing them. The first result
        is stored: if each caller that has waited long enough replaced the one before, no result
        might ever be. With ``replace`` the results of earlier leaders are not stored. A write wins
        over all."""
        leader = Leader(self, keys)
        try:
            before = yield from leader.take_over(None if replace else dict.fromkeys(keys, b""))
        except RedisError as error:
            return (yield from self.without_redis(keys, error))
        leader.led = {key: seen or NOTHING for key, seen in before.items()}
        leader.begin()
        try:
            return (yield from self._compute(leader))
        except Overtaken:
            yield from self.get_values(keys, math.inf)
            return self.values
        finally:
            self.tell()

    def without_redis(self, keys: list[bytes], outage: BaseException) -> Steps[dict[bytes, object]]:
        try:
            return (yield from Leader(self, keys).without_redis(outage))
        finally:
            self.tell()

    # -- of a single key ---------------------------------------------------------------------

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
        refuse_recursion(self.server, [self._key])
        began, requests_before = time.monotonic(), -1
        while True:
            shared = mine = InProcessFlight(self.runner, self._key)
            self.shared = mine
            self.runner.begun.append(mine.left)
            try:
                shared = in_flight.setdefault(mine.flight_id, mine)
                if shared is mine:
                    if outage:
                        leader = Leader(self, [self._key])
                        values = yield from leader.without_redis(outage, shared=True)
                        mine.encoded, mine.computed = leader.encoded[self._key].value, True
                        mine.requests += 1
                        return values[self._key]
                    late = yield from self._get_values([self._key], deadline)
                    return TOO_LATE if late else self.values[self._key]
            finally:
                if shared is mine:
                    leave(mine)
                    self.tell()
            # A reply to a request sent before this caller joined may be older than a write before
            # that. Requests of the leaders after the first one are later.
            requests_before = shared.requests if requests_before < 0 else 0
            if self._waits_for_itself(self._key, shared.thread):
                return TOO_LATE
            if not (yield self.runner.wait_for_event(shared.ended, deadline)):
                return TOO_LATE if outage else (yield from self._final_read())
            if shared.encoded is not None and requests_before < shared.requests:
                with suppress(Undecodable):  # Then this caller queries Redis.
                    value = self.producer.decode(shared.encoded)
                    self.were_there = int(not shared.computed)
                    if shared.computed:
                        self._emit_shared(1, time.monotonic() - began, shared.trace)
                    return value
            if shared.outage is not None and not outage:
                raise CoordinationError from shared.outage

    def compute_value(self, outage: BaseException | None = None) -> Steps[object]:
        """As ``compute_anyway``. ``outage``: as for ``get_value``."""
        if outage:
            return (yield from self.without_redis([self._key], outage))[self._key]
        return (yield from self.compute_anyway([self._key]))[self._key]

    def _final_read(self) -> Steps[object]:
        """The value, or TOO_LATE. The caller we waited for may have read a value in Redis."""
        try:
            stored = yield from read(self.runner, self._key)
        except RedisError:
            return TOO_LATE
        with suppress(Undecodable):
            return TOO_LATE if stored is None else self.producer.decode(stored[0])
        return TOO_LATE

    # -- of a stale value --------------------------------------------------------------------

    def refresh(self, old: object, wait: float | None) -> Steps[object]:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value.
            wait: compute in the background, and return the old value if that takes more seconds;
                None: compute here.
        """
        leader, producer = Leader(self, [self._key]), self.producer
        if wait is not None and not self.runner.has_room():  # Before Redis is asked.
            _too_many.warn(leader)
            return old
        try:
            yield from leader.query()
        except RedisError as error:
            _not_asked.warn(leader, error)
            return old
        if leader.present:
            return producer.decode(leader.present[self._key])
        if not leader.led:
            producer.emit(self.server, Shared, True, 1)
            return old
        leader.begin()
        refreshing = self._refresh_or_return_old(leader, old)
        if wait is None:
            return (yield from refreshing)
        ended, results = self.runner.new_event(), []

        def in_background() -> Steps[None]:
            try:
                results.append((yield from refreshing))
            finally:
                ended.set()

        if not (
            yield self.runner.run_in_background(in_background(), leader.left, *leader.renewals)
        ):
            _too_many.warn(leader)
            yield from leader.fail()
        elif wait:
            yield self.runner.wait_for_event(ended, time.monotonic() + wait)
        return results[0] if results and wait else old

    def _refresh_or_return_old(self, leader: Leader, old: object) -> Steps[object]:
        try:
            return (yield from self._compute(leader))[self._key]
        except Overtaken:
            return old
        except ProducerFailed as failed:
            if not isinstance(failed.error, Exception):
                raise
            _failed.warn(leader, exc_info=failed.error)
            emit = self.producer.emit
            self.told.append(partial(emit, self.server, RefreshFailed, failed.error))
            return old
        finally:
            self.tell()


# -- reads -----------------------------------------------------------------------------------------


def read(runner: Runner, key: bytes) -> Steps[Reply]:
    """The value at ``key`` and its PTTL, None if there is none: by the client if a tool observes
    that. After some errors a call does better: it sends the script, waits for a server that is
    busy, and has connections of our own."""
    call = Call(READ, (key,), ())
    if not runner.server.breaker.failing:
        with suppress(ResponseError, RedisConnectionError):
            if runner.is_observed:
                return (yield runner.evalsha(call))
            if not runner.server.is_topology:
                return (yield runner.read(key))
    [reply] = yield runner.run(call)
    return reply


def _trace_in(reply: Reply) -> str:
    """The trace of a computation in the reply to ``reading``, empty if it is not there."""
    streams = reply.values() if isinstance(reply, dict) else (of for _, of in reply or ())
    for entries in streams:
        for _, fields in entries:
            words = [as_bytes(word) for word in fields]
            if b"trace" in words[::2]:
                return words[words.index(b"trace") + 1].decode(errors="replace")
    return ""
