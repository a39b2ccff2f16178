"""The circuit breaker: while a server does not answer, only one caller at a time waits for it.

A call to a frozen or unreachable server costs its whole socket timeout. After a few such calls in
a row the others fail at once, with ``CircuitOpen``; from time to time one is let through, with a
short timeout. Any reply ends the outage. A refused connection costs no time, so it never opens the
circuit, and a server that is back is used at once.

Calls that keep or end a lock that is held are never refused: its waiters depend on them.
"""

from __future__ import annotations

import math

from redis.exceptions import ConnectionError as RedisConnectionError

from .. import events, extension
from ..clock import real_time as time
from ..events import Outage, ServerDown, ServerUp
from ..threads import Mutex, free_after_fork, get_logger
from .address import PROBE_SECONDS, Settings
from .refusals import note_sent

logger = get_logger("django_redis_lock.outage")

#: A failed call counts as costly if it took so long, or the whole socket timeout if that is
#: shorter.
COSTLY_SECONDS = 1.0
PROBE_TIMEOUT_SECONDS = 1.0
#: Seconds for a test connection, made when another is silent, to show whether the server is up.
CHECK_SECONDS = 1.0
#: A caller with less time than twice this has it for one attempt only.
MIN_ATTEMPT_SECONDS = 0.08


class CircuitOpen(RedisConnectionError):
    """The server was not asked: it has not answered for a while, and another caller is trying."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        note_sent(self, False)


class Breaker:
    """The breaker of one server. While it is not ``failing``, nothing else here needs to be asked.

    Args:
        timeout: seconds after which a call, or an attempt to connect, is given up otherwise.
    """

    #: Whether its outages concern no caller: of a server that was replaced, of one sentinel.
    silent = False
    failing = False
    #: Seconds that it took to make the last connection.
    connecting = 0.0
    #: Since the last outage began; ``fallbacks``: the locks that were taken without the server.
    fallbacks = _costly = _spared = 0
    _since = 0.0
    _open_until: float | None = None
    _error = ""  # Its text: what it leads to (its frames, and their locks) is not kept.

    def __init__(self, server: str, timeout: float = 5.0) -> None:
        self.server = server
        self._timeout = timeout
        # A signal handler may come in between.
        self._mutex = free_after_fork(Mutex())

    @property
    def held_back(self) -> bool:
        until = self._open_until
        return until is not None and time.monotonic() < until

    def admit(self, left: float | None, urgent: bool = False) -> float | None:
        """Let a call through, and say how many seconds it may take, of those that are ``left``; or
        raise CircuitOpen, unless it is ``urgent``."""
        with self._mutex:
            if self._open_until is None:
                return left
            now = time.monotonic()
            if not urgent:
                if now < self._open_until:
                    self._spared += 1
                    raise CircuitOpen(
                        f"Redis at {self.server} has not answered for {now - self._since:.1f} s; "
                        f"it is asked again in {self._open_until - now:.1f} s ({self._error})"
                    )
                # The probe. Should it end without a word, another follows.
                self._open_until = now + PROBE_TIMEOUT_SECONDS + extension.breaker_limits()[1]
            return min(PROBE_TIMEOUT_SECONDS, self._timeout, math.inf if left is None else left)

    def first_wait(self, old: bool, left: float | None, timeout: float) -> float | None:
        """Seconds for which a connection that was used before may be silent, until a new one is
        made; all that are ``left`` (None: the socket's ``timeout``) if a new one cannot help. An
        ``old`` one was idle: a firewall, a load balancer or a NAT forgets a connection without
        traffic, often after some minutes, and tells neither end."""
        least = max(MIN_ATTEMPT_SECONDS, 2 * self.connecting)  # To connect, and for another try.
        half = (timeout if left is None else left) / 2
        if self.failing or half < least:
            return left
        if old:
            return min(half, max(PROBE_SECONDS, least))
        return None if left is None else min(half, timeout)

    def failed(self, error: BaseException, cost: float, timeout: float | None = None) -> None:
        """A call, or an attempt to connect, has failed after ``cost`` seconds. ``timeout``: after
        which this caller gives up, if not the usual."""
        with self._mutex:
            if self.silent:
                return
            began = not self.failing
            if began:
                self.failing, self._since = True, time.monotonic() - cost
                self._costly = self._spared = self.fallbacks = 0
            self._error = str(error)
            opened = self._counted(error, cost, timeout or self._timeout)
        if opened:
            logger.warning(
                "Calls to Redis at %(server)s fail at once until it answers",
                {"server": self.server},
            )
        if began:
            down = ServerDown(self.server, error)
            logger.warning("Redis at %(server)s is unavailable: %(error)s", down._asdict())
            events.emit(down)

    def _counted(self, error: BaseException, cost: float, timeout: float) -> bool:
        """Whether this failure is the one after which calls are held back."""
        if cost < 0.9 * min(COSTLY_SECONDS, timeout):
            if self._open_until is not None and isinstance(error, RedisConnectionError):
                self._open_until = time.monotonic()  # Refused: the next call costs no time, either.
            return False
        self._costly += 1
        most, pause = extension.breaker_limits()
        if not most or self._costly < most:
            return False
        before, self._open_until = self._open_until, time.monotonic() + pause
        return before is None

    def replaced(self) -> None:
        """Another server has replaced this one, which ends its outage."""
        self.silent = True
        self.answered("is no longer used")

    def answered(self, how: str = "answers again") -> None:
        with self._mutex:
            outage = self.known_outage()
            if outage is None:
                return
            self.failing, self._open_until = False, None
        up = ServerUp(*outage)
        logger.warning(
            f"Redis at %(server)s {how} after %(seconds).1f s; during the outage %(spared)d calls "
            "failed at once, and %(fallbacks)d locks were taken without it",
            up._asdict(),
        )
        events.emit(up)

    def fell_back(self) -> bool:
        """Count a lock that was taken without the server; whether it is the first of the outage."""
        with self._mutex:
            self.fallbacks += 1
            return self.fallbacks == 1

    def known_outage(self) -> Outage | None:
        """None while the server answers."""
        with self._mutex:
            if not self.failing:
                return None
            seconds = time.monotonic() - self._since
            return Outage(self.server, seconds, self._spared, self.fallbacks)


def without_credentials(settings: Settings) -> str:
    """An address without credentials."""
    if database := settings.get("database"):
        return str(database)
    host = settings.get("host", "localhost")
    host = f"[{host}]" if ":" in host else host  # Of IPv6.
    where = settings.get("path") or f"{host}:{settings.get('port', 6379)}"
    return f"{where}/{settings.get('db') or 0}"
