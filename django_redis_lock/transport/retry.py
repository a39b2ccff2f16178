"""What to do about a call that failed. Decisions only: no input or output here."""

from __future__ import annotations

import time

from redis.exceptions import AskError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .address import may_have_run, note_sent
from .server import Server

#: Seconds for which a call is retried that was refused because its keys have moved: longer than the
#: migration of a slot with few keys takes.
REFUSED_FOR = 2.0
#: The longest pause between two of these retries, in seconds.
MAX_PAUSE_SECONDS = 0.2


class ServerBusy(RedisConnectionError):
    """The server ran a long script for as long as the caller waited for its reply."""


def is_busy(error: BaseException) -> bool:
    """Whether ``error`` says that the server runs a long script and refuses all other calls."""
    return isinstance(error, ResponseError) and str(error).startswith("BUSY ")


class RetryPolicy:
    """Where and when one call is sent again.

    A call whose connection broke is sent once more. On a cluster, and behind sentinels, a call
    that was refused is sent to the server that has its keys. A call to a server that is busy with
    a script is retried until the script ends, for as long as its caller waits for a reply.

    Attributes:
        towards: the server to send it to, if a refusal has named it.
        sent_twice: whether the call may have run twice.
        asking: whether ASKING is to be sent first, because the slot is being migrated.
    """

    def __init__(self, server: Server, patience: float | None) -> None:
        self._server = server
        self._patience = patience
        self._began = time.monotonic()
        self._pause = 0.0
        self._broke = False
        self.towards: Server | None = None
        self.sent_twice = False
        self.asking = False

    def after(self, error: Exception, node: Server | None) -> float:
        """Seconds to pause before the call that ``node`` answered with ``error`` is sent again.

        Raises:
            Exception: ``error``, if it is not to be sent again.
        """
        self._server.on_error(error)
        self.towards, self.asking = None, False
        if is_busy(error):
            return self._after_refusal(error, (node or self._server).timeout, ServerBusy)
        if self._server.refuses(error):
            return self._after_refusal(error, REFUSED_FOR, RedisConnectionError)
        if not isinstance(error, (RedisConnectionError, RedisTimeoutError)):
            raise error
        if node is not None:
            node.close()  # The idle connections may have broken for the same reason.
        if self._broke or not self._worth_a_second_try(error):
            note_sent(error, self.sent_twice or may_have_run(error))
            raise error
        self._broke = True
        self.sent_twice = may_have_run(error)
        return 0.0

    def _worth_a_second_try(self, error: Exception) -> bool:
        if self._patience is not None and isinstance(error, RedisTimeoutError):
            return False
        # Behind sentinels and on a cluster the server may have been replaced by now.
        return may_have_run(error) or self._server.must_discover()

    def _after_refusal(
        self, error: Exception, at_most: float, trouble: type[RedisConnectionError]
    ) -> float:
        now = time.monotonic()
        until = self._began + (at_most if self._patience is None else self._patience)
        if now >= until:
            refused = trouble(f"The server is not ready for this key: {error}")
            note_sent(refused, self.sent_twice)
            raise refused from error
        if isinstance(error, AskError) and not isinstance(error, MovedError):
            self.towards, self.asking = self._server.sent_to(error), True
        # The first refusal that names a server is followed at once.
        known = isinstance(error, AskError) and not self._pause
        pause, self._pause = self._pause or 0.01, min(self._pause * 2 or 0.02, MAX_PAUSE_SECONDS)
        return 0.0 if known else min(pause, until - now)
