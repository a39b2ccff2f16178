"""The calls of a lock to Redis and their replies: of one ``acquire``, and of the holder.

A waiter does not wait for the reply to TAKE_GRANT, unless its grant may have expired, because the
process was stopped. A grant's fence is the server's time in microseconds at which it was made, and
every reply has a reading of the server's clock; the difference is the grant's age.
"""

import math
import re
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol, TypeAlias

from ..clock import time
from ..events import Subject
from ..extension import part
from .identity import as_bytes, new_token, process_id
from .keys import INDEX, LockKeys, events_key, process_key, wake_key
from .lock_scripts import ACQUIRE, LEAVE, RELEASE, RENEW, TAKE_GRANT, WATCH
from .script import Call, Reply, Unanswered
from .validation import milliseconds

WAITER_LIFETIME_SECONDS = 6.0
WATCH_INTERVAL_SECONDS = 2.0
#: For the last try at the deadline.
LAST_TRY_SECONDS = 0.1
#: A grant that seems older, or older than a quarter of its lifetime, must be confirmed first; so
#: must one from the future (the server's clock was set back). See ``WaitQueue.believed_until``.
MAX_GRANT_AGE_SECONDS = 0.5
#: An element of the list of grants: token, fence, and the number of the place unless it is 1.
GRANT = rb"(?s)(.*):(\d{1,16})(?:/(\d+))?"

#: As a limit, below the number of each place: a release passes none of them on.
PASSED_ON_TO_NONE = 0

#: A token that may hold the lock, its attempt, and its place.
Claim: TypeAlias = tuple[bytes, bytes, int]


class Clock(NamedTuple):
    """A reading of the server's clock: its microseconds, and the monotonic time of the request."""

    server_us: int
    read_at: float

    def age(self, server_us: int) -> float:
        """The seconds since the server's clock showed ``server_us``, or a little more."""
        return (self.server_us - server_us) / 1e6 + time.monotonic() - self.read_at


class Vanished(NamedTuple):
    """A holder whose lock ended without a release.

    Attributes:
        ended_us: when its lifetime was over, in microseconds of the server's clock.
        fields: names and values of its description.
    """

    ended_us: int
    fields: Sequence[bytes]


class Taken(NamedTuple):
    """The reply to ACQUIRE, LEAVE or (Redlock's) VOTE: the caller has the lock.

    Attributes:
        sent_at: monotonic time at which the call was sent.
        vanished: the holder before, if it did not release.
    """

    place: int
    fence: int
    server_us: int
    sent_at: float
    vanished: Vanished | None = None

    @property
    def clock(self) -> Clock:
        return Clock(self.server_us, self.sent_at)


class Refused(NamedTuple):
    """The reply to ACQUIRE, LEAVE or VOTE: another holds the lock. ``pttl``: for how long still, as
    PTTL gives it."""

    pttl: int
    server_us: int
    sent_at: float

    @property
    def clock(self) -> Clock:
        return Clock(self.server_us, self.sent_at)


def parse_acquire(reply: Reply, sent_at: float) -> Taken | Refused:
    if isinstance(reply, int):  # Nearly always.
        return Taken(1, reply, reply, sent_at)
    if isinstance(reply, list):
        place, fence_or_pttl, server_us, *vanished = reply
        if not place:
            return Refused(fence_or_pttl, server_us, sent_at)
        before = Vanished(*vanished[0]) if vanished else None
        return Taken(place, fence_or_pttl, server_us, sent_at, before)
    pttl, server_us = map(int, reply.split())
    return Refused(pttl, server_us, sent_at)


class Extended(IntEnum):
    """The reply to EXTEND."""

    DONE = 1
    NOT_OWNED = 0
    NO_LIFETIME = -1


def renew_call(keys: LockKeys, token: bytes, attempt: bytes, *fields: str, wanted: int = 0) -> Call:
    """``wanted``: milliseconds to renew for; 0 leaves the lifetime as it is, -1 removes it.
    ``fields``: names and values of the description."""
    # On a cluster, which has other indexes, the heartbeat is in another slot.
    heartbeat = process_key(process_id()) if keys.held_index == INDEX else b""
    mine = (token, wanted, attempt, events_key(keys.name), heartbeat)
    return Call(RENEW, keys.renewed, (*mine, *fields))


def parse_renew(reply: Reply, sent_at: float) -> float | None:
    """The monotonic time at which the lock ends; None: the token does not hold it, see
    ``history.cause``."""
    if isinstance(reply, list):
        return None
    return math.inf if reply < 0 else sent_at + reply / 1000


