"""Several processes that start together, do what they are told, and end together."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from django.conf import settings
from django.core.management.base import CommandError

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Event", "Team"]

#: Seconds without any word from a team after which something is wrong.
PATIENCE = 60.0
#: Seconds the processes have to end by themselves.
FAREWELL = 5.0


class Event(NamedTuple):
    """What a member has reported. Members are numbered from 1."""

    member: int
    what: str
    facts: dict[str, Any]


class Team:
    """Processes of this site; ``with Team(9) as team:`` starts them and ends them.

    One process imports the site and forks into the members, each with a socket to this process.

    Raises:
        CommandError: one of them ended or fell silent, when that was noticed.
    """

    def __init__(self, size: int) -> None:
        self.numbers = range(1, size + 1)
        self._sockets: list[socket.socket] = []
        self._starter: subprocess.Popen[bytes] | None = None
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        try:
            self._start()
            self.wait_for_all("here")
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def start_all(self, function: Callable[..., None], **arguments: Any) -> None:
        """Let every member call ``function`` with its ``Member`` and ``arguments``."""
        named = f"{function.__module__}.{function.__qualname__}"
        for number in self.numbers:
            self.emit(number, {"function": named, "arguments": arguments})

    def emit(self, number: int, order: Any) -> None:
        """Give an order to one member."""
        self._sockets[number - 1].sendall(json.dumps(order).encode() + b"\n")

    def wait_for_all(self, what: str) -> None:
        """Wait until every member has said ``what``."""
        for _ in self.until_all(what):
            pass

    def until_all(self, what: str) -> Iterator[Event]:
        """What is reported, as it comes, until every member has said ``what``."""
        missing = set(self.numbers)
        while missing:
            try:
                event = self._events.get(timeout=PATIENCE)
            except queue.Empty:
                raise CommandError(
                    f"The demo's processes {missing} say nothing any more."
                ) from None
            if event.what == "gone":
                raise CommandError(f"Process {event.member} of the demo ended before its work did.")
            if event.what == what:
                missing.discard(event.member)
            yield event

    def end(self) -> None:
        """Ask all processes to end, and see to it that they do."""
        for each in self._sockets:
            with suppress(OSError):  # It has ended.
                each.shutdown(socket.SHUT_WR)
        if self._starter is not None:
            try:
                self._starter.wait(FAREWELL)
            except subprocess.TimeoutExpired:
                os.killpg(self._starter.pid, signal.SIGKILL)
                self._starter.wait()
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    def _start(self) -> None:
        theirs: list[socket.socket] = []
        for _ in self.numbers:
            ours, other = socket.socketpair()
            self._sockets.append(ours)
            theirs.append(other)
        descriptors = [each.fileno() for each in theirs]
        self._starter = subprocess.Popen(
            [sys.executable, "-m", "testproject.demo.member", *map(str, descriptors)],
            cwd=settings.BASE_DIR,
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            # Ctrl-C at the terminal is for the demo; it ends the others.
            start_new_session=True,
        )
        for other in theirs:
            other.close()
        for number, ours in zip(self.numbers, self._sockets, strict=True):
            threading.Thread(target=self._listen, args=(number, ours), daemon=True).start()

    def _listen(self, number: int, ours: socket.socket) -> None:
        with ours.makefile("rb") as reports:
            for report in reports:
                facts = json.loads(report)
                self._events.put(Event(number, facts.pop("what"), facts))
        self._events.put(Event(number, "gone", {}))
