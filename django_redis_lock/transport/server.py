"""How a call reaches a server, from the script to its reply: what is written, on which connection,
and what happens after an error. Each call of a thread passes this file alone; tasks have the same
in ``aio_client``.

A call takes one round trip, without redis-py's retries. With a retry hidden in the client, an
acquire would find its own key taken, and a release its own work done. Here a call whose reply was
lost is sent once more, and the answer says so (``Answer.sent_twice``): Redis may have carried out
the first.

Its connections are our own, outside a client's pool: a waiter blocks on its connection, the keeper
must never wait for one, and a holder must be able to release when the application's pool is
exhausted.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, lru_cache, partial
from inspect import signature
from typing import Any, NamedTuple, NoReturn, TypeAlias

from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.connection import ConnectionPool
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    MovedError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..clock import real_time, time
from ..events import MAX_CACHED, MAX_CACHED_LENGTH
from ..extension import TOPOLOGIES, part
from ..protocol import Call, Reply, Script, UnreadReply
from ..steps import Step, Steps, drive
from ..threads import FORKS_UNNOTICED, Mutex, after_fork, free_after_fork, notice_fork
from .address import (
    PROBE_SECONDS,
    TRUSTED_SECONDS,
    Client,
    Database,
    Pool,
    RawConnection,
    Settings,
    connecting,
    for_threads,
    own_settings,
    timeout_of,
    who,
)
from .circuit_breaker import CHECK_SECONDS, Breaker, without_credentials
from .hints import name_missing_right
from .refusals import (
    LostLogin,
    NotReady,
    is_busy,
    is_fault_of_connection,
    is_misdirected,
    may_have_run,
    note_fault_of_connection,
    note_sent,
    raise_interrupt,
    raise_interrupt_in_redis_py,
)

#: A connection, what it still owes, and when its last use began (monotonic; infinite before that).
Idle: TypeAlias = "tuple[RawConnection, UnreadReply | None, float]"


# -- how a call is written -----------------------------------------------------------------------

ASKING = b"*1\r\n$6\r\nASKING\r\n"


def pack_words(*parts: bytes) -> bytes:
    """A command as Redis reads it. Only bytes: hiredis 3.5, with which redis-py packs, crashes the
    process if a signal handler raises while it converts an int."""
    return b"*%d\r\n%b" % (len(parts), _bulks(parts))


def pack_word(part: bytes) -> bytes:
    """A part of a command, for ``joined``."""
    return b"$%d\r\n%b\r\n" % (len(part), part)


def joined(packed: Sequence[bytes]) -> bytes:
    """A command whose parts are ``packed``."""
    return b"*%d\r\n%b" % (len(packed), b"".join(packed))


def _bulks(parts: Sequence[bytes]) -> bytes:
    return b"".join([b"$%d\r\n%b\r\n" % (len(part), part) for part in parts])


def pack(call: Call, *, known: bool = True) -> bytes:
    """``call`` as Redis reads it (RESP): by the script's name, or, if that may not be ``known`` to
    the server, by its source, which teaches it. Takes a fraction of the time of redis-py's."""
    script, keys, args, _ = call
    parts = [
        # A source is long and rarely sent: not to be remembered.
        (_head if known else _head.__wrapped__)(script, len(keys), len(args), known),
        _packed_keys.get(keys) or _pack_keys(keys),
    ]
    for arg in args:
        if type(arg) is bytes:
            parts.append(b"$%d\r\n%b\r\n" % (len(arg), arg))
        elif type(arg) is int or (type(arg) is str and len(arg) <= MAX_CACHED_CHARACTERS):
            parts.append(_short(arg))
        else:
            parts.append(_bulk(arg))
    return b"".join(parts)


#: Longer texts are not kept packed.
MAX_CACHED_CHARACTERS = 64


def _bulk(arg: bytes | str | int) -> bytes:
    """A text, a number, or any buffer. A label that has no encoding must not keep its lock from
    being renewed."""
    if isinstance(arg, str):
        data = arg.encode(errors="backslashreplace")
    else:
        data = b"%d" % arg if isinstance(arg, int) else bytes(arg)
    return b"$%d\r\n%b\r\n" % (len(data), data)


#: Lifetimes, modes and the like repeat. Only of exact types: True equals 1.
_short = lru_cache(maxsize=256)(_bulk)
#: So do the keys of a lock.
_packed_keys: dict[tuple[bytes, ...], bytes] = {}


def _pack_keys(keys: tuple[bytes, ...]) -> bytes:
    packed = _bulks(keys)
    if len(packed) <= 4 * MAX_CACHED_LENGTH:  # Many or long keys would only fill the memory.
        if len(_packed_keys) >= MAX_CACHED:
            _packed_keys.clear()
        _packed_keys[keys] = packed
    return packed


