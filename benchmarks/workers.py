"""Real processes that run the same function at the same time.

They are forked from a process that has done nothing but import, so the function is found by its
module and name; it gets its ``Seat`` first, makes ready, and calls ``seat.start()``, which returns
in all processes at once. ``time.monotonic`` is one clock for all of them.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Crew", "Seat", "WorkerFailed"]

#: Seconds after which a process that has said nothing is taken to hang.
PATIENCE = 300.0

_forkserver = multiprocessing.get_context("forkserver")


class WorkerFailed(Exception):
    """A process raised, or hangs; the message has its traceback."""


@dataclass
class Seat:
    """A process's place in its crew."""

    number: int
    barrier: Any

    def start(self) -> None:
        self.barrier.wait(PATIENCE)


class Crew:
    """``count`` processes; ``with Crew(4) as crew: crew.run(function, ...)``, as often as liked."""

    def __init__(self, count: int) -> None:
        self._barrier = _forkserver.Barrier(count)
        self._links: list[Connection] = []
        self._processes = []
        for number in range(count):
            here, there = _forkserver.Pipe()
            seat = Seat(number, self._barrier)
            process = _forkserver.Process(target=_serve, args=(there, seat), daemon=True)
            process.start()
            if hasattr(os, "sched_setaffinity"):  # It is no child of this one.
                os.sched_setaffinity(process.pid or 0, os.sched_getaffinity(0))
            there.close()
            self._links.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for link in self._links:
            link.close()  # Ends the process.
        for process in self._processes:
            process.join(2.0)
            if process.is_alive():
                process.kill()
                process.join()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        meanwhile: Callable[[], Any] = lambda: None,
    ) -> list[Any]:
        """What ``function(seat, *args)`` returns in each process. ``meanwhile`` is called here."""
        for link in self._links:
            link.send((function, args))
        meanwhile()
        answers = [self._answer(link) for link in self._links]
        failures = [value for well, value in answers if not well]
        if failures:
            self._barrier.reset()
            raise WorkerFailed(f"{function.__qualname__}{args}:\n" + "\n".join(failures))
        return [value for _, value in answers]

    def ended(self) -> bool:
        """Whether all processes have done what they were asked to."""
        return all(link.poll() for link in self._links)

    def _answer(self, link: Connection) -> tuple[bool, Any]:
        if not link.poll(PATIENCE):
            return False, f"a process has not answered for {PATIENCE:.0f} s"
        answer: tuple[bool, Any] = link.recv()
        return answer


def _serve(link: Connection, seat: Seat) -> None:
    while True:
        try:
            function, args = link.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            answer = True, function(seat, *args)
        except Exception:
            seat.barrier.abort()  # Nobody is to wait for us.
            answer = False, traceback.format_exc()
        try:
            link.send(answer)
        except OSError:
            return  # Nobody waits for it any more.
