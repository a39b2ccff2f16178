"""What a handle asks the keeper to do for its holder."""

from __future__ import annotations

from typing import Any

from ..exceptions import TooFewReplicas
from ..keeper import keeper
from ..protocol import AcquireRequest, Acquisition, Call, Hold
from ..transport import Server, may_have_run, server_of
from .renewal import DeferredRelease, Renewal, Renewals
from .replication import Confirmed
from .waiting import unregister

__all__ = ["LockRenewal"]


class LockRenewal:
    """The part of ``BaseLock`` that deals with the keeper."""

    redis: Any
    name: str | bytes
    timeout: float | None
    replicas: int
    grant_timeout: float
    min_hold: float
    local: Any
    _hold_class = Hold

    def _server(self) -> Server | None:
        """Where the lock is kept."""
        return server_of(self.redis)

    def _won(self, granted: Acquisition) -> Hold:
        raise NotImplementedError

    def _owned_token(self, verb: str) -> bytes:
        raise NotImplementedError

    def _release(self, token: bytes) -> Call:
        raise NotImplementedError

    def _keep(self, granted: Acquisition) -> Hold:
        """The lock is ours: note it, and have it renewed and described."""
        hold = self._won(granted)
        self.local.renewal = Renewals(Renewal(server_of(self.redis), hold))
        return hold

    def _entered(self) -> None:
        """The lock was taken by ``with``."""
        if self.local.renewal is not None:  # There is none for a lock taken without Redis.
            self.local.renewal.entered(self.grant_timeout, self.min_hold)

    def _stop_keeping(self) -> None:
        hold, renewal = self.local.hold, self.local.renewal
        if hold is not None:
            hold.end()
        if renewal is not None:
            renewal.discard()

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        """The holder has had the lifetime changed by what was sent at ``asked_at``."""
        hold.held_until(deadline, asked_at)
        if self.local.renewal is not None:
            self.local.renewal.reschedule(asked_at)

    def _forget(self, before: tuple[Any, Any, Any], released: bool) -> None:
        """The server has answered: the token of ``before``, the state at the call, is of no use any
        more."""
        _, hold, renewal = before
        if self.local.hold is hold:  # Or somebody who shares this handle has the lock by now.
            self.local.token = self.local.renewal = None
        if released and renewal is not None:
            renewal.emit("released")

    def _abandon(self, request: AcquireRequest, error: BaseException) -> None:
        """The call of ``acquire`` ends with ``error``: release whatever Redis may have given to it,
        also if the reply was lost, or an interrupt came before it was noted."""
        sent = may_have_run(error)
        if sent and request.waiter:
            unregister(server_of(self.redis), request)
        unsent = None if sent else (request.token, request.attempt)
        for noted in request.may_hold:
            if noted != unsent:
                self._hand_over(request.give_back(*noted))

    def _judge(self, found: Confirmed) -> None:
        """Raises:
        TooFewReplicas: so few have the lock that it does not count."""
        confirmed = found.replicas if found.held else 0
        if confirmed < self.replicas:
            raise TooFewReplicas(confirmed, self.replicas, self.name)

    def _state(self) -> tuple[Any, Any, Any]:
        """What this thread or task knows through this handle."""
        return self.local.token, self.local.hold, self.local.renewal

    def _undo(self, before: tuple[Any, Any, Any]) -> None:
        """An acquisition that its caller will never hear of was none."""
        local = self.local
        hold: Hold | None = local.hold
        if hold is None or hold is before[1] or not hold.by_this_thread:
            return  # It was not noted, or the lock is another thread's, which shares this handle.
        hold.end()
        if local.renewal is not before[2]:
            local.renewal.discard()
        local.token, local.hold, local.renewal = before

    def _leave_to_keeper(self) -> None:
        """Whoever is told to stop (cancelled, interrupted) while it releases, releases all the
        same: perhaps nothing was sent yet."""
        hold: Hold | None = self.local.hold
        if self.local.token is None or (hold is not None and hold.from_parent_process):
            return
        if hold is not None and hold.is_valid and not hold.by_this_thread:
            return  # That of another thread, which shares this handle, and has it after us.
        release = self._release(self._owned_token("release"))
        self._stop_keeping()
        self._hand_over(release)
        self.local.token = self.local.renewal = None

    def _hand_over(self, release: Call) -> None:
        keeper().add(DeferredRelease(server_of(self.redis), release, self.timeout))
