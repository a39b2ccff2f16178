"""redis-py's own pools, of this package's caches: each of their connections serves one call at a
time. Calls on raw clients need that, pipelines, and values that do not go past redis-py.

redis-py puts a connection back into its pool also if an exception from a signal handler (Ctrl-C, a
time limit of Celery) came between a request and its reply. The next call would return that reply,
and each later one the reply to the call before it. Nor does it notice that a firewall has forgotten
a connection, or that its address leads to another server. So the pool of a cache makes connections
of a class that counts the replies to come, and that connects again before it serves another call.
"""

from __future__ import annotations

import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

from redis.backoff import NoBackoff
from redis.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from .threads import Mutex, free_after_fork
from .transport.address import (
    PROBE_SECONDS,
    TRUSTED_SECONDS,
    Client,
    Pool,
    connecting,
    name_driver,
)
from .transport.plain import RETRY
from .transport.refusals import is_misdirected, raise_interrupt_in_redis_py
from .transport.server import poll_of, renew_pool, still_answers

C = TypeVar("C", bound=Client)
T = TypeVar("T")

UNREAD = "The reply to an earlier command was not read."
_CHECKS_WHILE_CONNECTING = hasattr(AbstractConnection, "connect_check_health")
#: After these there are replies without a request.
_STREAMING = frozenset(
    (
        *("SUBSCRIBE", "PSUBSCRIBE", "SSUBSCRIBE"),
        *("UNSUBSCRIBE", "PUNSUBSCRIBE", "SUNSUBSCRIBE", "MONITOR"),
    )
)


#: The class that is guarded is known when a pool is.
_Any: Any = object


class GuardedConnection(_Any):  # type: ignore[misc]  # the class of Any is known later
    """In front of a connection class for threads, of redis-py's or of the project's."""

    #: Requests that were, or may have been, sent without their replies having been read.
    _outstanding = 0
    #: Requests in what ``pack_commands`` has packed.
    _packed = 0
    #: Whether it has introduced itself to the server, with its credentials and its database.
    _is_ready = False
    _streams = False
    #: When a reply was read, in monotonic seconds.
    _answered_at = 0.0
    #: redis-py's in front of this one, which keeps values in memory; see ``_apart``.
    in_front: Callable[[], Any] = staticmethod(lambda: None)

    def _is_clean(self) -> bool:
        return self._is_ready and not self._outstanding and not self._streams

    def _forget_values(self) -> None:
        """The server no longer says which of the values in memory have changed."""
        if (front := self.in_front()) is not None:
            front._cache.flush()

    # The pool calls it before each use.
    def connect(self) -> None:
        self._packed = 0
        front = self.in_front()
        if front is not None and (asked := front._current_command_cache_key) is not None:
            # Of a call that was interrupted.
            front._cache.delete_by_cache_keys([asked])
            front._current_command_cache_key = None
        if self._sock is not None and not self._may_be_used():
            self.disconnect()
        with connecting():
            super().connect()
        self._is_ready = True

    def _may_be_used(self) -> bool:
        if not self._is_clean() or time.monotonic() - self._answered_at <= TRUSTED_SECONDS:
            return self._is_clean()
        answers = False
        with suppress(RedisError):
            while self.in_front() is not None and self.can_read():
                self.read_response(push_request=True)  # What has changed.
            answers = still_answers(self, min(PROBE_SECONDS, self.socket_timeout or PROBE_SECONDS))
        return answers

    # redis-py 8 calls it where a connection has ended.
    def connect_check_health(self, *args: object, **kwargs: object) -> None:
        with connecting():
            super().connect_check_health(*args, **kwargs)
        self._is_ready = True

    def _connect(self) -> socket.socket:
        self._is_ready, self._outstanding, self._streams = False, 0, False
        self._forget_values()
        sock: socket.socket = super()._connect()
        return sock

    def disconnect(self, *args: object, **kwargs: object) -> None:
        self._is_ready = False  # Also if an exception cuts this short.
        super().disconnect(*args, **kwargs)
        self._forget_values()
        raise_interrupt_in_redis_py()

    def can_read(self, timeout: float = 0) -> bool:
        self._outstanding += 1  # As below: it takes what has come from the socket.
        readable = bool(super().can_read(0) or (timeout and poll_of(self)(timeout * 1000)))
        self._outstanding -= 1
        return readable

    def pack_commands(self, commands: Iterable[Iterable[object]]) -> object:
        commands = [_without_numbers(command) for command in commands]
        packed = super().pack_commands(commands)
        self._packed = len(commands)
        return packed

    def send_command(self, *args: object, **kwargs: object) -> None:
        super().send_command(*_without_numbers(args), **kwargs)
        self._streams = self._streams or args[0] in _STREAMING

    def send_packed_command(
        self, command: bytes | Iterable[bytes], check_health: bool = True
    ) -> None:
        # Connecting, and a check of its health, send other commands.
        packed, self._packed = self._packed, 0
        if not self._sock:
            if _CHECKS_WHILE_CONNECTING:
                self.connect_check_health(check_health=False)
            else:
                self.connect()
        if self._outstanding and self._is_ready and not self._streams:
            self.disconnect()
            raise RedisConnectionError(UNREAD)
        if check_health:
            self.check_health()
        self._outstanding += packed or 1  # From here on nothing but sending is done.
        super().send_packed_command(command, check_health=False)

    def read_response(self, *args: object, **kwargs: object) -> object:
        if kwargs.get("push_request"):  # No reply is awaited, but what has come must be taken in.
            self._outstanding += 1
        try:
            reply = super().read_response(*args, **kwargs)
        except ResponseError:
            self._note_reply()
            raise
        except RedisTimeoutError:
            self._outstanding -= bool(kwargs.get("push_request"))
            raise
        self._note_reply()
        return reply

    def _note_reply(self) -> None:
        self._outstanding -= 1
        self._answered_at = time.monotonic()


