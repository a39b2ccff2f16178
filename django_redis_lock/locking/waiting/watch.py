"""What the keeper does for a line of waiters."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from ...keeper import Job, keeper
from ...protocol import WATCH_INTERVAL_SECONDS, Call, Clock
from ..history import note_vanished

if TYPE_CHECKING:
    from .queue import WaitQueue

__all__ = ["Unregister", "WaiterHeartbeat"]


class WaiterHeartbeat(Job):
    """Keeps a line registered, and makes the grant for a holder that has vanished."""

    def __init__(self, line: WaitQueue) -> None:
        super().__init__(line.server, time.monotonic() + WATCH_INTERVAL_SECONDS)
        self._line = line
        self._lying = 0

    def call(self, now: float) -> Call | None:
        if self._line.loop is not None and self._line.loop.is_closed():
            self._line.dissolve()  # Its tasks will never know.
            self._line.wake()
            return None
        return self._line.request.watch(self._line.waiter)

    def answered(self, value: Any, sent_at: float) -> None:
        pttl, server_us, lying = map(int, value[:3])
        if len(value) > 3:
            request = self._line.request
            note_vanished(self.server, request.keys, value[3], request.subject)
        self.due = self._line.heard(pttl, Clock(server_us, sent_at))
        self._line.listed_again()
        # A grant lies there although we wait: Redis does not know our blocking pop, its
        # connection has died without a word. Not at the first sight, it may just be on its way.
        self._lying = self._lying + 1 if lying else 0
        if lying:
            self.due = min(self.due, time.monotonic() + 0.2)
        if self._lying > 1 or self._line.misplaced():
            self._lying = 0
            self._line.wake()

    def failed(self, error: Exception, now: float) -> None:
        self.due = now + WATCH_INTERVAL_SECONDS / 4
        if any(place._request.outage_patience < math.inf for place in tuple(self._line.places)):
            self._line.wake()  # Somebody has other things to do than wait for a frozen server.


class Unregister(Job):
    """Takes a line off the register that ended without doing so: its last member was interrupted,
    or had the lock otherwise than by a grant."""

    flush_at_exit = True

    def __init__(self, line: WaitQueue) -> None:
        super().__init__(line.server, time.monotonic())
        self._call = line.request.take(b"", line.waiter)

    def call(self, now: float) -> Call:
        return self._call

    def answered(self, value: Any, sent_at: float) -> None:
        keeper().discard(self)

    def failed(self, error: Exception, now: float) -> None:
        keeper().discard(self)  # Nobody will look at the id any more when it has run out.
