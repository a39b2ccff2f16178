"""How the calls of a cache reach Redis. django-redis's methods, with their encoding, timeouts and
versions, get something in place of a redis-py client: connections of our own (``OwnConnections``);
or, where a tool observes the client, and on a client that the caller gives, ``FlightEnding``. In
both, writes end the flights of what they write: a value computed from older data must not overwrite
them (invariant C2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from functools import lru_cache, wraps
from inspect import signature
from typing import Any, NamedTuple, TypeVar

from django.conf import settings
from django.utils.functional import cached_property
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import DataError, NoScriptError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..events import remembered
from ..protocol import Call, Reply, Script
from ..protocol.keys import flight_key
from ..singleflight import DELETE, END_SEEN, EXPIRE_AT, WRITE, own_flights
from ..steps import Step, Steps, drive
from ..transport import (
    Breaker,
    CircuitOpen,
    exchange,
    is_cluster,
    is_observed,
    is_plain,
    pack,
    pack_words,
    run_all,
    server_of,
)
from ..transport.plain import in_memory
from ..transport.refusals import OUTAGE, is_pool_exhausted, raise_interrupt
from ..transport.server import encoding, joined, pack_word

T = TypeVar("T")

#: The errors of an outage, or of a command that Redis refuses.
FAILED: tuple[type[Exception], ...] = (*OUTAGE, ResponseError)


class Write(NamedTuple):
    """SET of a value, or DEL of some.

    Attributes:
        keys: of the values; one, if it is set.
        value: None: they are deleted.
        px: its lifetime in milliseconds; None: no expiry.
        mode: ``b"NX"``, ``b"XX"`` or empty.
    """

    keys: tuple[bytes, ...]
    value: bytes | None = None
    px: int | None = None
    mode: bytes = b""

    @property
    def may_run_twice(self) -> bool:
        return self.mode != b"NX"

    def packed(self) -> bytes:
        if self.value is None:
            return pack_words(b"DEL", *self.keys)
        parts = [b"SET", *self.keys, self.value]
        if self.px is not None:
            parts += (b"PX", b"%d" % self.px)
        return pack_words(*parts, self.mode) if self.mode else pack_words(*parts)

    def call(self, own: Mapping[bytes, bytes]) -> Call:
        """The script that does the same, and ends the flights that the caller is not part of."""
        keys = (*self.keys, *map(flight_key, self.keys))
        if self.value is None:
            return Call(DELETE, keys, tuple(own.values()))
        px = "" if self.px is None else self.px
        return Call(WRITE, keys, (self.value, px, self.mode, *own.values()))


def look_at_flights(keys: Sequence[bytes]) -> bytes:
    """The command that returns the token of the flight of a key, or a list of those of several."""
    return joined([_GET if len(keys) == 1 else _MGET, *map(_packed_flight, keys)])


_GET, _MGET = pack_word(b"GET"), pack_word(b"MGET")


@remembered
def _packed_flight(key: bytes) -> bytes:
    return pack_word(flight_key(key))


def in_transaction(writes: Sequence[Write]) -> tuple[bytes, int]:
    """``writes``, and a look at all their flights, as one command; and how many replies it has."""
    looking = look_at_flights([key for write in writes for key in write.keys])
    commands = (pack_words(b"MULTI"), *(write.packed() for write in writes), looking)
    return b"".join((*commands, pack_words(b"EXEC"))), len(commands) + 1


class Seen(dict[bytes, tuple[bytes, Any]]):
    """The flights that some writes have to end: by key, with the token and the write."""

    def __init__(
        self,
        writes: Sequence[Write],
        replies: list[Reply],
        tokens: Reply,
        own: Mapping[bytes, bytes],
    ) -> None:
        tokens = iter(tokens if type(tokens) is list else [tokens])
        for write, reply in zip(writes, replies, strict=True):
            for key in write.keys:
                token = next(tokens)
                if None not in (token, reply) and token != own.get(key):
                    self[key] = token, write

    def end(self) -> list[Call]:
        return [Call(END_SEEN, (flight_key(key),), (token,)) for key, (token, _) in self.items()]

    def again(self, ended: list[Reply]) -> list[Call]:
        """The writes whose flights have ``ended`` by themselves: the leader may have stored a value
        just before, but not over one that was added."""
        pairs = zip(self.items(), ended, strict=True)
        return [
            write._replace(keys=(key,)).call({})
            for (key, (_, write)), done in pairs
            if not done and write.may_run_twice
        ]


def _done(steps: Callable[..., Steps[Any]]) -> Callable[..., Any]:
    """The method that does ``steps``, of connections for threads or for tasks."""

    @wraps(steps)
    def method(self: Commands, *args: Any) -> Any:
        return self._do(steps(self, *args))

    return method


class Commands:
    """A redis-py ``client`` whose writes end the flights of the keys they write."""

    _do: Any = staticmethod(drive)

    def __init__(self, client: Any) -> None:
        self.client = client
        has_encoder = client if hasattr(client, "get_encoder") else client.connection_pool
        self._key = encoding(has_encoder.get_encoder())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def set(
        self, name: str, value: object, nx: bool = False, px: int | None = None, xx: bool = False
    ) -> Any:
        if nx and xx:
            raise DataError("nx and xx are mutually exclusive")
        key = self._key(name)
        value = value if type(value) is bytes else self._key(value)
        mode = b"NX" if nx else b"XX" if xx else b""
        return self._write(Write((key,), value, px, mode), own_flights((key,)))

    def delete(self, *names: str) -> Step[Reply]:
        keys = tuple(map(self._key, names))
        return self._write(Write(keys), own_flights(keys, "deleted"))

    def expire(self, name: str, time: int | timedelta) -> bool:
        return bool(self._expire("expire", name, time, units=1))

    def pexpire(self, name: str, time: int | timedelta) -> Step[Reply]:
        return self._expire("pexpire", name, time, units=1000)

    def _expire(self, command: str, name: str, time: Any, units: int) -> Step[Reply]:
        if isinstance(time, timedelta):
            time = int(time.total_seconds() * units)
        elif isinstance(time, int):
            time = int(time)  # A subclass may have another ``str()``.
        if isinstance(time, (int, float)) and time <= 0:
            return self.delete(name)
        return self._keep(command, name, time)

    def persist(self, name: str) -> Step[Reply]:
        return self._keep("persist", name)

    def expireat(self, name: str, when: int | datetime) -> bool:
        return self._expire_at(name, "EXPIREAT", when, units=1)

    def pexpireat(self, name: str, when: int | datetime) -> bool:
        return self._expire_at(name, "PEXPIREAT", when, units=1000)

    def _expire_at(self, name: str, command: str, when: int | datetime, units: int) -> bool:
        key = self._key(name)
        moment = int(when.timestamp() * units if isinstance(when, datetime) else when)
        args: tuple[bytes | str | int, ...] = (command, moment, *own_flights((key,)).values())
        return bool(self._run(Call(EXPIRE_AT, (key, flight_key(key)), args)))

    def _counting(self, script: str, name: str, args: tuple[object, ...]) -> Call:
        key, parts = self._key(name), map(self._key, args)
        own = own_flights((key,)).values()
        return Call(_counter(script, len(args)), (key, flight_key(key)), (*parts, *own))

    def _keep(self, command: str, name: str, *time: object) -> Step[Reply]:
        """Send a ``command`` that changes how long a value is kept."""
        raise NotImplementedError

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Step[Reply]:
        """Send ``write``; it ends no flight that is the caller's ``own``."""
        raise NotImplementedError

    def _run(self, call: Call) -> Step[Reply]:
        raise NotImplementedError


