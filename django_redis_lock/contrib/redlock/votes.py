"""Votes: how each of several servers gives and keeps its part of a lock, and what their replies
mean together.

The holder has the lock on more than half of the servers, until the deadline that more than half of
them have confirmed. A server's clock may run faster than ours, so each lifetime is shortened by a
hundredth and two milliseconds (Salvatore Sanfilippo, "Distributed Locks with Redis").
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...clock import time
from ...exceptions import TooFewServers
from ...locking import Hold, Renewal
from ...protocol import (
    EXTEND,
    Acquisition,
    Call,
    Extended,
    LockKeys,
    Refused,
    Taken,
    as_bytes,
    fingerprint,
    parse_acquire,
    parse_renew,
    script,
)
from ...protocol.holder_scripts import HEARTBEATS, HELD
from ...protocol.holders import MAX_FENCE, HeldReply, bounded
from ...protocol.keys import quorum_fence_key
from ...protocol.lock_scripts import RENEW
from ...protocol.script import Unanswered
from ...threads import get_logger
from ...transport import Server, is_refusal, may_have_run

if TYPE_CHECKING:
    from ...protocol import Reply

logger = get_logger("django_redis_lock.keeper")

#: Take one server's part of the lock, as ACQUIRE does, with a fence of at least ``floor``. Redis
#: out of memory does not refuse it: only one server grants the lock to a waiter, who takes the
#: other servers with this script.
#:
#: KEYS  lock keys, then the quorum's fence
#: ARGV  token, lifetime, attempt, floor
#: returns {1, fence, server time in microseconds, vanished()}
#:         or {0, the holder's remaining lifetime as PTTL gives it, server time in microseconds}
#: atomic for the same reason as ACQUIRE.
VOTE = script("""
redis.call('PEXPIRE', KEYS[6], '86400000')  -- Never refused, so the rest is not either.
local holder = redis.call('GET', KEYS[1])
if not is_takeable(holder, ARGV[1], ARGV[3]) then return {0, redis.call('PTTL', KEYS[1]), now()} end
local fence = math.max(fence_after(redis.pcall('GET', KEYS[6])), tonumber(ARGV[4]))
redis.call('SET', KEYS[6], string.format('%d', fence), 'PX', '86400000')
local gone = set_lock(ARGV[1], ARGV[2], holder)
if ARGV[3] ~= '' then describe_taken(ARGV[2], 'attempt', ARGV[3]) end
return {1, fence, now(), gone}
""")


def vote_call(
    keys: LockKeys,
    token: bytes,
    lifetime: int,
    attempt: bytes,
    floor: int,
    unanswered: list[Unanswered] | None = None,
) -> Call:
    args = (token, lifetime, attempt, floor)
    return Call(VOTE, (*keys, quorum_fence_key(keys.lock)), args, unanswered)


#: What one server has replied, or the error of the call.
Vote = Taken | Refused | Exception


def majority(servers: int) -> int:
    return servers // 2 + 1


def drift(lifetime: float) -> float:
    """Seconds by which clocks may differ at the end of ``lifetime`` seconds."""
    return 0.0 if math.isinf(lifetime) else lifetime * 0.01 + 0.002


class QuorumAcquisition(Acquisition):
    """A lock on several servers. ``votes``: until when each holds it for this caller (monotonic;
    -inf: not at all)."""

    votes: tuple[float, ...] = ()


class Ballot:
    """One round of VOTE: the replies or errors by place, in the order in which all callers wait for
    the places."""

    def __init__(
        self, servers: int, votes: Mapping[int, Vote], sent_at: float, lifetime: float | None
    ) -> None:
        #: Of the servers that granted the lock.
        self.fences = {p: vote.fence for p, vote in votes.items() if isinstance(vote, Taken)}
        self.refused = [p for p, vote in votes.items() if isinstance(vote, Refused)]
        self.errors = {p: vote for p, vote in votes.items() if isinstance(vote, Exception)}
        self._needed = majority(servers)
        self._first = next((p for p in votes if p not in self.errors), None)
        whole = math.inf if lifetime is None else lifetime
        self.sent_at = sent_at
        self.deadline = sent_at + whole - drift(whole)
        self.votes = tuple(self.deadline if p in self.fences else -math.inf for p in range(servers))

    @property
    def too_few(self) -> bool:
        return len(self.fences) + len(self.refused) < self._needed

    @property
    def passes(self) -> bool:
        """Whether a majority has answered, of which some refuse for now."""
        refusing = sum(map(is_refusal, self.errors.values()))
        return len(self.fences) + len(self.refused) + refusing >= self._needed

    @property
    def won(self) -> bool:
        """In time, on a majority, and on the first server in order that can be reached, which keeps
        a new caller from overtaking waiters there."""
        in_time = time.monotonic() < self.deadline
        return in_time and len(self.fences) >= self._needed and self._first in self.fences

    @property
    def fence(self) -> int:
        """Greater than every earlier one, because a majority stores it, and majorities overlap."""
        return max(self.fences.values())

    @property
    def stored(self) -> bool:
        """Whether no later fence can be smaller."""
        return sum(fence >= self.fence for fence in self.fences.values()) >= self._needed


class QuorumHold(Hold):
    """One acquisition of a lock on several servers."""

    def begin(self, granted: Acquisition, keys: LockKeys, limit: int = 1) -> None:
        super().begin(granted, keys, limit)
        assert isinstance(granted, QuorumAcquisition)
        self.votes = list(granted.votes)
        self._answered_at = [-math.inf] * len(self.votes)

    @property
    def least_fence(self) -> int:
        return 0  # Its fence is the greatest of several servers'.

    def vote(self, place: int, deadline: float, asked_at: float) -> None:
        """The server at ``place`` has replied to a request sent at ``asked_at`` that it holds the
        lock for this caller until ``deadline`` (both monotonic; -inf: it does not). Of two
        concurrent requests the shorter lifetime counts, as in ``Hold.note_deadline``."""
        with self._mutex:
            if asked_at < self._answered_at[place]:
                deadline = min(deadline, self.votes[place])
            self.votes[place], self._answered_at[place] = deadline, time.monotonic()
            if not self.ended:
                self.deadline = sorted(self.votes)[-majority(len(self.votes))]


class VotedRenewal(Renewal):
    """Renews a hold on the server at ``place``. To one that does not have the lock, VOTE is sent
    again, so that the servers can be restarted one after the other while a lock is held; but not at
    once, because a forced release ends the lock on one server after the other."""

    hold: QuorumHold
    _requesting_vote = False
    #: Whether VOTE may be carried out later: there was no reply to it.
    _may_come_late = False
    _votes_again_at = -math.inf

    def __init__(self, server: Server, hold: QuorumHold, place: int) -> None:
        super().__init__(server, hold)
        self._place = place

    def call(self, now: float) -> Call | None:
        renewal, hold = super().call(now), self.hold
        self._requesting_vote = False
        wanted = self._wanted(now)
        has_vote = hold.votes[self._place] > -math.inf
        if renewal is None or not wanted or has_vote or now < self._votes_again_at:
            return renewal
        self._requesting_vote = True
        return vote_call(hold.keys, hold.token, max(wanted, 0), hold.attempt, hold.fence)

    def replied(self, value: Reply, sent_at: float) -> None:
        hold, early = self.hold, sent_at < self.hold.votes[self._place]
        reply = (parse_acquire if self._requesting_vote else parse_renew)(value, sent_at)
        if reply is None or isinstance(reply, Refused):
            self.described = None  # It has no description.
            if self._requesting_vote or hold.votes[self._place] > -math.inf:
                self._votes_again_at = sent_at + self._interval
            hold.vote(self._place, -math.inf, sent_at)
            if hold.deadline == -math.inf and reply is None:
                self._refused(value, early)
                return
        else:
            whole = sent_at + (hold.lifetime or math.inf)
            until = whole if isinstance(reply, Taken) else reply
            hold.vote(self._place, until - drift(until - sent_at), sent_at)
            if hold.ended and self._requesting_vote:
                # The vote has arrived after the release.
                hold.release_later(self.server, 2.0)
            elif not self._requesting_vote:
                self._note_described()
        self.schedule(sent_at)

    def failed(self, error: Exception, now: float) -> None:
        # Not a warning: the lock is held as long as a majority replies.
        words = "Could not renew the lock %(lock)s: %(error)s"
        logger.info(words, self.hold.log_fields(error=error))
        self._may_come_late |= self._requesting_vote and may_have_run(error)
        if self.hold.ended:
            self.stop()
        self._try_again(now)

    def stop(self) -> None:
        super().stop()
        if self._may_come_late:
            self.hold.release_later(self.server, 2.0, late=True)

    def schedule(self, last: float) -> None:
        super().schedule(last)
        if self.due <= last:
            self.due = last + self._interval


def merged(call: Call, answers: Mapping[int, Reply], servers: int, name: str | bytes) -> object:
    """The reply to ``call`` of a majority of servers; or TooFewServers is raised."""
    needed = majority(servers)
    replies = [a for a in answers.values() if not isinstance(a, Exception)]
    if len(replies) < needed:
        raise too_few(answers, servers, name)
    if call.script is HELD:
        return _held(replies, needed)
    if call.script is HEARTBEATS:
        return min(replies, key=lambda reply: int(reply[0]) - (bounded(reply[1], MAX_FENCE) or 0))
    if call.script is RENEW:  # Why it is lost: a forced release is recorded where the lock was.
        return next((reply for reply in replies if b'"reset"' in as_bytes(reply)), replies[0])
    if call.script is EXTEND:
        outcomes = Extended.DONE, Extended.NO_LIFETIME
        return next((n for n in outcomes if replies.count(n) >= needed), Extended.NOT_OWNED)
    # A release: a server that is down has not refused it.
    return int(sum(not reply for reply in replies) < needed)


def _held(replies: Sequence[Reply], needed: int) -> HeldReply | None:
    """The reply to HELD about the holder that a majority names."""
    by_token: dict[bytes, list[HeldReply]] = {}
    for reply in replies:
        if reply is not None:
            held = HeldReply(*reply)
            by_token.setdefault(as_bytes(held.token), []).append(held)
    for token, of_it in by_token.items():
        if len(of_it) >= needed:
            ends = sorted(math.inf if held.pttl < 0 else held.pttl for held in of_it)[-needed]
            id = fingerprint(token).encode()
            described = next((r for r in of_it if id in map(as_bytes, r.fields)), of_it[0])
            return described._replace(token=token, pttl=-1 if math.isinf(ends) else int(ends))
    return None


def too_few(answers: Mapping[int, Reply], servers: int, name: str | bytes) -> TooFewServers:
    errors = [e for e in answers.values() if isinstance(e, Exception)]
    return TooFewServers(servers - len(errors), servers, errors, name)
