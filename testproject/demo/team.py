"""Several processes that start together, do what they are told, and end together."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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

    Raises:
        CommandError: one of them ended or fell silent, when that was noticed.
    """

    def __init__(self, size: int) -> None:
        self.numbers = range(1, size + 1)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        try:
            for number in self.numbers:
                self._start(number)
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
        pipe = self._processes[number - 1].stdin
        assert pipe is not None
        pipe.write(json.dumps(order).encode() + b"\n")
        pipe.flush()

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
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.close()
            except BrokenPipeError:
                pass  # It has ended before it could read its last order.
        deadline = time.monotonic() + FAREWELL
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()

    def _start(self, number: int) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "testproject.demo.member"],
            cwd=settings.BASE_DIR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Ctrl-C at the terminal is for the demo; it ends the others.
            start_new_session=True,
        )
        self._processes.append(process)
        listening = threading.Thread(target=self._listen, args=(number, process), daemon=True)
        listening.start()

    def _listen(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as reports:
            for report in reports:
                facts = json.loads(report)
                self._events.put(Event(number, facts.pop("what"), facts))
        self._events.put(Event(number, "gone", {}))
