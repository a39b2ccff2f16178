"""What the lock scripts must do to one lock, in plain Python: a reference for the real scripts.

Every method is one script, or one thing that may happen to a key by itself. A method returns what
the script must answer; the attributes are what Redis must hold afterwards. Times are monotonic
seconds of this process, ``inf`` for a key without a lifetime.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

__all__ = ["DAY", "LockReference"]

DAY = 86400.0


@dataclass
class LockReference:
    """One lock and its companion keys.

    Attributes:
        until: when each key that exists expires, by its part of the name (``lock`` for the lock).
        waiters: until when each registered waiter counts as alive.
        fence: the last one, as the index has it; None if it has none.
        last_fence: the greatest fence given out, which no script may fall behind.
        fences: how many were given out.
        index: when each lock on the index ends. Locks that ended without a release are left out:
            any script may drop them.
    """

    alive: float
    token: bytes | None = None
    grant: tuple[bytes, int] | None = None
    waiters: dict[bytes, float] = field(default_factory=dict)
    fence: int | None = None
    last_fence: int = 0
    fences: int = 0
    owner: dict[bytes, bytes] = field(default_factory=dict)
    index: dict[bytes, float] = field(default_factory=dict)
    until: dict[str, float] = field(default_factory=dict)
    name: bytes = b""

    # -- the scripts ---------------------------------------------------------------------------

    def acquire(self, token: bytes, lifetime: float, attempt: bytes, waiter: bytes) -> bool:
        got = self._try(token, lifetime, attempt)
        if not got and waiter:
            self._register(waiter)
        return got

    def leave(self, token: bytes, lifetime: float, attempt: bytes, waiter: bytes) -> bool:
        self._unregister(waiter)
        return bool(token) and self._try(token, lifetime, attempt)

    def take_grant(
        self,
        granted: bytes,
        lifetime: float,
        waiter: bytes,
        token: bytes,
        attempt: bytes,
        fence: int,
    ) -> bool:
        """``token``: what to hold the lock with, and then ``attempt`` and ``fence`` go with it."""
        self._unregister(waiter)
        if self.token != granted:
            return False
        if token:
            self.token = token
        self._lives(lifetime)
        if token:
            self._keep_attempt(attempt, b"%d" % fence)
        return True

    def release(
        self, token: bytes, successor: bytes, grant: float, rest: float, attempt: bytes
    ) -> bool:
        """``rest``: what is left of ``min_hold``."""
        if self.token is None:
            return False
        if self.token != token:
            return self.token == successor
        if not self._is_mine(token, attempt):
            return False
        if rest > 0:
            self._set_lock(successor, rest)
            self.owner = {b"rests": successor}
            self.until["owner"] = time.monotonic() + rest
        else:
            self._pass_on(successor, grant)
        return True

    def reset(self, successor: bytes, grant: float, token: bytes, fence: int) -> bool:
        if self.token is None:
            self.index.pop(self.name, None)
            return False
        if token != self.token or fence < int(self.owner.get(b"fence", 0)) or self.untaken:
            return False
        self._pass_on(successor, grant)
        return True

    def renew(
        self, token: bytes, lifetime: float, attempt: bytes, fields: dict[bytes, bytes]
    ) -> bool:
        """``lifetime``: 0 to leave it as it is."""
        if not self._is_mine(token, attempt):
            return False
        now = time.monotonic()
        ends = self.until["lock"]
        if lifetime and lifetime * 0.99 > ends - now:
            self._lives(lifetime)
        else:
            self.index[self.name] = ends
        self.owner = {**self.owner, **fields, b"seen": b""}
        self._describe()
        return True

    def extend(
        self, token: bytes, seconds: float, replace: bool, attempt: bytes, name: bytes
    ) -> int:
        if not self._is_mine(token, attempt):
            return 0
        if replace:
            self._lives(seconds)
            if self.owner:
                self._describe()
            return 1
        if self.until["lock"] == math.inf:
            return -1
        if self.owner.get(b"extension") != name:
            self._lives(self.until["lock"] - time.monotonic() + seconds)
            self.owner = {**self.owner, b"extension": name}
            self._describe()
        return 1

    def watch(self, waiter: bytes, successor: bytes, grant: float) -> bool:
        """Returns whether a grant lies on the list."""
        self._register(waiter)
        if self.token is None:
            self._grant(successor, grant)
        return self.untaken

    # -- what happens otherwise ----------------------------------------------------------------

    def pop(self) -> tuple[bytes, int] | None:
        """A waiter's blocking pop gets the grant."""
        grant, self.grant = self.grant, None
        self.until.pop("grants", None)
        return grant

    def vanish(self, part: str) -> None:
        """A key expires, is evicted or deleted."""
        self.until.pop(part, None)
        if part == "lock":
            self.token = None
        elif part == "grants":
            self.grant = None
        elif part == "waiters":
            self.waiters.clear()
        elif part == "fence":
            self.fence = None
        elif part == "owner":
            self.owner = {}
        elif part == "index":
            self.index.clear()
            self.fence = None

    # -- what is known -------------------------------------------------------------------------

    @property
    def untaken(self) -> bool:
        return self.token is not None and self.grant is not None and self.grant[0] == self.token

    @property
    def ended(self) -> float | None:
        """When the lifetime of a holder was over who has gone without a release."""
        if self.token is not None or not self.owner:
            return None
        return min(time.monotonic(), self.until["owner"] - DAY)

    def fence_given(self, fence: int) -> None:
        """A script has given out this fence."""
        assert fence > self.last_fence
        self.fence = self.last_fence = fence
        if b"fence" in self.owner:
            self.owner = {**self.owner, b"fence": b"%d" % fence}

    # -- what scripts share --------------------------------------------------------------------

    def _is_mine(self, token: bytes, attempt: bytes) -> bool:
        known = self.owner.get(b"attempt", attempt) if attempt else attempt
        return self.token == token and known == attempt

    def _try(self, token: bytes, lifetime: float, attempt: bytes) -> bool:
        mine = self.token == token and (not attempt or self.owner.get(b"attempt") == attempt)
        if self.token is not None and not self.untaken and not mine:
            return False
        self._set_lock(token, lifetime)
        self.fences += 1
        if attempt:
            self._keep_attempt(attempt, b"")
        return True

    def _keep_attempt(self, attempt: bytes, fence: bytes) -> None:
        """A new fence is the script's choice: ``fence_given``."""
        self.owner = {**self.owner, b"attempt": attempt, b"fence": fence}
        self._describe()

    def _set_lock(self, token: bytes, lifetime: float) -> None:
        self.vanish("grants")
        self.vanish("owner")
        self.token = token
        self._lives(lifetime)

    def _lives(self, lifetime: float) -> None:
        self.until["lock"] = self.index[self.name] = time.monotonic() + lifetime

    def _describe(self) -> None:
        self.until["owner"] = self.until["lock"] + DAY

    def _grant(self, successor: bytes, lifetime: float) -> None:
        self._set_lock(successor, lifetime)
        self.fences += 1
        self.grant = successor, 0
        self.until["grants"] = time.monotonic() + lifetime

    def _pass_on(self, successor: bytes, lifetime: float) -> None:
        if any(until > time.monotonic() for until in self.waiters.values()):
            self._grant(successor, lifetime)
            return
        for part in ("lock", "grants", "owner"):
            self.vanish(part)
        self.index.pop(self.name, None)

    def _register(self, waiter: bytes) -> None:
        now = time.monotonic()
        self.waiters = {each: until for each, until in self.waiters.items() if until > now}
        self.waiters[waiter] = self.until["waiters"] = now + self.alive

    def _unregister(self, waiter: bytes) -> None:
        if self.waiters.pop(waiter, None) is not None and not self.waiters:
            self.until.pop("waiters", None)
