"""Settings: the dict ``DJANGO_REDIS_LOCK``, read at each use.

The same names with the prefix ``LOCK_`` in a cache's ``OPTIONS`` override them for that alias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, TypeVar

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

from .fallback import ON_REDIS_DOWN
from .protocol import check_count, check_seconds, check_share
from .transport import set_limits

__all__ = ["FOR_THE_PROCESS", "ON_WAIT_TIMEOUT", "SETTING", "Conf"]

T = TypeVar("T")

#: Stands for an argument left out, where None would be a value: the setting applies.
SETTING: Any = object()
#: What a follower does when its wait has timed out.
ON_WAIT_TIMEOUT = ("compute", "raise", "default")
#: What ``get_or_set`` does while Redis is down.
VALUES_ON_REDIS_DOWN = ("compute", "raise")
#: Settings of the whole process, which have no effect in the options of a cache.
FOR_THE_PROCESS = ("BREAKER_FAILURES", "BREAKER_PAUSE", "EXPORTERS", "USING")
#: The available exporters.
EXPORTERS = ("prometheus", "opentelemetry")


_given: Mapping[str, Any] | None = None


def given() -> Mapping[str, Any]:
    """The dict ``DJANGO_REDIS_LOCK``, looked up once and after each override: looking up a missing
    setting in Django takes longer than the rest of a cache hit."""
    global _given
    if _given is None:
        found = getattr(settings, "DJANGO_REDIS_LOCK", {})
        if not isinstance(found, Mapping):
            raise ImproperlyConfigured(f"DJANGO_REDIS_LOCK must be a dict, not {found!r}")
        _given = found
    return _given


@receiver(setting_changed)
def _look_up_again(*, setting: str, **kwargs: Any) -> None:
    global _given
    if setting == "DJANGO_REDIS_LOCK":
        _given = None


class Conf:
    """The settings for one cache alias; without ``options``, for all aliases."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        prefix = "LOCK_"
        own = (options or {}).items()
        self._own = {n.removeprefix(prefix): v for n, v in own if n.startswith(prefix)}

    @classmethod
    def names(cls) -> list[str]:
        """The names of all settings; each is a property with this name, its type and default."""
        return sorted(name for name in dir(cls) if name.isupper())

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """The settings with invalid values, each with a sentence that says what is allowed."""
        for name in self.names():
            try:
                getattr(self, name)
            except ImproperlyConfigured as error:
                yield name, str(error)

    def _get(self, name: str, default: Any) -> tuple[str, Any]:
        """The place where ``name`` is set, for messages, and its value."""
        if name in self._own:
            return f"the cache's option LOCK_{name}", self._own[name]
        return f"DJANGO_REDIS_LOCK: {name}", given().get(name, default)

    def _checked(self, check: Callable[..., T], name: str, default: Any, **options: Any) -> T:
        try:
            return check(*self._get(name, default), **options)
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None

    def _seconds(self, name: str, default: float, *, zero: bool = False) -> float:
        return self._checked(check_seconds, name, default, zero=zero) or 0.0

    def _switch(self, name: str, default: bool) -> bool:
        where, value = self._get(name, default)
        if not isinstance(value, bool):
            raise ImproperlyConfigured(f"{where} must be True or False, not {value!r}")
        return value

    def _choice(self, name: str, choices: Sequence[str]) -> str:
        """One of ``choices``; the first is the default."""
        where, choice = self._get(name, choices[0])
        if choice not in choices:
            allowed = ", ".join(map(repr, choices))
            raise ImproperlyConfigured(f"{where} must be one of {allowed}, not {choice!r}")
        return str(choice)

    @property
    def TIMEOUT(self) -> float:
        """Seconds; the lifetime of a lock on the server, from one renewal to the next."""
        return self._seconds("TIMEOUT", 30.0)

    @property
    def FLIGHT_TIMEOUT(self) -> float:
        """Seconds after which a follower takes over from a leader that died."""
        return self._seconds("FLIGHT_TIMEOUT", 10.0)

    @property
    def WAIT(self) -> float:
        """Seconds a follower waits for the leader's value before it computes its own."""
        return self._seconds("WAIT", 60.0)

    @property
    def STALE(self) -> float:
        """Seconds after its timeout for which a value is served while one caller computes
        the next."""
        if "STALE" not in self._own and "STALE" not in given():
            return 0.0  # Each hit reads this setting.
        return self._seconds("STALE", 0.0, zero=True)

    @property
    def BACKGROUND(self) -> bool:
        """Whether that caller gets the old value at once, too, and computes in the background."""
        return self._switch("BACKGROUND", False)

    @property
    def ON_WAIT_TIMEOUT(self) -> str:
        """What a follower does after WAIT: "compute", "raise" or "default"."""
        return self._choice("ON_WAIT_TIMEOUT", ON_WAIT_TIMEOUT)

    @property
    def VALUES_ON_REDIS_DOWN(self) -> str:
        """What ``get_or_set`` does when Redis is down: "compute" the value or "raise" the error."""
        return self._choice("VALUES_ON_REDIS_DOWN", VALUES_ON_REDIS_DOWN)

    @property
    def JITTER(self) -> float:
        """The largest share of a value's timeout, 0 to 1, by which it is shortened at random."""
        return self._checked(check_share, "JITTER", 0.0)

    @property
    def ERROR_TTL(self) -> float:
        """Seconds after a failed computation during which no caller tries again."""
        return self._seconds("ERROR_TTL", 0.0, zero=True)

    @property
    def GRANT_TIMEOUT(self) -> float:
        """Seconds that a waiter has to take a grant; must be the same on all hosts."""
        return self._seconds("GRANT_TIMEOUT", 2.0)

    @property
    def WARN_SHARE(self) -> float:
        """The share, 0 to 1, of the longest time a lock can be held after which a warning is logged
        that it is still held; 0 for no warning."""
        return self._checked(check_share, "WARN_SHARE", 0.8)

    @property
    def WARN_AFTER(self) -> float | None:
        """The same in seconds, for locks that are renewed without end; None for no warning."""
        return self._checked(check_seconds, "WARN_AFTER", None, none="no warning")

    def warn_after(self, longest: float) -> float:
        """Seconds after which to warn of a lock that can be held for at most ``longest``
        seconds."""
        after = self.WARN_AFTER if math.isinf(longest) else self.WARN_SHARE * longest
        return after or math.inf

    @property
    def METRICS(self) -> bool:
        """Whether events of locks and computations are counted, and the counts written to Redis."""
        return self._switch("METRICS", True)

    @property
    def EXPORTERS(self) -> tuple[str, ...]:
        """The exporters of metrics and traces: "prometheus", "opentelemetry"."""
        where, names = self._get("EXPORTERS", ())
        if not isinstance(names, (list, tuple)) or not set(names) <= set(EXPORTERS):
            allowed = ", ".join(map(repr, EXPORTERS))
            raise ImproperlyConfigured(f"{where} must be a list of {allowed}, not {names!r}")
        return tuple(names)

    @property
    def USING(self) -> str:
        """The default cache alias of ``locked()`` and ``run_locked``."""
        where, alias = self._get("USING", "default")
        if not isinstance(alias, str) or not alias:
            raise ImproperlyConfigured(f"{where} must be the alias of a cache, not {alias!r}")
        return alias

    @property
    def LOCK_PREFIX(self) -> str:
        """The prefix of a lock's name in its cache key."""
        where, prefix = self._get("LOCK_PREFIX", "lock:")
        if not isinstance(prefix, str):
            raise ImproperlyConfigured(f"{where} must be a str, not {prefix!r}")
        return prefix

    @property
    def ON_REDIS_DOWN(self) -> str:
        """What a lock does when Redis is down: "raise", "local" (take a lock of this host instead)
        or "run" (run without a lock)."""
        return self._choice("ON_REDIS_DOWN", ON_REDIS_DOWN)

    @property
    def REPLICAS(self) -> int:
        """How many replicas of the server must confirm a lock before it counts as acquired."""
        return self._checked(check_count, "REPLICAS", 0)

    @property
    def LOCAL_LOCK_FOLDER(self) -> str | None:
        """The folder of a host's local locks; None: a folder of this user in the system's folder
        for temporary files."""
        where, folder = self._get("LOCAL_LOCK_FOLDER", None)
        if folder is not None and not isinstance(folder, (str, PathLike)):
            raise ImproperlyConfigured(f"{where} must be a path or None, not {folder!r}")
        return None if folder is None else fspath(folder)

    @property
    def BREAKER_FAILURES(self) -> int:
        """The number of consecutive failed calls after which the circuit breaker opens, so that
        further calls fail at once; 0: never. For the whole process, not for one alias."""
        return self._checked(check_count, "BREAKER_FAILURES", 2)

    @property
    def BREAKER_PAUSE(self) -> float:
        """Seconds between two attempts to reach Redis while the circuit breaker is open. For the
        whole process."""
        return self._seconds("BREAKER_PAUSE", 2.0)


def _breaker_limits() -> tuple[int, float]:
    conf = Conf()
    return conf.BREAKER_FAILURES, conf.BREAKER_PAUSE


set_limits(_breaker_limits)
