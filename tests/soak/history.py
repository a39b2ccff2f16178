"""What each process of a soak run did, in a file of its own: one line of JSON for each event.

A line is written before the process goes on, so that a killed process leaves all it has done. Times
are those of the machine's clock, which is also that of the servers: they run on the same machine.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Event", "History", "read_histories"]


class Event(NamedTuple):
    """One line of a history.

    Attributes:
        kind: what happened; see ``checker``.
        at: Unix time in seconds.
        process: the name of the history.
        values: whatever goes with the kind.
    """

    kind: str
    at: float
    process: str
    values: dict[str, Any]


class History:
    """The history of this process."""

    def __init__(self, folder: Path, name: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{name}.history", flags)

    def write(self, kind: str, **values: Any) -> None:
        """Note an event, of now unless ``at`` says otherwise."""
        line = json.dumps({"kind": kind, "at": time.time(), **values})
        os.write(self._file, line.encode() + b"\n")


def read_histories(folder: Path) -> list[Event]:
    """The events of all processes, in the order of their times."""
    events = []
    for path in sorted(folder.glob("*.history")):
        for line in path.read_text().splitlines():
            try:
                values = json.loads(line)
            except ValueError:
                continue  # Its process was killed in the middle of the line.
            events.append(Event(values.pop("kind"), values.pop("at"), path.stem, values))
    return sorted(events, key=lambda event: event.at)