def pack_all(calls: Sequence[Call]) -> bytes:
    """All ``calls`` for one sending; the first of each script by its source."""
    known: set[str] = set()
    parts = []
    for call in calls:
        parts.append(pack(call, known=call.script.sha in known))
        known.add(call.script.sha)
    return b"".join(parts)


@lru_cache(maxsize=MAX_CACHED)
def _head(script: Script, keys: int, args: int, known: bool) -> bytes:
    verb, body = (b"EVALSHA", script.sha) if known else (b"EVAL", script.source)
    return b"*%d\r\n%b" % (3 + keys + args, _bulks((verb, body.encode(), b"%d" % keys)))


# -- running -------------------------------------------------------------------------------------


def run(client: Client, call: Call, *, until: float | None = None) -> Answer:
    """Run ``call``, in one round trip, on a connection of our own to ``client``'s server; once more
    if the connection broke before the reply. After an error, redis-py's, the outcome is unknown.

    Args:
        until: monotonic time when the caller gives up; None leaves that to the pool's socket
            timeout. All that is done below has the same.
    """
    server = server_of(client)
    node = None
    try:
        node = server.locate(call.keys, until)
        return Answer(node.exchange(pack(call), None, until, urgent=call.script.urgent), False)
    except RETRYABLE as error:
        return drive(run_again(Route(client, server), call, until, node, error))


def run_all(client: Client, calls: Sequence[Call]) -> list[Reply]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat."""
    if len(calls) == 1:
        return [run(client, calls[0]).value]
    return drive(run_all_steps(Route(client, server_of(client)), calls))


class Route(NamedTuple):
    """How calls reach the servers of a client; its methods are steps, these those of threads."""

    client: Client
    server: Server

    def locate(self, keys: Sequence[bytes], until: float | None) -> Step[Server]:
        return self.server.locate(keys, until)

    def ask(self, node: Server, command: bytes, **options: Any) -> Step[Reply]:
        """``options``: the arguments of ``Server.exchange``."""
        return node.exchange(command, **options)

    def sleep(self, seconds: float) -> Step[None]:
        return time.sleep(seconds)


def run_at(client: Client, node: Server, call: Call) -> Reply:
    """What ``call`` returns at ``node``, one of ``client``'s servers, wherever its keys are."""
    return drive(run_again(Route(client, node), call)).value


# -- what values need: not on the path of a lock -------------------------------------------------


def exchange(
    client: Client, command: bytes, replies: int | None = None, *, may_run_twice: bool = True
) -> Reply:
    """As ``exchange_with``, at the server of ``client``."""
    return exchange_with(server_of(client), command, replies, may_run_twice)


def exchange_with(
    server: Server,
    command: bytes,
    replies: int | None = None,
    may_run_twice: bool = True,
    until: float | None = None,
) -> Reply:
    """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

    Args:
        may_run_twice: whether it is sent once more if its reply was lost.
        until: monotonic time when the caller gives up.
    """
    policy, anew = None, False
    while True:
        try:
            return server.exchange(command, replies, until, may_run_twice, anew, urgent=anew)
        except RETRYABLE as error:
            policy = policy or RetryPolicy(server, until, may_run_twice)
            policy.allow_retry(error)
            anew = policy.anew


def value_with_lifetime(key: bytes) -> bytes:
    """Asks for a value and then for its PTTL, which is that of another value, or -2, if it is
    written or deleted just in between: then the first was a value of that moment, and not stale."""
    return pack_words(b"GET", key) + pack_words(b"PTTL", key)


# -- what is sent again -------------------------------------------------------------------------

#: The errors after which ``RetryPolicy`` may have a call sent again.
RETRYABLE = (RedisConnectionError, RedisTimeoutError, ResponseError)


class Answer(NamedTuple):
    """What a script returned, and whether it may have run twice; see ``RetryPolicy.after``."""

    value: Reply
    sent_twice: bool


#: Seconds for which a call is retried whose keys have moved: a slot with few keys moves faster.
REFUSED_FOR = 2.0
#: The longest pause between two of these retries, in seconds.
MAX_PAUSE_SECONDS = 0.2


