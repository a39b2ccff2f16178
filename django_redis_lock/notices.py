"""What the keeper has to tell users' code: log handlers and listeners.

A handler may block (a mail server, a syslog over TCP, a full pipe), and whatever runs in the
keeper's thread delays the renewal of every lock of the process. So nothing of it runs there: the
keeper's log records and events wait in a queue, and a thread that is started on need delivers them
in order. In every other thread they are delivered at once, as usual.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from .forks import after_fork

__all__ = ["enter_keeper", "finish", "get_logger", "in_keeper", "later"]

#: Notices that may wait; what comes then is dropped, and the log says how many were.
MAX_WAITING = 10_000
#: Seconds without a notice after which the thread ends.
IDLE_SECONDS = 1.0

Notice = Callable[[], object]


class _Here(threading.local):
    #: Whether this is the keeper's thread.
    keeper = False


_here = _Here()


class Notices:
    """A queue and the thread that empties it."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._waiting: deque[Notice] = deque()
        self._thread: threading.Thread | None = None
        self._dropped = 0

    def add(self, notice: Notice) -> None:
        """Have ``notice`` delivered after those that came before."""
        with self._mutex:
            if len(self._waiting) >= MAX_WAITING:
                self._dropped += 1
                return
            self._waiting.append(notice)
            self._condition.notify()
            if self._thread is None:
                name = "django_redis_lock notices"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # Too many threads; the next notice tries again.
                    self._thread = None

    def finish(self, seconds: float) -> None:
        """Wait until all is delivered, for so long at most."""
        deadline = time.monotonic() + seconds
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.002)

    def _run(self) -> None:
        while (notice := self._next()) is not None:
            try:
                notice()
            except BaseException:  # Not even a SystemExit ends the thread others count on.
                logger.exception("A log handler or listener failed")
            with self._mutex:
                self._waiting.popleft()  # Only now: ``finish`` waits for it, too.
                dropped, self._dropped = self._dropped, 0
            if dropped:
                logger.error("%d notices were dropped: a log handler or listener blocks", dropped)

    def _next(self) -> Notice | None:
        with self._mutex:
            if not self._waiting:
                self._condition.wait(IDLE_SECONDS)
            if not self._waiting:
                self._thread = None
                return None
            return self._waiting[0]


_notices = Notices()


def enter_keeper() -> None:
    """From now on this is the keeper's thread."""
    _here.keeper = True


def in_keeper() -> bool:
    """Whether this is the keeper's thread, in which no users' code may run."""
    return _here.keeper


def later(notice: Notice) -> None:
    """Have ``notice``, which is users' code, run in the thread for notices."""
    _notices.add(notice)


def finish(seconds: float) -> None:
    """The process ends: wait until the keeper's notices are delivered, for so long at most."""
    _notices.finish(seconds)


def get_logger(name: str) -> logging.Logger:
    """The logger ``name``, for a module of which a part runs in the keeper's thread."""
    found = logging.getLogger(name)
    if _not_in_the_keeper not in found.filters:
        found.addFilter(_not_in_the_keeper)
    return found


def _not_in_the_keeper(record: logging.LogRecord) -> bool:
    """A logger's filter: what the keeper logs is handled later, in another thread."""
    if not _here.keeper:
        return True
    _notices.add(partial(logging.getLogger(record.name).handle, record))
    return False


logger = get_logger("django_redis_lock.events")


@after_fork
def _begin_anew() -> None:
    global _notices
    _notices = Notices()
    _here.keeper = False
