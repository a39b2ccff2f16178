"""The leader's part of a flight: what it computes, and what it sends to Redis to begin the flight,
to renew it, and to end it with a value, without one, or after an interruption."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from redis.exceptions import BusyLoadingError, RedisError, ResponseError

from .. import events
from ..clock import time
from ..events import Computed, Computing, Stored, Subject
from ..keeper import DeferredRelease, keeper
from ..protocol import Call, as_bytes, milliseconds, printable
from ..protocol.keys import flight_key, flight_stream
from ..threads import get_logger, may_log
from ..transport import Server, is_outage, is_refusal, pack_words
from .in_process import InProcessFlight, Overtaken, computing, leave, token_for
from .postponed import FlightRenewal, Postponed
from .runners import ProducerFailed, Runner, Steps
from .scripts import END_FLIGHT, STORE, TAKE_FLIGHT, TAKE_OVER

T = TypeVar("T")

logger = get_logger("django_redis_lock.flights")
outage_logger = get_logger("django_redis_lock.outage")

#: What was at a value's key when its flight began: digest and expiry, as the scripts return them.
Seen = Sequence[bytes | str]
NOTHING: Seen = ("", "0")

#: Milliseconds for which followers can read the end of a flight.
STREAM_LIFETIME_MILLISECONDS = 10_000
#: The same if they get a value there that is not stored: it may be large.
SHARED_LIFETIME_MILLISECONDS = 2_000
_logged_at: WeakKeyDictionary[Server, float] = WeakKeyDictionary()


class Undecodable(Exception):
    """A stored value cannot be decoded, so it counts as missing: it is from another version of the
    project, or from another serializer."""


class Producer(NamedTuple):
    """What to compute and how to store it.

    Attributes:
        compute: returns the value; or, given a list of names, those of several, as a dict.
        encode: turns the value into what Redis stores.
        decode: turns that into the value, or raises Undecodable.
        lifetime: returns the milliseconds to store a value; 0 without end, negative not at all.
        stale: at the end of its lifetime, the milliseconds for which it is stale.
        error_ttl: milliseconds after a failure in which others do not try again; 0 for none.
        name, group, cache: see ``events.Subject``.
    """

    compute: Callable[..., Any]
    encode: Callable[[Any], bytes | int]
    decode: Callable[[Any], Any]
    lifetime: Callable[[Any], int]
    stale: int = 0
    error_ttl: int = 0
    name: str = ""
    group: str = ""
    cache: Any = None

    def subject(self, server: Server) -> Subject:
        return Subject.of(self.name, self.group, "", server, self.cache)

    def emit(self, server: Server, kind: Callable[..., Any], *about: Any) -> None:
        """Emit an event of this ``kind`` about the value."""
        if events.listeners:
            events.emit(kind(self.subject(server), *about))


class Leader:
    """A caller that leads the flights of some keys, or asks to.

    Args:
        runner: executes the steps.
        timeout: seconds after which the flights end by themselves.
        keys: of the values.
        producer: how to compute and store the values.
        shared: what the other callers of this process wait for.
        names: of several keys, as ``producer.compute`` is given them; it returns a dict by name.
            None: it computes the value of the only key.
    """

    def __init__(
        self,
        runner: Runner,
        timeout: float,
        keys: list[bytes],
        producer: Producer,
        shared: InProcessFlight,
        names: Mapping[bytes, str] | None = None,
    ) -> None:
        self.server = runner.server
        self.timeout = timeout
        self.keys = keys
        self.producer = producer
        self.token = token_for(producer.compute)
        self.renewals: list[FlightRenewal] = []
        self.own_writes: dict[bytes, str] = {}
        #: The trace of the computation; see ``events.trace_parent``.
        self.trace = ""
        self._shared = shared
        self._names = names
        plain = getattr(producer.cache, "_has_plain_keys", True)
        #: When the last request to lead was sent: the lifetimes of the flights began no earlier.
        self.asked_at = time.monotonic()
        #: By key, for people, where the key may not show it.
        self.stored_names = {} if plain else names or {keys[0]: producer.name}
        self._replaced: Mapping[bytes, Seen] = {}
        self._lifetimes: Mapping[bytes, int] = {}
        self._runner = runner
        self._pid = os.getpid()

    def __str__(self) -> str:
        first = printable(self.keys[0])
        return first if len(self.keys) == 1 else f"{first} and {len(self.keys) - 1} more"

    # -- to begin ----------------------------------------------------------------------------

    def take(
        self,
        followed: Mapping[bytes, bytes] = MappingProxyType({}),
        unreadable: Mapping[bytes, str] = MappingProxyType({}),
        unseen: bool = False,
    ) -> Steps:
        """Run TAKE_FLIGHT for each key; returns the replies.

        Args:
            followed: the streams of the flights that this caller has waited for, by key. Then it
                wants the value and not an error, so an outage is retried until a failover would be
                complete.
            unreadable: the SHA-1 of what is at a key and cannot be decoded.
            unseen: whether a read has just found no value.
        """
        if unseen and (yield from self._take_unseen()) and not self._may_be_over():
            return [(1,)]
        args = (self.token, milliseconds(self.timeout), self.producer.stale)
        streams = {key: (followed[key],) if key in followed else () for key in self.keys}
        calls = tuple(
            Call(
                TAKE_FLIGHT, (key, flight_key(key), *streams[key]), (*args, unreadable.get(key, ""))
            )
            for key in self.keys
        )
        until = time.monotonic() + (self.server.FAILOVER_SECONDS if followed else 0.0)
        while True:
            try:
                replies = yield from self._run_or_abort(*calls)
                if self._may_be_over() and any(int(status) == 1 for status, *_ in replies):
                    replies = yield from self._run_or_abort(*calls)
                return [(int(status), *news) for status, *news in replies]
            except (RedisError, OSError) as error:
                if len(self.keys) > 1 and not is_outage(error):  # Some may have been taken.
                    yield from self.fail()
                if not is_outage(error) or time.monotonic() >= until:
                    raise
            yield self._runner.pause(0.1)

    def _may_be_over(self) -> bool:
        """Whether the reply came so late that the flights may be others' by now."""
        return time.monotonic() > self.asked_at + self.timeout / 2

    def _take_unseen(self) -> Steps:
        """Lead the flight of a value that is still missing and that no caller computes: by plain
        commands, which cost the server less than a script. Returns False if TAKE_FLIGHT has to
        decide."""
        server, [key, *others] = self.server, self.keys
        if others or server.is_topology or server.breaker.failing:
            return False
        lifetime = b"%d" % milliseconds(self.timeout)
        taking = pack_words(b"SET", flight_key(key), self.token, b"PX", lifetime, b"NX")
        command = taking + pack_words(b"GET", key)
        try:
            taken, value = yield from self._or_abort(self._runner.exchange, command, 2)
        except (ResponseError, BusyLoadingError) as error:
            taken, value = not is_refusal(error), b""  # There may be another type of value.
        if taken and value is not None:
            with suppress(RedisError, OSError):
                yield self._runner.run(*self._endings())
        return bool(taken) and value is None

    def take_over(self, leaders: Mapping[bytes, bytes] | None = None) -> Steps:
        """Lead from now on, for each key in place of this leader (b"": of none, but together with
        it), or of any; returns what is at the keys now, None where it does not lead any more."""
        args = (self.token, milliseconds(self.timeout))
        calls = (
            Call(TAKE_OVER, (key, flight_key(key)), (*args, leaders[key]) if leaders else args)
            for key in leaders or self.keys
        )
        return (yield from self._run_or_abort(*calls))

    def _run_or_abort(self, *calls: Call) -> Steps:
        """The replies to ``calls``."""
        return (yield from self._or_abort(self._runner.run, *calls))

    def _or_abort(self, step: Callable[..., Any], *args: Any) -> Steps:
        """What a ``step`` of the runner returns. A caller that is interrupted (by cancellation,
        Ctrl-C or a time limit) cannot know whether it leads, so it ends its flights."""
        self.asked_at = time.monotonic()
        try:
            return (yield step(*args))
        except (RedisError, OSError, GeneratorExit):
            raise
        except BaseException:
            try:
                yield self._runner.run(*self._endings(), done=True)
            except (RedisError, OSError):
                pass  # Then they expire.
            raise

    # -- to compute --------------------------------------------------------------------------

    def begin(self, replaced: Mapping[bytes, Seen]) -> None:
        """The caller leads the flights of these keys.

        Args:
            replaced: what is at the keys now.
        """
        self.keys, self._replaced = list(replaced), replaced
        self.renewals = [FlightRenewal(self, key) for key in self.keys]

    def lead(self) -> Steps:
        """The computed values by key, and the values as Redis stores them. The keeper renews the
        flights; if the computation fails, they end.

        Raises:
            Overtaken: another thread leads instead.
        """
        try:
            for renewal in self.renewals:
                keeper().add(renewal)
            values = yield from self.compute()
            encoded = self.encoded(values)
            self._lifetimes = self._each(self.producer.lifetime, values)
            return values, encoded
        except ProducerFailed as failed:
            if isinstance(failed.error, Overtaken):
                yield from self.fail()
                raise failed.error from None
            if isinstance(failed.error, Postponed):
                failed.error.leader = self
                raise
            pause = self.producer.error_ttl if isinstance(failed.error, Exception) else 0
            yield from self.fail(failed.describe(), pause)
            raise
        finally:  # In every case: followers would wait forever for a flight that is renewed.
            for renewal in self.renewals:
                keeper().discard(renewal)

    def resume(self, runner: Runner, compute: Callable[[], Any]) -> Steps:
        """As ``lead`` and ``store``, after the computation was postponed."""
        self._runner, self.producer = runner, self.producer._replace(compute=compute)
        _, encoded = yield from self.lead()
        yield from self.store(encoded)

    def lose(self) -> None:
        """The flight has ended before the computation: the callers of this process that wait for it
        look again at once, as those of other processes do. The keeper calls this."""
        self._runner.call_soon(leave, self._shared)

    def compute(self, outage: BaseException | None = None) -> Steps:
        """The values by key.

        Args:
            outage: why Redis is unavailable.
        """
        if outage and may_log(self.server, _logged_at):  # Once a minute for each server.
            text = "Redis is unavailable, get_or_set computes without it: %(key)s (%(error)s)"
            outage_logger.warning(text, {"key": printable(self.keys[0]), "error": outage})
        with computing(self.server, self.keys, self), self._computation_events(outage is not None):
            compute, names = self.producer.compute, self._names
            if names is None:
                return {self.keys[0]: (yield self._runner.compute(compute))}
            wanted = [names[key] for key in self.keys]
            values = yield self._runner.compute(partial(compute, wanted))
            if not isinstance(values, Mapping):
                wrong = f"default_many must return a dict by key, not {values!r}"
                raise ProducerFailed(TypeError(wrong))
            try:
                return {key: values[names[key]] for key in self.keys if names[key] in values}
            except BaseException as error:  # It may compute its values only now.
                raise ProducerFailed(error) from error

    def encoded(self, values: Mapping[bytes, Any]) -> dict[bytes, bytes | int]:
        """The values as Redis stores them."""
        return self._each(self.producer.encode, values)

    def _each(self, function: Callable[[Any], T], values: Mapping[bytes, Any]) -> dict[bytes, T]:
        """What a function of the user returns for each value; without it none can be stored."""
        try:
            return {key: function(value) for key, value in values.items()}
        except BaseException as error:
            raise ProducerFailed(error) from error

    @contextmanager
    def _computation_events(self, without_redis: bool) -> Iterator[None]:
        """Emit events about the computation in the ``with`` block."""
        if not events.listeners:
            yield
            return
        subject, values, error = self.producer.subject(self.server), len(self.keys), None
        events.emit(Computing(subject))
        if events.trace_parent is not None:
            self.trace = events.trace_parent()
        began = time.monotonic()
        try:
            yield
        except BaseException as failed:
            error = getattr(failed, "error", failed)  # As the producer raised it.
            if isinstance(error, (Overtaken, Postponed)):
                error, values = None, 0
            raise
        finally:
            seconds = time.monotonic() - began
            events.emit(Computed(subject, seconds, error, values, without_redis))

    # -- to end ------------------------------------------------------------------------------

    def store(self, encoded: Mapping[bytes, bytes | int]) -> Steps:
        """End the flights, each with its value if there is one, in one round trip. Does not raise
        if Redis is down: the caller still gets the computed values.

        Args:
            encoded: the values as Redis stores them.

        Returns: for each key whether the value was stored; None: unknown.
        """
        calls = tuple(
            self._storing(key, encoded[key]) if key in encoded else self._ending(key)
            for key in self.keys
        )
        began = time.monotonic()
        try:
            mine = yield from self._run_or_abort(*calls)
            seconds, values = time.monotonic() - began, sum(map(bool, mine))
            if events.read_listeners and values:
                self.producer.emit(self.server, Stored, seconds, values)
            return [bool(one) for one in mine]
        except (RedisError, OSError) as error:
            logger.warning("Could not store %s: %s", self, error)
            if is_outage(error) and not is_refusal(error):
                self._end_later(calls)
            else:  # Redis refuses the value, so the followers must not wait for it.
                yield from self.fail()
            return [None for _ in self.keys]

    def _storing(self, key: bytes, value: bytes | int) -> Call:
        lifetime = self._lifetimes[key]
        digest, at, *with_another = self._replaced[key] or NOTHING
        token = as_bytes(with_another[0]) if with_another else self.token
        stream = SHARED_LIFETIME_MILLISECONDS if lifetime < 0 else STREAM_LIFETIME_MILLISECONDS
        trace = (self.trace,) if self.trace else ()
        args = (token, value, lifetime, stream, digest, at, self.own_writes.get(key, ""), *trace)
        return Call(STORE, self._keys(key, token), args)

    def fail(self, message: str = "", pause: int = 0) -> Steps:
        """End the flights without a value. For ``pause`` ms other callers do not compute, but get
        an error with ``message``."""
        calls = self._endings(message, pause)
        try:
            yield from self._run_or_abort(*calls)
        except (RedisError, OSError) as error:
            logger.warning("Could not end the computation of %s: %s", self, error)
            if is_outage(error):
                self._end_later(calls)

    def end_later(self) -> None:
        self._end_later(self._endings())

    def _endings(self, message: str = "", pause: int = 0) -> tuple[Call, ...]:
        return tuple(self._ending(key, message, pause) for key in self.keys)

    def _ending(self, key: bytes, message: str = "", pause: int = 0) -> Call:
        args = (self.token, STREAM_LIFETIME_MILLISECONDS, message if pause else "", pause)
        return Call(END_FLIGHT, self._keys(key, self.token), args)

    def _keys(self, key: bytes, token: bytes) -> tuple[bytes, ...]:
        return key, flight_key(key), flight_stream(key, token)

    def _end_later(self, calls: Sequence[Call]) -> None:
        """Have the keeper repeat ``calls``, which failed: until then the followers wait. Not in a
        forked child, because its parent leads."""
        for call in calls if os.getpid() == self._pid else ():
            keeper().add(DeferredRelease(self.server, call))
