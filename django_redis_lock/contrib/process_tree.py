"""All that a process has started, however far it has gone: signals to it, and its end.

As a program, this is the guard of ``run_locked --shell``: it starts the program, passes signals on
to all that comes of it, and ends that when the lock is lost or ``run_locked`` is killed. It has a
separate interpreter, which must start quickly: so this module imports nothing of the package.

On Linux the guard is a *subreaper*: a process whose parent has ended becomes its child, wherever
``timeout``, ``setsid`` or a double fork have put it. So all that was started is below the guard,
and when that has no child left, nothing is left. Elsewhere it knows the process group only.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

#: Signals that are passed on to the program.
PASSED_ON = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
#: Of these, those that tell it to end.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
#: An order to the guard; every other byte is the number of a signal to pass on.
START = b"\0"
#: How often one signal looks for processes that were started since.
PASSES = 10
#: Seconds in which what was killed ends, unless it waits for a disk, or is another user's.
KILL_SECONDS = 5.0
PR_SET_CHILD_SUBREAPER = 36


class Process(NamedTuple):
    """``started``, in the kernel's ticks, tells it from a later process with the same pid."""

    pid: int
    started: int
    group: int


def descendants(root: int) -> Iterator[Process]:
    """Those of ``root`` that have not ended. None without Linux's /proc."""
    has_lists = os.path.exists(f"/proc/{root}/task/{root}/children")
    children = _children if has_lists else _scan()
    parents = [root]
    while parents:
        for pid in children(parents.pop()):
            parents.append(pid)
            if (fields := _stat(pid)) and fields[0] not in (b"Z", b"X"):  # They have ended.
                yield Process(pid, int(fields[19]), int(fields[2]))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # It has ended.
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def _scan() -> Callable[[int], Sequence[int]]:
    """The same from all processes, for kernels without such lists."""
    found: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit() and (fields := _stat(int(name))):
                found.setdefault(int(fields[1]), []).append(int(name))
    return lambda pid: found.pop(pid, ())


