"""Checks of arguments: invalid values are refused at the call (invariant W1)."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import lru_cache, partial
from operator import itemgetter
from typing import Any

from ..events import check_group
from ..threads import get_logger

logger = get_logger("django_redis_lock.lock")

#: The shortest lifetime: Redis counts in milliseconds.
MIN_SECONDS = 0.001
#: Redis accepts more, but a greater value is probably in milliseconds.
MAX_SECONDS = 100 * 365 * 24 * 3600.0
#: The scripts look at each place, in about a millisecond.
MAX_LIMIT = 1000
#: What a lock can do while Redis is down; see ``fallback``.
ON_REDIS_DOWN = ("raise", "local", "run")


def check_seconds(
    what: str, value: object, *, zero: bool = False, none: str | None = None
) -> float | None:
    """``value`` as seconds.

    Args:
        what: the argument's name, for the message.
        value: int or float, in seconds.
        zero: whether 0, and values below a millisecond, are allowed.
        none: what None means for this argument; if left out, None is refused.

    Raises:
        TypeError: not a number.
        ValueError: NaN, infinite, negative, longer than a hundred years; or below a millisecond,
            unless ``zero`` is set.
    """
    if value is None and none is not None:
        return None
    shortest = 0 if zero else MIN_SECONDS
    if (type(value) is float or type(value) is int) and shortest <= value <= MAX_SECONDS:
        return float(value)
    allowed = f"a number of seconds {'of 0 or more' if zero else 'greater than 0'}"
    if none is not None:
        allowed += f", or None for {none}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        hint = ": write its total_seconds()" if hasattr(value, "total_seconds") else ""
        raise TypeError(f"{what} must be {allowed}, not {value!r}{hint}")
    if not (value > 0 or (value == 0 and zero)):  # NaN is neither.
        raise ValueError(f"{what} must be {allowed}, not {value!r}")
    if value < MIN_SECONDS and not zero:
        raise ValueError(f"{what} must be at least a millisecond, 0.001, not {value!r}")
    if value > MAX_SECONDS:
        raise ValueError(f"{what} must be at most a hundred years, given in seconds, not {value!r}")
    return float(value)


def check_time(
    what: str, value: object, *, zero: bool = False, none: str | None = None
) -> float | None:
    """``check_seconds`` for a time of a lock; the log says so, once, if it is implausible."""
    seconds = check_seconds(what, value, zero=zero, none=none)
    if seconds is not None and seconds >= MIN_IMPLAUSIBLE and implausible(what, seconds):
        _warn_of(what, seconds)
    return seconds


#: No shorter time is implausible.
MIN_IMPLAUSIBLE = 60.0
#: Times that are never as long as a minute.
SHORT = frozenset(("sleep", "grant_timeout", "server_timeout"))


def implausible(what: str, seconds: float) -> str:
    """A sentence if so many seconds were probably meant to be milliseconds, else empty. Whole
    thousands are, unless they are whole hours, of more than a day whole days."""
    natural = 3600 if seconds <= 24 * 3600 else 24 * 3600
    in_thousands = seconds >= 1000 and seconds % 1000 == 0 and seconds % natural != 0
    if not in_thousands and not (what in SHORT and seconds > MIN_IMPLAUSIBLE):
        return ""
    return (
        f"{what}={seconds:.15g} is {timedelta(seconds=seconds)} (h:mm:ss): all times are in "
        f"seconds. If milliseconds were meant, write {what}={seconds / 1000:.15g}"
    )


@lru_cache(maxsize=256)
def _warn_of(what: str, seconds: float) -> None:
    logger.warning("%s", implausible(what, seconds))


def check_share(what: str, value: object) -> float:
    """``value`` as a share of something, from 0 to 1. Raises as ``check_seconds`` does."""
    return float(_number(what, value, (int, float), "a number", 0, 1))


def check_count(what: str, value: object, least: int = 0, most: float = math.inf) -> int:
    """``value`` as a number of something. Raises as ``check_seconds`` does."""
    return int(_number(what, value, int, "a whole number", least, most))


def _number(what: str, value: Any, kind: Any, allowed: str, least: int, most: float) -> float:
    allowed += f" of {least} or more" if most == math.inf else f" from {least} to {most}"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"{what} must be {allowed}, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{what} must be {allowed}, not {value!r}")
    return value  # type: ignore[no-any-return]  # checked above


def check_bool(what: str, value: object) -> bool:
    """``value``. Raises TypeError if it is anything but True or False: ``"no"`` would be true."""
    if value is True or value is False:
        return bool(value)
    raise TypeError(f"{what} must be True or False, not {value!r}")


def check_policy(on_redis_down: object, critical: object = False) -> None:
    """Raises TypeError or ValueError if one is invalid, or they contradict each other."""
    if on_redis_down not in (None, *ON_REDIS_DOWN):
        allowed = "'raise', 'local' or 'run'"
        raise ValueError(f"on_redis_down must be {allowed}, not {on_redis_down!r}")
    if check_bool("critical", critical) and on_redis_down not in (None, "raise"):
        raise ValueError(
            f"a critical lock always needs Redis: leave on_redis_down={on_redis_down!r} out"
        )


def check_wait(value: object) -> float | None:
    """``value`` as ``blocking_timeout``: seconds, 0 for one try, None for a wait without end."""
    return check_time("blocking_timeout", value, zero=True, none="a wait without end")


def check_label(value: object) -> str:
    """``value`` as a label; empty for None. Raises TypeError."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"label must be a str or None, not {value!r}")
    return value or ""


