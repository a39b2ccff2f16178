"""The list of held locks, as the admin shows it: what it costs the server."""

from __future__ import annotations

import time
from functools import partial

import redis

from django_redis_lock.ops.inventory.listing import list_held

from ..bench import Bench, in_turns
from ..contenders import make_lock
from ..figures import median
from ..results import OURS, Result, Target
from ..server import script_seconds

__all__ = ["measure"]

MS = "ms of the server"
FEW = 10
MOST = 50.0
#: "The same" with few keys, on a machine that others use as well.
SAME = 1.5

FILL = "for n = 1, tonumber(ARGV[1]) do redis.call('SET', ARGV[2] .. n, 'value') end"


def measure(bench: Bench) -> Result:
    many, locks = bench.pick(quick=50_000, full=1_000_000), bench.pick(quick=200, full=1000)
    result = Result(
        f"List {locks:,} held locks among cache keys",
        (MS, "ms here in all", "locks listed"),
        note="A SCAN over all keys is what a list without an index would begin with.",
    )
    bench.empty()
    few_db, many_db = (_database(bench, number) for number in (0, 1))
    _fill(few_db, FEW)
    _fill(many_db, many)
    held = []
    for client in (few_db, many_db):
        for n in range(locks):
            lock = make_lock(OURS, client, f"bench:held:{n:05}", 600)
            lock.acquire()
            held.append(lock)
    time.sleep(1.5)  # Until each has its owner's name beside it.
    of_few, of_many = f"{OURS}, {FEW} keys", f"{OURS}, {many:,} keys"
    found = in_turns(
        bench.pick(quick=3, full=11),
        {of_few: partial(_list, few_db, locks), of_many: partial(_list, many_db, locks)},
    )
    for name, rows in found.items():
        result.rows[name] = tuple(median(column) for column in zip(*rows, strict=True))
    result.rows[f"SCAN, {many:,} keys"] = _scan(many_db)
    for lock in held:
        lock.release()
    bench.empty()
    with_few, with_many = (result.number(name, MS) or 0.0 for name in (of_few, of_many))
    result.targets = [
        Target.at_most(f"at most {MOST:g} ms of the server's time", with_many, MOST),
        Target.at_most(
            f"with {FEW} keys the same (ratio at most {SAME})", with_many / with_few, SAME
        ),
    ]
    return result


def _database(bench: Bench, number: int) -> redis.Redis:
    kwargs = bench.client.connection_pool.connection_kwargs
    return redis.Redis(host=kwargs["host"], port=kwargs["port"], db=number)


def _fill(client: redis.Redis, count: int) -> None:
    for start in range(0, count, 100_000):
        client.eval(FILL, 0, min(100_000, count - start), f"cache:{start}:")


def _list(client: redis.Redis, locks: int) -> tuple[float, float, int]:
    server, began = script_seconds(client), time.perf_counter()
    inventory = list_held(client, b"", limit=locks)
    here = time.perf_counter() - began
    return (script_seconds(client) - server) * 1000, here * 1000, len(inventory.locks)


def _scan(client: redis.Redis) -> tuple[float, float, int]:
    client.config_resetstat()
    began = time.perf_counter()
    found = sum(1 for _ in client.scan_iter(match="bench:held:*", count=1000))
    here = time.perf_counter() - began
    stats = client.info("commandstats")
    return stats["cmdstat_scan"]["usec"] / 1000, here * 1000, found