@lru_cache(maxsize=8)
def _counter(script: str, args: int) -> Script:
    """A ``script`` that increments a number, and then lets go of its flight."""
    return Script(
        f"local function count() {script} end\n"
        f"local number = count()\nif number then let_go(KEYS[2], {args + 1}) end\nreturn number"
    )


def _reads(command: str) -> Callable[..., Any]:
    def method(self: OwnConnections, *names: str) -> Any:
        return self._send(command, *names)

    return method


class OwnConnections(Commands):
    """Takes the place of a redis-py client whose server is the only one, past redis-py's layers.

    A write is a plain command with a look at its flight in the same trip: hardly ever does another
    caller compute a value that is written, and a script costs the server six times as much. A
    flight that the look has seen is ended by a second trip, before the write returns.
    """

    _exchange: Any = staticmethod(exchange)
    _run_all: Any = staticmethod(run_all)

    get, mget, exists = _reads("GET"), _reads("MGET"), _reads("EXISTS")
    ttl, pttl = _reads("TTL"), _reads("PTTL")

    @_done
    def eval(self, script: str, numkeys: int, name: str, *args: object) -> Steps[Reply]:
        """django-redis increments by a script, which returns nothing if there is no number."""
        call = self._counting(script, name, args)
        try:
            return (yield self._exchange(self.client, pack(call), may_run_twice=False))
        except NoScriptError:
            anew = pack(call, known=False)
            return (yield self._exchange(self.client, anew, may_run_twice=False))

    def pipeline(self, *args: object, **kwargs: object) -> Batch:
        return Batch(self)

    def _send(self, command: str, *parts: object) -> Step[Reply]:
        packed = pack_words(command.encode(), *map(self._key, parts))
        return self._exchange(self.client, packed)

    @_done
    def _keep(self, command: str, name: str, *time: object) -> Steps[bool]:
        own_flights((self._key(name),))
        return bool((yield self._send(command.upper(), name, *time)))

    @_done
    def _run(self, call: Call) -> Steps[Reply]:
        [reply] = yield self._run_all(self.client, [call])
        return reply

    @_done
    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Steps[Reply]:
        command, may_run_twice = write.packed() + look_at_flights(write.keys), write.may_run_twice
        reply, tokens = yield self._exchange(self.client, command, 2, may_run_twice=may_run_twice)
        if tokens and (type(tokens) is not list or any(tokens)):
            yield from self._end(Seen([write], [reply], tokens, own))
        return reply

    def _end(self, seen: Seen) -> Steps[None]:
        if seen and (again := seen.again((yield self._run_all(self.client, seen.end())))):
            yield self._run_all(self.client, again)

    @_done
    def write_all(self, writes: list[Write], own: Mapping[bytes, bytes]) -> Steps[list[Reply]]:
        """In one transaction, or in one trip to each node of a cluster."""
        if not writes:
            return []
        if is_cluster(self.client):
            calls = [write.call(own) for write in writes]
            done: list[Reply] = yield self._run_all(self.client, calls)
            return done
        replies = yield self._exchange(self.client, *in_transaction(writes))
        *done, tokens = replies[-1]
        for reply in (*done, tokens):
            if isinstance(reply, Exception):
                raise reply
        yield from self._end(Seen(writes, done, tokens, own))
        return done


