"""``python -m benchmarks``: measure the package beside its peers, say which targets are met."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import redis

from . import caches, contenders
from .bench import Bench
from .measurements import (
    asyncio_cycle,
    asyncio_reads,
    contention,
    cycle,
    handover,
    hit,
    idle,
    inventory,
    memory,
    page,
    released,
    stampede,
)
from .results import Result
from .server import private_redis
from .table import render, summary

MEASUREMENTS: dict[str, Callable[[Bench], Result | list[Result]]] = {
    "cycle": cycle.measure,
    "contention": contention.measure,
    "handover": handover.measure,
    "idle": idle.measure,
    "memory": memory.measure,
    "asyncio": asyncio_cycle.measure,
    "asyncio_reads": asyncio_reads.measure,
    "hit": hit.measure,
    "stampede": stampede.measure,
    "page": page.measure,
    "inventory": inventory.measure,
    "released": released.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something could not be measured, else 0: a missed target is no error."""
    chosen = _parser().parse_args(arguments)
    names = chosen.only or list(MEASUREMENTS)
    results: dict[str, list[Result]] = {}
    failed = []
    with private_redis() as url:
        bench = Bench(url, chosen.quick)
        print(_surroundings(bench), end="\n\n", flush=True)
        for name in names:
            began = time.monotonic()
            try:
                measured = MEASUREMENTS[name](bench)
            except Exception:
                traceback.print_exc()
                failed.append(name)
                continue
            results[name] = measured if isinstance(measured, list) else [measured]
            print("\n\n".join(map(render, results[name])))
            print(f"({name}: {time.monotonic() - began:.0f} s)", end="\n\n", flush=True)
    print(summary(result for measured in results.values() for result in measured))
    folder = chosen.plots or (None if chosen.quick or chosen.only else Path("docs"))
    if folder is not None:
        _draw(results, folder)
    if failed:
        print(f"Could not be measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="under a minute: see that it works, roughly how fast"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=MEASUREMENTS,
        metavar="NAME",
        help=f"measure only this, may be repeated: {', '.join(MEASUREMENTS)}",
    )
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw here; a full run draws into docs anyway"
    )
    return parser


def _surroundings(bench: Bench) -> str:
    """What the figures depend on."""
    server = bench.client.info("server")["redis_version"]
    parser = "hiredis" if redis.utils.HIREDIS_AVAILABLE else "no hiredis"
    cores, load = os.cpu_count(), os.getloadavg()[0]
    ours = f"django-redis {version('django-redis')}, Python {platform.python_version()}"
    lines = [f"Redis {server}, redis-py {redis.__version__} with {parser}, {ours}, {cores} cores"]
    absent = sorted({*contenders.ABSENT, *caches.ABSENT})
    if absent:
        lines.append(f"Not installed, so not compared: {', '.join(absent)}")
    if load > 0.5:
        lines.append(f"Others use this machine too (load {load:.1f}): believe the ratios only")
    if bench.quick:
        lines.append("Quick: a few rounds only, the figures are rough")
    return "\n".join(lines)


def _draw(results: dict[str, list[Result]], folder: Path) -> None:
    if not importlib.util.find_spec("matplotlib"):
        print("No plots: matplotlib is not installed")
        return
    from .plots import draw

    for path in draw(results, folder):
        print(f"Drawn: {path}")


if __name__ == "__main__":
    # Here, because the tests import these modules, and have a process of their own to fork from.
    multiprocessing.set_forkserver_preload(["benchmarks.__main__"])
    sys.exit(main())
