"""Any program, in a new process group: ``run_locked --shell``.

A program that outlived the process that holds its lock would go on without it. So a small process
stands by (``guard.py``): when this one is gone, however it ended, it ends the program. It is there
before the program is, so there is no moment in which the program would be left alone.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from django.core.management import CommandError

from .exit_codes import NOT_FOUND, USAGE

#: What is passed on to the program, all of its group.
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
#: Ctrl-Z must stop neither this process, which renews the lock, nor the program, for which others
#: wait; SIGTTOU would stop this process when it takes the terminal back.
IGNORED = ("SIGTSTP", "SIGTTOU")
#: What the guard must not hear: those, and what stops a group.
NOT_GUARDS = (*PASSED_ON, *IGNORED, "SIGTTIN")
GUARD = str(Path(__file__).with_name("guard.py"))


class Program:
    """A program with its arguments; one argument alone is a line for ``/bin/sh``.

    Args:
        argv: the program and its arguments.
        grace: seconds it has to end by itself, if it must end, before it is killed.

    Raises:
        CommandError: there is no such program.
    """

    def __init__(self, argv: Sequence[str], grace: float) -> None:
        if os.name != "posix":
            raise CommandError(
                "--shell needs process groups, which only Unix has", returncode=USAGE
            )
        self._argv = ["/bin/sh", "-c", argv[0]] if len(argv) == 1 else list(argv)
        if shutil.which(self._argv[0]) is None:
            raise CommandError(f"there is no program {argv[0]!r}", returncode=NOT_FOUND)
        words = argv[0].split()
        self.label = Path(words[0]).name if words else "/bin/sh"
        self._grace = grace
        self._group = 0
        self._must_end = False
        self._early: list[int] = []

    def run(self, environment: dict[str, str], within: float) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        with (
            self._signals(),
            ProcessGuard(min(self._grace, within)) as guard,
            _in_foreground(guard.group),
        ):
            process = subprocess.Popen(
                self._argv, env={**os.environ, **environment}, **_in_group(guard.group)
            )
            self._group = guard.group
            try:
                for number in self._early:  # They came while it was being started.
                    self._send(number)
                if self._must_end:
                    self.terminate()
                code = process.wait()
                guard.over()
                if self._must_end:
                    self._wait_for_the_group()
            finally:
                self._group = 0
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        self._must_end = True
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self._group:
            with suppress(ProcessLookupError, PermissionError):  # macOS's word for zombies.
                os.killpg(self._group, number)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on to the program. Those that this process ignores (nohup) it does too."""
        if not _is_main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def pass_on(number: int, frame: FrameType | None) -> None:
            if self._group:
                self._send(number)
            else:
                self._early.append(number)

        try:
            for name in PASSED_ON:
                number = getattr(signal, name)
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, pass_on)
            for name in IGNORED:
                number = getattr(signal, name)
                before[number] = signal.signal(number, signal.SIG_IGN)
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait_for_the_group(self) -> None:
        """What the program has started must end as well, or be killed."""
        deadline = time.monotonic() + self._grace
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._group, 0)
                time.sleep(0.02)
            os.killpg(self._group, signal.SIGKILL)


def _in_group(group: int) -> dict[str, Any]:
    """How a child is put into a process group; 0 for a new one, which it leads."""
    if sys.version_info >= (3, 11):
        return {"process_group": group}
    return {"preexec_fn": lambda: os.setpgid(0, group)}


class ProcessGuard:
    """A process that leads the program's group before there is a program, and ends the group when
    this process has gone without a word.

    Attributes:
        group: the process group's number. No other can get it while the guard is there.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace

    def __enter__(self) -> ProcessGuard:
        with _blocked():  # For good in the guard: what is meant for the group must not end it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", GUARD, str(self._grace)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                **_in_group(0),
            )
        self.group = self._process.pid
        return self

    def over(self) -> None:
        """The program has ended; what it has left behind is none of the guard's business."""
        self._process.communicate(b"over")

    def __exit__(self, *exc_info: object) -> None:
        """Without ``over``, the group is ended now."""
        if self._process.returncode is None:
            self._process.communicate()


@contextmanager
def _blocked() -> Iterator[None]:
    """What processes started here never hear; this thread hears it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, s) for s in NOT_GUARDS])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _in_foreground(group: int) -> Iterator[None]:
    """Give the program the terminal, if there is one and it is ours: its foreground group reads
    from it, and gets its Ctrl-C."""
    fd = -1
    with suppress(AttributeError, OSError, ValueError):
        fd = sys.__stdin__.fileno()  # type: ignore[union-attr]  # None is suppressed
    if not _is_main_thread() or not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
        yield
        return
    os.tcsetpgrp(fd, group)
    try:
        yield
    finally:
        with suppress(OSError):  # The terminal is gone.
            os.tcsetpgrp(fd, os.getpgrp())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
