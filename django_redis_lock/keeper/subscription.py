"""A channel on which other processes tell this one something."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..notices import get_logger
from ..transport import RawConnection, Server, is_outage

logger = get_logger("django_redis_lock.keeper")

#: Seconds of silence after which the connection is checked: a firewall may have forgotten it.
CHECK_AFTER_SECONDS = 10.0
#: Pauses between attempts to connect, in seconds: at first, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.1, 5.0


class Subscription:
    """Receives the messages of ``channel``, on a connection and in a thread for that alone, until
    it is closed. A broken connection is replaced.

    Args:
        server: where; on a cluster any node will do, because each gets all messages.
        channel: its name.
        received: called in that thread with each message; with None when a connection has been
            made, because messages before that are missed.

    Attributes:
        subscribed: whether no message is missed now, as far as is known.
    """

    def __init__(
        self, server: Server, channel: bytes, received: Callable[[bytes | None], object]
    ) -> None:
        self._server = server
        self._channel = channel
        self._received = received
        self.subscribed = False
        self._closed = threading.Event()
        self._connection: RawConnection | None = None

    def start(self) -> None:
        thread = threading.Thread(
            target=self._run, name="django_redis_lock subscription", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # Too many threads, or the interpreter is shutting down.
            logger.warning("Could not start the thread %r: %s", thread.name, error)

    def close(self) -> None:
        self._closed.set()
        sock: socket.socket | None = getattr(self._connection, "_sock", None)
        if sock is not None:
            with suppress(OSError):  # It had broken.
                sock.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closed.is_set():
            try:
                self._subscribe()
                pause = FIRST_PAUSE_SECONDS
                self._receive()
            except (RedisError, OSError) as error:
                if self._closed.is_set():
                    return
                logger.info("Could not listen for forced releases: %s", error)
                if not is_outage(error):
                    return  # This user, or this service, may not subscribe.
                self._server.on_error(error)
            finally:
                self.subscribed = False
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.disconnect()
            self._closed.wait(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    def _subscribe(self) -> None:
        node = self._server.at((self._channel,))
        self._connection = node.connect(protocol=2)  # In which messages are plain replies.
        self._ask()
        node.answered()
        self._received(None)
        self.subscribed = True

    def _ask(self) -> None:
        """Subscribe; once more, to find out whether the connection still leads to the server."""
        assert self._connection is not None
        self._connection.send_command("SUBSCRIBE", self._channel)
        if not self._connection.can_read(self._server.timeout):
            raise RedisTimeoutError("no answer to SUBSCRIBE")
        self._read()

    def _receive(self) -> None:
        while not self._closed.is_set():
            assert self._connection is not None
            if self._connection.can_read(CHECK_AFTER_SECONDS):
                self._read()
            else:
                self._ask()

    def _read(self) -> None:
        assert self._connection is not None
        kind, _, message = self._connection.read_response()
        if kind == b"message":
            self._received(message)