#: The options that all locks have, each with its check.
OPTIONS: Mapping[str, Callable[[object], Any]] = {
    "timeout": partial(check_time, "timeout", none="a lock that never expires"),
    "sleep": partial(check_time, "sleep", zero=True),
    "blocking": partial(check_bool, "blocking"),
    "blocking_timeout": check_wait,
    "thread_local": partial(check_bool, "thread_local"),
    "raise_on_release_error": partial(check_bool, "raise_on_release_error"),
    "renew": partial(check_bool, "renew"),
    "max_hold": partial(check_time, "max_hold", none="no end to its renewal"),
    "min_hold": partial(check_time, "min_hold", zero=True),
    "cancel_on_lost": partial(check_bool, "cancel_on_lost"),
    "warn_after": partial(check_time, "warn_after", none="80 % of its lifetime"),
    "replicas": partial(check_count, "replicas"),
    "grant_timeout": partial(check_time, "grant_timeout"),
    "reentrant": partial(check_bool, "reentrant"),
    "limit": partial(check_count, "limit", least=1, most=MAX_LIMIT),
    "label": check_label,
    "group": check_group,
}


def checked_options(given: Mapping[str, object]) -> dict[str, Any]:
    """The values in ``given`` of all OPTIONS, checked one by one and together; with
    ``warns_after``. Raises TypeError or ValueError."""
    values = _repeated_values(given)
    try:
        options = _checked(*values)
    except TypeError:  # Perhaps because one of them cannot be hashed.
        options = _checked.__wrapped__(*values)
    return options | {name: OPTIONS[name](given[name]) for name in _TEXTS}


#: Those that may differ from lock to lock, and be as long as a visitor likes.
_TEXTS = ("label", "group")
#: Locks repeat the others, so that these are checked once.
_REPEATED = tuple(name for name in OPTIONS if name not in _TEXTS)
_repeated_values = itemgetter(*_REPEATED)


