"""A few daemon threads that refresh stale values behind their callers' backs.

Bounded in threads and in what waits for them, started when needed, gone when idle. What is under
way when the process ends is abandoned: its flight runs out, and the stale value is still there.
"""

from __future__ import annotations

import contextvars
import logging
import os
import queue
import threading
from collections.abc import Callable

__all__ = ["Background"]

logger = logging.getLogger("django_redis_lock.background")

Work = Callable[[], object]


class Background:
    """Runs work in the background, with the context variables of who asked for it.

    Args:
        threads: how many run at once.
        room: how much may wait for them.
        linger: seconds without work after which a thread ends.
    """

    def __init__(self, threads: int = 4, room: int = 64, linger: float = 5.0) -> None:
        self._most = threads
        self._linger = linger
        self._waiting: queue.Queue[Work] = queue.Queue(room)
        self._mutex = threading.Lock()
        self._threads = 0
        self._idle = 0

    def submit(self, work: Work, afterwards: Work) -> bool:
        """Do ``work`` soon, then ``afterwards`` in the same thread; False if there is no room."""
        context = contextvars.copy_context()

        def run() -> None:
            try:
                context.run(work)
            except Exception:
                logger.exception("A refresh in the background failed")
            finally:
                afterwards()

        with self._mutex:
            try:
                self._waiting.put_nowait(run)
            except queue.Full:
                return False
            if self._waiting.qsize() > self._idle and self._threads < self._most:
                threading.Thread(target=self._work, name="django_redis_lock", daemon=True).start()
                self._threads += 1
        return True

    def _work(self) -> None:
        while True:
            with self._mutex:
                self._idle += 1
            try:
                work: Work | None = self._waiting.get(timeout=self._linger)
            except queue.Empty:
                work = None
            with self._mutex:
                self._idle -= 1
                if work is None and self._waiting.empty():
                    self._threads -= 1
                    return
            if work is not None:
                work()


_background = Background()


def background() -> Background:
    """This process's background."""
    return _background


def _after_fork_in_child() -> None:
    global _background
    _background = Background()


os.register_at_fork(after_in_child=_after_fork_in_child)