class RetryPolicy:
    """What failed on a connection that had been used before, which may be its own fault, is sent
    once more on a new one; and so is a call whose connection broke before the reply. On a cluster,
    and behind sentinels, a call that was refused is sent to the server that has its keys. A call to
    a server that is busy with a script is retried for as long as its caller waits for a reply. Then
    the project's own ``retry`` decides, if it has configured one.

    Args:
        until: monotonic time when the caller gives up; None leaves that to the socket's timeout.
        may_run_twice: whether a call that may have run can be sent again.
        retry: redis-py's, of the project.

    Attributes:
        towards: the server that a refusal has named.
        sent_twice: whether the call may have run twice.
        asking: whether ASKING is to be sent first, because the slot is being migrated.
        anew: whether it is to be sent on a new connection.
    """

    def __init__(
        self, server: Server, until: float | None, may_run_twice: bool = True, retry: Any = None
    ) -> None:
        self._server, self.until, self._may_run_twice = server, until, may_run_twice
        self._retry, self._tries = retry, 0
        self._began = time.monotonic()
        self._pause = 0.0
        self._broke = False
        self.towards: Server | None = None
        self.sent_twice = self.asking = self.anew = False

    def after(self, error: Exception, node: Server | None) -> float:
        """Seconds to pause before the call that ``node`` answered with ``error`` is sent again;
        raises the error if it is not to be sent again."""
        self._server.on_error(error)
        self.towards, self.asking = None, False
        if is_busy(error):
            return self._after_refusal(error, (node or self._server).timeout)
        if self._server.refuses(error):
            return self._after_refusal(error, REFUSED_FOR)
        try:
            self.allow_retry(error)
        except (RedisConnectionError, RedisTimeoutError):
            if (pause := self._configured_pause(error)) is None:
                raise
            self.sent_twice = self.sent_twice or may_have_run(error)
            return pause
        return 0.0

    @property
    def is_second_try(self) -> bool:
        """Whether that is what comes next, and not a try of the project's ``retry``."""
        return self.anew and not self._tries

    def _configured_pause(self, error: Exception) -> float | None:
        """Seconds before another try by the project's ``retry``; None if there is none."""
        retry, self._tries = self._retry, self._tries + 1
        if retry is None or not isinstance(error, retry._supported_errors):
            return None
        if 0 <= retry._retries < self._tries:
            return None
        pause = float(retry._backoff.compute(self._tries))
        late = self.until is not None and time.monotonic() + pause >= self.until
        return None if late else pause

    def allow_retry(self, error: Exception) -> None:
        """Note that the call that ended with ``error`` is sent again, and how: ``anew``,
        ``sent_twice``. Raises the error if that is of no use, or forbidden."""
        has_run = self.sent_twice or may_have_run(error)
        if not self._is_worth_it(error) or (has_run and not self._may_run_twice):
            note_sent(error, has_run)
            raise error
        self.sent_twice = has_run

    def _is_worth_it(self, error: Exception) -> bool:
        if self.until is not None and time.monotonic() >= self.until:
            return False
        broke = isinstance(error, RedisConnectionError)
        if is_fault_of_connection(error) and not self.anew:
            self.anew, self._broke = True, self._broke or broke
            return True
        if self._broke or not broke:
            return False
        self._broke = True
        # Behind sentinels and on a cluster the server may have been replaced by now.
        return may_have_run(error) or self._server.must_discover()

    def _after_refusal(self, error: Exception, at_most: float) -> float:
        now = time.monotonic()
        until = self._began + at_most if self.until is None else self.until
        if now >= until:
            refused = NotReady(f"The server is not ready for this key: {error}")
            note_sent(refused, self.sent_twice)
            raise refused from error
        if isinstance(error, AskError) and not isinstance(error, MovedError):
            self.towards, self.asking = self._server.sent_to(error), True
        # The first refusal that names a server is followed at once.
        known = isinstance(error, AskError) and not self._pause
        pause, self._pause = self._pause or 0.01, min(self._pause * 2 or 0.02, MAX_PAUSE_SECONDS)
        return 0.0 if known else min(pause, until - now)


def note_unanswered(server: Server, call: Call, error: Exception) -> None:
    """``call`` has ended with ``error``; see ``Call``."""
    if call.unanswered is not None and may_have_run(error):
        call.unanswered.append((server, call))


def run_again(
    route: Route,
    call: Call,
    until: float | None = None,
    node: Server | None = None,
    error: Exception | None = None,
) -> Steps[Answer]:
    """Run ``call``, which may have failed with ``error`` at ``node``."""
    pool = getattr(route.client, "connection_pool", None)  # Not a cluster's.
    policy = RetryPolicy(route.server, until, retry=configured_retry(pool))
    known = True
    while True:
        if known and isinstance(error, NoScriptError):
            known = False
        elif error is not None:
            note_unanswered(route.server, call, error)
            if pause := policy.after(error, node):
                yield route.sleep(pause)
        node = None
        try:
            node = policy.towards or (yield route.locate(call.keys, until))
            assert node is not None
            urgent = call.script.urgent or policy.is_second_try
            options = {"until": until, "anew": policy.anew, "urgent": urgent}
            if policy.asking:  # By its source: NOSCRIPT would need a second ASKING.
                command = ASKING + pack(call, known=False)
                reply = (yield route.ask(node, command, replies=2, **options))[1]
            else:
                reply = yield route.ask(node, pack(call, known=known), **options)
            return Answer(reply, policy.sent_twice)
        except RETRYABLE as another:
            error = another


