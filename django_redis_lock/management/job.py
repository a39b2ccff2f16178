"""What ``run_locked`` runs: a management command in this process, or with ``--shell`` any program
in a new process group. That must not outlive this process, which holds the lock: a guard process
(``GUARD``), started before the program, ends the group."""

from __future__ import annotations

import difflib
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

from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.core.management.base import BaseCommand

from ..decorators import interrupt_main_thread
from . import Exit, usage_error

#: Signals that are passed on to the program's group.
PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
#: Ctrl-Z must stop neither this process, which renews the lock, nor the program, for which others
#: wait; SIGTTOU would stop this process when it takes the terminal back.
IGNORED = (signal.SIGTSTP, signal.SIGTTOU)
#: Signals that the guard blocks: those, and what stops a group.
NOT_GUARDS = (*PASSED_ON, *IGNORED, signal.SIGTTIN)
#: Leads the program's group, and blocks the signals sent to it. If its standard input, a pipe from
#: the process that started it, ends without a byte, that was killed: the guard ends the group, with
#: SIGKILL after the seconds of its argument.
GUARD = """
import os, signal, sys, time
if not sys.stdin.read(1):
    os.killpg(os.getpgrp(), signal.SIGTERM)
    time.sleep(float(sys.argv[1]))
    os.killpg(os.getpgrp(), signal.SIGKILL)
"""


class ManagementCommand:
    """A management command with its arguments, as behind ``manage.py``.

    Args:
        called_by: the command that runs it. Unless that was called from a command line, errors
            are raised, as by ``call_command``.

    Attributes:
        label: of the lock; without arguments, which may be secret.
    """

    def __init__(self, argv: Sequence[str], called_by: BaseCommand) -> None:
        name, *self._args = argv
        for option in ("--settings", "--pythonpath"):
            if any(arg.partition("=")[0] == option for arg in self._args):
                raise usage_error(
                    f"{option} has no effect on {name}, which runs in this process: put it before "
                    "the --"
                )
        self.label = f"manage.py {name}"
        self._name = name
        self._called_by = called_by
        self._in_main_thread = is_main_thread()
        self._command = _load(name)

    @property
    def _from_command_line(self) -> bool:
        return bool(getattr(self._called_by, "_called_from_command_line", False))

    def run(self, environment: dict[str, str], within: float) -> int:
        """Run it and return its exit code, or raise its exception.

        Args:
            within: seconds in which it must end if this process is killed: later, another process
                may have the lock.
        """
        argv = sys.argv
        with _environment(environment):
            if not self._from_command_line:
                out, err = self._called_by.stdout, self._called_by.stderr
                call_command(self._command, *self._args, stdout=out, stderr=err)
                return 0
            # The command must see itself there: runserver starts itself again from it.
            sys.argv = [argv[0], self._name, *self._args]
            try:
                self._command.run_from_argv(sys.argv)
            finally:
                sys.argv = argv
        return 0

    def terminate(self) -> None:
        """Ask it to end. Called from another thread."""
        if self._in_main_thread:
            interrupt_main_thread()

    def kill(self) -> None:
        """End it. Called from another thread."""
        if self._from_command_line:
            os._exit(Exit.LOST)


def _load(name: str) -> BaseCommand:
    known = get_commands()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]}?" if close else "manage.py help lists them"
        raise CommandError(
            f"there is no management command {name!r}; {hint} (--shell runs a program)",
            returncode=Exit.NOT_FOUND,
        )
    app = known[name]
    return app if isinstance(app, BaseCommand) else load_command_class(app, name)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before: dict[str, Any] = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class Program:
    """A program with its arguments; one argument alone is a line for ``/bin/sh``. Its methods are
    those of ``ManagementCommand``. ``grace``: seconds from SIGTERM to SIGKILL when it must end."""

    def __init__(self, argv: Sequence[str], grace: float) -> None:
        self._argv = ["/bin/sh", "-c", argv[0]] if len(argv) == 1 else list(argv)
        if shutil.which(self._argv[0]) is None:
            raise CommandError(f"there is no program {argv[0]!r}", returncode=Exit.NOT_FOUND)
        words = argv[0].split()
        self.label = Path(words[0]).name if words else "/bin/sh"
        self._grace = grace
        self._group = 0
        self._must_end = False
        self._early: list[int] = []

    def run(self, environment: dict[str, str], within: float) -> int:
        with (
            self._signals(),
            _guard_process(min(self._grace, within)) as guard,
            _in_foreground(guard.pid),
        ):
            try:
                process = subprocess.Popen(
                    self._argv, env={**os.environ, **environment}, **_in_group(guard.pid)
                )
            except OSError as error:
                guard.communicate(b"over")
                why = f"{self._argv[0]} cannot be started: {error.strerror}"
                raise CommandError(why, returncode=Exit.NOT_FOUND) from error
            self._group = guard.pid
            try:
                for number in self._early:  # Signals that came before it started.
                    self._send(number)
                if self._must_end:
                    self.terminate()
                code = process.wait()
                guard.communicate(b"over")  # Its background processes may run on.
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
        """Pass signals on to the program, except those that this process ignores (nohup)."""
        if not is_main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def pass_on(number: int, frame: FrameType | None) -> None:
            if self._group:
                self._send(number)
            else:
                self._early.append(number)

        try:
            for number in PASSED_ON:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    before[number] = signal.signal(number, pass_on)
            for number in IGNORED:
                before[number] = signal.signal(number, signal.SIG_IGN)
            # Where it is ignored, exit codes are lost.
            before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            yield
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)

    def _wait_for_the_group(self) -> None:
        """Wait until the program's children have ended too; after ``grace`` seconds kill them."""
        deadline = time.monotonic() + self._grace
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self._group, 0)
                time.sleep(0.02)
            os.killpg(self._group, signal.SIGKILL)


def _in_group(group: int) -> dict[str, Any]:
    """Options of Popen for a process group; 0: a new one, which the child leads."""
    if sys.version_info >= (3, 11):
        return {"process_group": group}
    return {"preexec_fn": lambda: os.setpgid(0, group)}


@contextmanager
def _guard_process(grace: float) -> Iterator[subprocess.Popen[bytes]]:
    """The guard; its pid is the group's number, and stays taken. At the end it ends the group,
    unless it got a word on its input."""
    with _blocked():  # The guard inherits this.
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", GUARD, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **_in_group(0),
        )
    try:
        yield guard
    finally:
        if guard.returncode is None:
            guard.communicate()


@contextmanager
def _blocked() -> Iterator[None]:
    """Block the signals in processes started here; this thread gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, NOT_GUARDS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _in_foreground(group: int) -> Iterator[None]:
    """Let the program read from the terminal, and get its Ctrl-C, if this process is in the
    foreground."""
    fd = -1
    with suppress(AttributeError, OSError, ValueError):
        fd = sys.__stdin__.fileno()  # type: ignore[union-attr]  # None is suppressed
    if not is_main_thread() or not os.isatty(fd) or os.tcgetpgrp(fd) != os.getpgrp():
        yield
        return
    os.tcsetpgrp(fd, group)
    try:
        yield
    finally:
        with suppress(OSError):  # The terminal is gone.
            os.tcsetpgrp(fd, os.getpgrp())


def is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
