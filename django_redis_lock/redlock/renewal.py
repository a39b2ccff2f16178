"""What the keeper does for the holder of a lock on several servers: one job for each of them."""

from __future__ import annotations

import math
from typing import Any

from ..keeper import keeper
from ..locking import DeferredRelease, Renewal
from ..notices import get_logger
from ..protocol import Call, new_token, printable, release_call
from ..transport import Server
from .scripts import VOTE
from .votes import QuorumHold, drift

__all__ = ["VotedRenewal"]

logger = get_logger("django_redis_lock.keeper")


class VotedRenewal(Renewal):
    """Keeps one hold alive on the server at ``place``. A server that does not hold the lock for us
    was down when we took it, or has lost its data: it is asked for its vote again, so that the
    servers may be restarted one after the other while a lock is held."""

    hold: QuorumHold

    def __init__(self, server: Server, hold: QuorumHold, place: int) -> None:
        self._place = place
        self._requesting_vote = False
        super().__init__(server, hold)

    def call(self, now: float) -> Call | None:
        renewal, hold = super().call(now), self.hold
        self._requesting_vote = False
        wanted = self._wanted(now)
        if renewal is None or not wanted or hold.votes[self._place] > -math.inf:
            return renewal
        self._requesting_vote = True
        return Call(VOTE, hold.keys, (hold.token, max(wanted, 0), hold.attempt, hold.fence))

    def answered(self, value: Any, sent_at: float) -> None:
        hold = self.hold
        if self._requesting_vote:
            left = (hold.lifetime or math.inf) * 1000 if int(value[0]) else -2.0
        else:
            left = math.inf if int(value) == -1 else float(value)
            self._renewals += 1
        if left < 0:
            self.named = False
            hold.vote(self._place, -math.inf, sent_at)
            if hold.deadline == -math.inf:
                self._lose("most of its servers do not hold it any more")
                return
        else:
            hold.vote(self._place, sent_at + left / 1000 - drift(left / 1000), sent_at)
            if hold.ended and self._requesting_vote:
                self._give_back()
            elif not self._requesting_vote:
                self._described()
        self._schedule(sent_at)

    def _give_back(self) -> None:
        """The vote came after the lock was released."""
        hold = self.hold
        call = release_call(hold.keys, hold.token, new_token(), 2.0, attempt=hold.attempt)
        keeper().add(DeferredRelease(self.server, call, hold.lifetime))

    def failed(self, error: Exception, now: float) -> None:
        # No warning: the lock is held while most of the others answer.
        logger.info("Could not renew the lock %s: %s", printable(self.hold.keys.lock), error)
        self._try_again(now)

    def _schedule(self, last: float) -> None:
        super()._schedule(last)
        if self.due <= last:
            self.due = last + self._third
