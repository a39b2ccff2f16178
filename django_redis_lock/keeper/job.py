"""What the keeper can be given to do."""

from __future__ import annotations

import math
from typing import Any

from ..protocol import Call
from ..transport import Server

__all__ = ["Job"]


class Job:
    """Something to do at ``due`` (monotonic seconds) with one script on one server."""

    #: The time scale, in seconds, on which this job must be done.
    urgency = math.inf
    #: Whether somebody is kept waiting if the process ends before this is done.
    owed = False

    def __init__(self, server: Server, due: float) -> None:
        self.server = server
        self.due = due

    def call(self, now: float) -> Call | None:
        """What to send now; None if there is nothing to ask and only ``due`` has changed."""
        raise NotImplementedError

    def answered(self, value: Any, sent_at: float) -> None:
        """The server's reply to ``call``; must set ``due`` or let the keeper discard the job."""
        raise NotImplementedError

    def failed(self, error: Exception, now: float) -> None:
        """There was no reply; must set ``due``."""
        raise NotImplementedError
