"""Any program, in a process group of its own: ``run_locked --shell``.

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

__all__ = ["Program"]

#: What is passed on to the program, all of its group.
PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
#: What the guard must not hear: those, and what stops a group.
NOT_GUARDS = (*PASSED_ON, "SIGTSTP", "SIGTTIN", "SIGTTOU")
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
            Terminal() as terminal,
            ProcessGuard(min(self._grace, within)) as guard,
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
                terminal.lend(self._group)
                code = self._wait(process, terminal)
                guard.over()
                if self._must_end:
                    self._wait_for_the_group()
            finally:
                self._group = 0
        return code

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
        if threading.current_thread() is not threading.main_thread():
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
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait(self, process: subprocess.Popen[bytes], terminal: Terminal) -> int:
        while True:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            if not os.WIFSTOPPED(status):
                break
            terminal.stop_with(self._group)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode if process.returncode >= 0 else 128 - process.returncode

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


class Terminal:
    """The terminal, if there is one and it is ours: whoever reads from it must be its foreground
    group, and gets its Ctrl-C and Ctrl-Z."""

    def __enter__(self) -> Terminal:
        self._fd: int | None = None
        with suppress(OSError, ValueError):
            fd = sys.__stdin__.fileno() if sys.__stdin__ is not None else -1
            if os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp():
                self._fd = fd
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._set(os.getpgrp())

    def lend(self, group: int) -> None:
        if self._set(group):
            # It may have tried to read before, and been stopped for it.
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGCONT)

    def stop_with(self, group: int) -> None:
        """The program was stopped: by Ctrl-Z, so stop too; go on with it."""
        if self._fd is None:
            return
        self._set(os.getpgrp())
        os.kill(os.getpid(), signal.SIGSTOP)
        if os.tcgetpgrp(self._fd) == os.getpgrp():  # Not after the shell's "bg".
            self._set(group)
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGCONT)

    def _set(self, group: int) -> bool:
        if self._fd is None:
            return False
        with _ignored(signal.SIGTTOU):
            try:
                os.tcsetpgrp(self._fd, group)
            except OSError:
                return False  # The group is gone, or the terminal is.
        return True


@contextmanager
def _ignored(number: signal.Signals) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)
