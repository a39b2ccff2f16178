"""The end of what the package does by itself: refreshes in the background, the keeper's jobs,
notices, signals, ``on_lost`` and the connections of its threads. After it, no test sees anything of
one before: not by subscribers and receivers, in the log, in figures, or on a server."""

from __future__ import annotations

import threading
import time

from django_redis_lock import threads
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import Job, keeper
from django_redis_lock.singleflight.flight import in_flight
from tests.processes import PATIENCE

__all__ = ["until_quiet"]

#: What the names of the package's threads begin with; a test's own are its own affair.
OURS = "django_redis_lock"


def until_quiet() -> None:
    """Have the keeper forget its jobs, and wait until this process does nothing by itself."""
    deadline, pause = time.monotonic() + PATIENCE, 0.0005
    # Twice: what has begun something else may have ended after that was looked at.
    while work := _at_work() or _at_work():
        assert time.monotonic() < deadline, f"the test has left behind: {', '.join(sorted(work))}"
        time.sleep(pause)
        pause = min(pause * 1.5, 0.01)
    in_flight.clear()  # Those of callers that were interrupted; the keeper would end them.


def _at_work() -> list[str]:
    idle: set[threading.Thread | None] = set()
    found = [f"{OURS} {type(job).__name__}" for job in _forget_jobs()]
    for reset in tuple(threads._resets):
        pool = getattr(reset, "__self__", None)
        if isinstance(pool, threads.ThreadPool):
            found += [pool._name] if pool._waiting or pool._busy else []
            idle |= pool._threads
    found += [thread.name for thread in threading.enumerate() if thread not in idle]
    return [name for name in found if name.startswith(OURS) and name != f"{OURS} keeper"]


def _forget_jobs() -> list[Job]:
    """A lock that the test did not release is no business of the next test's keeper. Returns the
    jobs that have not ended yet."""
    for job in keeper().jobs():
        if isinstance(job, Heartbeat):  # It has a thread that listens.
            job._renewals.clear()
            keeper().reschedule(job, 0.0)
        else:
            keeper().discard(job)
    return [*keeper().jobs(), *keeper().under_way()]
