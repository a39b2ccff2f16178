"""How ``get_or_set`` reads: by one request, seen by the tools that observe the cache."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from django.utils.functional import cached_property
from django_redis.client import DefaultClient
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import time
from ..conf import GetOrSetOptions
from ..events import Subject
from ..singleflight import Runner, ThreadRunner, Undecodable, in_flight
from ..steps import Steps
from ..threads import after_fork
from ..transport import (
    Breaker,
    CircuitOpen,
    Server,
    exchange_with,
    is_observed,
    is_plain,
    pack_words,
    server_of,
)
from ..transport.refusals import OUTAGE, genuine, is_busy, is_pool_exhausted, redis_errors, suppress
from . import undecodable
from .commands import OwnConnections, encoding, own_connections
from .lock_factory import LockCache

T = TypeVar("T")

#: Returned if there is no value.
MISSING = object()

#: Seconds a thread waits for its turn to read; then it reads in any case.
COLD_READ_TIMEOUT_SECONDS = 1.0

#: After so many misses in a row, a caller does not read first: its query for the leader reads, too.
EXPECTED_AFTER_MISSES = 3

#: Held by the thread of a crowd that reads from the server: the others find its connection.
_cold_reads: WeakKeyDictionary[Server, threading.Lock] = WeakKeyDictionary()
after_fork(_cold_reads.clear)

#: The errors of an outage, or of a command that Redis refuses.
FAILED: tuple[type[Exception], ...] = (*OUTAGE, ResponseError)


@contextmanager
def failing_as_django_redis(redis: object) -> Iterator[None]:
    """An error of ``redis`` becomes the one that django-redis raises."""
    try:
        yield
    except genuine(*FAILED) as error:
        raise ConnectionInterrupted(connection=redis) from error


@contextmanager
def cold_read(server: Server) -> Iterator[None]:
    """Wait for the turn of this thread in a crowd that reads from ``server``. One that has waited
    too long goes ahead, and later threads use a new mutex: the one that holds the old one hangs, or
    an exception from a signal handler prevented its release. (Inside a semaphore, such an exception
    may leave a mutex taken for which all others wait without a limit.)"""
    mutex = _cold_reads.setdefault(server, threading.Lock())
    is_turn = mutex.acquire(timeout=COLD_READ_TIMEOUT_SECONDS)
    if not is_turn and _cold_reads.get(server) is mutex:
        _cold_reads.pop(server, None)
    try:
        yield
    finally:
        if is_turn:
            mutex.release()


def _missing_unless_outage(error: ConnectionInterrupted) -> object:
    """MISSING if ``error`` is no outage. Else raises it."""
    cause = error.__cause__
    if cause is not None and (is_pool_exhausted(cause) or is_busy(cause)):
        return MISSING
    raise error


class FirstRead(NamedTuple):
    """What a read before the flight has returned.

    Attributes:
        value: MISSING if there is none.
        began, seconds: monotonic time, and how long it took.
        is_stale: whether the value is to be computed again.
        unseen: whether there is probably no value in Redis.
        outage: why Redis is unavailable.
    """

    value: object
    began: float
    seconds: float = 0.0
    is_stale: bool = False
    unseen: bool = False
    outage: BaseException | None = None


class ReadPath(NamedTuple):
    """How a cache reads one value: directly, through django-redis's client, or through the method
    with which a tool observes it.

    Attributes:
        chosen_for: what decides that; a tool may replace it at any time.
        read: the method of the cache.
        own: the connections that it uses; None: those of the pool.
        is_direct: whether nothing else has to see the read.
    """

    chosen_for: tuple[object, ...]
    read: Callable[[str, int | None, object], object]
    own: OwnConnections | None
    is_direct: bool


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


def originals(backend: object, *methods: str) -> dict[str, tuple[object, object]]:
    """The functions that are these ``methods``, and the code of each."""
    functions = {name: getattr(backend, name) for name in methods}
    return {name: (function, function.__code__) for name, function in functions.items()}


class CacheReader(LockCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that reads."""

    #: The methods that tools replace to observe reads; see ``originals``.
    _methods: ClassVar[dict[str, tuple[Any, object]]]
    get: Callable[..., object]
    aget: Callable[..., Any]
    _path: ReadPath | None = None
    #: How many reads before this one have returned no value.
    _misses_in_a_row = 0

    def _is_original(self, method: str) -> bool:
        function, code = self._methods[method]
        is_own = getattr(type(self), method) is function and function.__code__ is code
        return is_own and method not in self.__dict__

    def _is_in_flight(self, key: str, version: int | None) -> bool:
        return (server_of(self._lock_client()), self._encoded_key(key, version), None) in in_flight

    def _client_get_many(self, names: list[str], version: int | None) -> dict[str, object]:
        replica = self._replica()
        by = () if replica is None else (replica,)
        values: dict[str, object] = self.client.get_many(names, version, *by)
        return values

    def _read_or_join(self, key: str, version: int | None) -> object:
        """The value; MISSING also if the query for the leader reads it, too: that is repeated.
        Raises ConnectionInterrupted."""
        path = self._read_path()
        server = None if path.own is None else server_of(path.own.client)
        is_crowd = bool(in_flight) and self._is_in_flight(key, version)
        if not is_crowd and (server is None or not server.must_connect()):
            return path.read(key, version, server)
        with cold_read(server_of(self._lock_client())):
            return path.read(key, version, server)

    def _read_path(self) -> ReadPath:
        """How to read now."""
        path, get, own = self._path, self._methods["get"][0], self._own
        kind: Any = None if own is None else type(own.client)
        sends = None if own is None else (kind.execute_command, kind.evalsha)
        chosen_for = type(self).get, get.__code__, "get" in self.__dict__, sends
        if path is None or path.chosen_for != chosen_for:
            path = self._path = self._chosen_path(chosen_for)
        return path

    def _chosen_path(self, chosen_for: tuple[object, ...]) -> ReadPath:
        own = self._direct()
        read: Callable[[str, int | None, Any], object]
        if not self._is_original("get"):
            read = self._read_by_tool
        elif own is not None and type(self.client).get is DefaultClient.get:
            read = self._read_directly
        else:
            read = self._read_by_client
        return ReadPath(chosen_for, read, own, read == self._read_directly)

    def _read_directly(self, key: str, version: int | None, server: Any) -> object:
        """As django-redis's ``get``."""
        own, client = self._own, self.client
        assert own is not None
        nkey = own._key(client.make_key(key, version=version))
        try:
            stored = exchange_with(server, pack_words(b"GET", nkey))
        except genuine(*FAILED) as error:
            if is_busy(error):
                return MISSING
            raise ConnectionInterrupted(connection=own) from error
        return MISSING if stored is None else client.decode(stored)

    def _read_by_client(self, key: str, version: int | None, server: object) -> object:
        get, own = self.client.get, self._direct()
        try:
            if own is not None:
                return get(key, MISSING, version, own)
            return self._with_breaker(get, key, MISSING, version, self._replica())
        except genuine(ConnectionInterrupted) as error:
            return _missing_unless_outage(error)

    def _read_by_tool(self, key: str, version: int | None, server: object) -> object:
        """By the public ``get``, which a tool has replaced. It may hide an outage: then the query
        for the leader tells of that."""
        if self._breaker is not None and self._breaker.failing:
            return MISSING
        has_replicas, value = self._replica() is not None, MISSING
        try:
            with failing_as_django_redis(self._own):
                value = self.get(key, MISSING, version)
        except genuine(ConnectionInterrupted) as error:
            if not has_replicas:
                return _missing_unless_outage(error)
        if value is MISSING and has_replicas:
            return self._read_by_client(key, version, server)
        return value

    @cached_property
    def _own(self) -> OwnConnections | None:
        return None if self._breaker is None else own_connections(self.client)

    @cached_property
    def _is_plain(self) -> bool:
        """Whether tasks may use connections of ours. There is no asyncio twin of a client that has
        what those do not know: what is configured for threads is there in threads."""
        return is_plain(self._lock_client())

    def _direct(self) -> OwnConnections | None:
        """What sends calls on connections of our own; None while a tool observes the client, and
        where the way in which django-redis's or redis-py's client sends them must be kept."""
        own = self._own
        return None if own is None or is_observed(own.client) else own

    def _replica(self) -> Replica | None:
        """What reads a value that is computed if it is missing; None where there are no replicas to
        read from."""
        if not self._has_primary or len(self.client._server) == 1:
            return None
        replica, primary = self.client.get_client(write=False), self._lock_client()
        return None if replica is primary else Replica(replica, primary)

    @cached_property
    def _breaker(self) -> Breaker | None:
        """None if django-redis may read from another server."""
        if not self._has_primary or len(self.client._server) != 1:
            return None
        server = server_of(self._lock_client())
        return None if server.is_topology else server.breaker

    def _with_breaker(self, read: Callable[..., T], *args: object) -> T:
        """What ``read`` returns, which reads on the connections of django-redis's client."""
        breaker = self._breaker
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
        except genuine(ConnectionInterrupted) as error:
            cause = error.__cause__
            unreachable = isinstance(cause, (RedisConnectionError, RedisTimeoutError))
            if cause is not None and unreachable and not is_pool_exhausted(cause):
                breaker.failed(cause, time.monotonic() - began)
            raise
        if breaker.failing:
            breaker.answered()
        return reply

    # -- values that cannot be decoded -----------------------------------------------------------

    def _read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, object], BaseException | None]:
        """The stored values, and the error if Redis is down."""
        # If all connections of the pool are in use, or there are replicas, TAKE_FLIGHT reads them.
        observed = not self._is_original("get_many")
        if observed and self._breaker is not None and self._breaker.failing:
            return {}, None
        try:
            if observed:
                get_many: Any = self.get_many
                return get_many(names, version), None
            return self._with_breaker(self._client_get_many, names, version), None
        except Exception as error:
            cause = error
            if isinstance(error, ConnectionInterrupted):
                cause = error.__cause__ or error
            if isinstance(cause, (RedisError, ConnectionInterrupted)):
                others = is_pool_exhausted(cause) or self._replica() is not None
                return {}, None if others else self._without_redis(cause)
            try:
                values, failed = undecodable.read_others(self, names, version)
            except redis_errors() as outage:
                return {}, self._without_redis(outage)
            if not failed and not isinstance(cause, undecodable.DECODING_ERRORS):
                raise cause from None
            return values, None

    def _without_redis(self, error: BaseException) -> BaseException:
        """``error``, an outage or a refusal of Redis, or raise it (VALUES_ON_REDIS_DOWN)."""
        if self.conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def _reads_first(self) -> bool:
        """False for a value that is never stale and probably missing: the query for the leader
        reads it, too."""
        probably_there = self._misses_in_a_row < EXPECTED_AFTER_MISSES
        return probably_there or bool(in_flight) or not self._read_path().is_direct

    def _outage_of_read(
        self, error: Exception, key: str, version: int | None
    ) -> BaseException | None:
        """Why Redis is unavailable, after a read failed with ``error``. Raises that, unless the
        value cannot be decoded."""
        if isinstance(error, ConnectionInterrupted):
            return self._without_redis(error.__cause__ or error)
        runner = ThreadRunner(self._lock_client())
        runner.do(self._check_decoding(runner, error, key, version))
        return None

    def _first_read_steps(
        self, runner: Runner, nkey: bytes, key: str, version: int | None, chosen: GetOrSetOptions
    ) -> Steps[FirstRead]:
        """Read a value that may be stale, or in a task; see ``_reads_first``."""
        began, stale = time.monotonic(), int(chosen.stale * 1000)
        stored: Any = None
        value: object = MISSING
        outage: BaseException | None = None
        observed = not self._is_original("get")
        by_get = observed or not (stale or self._is_plain)
        probably_there = self._misses_in_a_row < EXPECTED_AFTER_MISSES
        reads = bool(stale or probably_there or runner.is_observed)
        try:
            if stale or not by_get:
                stored = yield from self._read(runner, nkey, reads)
            if by_get and isinstance(runner, ThreadRunner):
                value = self._read_by_tool(key, version, None)
            elif by_get:
                value = yield self.aget(key, MISSING, version)
        except genuine(ConnectionInterrupted) as error:
            outage = self._without_redis(error.__cause__ or error)
        except redis_errors() as error:
            outage = self._without_redis(error)
        except Exception as error:
            yield from self._check_decoding(runner, error, key, version)
        seconds = time.monotonic() - began
        if stored is not None and (value is MISSING or 0 <= int(stored[1]) <= stale):
            try:
                value = self._decoded(key, chosen.group, stored[0])
            except Undecodable:
                return FirstRead(MISSING, began, seconds, outage=outage)
        is_stale = stored is not None and 0 <= int(stored[1]) <= stale
        return FirstRead(value, began, seconds, is_stale, stored is None, outage)

    def _read(self, runner: Runner, nkey: bytes, needed: bool) -> Steps[object]:
        """The stored value with its remaining lifetime; None if there is none, or if this read is
        not ``needed`` because the query for the leader returns the value."""
        server = runner.server
        is_crowd = (server, nkey, runner.group) in in_flight
        if not needed and not is_crowd:
            return None
        if runner.group is not None or not (is_crowd or server.must_connect()):
            return (yield runner.read(nkey))
        with cold_read(server):
            return (yield runner.read(nkey))

    def _decode(self, stored: object) -> object:
        """The value that is ``stored``. Raises Undecodable if it cannot be decoded: a class was
        renamed, or it is from another serializer or compressor."""
        try:
            return self.client.decode(stored)
        except Exception as error:
            try:
                self.client.decode(stored)
            except Exception as again:
                if type(again) is type(error):
                    raise Undecodable(f"{type(error).__name__}: {error}") from error
            raise  # An exception of a signal handler, such as a time limit.

    def _decoded(self, key: str, group: str | None, stored: object) -> object:
        """As ``_decode``, and logs a failure."""
        try:
            return self._decode(stored)
        except Undecodable as error:
            undecodable.log(key, group, error)
            raise

    def _check_decoding(
        self, runner: Runner, error: Exception, key: str, version: int | None
    ) -> Steps[None]:
        """After ``get`` failed with ``error``. Raises that, unless the value cannot be decoded."""
        yield from undecodable.check(self, runner, error, key, version)

    def subject_of(self, key: str, group: str) -> Subject:
        return Subject.of(key, group, "", server_of(self._lock_client()), self)

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        made = self.client.make_key(key, version=version)
        return bytes(self._encode_name(made))

    @cached_property
    def _encode_name(self) -> Callable[[str], bytes]:
        """redis-py makes an encoder each time it is called for one."""
        return encoding(self._lock_client().get_encoder())
