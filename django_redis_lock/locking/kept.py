"""What a handle asks the keeper to do for its holder."""

from __future__ import annotations

from typing import Any

from .calls import may_have_run
from .grants import Granted, Request
from .hold import Hold
from .keeper import keeper
from .renewal import Abandoned, Renewal
from .scripts import Call
from .server import Server, server_of

__all__ = ["Kept"]


class Kept:
    """The part of ``Handle`` that deals with the keeper."""

    redis: Any
    timeout: float | None
    local: Any
    _hold_class = Hold

    def _server(self) -> Server | None:
        """Where the lock is kept."""
        return server_of(self.redis)

    def _won(self, granted: Granted) -> Hold:
        raise NotImplementedError

    def _keep(self, granted: Granted) -> Hold:
        """The lock is ours: note it, and have it renewed and described."""
        hold = self._won(granted)
        self.local.renewal = renewal = Renewal(server_of(self.redis), hold)
        keeper().add(renewal)
        return hold

    def _stop_keeping(self) -> None:
        if self.local.hold is not None:
            self.local.hold.end()
            keeper().discard(self.local.renewal)

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        """The holder has had the lifetime changed by what was sent at ``asked_at``."""
        hold.held_until(deadline, asked_at)
        keeper().reschedule(self.local.renewal, asked_at)

    def _forget(self, released: bool) -> None:
        """The server has answered: the token is of no use any more."""
        renewal, self.local.token, self.local.renewal = self.local.renewal, None, None
        if released and renewal is not None:
            renewal.tell("released")

    def _abandon(self, request: Request, error: BaseException) -> None:
        """The request may have been carried out without our hearing of it."""
        if may_have_run(error):
            own = request.give_back(request.token)
            keeper().add(Abandoned(server_of(self.redis), own, request.lifetime))

    def _leave_to_keeper(self, release: Call) -> None:
        """Whoever is told to stop (cancelled, interrupted) while it releases, releases all the
        same: perhaps nothing was sent yet."""
        keeper().add(Abandoned(server_of(self.redis), release, self.timeout))
        self.local.token = self.local.renewal = None
