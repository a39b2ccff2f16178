"""The cache that the doctor examines, its servers, and the findings."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

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


class Target:
    """A cache that can lock.

    Raises:
        redis.exceptions.RedisError, OSError: no node of a cluster answers.
        ImproperlyConfigured: the cache cannot lock.
    """

    def __init__(self, alias: str) -> None:
        self.cache: Any = lock_cache(alias)
        self.conf: Conf = self.cache.conf
        self.client: Any = self.cache._lock_client()
        self.is_cluster = is_cluster(self.client)

    def nodes(self) -> dict[str, Any]:
        """The servers with locks, by address: one, or the primaries of a cluster; a client of
        each."""
        if self.is_cluster:
            return {
                f"{node.host}:{node.port}": self.client.get_redis_connection(node)
                for node in self.client.get_primaries()
            }
        return {self.address: self.client}

    @property
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
