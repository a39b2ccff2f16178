"""Whose calls may go past redis-py, over connections of our own."""

from __future__ import annotations

import weakref
from types import FunctionType
from typing import Any

from redis import Redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from .address import Client, unguarded
from .server import is_cluster

#: The arguments of redis-py's connections to which ours do justice, besides those of TLS, also
#: those of tasks.
_KNOWN = frozenset(
    (
        *("host", "port", "path", "db", "username", "password", "client_name", "encoding"),
        *("encoding_errors", "decode_responses", "socket_timeout", "socket_connect_timeout"),
        *("socket_read_size", "socket_keepalive", "socket_keepalive_options", "socket_type"),
        *("health_check_interval", "lib_name", "lib_version", "driver_info", "protocol"),
        *("legacy_responses", "himport_registry", "database"),
        # redis-py's own, of its pool; and of those the next two also look at the value.
        *("connection_pool", "orig_host_address", "orig_socket_timeout"),
        *("orig_socket_connect_timeout", "maint_notifications_pool_handler"),
        *("maint_notifications_config", "credential_provider", "parser_class"),
    )
)
#: The arguments that say what is sent again; see ``FollowingRetry.configured``.
RETRY = ("retry", "retry_on_error", "retry_on_timeout")
#: The methods of redis-py's client for which ours stand.
_STOOD_FOR = (
    *("get", "mget", "set", "delete", "exists", "ttl", "pttl", "expire", "pexpire", "persist"),
    *("expireat", "pexpireat", "eval", "evalsha", "pipeline", "execute_command", "parse_response"),
)
_plain: weakref.WeakKeyDictionary[Client, bool] = weakref.WeakKeyDictionary()


def is_plain(client: Client) -> bool:
    """Whether calls for values may go over connections of our own, past this ``client`` for
    threads: it, its pool and its connections are redis-py's, and have been given nothing but what
    ours know, too; no client-side cache, retry, renewed credentials or class of the project's."""
    plain = _plain.get(client)
    if plain is None:
        plain = _plain[client] = in_memory(client) or is_cluster(client) or _looks_plain(client)
    return plain


def _looks_plain(client: Any) -> bool:
    pool, kind = client.connection_pool, type(client)
    if any(getattr(kind, name) is not getattr(Redis, name) for name in _STOOD_FOR):
        return False
    settings = pool.connection_kwargs
    configured = getattr(settings.get("retry"), "configured", settings)
    retry = configured.get("retry") or Retry(NoBackoff(), 0)
    notifications = settings.get("maint_notifications_config")
    return (
        getattr(client, "connection", None) is None  # Else it is the only one for all calls.
        and _is_of_redis_py(type(pool))
        and _is_of_redis_py(unguarded(pool.connection_class))
        and _is_of_redis_py(settings.get("parser_class"))
        and not any(map(configured.get, RETRY[1:]))
        and _is_of_redis_py(type(retry))
        and not getattr(retry, "_retries", 0)
        and not hasattr(settings.get("credential_provider"), "on_next")
        and getattr(pool, "cache", None) is None
        and getattr(notifications, "enabled", None) is not True
        and all(
            value is None or name in _KNOWN or name in RETRY or name[:4] == "ssl_"
            for name, value in settings.items()
        )
    )


def in_memory(client: object) -> bool:
    """Whether ``client`` leads to a server in memory."""
    # Each class of such connections names its twin, for tasks or for threads.
    connects = getattr(getattr(client, "connection_pool", None), "connection_class", None)
    return hasattr(connects, "asyncio_class") or hasattr(connects, "thread_class")


def _is_of_redis_py(kind: type | None) -> bool:
    return kind is None or kind.__module__[:6] == "redis."


def is_observed(client: Client) -> bool:
    """Whether a tool (OpenTelemetry, Elastic APM, Sentry, Datadog, New Relic) has replaced methods
    of the class of ``client``, which leads to Redis: it sees no calls on connections of our own."""
    of = type(client)
    execute, evalsha = getattr(of, "execute_command", None), getattr(of, "evalsha", None)
    return not ((_is_its_own(execute) and _is_its_own(evalsha)) or in_memory(client))


def _is_its_own(method: object) -> bool:
    # The wrapper of a tool may claim the module of what it wraps, but is no function.
    return method is None or (type(method) is FunctionType and method.__module__[:6] == "redis.")
