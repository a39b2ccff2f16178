"""Events of locks and computations, for metrics, signals and exporters.

``emit`` calls each listener in the thread or task of the event, so a listener must be quick and
must not block. Events of the keeper's thread (mostly ``Lost``) are emitted in another thread (see
``threads``). An exception in a listener is logged, and does not affect the lock. Without listeners
no event is made, so callers check first::

    if events.listeners:
        events.emit(Acquired(self.subject, waited, contended, fence))

An event is any named tuple; a listener ignores the ones it does not know.
"""

import re
from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, NamedTuple, TypeVar

from .threads import Mutex, free_after_fork, get_logger, may_log, run_later, this_thread

logger = get_logger("django_redis_lock.events")

#: The longest group, in characters.
MAX_GROUP_CHARACTERS = 200


class Subject(NamedTuple):
    """The lock or value of an event.

    Attributes:
        name: as the user wrote it.
        group: the metrics group; see ``group_of``.
        server: None in memory.
        site: the cache's KEY_PREFIX, which distinguishes sites that share a database.
        cache: the cache backend, or None.
    """

    name: str
    group: str
    label: str = ""
    server: Any = None
    site: str = ""
    cache: Any = None

    @classmethod
    def of(cls, name: str, group: str, label: str, server: object, cache: object) -> "Subject":
        """With an empty ``group``, the group is derived from the name."""
        site = str(getattr(cache, "key_prefix", ""))
        return cls(name, group or group_of(name), label, server, site, cache)


class Contended(NamedTuple):
    """An attempt to acquire a lock found it taken. ``Acquired``, ``TimedOut`` or ``Rejected``
    follows in the same thread or task, unless the attempt raises. ``keys``: ``LockKeys``."""

    subject: Subject
    keys: Any


class Acquired(NamedTuple):
    """A lock was acquired ``waited`` seconds after the request; ``contended``: it was not free at
    first."""

    subject: Subject
    waited: float
    contended: bool
    fence: int


class Rejected(NamedTuple):
    """An attempt to acquire a lock without waiting found it taken."""

    subject: Subject


class TimedOut(NamedTuple):
    """A caller waited ``waited`` seconds for a lock and did not acquire it."""

    subject: Subject
    waited: float


class Released(NamedTuple):
    """A lock was released after ``held`` seconds."""

    subject: Subject
    held: float
    fence: int


class Lost(NamedTuple):
    """A lock ended ``held`` seconds after its acquisition, before its holder released it."""

    subject: Subject
    held: float
    reason: str
    fence: int


class Crashed(NamedTuple):
    """A lock expired before its ``owner`` released it or reported the loss: the owner's process had
    crashed or was cut off from Redis. The process that detects this emits the event."""

    subject: Subject
    owner: Any


class Computing(NamedTuple):
    """The computation of a value begins; ``Computed`` follows in the same thread or task."""

    subject: Subject


class Computed(NamedTuple):
    """One call computed ``values`` values in ``seconds``, or failed with ``error``.
    ``without_redis``: Redis was down, so others may have computed them as well."""

    subject: Subject
    seconds: float
    error: BaseException | None
    values: int = 1
    without_redis: bool = False


class Shared(NamedTuple):
    """A caller got ``values`` values that others computed, after ``waited`` seconds, or ``stale``
    values while others compute them. ``leader``: the trace of the computation, as ``trace_parent``
    returned it there; empty if it is not known."""

    subject: Subject
    stale: bool
    values: int = 1
    waited: float = 0.0
    leader: str = ""


class Read(NamedTuple):
    """One call of ``get_or_set`` and the like looked for ``values`` values of ``cache``. Emitted
    when the call knows the result: ``"hit"``; ``"stale"``; or ``"miss"``: no caller finds a value,
    also if another computes it.

    Attributes:
        group: the argument of the call, or empty.
        began: monotonic time at which the read began.
        seconds: how long the read took, without a computation or a wait for one.
    """

    cache: Any
    name: str
    group: str
    result: str
    values: int
    began: float
    seconds: float

    @property
    def subject(self) -> Subject:
        # Made only if needed, because reads are frequent.
        found: Subject = self.cache.subject_of(self.name, self.group)
        return found


class Stored(NamedTuple):
    """A request stored ``values`` computed values, and took ``seconds``."""

    subject: Subject
    seconds: float
    values: int


class RefreshFailed(NamedTuple):
    """The refresh of a stale value failed with ``error``; callers still get the stale value."""

    subject: Subject
    error: BaseException


