"""A server in this process's memory, for those who have no Redis, which runs the same scripts; and
connections to it, for threads and for asyncio, which take the place of redis-py's.

Blocked clients are served in the order in which they came, as by Redis. There is no thread: a
command is carried out in its caller's, and so is what it wakes.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ResponseError

from ....clock import time
from ....threads import Mutex, after_fork, free_after_fork
from .commands import Commands
from .lua import Table, compile_script, number_text

if TYPE_CHECKING:
    from ....protocol import Reply

#: Between two searches for keys whose time is over.
COMMANDS_PER_SWEEP = 500


class Session:
    """One connection, as the server knows it.

    Attributes:
        replies: those that were not read yet.
        woken: called, in any thread, when a reply has come or the session was closed.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ready = threading.Condition(database.mutex)
        self.replies: deque[object] = deque()
        self.woken: Callable[[], object] | None = None
        self.closed = False
        self.unread: deque[list[bytes]] = deque()
        #: The channels that it has subscribed to.
        self.channels: set[bytes] = set()
        #: What a blocked command returns as soon as it can, None until then.
        self.blocked: Callable[[], object] | None = None

    def send(self, data: bytes) -> None:
        self._expect_open()
        self._database.carry_out(self, _commands(data))

    def has_reply(self, seconds: float | None = 0) -> bool:
        """Wait for a reply or the end of the session; whether one has come."""
        with self._database.mutex:
            if self.replies or self.closed or seconds == 0:
                return bool(self.replies or self.closed)
            return time.wait_for(self._ready, lambda: self.replies or self.closed, seconds)

    def reply(self) -> object:
        with self._database.mutex:
            if not self.replies:
                self._expect_open()
            reply = self.replies.popleft()
        if isinstance(reply, Exception):
            raise reply
        return reply

    def answer(self, reply: Reply) -> None:
        self.replies.append(reply)
        self._wake()

    def shutdown(self, _how: int = 0) -> None:
        with self._database.mutex:
            self.closed = True
            self._database.forget(self)
            self._wake()

    def _wake(self) -> None:
        self._ready.notify_all()
        if self.woken is not None:
            self.woken()

    def _expect_open(self) -> None:
        if self.closed:
            raise RedisConnectionError(f"The connection to {self._database} was closed")


def _commands(data: bytes) -> Iterator[list[bytes]]:
    """The commands in ``data``, as redis-py and ``transport.pack`` write them."""
    at = 0

    def number() -> int:
        nonlocal at
        end = data.index(b"\r\n", at)
        at, text = end + 2, data[at + 1 : end]
        return int(text)

    while at < len(data):
        words = []
        for _ in range(number()):
            size = number()
            words.append(data[at : at + size])
            at += size + 2
        yield words


