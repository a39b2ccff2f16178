"""The rule of ``get_or_set``: one computation of a missing value, awaited by everyone else.

The first caller to find nothing leads a *flight*: it computes and stores. The others follow: the
threads of one process behind one of them, in memory, and that one with a blocking read of the
flight's stream, which wakes all followers of all processes at once. Then each process reads the
value once, and each thread decodes a copy of its own.

The leader's flight lives ``flight_timeout`` seconds and is renewed while it computes; if it dies,
the followers find the flight gone and one of them leads the next. Knows Redis, not Django.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from .exceptions import LockError
from .locking.arguments import milliseconds
from .locking.calls import OUTAGE, run
from .locking.grants import new_token
from .locking.hold import printable
from .locking.keeper import Job, keeper
from .locking.keys import flight_key, flight_stream
from .locking.scripts import END_FLIGHT, RENEW_FLIGHT, STORE, TAKE_FLIGHT, Call
from .locking.server import Server, server_of

__all__ = ["TOO_LATE", "CoordinationError", "Flights", "Producer"]

logger = logging.getLogger("django_redis_lock.flights")

#: Seconds between two looks of a follower at whether its flight still exists.
LOOK_EVERY = 2.0
#: Seconds the end of a flight can be read after it: a follower may be late to its stream.
STREAM_LIFETIME = 10.0


class Producer(NamedTuple):
    """What to compute and how to keep it.

    Attributes:
        compute: gives the value.
        encode: the value as Redis is to keep it.
        decode: the value from what Redis kept.
        lifetime: milliseconds to keep it; 0 without end, negative not at all.
    """

    compute: Callable[[], Any]
    encode: Callable[[Any], bytes | int]
    decode: Callable[[Any], Any]
    lifetime: int


class Aboard:
    """The threads of this process that are after one value; the first speaks to Redis for all."""

    def __init__(self) -> None:
        self.speaker = threading.get_ident()
        self.landed = threading.Event()
        self.found: Any = None  # What Redis keeps, for each to decode; None: look again.


class CoordinationError(Exception):
    """Redis could not be asked who computes; the cause says why. Nothing was computed."""


#: What ``get_or_compute`` gives when another's computation takes longer than the caller waits.
TOO_LATE = object()
#: This caller is to compute the value.
LEAD = object()


class Flights:
    """Computes missing values of one database, each once at a time.

    Args:
        client: redis-py client of the primary.
        flight_timeout: seconds after which the followers of a dead leader take over.
    """

    def __init__(self, client: Any, flight_timeout: float) -> None:
        self._client = client
        self._flight_timeout = flight_timeout

    def get_or_compute(self, key: bytes, producer: Producer, wait: float) -> Any:
        """The value at ``key``, computed here or by whoever already does; or ``TOO_LATE``.

        Args:
            wait: seconds to wait at most for another's computation.

        Raises:
            LockError: the producer of this key asked for this key again, in its own thread.
            CoordinationError: Redis could not be asked who computes.
            Exception: whatever the producer raises, to the caller that ran it.
        """
        deadline = time.monotonic() + wait
        while True:
            aboard, first = self._board(key)
            if first:
                return self._speak(key, aboard, producer, deadline)
            if aboard.speaker == threading.get_ident():
                raise LockError("get_or_set needs the value it is just computing", key)
            if not aboard.landed.wait(max(0.0, deadline - time.monotonic())):
                return TOO_LATE
            if aboard.found is not None:
                return producer.decode(aboard.found)

    def compute_alone(self, key: bytes, producer: Producer) -> Any:
        """The value while Redis is away: the threads of this process still share a computation."""
        while True:
            aboard, first = self._board(key)
            if first:
                try:
                    return self._compute(aboard, producer)[0]
                finally:
                    self._land(key, aboard)
            if aboard.speaker == threading.get_ident():
                raise LockError("get_or_set needs the value it is just computing", key)
            aboard.landed.wait()
            if aboard.found is not None:
                return producer.decode(aboard.found)

    # -- in this process ---------------------------------------------------------------------

    def _board(self, key: bytes) -> tuple[Aboard, bool]:
        place = (server_of(self._client), key)
        with _mutex:
            aboard = _aboard.get(place)
            if aboard is not None:
                return aboard, False
            aboard = _aboard[place] = Aboard()
            return aboard, True

    def _land(self, key: bytes, aboard: Aboard) -> None:
        with _mutex:
            _aboard.pop((server_of(self._client), key), None)
        aboard.landed.set()

    def _compute(self, aboard: Aboard, producer: Producer) -> tuple[Any, bytes | int]:
        value = producer.compute()
        kept = producer.encode(value)
        aboard.found = kept
        return value, kept

    # -- in Redis ----------------------------------------------------------------------------

    def _speak(self, key: bytes, aboard: Aboard, producer: Producer, deadline: float) -> Any:
        token = new_token()
        try:
            try:
                found = self._find(key, token, deadline)
            except (RedisError, OSError) as error:
                raise CoordinationError from error
            if found is LEAD:
                return self._lead(key, token, aboard, producer)
            if found is TOO_LATE:
                return TOO_LATE
            aboard.found = found
            return producer.decode(found)
        finally:
            self._land(key, aboard)

    def _find(self, key: bytes, token: bytes, deadline: float) -> Any:
        """What Redis keeps at ``key`` as soon as it is there, or LEAD, or TOO_LATE."""
        lifetime = milliseconds(self._flight_timeout)
        taking = Call(TAKE_FLIGHT, (key, flight_key(key)), (token, lifetime))
        while True:
            status, *news = run(self._client, taking).value
            if int(status) == 2:
                return news[0]
            if int(status) == 1:
                return LEAD
            if time.monotonic() >= deadline:
                return TOO_LATE
            leader, pttl = news
            look_again = time.monotonic() + min(LOOK_EVERY, max(int(pttl), 1) / 1000)
            self._follow(flight_stream(key, _bytes(leader)), min(look_again, deadline))

    def _lead(self, key: bytes, token: bytes, aboard: Aboard, producer: Producer) -> Any:
        flight, stream = flight_key(key), flight_stream(key, token)
        renewal = FlightRenewal(server_of(self._client), flight, token, self._flight_timeout)
        keeper().add(renewal)
        try:
            value, kept = self._compute(aboard, producer)
        except BaseException:
            keeper().discard(renewal)
            self._tell(Call(END_FLIGHT, (key, flight, stream), (token, _stream_ms())))
            raise
        keeper().discard(renewal)
        storing = Call(STORE, (key, flight, stream), (token, kept, producer.lifetime, _stream_ms()))
        stored = self._tell(storing)
        if stored is not None and not stored:
            # A write or a delete came in between: what we computed is for our caller alone.
            aboard.found = None
            logger.info("%s was written while it was computed; not stored", printable(key))
        return value

    def _tell(self, call: Call) -> Any:
        """Run ``call`` if Redis can be reached: a computed value is not lost because it cannot."""
        try:
            return run(self._client, call).value
        except (RedisError, OSError) as error:
            logger.warning("Could not end the flight of %s: %s", printable(call.keys[0]), error)
            return None

    def _follow(self, stream: bytes, until: float) -> None:
        """Wait until the flight has ended, or until ``until`` (monotonic seconds)."""
        server = server_of(self._client)
        connection, unread = server.waiting_connection()
        try:
            if unread is not None:
                unread.settle(True)
            pause = max(1, int((until - time.monotonic()) * 1000))
            connection.send_command("XREAD", "BLOCK", pause, "STREAMS", stream, "0")
            # Redis looks at the time-outs of blocked clients ten times a second only.
            if connection.can_read(max(0.0, until - time.monotonic())):
                connection.read_response()
                server.rest(connection, None)
                return
        except OUTAGE as error:
            logger.info("Following %s: %s", printable(stream), error)
            time.sleep(max(0.0, min(0.05, until - time.monotonic())))
        except BaseException:
            connection.disconnect()
            raise
        connection.disconnect()


class FlightRenewal(Job):
    """Keeps a flight alive while its leader computes."""

    def __init__(self, server: Server, flight: bytes, token: bytes, lifetime: float) -> None:
        self._lifetime = self.urgency = lifetime
        self._call = Call(RENEW_FLIGHT, (flight,), (token, milliseconds(lifetime)))
        super().__init__(server, time.monotonic() + lifetime / 3)

    def call(self, now: float) -> Call:
        return self._call

    def answered(self, value: Any, sent_at: float) -> None:
        self.due = sent_at + self._lifetime / 3
        if not value:
            keeper().discard(self)  # A write has ended it, which the leader learns when it stores.

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + min(self._lifetime / 12, 1.0)


def _bytes(token: bytes | str) -> bytes:
    return token.encode() if isinstance(token, str) else token


def _stream_ms() -> int:
    return milliseconds(STREAM_LIFETIME)


_aboard: dict[tuple[Server, bytes], Aboard] = {}
_mutex = threading.Lock()


def _after_fork_in_child() -> None:
    global _mutex
    _mutex = threading.Lock()
    _aboard.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)