class Batch(Commands):
    """Writes that are sent together, by ``connections``."""

    def __init__(self, connections: OwnConnections) -> None:
        super().__init__(connections.client)
        self._connections = connections
        self._writes: list[Write] = []
        self._own: dict[bytes, bytes] = {}

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> None:
        self._writes.append(write)
        self._own.update(own)

    def execute(self) -> Any:
        writes, self._writes = self._writes, []
        return self._connections.write_all(writes, self._own)


# -- by redis-py: for tools that observe it, a client of the caller's, and clusters ----------------


class FlightEnding(Commands):
    """A redis-py client, or pipeline, whose writes end the flights of the keys they write: each is
    one script."""

    def __init__(self, client: object) -> None:
        super().__init__(client)
        #: The scripts whose source a pipeline has sent before its next command.
        self._sent: set[Script] = set()

    def eval(self, script: str, numkeys: int, name: str, *args: object) -> Reply:
        call = self._counting(script, name, args)
        return self.client.eval(call.script.source, 2, *call.keys, *call.args)

    def pipeline(self, *args: object, **kwargs: object) -> FlightEnding | Batch:
        return FlightEnding(self.client.pipeline(*args, **kwargs))

    def _keep(self, command: str, name: str, *time: object) -> Reply:
        own_flights((self._key(name),))
        return getattr(self.client, command)(name, *time)

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Reply:
        return self._run(write.call(own))

    @_done
    def _run(self, call: Call) -> Steps[Reply]:
        # Named methods, because some tools see only those.
        evalsha, evaluate = self.client.evalsha, self.client.eval
        # Bytes for the same reason as in ``pack_words``.
        args = (a if isinstance(a, bytes) else str(a).encode() for a in call.args)
        parts = (b"%d" % len(call.keys), *call.keys, *args)
        stack = getattr(self.client, "command_stack", None)
        if stack is not None:  # A pipeline cannot react to NOSCRIPT: send the source first.
            if not stack:
                self._sent.clear()
            if call.script in self._sent:
                return evalsha(call.script.sha, *parts)
            self._sent.add(call.script)
            return evaluate(call.script.source, *parts)
        try:
            return (yield evalsha(call.script.sha, *parts))
        except NoScriptError:
            return (yield evaluate(call.script.source, *parts))


