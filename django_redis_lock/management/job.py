"""What ``run_locked`` runs: a management command in this process, or with ``--shell`` any program
in a new process group. That must not outlive this process, which holds the lock: a guard process
(``process_tree``) starts the program, and ends all that comes of it."""

from __future__ import annotations

import difflib
import fcntl
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.core.management.base import BaseCommand

from ..decorators.on_lost import interrupt_main_thread
from ..extension import PartMissing, part
from ..transport.refusals import raise_interrupt
from . import Exit, usage_error

#: Ctrl-Z must stop neither this process, which renews the lock, nor the program, for which others
#: wait; SIGTTOU would stop this process when it takes the terminal back.
IGNORED = (signal.SIGTSTP, signal.SIGTTOU)


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
        with _environment(environment):
            if not self._from_command_line:
                out, err = self._called_by.stdout, self._called_by.stderr
                call_command(self._command, *self._args, stdout=out, stderr=err)
                return 0
            argv = sys.argv
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
            with suppress(PartMissing):
                part("process_tree").signal_descendants(os.getpid(), signal.SIGKILL)
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
    before = {name: os.environ.get(name) for name in changes}
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
        part("process_tree")
        self._argv = ["/bin/sh", "-c", argv[0]] if len(argv) == 1 else list(argv)
        path = shutil.which(self._argv[0])
        if path is None:
            raise CommandError(f"there is no program {argv[0]!r}", returncode=Exit.NOT_FOUND)
        self._path = path
        words = argv[0].split()
        self.label = Path(words[0]).name if words else "/bin/sh"
        self._grace = grace
        self._link: socket.socket | None = None  # To the guard.
        self._early = b""
        self._guard: subprocess.Popen[bytes] | None = None

    def run(self, environment: dict[str, str], within: float) -> int:
        ours, guards = socket.socketpair()
        times = str(min(self._grace, within)), str(self._grace)
        start = _guard_process(guards, times, (self._path, *self._argv), environment)
        answer = b""
        try:
            self._link = ours
            with ours, self._signals(), start as guard, ours, _in_foreground(guard.pid):
                self._guard = guard
                self._order(part("process_tree").START + self._early)
                with suppress(ConnectionResetError):  # It ended without reading the last order.
                    while received := ours.recv(1000):
                        answer += received
                if not answer:
                    return self._without_guard(guard)
            return int(answer)
        except (OSError, ValueError) as error:
            raise_interrupt(error)
            why = getattr(error, "strerror", None) or answer.decode()
            text = f"{self._argv[0]} cannot be started: {why}"
            raise CommandError(text, returncode=Exit.NOT_FOUND) from error

    def _without_guard(self, guard: subprocess.Popen[bytes]) -> int:
        with suppress(OSError):
            os.killpg(guard.pid, signal.SIGKILL)
        if (code := guard.wait()) > 0:
            text = f"{self._argv[0]}: the process that was to start it ended with code {code}"
            raise CommandError(text, returncode=code)
        return 128 + signal.SIGKILL  # It was killed.

    def terminate(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        self._order(bytes([number]))
        if self._guard is not None:
            self._guard.send_signal(signal.SIGCONT)  # Its whole group may be stopped.

    def _order(self, order: bytes) -> None:
        if self._link is None:
            self._early += order
            return
        with suppress(OSError):  # The guard has ended.
            self._link.send(order)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on to the program, except those that this process ignores (nohup)."""
        if not is_main_thread():
            yield
            return
        before: dict[int, Any] = {}

        def pass_on(number: int, frame: FrameType | None) -> None:
            self._order(bytes([number]))

        try:
            for number in part("process_tree").PASSED_ON:
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


@contextmanager
def _guard_process(
    link: socket.socket, times: Sequence[str], argv: Sequence[str], environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A guard for ``argv``, which begins with the program's path. It leads the program's group."""
    with link, _blocked() as mask:  # The guard inherits this.
        # Not the number of a standard stream that is closed.
        number = fcntl.fcntl(link, fcntl.F_DUPFD_CLOEXEC, 3)
        options = [str(number), *times, ",".join(map(str, mask))]
        try:
            guard = subprocess.Popen(
                [sys.executable or "", "-I", "-S", *_program(), *options, *argv],
                env={**os.environ, **environment},
                pass_fds=[number],
                **_in_new_group(),
            )
        except OSError as error:
            text = f"Python ({sys.executable!r}) cannot be started: {error.strerror}"
            raise CommandError(text, returncode=Exit.NOT_FOUND) from error
        finally:
            os.close(number)
    try:
        yield guard
    finally:
        guard.wait()


def _program() -> Sequence[str]:
    process_tree = part("process_tree")
    path = process_tree.__file__
    # An application in one file, a zip, has no such path.
    return [path] if os.path.exists(path) else ["-c", inspect.getsource(process_tree)]


def _in_new_group() -> dict[str, Any]:
    """Options of Popen for a process group that the child leads."""
    if sys.version_info >= (3, 11):
        return {"process_group": 0}
    return {"preexec_fn": lambda: os.setpgid(0, 0)}


@contextmanager
def _blocked() -> Iterator[set[int]]:
    """Block the signals in processes started here; this thread gets them afterwards. Gives those
    that were blocked before."""
    # What the guard passes on when it is ready, and what stops a group.
    numbers = (*part("process_tree").PASSED_ON, *IGNORED, signal.SIGTTIN)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield {int(number) for number in before}
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
