"""How the values of a cache are read: by one request, seen by the tools that observe the cache; and
how those that are missing are computed, by ``singleflight``. A value that cannot be decoded counts
as missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pickle import PickleError
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.db import connections as database_connections
from django.utils.functional import cached_property
from django_redis.client import DefaultClient, HerdClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.serializers.pickle import PickleSerializer
from redis.exceptions import RedisError

from .. import events, singleflight, transport
from ..clock import time
from ..conf import SETTING, GetOrSetOptions, Timeout, given
from ..events import Read
from ..exceptions import LockNotAcquired
from ..protocol import Call, printable
from ..protocol.keys import flight_key
from ..singleflight import (
    MARK_STALE,
    TOO_LATE,
    CoordinationError,
    DeferredCall,
    Flight,
    Producer,
    Runner,
    ThreadRunner,
    Undecodable,
    in_flight,
    own_flights,
)
from ..steps import Steps
from ..threads import after_fork, get_logger, is_async, may_log
from ..transport import Server, exchange_with, pack_words, server_of
from ..transport.refusals import is_busy, is_pool_exhausted, raise_interrupt
from .background import Refresh
from .connections import FAILED, Connections, OwnConnections, failing_as_django_redis

if TYPE_CHECKING:
    from .arguments import GetOrSetArguments, GetOrSetManyArguments

R = TypeVar("R")

logger = get_logger("django_redis_lock.flights")

#: Returned if there is no value.
MISSING = object()

#: Seconds a thread waits for its turn to read; then it reads in any case.
COLD_READ_TIMEOUT_SECONDS = 1.0

#: After so many misses in a row, a caller does not read first: its query for the leader reads, too.
EXPECTED_AFTER_MISSES = 3

#: The usual errors of decoding; any other may be a signal handler's, such as a time limit.
DECODING_ERRORS = (
    *(AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError),
    PickleError,
)

#: When the log was last told of values that cannot be decoded, by group.
_logged_at: dict[str, float] = {}
#: After so many it is emptied.
MAX_LOGGED_GROUPS = 1000

#: Held by the thread of a crowd that reads from the server: the others find its connection.
_cold_reads: WeakKeyDictionary[Server, threading.Lock] = WeakKeyDictionary()
after_fork(_cold_reads.clear)


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


class Values:
    """The values of one ``cache``, a backend. Its methods with a ``runner`` are those of the
    backend, as steps."""

    def __init__(self, cache: Any, connections: Connections) -> None:
        self._cache, self._conf = cache, cache.conf
        self._connections = connections
        #: See ``_read_path``.
        self._path: tuple[object, Callable[..., object], OwnConnections | None] | None = None
        #: The options of a call that has none, and the settings that they are made of.
        self._usual_options: tuple[Mapping[str, object], GetOrSetOptions] | None = None
        #: How many reads before this one have returned no value.
        self.misses_in_a_row = 0

    def do(self, steps: Callable[..., Steps[R]], *args: object) -> R:
        runner = self.thread_runner()
        return runner.do(steps(runner, *args))

    async def ado(self, steps: Callable[..., Steps[R]], *args: object) -> R:
        runner = self.async_runner()
        return await runner.do(steps(runner, *args))

    def thread_runner(self) -> ThreadRunner:
        own = self._connections.own
        client = self._cache._lock_client() if own is None else own.client
        return ThreadRunner(client, database_connections.close_all)

    def async_runner(self) -> singleflight.AsyncRunner:
        client = transport.asyncio_client(self._cache._lock_client())
        return singleflight.AsyncRunner(client, waiting_thread())

    # -- to read -----------------------------------------------------------------------------

    def first(
        self, key: str, timeout: Timeout, version: int | None, options: Mapping[str, Any]
    ) -> object:
        """The first read of a ``get_or_set`` with these arguments, in a thread: the value, or else
        a ``FirstRead``; MISSING if it may be stale, and so is to be read with its lifetime."""
        # A hit must cost what a plain GET costs, so the settings are read after it.
        stale = options.get("stale", self._conf.STALE)
        if stale and ("stale" in options or self.timeout(timeout) is not None):
            return MISSING
        if options:
            GetOrSetOptions.check_without_stale(**options)
        if type(timeout) is not int and timeout is not SETTING:
            GetOrSetOptions.check_timeout(self.timeout(timeout))
        began, value, outage = time.monotonic(), MISSING, None
        if (
            self.misses_in_a_row < EXPECTED_AFTER_MISSES
            or in_flight
            or self._read_path()[1] != self._read_directly
        ):
            try:
                value = self.read(key, version)
            except ConnectionInterrupted as error:
                outage = self.without_redis(error.__cause__ or error)
            except Exception as error:
                self.do(self.check_decoding, error, version, key)
        if value is MISSING:
            return FirstRead(MISSING, began, time.monotonic() - began, False, True, outage)
        self.misses_in_a_row = 0
        self.record_read(key, options.get("group"), "hit", began)
        return value

    def read(self, key: str, version: int | None) -> object:
        """The value; MISSING also if the query for the leader reads it, too: that is repeated.
        Raises ConnectionInterrupted."""
        (_, read, own), cache = self._read_path(), self._cache
        server = None if own is None else server_of(own.client)
        is_cold = server is not None and server.must_connect()
        if in_flight and not is_cold:
            primary = server_of(cache._lock_client())
            is_cold = (primary, cache._encoded_key(key, version), None) in in_flight
        if not is_cold:
            return read(key, version, own, server)
        with cold_read(server_of(cache._lock_client())):
            return read(key, version, own, server)

    def _read_path(self) -> tuple[object, Callable[..., object], OwnConnections | None]:
        """How to read one value: directly, through django-redis's client, or through the method
        with which a tool observes it; and the connections for that, None for those of the pool.
        What decides it comes first, as a tool may replace that at any time."""
        path, own, kind = self._path, self._connections.own, type(self._cache)
        sends = None
        if own is not None:
            client = type(own.client)
            sends = client.execute_command, client.evalsha
        code = kind._own_methods["get"][0].__code__
        chosen_for = kind.get, code, "get" in self._cache.__dict__, sends
        if path is None or path[0] != chosen_for:
            own = self._connections.direct()
            read: Callable[..., object] = self._read_by_client
            if not self._cache._is_own("get"):
                read = self._read_by_tool
            elif own is not None and type(self._cache.client).get is DefaultClient.get:
                read = self._read_directly
            path = self._path = chosen_for, read, own
        return path

    def _read_directly(self, key: str, version: int | None, own: Any, server: Any) -> object:
        client = self._cache.client
        nkey = own._key(client.make_key(key, version=version))
        try:
            stored = exchange_with(server, pack_words(b"GET", nkey))
        except FAILED as error:
            if is_busy(error):
                return MISSING
            raise ConnectionInterrupted(connection=own) from error
        return MISSING if stored is None else client.decode(stored)

    def _read_by_client(self, key: str, version: int | None, *_: object) -> object:
        get, connections = self._cache.client.get, self._connections
        own = connections.direct()
        try:
            if own is not None:
                return get(key, MISSING, version, own)
            return connections.with_breaker(get, key, MISSING, version, connections.replica())
        except ConnectionInterrupted as error:
            raise_interrupt(error)
            return _missing_unless_outage(error)

    def _read_by_tool(self, key: str, version: int | None, *_: object) -> object:
        """By the public ``get``, which a tool has replaced. It may hide an outage: then the query
        for the leader tells of that."""
        connections = self._connections
        if connections.breaker is not None and connections.breaker.failing:
            return MISSING
        has_replicas, value = connections.replica() is not None, MISSING
        try:
            with failing_as_django_redis(connections.own):
                value = self._cache.get(key, MISSING, version)
        except ConnectionInterrupted as error:
            raise_interrupt(error)
            if not has_replicas:
                return _missing_unless_outage(error)
        if value is MISSING and has_replicas:
            return self._read_by_client(key, version)
        return value

    def without_redis(self, error: BaseException) -> BaseException:
        """``error``, an outage or a refusal of Redis, or raise it (VALUES_ON_REDIS_DOWN)."""
        if self._conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def first_in_steps(
        self, runner: Runner, nkey: bytes, key: str, version: int | None, chosen: GetOrSetOptions
    ) -> Steps[FirstRead]:
        """As ``first``, of a value that may be stale, or in a task."""
        began, stale = time.monotonic(), int(chosen.stale * 1000)
        stored: Any = None
        value: object = MISSING
        outage: BaseException | None = None
        observed = not self._cache._is_own("get")
        by_get = observed or not (stale or self._connections.plain)
        try:
            if stale or not by_get:
                stored = yield from self._stored(runner, nkey, stale)
            if by_get and isinstance(runner, ThreadRunner):
                value = self._read_by_tool(key, version)
            elif by_get:
                value = yield self._cache.aget(key, MISSING, version)
        except ConnectionInterrupted as error:
            raise_interrupt(error)
            outage = self.without_redis(error.__cause__ or error)
        except RedisError as error:
            outage = self.without_redis(error)
        except Exception as error:
            yield from self.check_decoding(runner, error, version, key)
        seconds = time.monotonic() - began
        is_stale = stored is not None and 0 <= int(stored[1]) <= stale
        if stored is not None and (value is MISSING or is_stale):
            try:
                value = self.decoded(key, chosen.group, stored[0])
            except Undecodable:
                return FirstRead(MISSING, began, seconds, outage=outage)
        return FirstRead(value, began, seconds, is_stale, stored is None, outage)

    def _stored(self, runner: Runner, nkey: bytes, stale: int) -> Steps[object]:
        """What is stored with its remaining lifetime; None if there is nothing, or if this read is
        not needed because the query for the leader returns the value."""
        server = runner.server
        is_crowd = (server, nkey, runner.group) in in_flight
        probably_there = self.misses_in_a_row < EXPECTED_AFTER_MISSES
        if not (stale or probably_there or runner.is_observed or is_crowd):
            return None
        if runner.group is not None or not (is_crowd or server.must_connect()):
            return (yield from singleflight.read(runner, nkey))
        with cold_read(server):
            return (yield from singleflight.read(runner, nkey))

    def read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, object], BaseException | None]:
        """The stored values, and the error if Redis is down."""
        # If all connections of the pool are in use, or there are replicas, TAKE_FLIGHT reads them.
        connections, observed = self._connections, not self._cache._is_own("get_many")
        if observed and connections.breaker is not None and connections.breaker.failing:
            return {}, None
        try:
            if observed:
                return self._cache.get_many(names, version), None
            get_many = self._cache.client.get_many
            return connections.with_breaker(get_many, names, version), None
        except (RedisError, ConnectionInterrupted) as error:
            cause = error.__cause__ or error if isinstance(error, ConnectionInterrupted) else error
            others = is_pool_exhausted(cause) or connections.replica() is not None
            return {}, None if others else self.without_redis(cause)
        except Exception as error:
            self.do(self.check_decoding, error, version, *names)
            return {}, None  # The query for the leader reads those that can be decoded.

    def record_read(
        self,
        key: str,
        group: str | None,
        result: str,
        began: float,
        seconds: float | None = None,
        values: int = 1,
    ) -> None:
        """Count a read, and emit a ``Read``; see there. Without ``seconds`` it ends now."""
        if (count := events.count_read) is not None:
            count(self._cache, key, group or "", result, values)
        if events.read_listeners:
            seconds = time.monotonic() - began if seconds is None else seconds
            events.emit(Read(self._cache, str(key), group or "", result, values, began, seconds))

    def timeout(self, timeout: Timeout) -> Timeout:
        left_out = timeout is SETTING or timeout is DEFAULT_TIMEOUT
        return self._cache.default_timeout if left_out else timeout

    def check_decoding(
        self, runner: Runner, error: Exception, version: int | None, *keys: str
    ) -> Steps[None]:
        """After ``get`` failed with ``error``. Raises that, unless a value cannot be decoded."""
        if isinstance(error, DECODING_ERRORS):
            return
        for key in keys:
            stored = yield from singleflight.read(runner, self._cache._encoded_key(key, version))
            try:
                if stored is not None:
                    self._decode(stored[0])
            except Undecodable:
                return
        raise error

    # -- to compute --------------------------------------------------------------------------

    def compute(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
    ) -> Steps[object]:
        chosen = GetOrSetOptions.of(self._conf, self.timeout(timeout), **options)
        [nkey] = yield from self.keys(runner, [key], version)
        producer = self._producer(runner, key, default, timeout, chosen)
        flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, nkey)
        return (yield from flight.compute_anyway([nkey], replace=True))[nkey]

    def value(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
        read: object = None,
    ) -> Steps[object]:
        """The steps of ``get_or_set``, after a ``FirstRead`` that returned no value, or without."""
        began = time.monotonic()
        chosen = self._options(timeout, options)
        if self._cache._has_plain_keys:  # As in most caches, without a generator.
            nkey = self._cache._encoded_key(key, version)
        else:
            [nkey] = yield from self.keys(runner, [key], version)
        if not isinstance(read, FirstRead):
            read = yield from self.first_in_steps(runner, nkey, key, version, chosen)
            if read.value is not MISSING and not read.is_stale:
                self.misses_in_a_row = 0
                self.record_read(key, chosen.group, "hit", read.began, read.seconds)
                return read.value
        producer = self._producer(runner, key, default, timeout, chosen)
        if read.is_stale:
            self.record_read(key, chosen.group, "stale", read.began, read.seconds)
            refresh = Refresh(self._cache, key, version, nkey)
            return (yield from refresh.value(runner, producer, read.value, chosen.refresh_wait))
        flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, nkey)
        flight.unseen = read.unseen
        outage = read.outage
        try:
            try:
                value = yield from flight.get_value(began + chosen.wait, outage)
            except CoordinationError as error:
                outage = self.without_redis(error.__cause__ or error)
                value = yield from flight.get_value(began + chosen.wait, outage)
        finally:
            if flight.were_there:
                self.misses_in_a_row = 0
                self.record_read(key, chosen.group, "hit", read.began)
            else:
                self.misses_in_a_row += 1
                self.record_read(key, chosen.group, "miss", read.began, read.seconds)
        if value is not TOO_LATE:
            return value
        if chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing the value", key)
        if chosen.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flight.compute_value(outage))

    def values(
        self,
        runner: Runner,
        keys: Iterable[str],
        default_many: Callable[[list[str]], object],
        timeout: Timeout,
        version: int | None,
        options: GetOrSetManyArguments,
    ) -> Steps[dict[str, object]]:
        for name in ("stale", "background", "soft_timeout"):
            if name in options:
                raise TypeError(f"get_or_set_many has no option {name!r}")
        if not callable(default_many):
            wrong = f"default_many must be a function of the missing keys, not {default_many!r}"
            raise TypeError(wrong)
        chosen = GetOrSetOptions.of(self._conf, self.timeout(timeout), **options, stale=0.0)
        deadline = time.monotonic() + chosen.wait
        names = list(dict.fromkeys(keys))
        began = time.monotonic()
        values, outage = dict[str, object](), None
        if isinstance(runner, ThreadRunner):
            values, outage = self.read_many(names, version)
        elif not self._connections.plain:
            values, outage = yield sync_to_async(self.read_many)(names, version)
        read_at, hits = (began, time.monotonic() - began), len(values)
        names_missing = [name for name in names if name not in values]
        nkeys = yield from self.keys(runner, names_missing, version)
        missing = dict(zip(nkeys, names_missing, strict=True))
        if missing:
            producer = self._producer(runner, names[0], default_many, timeout, chosen)
            flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, names=missing)
            late, found = list(missing), flight.values
            try:
                if outage is None:
                    try:
                        late = yield from flight.get_values(late, deadline)
                        if late and chosen.on_wait_timeout == "compute":
                            found.update((yield from flight.compute_anyway(late)))
                    except CoordinationError as error:
                        outage = self.without_redis(error.__cause__ or error)
                        late = [key for key in late if key not in found]
                if outage is not None:
                    found.update((yield from flight.without_redis(late, outage)))
                elif late and chosen.on_wait_timeout == "raise":
                    text = "Another caller is still computing a value"
                    raise LockNotAcquired(text, missing[late[0]])
            finally:
                hits += flight.were_there
                if misses := len(names) - hits:
                    self.record_read(names[0], chosen.group, "miss", *read_at, values=misses)
            values.update((missing[nkey], value) for nkey, value in found.items())
        if hits:
            self.record_read(names[0], chosen.group, "hit", *read_at, values=hits)
        return {name: values[name] for name in names if name in values}

    def _options(self, timeout: Timeout, arguments: GetOrSetArguments) -> GetOrSetOptions:
        """The options of a call; without ``arguments`` the same until a setting changes."""
        seconds = self.timeout(timeout)
        if arguments or type(seconds) is not int:
            return GetOrSetOptions.of(self._conf, seconds, **arguments)
        settings, usual = given(), self._usual_options
        if usual is None or usual[0] is not settings:
            usual = self._usual_options = settings, GetOrSetOptions.of(self._conf, seconds)
        return usual[1]

    def _producer(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        chosen: GetOrSetOptions,
    ) -> Producer:
        compute: Callable[..., object] = default if callable(default) else lambda: default
        if callable(default) and not isinstance(runner, ThreadRunner):
            compute = _awaitable(default)
        return Producer(
            compute,
            self.encoded,
            partial(self.decoded, key, chosen.group),
            chosen.lifetime(self.timeout(timeout)),
            int(chosen.stale * 1000),
            int(chosen.error_ttl * 1000),
            self.keeps_objects,
            str(key),
            chosen.group or "",
            self._cache,
        )

    def mark_stale(
        self, runner: Runner, keys: Iterable[str], version: int | None, stale: float
    ) -> Steps[int]:
        cache, seconds = self._cache, self.stale_seconds(stale)
        names = yield from self.keys(runner, keys, version)
        args: tuple[bytes | str | int, ...] = (int(seconds * 1000), *own_flights(names).values())
        calls = [Call(MARK_STALE, (name, flight_key(name)), args) for name in names]
        try:
            return sum(map(int, (yield runner.run(*calls)))) if calls else 0
        except RedisError:
            if not cache._ignore_exceptions:
                raise
            if cache._log_ignored_exceptions:
                cache.logger.exception("Exception ignored")
            return 0

    def stale_seconds(self, stale: float) -> float:
        """``stale`` as ``mark_stale`` needs it, by default the setting. Raises as that."""
        given = GetOrSetOptions.check(stale=stale)
        seconds: float = given.get("stale", self._conf.STALE)
        if not seconds:
            raise ValueError(
                "mark_stale needs stale, the seconds for which callers may still get the value, as "
                "in get_or_set. To have it computed again at once, use delete"
            )
        return seconds

    def keys(self, runner: Runner, names: Iterable[str], version: int | None) -> Steps[list[bytes]]:
        """The keys of ``names`` in Redis. A task may have to make them in Django's thread."""
        if self._cache._has_plain_keys or isinstance(runner, ThreadRunner):
            return [self._cache._encoded_key(name, version) for name in names]
        make = sync_to_async(lambda: [self._cache._encoded_key(name, version) for name in names])
        keys: list[bytes] = yield make()
        return keys

    # -- to encode and to decode -------------------------------------------------------------

    @cached_property
    def keeps_objects(self) -> bool:
        client = self._cache.client
        return type(getattr(client, "_serializer", None)) is PickleSerializer and (
            type(client).decode is DefaultClient.decode
        )

    def encoded(self, value: object) -> bytes | int:
        """``value`` as the server stores it. Serializers and compressors may return any buffer."""
        client = self._cache.client
        if isinstance(client, HerdClient):
            raise ImproperlyConfigured(
                "HerdClient stores values in a format that get_or_set cannot use. "
                "Use django-redis's DefaultClient: get_or_set needs no herd"
            )
        encoded = client.encode(value)
        return encoded if isinstance(encoded, (bytes, int)) else bytes(encoded)

    def _decode(self, stored: object) -> object:
        """The value that is ``stored``. Raises Undecodable if it cannot be decoded: a class was
        renamed, or it is from another serializer or compressor."""
        decode = self._cache.client.decode
        try:
            return decode(stored)
        except Exception as error:
            try:
                decode(stored)
            except Exception as again:
                if type(again) is type(error):
                    raise Undecodable(f"{type(error).__name__}: {error}") from error
            raise  # An exception of a signal handler, such as a time limit.

    def decoded(self, key: str, group: str | None, stored: object) -> object:
        """The value that is ``stored``. Raises Undecodable, and logs that once a minute for each
        group."""
        try:
            return self._decode(stored)
        except Undecodable as error:
            group = group or events.group_of(str(key))
            if len(_logged_at) > MAX_LOGGED_GROUPS:
                _logged_at.clear()
            if may_log(group, _logged_at):
                said = {"group": group, "key": str(key), "error": str(error)}
                logger.warning(
                    "A stored value of %(group)s cannot be decoded, so it counts as missing: "
                    "%(key)s (%(error)s)",
                    {name: printable(text) for name, text in said.items()},
                )
            raise


def waiting_thread() -> object:
    """What stands for the thread that waits for the running task in ``async_to_sync``."""
    return getattr(AsyncToSync.executors, "current", None)


def _awaitable(function: Callable[..., object]) -> Callable[..., object]:
    # ``list`` and the like wait for nothing.
    if (type(function) is type and function.__module__ == "builtins") or is_async(function):
        return function
    return DeferredCall(function)