def run_all_steps(route: Route, calls: Sequence[Call]) -> Steps[list[Reply]]:
    """In one trip for each server; what failed there, one at a time."""
    numbers_at: dict[Server, list[int]] = {}
    for number, call in enumerate(calls):
        node = yield route.locate(call.keys, None)
        numbers_at.setdefault(node, []).append(number)
    answers: list[Reply] = [None] * len(calls)
    for node, numbers in numbers_at.items():
        there = [calls[number] for number in numbers]
        urgent = any(call.script.urgent for call in there)
        try:
            command = pack_all(there)
            values = yield route.ask(node, command, replies=len(there), urgent=urgent)
        except RETRYABLE as error:
            route.server.on_error(error)
            values = []
            for call in there:
                note_unanswered(route.server, call, error)
                values.append((yield from run_again(route, call)).value)
        for number, value in zip(numbers, values, strict=True):
            answers[number] = value
    return answers


def configured_retry(pool: Pool | None) -> Any:
    """The ``retry`` that the project has given a ``pool``; None if it has left that to redis-py."""
    retry = None if pool is None else pool.connection_kwargs.get("retry")
    given = getattr(retry, "configured", {"retry": retry})["retry"]
    usual = [signature(kind).parameters["retry"].default for kind in (Redis, AsyncRedis)]
    return None if given in usual else given


# -- the server of a client ------------------------------------------------------------------------

_servers: weakref.WeakValueDictionary[Database, Server] = weakref.WeakValueDictionary()
_by_pool: weakref.WeakKeyDictionary[Pool, Server] = weakref.WeakKeyDictionary()
_encoders: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()
#: Makes what takes the place of a server, while something does.
_make_stand_in: Callable[[Database], Server | None] | None = None
_registry = free_after_fork(Mutex())


def server_of(client: Client) -> Server:
    """The one ``Server`` of this process for the address that ``client`` talks to.

    Raises:
        TypeError: ``client`` is no redis-py client with a connection pool.
    """
    if FORKS_UNNOTICED:
        notice_fork()
    pool: Any
    try:
        pool = client.connection_pool
    except AttributeError:
        if not is_cluster(client):
            raise _no_client(client) from None
        pool = client  # It has a pool for each of its nodes.
    known = _by_pool.get(pool)
    if known is not None:
        return known
    with _registry:
        if (known := _by_pool.get(pool)) is not None:
            return known  # Another thread came first.
        kind = _kind_of(pool)
        database = (kind, *kind.identity(pool))
        # Who waits for less, checks no certificate, speaks RESP3, or meets servers in a way of its
        # own decides that for no other. (Each client of a cluster has its own way.)
        settings = getattr(pool, "nodes_manager", pool).connection_kwargs
        tls = sorted((name, repr(settings[name])) for name in settings if name[:4] == "ssl_")
        how = None if pool is client else id(settings.get("redis_connect_func"))
        key = (*database, kind.timeouts(settings), str(settings.get("protocol")), how, *tls)
        server = _servers.get(key)
        if server is None:
            stand_in = None if _make_stand_in is None else _make_stand_in(database)
            server = _servers[key] = stand_in or kind(pool)
            server.database = database
        _by_pool[pool] = server
        server.pools.add(weakref.ref(pool, server.pools.discard))
        return server


def _no_client(client: object) -> TypeError:
    return TypeError(f"a lock needs a redis-py client (redis.Redis), not {type(client).__name__}")


def is_cluster(client: object) -> bool:
    """Whether ``client`` is one for Redis Cluster: redis-py's two, or the cache's."""
    return hasattr(client, "nodes_manager")


def encoded(client: Client, text: str | bytes) -> bytes:
    """``text`` in the encoding of ``client``, which makes a new encoder each time."""
    pool = getattr(client, "connection_pool", client)
    try:
        encoder = _encoders.get(pool)
        if encoder is None:
            encoder = _encoders[pool] = client.get_encoder()
    except (AttributeError, TypeError):
        raise _no_client(client) from None
    data: bytes = encoder.encode(text)
    return data


def encoding(encoder: Any) -> Callable[[object], bytes]:
    """redis-py's ``encoder``, which costs more than to encode a text."""
    if encoder.encoding.lower() not in ("utf-8", "utf8") or encoder.encoding_errors != "strict":
        return encoder.encode  # type: ignore[no-any-return]  # redis-py
    return lambda word: word.encode() if isinstance(word, str) else encoder.encode(word)


#: All servers, also those that nothing leads to any more.
_all: set[weakref.ref[Server]] = set()


def renew_pool(pool: Pool) -> None:
    """A connection of redis-py's ``pool`` leads to a replica; see ``Server.renew``."""
    server_of(Redis(connection_pool=pool)).renew()  # type: ignore[arg-type]  # it is redis-py's


def _kind_of(pool: Pool) -> type[Server]:
    for attribute, name in TOPOLOGIES:
        if hasattr(pool, attribute):
            kind: type[Server] = getattr(part("topology"), name)
            return kind
    return Server


