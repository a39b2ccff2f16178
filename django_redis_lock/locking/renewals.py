"""What the keeper does for one hold, as the handle of the lock knows it."""

from __future__ import annotations

import weakref
from functools import partial

from ..clock import time
from ..keeper import keeper
from .hold import Hold, Renewal


class Renewals:
    """What the keeper does for one hold, one job for each server, as the handle knows it. When
    no handle knows it any more, the lock cannot be released, and it ends with its lifetime."""

    __slots__ = ("__weakref__", "hold", "jobs")

    def __init__(self, hold: Hold, *jobs: Renewal) -> None:
        self.hold = hold
        self.jobs = jobs
        for job in jobs:
            job.kept_by = weakref.ref(self)

    def begin(self) -> None:
        for job in self.jobs:
            job.begin()

    def entered(self, grant_timeout: float, min_hold: float) -> None:
        """The lock was taken by ``with``. A signal handler's exception at the entry of ``__exit__``
        may keep the block's end from releasing it; then the keeper does when the handle is
        collected."""
        kept_by = weakref.ref(self, partial(_collected, self.jobs, (grant_timeout, min_hold)))
        for job in self.jobs:
            job.kept_by = kept_by

    def discard(self) -> None:
        for job in self.jobs:
            job.kept_by = None
            job.stop()

    def reschedule(self, due: float) -> None:
        for job in self.jobs:
            keeper().reschedule(job, due)

    def tell(self, what: str, note: str = "") -> None:
        for job in self.jobs:
            job.tell(what, note)


def _collected(jobs: tuple[Renewal, ...], terms: tuple[float, float], _: object) -> None:
    """May run anywhere, as signal handlers do: the keeper does the rest."""
    for job in jobs:
        if not job.hold.ended:
            job.collected = terms
            keeper().reschedule(job, time.monotonic())
