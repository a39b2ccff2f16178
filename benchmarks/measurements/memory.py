"""Memory that a held lock takes in Redis."""

from __future__ import annotations

import time
from typing import Any

import redis

from ..bench import Bench
from ..contenders import LOCKS, make_lock
from ..figures import median
from ..results import OURS, Result, Target
from ..server import figure

__all__ = ["measure"]

HELD, AFTER = "bytes while held", "bytes after release"
REFERENCE = "redis-py"
MOST_MORE = 390
#: Ours, as a user who may not have the server report changes (``CLIENT TRACKING``).
UNTRACKED = f"{OURS}, no reports of changes"


def measure(bench: Bench) -> Result:
    count = bench.pick(quick=200, full=1000)
    result = Result(
        f"Memory in Redis for each of {count} held locks",
        (HELD, "of it the keys", "keys", f"more than {REFERENCE}", AFTER),
        note="Held for a second and more, when the owner has been written down. By used_memory, "
        "without the buffers of connections; it has the server's tables in it. The keys alone by "
        "MEMORY USAGE. Without the right to CLIENT TRACKING the server does not remember whom it "
        "tells of a changed lock, and the holder learns of it at its next renewal.",
    )
    rounds = bench.pick(quick=1, full=3)
    clients = {**dict.fromkeys(LOCKS, bench.client), UNTRACKED: _untracked(bench.client)}
    found = {
        name: [_weigh(bench, name, count, client) for _ in range(rounds)]
        for name, client in clients.items()
    }
    for name, rows in found.items():
        held, own, keys, after = (median(column) for column in zip(*rows, strict=True))
        reference = median(row[0] for row in found[REFERENCE])
        result.rows[name] = (held, own, keys, held - reference, after)
    more = result.number(OURS, f"more than {REFERENCE}")
    aim = f"at most {MOST_MORE} bytes more than {REFERENCE}"
    result.targets = [Target.at_most(aim, more, MOST_MORE)]
    return result


def _untracked(client: redis.Redis) -> redis.Redis:
    user = "untracked"
    client.acl_setuser(
        user,
        enabled=True,
        nopass=True,
        keys="*",
        channels="*",
        categories=["+@all"],
        commands=["-client", "+client|id"],
    )
    known = client.connection_pool.connection_kwargs
    pool = redis.ConnectionPool(
        client.connection_pool.connection_class, **{**known, "username": user, "password": "any"}
    )
    return redis.Redis(connection_pool=pool)


def _weigh(
    bench: Bench, name: str, count: int, user: redis.Redis
) -> tuple[float, float, float, float]:
    client = bench.client
    contender = OURS if name == UNTRACKED else name
    bench.empty()
    one: Any = make_lock(contender, user, "bench:memory:first", 60)
    one.acquire()  # Scripts, connections.
    one.release()
    bench.empty()
    before = _used(client)
    locks = [make_lock(contender, user, f"bench:memory:{n:06}", 60) for n in range(count)]
    for lock in locks:
        lock.acquire()
    if contender == OURS:
        time.sleep(1.0)
    held = _used(client) - before
    keys = list(client.scan_iter(count=1000))
    own = sum(client.memory_usage(key, samples=0) or 0 for key in keys)
    for lock in locks:
        lock.release()
    after = _used(client) - before
    return held / count, own / count, len(keys) / count, after / count


def _used(client: Any) -> int:
    """Bytes, but not those of connections, which are as many for one lock as for a thousand."""
    return figure(client, "memory", "used_memory") - figure(client, "memory", "mem_clients_normal")
