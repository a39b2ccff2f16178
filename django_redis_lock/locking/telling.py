"""What a handle tells those who listen to what happens to locks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

from .. import events
from ..clock import time
from ..events import Acquired, Lost, Rejected, Released, Subject, TimedOut
from ..exceptions import LockError
from ..notices import get_logger
from ..protocol import Hold, LockKeys, printable

__all__ = ["LockEvents"]

logger = get_logger("django_redis_lock.lock")


class LockEvents:
    """The part of ``BaseLock`` that speaks of what happens to it.

    Attributes:
        cache: the cache backend it came from, None if from none.
        called: its name there.
    """

    cache: Any = None
    cache_key: str | None = None
    keys: LockKeys
    label: str
    group: str
    raise_on_release_error: bool

    @property
    def _now(self) -> Callable[[], float]:
        """The clock of deadlines, in seconds. What keeps it does not keep the handle."""
        return time.monotonic

    def _server(self) -> Any:
        raise NotImplementedError

    @cached_property
    def subject(self) -> Subject:
        """This lock, for those who listen to what happens to it."""
        name = self.cache_key
        if name is None:
            name = self.keys.lock.decode(errors="backslashreplace")
        return Subject.of(name, self.group, self.label, self._server(), self.cache)

    @property
    def _printed(self) -> str:
        return printable(self.keys.lock)

    def _tell_acquired(self, hold: Hold, asked_at: float, contended: bool) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            waited = self._now() - asked_at
            logger.debug("Acquired %s after %.3f s, fence %d", self._printed, waited, hold.fence)
        if events.listeners:
            waited = self._now() - asked_at
            events.emit(Acquired(self.subject, waited, contended, hold.fence))

    def _tell_timed_out(self, asked_at: float, blocking: bool) -> None:
        waited = self._now() - asked_at
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Did not get %s within %.3f s", self._printed, waited)
        if events.listeners:
            events.emit(TimedOut(self.subject, waited) if blocking else Rejected(self.subject))

    def _tell_released(self, hold: Hold | None) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Released %s", self._printed)
        if events.listeners and hold is not None:
            events.emit(Released(self.subject, self._now() - hold.began, hold.fence))

    def _tell_gone(self, hold: Hold | None) -> None:
        """A release found that the lock had ended before, of which nobody has spoken yet."""
        if events.listeners and hold is not None and hold.released:
            held = self._now() - hold.began
            events.emit(Lost(self.subject, held, "it had ended before its release", hold.fence))

    def _hide_release_error(self, error: Exception, body_failed: bool) -> bool:
        """Whether leaving the block swallows ``error``; the body's own exception comes first."""
        if body_failed or (isinstance(error, LockError) and not self.raise_on_release_error):
            logger.warning(
                "Another error hides that releasing %s failed: %s", printable(self.keys.lock), error
            )
            return True
        return False
