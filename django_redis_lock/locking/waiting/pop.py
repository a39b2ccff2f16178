"""One blocking pop on a lock's list of grants. What it brings is the lock, so no interrupt may lose
it: an exception from a signal handler comes between any two steps of this thread, also between the
arrival of an answer and the moment somebody has it in hand. So the answer goes straight from the
socket into a buffer that was there before, and is read from it by whoever wants to know.
"""

from __future__ import annotations

import socket
import time
from typing import Any

from redis.connection import DefaultParser
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from ...keeper import Job, keeper
from ...protocol import LAST_TRY, AcquireRequest, Call, parse_grant
from ...transport import RawConnection, Server, pack_words
from ..renewal import DeferredRelease

__all__ = ["CancelWait", "Pop"]

#: More bytes than an answer has beside the name of the list: token, fence, or words of complaint.
ROOM = 512


class Pop:
    """``BLPOP grants wake 0`` on a connection on which nothing else is under way.

    Attributes:
        wake: the list whose elements end the pop without a grant.
    """

    def __init__(self, connection: RawConnection, grants: bytes, wake: bytes) -> None:
        self.connection = connection
        self.wake = wake
        self._grants = grants
        # The answer ends where the zeros begin: even its size could be lost.
        self._buffer = bytearray(len(grants) + len(wake) + ROOM)

    def send(self) -> None:
        command = pack_words(b"BLPOP", self._grants, self.wake, b"0")
        try:
            # Not by redis-py, which ends the connection of whoever is interrupted while sending:
            # a grant that had come by then would be lost with it.
            self._socket().sendall(command)
        except OSError as error:
            raise RedisConnectionError(f"beginning to wait in Redis: {error}") from error

    def answered(self, patience: float) -> bool:
        """Wait ``patience`` seconds at most for the answer; whether it is there."""
        sock = self._socket()
        try:
            while self._words() is None:
                sock.settimeout(max(patience, 0.0001))  # 0 would mean something else.
                begun = len(self._buffer.rstrip(b"\0"))
                if not sock.recv_into(memoryview(self._buffer)[begun:]):
                    raise RedisConnectionError("Redis closed the connection of a blocking pop")
            sock.settimeout(self.connection.socket_timeout)
        except TimeoutError:
            return False
        except OSError as error:
            raise RedisConnectionError(f"while waiting in Redis: {error}") from error
        return True

    def _socket(self) -> socket.socket:
        sock: socket.socket | None = getattr(self.connection, "_sock", None)
        if sock is None:
            raise RedisConnectionError("the connection of a blocking pop was closed")
        return sock

    @property
    def reply(self) -> list[bytes] | None:
        """The list and the element that came; None if the pop was ended otherwise, or not yet.

        Raises:
            redis.exceptions.ResponseError: Redis refused to pop.
        """
        words = self._words()
        if words and words[0].startswith(b"-"):
            said = words[0][1:].decode(errors="replace")
            parser: Any = getattr(self.connection, "_parser", DefaultParser)
            raise parser.parse_error(said)
        return words or None

    @property
    def complete(self) -> bool:
        """Whether Redis has answered."""
        return self._words() is not None

    @property
    def token(self) -> bytes | None:
        """That of the grant that came, if one did."""
        words = self._words()
        return parse_grant(words[1])[0] if words and words[0] == self._grants else None

    def _words(self) -> list[bytes] | None:
        """The parts of the answer, none for Redis's nil, one for an error; None: not all there."""
        head, ended, rest = bytes(self._buffer).partition(b"\r\n")
        if not ended:
            # An error in more words than anybody wants to read.
            return None if self._buffer.endswith(b"\0") else [head]
        if head.startswith(b"-"):
            return [head]
        words: list[bytes] = []
        for _ in range(2 if head == b"*2" else 0):
            size, ended, rest = rest.partition(b"\r\n")
            length = int(size[1:]) if ended else 0
            if not ended or rest[length : length + 2] != b"\r\n":
                return None
            words.append(rest[:length])
            rest = rest[length + 2 :]
        return words


class CancelWait(Job):
    """Ends a pop nobody waits for any more, whose wait was interrupted, and passes on what it
    brought. It alone uses the pop's connection now."""

    flush_at_exit = True

    def __init__(self, server: Server, pop: Pop, request: AcquireRequest) -> None:
        super().__init__(server, time.monotonic())
        self._pop = pop
        self._request = request
        self._gives_up_at = self.due + request.grant_timeout

    def call(self, now: float) -> Call:
        return self._request.leave(b"", self._pop.wake, try_again=False)

    def answered(self, value: Any, sent_at: float) -> None:
        try:
            self._pop.answered(LAST_TRY)  # Redis has woken it before it answered us.
        except RedisError:
            pass  # It had broken. At worst a grant runs out by itself.
        if (token := self._pop.token) is not None:
            release = self._request.give_back(token)
            keeper().add(DeferredRelease(self.server, release, self._request.lifetime))
        self._end()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + 0.1
        if now >= self._gives_up_at:
            self._end()

    def _end(self) -> None:
        keeper().discard(self)
        self._pop.connection.disconnect()
