"""What is known of holders that are gone, and of processes that hold locks: their heartbeats, how
locks ended, and why.

Locks do not know this: it hears of them as a ``locking.hold.Listener``.
"""

from __future__ import annotations

from ..clock import time
from ..keeper import SentOnce, keeper
from ..protocol import Reply
from .causes import beats_so_far, cause
from .causes import question as question
from .heartbeat import Heartbeat, Renewed, heartbeats
from .heartbeat import heartbeat_call as heartbeat_call
from .heartbeat import last_heartbeats as last_heartbeats
from .heartbeat import with_heartbeat as with_heartbeat
from .records import Event as Event
from .records import code_here as code_here
from .records import event_args as event_args
from .records import note_call
from .records import note_vanished as note_vanished
from .records import read_events as read_events


def described(job: Renewed) -> object:
    """Redis has a description of the holder of ``job``, so its process sends heartbeats. They are
    remembered as long as what this returns."""
    return Heartbeat.join(job)


def stopped(job: Renewed) -> None:
    """Nothing renews this lock any more."""
    if (beat := heartbeats.get(job.server)) is not None:
        beat.leave(job)


def ended(job: Renewed, what: str, note: str = "") -> None:
    """The lock of ``job`` has ended; ``what`` is as in ``Event``."""
    hold = job.hold
    held = time.monotonic() - hold.began
    of_it = (hold.keys.name, what, hold.owner(), note, held, hold.name)
    keeper().add(SentOnce(job.server, note_call(*of_it, server=job.server)))


def why(job: Renewed, reply: Reply, early: bool) -> str:
    """Why the lock is lost: Redis has answered ``reply`` to RENEW; ``early`` if the holder still
    counted on it."""
    if (beat := heartbeats.get(job.server)) is not None:
        beat.suspect_others()
    return cause(reply, beats_so_far(job.server), early, job.hold, server=job.server)
