"""Which clients a tool observes. OpenTelemetry, Elastic APM, Sentry, Datadog and New Relic replace
methods of redis-py's clients; they see calls of these methods, and none on connections of our own.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

#: A tool replaces one of these.
_METHODS = ("execute_command", "evalsha")


def is_observed(client: Any) -> bool:
    """Whether a tool has replaced methods of the class of ``client``."""
    return not all(_is_of_redis_py(getattr(type(client), name, None)) for name in _METHODS)


def _is_of_redis_py(method: Any) -> bool:
    # The wrapper of a tool may claim the module of what it wraps, but is no function.
    return method is None or (
        type(method) is FunctionType and method.__module__.startswith("redis.")
    )
