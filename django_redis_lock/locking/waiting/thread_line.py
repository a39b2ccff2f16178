"""A line of threads: what its first one waits on, and what the others wait for."""

from __future__ import annotations

import math
import os
import socket
import threading

from redis.exceptions import NoScriptError, RedisError

from ...protocol import Call
from ...transport import RawConnection, Server, pack
from .queue import WaitQueue

__all__ = ["PendingReply", "ThreadQueue", "ThreadWakeEvent"]


class PendingReply:
    """A connection with the answer to TAKE_GRANT still to come, for which nobody has waited."""

    def __init__(self, connection: RawConnection, call: Call, server: Server, until: float) -> None:
        self._connection = connection
        self._server = server
        self._until = until
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        self._open = True
        self._answer: float | None = None
        # By its source until the server knows it: the next command may follow before the answer.
        connection.send_packed_command([pack(call, known=server.knows_grants)])
        server.knows_grants = True

    def confirm(self, wait: bool) -> float | None:
        """See ``PendingLifetime``."""
        if self._pid != os.getpid():
            return None  # The answer is the parent's; to read it would leave the parent without.
        if not wait and self._mutex.locked():
            return self._answer  # Somebody is just reading it; he may have to wait for that.
        with self._mutex:
            if self._open and (wait or self._has_come()):
                self._open = False
                try:
                    taken = self._connection.read_response()
                except NoScriptError:
                    self._server.knows_grants = False  # The keeper's renewal will make up for it.
                except (RedisError, OSError):
                    self._connection.disconnect()  # Unknown; the keeper's renewal will tell.
                except BaseException:  # A signal handler's: half of the answer may be left there.
                    self._connection.disconnect()
                    raise
                else:
                    self._server.answered()
                    self._answer = self._until if taken else -math.inf
            return self._answer

    def _has_come(self) -> bool:
        try:
            return self._connection.can_read(0)
        except (RedisError, OSError):
            return True  # Reading will say what is wrong.


class ThreadQueue(WaitQueue):
    """A line of threads, with the connection its first one waits on."""

    connection: RawConnection | None = None
    extension: PendingReply | None = None

    def end(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None and self.node is not None:
            self.node.checkin(connection, self.extension)

    def connected(self) -> RawConnection:
        """The connection for blocking pops, with nothing left to read on it."""
        if self.connection is None:
            self.node = self.server.at(self.request.keys)
            self.connection = self.node.checkout()
        if self.extension is not None:
            self.extension.confirm(True)
            self.extension = None
        return self.connection

    def disconnect(self) -> None:
        connection, self.connection, self.extension = self.connection, None, None
        if connection is not None:
            connection.disconnect()

    def wake(self) -> None:
        sock: socket.socket | None = getattr(self.connection, "_sock", None)
        if sock is not None:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # It had broken.


class ThreadWakeEvent:
    """``threading.Event`` without its innards: an exception from a signal handler that came in the
    middle of them would leave it locked, and its thread waiting for ever."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        try:
            self._gate.release()
        except RuntimeError:
            pass  # It was set before.

    def wait(self, seconds: float) -> bool:
        if not self._gate.acquire(timeout=seconds):
            return False
        self.set()
        return True