class PendingLifetime(Protocol):
    """The reply to TAKE_GRANT: the next on its connection."""

    def read_reply(self, wait: bool) -> float | None:
        """The confirmed deadline; None if there is no reply, ``-inf`` if the grant had expired (the
        reply is 0). ``wait`` for the reply if that needs no event loop."""


class UnreadReply(Protocol):
    """What an idle connection of a thread owes. It has one reader, who has claimed it."""

    @property
    def is_read(self) -> bool: ...
    def claim(self) -> bool:
        """Whether the caller is its reader now: then nobody else waits on that connection."""

    def receive(self) -> None:
        """Read it, or note that the connection has ended."""


class Acquisition(NamedTuple):
    """An acquired lock, and its deadline.

    Attributes:
        began, deadline: monotonic times between which it is held.
        pending: the reply to come, for a grant whose full lifetime is not confirmed yet.
        contended: whether the caller waited.
    """

    token: bytes
    fence: int
    began: float
    deadline: float
    attempt: bytes = b""
    pending: PendingLifetime | None = None
    contended: bool = False
    place: int = 1


class Grant(NamedTuple):
    """An element of the list of grants; see ``parse_grant``."""

    token: bytes
    fence: int
    place: int = 1


class AcquireRequest(NamedTuple):
    """The arguments of one call of ``acquire``.

    Attributes:
        attempt: empty for a random token; for a token that the caller chose, identifies this call
            among other calls with the same token.
        deadline: monotonic time at which the wait ends, None without end.
        sleep: seconds between two tries if Redis does not allow blocking commands.
        margin: seconds before the deadline at which the last try is sent, so that the reply
            arrives in time.
        outage_patience: seconds for which a waiter keeps trying to reach a server that is away.
        may_hold: the tokens with which this call may have acquired the lock: a list that all copies
            share. Each is added before it is sent, and removed when its release is certain. If the
            call is interrupted, ``BaseLock._abandon`` releases all of them.
        unanswered: see ``Call``; all copies share it, too.
        waiter: the waiter id that ACQUIRE sent; empty if it sent none.
        asked_at: monotonic time of the call.
    """

    keys: LockKeys
    token: bytes
    attempt: bytes
    lifetime: float | None
    grant_timeout: float
    may_hold: list[Claim]
    sleep: float = 0.1
    deadline: float | None = None
    replicas: int = 0
    subject: Subject | None = None
    waiter: bytes = b""
    limit: int = 1
    asked_at: float = math.inf
    margin: float = 0.0
    outage_patience: float = math.inf
    unanswered: list[Unanswered] | None = None

    @property
    def chosen(self) -> bool:
        return bool(self.attempt)

    @property
    def falls_back(self) -> bool:
        """Whether the caller does not wait through a long outage."""
        return self.outage_patience < math.inf

    def left(self) -> float:
        """Seconds until the last try; an hour if there is no deadline."""
        if self.deadline is None:
            return 3600.0
        return max(0.0, self.deadline - self.margin - time.monotonic())

    def reply_until(self) -> float | None:
        """Monotonic time until when to wait for a reply; None for as long as the client does."""
        if self.deadline is None:
            return None
        # A waiter that falls back waits no longer for a frozen server than for a dead one.
        longest = max(self.outage_patience, WATCH_INTERVAL_SECONDS)
        # The operating system limits it to 24 days.
        return time.monotonic() + min(self.left(), longest, 3600.0) + LAST_TRY_SECONDS

    def with_margin(self, sent_at: float) -> "AcquireRequest":
        """The request with a margin, after a reply to a command sent at ``sent_at``: one round
        trip, but at most 2 % of the wait or 10 ms."""
        if self.deadline is None:
            return self
        trip = time.monotonic() - sent_at
        return self._replace(margin=min(trip, (self.deadline - sent_at) / 50, 0.01))

    # -- calls ------------------------------------------------------------------------------

    def acquire_call(self, waiter: bytes = b"") -> Call:
        mine = (self.token, milliseconds(self.lifetime), self.attempt)
        args = (*mine, waiter, milliseconds(WAITER_LIFETIME_SECONDS))
        if self.limit > 1:
            limited = (*args, self.limit)
            return Call(part("limit").PLACE_ACQUIRE, self.keys, limited, self.unanswered)
        return Call(ACQUIRE, self.keys, args, self.unanswered)

    @property
    def wake(self) -> bytes:
        return wake_key(self.keys.lock, self.token)

    def leave_call(self, waiter: bytes, *, try_again: bool) -> Call:
        """Stop waiting, with or without a last try; unregister ``waiter``, if given."""
        token = self.token if try_again else b""
        args = (token, milliseconds(self.lifetime), self.attempt, waiter)
        keys, unanswered = (*self.keys, self.wake), self.unanswered if try_again else None
        if self.limit > 1:
            return Call(part("limit").PLACE_LEAVE, keys, (*args, self.limit), unanswered)
        return Call(LEAVE, keys, args, unanswered)

    def take_grant_call(self, grant: Grant, waiter: bytes) -> Call:
        """Give a grant its full lifetime; unregister ``waiter``, if given."""
        own = (self.token, self.attempt, grant.fence) if self.chosen else (b"", b"", 0)
        args = (grant.token, milliseconds(self.lifetime), waiter, *own)
        if self.limit > 1 or grant.place > 1:
            return Call(part("limit").PLACE_TAKE_GRANT, self.keys, (*args, grant.place))
        return Call(TAKE_GRANT, self.keys, args)

    def unregister_call(self, waiter: bytes) -> Call:
        # No lock has the empty token, so TAKE_GRANT does nothing else.
        return self.take_grant_call(Grant(b"", 0), waiter)

    def watch_call(self, waiter: bytes, members: int = 1) -> Call:
        """Stay registered, for so many ``members`` of this process, and check whether the holder
        has vanished."""
        grant = (new_token(), milliseconds(self.grant_timeout))
        args = (waiter, milliseconds(WAITER_LIFETIME_SECONDS), *grant)
        if self.limit > 1:
            return Call(part("limit").PLACE_WATCH, self.keys, (*args, members, self.limit))
        return Call(WATCH, self.keys, args)

    def release_call(self, token: bytes, attempt: bytes = b"", place: int = 1) -> Call:
        """Release the lock if ``token``, of a grant or of this request, holds it."""
        # A place above the limit is not passed on, and no script looks for a token there.
        keys = self.keys if place == 1 else self.keys.at_place(place)
        grant = new_token(), self.grant_timeout
        return release_call(keys, token, *grant, attempt=attempt, limit=self.limit_of(place))

    def limit_of(self, place: int) -> int:
        """The limit within which ``place`` is passed on. One above this, which a process with a
        larger limit has passed on, ends with its holder."""
        return self.limit if place <= self.limit else PASSED_ON_TO_NONE

    def releases_of_unanswered(self) -> list[Unanswered]:
        """The servers on which this may yet take the lock, and how to release it there."""
        calls = self.unanswered or ()  # ACQUIRE, LEAVE: token, lifetime, attempt, …
        claims = {(server, as_bytes(c.args[0]), as_bytes(c.args[2])) for server, c in calls}
        return [(server, self.release_call(token, name)) for server, token, name in claims]

    # -- replies ----------------------------------------------------------------------------

    def until(self, sent_at: float) -> float:
        """The deadline of a lock whose lifetime was set by a command sent at ``sent_at``."""
        return math.inf if self.lifetime is None else sent_at + self.lifetime

    def acquired_by_reply(self, taken: Taken, contended: bool = False) -> Acquisition:
        place, fence, _, began, _ = taken
        until = self.until(began)
        return Acquisition(self.token, fence, began, until, self.attempt, None, contended, place)

    def acquired_by_grant(
        self, grant: Grant, arrived_at: float, until: float, pending: PendingLifetime | None = None
    ) -> Acquisition:
        token, fence, place = grant
        held_with = self.token if self.chosen else token
        return Acquisition(held_with, fence, arrived_at, until, self.attempt, pending, True, place)


def release_call(
    keys: LockKeys,
    token: bytes,
    successor: bytes,
    grant_timeout: float,
    min_hold: float = 0.0,
    fence: int = 0,
    attempt: bytes = b"",
    limit: int = 1,
) -> Call:
    """Release the lock that ``token`` holds; with ``attempt``, only if that attempt acquired it.
    ``fence``: the holder's, sent if ``min_hold`` or ``attempt`` needs it; 0 if the caller may not
    be the holder, and the attempt must be on record.
    ``limit``: the number of places that are passed on; see ``AcquireRequest.limit_of``."""
    rest = milliseconds(min_hold) if min_hold else 0
    grant = milliseconds(grant_timeout)
    since = fence if rest or attempt else 0
    args = (token, successor, grant, rest, since, attempt)
    if limit == 1:
        return Call(RELEASE, keys, args)
    return Call(part("limit").PLACE_RELEASE, keys, (*args, limit))


def parse_grant(element: bytes) -> Grant:
    """An element of the grants list; fence 0 for an invalid one, which thus counts as expired."""
    match = re.fullmatch(GRANT, element)
    if match is None:
        return Grant(element, 0)
    token, fence, place = match.groups()
    return Grant(token, int(fence), int(place or 1))
