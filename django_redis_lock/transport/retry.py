"""What to do about a call that failed. Decisions only: no input or output here."""

from __future__ import annotations

import time

from redis.exceptions import AskError, MovedError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .address import may_have_run, note_sent
from .server import Server

__all__ = ["RetryPolicy", "ServerBusy", "is_busy"]

#: Seconds for which a call is sent again that was refused because its keys are elsewhere: longer
#: than a slot with few keys takes to move.
REFUSED_FOR = 2.0
#: The longest pause between two such sendings, in seconds.
LONGEST_PAUSE = 0.2


class ServerBusy(RedisConnectionError):
    """The server would not do anything while it ran somebody's long script, for as long as the
    caller waited for an answer."""


def is_busy(error: BaseException) -> bool:
    """Whether ``error`` says that the server runs somebody's long script, and nothing else."""
    return isinstance(error, ResponseError) and str(error).startswith("BUSY ")


class RetryPolicy:
    """Where one call goes, sending after sending.

    A call whose connection broke is sent once more. On a cluster, and behind sentinels, a call
    that was refused is sent on to where its keys are. One that met a server busy with a script is
    sent again until that is over, for as long as its caller waits for an answer.

    Attributes:
        towards: the server to send it to, if that is known better than ``Server.at`` does.
        sent_twice: whether it may have run twice.
        asking: whether the server is to be told that it is asked for a slot still on its way.
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
        """What ``node`` answered, or failed to: seconds to pause before the next sending.

        Raises:
            Exception: ``error``, if there is to be none.
        """
        self._server.heard(error)
        self.towards, self.asking = None, False
        if is_busy(error):
            return self._after_refusal(error, (node or self._server).timeout, ServerBusy)
        if self._server.refuses(error):
            return self._after_refusal(error, REFUSED_FOR, RedisConnectionError)
        if not isinstance(error, (RedisConnectionError, RedisTimeoutError)):
            raise error
        if node is not None:
            node.close()  # What ended one connection may have ended those at rest, unnoticed.
        if self._broke or not self._worth_a_second_try(error):
            note_sent(error, self.sent_twice or may_have_run(error))
            raise error
        self._broke = True
        self.sent_twice = may_have_run(error)
        return 0.0

    def _worth_a_second_try(self, error: Exception) -> bool:
        if self._patience is not None and isinstance(error, RedisTimeoutError):
            return False
        # Elsewhere the server may have been replaced, so that it does not even let us connect.
        return may_have_run(error) or self._server.must_look()

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
        # The first time there is nothing to wait for if it says where to go.
        known = isinstance(error, AskError) and not self._pause
        pause, self._pause = self._pause or 0.01, min(self._pause * 2 or 0.02, LONGEST_PAUSE)
        return 0.0 if known else min(pause, until - now)
