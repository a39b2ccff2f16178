"""The options of one call of ``get_or_set``, completed by the settings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypedDict

from ..conf import ON_WAIT_TIMEOUT, SETTING, Conf
from ..events import check_group
from ..protocol import check_seconds, check_share

#: Seconds, or None without end; or a function of the value that returns that.
Timeout = float | None | Callable[[Any], float | None]
OnWaitTimeout = Literal["compute", "raise", "default"]


class GetOrSetManyArguments(TypedDict, total=False):
    """The options of ``RedisCache.get_or_set_many``, explained at ``get_or_set``."""

    wait: float
    on_wait_timeout: OnWaitTimeout
    jitter: float
    error_ttl: float
    group: str | None


class GetOrSetArguments(GetOrSetManyArguments, total=False):
    """The options of ``RedisCache.get_or_set``, explained there."""

    stale: float
    background: bool
    soft_timeout: float | None


_NAMES = frozenset(GetOrSetArguments.__annotations__)


class GetOrSetOptions(NamedTuple):
    """``GetOrSetArguments``, checked and complete."""

    stale: float
    wait: float
    on_wait_timeout: str
    jitter: float
    background: bool
    soft_timeout: float | None
    error_ttl: float
    group: str | None

    @classmethod
    def of(cls, conf: Conf, timeout: Timeout, **arguments: Any) -> GetOrSetOptions:
        """The ``arguments`` of a call, completed by the settings. A value without a ``timeout`` is
        never stale, regardless of the setting.

        Raises:
            TypeError, ValueError: see ``check``; or there is a ``soft_timeout`` and no ``stale``.
        """
        given = cls.check(**arguments)
        given.setdefault("group", None)
        if timeout is None:
            given.setdefault("stale", 0.0)
        if given.get("soft_timeout") is not None:
            given["background"] = False  # It counts more than the setting.
        values = (given[n] if n in given else getattr(conf, n.upper()) for n in cls._fields)
        chosen = cls(*values)
        if not chosen.stale:
            cls.check_without_stale(**given)
        return chosen

    @classmethod
    def check_without_stale(cls, **arguments: Any) -> None:
        """``check`` for a call whose values are never stale."""
        if cls.check(**arguments).get("soft_timeout") is not None:
            raise ValueError("soft_timeout needs stale: without an old value the caller must wait")

    @property
    def refresh_wait(self) -> float | None:
        """Seconds to wait for a refresh in the background; None: compute in the caller."""
        return 0.0 if self.background else self.soft_timeout

    @classmethod
    def check(cls, **arguments: Any) -> dict[str, Any]:
        """The ``arguments`` that are not SETTING.

        Raises:
            TypeError: there is no such option, or its value has the wrong type.
            ValueError: a value is invalid, or two exclude each other.
        """
        given = {name: value for name, value in arguments.items() if value is not SETTING}
        for name, value in given.items():
            if name not in _NAMES:
                known = ", ".join(sorted(_NAMES))
                raise TypeError(f"get_or_set has no option {name!r}; it has {known}")
            if name in ("stale", "wait", "error_ttl"):
                check_seconds(name, value, zero=True)
            elif name == "soft_timeout":
                check_seconds(name, value, zero=True, none="a wait to the end")
            elif name == "jitter":
                check_share(name, value)
            elif name == "group":
                check_group(value)
            elif name == "on_wait_timeout" and value not in ON_WAIT_TIMEOUT:
                allowed = '"compute", "raise" or "default"'
                raise ValueError(f"on_wait_timeout must be {allowed}, not {value!r}")
        if given.get("soft_timeout") is not None and given.get("background"):
            raise ValueError("give soft_timeout or background: with background it does not wait")
        return given

    def lifetime(self, timeout: Timeout) -> Callable[[Any], int]:
        """What returns the milliseconds to store a value: 0 without end, negative not at all.

        Raises:
            TypeError, ValueError: ``timeout`` is invalid, or None and ``stale`` is given. The
                result raises them if ``timeout`` is a function that returns no timeout.
        """
        if callable(timeout):
            return lambda value: self._milliseconds(_checked(timeout(value)))
        if timeout is None and self.stale:
            raise ValueError("stale needs a timeout: a value without one is never stale")
        self._milliseconds(timeout)
        return lambda _: self._milliseconds(timeout)

    def _milliseconds(self, timeout: float | None) -> int:
        if timeout is None:
            return 0
        milliseconds = int(timeout * 1000 * (1 - self.jitter * random.random()))
        return milliseconds + int(self.stale * 1000) if milliseconds > 0 else -1


def _checked(timeout: Any) -> float | None:
    """``timeout``, which a function has returned. Less than 0 means 0, as in Django."""
    if type(timeout) in (int, float) and timeout < 0:
        return 0.0
    return check_seconds("what timeout returns", timeout, zero=True, none="no end")
