"""Each server: what it is, what it may forget, how far away it is."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

from ..protocol import CLOCK, Call
from ..transport import run
from .findings import Finding, Level, NodeProbe
from .target import Node, Target

__all__ = ["NODE_PROBES", "SETTINGS_PROBES"]

#: The oldest Redis that is supported.
OLDEST = (6, 2)
#: Questions asked to know the round trip.
ASKED = 21
#: Seconds: a round trip longer than this is felt by everybody who takes a lock.
SLOW = 0.05
#: Seconds by which clocks may differ before it is worth a word.
CLOCKS_APART = 1.0


def server(patient: Target, node: Node) -> Iterator[Finding]:
    info = node.info
    if info is None:
        yield Finding(
            "server",
            Level.NOTE,
            f'unknown: the user "{patient.user}" may not run INFO',
            "Allow +info to check version, eviction, persistence and replication.",
        )
        return
    name, version = _name_and_version(node)
    mode = node.get("redis_mode") or node.get("server_mode") or "standalone"
    role = {"master": "primary", "slave": "replica"}.get(node.get("role"), node.get("role"))
    text = f"{name} {version}, {mode}, {role}"
    # Valkey says for old clients which Redis it is like.
    if _numbers(str(info.get("redis_version", version))) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        hint = f"Locks need Redis {wanted} or later, or Valkey."
        yield Finding("server", Level.ERROR, text, hint, number="E101")
    elif node.get("role") == "slave":
        yield Finding(
            "server",
            Level.ERROR,
            f"{text}: a replica cannot take locks",
            "Put the address of the primary first in LOCATION, or use SentinelClient.",
            number="E102",
        )
    elif node.get("cluster_enabled") and not patient.is_cluster:
        yield Finding(
            "server",
            Level.ERROR,
            f"{text}: a single node of a cluster has only some of the locks",
            'Set CLIENT_CLASS to "django_redis_lock.clients.ClusterClient".',
            number="E103",
        )
    else:
        yield Finding("server", Level.OK, text)


def _name_and_version(node: Node) -> tuple[str, str]:
    for name, field in (("Valkey", "valkey_version"), ("Dragonfly", "dragonfly_version")):
        if node.get(field):
            return name, str(node.get(field))
    return "Redis", str(node.get("redis_version", "of an unknown version"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def memory(patient: Target, node: Node) -> Iterator[Finding]:
    """A lock is a key with an end, and evicting takes such keys first of all, or any key."""
    policy = node.get("maxmemory_policy")
    if policy is None:
        return
    limit, evicted = int(node.get("maxmemory", 0)), int(node.get("evicted_keys", 0))
    if policy == "noeviction":
        yield Finding("eviction", Level.OK, "noeviction: locks are never evicted")
    elif not limit:
        text = f"{policy}, but no maxmemory is set: nothing is evicted"
        yield Finding("eviction", Level.OK, text)
    else:
        so_far = f"; {evicted} keys have been evicted so far" if evicted else ""
        yield Finding(
            "eviction",
            Level.WARNING,
            f"{policy}: when memory runs out (maxmemory is {_bytes(limit)}), locks can be evicted "
            f"like any other key{so_far}",
            "Keep locks on a server with maxmemory-policy noeviction: add a cache alias for it, "
            'and name it in the setting USING: DJANGO_REDIS_LOCK = {"USING": "locks"}.',
            number="W101",
        )


def persistence(patient: Target, node: Node) -> Iterator[Finding]:
    if node.info is None:
        return
    if node.get("loading"):
        text = "the server is still loading its data, and answers nothing else"
        yield Finding("persistence", Level.ERROR, text, "Wait, and try again.")
        return
    if node.get("rdb_last_bgsave_status", "ok") != "ok":
        yield Finding(
            "persistence",
            Level.WARNING,
            "the last snapshot could not be written; Redis may reject all writes because of that, "
            "also locks",
            "Look into the log of Redis; often the disk is full.",
            number="W102",
        )
        return
    if node.get("aof_enabled"):
        how = node.setting("appendfsync")
        lost = "nothing" if how == "always" else "the last second" if how else "a moment"
        text = f"append-only file: a crash of the server loses {lost}"
        yield Finding("persistence", Level.OK, text)
        return
    snapshots = node.setting("save")
    kept = "the state of the last snapshot" if snapshots else "nothing"
    yield Finding(
        "persistence",
        Level.NOTE,
        f"a restart keeps {kept}: held locks are then lost, and their holders learn it at their "
        "next renewal",
        "If that must not happen, set appendonly yes.",
    )


def replication(patient: Target, node: Node) -> Iterator[Finding]:
    replicas = int(node.get("connected_slaves", 0))
    if node.info is None or node.get("role") != "master":
        return
    wanted = node.setting("min-replicas-to-write")
    if wanted and wanted != "0" and int(node.get("min_slaves_good_slaves", replicas)) < int(wanted):
        yield Finding(
            "replication",
            Level.ERROR,
            f"the server rejects writes: fewer than {wanted} replicas are connected "
            "(min-replicas-to-write)",
            "Bring the replicas back.",
            number="W102",
        )
    elif not replicas:
        yield Finding("replication", Level.OK, "none")
    else:
        known = [node.get(f"slave{number}") for number in range(replicas)]
        lags = [int(one["lag"]) for one in known if isinstance(one, dict) and "lag" in one]
        late = f", replication lag {max(lags)} s" if lags else ""
        yield Finding(
            "replication",
            Level.NOTE,
            f"{replicas} {'replica' if replicas == 1 else 'replicas'}{late}: a failover can lose "
            "the newest locks",
            "Where two holders at once would do damage, compare the fencing token; see "
            "docs/choosing_guarantees.md.",
        )


def connections(patient: Target, node: Node) -> Iterator[Finding]:
    used, most = node.get("connected_clients"), node.get("maxclients")
    if used is None or not most:
        return
    level = Level.WARNING if int(used) > 0.8 * int(most) else Level.OK
    hint = "Increase maxclients, or run fewer processes." if level else ""
    yield Finding("connections", level, f"{used} of {most}", hint)


def cluster(patient: Target, node: Node) -> Iterator[Finding]:
    if not node.get("cluster_enabled"):
        return
    try:
        state: dict[str, Any] = node.client.execute_command("CLUSTER INFO")
    except Exception as error:
        yield Finding("cluster", Level.NOTE, f"its state is unknown: {error}")
        return
    assigned, well = int(state.get("cluster_slots_assigned", 0)), state.get("cluster_state") == "ok"
    text = f"{assigned} of 16384 slots are served, by {state.get('cluster_size', '?')} primaries"
    if well and assigned == 16384:
        yield Finding("cluster", Level.OK, text)
    else:
        yield Finding(
            "cluster",
            Level.ERROR,
            f"{text}; its state is {state.get('cluster_state', 'unknown')}",
            "Locks in other slots cannot be had. Look at redis-cli --cluster check.",
        )


def round_trip(patient: Target, node: Node) -> Iterator[Finding]:
    """And the clocks: both are asked by the same questions."""
    trips, apart = [], []
    for _ in range(ASKED):
        began, wall = time.perf_counter(), time.time()
        server_us = run(node.client, Call(CLOCK, (), ())).value
        trip = time.perf_counter() - began
        trips.append(trip)
        apart.append((trip, int(server_us) / 1e6 - wall - trip / 2))
    middle, worst = statistics.median(trips), max(trips[1:])
    text = f"{_milliseconds(middle)}, at most {_milliseconds(worst)} of {ASKED - 1}"
    if middle > SLOW:
        hint = "Every lock costs two round trips. Run Redis closer to its clients."
        yield Finding("round trip", Level.WARNING, text, hint)
    else:
        yield Finding("round trip", Level.OK, text)
    difference = min(apart)[1]  # The shortest trip says it best.
    direction = "ahead" if difference > 0 else "behind"
    text = f"the server's is {_seconds(abs(difference))} {direction}"
    if abs(difference) > CLOCKS_APART:
        yield Finding(
            "clocks",
            Level.NOTE,
            text,
            "Locks use the server's clock only; synchronise both with NTP, to compare logs.",
        )
    else:
        yield Finding("clocks", Level.OK, text)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"


#: What ``check --deploy`` asks for as well: what is wrong with how the server is set up.
SETTINGS_PROBES: tuple[NodeProbe, ...] = (server, memory, persistence, replication)
NODE_PROBES: tuple[NodeProbe, ...] = (*SETTINGS_PROBES, connections, cluster, round_trip)