@lru_cache(maxsize=256, typed=True)
def _checked(*values: object) -> dict[str, Any]:
    options = {n: OPTIONS[n](value) for n, value in zip(_REPEATED, values, strict=True)}
    timeout, renew, max_hold = options["timeout"], options["renew"], options["max_hold"]
    if timeout is None and (renew or max_hold is not None):
        raise ValueError("renew and max_hold need a timeout: a lock without one never expires")
    if max_hold is not None and not renew:
        raise ValueError("max_hold needs renew=True: any other lock ends after its timeout")
    check_holds(options["min_hold"], max_hold)
    longest = longest_hold(renew, timeout, max_hold)
    return {**options, "warns_after": options["warn_after"] or longest * 0.8}


def check_holds(min_hold: float, max_hold: float | None) -> None:
    """Raises ValueError if they contradict each other."""
    if max_hold is not None and min_hold > max_hold:
        raise ValueError("min_hold must not be longer than max_hold")


def check_name(value: object) -> str | bytes:
    """``value``, a str, bytes or, as for redis-py, a memoryview, as a lock's name. Raises as
    ``check_seconds`` does."""
    return _text("a lock's name", bytes(value) if isinstance(value, memoryview) else value)


def check_token(value: object) -> str | bytes:
    """``value`` as a token. Raises as ``check_seconds`` does."""
    return _text("a token", value)


def _text(what: str, value: object) -> str | bytes:
    if not isinstance(value, (str, bytes)):
        raise TypeError(f"{what} must be a str or bytes, not {type(value).__name__}")
    if not value:
        raise ValueError(f"{what} must not be empty")
    return value


def check_name_in_cache(value: object) -> str:
    """``value`` as the name of a lock in a cache: a str, bytes (UTF-8), or an object that defines
    ``str()``, such as a number or a UUID. Raises as ``check_seconds`` does."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            value = bytes(value).decode()
        except UnicodeDecodeError:
            raise ValueError(f"a lock's name must be UTF-8 if it is bytes, not {value!r}") from None
    if value is None:
        value = ""
    own_text = type(value).__str__  # Numbers inherit object's.
    has_text = isinstance(value, (str, int, float)) or own_text is not object.__str__
    if isinstance(value, bool) or not has_text:
        raise TypeError(f"a lock's name must be a str, bytes or number, not {value!r}")
    return str(check_name(f"{value}"))


def longest_hold(renew: bool, timeout: float | None, max_hold: float | None) -> float:
    """Seconds for which a lock with these options can be held; ``inf`` without end."""
    return (max_hold if renew else timeout) or math.inf


@lru_cache(maxsize=256)
def milliseconds(seconds: float | None) -> int:
    """Whole milliseconds for Redis, rounded up so that no lifetime becomes 0; 0 for None."""
    return 0 if seconds is None else max(1, math.ceil(round(seconds * 1000, 6)))


#: By our name of an option, its names in other packages.
ELSEWHERE = {
    "timeout": "expire expires expiry expiration ttl lease lease_time lease_seconds ex lifetime "
    "auto_release_time lock_timeout cache_timeout",
    "blocking_timeout": "wait wait_timeout acquire_timeout max_wait waiting_timeout",
    "renew": "auto_renewal auto_renew auto_extend keep_alive renewal",
    "wait": "blocking_timeout wait_timeout lock_timeout",
    "limit": "capacity concurrency max_holders max_locks places",
    "key": "name lock_name lock_key",
    "label": "description",
    "stale": "stale_ttl grace swr stale_while_revalidate",
    "using": "cache alias cache_alias",
    "on_lost": "lost_callback",
}


def unknown_option(call: str, name: str, known: Iterable[str]) -> TypeError:
    """The error about the option ``name`` of ``call``, which has those that are ``known``."""
    names = list(known)
    meant = [ours for ours, others in ELSEWHERE.items() if name in others.split() and ours in names]
    if not meant:
        meant = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    unit = ", in seconds" if meant[:1] in (["timeout"], ["blocking_timeout"], ["wait"]) else ""
    hint = f"write {meant[0]}={unit}; " if meant else ""
    return TypeError(f"{call} has no option {name!r}; {hint}it has {', '.join(names)}")