@contextmanager
def standing_in(make: Callable[[Database], Server | None]) -> Iterator[None]:
    """In the block, ``make(server.database)`` takes the place of each server, unless it is None."""
    global _servers, _by_pool, _make_stand_in
    before = _servers, _by_pool, _make_stand_in
    _servers, _by_pool = weakref.WeakValueDictionary(), weakref.WeakKeyDictionary()
    _make_stand_in = make
    try:
        yield
    finally:
        _servers, _by_pool, _make_stand_in = before


@after_fork
def _forget_servers() -> None:
    """Their connections and locks are the parent's."""
    _servers.clear()
    _by_pool.clear()
    for known in list(_all):
        if (server := known()) is not None:
            server._made.clear()
    _all.clear()


def disconnect_idle(pool: object) -> None:
    # An asyncio pool's connections belong to its loop; those of a cluster's client to its nodes.
    if isinstance(pool, ConnectionPool):
        pool.disconnect(inuse_connections=False)


# -- a server ------------------------------------------------------------------------------------


class Server:
    """One address, and the idle connections of our own there; each serves one call at a time."""

    MAX_IDLE_CONNECTIONS = 16

    #: Whether it takes the place of the one to which its clients lead.
    stands_in = False
    #: Whether others say which server is used, so that a connection to a replica is their affair.
    discovered = False
    retired = False  #: Whether it has left its cluster or service.
    #: Seconds within which a failover replaces a server that has failed.
    FAILOVER_SECONDS = 0.0
    #: Whether its clients lead to several servers, of which now one and now another has a key; and
    #: whether each has some of the slots.
    is_topology = is_cluster = False

    def __init__(self, pool: Pool) -> None:
        # The pool itself is not kept: it must be able to go away before its server does.
        self.address = for_threads(pool)
        settings = self.address.connection_kwargs
        self.timeout, shortest = self.timeouts(settings)
        #: Equal for servers that lead to one database, whatever their time-outs are.
        self.database: Database = (self,)
        self.breaker = Breaker(without_credentials(settings), shortest)
        self._idle: list[Idle] = []
        #: Weak references to all connections that lead here, also those in use.
        self._made: set[weakref.ref[Any]] = set()
        self.generation = 0  #: How often they were renewed.
        #: Weak references to redis-py's pools that lead here.
        self.pools: set[weakref.ref[Pool]] = set()
        _all.add(weakref.ref(self, _all.discard))
        #: The SHAs of the scripts that take a grant, if the server knows them.
        self.known_scripts: set[str] = set()

    def __str__(self) -> str:
        return self.breaker.server

    @classmethod
    def identity(cls, pool: Pool) -> Database:
        """Equal for pools that lead to one database as one user, whatever their time-outs are."""
        settings = pool.connection_kwargs
        where = [settings.get(name) for name in ("host", "port", "path", "database")]
        if not any(where):
            return (object(),)  # Only the pool itself knows where its server is.
        return (for_threads(pool).connection_class, *where, *who(settings))

    @staticmethod
    def timeouts(settings: Settings) -> tuple[float, float]:
        """Seconds after which a call is given up, and an attempt to connect."""
        timeout = timeout_of(settings)
        return timeout, min(settings.get("socket_connect_timeout") or timeout, timeout)

    # -- where a key is; a cluster and Sentinel have more than one address ----------------------

    def locate(self, keys: Sequence[bytes], until: float | None = None) -> Server:
        """The server of ``keys``, found until this monotonic time, within a usual time at most.
        Raises redis-py's errors."""
        return self

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        """As ``locate``, without asking any server; None if it is not known."""
        return self

    def for_tasks(self, settings: Settings) -> None:
        """Complete the ``settings`` of a pool of an event loop that leads here."""

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """As many of ``keys`` as one command can take, the first among them."""
        return keys

    def index_of(self, index: bytes, key: bytes) -> bytes:
        """The sorted set in which ``key`` is to be noted: ``index``, or that of its slot."""
        return index

    def nodes(self) -> Sequence[Server]:
        return (self,)

    def primaries(self) -> dict[Server, list[int]]:
        """All servers that have keys, each with its slots."""
        return {self: []}

    def is_moving_slots(self) -> bool:
        return False

    def must_discover(self) -> bool:
        """Whether ``locate`` would ask other servers, which takes time."""
        return False

    def on_error(self, error: BaseException) -> None:
        """A call to one of these servers ended with ``error``: its keys may have moved."""
        name_missing_right(error)

    def refuses(self, error: BaseException) -> bool:
        """Whether ``error`` says that the keys have moved, or are being moved."""
        return False

    def sent_to(self, error: AskError) -> Server:
        """The server that ``error``, a refusal, names."""
        return self

    def answered(self) -> None:
        if self.breaker.failing:
            self.breaker.answered()

    # -- calls ---------------------------------------------------------------------------------

    def exchange(
        self,
        command: bytes,
        replies: int | None = None,
        until: float | None = None,
        may_run_twice: bool = True,
        anew: bool = False,
        urgent: bool = False,
    ) -> Reply:
        """The reply to ``command``, or a list of so many ``replies``, on a connection of our own.

        Args:
            until: monotonic time when the caller gives up; None leaves that to the socket's
                timeout.
            may_run_twice: whether ``command`` is sent again if its reply is lost. If not, a
                connection that was idle is checked first.
            anew: use no connection that was used before.
            urgent: whether it is sent also while the circuit breaker holds calls back, as the
                second try of a call.
        """
        if self.breaker.failing:
            until = self.admitted(until, urgent)
        began = time.monotonic()
        idle = self.checkout_idle(only_new=anew)
        if idle is not None and not may_run_twice:
            idle = self._checked(*idle, began)
        connection, unread, since = idle or (self._connect(until, anew), None, math.inf)
        try:
            connection.send_packed_command([command])
            old = began - since >= TRUSTED_SECONDS
            if old or until is not None:
                self._wait(connection, since < math.inf, old, until)
            if unread is not None:
                unread.receive()
                expect(connection, until)
            answer = read(connection) if unread else connection.read_response()
            if replies is not None:
                answer = [answer]
                while len(answer) < replies:
                    expect(connection, until)
                    answer.append(connection.read_response())
        except BaseException as error:
            self._failed(error, connection, unread, since < math.inf, replies is None)
            raise
        self.checkin(connection, None, began)
        self.answered()
        return answer

    def admitted(self, until: float | None, urgent: bool) -> float | None:
        """Until when a call may take in an outage; raises CircuitOpen, unless it is ``urgent``."""
        now = time.monotonic()
        left = self.breaker.admit(None if until is None else until - now, urgent)
        return None if left is None else now + left

    def _wait(self, connection: RawConnection, used: bool, old: bool, until: float | None) -> None:
        """Wait until the first reply begins."""

        def comes(seconds: float) -> bool:
            return bool(connection.poll(max(0.0, seconds) * 1000))

        first, left = self.first_wait(used, old, until)
        if first is not None and not comes(first):
            replaced = partial(self._is_replaced, until)
            drive(self.silent_steps(used, first, left, comes, self.close, replaced))

    def first_wait(
        self, used: bool, old: bool, until: float | None
    ) -> tuple[float | None, float | None]:
        """Seconds for which a connection may be silent, of those that are left; None for as long as
        usual. ``used``: before this call; ``old``: it was idle since."""
        left = None if until is None else until - time.monotonic()
        return self.breaker.first_wait(old, left, self.timeout) if used else left, left

    def silent_steps(
        self,
        used: bool,
        first: float,
        left: float | None,
        comes: Callable[[float], Step[bool]],
        doubt: Callable[[], object],
        is_replaced: Callable[[], Step[bool]],
    ) -> Steps[None]:
        """A connection was silent for the ``first`` seconds. If it was ``used`` before, the network
        may have forgotten it, so a new one is made: if that succeeds, the call belongs there; if
        not, the server is slow, and the reply may still come."""
        ends = time.monotonic() - first + min(self.timeout, math.inf if left is None else left)
        error = RedisTimeoutError(f"Redis did not answer within {max(first, 0.0):.3f} s")
        note_fault_of_connection(error, used)
        if not used:
            self.breaker.failed(error, first)
            raise error
        doubt()  # The others were idle for longer.
        if first == left or (yield is_replaced()):
            raise error
        if not (yield comes(ends - time.monotonic())):
            note_fault_of_connection(error, False)
            raise error

    def _is_replaced(self, until: float | None) -> bool:
        """Make a new connection for the next call."""
        try:
            self.checkin(self._connect(until, anew=True), since=math.inf)
        except RedisError:
            return False
        return True

    def _failed(
        self,
        error: BaseException,
        connection: RawConnection,
        unread: UnreadReply | None,
        used: bool,
        is_last: bool,
    ) -> None:
        """A call ended with ``error`` on ``connection``, which had been ``used`` before. Note
        whether that may be the fault of the connection, and not the server's."""
        if isinstance(error, (ResponseError, BusyLoadingError)):
            self.breaker.answered()
            if is_misdirected(error):
                connection.disconnect()
                note_fault_of_connection(error, self.renew(connection))
            elif is_last:
                self.checkin(connection)
            else:
                connection.disconnect()  # Other replies may still come.
            return
        connection.disconnect()
        if unread is not None and not unread.is_read:
            unread.receive()
        raise_interrupt(error)
        if isinstance(error, LostLogin):
            note_sent(error, False)
        elif is_fault_of_connection(error) is None and isinstance(error, RedisError):
            self.close()  # The other idle ones may have broken for the same reason.
        if is_fault_of_connection(error) is None:
            note_fault_of_connection(error, used)
            if isinstance(error, RedisTimeoutError) and not used:
                self.breaker.failed(error, self.timeout)

    # -- connections -----------------------------------------------------------------------------

    def connect(self, timeout: float | None = None, **changes: object) -> RawConnection:
        """A new connection, with the pool's address and credentials, and a ``timeout`` in seconds
        for connecting and for answers. ``changes``: other arguments than the pool's."""
        kind, settings = self.address
        own = own_settings(kind, settings, self.timeout if timeout is None else timeout)
        connection: RawConnection = resetting(kind)(**own | changes)
        began, generation = real_time.monotonic(), self.generation
        try:
            with connecting():
                connection.connect()
        except RedisError as error:
            if not isinstance(error, ResponseError):
                self.breaker.failed(error, real_time.monotonic() - began)
            raise
        self.breaker.connecting = real_time.monotonic() - began
        connection.poll = poll_of(connection)  # type: ignore[method-assign]  # each has its own
        connection._connect = refuse_to_connect  # type: ignore[attr-defined]  # redis-py's
        self.track(connection, generation)
        return connection

    def track(self, connection: Any, generation: int) -> None:
        """Note one that leads here, for threads or for tasks, made in this ``generation``."""
        connection.generation = generation
        self._made.add(weakref.ref(connection, self._made.discard))

    def renew(self, connection: Any = None) -> bool:
        """``connection`` leads to a replica: the address may have moved to another server. End all
        that were made before now, wherever they are used; who waits for a reply on one of them gets
        an error, and connects again.

        Args:
            connection: one of our own; None for one of a pool's.

        Returns: whether the call that has met the replica is worth another try.
        """
        if connection is None or connection.generation == self.generation:
            where = str(self).rpartition("/")[0]
            # Also those to other databases, and with other time-outs.
            for server in {self, *filter(None, (known() for known in list(_all)))}:
                if str(server).rpartition("/")[0] == where:
                    server.end_connections()
        return not self.discovered

    def end_connections(self) -> None:
        """End all that were made before now; see ``renew``."""
        self.generation += 1
        self.close()
        for made in list(self._made):
            if (connection := made()) is not None and connection.generation != self.generation:
                if hasattr(connection, "cut"):  # One of an event loop.
                    connection.cut()
                else:
                    shut(connection)
        for pool in list(self.pools):
            disconnect_idle(pool())

    def checkout(self) -> RawConnection:
        """A connection with no reply to be read, idle and checked, or new: for a call that may long
        be without an answer, so that silence does not show whether it was forgotten."""
        now = time.monotonic()
        while (idle := self.checkout_idle()) is not None:
            if (checked := self._checked(*idle, now)) is not None:
                return checked[0]
        return self._connect(None)

    def _checked(
        self, connection: RawConnection, unread: UnreadReply | None, since: float, now: float
    ) -> Idle | None:
        """``connection``, if the server answers on it."""
        if unread is not None:
            if not readable(connection):  # What has not come by now may never come.
                connection.disconnect()
            unread.receive()
        elif now - since < TRUSTED_SECONDS and not readable(connection):
            return connection, None, since
        if still_answers(connection, min(PROBE_SECONDS, self.timeout / 2)):
            return connection, None, now
        connection.disconnect()
        self.close()  # The others have been idle for longer.
        return None

    def time_to_connect(self, until: float | None, anew: bool) -> float | None:
        """Seconds to connect for a caller who gives up at ``until``; None for as long as usual.
        ``anew``: because another connection is silent, so that it is known how long it may take."""
        if until is None and not anew:
            return None
        limit = max(CHECK_SECONDS, 2 * self.breaker.connecting) if anew else math.inf
        left = math.inf if until is None else max(0.001, until - time.monotonic())
        limit = min(limit, left)
        return limit if limit < self.timeout else None

    def _connect(self, until: float | None, anew: bool = False) -> RawConnection:
        try:
            limit = self.time_to_connect(until, anew)
            connection = self.connect(limit)
        except Exception as error:
            note_sent(error, False)
            raise
        if limit is not None:
            allow(connection, self.timeout)  # It will be kept, also for callers with more time.
        return connection

    def must_connect(self) -> bool:
        """Whether ``checkout`` would make a connection."""
        return not self._idle

    def checkout_idle(self, only_new: bool = False, may_owe: bool = True) -> Idle | None:
        """The idle connection that was used last, unchecked. Not one for whose reply another thread
        waits; nor one that was used before, if ``only_new``, or owes a reply, unless it
        ``may_owe``."""
        try:
            connection, unread, since = self._idle.pop()
        except IndexError:
            return None
        if unread is not None and unread.is_read:
            unread = None
        unfit = only_new and since < math.inf
        if unfit or (unread is not None and not (may_owe and unread.claim())):
            self._idle.append((connection, unread, since))
            return None
        return connection, unread, since

    def checkin(
        self, connection: RawConnection, unread: UnreadReply | None = None, since: float = 0.0
    ) -> None:
        """Keep ``connection`` for the next caller, unless enough are kept. ``since``: when its last
        use began, in monotonic time; 0 for now."""
        current = connection.generation == self.generation
        if current and len(self._idle) < self.MAX_IDLE_CONNECTIONS:
            self._idle.append((connection, unread, since or time.monotonic()))
        else:
            connection.disconnect()

    def close(self, but: int = 0) -> None:
        """Close the idle connections except the ``but`` last used."""
        for _ in range(len(self._idle) - but):
            try:
                connection, *_ = self._idle.pop(0)
            except IndexError:  # Other threads have taken them.
                return
            connection.disconnect()


