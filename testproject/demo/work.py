"""Workers that take locks, hold them, and queue for them, as those of a busy site do."""

from __future__ import annotations

import random
import time

from django.core.cache import cache
from redis.exceptions import RedisError

from testproject.demo.member import Member

__all__ = ["work"]

#: Lock, what it is for, and about how many seconds it takes.
JOBS = (
    ("nightly-report", "Nightly sales report", 15),
    ("import-prices", "Import the suppliers' prices", 20),
    ("newsletter", "Send the newsletter", 10),
    ("stock-count", "Count the stock", 12),
)


def work(member: Member | None = None) -> None:
    """Do one job after the other until the process ends.

    There are fewer jobs than workers, so some are always at work and some mostly wait.
    """
    while True:
        name, label, seconds = random.choice(JOBS)
        try:
            with cache.lock(name, label=label) as lock:
                until = time.monotonic() + seconds * random.uniform(0.5, 1.5)
                while time.monotonic() < until:
                    time.sleep(0.5)
                    lock.ensure_held()
        except RedisError:
            # The lock was released by somebody else, or Redis is away; the package has logged it.
            time.sleep(1)
