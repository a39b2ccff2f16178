"""Settings: the dict ``DJANGO_REDIS_LOCK``, read at each use; and the options of a ``get_or_set``.

The same names with the prefix ``LOCK_`` in a cache's ``OPTIONS`` override them for that alias.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike, fspath
from typing import Any, Generic, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver
from django.utils.module_loading import import_string

from . import extension
from .events import check_group
from .protocol.validation import (
    ON_REDIS_DOWN,
    check_bool,
    check_count,
    check_seconds,
    check_share,
    unknown_option,
)
from .threads import check_plain

__all__ = ["FOR_THE_PROCESS", "ON_WAIT_TIMEOUT", "SETTING", "Conf", "GetOrSetOptions", "Timeout"]

T = TypeVar("T")


class Default:
    """What a parameter is if it is left out, where None would be a value.

    Args:
        text: for people who read the signature.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


#: The setting applies; for the timeout of a value, that of the cache.
SETTING: Any = Default("<setting>")
ON_WAIT_TIMEOUT = ("compute", "raise", "default")
VALUES_ON_REDIS_DOWN = ("compute", "raise")
CLEAR = ("database", "prefix")
#: These have no effect in the options of a cache.
FOR_THE_PROCESS = ("BREAKER_FAILURES", "BREAKER_PAUSE", "EXPORTERS", "HOLDER_USER", "USING")
EXPORTERS = ("prometheus", "opentelemetry", "sentry")

_given: Mapping[str, object] | None = None


def given() -> Mapping[str, object]:
    """The dict ``DJANGO_REDIS_LOCK``, looked up once and after each override: looking up a missing
    setting in Django takes longer than the rest of a cache hit."""
    global _given
    found = _given  # Another thread may override it at any time.
    if found is None:
        found = getattr(settings, "DJANGO_REDIS_LOCK", {})
        if not isinstance(found, Mapping):
            raise ImproperlyConfigured(f"DJANGO_REDIS_LOCK must be a dict, not {found!r}")
        _given = found
        if getattr(settings, "DJANGO_REDIS_LOCK", found) is not found:
            _given = None  # It was overridden in between.
    return found


@receiver(setting_changed)
def _look_up_again(*, setting: str, **kwargs: object) -> None:
    global _given
    if setting == "DJANGO_REDIS_LOCK":
        _given = None


class Setting(Generic[T]):
    """A setting of ``Conf``, read and checked at each use.

    Args:
        default: what an absent setting means; it is not checked.
        check: given the place of the setting, for messages, and the value, returns the value as its
            type has it, or raises TypeError or ValueError.
    """

    def __init__(self, default: T, check: Callable[[str, object], T]) -> None:
        self.default = default
        self.check = check

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, conf: Conf, owner: type | None = None) -> T:
        name = self.name
        if name in conf._own:
            where, value = f"the cache's option LOCK_{name}", conf._own[name]
        elif name in (everywhere := given()):
            where, value = f"DJANGO_REDIS_LOCK: {name}", everywhere[name]
        else:
            return self.default
        try:
            return self.check(where, value)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None


def _seconds(where: str, value: object) -> float:
    return check_seconds(where, value) or 0.0


def _seconds_or_0(where: str, value: object) -> float:
    return check_seconds(where, value, zero=True) or 0.0


def _version(where: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{where} must be a str, not {value!r}")
    if re.match(r"[-\d]", value):
        raise ValueError(f"{where} must not begin as the version of a value may, as {value!r} does")
    return value


def _that(is_right: Callable[[Any], object], what: str) -> Callable[[str, object], Any]:
    """A check of values that are ``what``."""

    def check(where: str, value: object) -> object:
        if not is_right(value):
            raise ValueError(f"{where} must be {what}, not {value!r}")
        return value

    return check


def _one_of(choices: Sequence[str]) -> Callable[[str, object], Any]:
    return _that(choices.__contains__, f"one of {', '.join(map(repr, choices))}")


def _is_alias(alias: object) -> bool:
    return isinstance(alias, str) and alias != ""


def _are_exporters(names: object) -> bool:
    return isinstance(names, (list, tuple)) and all(name in EXPORTERS for name in names)


def _may_be_header(name: object) -> bool:
    is_name = isinstance(name, str) and re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.A)
    return name is None or bool(is_name)


def _function(where: str, path: object) -> Callable[[], object] | None:
    try:
        found = import_string(path) if isinstance(path, str) else path
    except ImportError as error:
        raise ValueError(f"{where} must be a path that can be imported: {error}") from None
    if found is not None and not callable(found):
        raise TypeError(f"{where} must be the dotted path of a function or None, not {path!r}")
    result: Callable[[], object] | None = found
    return result