class Database(Commands):
    """The data, who is connected, and what they wait for.

    Attributes:
        mutex: held while a command is carried out.
        away: while true, no connection can be made.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.mutex = free_after_fork(Mutex())
        self.away = False
        self._name = name
        self._scripts: dict[bytes, str] = {}
        self._connected: set[weakref.ref[Session]] = set()
        self._blocked: dict[Session, None] = {}
        self._carried_out = itertools.count(1)
        self._epoch = time.time() - time.monotonic()
        _databases.add(self)

    def __str__(self) -> str:
        return self._name

    # -- sessions ----------------------------------------------------------------------------

    def connect(self) -> Session:
        if self.away:
            raise RedisConnectionError(f"{self} is away")
        session = Session(self)
        with self.mutex:
            self._connected.add(weakref.ref(session, self._connected.discard))
        return session

    def close_all(self) -> None:
        """As a server that goes away would."""
        with self.mutex:
            for session in self._sessions():
                session.shutdown()

    def _sessions(self) -> list[Session]:
        # Copied first: another thread may collect some.
        return [session for known in list(self._connected) if (session := known()) is not None]

    def forget(self, session: Session) -> None:
        self._blocked.pop(session, None)
        session.unread.clear()
        session.channels.clear()

    def carry_out(self, session: Session, commands: Iterator[list[bytes]]) -> None:
        with self.mutex:
            try:
                session.unread.extend(commands)
                self._serve(session)
            except BaseException:  # Of a signal handler: the next call must not get these replies.
                session.shutdown()
                raise
            while self._filled:
                self._filled = False
                for waiting in list(self._blocked):
                    self._unblock(waiting)

    def _serve(self, session: Session) -> None:
        while session.unread and session.blocked is None:
            words = session.unread.popleft()
            if words[0] in (b"BLPOP", b"XREAD"):  # The caller watches the timeout.
                read = self._pop_first if words[0] == b"BLPOP" else self.xread
                session.blocked = partial(read, *words)
                self._blocked[session] = None
                self._unblock(session)
            elif words[0] == b"SUBSCRIBE":
                session.channels.add(words[1])
                session.answer([b"subscribe", words[1], len(session.channels)])
            else:
                session.answer(self._reply(words))

    def publish(self, channel: bytes, message: bytes) -> int:
        listening = [session for session in self._sessions() if channel in session.channels]
        for session in listening:
            session.answer([b"message", channel, message])
        return len(listening)

    def _tell_time(self) -> None:
        # Evenly, also when the system's clock is set.
        self.now = int((self._epoch + time.monotonic()) * 1e6)

    def _unblock(self, session: Session) -> None:
        if session.blocked is None:
            return
        self._tell_time()
        try:
            reply = session.blocked()
        except ResponseError as error:
            reply = error
        if reply is not None:
            session.blocked = None
            del self._blocked[session]
            session.answer(reply)
            self._serve(session)

    def _reply(self, words: Sequence[bytes]) -> object:
        self._tell_time()
        if next(self._carried_out) % COMMANDS_PER_SWEEP == 0:
            self._drop_expired()
        try:
            return self._execute(words)
        except ResponseError as error:
            return error
        finally:
            if self._may_be_values > self.max_values:
                self._cull()

    # -- scripts -----------------------------------------------------------------------------

    def eval(self, source: bytes, keys: bytes, *words: bytes) -> object:
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self._scripts[sha] = source.decode()
        return self.evalsha(sha, keys, *words)

    def evalsha(self, sha: bytes, keys: bytes, *words: bytes) -> object:
        source = self._scripts.get(sha)
        if source is None:
            raise NoScriptError("No matching script. Please use EVAL.")
        given = Table.of(*words[: int(keys)]), Table.of(*words[int(keys) :])
        returned = compile_script(source)(*given, self._call, self._pcall)
        return _as_reply(returned[0]) if returned else None

    def _call(self, *words: object) -> object:
        return _as_lua(self._execute([_as_argument(word) for word in words]))

    def _pcall(self, *words: object) -> object:
        try:
            return self._call(*words)
        except ResponseError as error:
            return Table({b"err": str(error).encode()})


def _as_argument(word: object) -> bytes:
    if isinstance(word, bytes):
        return word
    if isinstance(word, bool) or not isinstance(word, (int, float)):
        raise ResponseError("Lua redis lib command arguments must be strings or integers")
    return number_text(word)


def _as_lua(reply: Reply) -> object:
    if reply is None:
        return False
    return Table.of(*map(_as_lua, reply)) if isinstance(reply, list) else reply


def _as_reply(value: object) -> object:
    if isinstance(value, Table):
        if b"err" in value:
            raise ResponseError(value[b"err"].decode())
        return [_as_reply(each) for each in value.items_from()]
    if isinstance(value, bool):
        return 1 if value else None
    return int(value) if isinstance(value, float) else value


#: By LOCATION, for caches.
databases: dict[str, Database] = {}
_databases: weakref.WeakSet[Database] = weakref.WeakSet()


@after_fork
def _begin_empty() -> None:
    """The locks in a parent's memory are the parent's."""
    for database in _databases:
        database._blocked.clear()
        database.flushdb()


class _InMemory:
    """What connections for threads and for asyncio have in common."""

    session: Session | None = None

    def __init__(self, *, database: Database, **options: object) -> None:
        super().__init__(**options)
        self.database = database

    def _open(self) -> Session:
        if self.session is None:
            self.session = self.database.connect()
        return self.session

    def cut(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.shutdown()

    def write(self, command: Any) -> None:
        self._open().send(command if isinstance(command, bytes) else b"".join(command))


class MemoryConnection(_InMemory, Connection):
    @property
    def _sock(self) -> Any:
        return self.session

    @_sock.setter
    def _sock(self, value: None) -> None:
        """redis-py sets it to None."""

    def connect(self, *args: object, **options: object) -> None:
        self._open()

    connect_check_health = connect

    def disconnect(self, *args: object, **options: object) -> None:
        self.cut()

    def send_packed_command(self, command: object, check_health: bool = True) -> None:
        self.write(command)

    def can_read(self, timeout: float | None = 0) -> bool:
        return self._open().has_reply(timeout)

    def read_response(self, *args: object, **options: object) -> object:
        self.can_read(None)
        return self._open().reply()


class AsyncMemoryConnection(_InMemory, AsyncConnection):
    thread_class = MemoryConnection

    @property
    def is_connected(self) -> bool:
        return self.session is not None

    async def connect(self, *args: object, **options: object) -> None:
        self._open()

    connect_check_health = connect

    async def disconnect(self, *args: object, **options: object) -> None:
        self.cut()

    async def send_packed_command(self, command: object, check_health: bool = True) -> None:
        self.write(command)

    async def can_read(self, timeout: float = 0) -> bool:
        return self._open().has_reply()

    can_read_destructive = can_read

    async def read_response(self, *args: object, **options: object) -> object:
        session, loop = self._open(), asyncio.get_running_loop()
        came = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(came.set)

        session.woken = wake
        while not session.has_reply():
            await came.wait()
            came.clear()
        return self._open().reply()


MemoryConnection.asyncio_class = AsyncMemoryConnection  # type: ignore[attr-defined]  # for transport


class _Client(redis.Redis):
    def pipeline(self, transaction: bool = False, shard_hint: object = None) -> Any:
        """Without MULTI and EXEC, which the server in memory does not have."""
        return super().pipeline(False, shard_hint)


def client_of(database: Database) -> redis.Redis:
    kind: object = MemoryConnection
    pool = redis.ConnectionPool(kind, database=database, protocol=2)
    free_after_fork(pool._lock)  # redis-py 8 takes it in a child.
    return _Client(connection_pool=pool)
