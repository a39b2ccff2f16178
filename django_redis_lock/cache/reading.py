"""How ``get_or_set`` reads: by one request, seen by the tools that observe the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import signature
from pickle import PickleError
from typing import Any, ClassVar, TypeVar
from weakref import WeakKeyDictionary

from asgiref.sync import sync_to_async
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import events
from ..clock import time
from ..events import Read, Subject
from ..protocol import printable
from ..singleflight import Runner, Steps, ThreadRunner, Undecodable, in_flight
from ..steps import drive
from ..threads import after_fork, get_logger, may_log
from ..transport import Breaker, CircuitOpen, Server, is_observed, server_of
from ..transport.refusals import OUTAGE, is_busy, is_pool_exhausted
from .commands import OwnConnections, own_connections
from .lock_factory import LockCache

T = TypeVar("T")

#: Returned if there is no value.
MISSING = object()

#: Seconds a thread waits for its turn to read; then it reads in any case.
COLD_READ_TIMEOUT_SECONDS = 1.0

#: Held by the thread of a crowd that reads from the server: the others find its connection.
_cold_reads: WeakKeyDictionary[Server, threading.Lock] = WeakKeyDictionary()
after_fork(_cold_reads.clear)


logger = get_logger("django_redis_lock.flights")
_undecodable_logged_at: dict[str, float] = {}
#: After so many it is emptied.
MAX_LOGGED_GROUPS = 1000

#: The usual errors of decoding; any other may be a signal handler's, such as a time limit.
_OF_DECODING = (
    *(AttributeError, EOFError, ImportError, LookupError, TypeError, ValueError),
    PickleError,
)

#: The errors of an outage, or of a command that Redis refuses.
FAILED: tuple[type[Exception], ...] = (*OUTAGE, ResponseError)


@contextmanager
def failing_as_django_redis(redis: Any) -> Iterator[None]:
    """An error of ``redis`` becomes the one that django-redis raises."""
    try:
        yield
    except FAILED as error:
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


class ObservedRead:
    """What ``get`` or ``get_many`` uses as its redis-py client while a tool observes a read.

    Attributes:
        stored: the result of ``read``: what Redis stores and the remaining lifetime in ms, or None.
        error: why it failed; IGNORE_EXCEPTIONS may hide that.
    """

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self._read = read
        self.stored: Any = None
        self.error: Exception | None = None

    def get(self, *keys: Any) -> Any:
        try:
            self.stored = self._read(*keys)
        except (RedisError, OSError) as error:
            self.error = error
            raise
        return None if self.stored is None else self.stored[0]

    mget = mget_nonatomic = get


def originals(backend: Any, *methods: str) -> dict[str, tuple[Any, Any]]:
    """The functions that are these ``methods``, and the code of each."""
    functions = {name: getattr(backend, name) for name in methods}
    return {name: (function, function.__code__) for name, function in functions.items()}


def takes_client(method: Callable[..., Any]) -> bool:
    """Whether ``method`` can be given an ``ObservedRead``."""
    parameters = signature(method).parameters
    return "client" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


class CacheReader(LockCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that reads."""

    #: The methods that tools replace to observe reads; see ``originals``.
    _methods: ClassVar[dict[str, tuple[Any, Any]]]

    @cached_property
    def _usable(self) -> Collection[str]:
        """The methods that take django-redis's arguments; others are not called."""
        return [name for name in self._methods if takes_client(getattr(self, name))]

    def _is_in_flight(self, key: str, version: int | None) -> bool:
        if not in_flight:
            return False
        return (server_of(self._lock_client()), self._encoded_key(key, version), None) in in_flight

    def _is_replaced(self, method: str) -> bool:
        """Whether a tool observes ``method``: has replaced it on the class (django-prometheus), on
        this instance (Sentry), or its code (Datadog). Then reads go through it."""
        return not self._is_original(method) and method in self._usable

    def _is_original(self, method: str) -> bool:
        function, code = self._methods[method]
        is_own = getattr(type(self), method) is function and function.__code__ is code
        return is_own and method not in self.__dict__

    def _record_read(
        self,
        key: str,
        group: str | None,
        result: str,
        began: float,
        seconds: float | None = None,
        values: int = 1,
    ) -> None:
        """Count a read, and emit a ``Read``; see there. Without ``seconds`` it ends now."""
        if events.count_read is not None:
            events.count_read(self, key, group or "", result, values)
        if events.read_listeners:
            seconds = time.monotonic() - began if seconds is None else seconds
            events.emit(Read(self, str(key), group or "", result, values, began, seconds))

    def _read_observed(self, runner: Runner, steps: Steps, key: str, version: int | None) -> Steps:
        """As ``_get_observed``. In an event loop ``get`` must not wait: it is called afterwards."""
        if isinstance(runner, ThreadRunner):
            return self._get_observed(key, version, lambda _: drive(steps))
        stored = yield from steps
        get = partial(self._get_observed, key, version, lambda _: stored)
        return get() if self._has_plain_keys else (yield sync_to_async(get)())

    def _get_observed(
        self, key: str, version: int | None, read: Callable[..., Any]
    ) -> tuple[Any, Any]:
        """Call ``get``, which calls ``read``; returns the results of both, MISSING for a value that
        is not there."""
        get: Any = self.get
        return self._observed(lambda client: get(key, MISSING, version, client=client), read)

    def _observed(
        self, method: Callable[[ObservedRead], Any], read: Callable[..., Any]
    ) -> tuple[Any, Any]:
        client, value = ObservedRead(read), MISSING
        try:
            value = method(client)
        except Exception:
            if client.error is None:
                raise
        if client.error is not None:
            raise client.error
        return client.stored, value

    def _get_by_tool(self, key: str, missing: Any, version: int | None, reader: Any) -> Any:
        redis = reader or self.client.get_client(write=False)
        with failing_as_django_redis(redis):
            return self._get_observed(key, version, lambda nkey: (redis.get(nkey), -1))[1]

    def _client_get_many(self, names: list[str], version: int | None) -> dict[str, Any]:
        get_many: Any = self.get_many if self._is_replaced("get_many") else self.client.get_many
        redis = self.client.get_client(write=False)
        mget = getattr(redis, "mget_nonatomic", redis.mget)
        with failing_as_django_redis(redis):
            found: dict[str, Any] = self._observed(
                lambda client: get_many(names, version, client=client),
                lambda *nkeys: (mget(*nkeys), -1),
            )[1]
            return found

    def _read_or_join(self, key: str, version: int | None) -> Any:
        """The value; MISSING also if the caller is to join a computation of this process. Raises
        ConnectionInterrupted."""
        reader = self._direct()
        is_crowd = self._is_in_flight(key, version)
        if not is_crowd and (reader is None or not server_of(reader.client).must_connect()):
            return self._read_value(key, version, reader)
        with cold_read(server_of(self._lock_client())):
            return self._read_value(key, version, reader)

    def _read_value(self, key: str, version: int | None, reader: Any) -> Any:
        get = self._get_by_tool if self._is_replaced("get") else self.client.get
        try:
            if reader is not None:
                return get(key, MISSING, version, reader)
            return self._with_breaker(get, key, MISSING, version, None)
        except ConnectionInterrupted as error:
            # The caller goes on to TAKE_FLIGHT: that has its own connection, and is repeated.
            cause = error.__cause__
            if cause is not None and (is_pool_exhausted(cause) or is_busy(cause)):
                return MISSING
            raise

    @cached_property
    def _own(self) -> OwnConnections | None:
        return None if self._breaker is None else own_connections(self.client)

    def _direct(self) -> OwnConnections | None:
        """What sends calls on connections of our own; None while a tool observes the client, and
        where the way in which django-redis's or redis-py's client sends them must be kept."""
        own = self._own
        return None if own is None or is_observed(own.client) else own

    @cached_property
    def _breaker(self) -> Breaker | None:
        """None if django-redis may read from another server."""
        if not self._has_primary or len(self.client._server) != 1:
            return None
        server = server_of(self._lock_client())
        return None if server.is_topology else server.breaker

    def _with_breaker(self, read: Callable[..., T], *args: Any) -> T:
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
            found = read(*args)
        except ConnectionInterrupted as error:
            cause = error.__cause__
            unreachable = isinstance(cause, (RedisConnectionError, RedisTimeoutError))
            if cause is not None and unreachable and not is_pool_exhausted(cause):
                breaker.failed(cause, time.monotonic() - began)
            raise
        if breaker.failing:
            breaker.answered()
        return found

    # -- values that cannot be decoded -----------------------------------------------------------

    def _decode(self, stored: Any) -> Any:
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

    def _decoded(self, key: str, group: str | None, stored: Any) -> Any:
        """As ``_decode``, and logs a failure."""
        try:
            return self._decode(stored)
        except Undecodable as error:
            self._log_undecodable(key, group, error)
            raise

    def _log_undecodable(self, key: str, group: str | None, error: Exception) -> None:
        """Once a minute for each group."""
        group = group or events.group_of(str(key))
        if len(_undecodable_logged_at) > MAX_LOGGED_GROUPS:
            _undecodable_logged_at.clear()
        if may_log(group, _undecodable_logged_at):
            text = "A stored value of %(group)s cannot be decoded, so it counts as missing: "
            about = {"group": group, "key": str(key), "error": str(error)}
            logger.warning(
                text + "%(key)s (%(error)s)", {name: printable(about[name]) for name in about}
            )

    def _check_decoding(self, runner: Runner, error: Exception, key: str, version: Any) -> Steps:
        """After ``get`` failed with ``error``. Raises that, unless the value cannot be decoded."""
        stored = yield runner.read(self._encoded_key(key, version))
        try:
            if stored is not None:
                self._decode(stored[0])
        except Undecodable:
            return
        if not isinstance(error, _OF_DECODING):  # Else another caller has stored the value again.
            raise error

    def _decodable(self, names: list[str], version: int | None) -> tuple[dict[str, Any], bool]:
        """As ``_client_get_many``, without the values that cannot be decoded; and whether there are
        such."""
        redis, found, failed = self.client.get_client(write=False), {}, False
        mget = getattr(redis, "mget_nonatomic", redis.mget)
        values = mget([self.client.make_key(name, version=version) for name in names])
        for name, stored in zip(names, values, strict=True):
            try:
                if stored is not None:
                    found[name] = self._decode(stored)
            except Undecodable:
                failed = True
        return found, failed

    def _read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, Any], BaseException | None]:
        """The stored values, and the error if Redis is down."""
        # If all connections of the pool are in use, TAKE_FLIGHT reads the values.
        try:
            return self._with_breaker(self._client_get_many, names, version), None
        except Exception as error:
            cause = error
            if isinstance(error, ConnectionInterrupted):
                cause = error.__cause__ or error
            if isinstance(cause, (RedisError, ConnectionInterrupted)):
                return {}, None if is_pool_exhausted(cause) else self._without_redis(cause)
            try:
                found, failed = self._decodable(names, version)
            except (RedisError, OSError) as outage:
                return {}, self._without_redis(outage)
            if not failed and not isinstance(cause, _OF_DECODING):
                raise cause from None
            return found, None

    def _without_redis(self, error: BaseException) -> BaseException:
        """``error``, an outage or a refusal of Redis, or raise it (VALUES_ON_REDIS_DOWN)."""
        if self.conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def _read(self, runner: Runner, nkey: bytes, needed: bool) -> Steps:
        """The stored value with its remaining lifetime; None if there is none, or if this read is
        not ``needed`` because TAKE_FLIGHT returns the value."""
        server = runner.server
        is_crowd = (server, nkey, runner.group) in in_flight
        if not needed and not is_crowd:
            return None
        if runner.group is not None or not (is_crowd or server.must_connect()):
            return (yield runner.read(nkey))
        with cold_read(server):
            return (yield runner.read(nkey))

    def subject_of(self, key: str, group: str) -> Subject:
        return Subject.of(key, group, "", server_of(self._lock_client()), self)

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        made = self.client.make_key(key, version=version)
        return bytes(self._encode_name(made))

    @cached_property
    def _encode_name(self) -> Callable[[str], bytes]:
        """redis-py makes an encoder each time it is asked for one."""
        encode: Callable[[str], bytes] = self._lock_client().get_encoder().encode
        return encode
