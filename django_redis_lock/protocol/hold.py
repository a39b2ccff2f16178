"""One acquisition: its token, its fence, and until when it counts. No input or output here.

A hold's deadline is kept on this machine's monotonic clock and reckoned from the moment *before*
the command that set the lifetime was sent, so it never lies after the server's. Past it the hold
reports itself lost, whatever the server says (invariant S5).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from .. import events
from ..events import Lost, Subject
from ..notices import get_logger
from .keys import LockKeys
from .owner import Owner, encodable, fingerprint, hostname, process_id

logger = get_logger("django_redis_lock.lost")
held_logger = get_logger("django_redis_lock.held")

BROKEN = "on_lost failed: %r"


class Hold:
    """What is known of one acquisition of one lock, shared by its handle and the keeper.

    Attributes:
        token, fence, keys: what was acquired.
        attempt: what tells this acquisition from another's with the same chosen token.
        lifetime: seconds the lock was given, None without end.
        deadline: monotonic time until which it counts as held.
        began: monotonic time of the acquisition.
        renews_until: monotonic time after which it is renewed no more; -inf if never renewed.
        label, thread: what for and by whom it was taken, for the admin.
        subject: the lock, for those who want to hear of its loss.
        warns_at: monotonic time at which the log is told that it is held long; inf for never.
        ended: released, lost or handed to somebody else; the keeper lets go of it.
    """

    __slots__ = (
        "_heard_at",
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
        self._heard_at = -math.inf
        self._mutex = threading.Lock()
        #: Asks for an answer that may already have come; set for a lock got by a grant.
        self.confirm_pending: Callable[[bool], None] | None = None
        #: That answer.
        self.pending: Any = None

    def owner(self) -> Owner:
        """Who holds the lock, as it is written beside it."""
        since = self.fence / 1e6
        name = fingerprint(self.token)
        thread, label = encodable(self.thread), encodable(self.label)
        return Owner(name, hostname(), self.pid, thread, label, since, process_id())

    @property
    def from_parent_process(self) -> bool:
        """Whether this is a parent process's hold, seen by a forked child."""
        return self.pid != os.getpid()

    @property
    def by_this_thread(self) -> bool:
        """Whether it was this thread that took it."""
        return self._thread_id == threading.get_ident()

    @property
    def lost(self) -> bool:
        """Whether the lock ended while its holder still counted on it."""
        if self.ended:
            return self._lost
        if self.now() < self.deadline:
            return False
        self.confirm()
        # Meanwhile the keeper may have found out, too.
        return self._lost if self.ended else self.now() >= self.deadline

    @property
    def is_valid(self) -> bool:
        """Whether the lock may be taken to be held by this process right now."""
        return not self.ended and not self.from_parent_process and not self.lost

    @property
    def released(self) -> bool:
        """Whether the holder has released it, or has tried to."""
        return self.ended and not self._lost

    def held_until(self, deadline: float, asked_at: float) -> None:
        """The server has confirmed, to what was sent at ``asked_at``, a lifetime that ends at
        ``deadline`` (both monotonic).

        Of two commands that were under way together nobody knows which the server carried out
        last. The shorter lifetime counts then, until the keeper has asked again.
        """
        with self._mutex:
            if asked_at < self._heard_at:
                deadline = min(deadline, self.deadline)
            if not self.ended:
                self.deadline, self._heard_at = deadline, self.now()

    def confirm_with(self, ask: Callable[[bool], float | None]) -> None:
        """The full lifetime is not confirmed yet; ``ask`` knows (``PendingLifetime.confirm``)."""

        def ask_now(wait: bool) -> None:
            until = ask(wait)
            if until is None:
                return
            self.confirm_pending = None
            if until == -math.inf:
                self.lose("the grant was over before it could be taken up")
            else:
                self.held_until(until, self.began)

        self.confirm_pending = ask_now

    def confirm(self, wait: bool = False) -> None:
        """Take note of the answer about the full lifetime, if there is one to come."""
        ask = self.confirm_pending
        if ask is not None:
            ask(wait)

    def end(self) -> None:
        """The holder has given it up."""
        self.ended = True

    def warn(self) -> None:
        """Say that it is held long, once."""
        self.warns_at = math.inf
        held_logger.warning(
            "The lock %s has been held for %.1f s by now (fence %d, thread %s%s)",
            printable(self.keys.lock),
            self.now() - self.began,
            self.fence,
            printable(self.thread.encode(errors="replace")),
            self.label and f", {printable(self.label.encode(errors='replace'))}",
        )

    def lose(self, reason: str) -> bool:
        """Tell the holder, once, that the lock is not its own any more. Returns whether that was
        news."""
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
    """``on_lost`` as the keeper can call it: however long it takes, and whatever it raises, the
    process's other locks are renewed meanwhile."""

    def run() -> None:
        try:
            on_lost()
        except BaseException:  # Also sys.exit(), which Python would pass over in silence.
            logger.exception(BROKEN, on_lost)

    return threading.Thread(target=run, name="django_redis_lock on_lost", daemon=True).start


def printable(name: bytes, limit: int = 120) -> str:
    """A lock's name for a log line: one line, not too long."""
    text = name.decode(errors="backslashreplace")
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"
