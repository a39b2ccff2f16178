"""Redis servers that belong together, for tests: a primary with replicas and sentinels, and a
cluster. Each server is a ``RedisServer`` of its own, so each can be stopped, killed and frozen.
"""

from __future__ import annotations

import binascii
import math
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import redis
from redis.sentinel import Sentinel

from tests.processes import until
from tests.redis_server import PORTS, RedisServer, fresh_port

__all__ = ["ClusterServers", "SentinelServers", "cluster", "cut_off", "sentinels", "slot_of"]

#: What lets replicas get their first copy at once.
PROMPT: dict[str, str | int] = {
    "repl-diskless-sync": "yes",
    "repl-diskless-sync-delay": 0,
    "repl-ping-replica-period": 1,
}
#: A node's port for the other nodes is 10,000 higher; it too must be below the system's own range.
NODE_PORTS = range(PORTS.start, PORTS.stop - 10_000)
SLOTS = 16384


def slot_of(key: bytes | str) -> int:
    """The slot of a key without braces."""
    return binascii.crc_hqx(key if isinstance(key, bytes) else key.encode(), 0) % SLOTS


def ask(server: RedisServer, *command: Any) -> Any:
    """The server's answer, as text; None if there is none just now."""
    if server.frozen:
        return None
    try:
        return server.asking.execute_command(*command)
    except (redis.RedisError, OSError):
        return None


def cut_off(primary: RedisServer, replicas: list[RedisServer]) -> None:
    """Freeze ``replicas``, so that nothing ``primary`` does from now on comes to them."""
    for replica in replicas:
        replica.pause()

    def cut() -> bool:
        """The others connect again, but not between two commands."""
        kills = [ask(primary, "CLIENT", "KILL", "TYPE", "replica") for _ in range(2)]
        return kills[1] == 0

    until(cut)  # What is on the way already would be read later.


class Group:
    """Servers that belong together; a context manager that starts all and stops them for good."""

    servers: list[RedisServer]

    def _is_well(self) -> bool:
        raise NotImplementedError

    def settle(self) -> None:
        """Start what does not run, let what is frozen go on, and wait until all is well."""
        self.run()
        until(self._is_well)

    def run(self) -> None:
        for server in self.servers:
            if server.runs:
                server.resume()
            else:
                server.start()

    def close(self) -> None:
        for server in self.servers:
            server.close()

    @staticmethod
    def _replicate(primary: RedisServer, replicas: int, command: str = "PING") -> None:
        """Run ``command``, and wait until so many replicas have what has happened until then. After
        a copy a primary sends that on only when the replica has confirmed the copy, up to a second
        later; until then a replica that calls itself connected has the keys of before."""

        def replicated() -> bool:
            return ask(primary, command) and ask(primary, "WAIT", replicas, 500) == replicas

        until(replicated)


def _pairs(reply: list[str]) -> dict[str, str]:
    """Of a reply in which names and values take turns."""
    return dict(zip(reply[::2], reply[1::2], strict=True))


