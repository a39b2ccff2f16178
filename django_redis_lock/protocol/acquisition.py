"""What a waiter asks for, and what a grant is worth. Decisions only: no input or output here.

A grant is already the lock, for the short lifetime the releaser gave it. The granted waiter sends
for its full lifetime and does not wait for the answer, unless the grant may be over: a process
that was stopped, or a reply that was held up on the way, cannot know without asking. A grant's
fence is the server's time in microseconds at which it was made, and every answer brings a reading
of the server's clock; together they tell the grant's age.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import secrets
import threading
import time
from typing import Any, NamedTuple, Protocol

from ..events import Subject
from ..forks import after_fork
from .keys import LockKeys
from .lock_scripts import ACQUIRE, LEAVE, RELEASE, TAKE_GRANT, WATCH, Call
from .owner import encodable, hostname
from .validation import milliseconds

#: Seconds a waiter counts as alive after its keeper has last said so.
WAITER_LIFETIME_SECONDS = 6.0
#: Seconds between two looks of the keeper at a lock its process waits for.
WATCH_INTERVAL_SECONDS = 2.0
#: Seconds the last try at the deadline may take before the wait ends without it.
LAST_TRY_SECONDS = 0.1
#: A grant reckoned to be older than this many seconds, or than a quarter of its lifetime, is asked
#: about before it is believed; so is one that seems to come from the future by as much (the
#: server's clock was set back).
MAX_GRANT_AGE_SECONDS = 0.5
#: How a fence is written.
FENCE = re.compile(rb"\d{1,16}")


def new_token() -> bytes:
    """A value nobody can guess: whoever knows it owns the lock."""
    return secrets.token_hex(16).encode()


def waiter_id() -> bytes:
    """A name for a waiter: unique, and the admin reads from it who waits since when."""
    return b"%d %.3f %b" % (next(_waiters), time.time(), _here.name or _name_thread())


_waiters = itertools.count(secrets.randbits(40))


class _Here(threading.local):
    """What this thread's waiters are called; it is asked for at each acquire."""

    name = b""


_here = _Here()


def _name_thread() -> bytes:
    thread = threading.current_thread().name
    _here.name = encodable(f"{os.getpid()} {hostname()} {thread}").encode()
    return _here.name


@after_fork
def _forget_name() -> None:
    _here.name = b""


class Clock(NamedTuple):
    """A reading of the server's clock: its microseconds, and our monotonic time before asking."""

    server_us: int
    at: float

    def age(self, server_us: int) -> float:
        """At most how many seconds ago the server's clock showed ``server_us``."""
        return (self.server_us - server_us) / 1e6 + time.monotonic() - self.at


class PendingLifetime(Protocol):
    """The answer to TAKE_GRANT, for which nobody has waited."""

    def confirm(self, wait: bool) -> float | None:
        """The confirmed deadline; None if there is no answer, ``-inf`` if the grant was over.

        Args:
            wait: whether to wait for the answer, where that needs no event loop.
        """


class Acquisition(NamedTuple):
    """The lock, with what is known of its end.

    Attributes:
        began: monotonic time from which it counts as held.
        deadline: monotonic time until which it is certain to be held.
        attempt: the request's.
        pending: for a grant whose full lifetime is not confirmed yet: the answer to come.
        contended: whether it was waited for.
    """

    token: bytes
    fence: int
    began: float
    deadline: float
    attempt: bytes = b""
    pending: PendingLifetime | None = None
    contended: bool = False