def _folder(where: str, folder: object) -> str | None:
    if folder is not None and not isinstance(folder, (str, PathLike)):
        raise TypeError(f"{where} must be a path or None, not {folder!r}")
    return None if folder is None else fspath(folder)


class Conf:
    """The settings for one cache alias; without ``options``, for all aliases. ``docs/settings.md``
    explains them."""

    #: Seconds: a lock's lifetime, from one renewal to the next.
    TIMEOUT = Setting(30.0, _seconds)
    #: Seconds after which a follower takes over from a leader that died.
    FLIGHT_TIMEOUT = Setting(10.0, _seconds)
    #: Seconds a follower waits for the leader's value.
    WAIT = Setting(60.0, _seconds)
    #: Seconds for which an old value is served while one caller computes the next.
    STALE = Setting(0.0, _seconds_or_0)
    #: Whether that caller gets the old value, too.
    BACKGROUND = Setting(False, check_bool)
    #: Returns a context manager for each refresh in the background.
    BACKGROUND_CONTEXT: Setting[Callable[[], object] | None] = Setting(None, _function)
    #: Seconds that caller waits at most.
    SOFT_TIMEOUT: Setting[float | None] = Setting(
        None, partial(check_seconds, zero=True, none="the end of the computation")
    )
    #: What a follower does after WAIT.
    ON_WAIT_TIMEOUT = Setting("compute", _one_of(ON_WAIT_TIMEOUT))
    #: What ``get_or_set`` does.
    VALUES_ON_REDIS_DOWN = Setting("compute", _one_of(VALUES_ON_REDIS_DOWN))
    #: What ``clear()`` deletes.
    CLEAR = Setting("database", _one_of(CLEAR))
    #: The largest share of a value's timeout by which it is shortened at random.
    JITTER = Setting(0.0, check_share)
    #: Seconds after a failed computation during which no caller tries again.
    ERROR_TTL = Setting(0.0, _seconds_or_0)
    #: For pages: "hit", "stale" or "miss".
    PAGE_STATUS_HEADER: Setting[str | None] = Setting(
        None, _that(_may_be_header, "the name of a header or None")
    )
    #: Seconds that a waiter has to take a grant; the same on all hosts.
    GRANT_TIMEOUT = Setting(2.0, _seconds)
    #: The share of the longest time a lock can be held after which a warning is logged.
    WARN_SHARE = Setting(0.8, check_share)
    #: Seconds after which a lock that is renewed without end logs a warning.
    WARN_AFTER: Setting[float | None] = Setting(None, partial(check_seconds, none="no warning"))
    #: Whether events are counted.
    METRICS = Setting(True, check_bool)
    #: Seconds: a free lock's acquisition that took longer gets a span.
    SLOW_ACQUISITION = Setting(0.005, _seconds_or_0)
    #: The exporters of metrics and traces.
    EXPORTERS: Setting[Sequence[str]] = Setting(
        (), _that(_are_exporters, f"a list of {', '.join(map(repr, EXPORTERS))}")
    )
    #: Whether a holder's description names the request's user.
    HOLDER_USER = Setting(False, check_bool)
    #: The cache alias of ``locked()`` and ``run_locked``.
    USING: Setting[str] = Setting("default", _that(_is_alias, "the alias of a cache"))
    #: What the version in a lock's key begins with.
    LOCK_PREFIX = Setting("lock:", _version)
    #: Behaviour of locks while Redis is down.
    ON_REDIS_DOWN = Setting("raise", _one_of(ON_REDIS_DOWN))
    #: The number of replicas that must confirm a lock.
    REPLICAS = Setting(0, check_count)
    #: The folder of the local locks; None: this user's among the temporary files.
    LOCAL_LOCK_FOLDER: Setting[str | None] = Setting(None, _folder)
    #: The number of failures in a row that open the circuit breaker; 0: never.
    BREAKER_FAILURES = Setting(2, check_count)
    #: Seconds between two attempts while the circuit breaker is open.
    BREAKER_PAUSE = Setting(2.0, _seconds)

    def __init__(self, options: Mapping[str, object] | None = None) -> None:
        prefix = "LOCK_"
        own = (options or {}).items()
        self._own = {n.removeprefix(prefix): v for n, v in own if n.startswith(prefix)}

    @classmethod
    def names(cls) -> list[str]:
        return sorted(name for name, value in vars(cls).items() if isinstance(value, Setting))

    def warn_after(self, longest: float) -> float:
        """Of a lock that can be held for at most so many seconds."""
        after = self.WARN_AFTER if math.isinf(longest) else self.WARN_SHARE * longest
        return after or math.inf


