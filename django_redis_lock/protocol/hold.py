"""One acquisition: its token, its fence and its deadline. No input or output here.

The deadline is on this machine's monotonic clock, and starts *before* the command that set the
lifetime was sent, so it is never later than the server's. After it the hold is lost, whatever the
server says (invariant S5).
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from typing import Any

from .. import events
from ..clock import time
from ..events import Lost, Subject
from ..notices import get_logger
from .keys import LockKeys
from .owner import Owner, encodable, fingerprint, hostname, process_id

logger = get_logger("django_redis_lock.lost")
held_logger = get_logger("django_redis_lock.held")

BROKEN = "on_lost failed: %r"


class Hold:
    """One acquisition of one lock, shared by the lock object and the keeper.

    Attributes:
        token, fence, keys: what was acquired.
        attempt: identifies this acquisition among others with the same chosen token.
        lifetime: seconds, None without end.
        deadline: monotonic time until which it counts as held.
        began: monotonic time of the acquisition.
        renews_until: monotonic time at which renewal ends; -inf if never renewed.
        label, thread: of the acquisition, for the admin.
        subject: the lock, for events.
        warns_at: monotonic time of the warning that it is still held; inf for never.
        ended: released, lost or reset; the keeper stops renewing it.
    """

    __slots__ = (
        "_confirmed_at",
        "_lost",
        "_mutex",
        "_thread_id",
        "attempt",
        "began",
        "confirm_pending",
        "deadline",
        "ended",
        "fence",
        "keys",
        "label",
        "lifetime",
        "now",
        "on_lost",
        "pending",
        "pid",
        "renews_until",
        "subject",
        "thread",
        "token",
        "warns_at",
    )

    def __init__(
        self,
        keys: LockKeys,
        token: bytes,
        fence: int,
        *,
        began: float,
        deadline: float,
        lifetime: float | None,
        attempt: bytes = b"",
        renew: bool = False,
        max_hold: float | None = None,
        label: str = "",
        on_lost: Callable[[], Any] | None = None,
        subject: Subject | None = None,
        warns_at: float = math.inf,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keys = keys
        self.token = token
        self.fence = fence
        self.attempt = attempt
        self.began = began
        self.deadline = deadline
        self.lifetime = lifetime
        self.renews_until = began + (max_hold or math.inf) if renew else -math.inf
        self.label = label
        self.thread = threading.current_thread().name
        self._thread_id = threading.get_ident()
        self.on_lost = on_lost
        self.subject = subject
        self.warns_at = warns_at
        self.now = now
        self.pid = os.getpid()
        self.ended = False
        self._lost = False
        self._confirmed_at = -math.inf
        self._mutex = threading.Lock()
        #: Reads the reply that confirms a grant, if it has arrived; None if there is none to come.
        self.confirm_pending: Callable[[bool], None] | None = None
        #: That reply.
        self.pending: Any = None

    def owner(self) -> Owner:
        """The description of the holder, as it is stored in Redis."""
        since = self.fence / 1e6
        name = fingerprint(self.token)
        thread, label = encodable(self.thread), encodable(self.label)
        return Owner(name, hostname(), self.pid, thread, label, since, process_id())

    @property
    def from_parent_process(self) -> bool:
        """Whether this process is a forked child, and its parent holds the lock."""
        return self.pid != os.getpid()

    @property
    def by_this_thread(self) -> bool:
        """Whether this thread acquired it."""
        return self._thread_id == threading.get_ident()

    @property
    def lost(self) -> bool:
        """Whether the lock ended before its holder released it."""
        if self.ended:
            return self._lost
        if self.now() < self.deadline:
            return False
        self.confirm()
        # The keeper may have ended it at the same time.
        return self._lost if self.ended else self.now() >= self.deadline

    @property
    def is_valid(self) -> bool:
        """Whether this process certainly holds the lock now."""
        return not self.ended and not self.from_parent_process and not self.lost

    @property
    def released(self) -> bool:
        """Whether the holder has released it, or has tried to."""
        return self.ended and not self._lost

    def held_until(self, deadline: float, asked_at: float) -> None:
        """The reply to a command sent at ``asked_at`` has confirmed a lifetime that ends at
        ``deadline`` (both monotonic).

        The order in which the server executed two concurrent commands is unknown, so the shorter
        lifetime counts until the next renewal.
        """
        with self._mutex:
            if asked_at < self._confirmed_at:
                deadline = min(deadline, self.deadline)
            if not self.ended:
                self.deadline, self._confirmed_at = deadline, self.now()

    def confirm_with(self, ask: Callable[[bool], float | None]) -> None:
        """Confirm the full lifetime later, by ``ask`` (``PendingLifetime.confirm``)."""

        def ask_now(wait: bool) -> None:
            until = ask(wait)
            if until is None:
                return
            self.confirm_pending = None
            if until == -math.inf:
                self.lose("the grant expired before it could be taken")
            else:
                self.held_until(until, self.began)

        self.confirm_pending = ask_now

    def confirm(self, wait: bool = False) -> None:
        """Read the reply that confirms the full lifetime, if one is to come."""
        ask = self.confirm_pending
        if ask is not None:
            ask(wait)

    def end(self) -> None:
        """The holder has released it."""
        self.ended = True

    def warn(self) -> None:
        """Log once that it is still held."""
        self.warns_at = math.inf
        held_logger.warning(
            "The lock %s has been held for %.1f s (fence %d, thread %s%s)",
            printable(self.keys.lock),
            self.now() - self.began,
            self.fence,
            printable(self.thread.encode(errors="replace")),
            self.label and f", {printable(self.label.encode(errors='replace'))}",
        )

    def lose(self, reason: str) -> bool:
        """End the hold as lost: log it, emit the event and call ``on_lost``. Returns False if it
        had already ended."""
        with self._mutex:
            if self.ended or self._lost:
                return False
            self._lost = self.ended = True
        held = self.now() - self.began
        logger.error(
            "Lost the lock %s (fence %d, held for %.3f s): %s",
            printable(self.keys.lock),
            self.fence,
            held,
            reason,
        )
        if events.listeners and self.subject is not None:
            events.emit(Lost(self.subject, held, reason, self.fence))
        if self.on_lost is not None:
            try:
                self.on_lost()
            except Exception:
                logger.exception(BROKEN, self.on_lost)
        return True


def in_a_thread(on_lost: Callable[[], Any]) -> Callable[[], None]:
    """A function that runs ``on_lost`` in a new thread, so that it does not delay the keeper."""

    def run() -> None:
        try:
            on_lost()
        except BaseException:  # Also sys.exit(), which Python would ignore.
            logger.exception(BROKEN, on_lost)

    return threading.Thread(target=run, name="django_redis_lock on_lost", daemon=True).start


def printable(name: bytes, limit: int = 120) -> str:
    """A lock's name for a log line: one line, not too long."""
    text = name.decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