# -- connections for threads ----------------------------------------------------------------------


@cache
def resetting(kind: type[RawConnection]) -> type:
    """``kind``, of redis-py's: one that is closed because of an error, perhaps before its call was
    answered, is reset, and what a signal handler has raised goes on."""

    def disconnect(self: RawConnection, *args: object, **options: object) -> None:
        sock = getattr(self, "_sock", None)
        own = getattr(self, "pid", os.getpid()) == os.getpid()  # Not made before a fork.
        if sys.exc_info()[1] is not None and isinstance(sock, socket.socket) and own:
            reset_when_closed(sock)
            sock.close()  # redis-py would send FIN first.
        kind.disconnect(self, *args, **options)
        raise_interrupt_in_redis_py()

    return type(kind.__name__, (kind,), {"disconnect": disconnect})


def is_closed(connection: RawConnection) -> bool:
    """redis-py's own methods do not always notice."""
    return getattr(connection, "_sock", connection) is None


def read(connection: RawConnection) -> Reply:
    """The next reply on ``connection``, which may have been closed."""
    if is_closed(connection):
        refuse_to_connect()
    return connection.read_response()


def shut(connection: RawConnection | None) -> None:
    """End the calls on ``connection``, in whichever thread they are."""
    sock: socket.socket | None = getattr(connection, "_sock", None)
    if sock is not None:
        with suppress(OSError):  # It had broken.
            sock.shutdown(socket.SHUT_RDWR)


