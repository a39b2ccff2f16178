"""Holders learn of a loss at once, and not at the next renewal: this process is told of changes in
Redis, by other processes on a channel, and by the server itself, which remembers what the keeper
has read (``CLIENT TRACKING``)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .. import threads
from ..keeper import listeners
from ..threads import get_logger
from ..transport import RawConnection, Server, is_outage
from ..transport.server import shut

logger = get_logger("django_redis_lock.keeper")

#: A firewall may have forgotten a silent connection.
CHECK_AFTER_SECONDS = 10.0
#: Pauses between attempts to connect, in seconds: at first, at most, and after a refusal.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, REFUSED_PAUSE_SECONDS = 0.1, 5.0, 60.0
#: The channel on which a server reports changes in RESP2.
CHANGES = b"__redis__:invalidate"
TRACK = ("CLIENT", "TRACKING", "ON", "NOLOOP", "REDIRECT")
NO_REPORTS = "The server does not report changes of keys: %s"


class Listener:
    """One connection of a ``Subscription``, and its number at the server."""

    def __init__(self, connection: RawConnection, client_id: int) -> None:
        self._connection = connection
        self._client_id = client_id
        self._link: RawConnection | None = None

    def track(self, link: RawConnection) -> None:
        """Have the server report here, once, that a key has changed since it was read on ``link``,
        the keeper's connection to it, unless ``link`` itself changed the key."""
        if link is self._link:
            return
        if self._link is not None:
            # What was read on the link before is forgotten, and this one may lead elsewhere.
            shut(self._connection)
            return
        self._link = link
        try:
            link.send_command(*TRACK, self._client_id)
            link.read_response()
        except ResponseError as error:
            logger.info(NO_REPORTS, error)


class Subscription:
    """Receives the messages of ``channel``, on a connection and in a thread for that alone, until
    it is closed. A broken connection is replaced.

    ``received`` is called in that thread with each message, and with each changed key that the
    server reports; with None if any may have changed: all were deleted, or it has just connected.
    While ``subscribed``, none is missed.
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
        threads.start(
            thread,
            lambda error: logger.warning("Could not start the thread %r: %s", thread.name, error),
        )

    def close(self) -> None:
        self._closed.set()
        shut(self._connection)

    def _run(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        while not self._closed.is_set():
            try:
                node = self._subscribe()
                pause = FIRST_PAUSE_SECONDS
                self._receive(node)
            except (RedisError, OSError) as error:
                if self._closed.is_set():
                    return
                logger.info("Could not listen for changes of locks: %s", error)
                if is_outage(error):
                    self._server.on_error(error)
                else:  # This user, or this service, may not subscribe.
                    pause = REFUSED_PAUSE_SECONDS
            finally:
                self.subscribed = False
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.disconnect()
            self._closed.wait(pause)
            pause = min(pause * 2, MAX_PAUSE_SECONDS)

    def _subscribe(self) -> Server:
        node = self._server.locate((self._channel,))
        # In RESP2 messages are plain replies.
        self._connection = connection = node.connect(protocol=2)
        listener = None
        try:
            client_id = self._ask("CLIENT", "ID")
            self._ask("SUBSCRIBE", CHANGES)
            listener = Listener(connection, client_id)
        except ResponseError as error:  # This user may not, or this service cannot.
            logger.info(NO_REPORTS, error)
        self._ask("SUBSCRIBE", self._channel)
        if self._closed.is_set():
            return node  # Another may have taken its place.
        if listener is None:
            listeners.pop(node, None)
        else:
            listeners[node] = listener
        node.answered()
        self._received(None)
        self.subscribed = True
        return node

    def _ask(self, *command: object) -> Any:
        assert self._connection is not None
        self._connection.send_command(*command)
        if not self._connection.can_read(self._server.timeout):
            raise RedisTimeoutError(f"no answer to {command[0]}")
        return self._read()

    def _receive(self, node: Server) -> None:
        while not self._closed.is_set():
            assert self._connection is not None
            if self._connection.can_read(CHECK_AFTER_SECONDS):
                self._read()
            elif self._server.locate((self._channel,)) is not node:
                raise RedisConnectionError("there is another primary")
            else:  # Does the connection still lead to the server?
                self._ask("SUBSCRIBE", self._channel)

    def _read(self) -> Any:
        assert self._connection is not None
        reply = self._connection.read_response()
        if isinstance(reply, list) and reply[0] == b"message":
            changed = reply[2]
            for key in changed if isinstance(changed, list) else (changed,):
                self._received(key)
        return reply