def _stat(pid: int) -> list[bytes]:
    """From its state on; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def signal_descendants(root: int, number: int, *, not_in: int | None = None) -> None:
    """Send each descendant of ``root`` one signal, except to those in the group ``not_in``."""
    sent: set[Process] = set()
    for _ in range(PASSES):
        new = [p for p in descendants(root) if p not in sent and p.group != not_in]
        if not new:
            return
        for process in new:
            sent.add(process)
            _send(process, number)


def _send(process: Process, number: int) -> None:
    fields = _stat(process.pid)
    if fields and int(fields[19]) == process.started:
        with suppress(OSError):  # It has ended, or is another user's.
            os.kill(process.pid, number)


# -- the guard -------------------------------------------------------------------------------------


class Supervisor:
    """Starts ``argv`` and answers on ``link`` with its exit code, or why it cannot be started.

    Args:
        link: a socket; if it ends, ``run_locked`` was killed.
        within: seconds from then to SIGKILL.
        grace: seconds that what the program leaves behind has to end, if it was told to.
        mask: signals that the program blocks.
    """

    def __init__(
        self, link: int, within: float, grace: float, mask: set[int], argv: Sequence[str]
    ) -> None:
        self._link, self._within, self._grace = link, within, grace
        self._mask, self._argv = mask, argv
        self._group = os.getpgrp()
        self._is_subreaper = _become_subreaper()
        self._woken = self._listen()
        self._early: list[int] = []
        self._program = 0
        self._code: int | None = None
        self._told_to_end = self._is_alone = False
        self._deadline = float("inf")

    def _listen(self) -> int:
        """The read end of a pipe that gets the number of each signal to this process."""
        os.set_inheritable(self._link, False)
        _occupy_streams()
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        for number in (*PASSED_ON, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # As for nohup.
                signal.signal(number, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*PASSED_ON, signal.SIGCHLD))
        return reading

    def run(self) -> None:
        while not self._is_over():
            links = [] if self._is_alone else [self._link]
            left = self._deadline - time.monotonic()
            ready, _, _ = select.select(
                [self._woken, *links], [], [], None if left == float("inf") else max(0.0, left)
            )
            if self._link in ready:
                self._obey(os.read(self._link, 512))
            if self._woken in ready:
                for number in set(os.read(self._woken, 512)) & set(PASSED_ON):
                    # It came to the whole group: from a terminal, for example.
                    self._pass_on(number, outside_group=True)
            if time.monotonic() >= self._deadline:
                self._kill()
                return
        self._answer(str(self._code))

    def _obey(self, orders: bytes) -> None:
        if not orders:
            self._is_alone = True
            self._end_within(self._within)
            self._pass_on(signal.SIGTERM)
        for number in orders:
            if number == START[0]:
                self._start()
            elif not self._program:
                self._early.append(number)
            elif number == signal.SIGKILL:
                self._end_within(0)
            else:
                self._pass_on(number)

    def _start(self) -> None:
        path, *argv = self._argv
        # What Python ignores itself.
        defaults = [getattr(signal, n) for n in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, n)]
        try:
            self._program = os.posix_spawn(
                path, argv, os.environ, setsigmask=self._mask, setsigdef=defaults
            )
        except OSError as error:
            self._answer(error.strerror or str(error))
            sys.exit()
        if not self._is_subreaper:
            with suppress(OSError):  # So that the group may end without this process.
                os.setpgid(0, os.getpgid(os.getppid()))
        _let_go_of_streams()
        for number in self._early:
            self._obey(bytes([number]))

    def _end_within(self, seconds: float) -> None:
        self._told_to_end = True
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _pass_on(self, number: int, *, outside_group: bool = False) -> None:
        self._told_to_end = self._told_to_end or number in ENDING
        if self._is_subreaper:
            not_in = self._group if outside_group else None
            signal_descendants(os.getpid(), number, not_in=not_in)
        elif not outside_group:
            with suppress(OSError):
                os.killpg(self._group, number)

    def _is_over(self) -> bool:
        """Whether the program has ended, and all that it has started, if that was told to end."""
        if not self._program:
            return self._is_alone
        left = self._reap()
        if self._is_alone:
            return not left
        if self._code is None:
            return False
        if left and self._told_to_end:
            self._end_within(self._grace)
            return False
        return True

    def _reap(self) -> bool:
        """Whether something is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return True
                if pid == self._program:
                    code = os.waitstatus_to_exitcode(status)
                    self._code = code if code >= 0 else 128 - code
        except ChildProcessError:
            pass
        if self._is_subreaper:
            return False
        try:
            os.killpg(self._group, 0)
        except OSError:  # PermissionError is macOS's word for zombies.
            return False
        return True

    def _kill(self) -> None:
        """Until nothing is left of what SIGKILL can end, also if that goes on forking."""
        left, since = None, time.monotonic()
        while self._reap():
            before, left = left, set(descendants(os.getpid()))
            if left != before:
                since = time.monotonic()
            elif time.monotonic() - since > KILL_SECONDS:
                break
            self._pass_on(signal.SIGKILL)
            time.sleep(0.002)
        self._answer(str(128 + signal.SIGKILL if self._code is None else self._code))

    def _answer(self, text: str) -> None:
        with suppress(OSError):
            os.write(self._link, text.encode())


def _become_subreaper() -> bool:
    if not sys.platform.startswith("linux") or not _stat(os.getpid()):
        return False
    try:
        import ctypes  # noqa: PLC0415  # It is not everywhere.

        prctl = ctypes.CDLL(None).prctl
        return bool(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (ImportError, OSError, AttributeError):
        return False


def _occupy_streams() -> None:
    """Open those that are closed, without passing them on: no other file must get their numbers."""
    while (opened := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(opened)


def _let_go_of_streams() -> None:
    """They are the program's: a reader of its output waits until all have closed it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nowhere, stream)


if __name__ == "__main__":
    link, within, grace, mask, *argv = sys.argv[1:]
    blocked = {int(number) for number in mask.split(",") if number}
    Supervisor(int(link), float(within), float(grace), blocked, argv).run()
