"""A server in memory: what the scripts do, in Python, with a clock that tests can move.

``testing`` puts locks on it.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections import defaultdict, deque
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError

from ..protocol import EXTEND, HELD, RELEASE, RESET, AcquireRequest, Acquisition, Call, Hold
from ..transport import Answer, Breaker

__all__ = ["Clock", "MemoryServer", "VirtualClock"]


class Clock:
    """The real clock."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        """Let up to ``seconds`` pass, or less if ``condition`` is notified."""
        condition.wait(min(seconds, threading.TIMEOUT_MAX))


class VirtualClock(Clock):
    """A clock that stands still unless it is moved. A wait moves it to the wait's end."""

    def __init__(self) -> None:
        self._now = 1_000_000.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move on by ``seconds``."""
        self._now += seconds

    def wait(self, condition: threading.Condition, seconds: float) -> None:
        if math.isinf(seconds):
            raise AssertionError("this wait would never end: nobody else moves a virtual clock")
        self._now += seconds


class Entry:
    """One held lock."""

    def __init__(self, token: bytes, until: float, hold: Hold | None = None) -> None:
        self.token = token
        self.until = until
        self.hold = hold


class MemoryServer:
    """What the server is to the locks on Redis.

    Attributes:
        clock: what its time is read from.
        away: while true, every call raises redis-py's ``ConnectionError``.
        breaker: as a server's; it is never told of a failure.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Any = clock or Clock()
        self.away = False
        self.changed = threading.Condition(threading.RLock())
        self._entries: dict[bytes, Entry] = {}
        self._lines: defaultdict[bytes, deque[object]] = defaultdict(deque)
        self._fences: defaultdict[bytes, int] = defaultdict(int)
        self.breaker = Breaker(f"memory of process {os.getpid()} ({secrets.token_hex(8)})")

    # -- what tests do with it ---------------------------------------------------------------

    def lose(self, name: str | bytes) -> None:
        """End the lock at the key ``name`` as a server that forgot it would; its holder is told.

        Raises:
            KeyError: no lock is held there.
        """
        with self.changed:
            held = self.held()
            entry = self._entries.pop(self.encode(name), None)
            self.changed.notify_all()
        if entry is None:
            raise KeyError(f"no lock is held at the key {name!r}; held are: {held}")
        if entry.hold is not None:
            entry.hold.lose("the test took it away")

    def held(self) -> list[str]:
        """The keys of all locks that are held, in alphabetical order."""
        with self.changed:
            return sorted(key.decode() for key in list(self._entries) if self._live(key))

    def get_encoder(self) -> MemoryServer:
        """As redis-py's clients have it."""
        return self

    def encode(self, value: str | bytes) -> bytes:
        """``value`` as Redis would keep it."""
        return value.encode() if isinstance(value, str) else value

    # -- what locks do with it ---------------------------------------------------------------

    def reached(self) -> None:
        """Raises redis-py's ``ConnectionError`` while the server is away."""
        if self.away:
            raise RedisConnectionError("Redis is away (django_redis_lock.testing)")

    def _live(self, key: bytes) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None or self.clock() < entry.until:
            return entry
        del self._entries[key]
        if entry.hold is not None:
            entry.hold.lose("its lifetime ran out before it was released")
        return None

    def join(self, key: bytes) -> object:
        """A ticket at the end of the line for the lock at ``key``."""
        ticket = object()
        self._lines[key].append(ticket)
        return ticket

    def leave(self, key: bytes, ticket: object) -> None:
        with self.changed:
            self._lines[key].remove(ticket)
            self.changed.notify_all()

    def take(self, request: AcquireRequest, ticket: object) -> Acquisition | None:
        """The lock, if it is free and nobody came before."""
        key, now = request.keys.lock, self.clock()
        line = self._lines[key]
        if self._live(key) is not None or (line and line[0] is not ticket):
            return None
        fence = max(self._fences[key] + 1, int(now * 1e6))
        self._fences[key] = fence
        until = request.until(now)
        self._entries[key] = Entry(request.token, until)
        return Acquisition(request.token, fence, now, until)

    def keep(self, hold: Hold) -> None:
        """Hold it as long as a keeper would."""
        with self.changed:
            entry = self._entries.get(hold.keys.lock)
            if entry is not None and entry.token == hold.token:
                entry.hold = hold
                entry.until = hold.deadline = max(hold.deadline, hold.renews_until)

    def seconds_until_change(self, key: bytes, deadline: float) -> float:
        entry = self._live(key)
        end = deadline if entry is None else min(deadline, entry.until)
        left: float = max(0.0, end - self.clock())
        return left

    def run(self, call: Call) -> Answer:
        """Do what the script of ``call`` does."""
        self.reached()
        with self.changed:
            value = _DOES[call.script](self, call.keys[0], *call.args)
            self.changed.notify_all()
        return Answer(value, sent_twice=False)

    def _release(
        self, key: bytes, token: Any, successor: Any, grant: Any, rest: Any, fence: Any, *_: Any
    ) -> int:
        entry = self._live(key)
        if entry is None or entry.token != token:
            return 0
        rests_until = fence / 1e6 + rest / 1000
        if rest and self.clock() < rests_until:
            self._entries[key] = Entry(successor, rests_until)
        else:
            del self._entries[key]
        return 1

    def _extend(self, key: bytes, token: Any, amount: Any, replace: Any, *_: Any) -> int:
        entry = self._live(key)
        if entry is None or entry.token != token:
            return 0
        if replace == "0" and math.isinf(entry.until):
            return -1
        entry.until = (self.clock() if replace == "1" else entry.until) + amount / 1000
        return 1

    def _held(self, key: bytes) -> Any:
        entry = self._live(key)
        if entry is None:
            return None
        now = self.clock()
        pttl = -1 if math.isinf(entry.until) else math.ceil((entry.until - now) * 1000)
        fields = [] if entry.hold is None else entry.hold.owner().fields()
        return [entry.token, pttl, fields, int(now * 1e6), self._fences[key]]

    def _reset(self, key: bytes, *args: Any) -> int:
        if self._live(key) is None:
            return 0
        self.lose(key)
        return 1


_DOES: dict[Any, Any] = {
    RELEASE: MemoryServer._release,
    EXTEND: MemoryServer._extend,
    HELD: MemoryServer._held,
    RESET: MemoryServer._reset,
}
