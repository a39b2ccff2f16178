"""Memory that a held lock takes in Redis."""

from __future__ import annotations

import time
from typing import Any

from ..bench import Bench
from ..contenders import LOCKS, make_lock
from ..figures import median
from ..results import OURS, Result, Target
from ..server import figure

__all__ = ["measure"]

HELD, AFTER = "bytes while held", "bytes after release"
REFERENCE = "redis-py"
MOST_MORE = 400


def measure(bench: Bench) -> Result:
    count = bench.pick(quick=200, full=1000)
    result = Result(
        f"Memory in Redis for each of {count} held locks",
        (HELD, "of it the keys", "keys", f"more than {REFERENCE}", AFTER),
        note="Held for a second and more, when the owner has been written down. By used_memory, "
        "without the buffers of connections; it has the server's tables in it. The keys alone by "
        "MEMORY USAGE.",
    )
    rounds = bench.pick(quick=1, full=3)
    found = {name: [_weigh(bench, name, count) for _ in range(rounds)] for name in LOCKS}
    for name, rows in found.items():
        held, own, keys, after = (median(column) for column in zip(*rows, strict=True))
        reference = median(row[0] for row in found[REFERENCE])
        result.rows[name] = (held, own, keys, held - reference, after)
    more = result.number(OURS, f"more than {REFERENCE}")
    aim = f"at most {MOST_MORE} bytes more than {REFERENCE}"
    result.targets = [Target.at_most(aim, more, MOST_MORE)]
    return result


def _weigh(bench: Bench, contender: str, count: int) -> tuple[float, float, float, float]:
    client = bench.client
    bench.empty()
    one: Any = make_lock(contender, client, "bench:memory:first", 60)
    one.acquire()  # Scripts, connections.
    one.release()
    bench.empty()
    before = _used(client)
    locks = [make_lock(contender, client, f"bench:memory:{n:06}", 60) for n in range(count)]
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
