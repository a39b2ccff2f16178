"""What happens to locks and computations, told to whoever listens: metrics, signals, exporters.

A listener is called with each event, in the thread or task in which it happens, so it must be quick
and must not block. What happens in the keeper's thread (``Lost`` mostly) it is told in a thread for
that (``notices``). What it raises is logged and goes no further:
no listener ever touches a lock. Without listeners no event is even made; whoever has something to
tell looks first::

    if events.listeners:
        events.tell(Acquired(self.subject, waited, contended, fence))

An event is any named tuple; a listener passes over those it does not know.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from .notices import get_logger, in_keeper, run_later

logger = get_logger("django_redis_lock.events")

#: Seconds between two lines of the log about the same failing listener.
LOG_PAUSE_SECONDS = 60.0
#: The longest group, in characters.
MAX_GROUP_CHARACTERS = 200


class Subject(NamedTuple):
    """What an event is about.

    Attributes:
        name: of the lock or the cached value, as its user wrote it.
        group: under which it is counted together with its like; see ``group_of``.
        label: what the lock was taken for.
        server: where it is; None in memory.
        site: the cache's KEY_PREFIX: what tells apart the sites that share a database.
        cache: the cache backend it came from, None if from none.
    """

    name: str
    group: str
    label: str = ""
    server: Any = None
    site: str = ""
    cache: Any = None

    @classmethod
    def of(cls, name: str, group: str, label: str, server: Any, cache: Any) -> Subject:
        """``group`` may be empty: then it is made from the name."""
        site = str(getattr(cache, "key_prefix", ""))
        return cls(name, group or group_of(name), label, server, site, cache)


class Acquired(NamedTuple):
    """A lock was taken, ``waited`` seconds after it was asked for; ``contended``: it was not free
    at once."""

    subject: Subject
    waited: float
    contended: bool
    fence: int


class Rejected(NamedTuple):
    """A single attempt to acquire a lock found it taken."""

    subject: Subject


class TimedOut(NamedTuple):
    """A caller waited ``waited`` seconds for a lock and did not get it."""

    subject: Subject
    waited: float


class Released(NamedTuple):
    """A lock was given up after ``held`` seconds."""

    subject: Subject
    held: float
    fence: int


class Lost(NamedTuple):
    """A lock ended, ``held`` seconds after it was taken, before its holder gave it up."""

    subject: Subject
    held: float
    reason: str
    fence: int


class Crashed(NamedTuple):
    """A lock's lifetime ended and its ``owner`` had not released it: its process had crashed or was
    cut off from Redis. Emitted by the process that finds this out."""

    subject: Subject
    owner: Any


class Computing(NamedTuple):
    """A value is about to be computed, in this thread or task; ``Computed`` follows in it."""

    subject: Subject


class Computed(NamedTuple):
    """``values`` values were computed by one call in ``seconds``; or not, because of ``error``.
    ``without_redis``: it was away, so others may have computed them as well."""

    subject: Subject
    seconds: float
    error: BaseException | None
    values: int = 1
    without_redis: bool = False


class Shared(NamedTuple):
    """A caller was saved the computation of ``values`` values: others computed them, or are at it
    and the caller got the ``stale`` ones."""

    subject: Subject
    stale: bool
    values: int = 1


class RefreshFailed(NamedTuple):
    """A stale value could not be computed anew because of ``error``, and is served on."""

    subject: Subject
    error: BaseException


class ServerDown(NamedTuple):
    """Redis at ``server`` does not answer: ``error``. Told once for each outage."""

    server: str
    error: BaseException


class ServerUp(NamedTuple):
    """It answers again, after ``seconds``; ``spared`` calls had failed at once, without waiting for
    it, and ``fallbacks`` locks had been taken without it."""

    server: str
    seconds: float
    spared: int
    fallbacks: int


class FellBack(NamedTuple):
    """A lock was taken without Redis, as ON_REDIS_DOWN says: ``"local"`` or ``"run"``."""

    subject: Subject
    how: str
    error: BaseException


Listener = Callable[[Any], object]

#: Who listens. Look here before an event is made.
listeners: tuple[Listener, ...] = ()

_complained: dict[Listener, float] = {}


def subscribe(listener: Listener) -> None:
    """Call ``listener`` with each event from now on; once each, however often this is called."""
    global listeners
    if listener not in listeners:
        listeners += (listener,)


def unsubscribe(listener: Listener) -> None:
    """Do so no more."""
    global listeners
    listeners = tuple(other for other in listeners if other != listener)
    _complained.pop(listener, None)


def emit(event: Any) -> None:
    """Call all listeners with ``event``: at once, or in the keeper's thread later, in another.
    Raises nothing."""
    if in_keeper():
        run_later(partial(emit, event))
        return
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            _complain(listener, event)


def _complain(listener: Listener, event: Any) -> None:
    now = time.monotonic()
    if now - _complained.get(listener, -LOG_PAUSE_SECONDS) >= LOG_PAUSE_SECONDS:
        _complained[listener] = now
        logger.exception(
            "Listener %r failed on %s; nothing else is affected", listener, type(event).__name__
        )


_VARYING = re.compile(r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}|[0-9a-f]{16,}|\d+")


@lru_cache(maxsize=1024)
def group_of(name: str) -> str:
    """The group of a name for which none was given: the name, with ``*`` for each number, UUID and
    hash in it, so that ``invoice-17`` and ``invoice-18`` are counted together."""
    return as_group(_VARYING.sub("*", name))


def as_group(text: str) -> str:
    """``text`` as a group: printable, and not too long."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text[:MAX_GROUP_CHARACTERS]


def check_group(value: Any) -> str:
    """``value`` as a group; empty for None.

    Raises:
        TypeError: neither str nor None.
        ValueError: empty, too long, or not printable.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"group must be a str or None, not {value!r}")
    if not 0 < len(value) <= MAX_GROUP_CHARACTERS or not value.isprintable():
        allowed = f"1 to {MAX_GROUP_CHARACTERS} printable characters"
        raise ValueError(f"group must have {allowed}, not {value[:300]!r}")
    return value
