"""The benchmarks run: all of them, briefly. How fast anything is, is no matter for a test.
And the counts of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import MEASUREMENTS
from benchmarks.results import OURS
from django_redis_lock import Lock, Redlock
from tests.lanes import some
from tests.redis_server import RedisServer
from tests.support.python import python

ROOT = Path(__file__).parents[3]

#: So many runs at once, of some of the measurements each: they wait more than they compute.
RUNS = 2


def run(names: list[str], page: Path, plots: Path) -> str:
    """What a brief run of these measurements says."""
    only = (word for name in names for word in ("--only", name))
    words = ("--quick", "--plots", plots, "--tables", page, *only)
    # A server of the run's own, also where the tests were given one.
    done = python("-m", "benchmarks", *words, REDIS_URL=None)
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.uncovered
def test_every_measurement_gives_figures_of_ours(tmp_path: Path) -> None:
    published = (ROOT / "docs" / "benchmarks.md").read_bytes()
    measured = some(MEASUREMENTS, each=len(MEASUREMENTS))
    shares = [share for number in range(RUNS) if (share := measured[number::RUNS])]
    pages = [tmp_path / f"page{number}.md" for number in range(len(shares))]
    folders = [tmp_path / f"plots{number}" for number in range(len(shares))]
    with ThreadPoolExecutor(RUNS) as pool:
        said = list(pool.map(run, shares, pages, folders))
    for names, page, output in zip(shares, pages, said, strict=True):
        for name in names:
            assert f"\n({name}: " in output
        of_contenders = set(names) - {"calls"}  # Its rows are calls.
        assert output.count(f"\n* {OURS}") >= len(of_contenders)
        assert "Targets: " in output
        text = page.read_text()
        assert [name for name in names if f'`make bench ARGS="--only {name}"`' not in text] == []
        assert text.count(f"\n| **{OURS}") >= len(of_contenders)
    assert (ROOT / "docs" / "benchmarks.md").read_bytes() == published
    if "No plots" not in said[0]:
        for folder in folders:
            drawn = {path.suffix for path in folder.iterdir()}
            # Of some measurements there are no pictures.
            assert drawn == {".svg"} or (len(measured) < len(MEASUREMENTS) and not drawn)


CYCLES = 50
#: How often to count, if the keeper wrote something each time, or a server was late.
ATTEMPTS = 100
#: Calls, bytes to Redis and bytes from it, for each cycle.
CALLS, SENT, RECEIVED = 2, 710, 60


def cost(server: RedisServer, work: Callable[[], Any]) -> tuple[float, float, float]:
    """Scripts called, bytes sent and bytes received in each of CYCLES cycles."""
    with server.client() as client:
        work()  # Connects, and teaches the server the scripts.
        client.info()
        first = client.info()
        asking = client.info()
        work()
        last = client.info()
        taken = []
        for name in ("total_net_input_bytes", "total_net_output_bytes"):
            taken.append(last[name] - asking[name] - (asking[name] - first[name]))
        client.config_resetstat()
        work()
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        return calls / CYCLES, taken[0] / CYCLES, taken[1] / CYCLES


def expect_the_figures(server: RedisServer, work: Callable[[], Any]) -> None:
    """That a cycle costs no more, when nothing else happens in the process."""
    counted = []
    for _ in range(ATTEMPTS):
        counted.append(cost(server, work))
        calls, sent, received = counted[-1]
        if calls == CALLS and sent < SENT and received < RECEIVED:
            return
    raise AssertionError(f"calls, bytes sent and received: {counted}")


def cycles(lock: Any) -> None:
    for _ in range(CYCLES):
        assert lock.acquire()
        lock.release()


def test_one_server(own_server: RedisServer) -> None:
    lock = Lock(own_server.client(), ":lock:1:import", timeout=30)
    expect_the_figures(own_server, lambda: cycles(lock))


def test_each_of_several_servers(own_server: RedisServer) -> None:
    others = [RedisServer() for _ in range(2)]
    try:
        for server in others:
            server.start()
        clients = [server.client() for server in (own_server, *others)]
        lock = Redlock(clients, ":lock:1:import", timeout=30)
        expect_the_figures(own_server, lambda: cycles(lock))
    finally:
        for server in others:
            server.close()