class ServerDown(NamedTuple):
    """Redis at ``server`` does not reply: ``error``. Emitted once for each outage."""

    server: str
    error: BaseException


class Outage(NamedTuple):
    """What this process knows of a server that does not answer: the seconds since the first call
    that failed, how many calls failed at once, how many locks were taken without it."""

    server: str
    seconds: float
    spared: int
    fallbacks: int


class ServerUp(Outage):
    """The outage is over: Redis replies again, or another server has replaced it."""


class FellBack(NamedTuple):
    """A lock was taken without Redis, as ON_REDIS_DOWN says: ``"local"`` or ``"run"``."""

    subject: Subject
    how: str
    error: BaseException


Listener = Callable[[Any], object]

#: Checked before an event is made.
listeners: tuple[Listener, ...] = ()
#: Those of them that get ``Read`` and ``Stored`` events.
read_listeners: tuple[Listener, ...] = ()
#: Counts reads: called with the arguments of a ``Read`` up to ``values``. Hits are so frequent that
#: an event for each would be noticed.
count_read: Callable[[Any, str, str, str, int], object] | None = None


def _not_counted(subject: Subject) -> None:
    return None


#: The average seconds for which this process lately held locks of the subject's group, without a
#: request; None if it held none or does not count.
usual_hold: Callable[[Subject], float | None] = _not_counted

#: Returns the trace of the calling thread or task, as a ``traceparent`` of W3C; empty if there is
#: none. A leader stores it with its value, and its followers' spans can refer to it.
trace_parent: Callable[[], str] | None = None

_subscribing = free_after_fork(Mutex())
_logged_at: dict[Listener, float] = {}


def subscribe(listener: Listener, *, reads: bool = False) -> None:
    """Call ``listener`` with each event from now on; with ``Read`` and ``Stored`` events only if it
    wants ``reads``. A second call has no effect."""
    global listeners, read_listeners
    with _subscribing:
        if listener not in listeners:
            listeners += (listener,)
        if reads and listener not in read_listeners:
            read_listeners += (listener,)


def unsubscribe(listener: Listener) -> None:
    """Stop calling ``listener``."""
    global listeners, read_listeners
    with _subscribing:
        listeners = tuple(other for other in listeners if other != listener)
        read_listeners = tuple(other for other in read_listeners if other != listener)
    _logged_at.pop(listener, None)


def emit(event: object) -> None:
    """Call all listeners with ``event``; from the keeper's thread, later in another thread. Raises
    nothing."""
    if this_thread.is_keeper:
        run_later(partial(emit, event))
        return
    for listener in read_listeners if type(event) in (Read, Stored) else listeners:
        try:
            listener(event)
        except Exception:
            log_failure(listener, event)


def log_failure(listener: Listener, event: object) -> None:
    """Log that ``listener`` raised, at most once a minute."""
    if may_log(listener, _logged_at):
        logger.exception(
            "Listener %r failed on %s; nothing else is affected", listener, type(event).__name__
        )


F = TypeVar("F", bound=Callable[..., object])

#: Visitors may choose names and keys: longer names and keys, in bytes or characters, are not kept.
MAX_CACHED_LENGTH = 256
#: Results that are kept for one function.
MAX_CACHED = 1024


def remembered(function: F) -> F:
    """``function`` with a cache for calls whose first argument, a text or bytes, is short."""
    cached = lru_cache(maxsize=MAX_CACHED)(function)

    @wraps(function)
    def call(text: Any, *args: object) -> Any:
        return cached(text, *args) if len(text) <= MAX_CACHED_LENGTH else function(text, *args)

    call.cache_info = cached.cache_info  # type: ignore[attr-defined]  # as lru_cache has it
    return call  # type: ignore[return-value]  # the same signature


#: ``re`` compiles it when it is first used: that takes longer than to import a module.
_VARYING = r"[0-9a-fA-F]{8}(?:-?[0-9a-fA-F]{4}){3}-?[0-9a-fA-F]{12}|[0-9a-f]{16,}|\d+"


@remembered
def group_of(name: str) -> str:
    """The default group of a name: the name with ``*`` for each number, UUID and hash in it, so
    that ``invoice-17`` and ``invoice-18`` are counted together; of a long name, its beginning."""
    return as_group(re.sub(_VARYING, "*", name[: 10 * MAX_GROUP_CHARACTERS]))


def as_group(text: str) -> str:
    """``text`` as a group: printable, and not too long."""
    if not text.isprintable():
        text = text.encode("unicode_escape").decode()
    return text[:MAX_GROUP_CHARACTERS]


def check_group(value: object) -> str:
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
