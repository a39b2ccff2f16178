"""Connections to a server in memory, for threads and for asyncio. They take the place of redis-py's
connections in its pools and in ours, so whatever talks to a server can talk to this one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection

from .database import Database, Session


class _InMemory:
    """What connections for threads and for asyncio have in common.

    Args:
        database: where it leads.
    """

    session: Session | None = None

    def __init__(self, *, database: Database, **options: Any) -> None:
        super().__init__(**options)
        self.database = database

    def _open(self) -> Session:
        if self.session is None:
            self.session = self.database.connect()
        return self.session

    def cut(self) -> None:
        """Close it, from any thread."""
        session, self.session = self.session, None
        if session is not None:
            session.shutdown()

    def _send(self, command: Any) -> None:
        parts: Iterable[bytes] = [command] if isinstance(command, bytes) else command
        self._open().send(b"".join(parts))

    def _reply(self, disable_decoding: bool) -> Any:
        """The next reply.

        Raises:
            redis.exceptions.RedisError: the reply is an error, or the connection was closed.
        """
        reply = self._open().reply()
        if isinstance(reply, Exception):
            raise reply
        encoder: Any = self.encoder  # type: ignore[attr-defined]  # redis-py's
        return reply if disable_decoding else _decoded(reply, encoder.decode)


def _decoded(reply: Any, decode: Any) -> Any:
    if isinstance(reply, list):
        return [_decoded(each, decode) for each in reply]
    return decode(reply) if isinstance(reply, bytes) else reply


class MemoryConnection(_InMemory, Connection):
    """For threads."""

    @property
    def _sock(self) -> Any:
        return self.session

    @_sock.setter
    def _sock(self, value: None) -> None:
        """Its class in redis-py sets it to None."""

    def connect(self, *args: Any, **options: Any) -> None:
        self._open()

    connect_check_health = connect

    def disconnect(self, *args: Any, **options: Any) -> None:
        self.cut()

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self._send(command)

    def can_read(self, timeout: float | None = 0) -> bool:
        return self._open().has_reply(timeout)

    def read_response(self, disable_decoding: bool = False, **options: Any) -> Any:
        self.can_read(None)
        return self._reply(disable_decoding)


class AsyncMemoryConnection(_InMemory, AsyncConnection):
    """For tasks."""

    thread_class = MemoryConnection

    @property
    def is_connected(self) -> bool:
        return self.session is not None

    async def connect(self, *args: Any, **options: Any) -> None:
        self._open()

    connect_check_health = connect

    async def disconnect(self, *args: Any, **options: Any) -> None:
        self.cut()

    async def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        self._send(command)

    async def can_read(self, timeout: float = 0) -> bool:
        return self._open().has_reply()

    can_read_destructive = can_read

    async def read_response(
        self, disable_decoding: bool = False, timeout: float | None = None, **options: Any
    ) -> Any:
        session, loop = self._open(), asyncio.get_running_loop()
        came = asyncio.Event()

        def wake() -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(came.set)

        session.woken = wake
        while not session.has_reply():
            came.clear()
            if not session.has_reply():
                await came.wait()
        return self._reply(disable_decoding)


MemoryConnection.asyncio_class = AsyncMemoryConnection  # type: ignore[attr-defined]  # for transport


def client_of(database: Database) -> redis.Redis:
    """A redis-py client for ``database``."""
    kind: Any = MemoryConnection
    return redis.Redis(connection_pool=redis.ConnectionPool(kind, database=database, protocol=2))
