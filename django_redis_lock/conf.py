"""Settings: the dict ``DJANGO_REDIS_LOCK``, read whenever a value is needed.

The same names, prefixed ``LOCK_``, in a cache's ``OPTIONS`` override them for that alias.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.dispatch import receiver

from .fallback import check_on_redis_down
from .protocol import check_count, check_seconds, check_share
from .transport import set_limits

__all__ = ["FOR_THE_PROCESS", "ON_WAIT_TIMEOUT", "Conf"]

#: What a follower can do when it has waited long enough.
ON_WAIT_TIMEOUT = ("compute", "raise", "default")
#: What ``get_or_set`` can do while Redis is away.
VALUES_ON_REDIS_DOWN = ("compute", "raise")
#: Settings that hold for the whole process: in one cache's options nobody reads them.
FOR_THE_PROCESS = ("BREAKER_FAILURES", "BREAKER_PAUSE", "EXPORTERS", "USING")
#: The exporters there are.
EXPORTERS = ("prometheus", "opentelemetry")


_given: Mapping[str, Any] | None = None


def given() -> Mapping[str, Any]:
    """The dict ``DJANGO_REDIS_LOCK``. It is looked up once, and again after it was overridden:
    asking Django for a setting that is not there costs more than all else in a cache hit."""
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
    """The settings that hold for one cache alias; without ``options``, for all of them."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        prefix = "LOCK_"
        own = (options or {}).items()
        self._own = {n.removeprefix(prefix): v for n, v in own if n.startswith(prefix)}

    @classmethod
    def names(cls) -> list[str]:
        """Every setting there is: each is a property of this name, with its type and default."""
        return sorted(name for name in dir(cls) if name.isupper())

    def mistakes(self) -> Iterator[tuple[str, str]]:
        """The settings whose values cannot be, each with a sentence that says what may be."""
        for name in self.names():
            try:
                getattr(self, name)
            except ImproperlyConfigured as error:
                yield name, str(error)

    def _get(self, name: str, default: Any) -> tuple[str, Any]:
        """Where the value of ``name`` is set, and the value."""
        if name in self._own:
            return f"the cache's option LOCK_{name}", self._own[name]
        return f"DJANGO_REDIS_LOCK: {name}", given().get(name, default)

    def _seconds(self, name: str, default: float, *, zero: bool = False) -> float:
        try:
            return check_seconds(*self._get(name, default), zero=zero) or 0.0
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None

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

    def _share(self, name: str, default: float) -> float:
        try:
            return check_share(*self._get(name, default))
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None

    @property
    def TIMEOUT(self) -> float:
        """Seconds a lock lives on the server between two renewals."""
        return self._seconds("TIMEOUT", 30.0)

    @property
    def FLIGHT_TIMEOUT(self) -> float:
        """Seconds after which the followers of a leader that died take over."""
        return self._seconds("FLIGHT_TIMEOUT", 10.0)

    @property
    def WAIT(self) -> float:
        """Seconds a follower waits for the leader's value before it computes its own."""
        return self._seconds("WAIT", 60.0)

    @property
    def STALE(self) -> float:
        """Seconds a value is served on after its timeout while one caller computes the next."""
        if "STALE" not in self._own and "STALE" not in given():
            return 0.0  # Each hit asks for this.
        return self._seconds("STALE", 0.0, zero=True)

    @property
    def BACKGROUND(self) -> bool:
        """Whether that caller too gets the old value at once."""
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
        return self._share("JITTER", 0.0)

    @property
    def ERROR_TTL(self) -> float:
        """Seconds after a failed computation in which nobody tries again."""
        return self._seconds("ERROR_TTL", 0.0, zero=True)

    @property
    def GRANT_TIMEOUT(self) -> float:
        """Seconds a waiter has to take up a lock that is passed to it; the same on all hosts."""
        return self._seconds("GRANT_TIMEOUT", 2.0)

    @property
    def WARN_SHARE(self) -> float:
        """The share, 0 to 1, of the time a lock can be held at most after which a warning says that
        it is held still; 0 for no warning."""
        return self._share("WARN_SHARE", 0.8)

    @property
    def WARN_AFTER(self) -> float | None:
        """The same in seconds, for locks that are renewed without end; None for no warning."""
        where, value = self._get("WARN_AFTER", None)
        try:
            return check_seconds(where, value, none="no warning")
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None

    def warn_after(self, longest: float) -> float:
        """Seconds after which to warn of a lock that can be held for ``longest`` at most."""
        after = self.WARN_AFTER if math.isinf(longest) else self.WARN_SHARE * longest
        return after or math.inf

    @property
    def METRICS(self) -> bool:
        """Whether what happens to locks and computations is counted, and written to Redis."""
        return self._switch("METRICS", True)

    @property
    def EXPORTERS(self) -> tuple[str, ...]:
        """What is told of locks and computations beside Redis: "prometheus", "opentelemetry"."""
        where, names = self._get("EXPORTERS", ())
        if not isinstance(names, (list, tuple)) or not set(names) <= set(EXPORTERS):
            allowed = ", ".join(map(repr, EXPORTERS))
            raise ImproperlyConfigured(f"{where} must be a list of {allowed}, not {names!r}")
        return tuple(names)

    @property
    def USING(self) -> str:
        """The alias of the cache for the locks of ``locked()`` and ``run_locked`` where they name
        none."""
        where, alias = self._get("USING", "default")
        if not isinstance(alias, str) or not alias:
            raise ImproperlyConfigured(f"{where} must be the alias of a cache, not {alias!r}")
        return alias

    @property
    def LOCK_PREFIX(self) -> str:
        """What stands before a lock's name in its cache key."""
        where, prefix = self._get("LOCK_PREFIX", "lock:")
        if not isinstance(prefix, str):
            raise ImproperlyConfigured(f"{where} must be a str, not {prefix!r}")
        return prefix

    @property
    def ON_REDIS_DOWN(self) -> str:
        """What a lock does when Redis is down: "raise", "local" (a lock of this host stands in) or
        "run" (go ahead without)."""
        where, choice = self._get("ON_REDIS_DOWN", "raise")
        try:
            return check_on_redis_down(where, choice)
        except ValueError as error:
            raise ImproperlyConfigured(str(error)) from None

    @property
    def REPLICAS(self) -> int:
        """How many replicas of the server must have confirmed that a lock is taken before it
        counts."""
        try:
            return check_count(*self._get("REPLICAS", 0))
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(str(error)) from None

    @property
    def LOCAL_LOCK_FOLDER(self) -> str | None:
        """Where a host's local locks are; None: a folder of this user's own among the system's
        temporary ones."""
        where, folder = self._get("LOCAL_LOCK_FOLDER", None)
        if folder is not None and not isinstance(folder, (str, PathLike)):
            raise ImproperlyConfigured(f"{where} must be a path or None, not {folder!r}")
        return None if folder is None else fspath(folder)

    @property
    def BREAKER_FAILURES(self) -> int:
        """After how many calls in a row that waited for Redis in vain others fail at once; 0: they
        always wait. For the whole process, not for one alias."""
        where, count = self._get("BREAKER_FAILURES", 2)
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ImproperlyConfigured(
                f"{where} must be a whole number of 0 or more, not {count!r}"
            )
        return count

    @property
    def BREAKER_PAUSE(self) -> float:
        """Seconds between two attempts to reach such a Redis. For the whole process."""
        return self._seconds("BREAKER_PAUSE", 2.0)


def _breaker_limits() -> tuple[int, float]:
    conf = Conf()
    return conf.BREAKER_FAILURES, conf.BREAKER_PAUSE


set_limits(_breaker_limits)
