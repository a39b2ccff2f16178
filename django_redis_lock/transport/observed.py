"""Which clients a tool observes. OpenTelemetry, Elastic APM, Sentry, Datadog and New Relic replace
methods of redis-py's clients; they see calls of these methods, and none on connections of our own.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


def is_observed(client: Any) -> bool:
    """Whether a tool has replaced methods of the class of ``client``, which leads to Redis."""
    of = type(client)
    execute, evalsha = getattr(of, "execute_command", None), getattr(of, "evalsha", None)
    if _is_of_redis_py(execute) and _is_of_redis_py(evalsha):
        return False
    # Connections in memory name each other (``TWINS``).
    connects = getattr(getattr(client, "connection_pool", None), "connection_class", None)
    return not (hasattr(connects, "asyncio_class") or hasattr(connects, "thread_class"))


def _is_of_redis_py(method: Any) -> bool:
    # The wrapper of a tool may claim the module of what it wraps, but is no function.
    return method is None or (type(method) is FunctionType and method.__module__[:6] == "redis.")
