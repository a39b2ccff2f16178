"""What a command does while Redis cannot be reached: it retries, and reports it only once."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from redis.exceptions import AuthenticationError

from ..transport import is_outage

__all__ = ["RetryUntil", "outages_not_logged"]

#: Seconds between two attempts: the first time, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0


class RetryUntil:
    """Decides whether a request that failed is repeated, and when.

    Args:
        deadline: until when, on the monotonic clock; ``inf``: without end.
    """

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.attempts = 0

    def left(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(0.0, self.deadline - time.monotonic())

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait until the next attempt.

        Raises:
            Exception: ``error``, if it will not pass by itself or the deadline has come.
        """
        left = self.left()
        if not left or not is_outage(error) or isinstance(error, AuthenticationError):
            raise error
        self.attempts += 1
        return float(
            min(FIRST_PAUSE_SECONDS * 2 ** min(self.attempts - 1, 10), MAX_PAUSE_SECONDS, left)
        )


@contextmanager
def outages_not_logged() -> Iterator[None]:
    """For a command that tells the user itself that Redis cannot be reached: the log, which mostly
    goes to the same terminal, does not say it a second time."""
    logger = logging.getLogger("django_redis_lock.outage")

    def nothing(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
