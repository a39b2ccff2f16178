"""The leader's part of a flight: what it computes, and what it sends to Redis to begin the flight,
to renew it, and to end it with a value, without one, or after an interruption."""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from .. import events
from ..clock import time
from ..events import Computed, Computing, Stored, Subject
from ..keeper import DeferredRelease, keeper
from ..protocol import Call, Reply, as_bytes, milliseconds, printable
from ..protocol.keys import flight_key, flight_keys
from ..steps import Steps
from ..threads import get_logger, may_log, this_process
from ..transport import Server, is_outage, is_refusal, pack_words
from ..transport.refusals import redis_errors, suppress
from .in_process import (
    FlightRenewal,
    InProcessFlight,
    Overtaken,
    Postponed,
    computes_in,
    computing,
    leave,
    token_for,
)
from .runners import Computation, ProducerFailed, Runner
from .scripts import END_FLIGHT, NOTHING, STORE, TAKE_FLIGHT, TAKE_OVER, Before, Leads, State, parse

R = TypeVar("R")

logger = get_logger("django_redis_lock.flights")
outage_logger = get_logger("django_redis_lock.outage")

#: Milliseconds for which followers can read the end of a flight.
STREAM_LIFETIME_MILLISECONDS = 10_000
#: The same if they get a value there that is not stored: it may be large.
SHARED_LIFETIME_MILLISECONDS = 2_000
_logged_at: WeakKeyDictionary[Server, float] = WeakKeyDictionary()

_NONE: Mapping[bytes, Any] = MappingProxyType({})


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
        """Emit an event of this ``kind`` about the value."""
        if events.listeners:
            events.emit(kind(self.subject(server), *details))


class Encoded(NamedTuple):
    """A computed value as Redis stores it, for so many milliseconds; see ``Producer.lifetime``."""

    value: bytes | int
    lifetime: int