_RESET = struct.pack("ii", 1, 0)


def reset_when_closed(sock: Any) -> None:
    """``sock`` will be closed while a call has no answer: by a reset, so that the system drops what
    it has not delivered yet, instead of doing so when its caller has done without it."""
    with suppress(AttributeError, OSError):  # In memory; or it had broken.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def is_pollable(connection: object) -> bool:
    """Whether one can wait for a reply on ``connection``, or it is in our own memory."""
    sock = getattr(connection, "_sock", None)
    return sock is None or isinstance(sock, socket.socket) or hasattr(connection, "asyncio_class")


def allow(connection: Any, timeout: float) -> None:
    """From now on a reply on ``connection`` may take so many seconds."""
    if hasattr(connection._sock, "settimeout"):  # Not in memory.
        connection.socket_timeout = timeout
        connection._sock.settimeout(timeout)
        connection._parser.on_connect(connection)  # It knows the timeout, too.


def poll_of(connection: Any) -> Callable[[float], object]:
    """What waits so many milliseconds until there is something to read on ``connection``, or its
    end. redis-py's own wait would take a TimeoutError from a signal handler for one of its own."""
    if not (hasattr(select, "poll") and hasattr(connection._sock, "fileno")):
        return lambda milliseconds: connection.can_read(milliseconds / 1000)
    poll = select.poll()
    poll.register(connection._sock, select.POLLIN)
    return poll.poll


def readable(connection: RawConnection, seconds: float = 0.0) -> bool:
    """Whether there is something to read within so many seconds, also of what has been received:
    a reply, or the end, about which reading raises an error."""
    try:
        if is_closed(connection):
            return True
        return connection.can_read(0) or bool(connection.poll(max(0.0, seconds) * 1000))
    except RedisError:
        return True


def expect(connection: RawConnection, until: float | None) -> None:
    """Wait for the next reply, until a monotonic time."""
    if until is not None and not readable(connection, until - time.monotonic()):
        raise RedisTimeoutError("Redis did not answer in time")


def still_answers(connection: Any, seconds: float) -> bool:
    """Whether the server answers on ``connection``, ours or redis-py's, within so many seconds."""
    try:
        if connection.can_read(0):  # It would be taken for the reply, also if none can come.
            return False
        connection.send_command("PING")
        if not poll_of(connection)(seconds * 1000):
            return False
        connection.read_response()
    except ResponseError:
        pass  # This user may not, or the server is busy: it answers.
    except RedisError:
        return False
    return True


def refuse_to_connect() -> NoReturn:
    """redis-py's connect again before they send or read, to whatever server is there by then."""
    raise RedisConnectionError("The connection was closed.")
