"""The cache that the doctor examines, its servers, and the findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from redis.exceptions import NoPermissionError

from ..cache import lock_cache
from ..conf import Conf
from ..transport import is_cluster


class Level(IntEnum):
    """How bad a finding is.

    A ``NOTE`` may be intended; after a ``WARNING`` locks can be lost or late; after an ``ERROR``
    they do not work.
    """

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Finding:
    """The result of a probe.

    Attributes:
        topic: what was examined, in a word.
        text: the result, in a sentence.
        hint: what to do about it; may be empty.
        number: of the system check with the same message; may be empty.
        node: the servers it is about; empty for all.
    """

    topic: str
    level: Level
    text: str
    hint: str = ""
    number: str = ""
    node: str = ""


class Node:
    """One Redis server that locks are kept on.

    Args:
        address: host and port, or the path of a socket.
        client: a redis-py client of this server.
    """

    def __init__(self, address: str, client: Any) -> None:
        self.address = address
        self.client = client

    @cached_property
    def info(self) -> Mapping[str, Any] | None:
        """The reply to INFO; None if the user may not send it."""
        try:
            info: Mapping[str, Any] = self.client.info()
        except NoPermissionError:
            return None
        return info

    def get(self, field: str, default: Any = None) -> Any:
        return default if self.info is None else self.info.get(field, default)


class Target:
    """A cache that can lock.

    Raises:
        redis.exceptions.RedisError, OSError: no node of a cluster answers.
        ImproperlyConfigured: the cache cannot lock.
    """

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.cache: Any = lock_cache(alias)
        self.conf: Conf = self.cache.conf
        self.client: Any = self.cache._lock_client()
        self.is_cluster = is_cluster(self.client)

    @cached_property
    def nodes(self) -> list[Node]:
        """The servers that locks are kept on: one, or the primaries of a cluster."""
        if self.is_cluster:
            return [
                Node(f"{node.host}:{node.port}", self.client.get_redis_connection(node))
                for node in self.client.get_primaries()
            ]
        return [Node(self.address, self.client)]

    @cached_property
    def address(self) -> str:
        """The cache's server, without user and password."""
        if self.is_cluster:
            return "cluster"
        if self.cache.in_memory:
            return "in memory"
        options = self.client.connection_pool.connection_kwargs
        if options.get("path"):
            return str(options["path"])
        if "host" in options:
            return f"{options['host']}:{options.get('port', 6379)}/{options.get('db') or 0}"
        name = getattr(self.client.connection_pool, "service_name", "")
        return f"Sentinel {name}".strip()

    @property
    def user(self) -> str:
        """The Redis user of this cache."""
        if self.is_cluster:
            return "default"
        return self.client.connection_pool.connection_kwargs.get("username") or "default"
