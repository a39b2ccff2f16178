"""How one call of ``get_or_set`` wants it done; the settings where it does not say."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from ..conf import ON_WAIT_TIMEOUT, Conf
from ..protocol import check_seconds, check_share

__all__ = ["SETTING", "GetOrSetOptions"]

#: For an argument left out: the setting of the same name holds.
SETTING: Any = object()


class GetOrSetOptions(NamedTuple):
    """The options of ``RedisCache.get_or_set``, explained there: checked and complete."""

    stale: float
    wait: float
    on_wait_timeout: str
    jitter: float
    background: bool
    error_ttl: float

    @classmethod
    def of(cls, conf: Conf, timeout: float | None, **given: Any) -> GetOrSetOptions:
        """What a call has ``given``, and the settings for what is left out. A value without a
        ``timeout`` is never stale, whatever the setting says.

        Raises:
            TypeError, ValueError: something given makes no sense.
        """
        given = cls.given(**given)
        if timeout is None:
            given.setdefault("stale", 0.0)
        values = (given[n] if n in given else getattr(conf, n.upper()) for n in cls._fields)
        return cls(*values)

    @classmethod
    def given(cls, **options: Any) -> dict[str, Any]:
        """Those of ``options`` that are not left out.

        Raises:
            TypeError, ValueError: one makes no sense.
        """
        given = {name: value for name, value in options.items() if value is not SETTING}
        for name, value in given.items():
            if name in ("stale", "wait", "error_ttl"):
                check_seconds(name, value, zero=True)
            elif name == "jitter":
                check_share(name, value)
            elif name == "on_wait_timeout" and value not in ON_WAIT_TIMEOUT:
                allowed = '"compute", "raise" or "default"'
                raise ValueError(f"on_wait_timeout must be {allowed}, not {value!r}")
        return given

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
