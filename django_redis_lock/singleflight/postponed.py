"""A computation whose last part comes after its caller has returned, such as a response that is
rendered later."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..clock import time
from ..keeper import keeper
from .runners import Runner, Steps

if TYPE_CHECKING:
    from .leader import Leader


class Postponed(BaseException):
    """Raised by a producer whose value will be complete later, perhaps in another thread: the
    flight goes on for its timeout, and longer with ``renew``, until ``resumed`` or ``drop``."""

    leader: Leader | None = None

    def renew(self) -> None:
        """The rest of the computation begins: the keeper renews the flight."""
        for renewal in self.leader.renewals if self.leader else ():
            renewal.due = time.monotonic()
            keeper().add(renewal)

    def resumed(self, runner: Runner, compute: Callable[[], Any]) -> Steps:
        """End the flight with what ``compute`` returns, or as its exception says. (Without a
        leader, Redis was down when the computation began.)"""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.resume(runner, compute)

    def fail(self) -> Steps:
        """End the flight without a value; also without a leader."""
        if self.leader is not None:
            leader, self.leader = self.leader, None
            yield from leader.fail()

    def drop(self) -> None:
        """End the flight without a value: the rest of the computation will never begin. The garbage
        collector may call this, so the keeper does it."""
        if self.leader is not None:
            self.leader.end_later()
            self.leader = None