class SentinelServers(Group):
    """One primary, two replicas and three sentinels.

    Args:
        down_after: seconds of silence after which the sentinels begin to replace a primary.
    """

    #: What the sentinels call it.
    name = "main"

    def __init__(self, down_after: float = 60.0) -> None:
        ports = [fresh_port() for _ in range(6)]
        first = ports[0]
        self.nodes = [
            RedisServer(
                port=port,
                config=PROMPT if port == first else {**PROMPT, "replicaof": f"127.0.0.1 {first}"},
            )
            for port in ports[:3]
        ]
        ids = {port: secrets.token_hex(20) for port in ports[3:]}
        self.sentinels = []
        for port, myself in ids.items():
            main = self.name
            lines: dict[str, str | int] = {
                "sentinel myid": myself,
                f"sentinel monitor {main}": f"127.0.0.1 {first} 2",
                f"sentinel down-after-milliseconds {main}": int(down_after * 1000),
                # After a failed attempt they wait for twice as long before the next one.
                f"sentinel failover-timeout {main}": 1000,
                f"sentinel parallel-syncs {main}": 2,
            }
            # They would find each other, too, but after some seconds.
            for replica in ports[1:3]:
                lines[f"sentinel known-replica {main} 127.0.0.1 {replica}"] = ""
            for other in ids.keys() - {port}:
                lines[f"sentinel known-sentinel {main} 127.0.0.1 {other}"] = ids[other]
            self.sentinels.append(RedisServer(port=port, config=lines, sentinel=True))
        self.servers = [*self.nodes, *self.sentinels]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Of the sentinels, as redis-py and Django's settings take them."""
        return [("127.0.0.1", sentinel.port) for sentinel in self.sentinels]

    def manager(self, **options: Any) -> Sentinel:
        """redis-py's, for ``manager().master_for(servers.name)``."""
        return Sentinel(self.addresses, **{"socket_timeout": 5.0, **options})

    def client(self, **options: Any) -> redis.Redis:
        """A new client of whichever server is the primary."""
        found: redis.Redis = self.manager().master_for(self.name, **options)
        return found

    @property
    def primary(self) -> RedisServer:
        """The one that most sentinels call the primary."""
        said = [
            ask(sentinel, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.name)
            for sentinel in self.sentinels
            if sentinel.runs
        ]
        ports = [int(found[1]) for found in said if found]
        port = max(set(ports), key=ports.count)
        return next(node for node in self.nodes if node.port == port)

    @property
    def replicas(self) -> list[RedisServer]:
        primary = self.primary
        return [node for node in self.nodes if node is not primary]

    def _is_well(self) -> bool:
        self._wake_sentinels()
        states = [ask(sentinel, "SENTINEL", "MASTERS") for sentinel in self.sentinels]
        if not all(states):
            return False
        mains = [_pairs(main) for [main] in states]
        if len({main["port"] for main in mains}) != 1:
            return False
        if any(main["flags"] != "master" or main["num-other-sentinels"] != "2" for main in mains):
            return False
        for sentinel in self.sentinels:
            found = ask(sentinel, "SENTINEL", "REPLICAS", self.name) or []
            flags = [_pairs(one)["flags"] for one in found]
            if flags != ["slave", "slave"]:
                return False
        # What the sentinels know of the copying may be ten seconds old.
        primary = self.primary
        roles = [ask(node, "ROLE") for node in self.nodes]
        return all(roles) and all(
            role[0] == "master" and len(role[2]) == 2
            if node is primary
            else role[:1] + role[2:4] == ["slave", primary.port, "connected"]
            for node, role in zip(self.nodes, roles, strict=True)
        )

    def settle(self) -> None:
        # A primary that is none any more would find out after eight seconds.
        if all(sentinel.runs for sentinel in self.sentinels):
            primary = self.primary
            for node in self.nodes:
                if node is not primary:
                    if not node.runs:
                        node.start()
                    node.resume()
                    ask(node, "REPLICAOF", "127.0.0.1", primary.port)
        super().settle()

    def fail_over(self) -> None:
        """Have the sentinels make another server the primary, also if the present one is away and
        they have not noticed yet. It may go on for up to ten seconds before they make it a
        replica."""
        before, sentinel = self.primary, self.sentinels[0]

        def ordered() -> None:
            # An attempt that takes longer than the time-out is given up, and so is one of a
            # sentinel that is started again.
            main = _pairs(ask(sentinel, "SENTINEL", "MASTER", self.name) or [])
            if main and int(main["port"]) == before.port and "failover" not in main["flags"]:
                ask(sentinel, "SENTINEL", "FAILOVER", self.name)

        self.until_replaced(before, ordered)

    def until_replaced(
        self, before: RedisServer, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait until another server than ``before`` is the primary."""

        def replaced() -> bool:
            self._wake_sentinels()
            meanwhile()
            return self.primary is not before

        until(replaced)

    def _wake_sentinels(self) -> None:
        """A sentinel that stood still for two seconds decides nothing for half a minute ("TILT"),
        unless it is started again."""
        for sentinel in self.sentinels:
            if (ask(sentinel, "INFO", "sentinel") or {}).get("sentinel_tilt"):
                load = os.getloadavg()[0]
                warnings.warn(f"a sentinel stood still (load {load:.1f}): restarted", stacklevel=1)
                sentinel.restart()

    def flush(self) -> None:
        self._replicate(self.primary, 2, "FLUSHALL")

    def replicate(self) -> None:
        """Wait until the replicas have what has happened until now."""
        self._replicate(self.primary, 2)


class ClusterServers(Group):
    """Three primaries with a replica each.

    Args:
        node_timeout: seconds of silence after which a primary is replaced by its replica.
    """

    def __init__(self, node_timeout: float = 60.0) -> None:
        ports = [fresh_port(NODE_PORTS) for _ in range(6)]
        self._ids = {port: secrets.token_hex(20) for port in ports}
        #: The ids of primaries that never were: those of today begin as their replicas, and replace
        #: them. One that begins as a primary serves nobody for two seconds.
        self._former = [secrets.token_hex(20) for _ in range(3)]
        config: dict[str, str | int] = {
            **PROMPT,
            "cluster-enabled": "yes",
            "cluster-config-file": "nodes.conf",
            "cluster-node-timeout": int(node_timeout * 1000),
            # However long it has not heard of its primary, a replica is good enough.
            "cluster-replica-validity-factor": 0,
        }
        self.nodes = [
            RedisServer(port=port, config=config, files={"nodes.conf": self._known_to(port)})
            for port in ports
        ]
        self.servers = self.nodes

    def _known_to(self, me: int) -> str:
        """What a node remembers of its cluster, so that the nodes need not get acquainted."""
        ports = list(self._ids)
        lines = []
        for n, former in enumerate(self._former):
            slots = f"{SLOTS * n // 3}-{SLOTS * (n + 1) // 3 - 1}"
            lines.append(f"{former} :0@0 master,noaddr - 0 0 {n + 1} connected {slots}")
        for n, port in enumerate(ports):
            myself = "myself," if port == me else ""
            where = f"{self._ids[port]} 127.0.0.1:{port}@{port + 10_000} {myself}"
            primary = self._former[n] if n < 3 else self._ids[ports[n - 3]]
            lines.append(f"{where}slave {primary} 0 0 {n % 3 + 1} connected")
        epoch = 3 + ports.index(me)  # Another for each that will be a primary.
        return "\n".join([*lines, f"vars currentEpoch {epoch} lastVoteEpoch 0\n"])

    def settle(self) -> None:
        if self._former:
            self.run()
            for node in self.nodes:
                until(lambda node=node: "cluster_state:ok" in (ask(node, "CLUSTER", "INFO") or ""))
            for node in self.nodes[:3]:
                ask(node, "CLUSTER", "FAILOVER", "TAKEOVER")
            self._former = []
        super().settle()

    @property
    def url(self) -> str:
        return self.nodes[0].url

    def client(self, **options: Any) -> redis.RedisCluster:
        """A new client."""
        nodes = [redis.cluster.ClusterNode("127.0.0.1", node.port) for node in self.nodes]
        return redis.RedisCluster(startup_nodes=nodes, **options)

    def _is_well(self) -> bool:
        views, epochs = set(), {}
        for node in self.nodes:
            info, slots = ask(node, "CLUSTER", "INFO"), ask(node, "CLUSTER", "SLOTS")
            if not slots or "cluster_state:ok" not in info:
                return False
            epochs[node.port] = info[info.index("cluster_current_epoch") :].split()[:2]
            # Who has which slots, and who replicates whom.
            views.add(
                repr(sorted((r[0], r[1], r[2][1], sorted(n[1] for n in r[3:])) for r in slots))
            )
            if any(len(r) < 4 for r in slots):
                return False
        roles = [ask(node, "ROLE") for node in self.nodes]
        in_sync = sum(bool(r and r[0] == "slave" and r[3] == "connected") for r in roles)
        # Two primaries with one epoch get others later: then who has just got a slot may lose it.
        mine = {epochs[r[2][1]][1] for r in self._ranges()}
        agreed = len({current for current, _ in epochs.values()}) == 1 and len(mine) == 3
        return len(views) == 1 and in_sync == 3 and agreed

    # -- who has what --------------------------------------------------------------------------

    def _node(self, port: int) -> RedisServer:
        return next(node for node in self.nodes if node.port == port)

    def _ranges(self) -> list[Any]:
        """Of each range of slots: first, last, [host, port, id] of its primary, its replicas."""
        for node in self.nodes:
            if node.runs and (slots := ask(node, "CLUSTER", "SLOTS")):
                return list(slots)
        raise RuntimeError("no node answers")

    @property
    def primaries(self) -> list[RedisServer]:
        return [self._node(port) for port in sorted({r[2][1] for r in self._ranges()})]

    def range_of(self, slot: int) -> Any:
        found: list[Any] = []

        def known() -> bool:
            # At the moment of a takeover a node may know of nobody who has it.
            found[:] = [r for r in self._ranges() if r[0] <= slot <= r[1]]
            return bool(found)

        until(known)
        return found[0]

    def primary_of(self, key: bytes | str) -> RedisServer:
        return self._node(self.range_of(slot_of(key))[2][1])

    def replica_of(self, key: bytes | str) -> RedisServer:
        return self._node(self.range_of(slot_of(key))[3][1])

    # -- what happens to it --------------------------------------------------------------------

    def fail_over(self, key: bytes | str, *how: str) -> None:
        """Have the replica of the primary that has ``key`` take its place, losing nothing; with
        ``TAKEOVER``, also if that one is away and the others have not noticed yet."""
        heir, asked_at = self.replica_of(key), -math.inf

        def taken_over() -> bool:
            nonlocal asked_at
            # It refuses while it has no link to its primary, and after five seconds it gives up.
            if time.monotonic() > asked_at + 5 and ask(heir, "CLUSTER", "FAILOVER", *how):
                asked_at = time.monotonic()
            return self.primary_of(key) is heir

        until(taken_over)

    def begin_to_move(self, slot: int) -> tuple[RedisServer, RedisServer]:
        """Begin to move ``slot`` to another primary; its old and its new place."""
        old = self._node(self.range_of(slot)[2][1])
        new = next(node for node in self.primaries if node is not old)
        ask(new, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[old.port])
        ask(old, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[new.port])
        return old, new

    def move_keys(self, slot: int, old: RedisServer, new: RedisServer) -> None:
        """Move what is in ``slot``."""
        while keys := ask(old, "CLUSTER", "GETKEYSINSLOT", slot, 100):
            ask(old, "MIGRATE", "127.0.0.1", new.port, "", 0, 5000, "KEYS", *keys)

    def end_moving(self, slot: int, old: RedisServer, new: RedisServer) -> None:
        for node in (new, old, *self.primaries):
            ask(node, "CLUSTER", "SETSLOT", slot, "NODE", self._ids[new.port])

    def move(self, slot: int) -> None:
        """Move ``slot`` to another primary, as ``redis-cli --cluster reshard`` does."""
        old, new = self.begin_to_move(slot)
        self.move_keys(slot, old, new)
        self.end_moving(slot, old, new)

    def flush(self) -> None:
        for node in self.primaries:
            self._replicate(node, 1, "FLUSHALL")

    def replicate(self, key: bytes | str) -> None:
        """Wait until the replica has what has happened to ``key``. The caller of a script has the
        answer before the replicas have what it wrote, and a server can be frozen in between."""
        self._replicate(self.primary_of(key), 1)


@contextmanager
def sentinels(down_after: float = 60.0) -> Iterator[SentinelServers]:
    """``SentinelServers`` that run."""
    yield from _running(lambda: SentinelServers(down_after))


@contextmanager
def cluster(node_timeout: float = 60.0) -> Iterator[ClusterServers]:
    """``ClusterServers`` that run."""
    yield from _running(lambda: ClusterServers(node_timeout))


def _running(make: Callable[[], Any]) -> Iterator[Any]:
    """Such servers, at ports that were free: there is no way to reserve one."""
    for attempt in range(5):
        group = make()
        try:
            group.settle()
            break
        except BaseException as error:
            group.close()
            if attempt == 4 or "in use" not in str(error):
                raise
    try:
        yield group
    finally:
        group.close()