class ClusterFlightEnding(FlightEnding):
    """For a cluster: a command with several keys goes to the node of each."""

    def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Reply:
        if len(write.keys) == 1:
            return super()._write(write, own)
        calls = [Write((key,)).call(own) for key in write.keys]
        return sum(map(int, run_all(self.client, calls))) if calls else 0

    def pipeline(self, *args: object, **kwargs: object) -> Batch:
        return Batch(OwnConnections(self.client))


def flight_ending(client: object) -> FlightEnding:
    return (ClusterFlightEnding if is_cluster(client) else FlightEnding)(client)


# -- of one cache ----------------------------------------------------------------------------------

#: The methods of django-redis's client that are given ``OwnConnections``.
_GIVEN = ("get", "get_many", "set", "delete", "delete_many", "has_key", "ttl", "pttl", "touch")


@lru_cache(maxsize=64)
def _takes_client(method: Callable[..., object]) -> bool:
    # Each request in an event loop has another cache, and to look into a signature takes long.
    parameters = signature(method).parameters
    return "client" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class Replica:
    """Stands for the redis-py client of a replica, which may lag behind, or be down: what it does
    not return, the primary is asked for, before anybody computes it."""

    def __init__(self, replica: Any, primary: Any) -> None:
        self._replica = replica
        self._primary = primary

    def get(self, key: object) -> object:
        return self.mget(key)[0]

    def mget(self, *keys: object) -> list[object]:
        found: dict[object, object] = {}
        with suppress(*FAILED):
            found = dict(zip(keys, self._replica.mget(keys), strict=True))
        if missing := [key for key in keys if found.get(key) is None]:
            found.update(zip(missing, self._primary.mget(missing), strict=True))
        return [found[key] for key in keys]


@contextmanager
def failing_as_django_redis(redis: object) -> Iterator[None]:
    try:
        yield
    except FAILED as error:
        raise ConnectionInterrupted(connection=redis) from error


class Connections:
    """What sends the calls of one ``cache``, a backend."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    @cached_property
    def own(self) -> OwnConnections | None:
        """None if django-redis may read from another server, if its client takes no other, or
        closes its connections after each request; if its redis-py client has what ours do not know,
        or leads to a server in memory, which has no transactions."""
        client = self._cache.client
        closing = getattr(settings, "DJANGO_REDIS_CLOSE_CONNECTION", False)
        if self.breaker is None or client._options.get("CLOSE_CONNECTION", closing):
            return None
        given = (getattr(client, name) for name in _GIVEN)
        if not all(_takes_client(getattr(each, "__func__", each)) for each in given):
            return None
        redis = client.get_client(write=True)
        other = in_memory(redis) or redis.get_encoder().decode_responses
        return OwnConnections(redis) if is_plain(redis) and not other else None

    @cached_property
    def plain(self) -> bool:
        """Whether tasks may use connections of ours. There is no asyncio twin of a client that has
        what those do not know: what is configured for threads is there in threads."""
        return is_plain(self._cache._lock_client())

    def direct(self) -> OwnConnections | None:
        """What sends calls on connections of our own; None while a tool observes the client, and
        where the way in which django-redis's or redis-py's client sends them must be kept."""
        own = self.own
        return None if own is None or is_observed(own.client) else own

    def replica(self) -> Replica | None:
        """What reads a value that is computed if it is missing; None where there are no replicas to
        read from."""
        cache = self._cache
        if not cache._has_primary or len(cache.client._server) == 1:
            return None
        replica, primary = cache.client.get_client(write=False), cache._lock_client()
        return None if replica is primary else Replica(replica, primary)

    @cached_property
    def breaker(self) -> Breaker | None:
        """None if django-redis may read from another server."""
        cache = self._cache
        if not cache._has_primary or len(cache.client._server) != 1:
            return None
        server = server_of(cache._lock_client())
        return None if server.is_topology else server.breaker

    def with_breaker(self, read: Callable[..., T], *args: object) -> T:
        """What ``read`` returns, which reads on the connections of django-redis's client."""
        breaker = self.breaker
        if breaker is None:
            return read(*args)
        if breaker.failing:
            try:
                breaker.admit(None)
            except CircuitOpen as error:
                raise ConnectionInterrupted(connection=None) from error
        began = time.monotonic()
        try:
            reply = read(*args)
        except ConnectionInterrupted as error:
            raise_interrupt(error)
            cause = error.__cause__
            unreachable = isinstance(cause, (RedisConnectionError, RedisTimeoutError))
            if cause is not None and unreachable and not is_pool_exhausted(cause):
                breaker.failed(cause, time.monotonic() - began)
            raise
        if breaker.failing:
            breaker.answered()
        return reply