def _without_numbers(args: Iterable[object]) -> list[object]:
    """See ``transport.pack_words``."""
    return [str(arg) if type(arg) in (int, float) else arg for arg in args]


@cache
def guarded(kind: type[Any]) -> type[Any]:
    """The connection class ``kind`` with a guard in front of it."""
    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "guards": kind}
    return type(kind.__name__, (GuardedConnection, kind), members)


def guard(client: T, cache_config: Any = None) -> T:
    """``client``, a redis-py client for threads, after its pool is made to guard its connections;
    those that the pool had are replaced. ``cache_config``: of its client-side cache, if it has
    one."""
    pool: Any = getattr(client, "connection_pool", None)
    kind: Any = getattr(pool, "connection_class", None)
    known = isinstance(kind, type) and issubclass(kind, AbstractConnection)
    if known and not issubclass(kind, GuardedConnection):
        pool.connection_class = guarded(kind)
        if cache_config is not None:
            pool.make_connection = partial(_apart, pool.make_connection, cache_config)
        pool.reset()
    return client


def _apart(make_connection: Callable[[], Any], cache_config: Any) -> Any:
    """A connection with a client-side cache of its own. redis-py has one for all of a pool: then a
    thread reads on the connections of others, perhaps the reply for which another waits, and may
    wait for the reply to a command that only another has sent."""
    connection = make_connection()
    connection._cache = import_module("redis.cache").CacheFactory(cache_config).get_cache()
    connection._conn.in_front = weakref.ref(connection)
    return connection


# -- pools whose address may lead to another server ------------------------------------------------


class FollowingRetry(Retry):
    """The ``usual`` one of a pool's connections, which also follows an address. A connection that a
    replica answers would stay in the pool for good: such a call, of which nothing has run, is sent
    once more, on a new connection."""

    def __init__(self, usual: Retry, pool: Pool) -> None:
        super().__init__(NoBackoff(), 0)
        self._usual = usual
        #: The arguments with which the project has chosen its own.
        self.configured = {name: pool.connection_kwargs.get(name) for name in RETRY}
        self._pool = weakref.ref(pool)

    def update_supported_errors(self, specified_errors: Iterable[type[Exception]]) -> None:
        others = [error for error in specified_errors if error is not ReadOnlyError]
        self._usual.update_supported_errors(others)

    def get_retries(self) -> int:
        return int(self._usual.get_retries())

    def call_with_retry(
        self, do: Callable[[], T], fail: Callable[..., object], *args: Any, **options: Any
    ) -> T:
        try:
            return self._usual.call_with_retry(do, fail, *args, **options)
        except RedisError as error:
            if not is_misdirected(error):
                raise
            if (pool := self._pool()) is not None:
                renew_pool(pool)
            # Disconnects. redis-py 5 and 6 raise any error but those in ``retry_on_error``.
            counted = (1,) if options.get("with_failure_count") else ()
            fail(ReadOnlyError(str(error)), *counted)
        return self._usual.call_with_retry(do, fail, *args, **options)


_following = free_after_fork(Mutex())


def follow_address(client: C) -> C:
    """``client``, of redis-py's, whose pool has not connected yet: its connections follow."""
    pool = getattr(client, "connection_pool", None)
    if pool is None:
        return client
    settings = pool.connection_kwargs
    with _following:  # Threads may make the first clients of a pool at once.
        if isinstance(settings.get("retry"), FollowingRetry):
            return client
        name_driver(pool.connection_class, settings)
        usual = getattr(pool.connection_class(**settings), "retry", None)
        if usual is not None:
            errors = [*(settings.get("retry_on_error") or ()), ReadOnlyError]
            settings.update(retry=FollowingRetry(usual, pool), retry_on_error=errors)
    return client


# -- the pools of django-redis ---------------------------------------------------------------------

#: The options with which django-redis makes a pool.
_POOL_OPTIONS = (
    *("CONNECTION_POOL_CLASS", "CONNECTION_POOL_KWARGS", "PARSER_CLASS", "USERNAME", "PASSWORD"),
    *("SOCKET_TIMEOUT", "SOCKET_CONNECT_TIMEOUT", "SENTINELS", "SENTINEL_KWARGS"),
)


class _PoolsByOptions:
    """django-redis's ``pools``, which it keeps by their URL: a second cache with the same URL would
    get the database, the password and the time-outs of the first."""

    def __init__(self, pools: dict[object, Pool], options: Mapping[str, object]) -> None:
        self._of_all = pools
        self._options = _comparable([options.get(name) for name in _POOL_OPTIONS])

    def __contains__(self, url: str) -> bool:
        return (url, self._options) in self._of_all

    def __getitem__(self, url: str) -> Pool:
        return self._of_all[url, self._options]

    def __setitem__(self, url: str, pool: Pool) -> None:
        self._of_all[url, self._options] = pool


def _comparable(value: object) -> object:
    """Equal for equal values of settings; for other objects, only if they are the same."""
    if isinstance(value, Mapping):
        return tuple((name, _comparable(each)) for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_comparable, value))
    return value if isinstance(value, (str, bytes, int, float, type(None))) else id(value)


def connect(factory: Any, original: Callable[[str], C], url: str) -> C:
    """What ``original``, the method of django-redis's ``factory``, returns, guarded."""
    pools = getattr(factory, "_pools", None)  # A project's own factory may have none.
    if type(pools) is dict:
        factory._pools = _PoolsByOptions(pools, factory.options)
    pool_settings = getattr(factory, "pool_cls_kwargs", {})
    return follow_address(guard(original(url), pool_settings.get("cache_config")))