# -- the options of one call of get_or_set, completed by the settings ------------------------------

#: Seconds, or None without end; or a function of the value that returns that.
Timeout = float | None | Callable[[Any], float | None]
_AS_SETTINGS = ("stale", "background", "soft_timeout", "on_wait_timeout", "jitter", "error_ttl")
#: How each is checked. Unlike the setting WAIT, a wait may be 0.
_CHECKS: dict[str, Callable[[str, object], object]] = {
    **{name: vars(Conf)[name.upper()].check for name in _AS_SETTINGS},
    "wait": _seconds_or_0,
    "group": lambda _, group: check_group(group),
}


class GetOrSetOptions:
    """The options of one call, checked. What is left out is a setting, read when it is needed, and
    remembered from then on."""

    stale: float
    wait: float
    on_wait_timeout: str
    jitter: float
    background: bool
    soft_timeout: float | None
    error_ttl: float
    group: str | None = None

    def __init__(self, conf: Conf, given: Mapping[str, object]) -> None:
        self._conf = conf
        vars(self).update(given)

    def __getattr__(self, name: str) -> Any:
        if name not in _CHECKS:
            raise AttributeError(name)
        value = vars(self)[name] = getattr(self._conf, name.upper())
        return value

    @classmethod
    def of(cls, conf: Conf, timeout: Timeout, **arguments: object) -> GetOrSetOptions:
        """The ``arguments`` of a call, completed by the settings. A value without a ``timeout`` is
        never stale, regardless of the setting. Raises as ``check`` and ``check_timeout`` do."""
        cls.check_timeout(timeout)
        given = cls.check(**arguments)
        if timeout is None:
            given.setdefault("stale", 0.0)
        if given.get("soft_timeout") is not None:
            given["background"] = False  # It counts more than the setting.
        chosen = cls(conf, given)
        if not chosen.stale:
            cls.check_without_stale(**given)
        elif timeout is None:
            raise ValueError("stale needs a timeout: a value without one is never stale")
        return chosen

    @classmethod
    def check_without_stale(cls, **arguments: object) -> None:
        """``check`` for a call whose values are never stale."""
        if cls.check(**arguments).get("soft_timeout") is not None:
            raise ValueError("soft_timeout needs stale: without an old value the caller must wait")

    @staticmethod
    def check_timeout(timeout: Any) -> None:
        """Raises TypeError or ValueError if it is neither a number, None, nor a function. As in
        Django, any number of seconds is allowed, and 0 or less means not to store the value."""
        if not (callable(timeout) or (type(timeout) in (int, float) and math.isfinite(timeout))):
            check_seconds("timeout", timeout, zero=True, none="no end")

    @property
    def refresh_wait(self) -> float | None:
        """Seconds to wait for a refresh in the background; None: compute in the caller."""
        return 0.0 if self.background else self.soft_timeout

    @classmethod
    def check(cls, **arguments: object) -> dict[str, Any]:
        """The ``arguments`` that are not SETTING. Raises TypeError or ValueError if one is invalid,
        or two exclude each other."""
        given = {name: value for name, value in arguments.items() if value is not SETTING}
        for name, value in given.items():
            if name not in _CHECKS:
                known = sorted((*_CHECKS, "timeout", "version"))
                raise unknown_option("get_or_set", name, known)
            _CHECKS[name](name, value)
        if given.get("soft_timeout") is not None and given.get("background"):
            raise ValueError("give soft_timeout or background: with background it does not wait")
        return given

    def lifetime(self, timeout: Timeout) -> Callable[[object], int]:
        """What returns the milliseconds to store a value: 0 without end, negative not at all. It
        raises TypeError or ValueError if ``timeout`` is a function whose result is invalid."""
        if callable(timeout):
            check_plain("timeout", timeout)
            return lambda value: self._milliseconds(checked_timeout(timeout(value)))
        return lambda _: self._milliseconds(timeout)

    def _milliseconds(self, timeout: float | None) -> int:
        if timeout is None:
            return 0
        share = 1 - self.jitter * random.random() if self.jitter else 1
        milliseconds = int(min(timeout, 1e15) * 1000 * share)
        return milliseconds + int(self.stale * 1000) if milliseconds > 0 else -1


def checked_timeout(timeout: Any) -> float | None:
    """``timeout``, which a function has returned. Less than 0 means 0, as in Django."""
    if type(timeout) in (int, float) and timeout < 0:
        return 0.0
    return check_seconds("what timeout returns", timeout, zero=True, none="no end")


extension.breaker_limits = lambda: (Conf().BREAKER_FAILURES, Conf().BREAKER_PAUSE)
