"""On which cores the server and its clients run.

Where processes are not pinned, the same code gives figures that differ by a third from run to run:
the system moves them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pinned", "placements"]


def placements() -> dict[str, tuple[set[int], set[int]]]:
    """Name to the cores of the server and those of the clients; none where it cannot be chosen."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    first, *others = sorted(os.sched_getaffinity(0))
    found = {"all on one core": ({first}, {first})}
    if others:
        found["the server on another core"] = ({first}, set(others))
    return found


@contextmanager
def pinned(server: int, name: str) -> Iterator[None]:
    """Place the process ``server``, and this one with the processes that it starts in the body."""
    before = os.sched_getaffinity(0)
    for_server, for_clients = placements()[name]
    os.sched_setaffinity(server, for_server)
    os.sched_setaffinity(0, for_clients)
    try:
        yield
    finally:
        os.sched_setaffinity(server, before)
        os.sched_setaffinity(0, before)
