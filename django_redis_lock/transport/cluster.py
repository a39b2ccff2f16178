"""A Redis Cluster: each key is on the primary that has its slot, and slots move.

The map of slots is our own and not the client's: threads and tasks share it, and it is discovered
within a bounded time.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import redis.asyncio.cluster
import redis.cluster
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import Connection, SSLConnection
from redis.exceptions import AskError, ClusterDownError, MovedError, RedisError, TryAgainError
from redis.exceptions import ConnectionError as RedisConnectionError

from ..protocol import SLOTS, index_key, slot_of
from .address import Address, without_address
from .discovery import Topology, ask
from .server import Server, is_cluster, topologies

#: A server's refusals: it does not have the slot, or not yet. ClusterDownError is MASTERDOWN too.
REFUSALS = (MovedError, AskError, TryAgainError, ClusterDownError)


#: redis-py 5 knows these errors by their names only where it reads with these parsers; later
#: versions always do.
PARSER: Any = getattr(redis.cluster, "ClusterParser", None)
ASYNC_PARSER: Any = getattr(redis.asyncio.cluster, "ClusterParser", None)


class Node(Server):
    """One server of a cluster."""


class Slots(NamedTuple):
    """Which primary has which slots: the first and last slot of each range, and its primary."""

    first: list[int]
    last: list[int]
    owner: list[Server]

    def owner_of(self, slot: int) -> Server | None:
        place = bisect.bisect_right(self.first, slot) - 1
        return self.owner[place] if place >= 0 and slot <= self.last[place] else None


class Cluster(Topology):
    """A cluster.

    Args:
        client: redis-py's ``RedisCluster``, for threads or for asyncio.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(_common(client))
        manager = client.nodes_manager
        self._remap: Callable[[tuple[str, int]], tuple[str, int]] | None
        self._remap = getattr(manager, "address_remap", None)
        self._first = [(node.host, int(node.port)) for node in manager.startup_nodes.values()]
        self._known: list[Server] = []
        self._slots = Slots([], [], [])
        #: Slots that have moved since the last discovery.
        self._moved: dict[int, Server] = {}

    def __str__(self) -> str:
        return f"the cluster of {self._first[0][0]}:{self._first[0][1]}"

    @classmethod
    def identity(cls, pool: Any) -> tuple[Any, ...]:
        connection_class, settings = _common(pool)
        who = [settings.get(name) for name in ("username", "password")]
        where = frozenset(pool.nodes_manager.startup_nodes)
        return (connection_class, where, *who, id(settings.get("credential_provider")))

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        slot = slot_of(keys[0]) if keys else 0
        if self._moved and slot in self._moved:
            return self._moved[slot]
        return self._slots.owner_of(slot)

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        slot = slot_of(keys[0])
        return [key for key in keys if slot_of(key) == slot]

    def index_of(self, index: bytes, key: bytes) -> bytes:
        return index_key(index, slot_of(key))

    def primaries(self) -> dict[Server, list[int]]:
        """All servers that have slots, with their slots.

        Raises:
            redis.exceptions.ConnectionError: it is not known.
        """
        self.at(())
        found: dict[Server, list[int]] = {}
        for slot in range(SLOTS):
            owner = self._moved.get(slot) or self._slots.owner_of(slot)
            if owner is not None:
                found.setdefault(owner, []).append(slot)
        return found

    def _make_node(self, address: Address) -> Server:
        parser = {} if PARSER is None else {"parser_class": PARSER}
        return Node(address._replace(connection_kwargs={**address.connection_kwargs, **parser}))

    def refuses(self, error: BaseException) -> bool:
        return isinstance(error, REFUSALS)

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, MovedError):
            self._moved[error.slot_id] = self.sent_to(error)
        super().on_error(error)

    def sent_to(self, error: Any) -> Server:
        """The server a MOVED or an ASK names."""
        return self._node(*self._mapped(error.host, int(error.port)))

    def _mapped(self, host: str, port: int) -> tuple[str, int]:
        return self._remap((host, port)) if self._remap is not None else (host, port)

    def _look(self, until: float) -> None:
        errors: list[str] = []
        nodes = self._known or [self._node(*where) for where in self._first]
        for node in nodes:
            if errors and time.monotonic() >= until:
                break  # The next search begins with those that were not asked.
            try:
                ranges = ask(node, until, "CLUSTER", "SLOTS")
            except (RedisError, OSError) as error:
                errors.append(str(error))
                self._known = [*(each for each in self._known or nodes if each is not node), node]
                continue
            if ranges:
                self._take_in(node, ranges)
                return
        else:
            # All nodes may have new addresses: begin again with those of the settings.
            self._known = []
        raise RedisConnectionError("; ".join(errors) or "no node has any slots")

    def _take_in(self, asked: Server, ranges: Any) -> None:
        slots = Slots([], [], [])
        known = {}
        for first, last, *nodes in sorted(ranges, key=lambda found: int(found[0])):
            servers = [self._named(asked, node) for node in nodes]
            slots.first.append(int(first))
            slots.last.append(int(last))
            slots.owner.append(servers[0])
            known.update(dict.fromkeys(servers))
        self._slots, self._moved = slots, {}
        # Replicas too: they can say which primary replaced one that failed.
        self._known = list(known)
        self._keep_only(known)

    def _named(self, asked: Server, node: Any) -> Server:
        host = node[0].decode() if isinstance(node[0], bytes) else node[0]
        if not host:  # The node that was asked does not know its own address.
            host = asked.address.connection_kwargs["host"]
        return self._node(*self._mapped(host, int(node[1])))


def _common(client: Any) -> Address:
    """What connections to all nodes have in common."""
    settings = client.nodes_manager.connection_kwargs
    named = settings.get("connection_class", Connection)
    tls = settings.get("ssl") or issubclass(named, (SSLConnection, AsyncSSLConnection))
    return without_address(Address(SSLConnection if tls else Connection, settings))


# The first to be asked: any other attribute of a cluster's client makes it connect.
topologies.insert(0, (is_cluster, Cluster))
