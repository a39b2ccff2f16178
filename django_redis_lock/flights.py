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
from contextvars import ContextVar
from typing import Any, NamedTuple

from redis.exceptions import RedisError

from .exceptions import LockError
from .locking.arguments import milliseconds
from .locking.calls import is_outage, run
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
#: Milliseconds the end of a flight can be read after it: a follower may be late to its stream.
STREAM_LIFETIME = 10_000


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
        self.landed = threading.Event()
        self.asked = 0  # How often Redis was asked.
        self.found: Any = None  # What Redis keeps, for each to decode; None: look again.
        self.outage: Exception | None = None  # Why Redis could not be asked.


class CoordinationError(Exception):
    """Redis could not be asked who computes; the cause says why. Nothing was computed."""


#: Another's computation takes longer than the caller waits.
TOO_LATE = object()
#: This caller is to compute the value; it is there.
LEAD, FOUND = object(), object()


class Flights:
    """Computes missing values of one database, each once at a time.

    Args:
        client: redis-py client of the primary.
        flight_timeout: seconds after which the followers of a dead leader take over.
    """

    def __init__(self, client: Any, flight_timeout: float) -> None:
        self._client = client
        self._flight_timeout = flight_timeout

    def get_or_compute(
        self, key: bytes, producer: Producer, deadline: float, *, alone: bool = False
    ) -> Any:
        """The value at ``key``, computed here or by whoever already does; or ``TOO_LATE``.

        Args:
            deadline: monotonic time until which to wait for another's computation.
            alone: Redis is away; only the threads of this process share the computation.

        Raises:
            LockError: the producer of this key asked for this key again.
            CoordinationError: Redis could not be asked who computes.
            Exception: whatever the producer raises, to the caller that ran it.
        """
        place = server_of(self._client), key
        if place in _computing.get():
            raise LockError("get_or_set needs the value it is just computing", key)
        while True:
            mine = Aboard()
            aboard = _aboard.setdefault(place, mine)
            asked = aboard.asked
            if aboard is mine:
                try:
                    value = self._speak(key, aboard, producer, deadline, alone)
                finally:
                    _land(place, aboard)
                return producer.decode(aboard.found) if value is FOUND else value
            if not aboard.landed.wait(max(0.0, deadline - time.monotonic())):
                return TOO_LATE
            # An answer to what was asked before we came may be older than a write before we came.
            if aboard.found is not None and asked < aboard.asked:
                return producer.decode(aboard.found)
            if aboard.outage is not None and not alone:
                raise CoordinationError from aboard.outage

    def compute_anyway(self, key: bytes, producer: Producer, *, alone: bool = False) -> Any:
        """The value, computed here although another computes it. This caller leads from now on:
        the result of who began last is kept, and a write meanwhile wins over both."""
        if alone:
            return self._compute(key, producer)[0]
        token = new_token()
        try:
            self._client.set(flight_key(key), token, px=milliseconds(self._flight_timeout))
        except (RedisError, OSError) as error:
            logger.warning("Could not take over the flight of %s: %s", printable(key), error)
        return self._lead(key, token, Aboard(), producer)

    def _compute(self, key: bytes, producer: Producer) -> tuple[Any, bytes | int]:
        """The value, and the value as Redis is to keep it."""
        mark = _computing.set(_computing.get() | {(server_of(self._client), key)})
        try:
            value = producer.compute()
        finally:
            _computing.reset(mark)
        return value, producer.encode(value)

    # -- in Redis ----------------------------------------------------------------------------

    def _speak(
        self, key: bytes, aboard: Aboard, producer: Producer, deadline: float, alone: bool
    ) -> Any:
        """The value, TOO_LATE, or FOUND; and for those aboard what they may have."""
        if alone:
            value, aboard.found = self._compute(key, producer)
            aboard.asked += 1
            return value
        token = new_token()
        try:
            outcome = self._find(key, token, aboard, deadline)
        except (RedisError, OSError) as error:
            aboard.outage = error
            raise CoordinationError from error
        return self._lead(key, token, aboard, producer) if outcome is LEAD else outcome

    def _find(self, key: bytes, token: bytes, aboard: Aboard, deadline: float) -> Any:
        """LEAD, FOUND as soon as Redis keeps a value at ``key``, or TOO_LATE."""
        lifetime = milliseconds(self._flight_timeout)
        taking = Call(TAKE_FLIGHT, (key, flight_key(key)), (token, lifetime))
        while True:
            aboard.asked += 1
            status, *news = run(self._client, taking).value
            if int(status) == 2:
                aboard.found = news[0]
                return FOUND
            if int(status) == 1:
                return LEAD
            if time.monotonic() >= deadline:
                return TOO_LATE
            leader, pttl = news[0], max(int(news[1]), 1) / 1000
            stream = flight_stream(key, leader if isinstance(leader, bytes) else leader.encode())
            self._follow(stream, min(time.monotonic() + min(LOOK_EVERY, pttl), deadline))

    def _lead(self, key: bytes, token: bytes, aboard: Aboard, producer: Producer) -> Any:
        keys = (key, flight_key(key), flight_stream(key, token))
        renewal = FlightRenewal(server_of(self._client), keys[1], token, self._flight_timeout)
        keeper().add(renewal)
        try:
            value, kept = self._compute(key, producer)
        except BaseException:
            keeper().discard(renewal)
            self._tell(Call(END_FLIGHT, keys, (token, STREAM_LIFETIME)))
            raise
        keeper().discard(renewal)
        storing = Call(STORE, keys, (token, kept, producer.lifetime, STREAM_LIFETIME))
        aboard.asked += 1
        if self._tell(storing) == 0:
            # A write or a delete came in between: what we computed is for our caller alone.
            logger.info("%s was written while it was computed; not stored", printable(key))
        else:
            aboard.found = kept
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
        clean = False
        try:
            if unread is not None:
                unread.settle(True)
            pause = max(1, int((until - time.monotonic()) * 1000))
            connection.send_command("XREAD", "BLOCK", pause, "STREAMS", stream, "0")
            # Redis looks at the time-outs of blocked clients ten times a second only.
            if connection.can_read(max(0.0, until - time.monotonic())):
                connection.read_response()
                clean = True
        except (RedisError, OSError) as error:
            if not is_outage(error):
                raise
            logger.info("Following %s: %s", printable(stream), error)
            time.sleep(max(0.0, min(0.05, until - time.monotonic())))
        finally:
            if clean:
                server.rest(connection, None)
            else:
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


#: A key of one database.
Place = tuple[Server, bytes]

#: Who is after a value in this process. One step of a dict is atomic, so it needs no mutex.
_aboard: dict[Place, Aboard] = {}
#: What the present thread or task is computing.
_computing: ContextVar[frozenset[Place]] = ContextVar("computing", default=frozenset())


def _land(place: Place, aboard: Aboard) -> None:
    _aboard.pop(place, None)  # A forked child has none.
    aboard.landed.set()


os.register_at_fork(after_in_child=_aboard.clear)
