"""How one call of ``get_or_set`` wants it done; the settings where it does not say."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from .conf import ON_WAIT_TIMEOUT, Conf
from .locking.arguments import check_seconds, check_share

__all__ = ["SETTING", "Terms"]

#: For an argument left out: the setting of the same name holds.
SETTING: Any = object()


class Terms(NamedTuple):
    """The options of ``RedisCache.get_or_set``, explained there: checked and complete."""

    stale: float
    wait: float
    on_wait_timeout: str
    jitter: float
    background: bool
    error_ttl: float

    @classmethod
    def of(cls, conf: Conf, **given: Any) -> Terms:
        """What a call has ``given``, and the settings for what is left out.

        Raises:
            TypeError, ValueError: something given makes no sense.
        """
        given = {name: value for name, value in given.items() if value is not SETTING}
        terms = cls(*(given.get(name, getattr(conf, name.upper())) for name in cls._fields))
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
