"""``on_lost="terminate"``: end a management command whose lock is lost."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from django.core.management import BaseCommand, CommandError

from ..extension import part
from ..protocol import printable
from ..threads import Mutex

T = TypeVar("T")

logger = logging.getLogger("django_redis_lock.lost")

#: For a command whose lock is lost, before its process is ended.
CLEANUP_SECONDS = 10.0


class LockLostExit(SystemExit):
    """In a command that has lost its lock; ``except Exception`` does not catch it."""


class CommandTerminator:
    """Ends the command in the main thread of this process when its lock is lost.

    ====  =======================================================================================
    0 s   The keeper learns that the lock is lost. SIGTERM to the main thread interrupts whatever
          the command waits for, and its handler raises ``LockLostExit``.
    10 s  The command has not ended: it hangs in a library, or has caught the exception. If it was
          called from a command line, the process ends at once, without cleaning up.
    ====  =======================================================================================

    In both cases, the process has this ``exit_code``.
    """

    def __init__(
        self, command: BaseCommand, exit_code: int, name: str, reason: Callable[[], str]
    ) -> None:
        # Otherwise other code of the process (a server, a test) goes on.
        self.owns_process = bool(getattr(command, "_called_from_command_line", False))
        self.exit_code = exit_code
        self.name, self.reason = name, reason
        self.cleanup_seconds = CLEANUP_SECONDS
        self.lost = False
        self._over = threading.Event()
        self._mutex = Mutex()

    def __call__(self) -> None:
        """Runs in a separate thread."""
        with self._mutex:
            if self._over.is_set():
                return
            self.lost = True
            interrupt_main_thread()
        if not self._over.wait(self.cleanup_seconds):
            then = (
                "its process is ended now" if self.owns_process else "it continues without the lock"
            )
            hangs = "The command that lost its lock %(lock)s has not ended in %(seconds)g s: "
            about = {"lock": printable(self.name), "seconds": self.cleanup_seconds}
            logger.critical(hangs + then, about)
            if self.owns_process:
                part("process_tree").signal_descendants(os.getpid(), signal.SIGKILL)
                os._exit(self.exit_code)

    def run(self, work: Callable[[], T]) -> T:
        """Do ``work``; interrupt it when the lock is lost, with a CommandError that has the exit
        code."""
        try:
            with self._armed():
                result = work()
        except BaseException as error:
            if not self.lost:
                raise
            raise self._error() from (None if isinstance(error, LockLostExit) else error)
        if self.lost:
            raise self._error()
        return result

    def _error(self) -> CommandError:
        why = f" ({self.reason()})" if self.reason() else ""
        words = f"the lock {self.name} was lost while this ran{why}; another run may have started"
        return CommandError(" ".join(words.split()), returncode=self.exit_code)

    @contextmanager
    def _armed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                'on_lost="terminate" works only in the main thread: call the command from the '
                "command line, or give on_lost a callable"
            )
        before: Any = signal.getsignal(signal.SIGTERM)

        def leave(number: int, frame: FrameType | None) -> None:
            if self.lost:
                if not self._over.is_set():
                    raise LockLostExit(self.exit_code)
            elif callable(before):
                before(number, frame)
            elif before != signal.SIG_IGN:  # It had a handler in C.
                raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, leave)
        try:
            yield
        finally:
            try:
                with self._mutex:
                    self._over.set()
            finally:
                self._over.set()  # Also if an exception interrupts the line above.
                # A signal that is already under way reaches our handler, which ignores it.
                signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def interrupt_main_thread() -> None:
    """A signal to the process could be delivered to another thread, and would not interrupt what
    the main thread waits for."""
    ident: Any = threading.main_thread().ident
    signal.pthread_kill(ident, signal.SIGTERM)
