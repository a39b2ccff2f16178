"""What a handle knows of the loss of its lock."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from redis.exceptions import RedisError

from ..exceptions import LockError, LockLost, LockNotOwnedError
from ..extension import OnUse

if TYPE_CHECKING:
    from ..protocol import Call
    from ..steps import Steps
    from .hold import Hold

causes = OnUse("locking.causes")


class Losses:
    """Of every lock object: whether its lock was lost, and why."""

    local: Any
    keys: Any
    _run: Any
    _servers: Any
    _shown: Any

    @property
    def lost(self) -> bool:
        """Whether the lock this handle acquired ended before it was released."""
        hold = self.local.hold
        return hold is not None and bool(hold.lost)

    @property
    def lost_reason(self) -> str:
        """Why the lock was lost: released by force and by whom, expired, deleted by another
        program, or Redis lost its data. Empty if it was not lost; as ``on_lost`` is called, it is
        known."""
        hold = self.local.hold
        if hold is None or not hold.lost:
            return ""
        return hold.reason or "its lifetime is over, and Redis confirmed no renewal"

    def ensure_held(self) -> None:
        """Go on only while the lock is held; no round trip.

        Raises:
            LockLost: it was acquired by this handle and is not held any more.
            LockError: this handle (in this thread or task) has not acquired it.
        """
        hold = self.local.hold
        if hold is None:
            raise LockError("The lock has not been acquired", self._shown)
        if not hold.is_valid:
            reason = self.lost_reason
            text = f"The lock is not held any more{reason and f': {reason}'}"
            raise LockLost(f"{text}; stop before doing harm", self._shown, reason=reason)

    def _not_owned(self, verb: str, reason: str) -> NoReturn:
        text = f"Cannot {verb} a lock that's no longer owned{reason and f': {reason}'}"
        raise LockNotOwnedError(text, self._shown, reason=reason)

    def _why_steps(self, call: Call, early: bool | None, hold: Hold | None) -> Steps[str]:
        """Why ``call`` did not find the lock; see ``causes.Question``."""
        if hold is not None and hold.reason:
            return hold.reason
        keys = self.keys if hold is None else hold.keys
        question, reply = causes.Question(self._servers[0], keys, call.args[0], early, hold), None
        with suppress(RedisError, OSError):
            reply = (yield self._run(question.call)).value
        reason: str = question.answer(reply)
        return reason