class Leader:
    """A caller that leads the flights of some keys, or wants to.

    Args:
        runner: executes the steps.
        timeout: seconds after which the flights end by themselves.
        keys: of the values.
        producer: how to compute and store the values.
        shared: what the other callers of this process wait for, if there are any.
        names: of several keys, as ``producer.compute`` is given them; it returns a dict by name.
            None: it computes the value of the only key.
    """

    #: The trace of the computation; see ``events.trace_parent``.
    trace = ""
    #: When the last request to lead was sent: the lifetimes of the flights began no earlier.
    sent_at = 0.0
    #: Whether there may be flights that it leads: see ``left``.
    may_lead = False

    def __init__(
        self,
        runner: Runner,
        timeout: float,
        keys: list[bytes],
        producer: Producer,
        shared: InProcessFlight | None = None,
        names: Mapping[bytes, str] | None = None,
    ) -> None:
        self.server = runner.server
        self.timeout = timeout
        self.keys = keys
        self.producer = producer
        self.token = token_for(producer.compute)
        self.renewals: list[FlightRenewal] = []
        self.own_writes: dict[bytes, str] = {}
        #: Events that wait until the callers of this process have their value.
        self.told: list[Callable[[], object]] = []
        #: What was computed.
        self.encoded: Mapping[bytes, Encoded] = _NONE
        self._before: Mapping[bytes, Before] = _NONE
        self._names = names
        self._process = this_process()
        self._runner = runner
        self._shared = shared
        runner.begun.append(self)

    def __str__(self) -> str:
        first = printable(self.keys[0])
        return first if len(self.keys) == 1 else f"{first} and {len(self.keys) - 1} more"

    def name_of(self, key: bytes) -> str:
        """The name for people, where ``key`` may not show it; else empty."""
        producer = self.producer
        if getattr(producer.cache, "_has_plain_keys", True):
            return ""
        return producer.name if self._names is None else self._names[key]

    # -- to query Redis ----------------------------------------------------------------------

    def query(
        self,
        followed: Mapping[bytes, bytes] = _NONE,
        undecodable: Mapping[bytes, str] = _NONE,
        unseen: bool = False,
    ) -> Steps[list[State]]:
        """Who leads the flight of each key, or its value.

        Args:
            followed: the streams of the flights that this caller has waited for, by key. Then it
                wants the value and not an error, so an outage is retried until a failover would be
                complete.
            undecodable: the SHA-1 of what is at a key and cannot be decoded.
            unseen: whether there is probably no value: a read has just returned none.
        """
        if unseen and (yield from self._take_unseen()) and not self._may_be_over():
            return [Leads()]
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
                replies = [parse(reply) for reply in (yield from self._ask_to_lead(*calls))]
                if self._may_be_over() and any(type(reply) is Leads for reply in replies):
                    replies = [parse(reply) for reply in (yield from self._ask_to_lead(*calls))]
                self.may_lead = any(type(reply) is Leads for reply in replies)
                return replies
            except redis_errors() as error:
                if len(self.keys) > 1 and not is_outage(error):  # Some may have been taken.
                    yield from self.fail()
                self.may_lead = False  # Or else the flight expires.
                if not is_outage(error) or time.monotonic() >= until:
                    raise
            yield self._runner.pause(0.1)

    def _may_be_over(self) -> bool:
        """Whether the reply came so late that the flights may be others' by now."""
        return time.monotonic() > self.sent_at + self.timeout / 2

    def _take_unseen(self) -> Steps[bool]:
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
            with suppress(RedisError, OSError):
                yield self._runner.run(*self._endings())
        return bool(taken) and value is None

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
        self.sent_at, self.may_lead = time.monotonic(), True
        replies: list[Reply] = yield self._runner.run(*calls)
        return replies

    # -- to compute --------------------------------------------------------------------------

    def begin(self, before: Mapping[bytes, Before]) -> None:
        """The caller leads the flights of these keys.

        Args:
            before: what is at the keys now.
        """
        self.keys, self._before = list(before), before
        self.renewals = [FlightRenewal(self, key) for key in self.keys]

    def lead(self) -> Steps[dict[bytes, object]]:
        """Compute the values, while the keeper renews the flights; if that fails, they end. Sets
        ``encoded``, for ``store``.

        Raises:
            Overtaken: another thread leads instead.
        """
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
        runner.begun.append(self)
        yield from self.lead()
        yield from self.store()
        for tell in self.told:
            tell()

    def lose(self) -> None:
        """The flight has ended before the computation: the callers of this process that wait for it
        look again at once, as those of other processes do. The keeper calls this."""
        if self._shared is not None:
            self._runner.call_soon(leave, self._shared)

    def compute(self, outage: BaseException | None = None) -> Steps[dict[bytes, object]]:
        """The values by key.

        Args:
            outage: why Redis is unavailable.
        """
        if outage and may_log(self.server, _logged_at):  # Once a minute for each server.
            text = "Redis is unavailable, get_or_set computes without it: %(key)s (%(error)s)"
            outage_logger.warning(text, {"key": printable(self.keys[0]), "error": outage})
        compute, names = self.producer.compute, self._names
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
                    events.emit(Computed(subject, seconds, error, count, outage is not None))

    def without_redis(
        self, outage: BaseException, shared: bool = False
    ) -> Steps[dict[bytes, object]]:
        """Compute the values, which are not stored; callers get the same as if they were.

        Args:
            shared: whether ``encoded`` is needed, for the other callers of this process.
        """
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
        names = self._names or dict.fromkeys(values, self.producer.name)
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
        except redis_errors() as error:
            logger.warning("Could not store %s: %s", self, error)
            if is_outage(error) and not is_refusal(error):
                self._end_later(calls)
            else:  # Redis refuses the value, so the followers must not wait for it.
                yield from self.fail()
            return [None for _ in self.keys]
        if events.read_listeners and (count := sum(stored)):
            seconds = time.monotonic() - began
            self.told.append(partial(self.producer.emit, self.server, Stored, seconds, count))
        return [*stored]

    def _storing(self, key: bytes) -> Call:
        value, lifetime = self.encoded[key]
        before, did = self._before.get(key, NOTHING), self.own_writes.get(key, "")
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
        except redis_errors() as error:
            logger.warning("Could not end the computation of %s: %s", self, error)
            if is_outage(error):
                self._end_later(calls)
        self.may_lead = False

    def end_later(self) -> None:
        self._end_later(self._endings())

    def _endings(self, message: str = "", pause: int = 0) -> list[Call]:
        return [self._ending(key, message, pause) for key in self.keys]

    def _ending(self, key: bytes, message: str = "", pause: int = 0) -> Call:
        args = (self.token, STREAM_LIFETIME_MILLISECONDS, message if pause else "", pause)
        return Call(END_FLIGHT, flight_keys(key, self.token), args)

    def _end_later(self, calls: Sequence[Call]) -> None:
        """Have the keeper repeat ``calls``, which failed: until then the followers wait. Not in a
        forked child, because its parent leads."""
        for call in calls if this_process() is self._process else ():
            keeper().add(DeferredRelease(self.server, call))
        self.may_lead = False

    def left(self) -> None:
        """The public method has ended, however. A caller may be interrupted (by a time limit,
        Ctrl-C, cancellation) at any line, and then cannot know whether it leads."""
        if self.may_lead:
            self.end_later()
