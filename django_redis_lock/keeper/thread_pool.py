"""A few daemon threads that refresh stale values in the background.

The number of threads and the length of the queue are bounded; threads start on demand and end when
idle. Work that runs when the process ends is abandoned: its flight expires, and the stale value is
still there.
"""

from __future__ import annotations

import contextvars
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from ..forks import after_fork
from ..notices import get_logger

__all__ = ["Background"]

logger = get_logger("django_redis_lock.background")

Work = Callable[[], object]


class Background:
    """Runs work in the background, with the context variables of the caller.

    Args:
        threads: how many run at once.
        room: how much may wait for them.
        linger: seconds without work after which a thread ends.
    """

    def __init__(self, threads: int = 4, room: int = 64, linger: float = 5.0) -> None:
        self._most = threads
        self._room = room
        self._linger = linger
        # Entered itself and not by way of the condition, as the keeper's. A signal handler may
        # leave ``submit`` at any line, so the threads do the counting.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._waiting: deque[Work] = deque()
        self._threads: set[threading.Thread] = set()
        self._busy = 0

    def submit(self, work: Work, afterwards: Work) -> bool:
        """Do ``work`` soon, then ``afterwards`` in the same thread; False if there is no room, or
        no thread can be started."""
        context = contextvars.copy_context()

        def run() -> None:
            for part in (partial(context.run, work), afterwards):
                try:
                    part()
                except BaseException:  # Not even a SystemExit ends a thread that others count on.
                    logger.exception("A refresh in the background failed")

        with self._mutex:
            if len(self._waiting) >= self._room:
                return False
            self._threads = {thread for thread in self._threads if thread.is_alive()}
            idle = len(self._threads) - self._busy
            if len(self._waiting) >= idle and len(self._threads) < self._most:
                self._start()
            if not self._threads:
                return False
            self._waiting.append(run)
            self._condition.notify()
        return True

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="django_redis_lock", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError as error:  # There are too many, or the interpreter is going down.
            self._threads.discard(thread)
            logger.warning("Could not start a thread for refreshes: %s", error)

    def _work(self) -> None:
        while (work := self._next()) is not None:
            work()
            with self._mutex:
                self._busy -= 1

    def _next(self) -> Work | None:
        with self._mutex:
            while not self._waiting:
                if not self._condition.wait(self._linger) and not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return None
            self._busy += 1
            return self._waiting.popleft()


_background = Background()


def background() -> Background:
    """This process's background."""
    return _background


@after_fork
def _begin_anew() -> None:
    global _background
    _background = Background()