class AcquireRequest(NamedTuple):
    """One call of ``acquire``: what it wants, for how long, and until when it waits.

    Attributes:
        attempt: empty for a fresh token; for a token the caller chose, what tells a repetition
            of this call from another call with the same token.
        deadline: monotonic time at which the wait ends, None without end.
        sleep: seconds between two tries where Redis does not let us block.
        margin: seconds before the deadline at which the last try is sent, so that its answer is
            there in time.
        outage_patience: seconds for which a waiter keeps trying to reach a server that is away.
        may_hold: the tokens, each with its attempt, under which Redis may have given the lock to
            this call; a list that all copies share. A token is noted before it is sent, and taken
            off when Redis has confirmed its release: when the call is interrupted, these are
            what to release.
        replicas: how many replicas are to confirm the acquisition.
        subject: the lock, for those who want to hear of it.
        waiter: the waiter id with which ACQUIRE was sent, empty if it was sent without.
    """

    keys: LockKeys
    token: bytes
    attempt: bytes
    lifetime: float | None
    grant_timeout: float
    sleep: float = 0.1
    deadline: float | None = None
    margin: float = 0.0
    outage_patience: float = math.inf
    may_hold: Any = ()
    replicas: int = 0
    subject: Subject | None = None
    waiter: bytes = b""

    @property
    def chosen(self) -> bool:
        """Whether the caller chose the token, so that the lock must be held with just this one."""
        return bool(self.attempt)

    @property
    def believes_nothing(self) -> bool:
        """Whether a grant is not the lock before its full lifetime is confirmed."""
        return self.chosen or bool(self.replicas)

    def left(self) -> float:
        """Seconds until the last try is due; an hour where there is no end."""
        if self.deadline is None:
            return 3600.0
        return max(0.0, self.deadline - self.margin - time.monotonic())

    def patience(self) -> float | None:
        """Seconds for which an answer is worth waiting, None without end."""
        # The system waits for 24 days at most.
        return None if self.deadline is None else min(self.left(), 3600.0) + LAST_TRY_SECONDS

    def with_margin(self, asked_at: float) -> AcquireRequest:
        """The same request, after an answer to what was sent at ``asked_at``: the last try will be
        sent one such round trip before the deadline, but at most 2 % of the wait or 10 ms."""
        if self.deadline is None:
            return self
        trip = time.monotonic() - asked_at
        return self._replace(margin=min(trip, (self.deadline - asked_at) / 50, 0.01))

    # -- what to send ------------------------------------------------------------------------

    def acquire(self, waiter: bytes = b"") -> Call:
        """Take the lock; with ``waiter``, register it if that fails."""
        mine = (self.token, milliseconds(self.lifetime), self.attempt)
        return Call(ACQUIRE, self.keys, (*mine, waiter, milliseconds(WAITER_LIFETIME_SECONDS)))

    def leave(self, waiter: bytes, wake: bytes, *, try_again: bool) -> Call:
        """Stop waiting, after a last try or without; take ``waiter``, if any, off the register."""
        token = self.token if try_again else b""
        mine = (token, milliseconds(self.lifetime), self.attempt)
        return Call(LEAVE, (*self.keys, wake), (*mine, waiter))

    def take(self, token: bytes, waiter: bytes, fence: int = 0) -> Call:
        """Give a grant its full lifetime; take ``waiter``, if any, off the register."""
        own = (self.token, self.attempt, fence) if self.chosen else (b"", b"", 0)
        return Call(TAKE_GRANT, self.keys, (token, milliseconds(self.lifetime), waiter, *own))

    def watch(self, waiter: bytes) -> Call:
        """Stay registered, and look whether the holder has vanished."""
        grant = (new_token(), milliseconds(self.grant_timeout))
        return Call(WATCH, self.keys, (waiter, milliseconds(WAITER_LIFETIME_SECONDS), *grant))

    def give_back(self, token: bytes, attempt: bytes = b"") -> Call:
        """Release what ``token``, a grant's or this request's own, may have got."""
        if token == self.token:
            attempt = self.attempt
        return release_call(self.keys, token, new_token(), self.grant_timeout, attempt=attempt)

    # -- what an answer means ----------------------------------------------------------------

    def until(self, sent_at: float) -> float:
        """The deadline of a lock whose lifetime was set by a command sent at ``sent_at``."""
        return math.inf if self.lifetime is None else sent_at + self.lifetime

    def acquired(self, fence: Any, sent_at: float) -> Acquisition:
        return Acquisition(self.token, int(fence), sent_at, self.until(sent_at), self.attempt)

    def taken(self, token: bytes, fence: int, came_at: float, until: float) -> Acquisition:
        """A grant whose full lifetime is confirmed."""
        held_with = self.token if self.chosen else token
        return Acquisition(held_with, fence, came_at, until, self.attempt)

    def granted(self, token: bytes, fence: int, age: float, came_at: float) -> Acquisition:
        """A fresh grant, believed until its own short lifetime is over."""
        until = min(came_at + self.grant_timeout - max(age, 0.0), self.until(came_at))
        return Acquisition(token, fence, came_at, until)


def release_call(
    keys: LockKeys,
    token: bytes,
    successor: bytes,
    grant_timeout: float,
    min_hold: float = 0.0,
    fence: int = 0,
    attempt: bytes = b"",
) -> Call:
    """Give up what ``token`` holds; with ``attempt``, only if that attempt acquired it."""
    rest = milliseconds(min_hold) if min_hold else 0
    grant = milliseconds(grant_timeout)
    since = fence if rest else 0
    return Call(RELEASE, keys, (token, successor, grant, rest, since, attempt))


def parse_grant(element: bytes) -> tuple[bytes, int]:
    """Token and fence of an element of the grants list; what is none is worth as much as a grant
    that is over."""
    token, _, fence = element.rpartition(b":")
    return (token, int(fence)) if FENCE.fullmatch(fence) else (element, 0)
