"""How many holders are silent, for the menu. No page of the admin waits for Redis for that: a
thread counts, and the next page shows the number."""

from __future__ import annotations

import threading
import time

from django.core.signals import request_finished

from ... import threads
from ...models import silent
from ...threads import get_logger
from ..held_locks import held_locks
from ..inventory import LOCK

logger = get_logger("django_redis_lock.admin")

#: Seconds for which a count is shown.
COUNT_EVERY_SECONDS = 10.0
_number, _due = 0, 0.0


def _forget(**_: object) -> None:
    silent.set(0)


request_finished.connect(_forget)


def silent_now() -> int:
    """As of some seconds ago; 0 until it is known, and while Redis is down."""
    global _due
    if time.monotonic() >= _due:
        _due = time.monotonic() + COUNT_EVERY_SECONDS
        thread = threading.Thread(target=_count, name="django_redis_lock menu", daemon=True)
        threads.start(thread, lambda error: logger.debug("Silent holders: %s", error))
    return _number


def _count() -> None:
    global _number
    try:
        _number = sum(bool(held.lock.silent) for held in held_locks(kinds=(LOCK,)).found)
    except Exception as error:  # Of a project's own key function, too.
        logger.debug("Silent holders could not be counted: %s", error)
        _number = 0
