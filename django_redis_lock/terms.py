"""How one call of ``get_or_set`` wants it done; the settings where it does not say."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypedDict

from .conf import ON_WAIT_TIMEOUT, Conf
from .locking.arguments import check_seconds, check_share

__all__ = ["Options", "Terms"]


class Options(TypedDict, total=False):
    """The options of ``RedisCache.get_or_set``, explained there."""

    stale: float
    wait: float
    on_wait_timeout: Literal["compute", "raise", "default"]
    jitter: float
    background: bool
    error_ttl: float


class Terms(NamedTuple):
    """``Options``, checked and complete."""

    stale: float
    wait: float
    on_wait_timeout: str
    jitter: float
    background: bool
    error_ttl: float

    @classmethod
    def of(cls, conf: Conf, options: Mapping[str, Any]) -> Terms:
        """The terms of a call with ``options``.

        Raises:
            TypeError, ValueError: an option is unknown or makes no sense.
        """
        unknown = ", ".join(sorted(set(options) - set(cls._fields)))
        if unknown:
            raise TypeError(f"no such option: {unknown}; there are {', '.join(cls._fields)}")
        terms = cls(*(options.get(name, getattr(conf, name.upper())) for name in cls._fields))
        for name in ("stale", "wait", "error_ttl"):
            check_seconds(name, getattr(terms, name), zero=True)
        check_share("jitter", terms.jitter)
        if terms.on_wait_timeout not in ON_WAIT_TIMEOUT:
            allowed = '"compute", "raise" or "default"'
            raise ValueError(f"on_wait_timeout must be {allowed}, not {terms.on_wait_timeout!r}")
        return terms

    def lifetime(self, timeout: float | None) -> int:
        """Milliseconds to keep a value: 0 without end, negative not at all.

        Raises:
            ValueError: a value that may be stale needs a timeout.
        """
        if timeout is None:
            if self.stale:
                raise ValueError("stale needs a timeout: a value without one is never stale")
            return 0
        milliseconds = int(timeout * 1000 * (1 - self.jitter * random.random()))
        return milliseconds + int(self.stale * 1000) if milliseconds > 0 else -1
