"""``python -m benchmarks``: measure the package and its peers, say which targets are met."""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import redis

import django_redis_lock

from . import caches, contenders
from .bench import Bench
from .document import all_tables, document
from .measurements import (
    asyncio_cycle,
    calls,
    contention,
    cycle,
    growth,
    handover,
    hit,
    idle,
    stampede,
)
from .placement import placements
from .results import Result
from .server import private_redis
from .table import render, summary

#: What is compared, as the package index calls it.
PACKAGES = (
    *("Django", "django-redis", "python-redis-lock", "pottery", "dogpile.cache"),
    "django-cacheops",
)
MEASUREMENTS: dict[str, Callable[[Bench], Result | list[Result]]] = {
    "cycle": cycle.measure,
    "contention": contention.measure,
    "handover": handover.measure,
    "idle": idle.measure,
    "asyncio": asyncio_cycle.measure,
    "calls": calls.measure,
    "hit": hit.measure,
    "stampede": stampede.measure,
    "growth": growth.measure,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 1 if something could not be measured, else 0: a missed target is no error."""
    chosen = _parser().parse_args(arguments)
    names = chosen.only or list(MEASUREMENTS)
    results: dict[str, list[Result]] = {}
    failed = []
    whole = not chosen.quick and not chosen.only
    with private_redis() as (url, server):
        bench = Bench(url, server, chosen.quick)
        around = surroundings(bench)
        print("\n".join(f"{name}: {text}" for name, text in around.items()), end="\n\n", flush=True)
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
    around["load"] += f", {os.getloadavg()[0]:.1f} at the end"
    folder = chosen.plots or (Path("docs") if whole else None)
    if folder is not None:
        _draw(results, folder)
    for make, path, of_whole in (
        (document, chosen.page, "docs/benchmarks.md"),
        (all_tables, chosen.tables, "benchmarks/results.md"),
    ):
        if path or whole:
            file = path or Path(of_whole)
            file.write_text(make(results, around), encoding="utf-8")
            print(f"Written: {file}")
    if failed:
        print(f"Could not be measured: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="two minutes: see that it works, roughly how fast"
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
    parser.add_argument(
        "--page", type=Path, metavar="FILE", help="write the page here; a full run writes it anyway"
    )
    parser.add_argument(
        "--tables",
        type=Path,
        metavar="FILE",
        help="write all tables here; so does a full run",
    )
    return parser


def surroundings(bench: Bench) -> dict[str, str]:
    """What the figures depend on."""
    server = bench.client.info("server")["redis_version"]
    parser = "with hiredis" if redis.utils.HIREDIS_AVAILABLE else "without hiredis"
    absent = sorted({*contenders.ABSENT, *caches.ABSENT})
    found = {
        "date": f"{datetime.now(timezone.utc):%d %B %Y}",
        "machine": f"{_processor()}, {os.cpu_count()} cores, {platform.system()}",
        "Redis": server,
        "Python": platform.python_version(),
        "django_redis_lock": django_redis_lock.__version__,
        "redis-py": f"{redis.__version__}, {parser}",
    }
    found |= {name: version(name) for name in PACKAGES if name not in absent}
    if absent:
        found["not installed, not compared"] = ", ".join(absent)
    found["placements"] = "; ".join(placements()) or "left to the system"
    found["load"] = f"{os.getloadavg()[0]:.1f} at the beginning"
    if bench.quick:
        found["quick"] = "a few rounds only, the figures are rough"
    return found


def _processor() -> str:
    """What it is called."""
    with suppress(OSError):
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.machine()


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
