"""A Redis of our own, and what it tells about itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import redis

from testproject.embedded_redis import EmbeddedRedis

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Ear", "cpu_seconds", "figure", "private_redis", "script_seconds"]


@contextmanager
def private_redis() -> Iterator[tuple[str, int]]:
    """The address and the process of an empty Redis on a free loopback port."""
    with EmbeddedRedis() as server:
        assert server.process is not None
        yield server.url, server.process.pid


def figure(client: redis.Redis, section: str, name: str) -> int:
    """One number of INFO."""
    info: dict[str, Any] = client.info(section)
    return int(info[name])


def cpu_seconds(client: redis.Redis) -> float:
    """Seconds of CPU time that the server has used."""
    used: dict[str, float] = client.info("cpu")
    return used["used_cpu_user"] + used["used_cpu_sys"]


def script_seconds(client: redis.Redis) -> float:
    """Seconds the server has spent in scripts that clients called."""
    stats: dict[str, dict[str, int]] = client.info("commandstats")
    calls = (stats.get(f"cmdstat_{name}", {}) for name in ("eval", "evalsha"))
    return sum(call.get("usec", 0) for call in calls) / 1e6


class Ear:
    """Hears which commands clients send; ``with Ear(client) as ear: ...``, then ``ear.heard``.

    By MONITOR, because the server's own statistics also count what scripts do inside.
    """

    def __init__(self, client: redis.Redis) -> None:
        self.heard: list[bytes] = []
        self._client = client
        self._until = math.inf
        kwargs = client.connection_pool.connection_kwargs
        where = {name: kwargs[name] for name in ("host", "port")}
        self._connection = redis.Connection(**where, socket_timeout=5.0, decode_responses=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._connection.connect()
        self._connection.send_command("MONITOR")
        self._connection.read_response()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        seconds, microseconds = self._client.time()
        self._until = seconds + microseconds / 1e6
        self._thread.join()
        self._connection.disconnect()

    def _listen(self) -> None:
        while True:
            if not self._connection.can_read(0.05):
                if self._until < math.inf:
                    return
                continue
            # 1339518083.107412 [0 127.0.0.1:60866] "get" "x"; from scripts: [0 lua]
            line: bytes = self._connection.read_response()
            if float(line[:17]) >= self._until:
                return
            if b" lua] " not in line[:60]:
                self.heard.append(line)
