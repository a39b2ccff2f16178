"""The benchmarks run: all of them, briefly. How fast anything is, is no matter for a test.
And the counts of docs/scaling.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import MEASUREMENTS
from benchmarks.bench import Bench
from benchmarks.document import PUBLISHED
from benchmarks.figures import best, jain, median_known, median_ratio, percentile
from benchmarks.results import OURS, Result, Target
from django_redis_lock import Lock, Redlock
from tests.lanes import some
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[3]

GOOD, BAD, UNKNOWN = (Target.at_most("few", value, 2) for value in (1, 3, None))


#: So many runs at once, of some of the measurements each: they wait more than they compute.
RUNS = 2


def run(names: list[str], page: Path, plots: Path) -> str:
    """What a brief run of these measurements says."""
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    command += ["--plots", str(plots), "--tables", str(page)]
    command += [word for name in names for word in ("--only", name)]
    # A server of the run's own, also where the tests were given one.
    surroundings = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=surroundings,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
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
        assert output.count(f"\n* {OURS}") >= len(names)
        assert "Targets: " in output
        text = page.read_text()
        assert [name for name in names if f'`make bench ARGS="--only {name}"`' not in text] == []
        assert text.count(f"\n| **{OURS}") >= len(names)
    assert (ROOT / "docs" / "benchmarks.md").read_bytes() == published
    if "No plots" not in said[0]:
        for folder in folders:
            drawn = {path.suffix for path in folder.iterdir()}
            # Of some measurements there are no pictures.
            assert drawn == {".svg"} or (len(measured) < len(MEASUREMENTS) and not drawn)


def test_without_a_choice_it_measures_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(bench: Bench) -> Result:
        return Result("Speed", ("cycles/s",), rows={OURS: (1.0,)})

    monkeypatch.setattr(benchmarks, "MEASUREMENTS", dict.fromkeys(MEASUREMENTS, measure))
    page, tables = tmp_path / "page.md", tmp_path / "tables.md"
    assert benchmarks.main(["--quick", "--page", str(page), "--tables", str(tables)]) == 0
    assert re.findall(r"^\((\w+): ", capsys.readouterr().out, re.MULTILINE) == list(MEASUREMENTS)
    assert page.read_text().count(f"\n| **{OURS}") == len(PUBLISHED)
    assert tables.read_text().count(f"\n| **{OURS}") == len(MEASUREMENTS)


def rows(page: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.*)\|$", (ROOT / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines if "---" not in line]


def test_a_measurement_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "handover" in done.stderr


def test_figures() -> None:
    assert percentile([5, 1, 3, 2, 4], 50) == 3
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7, 8], 0) == 7
    assert percentile([], 99) is None
    assert jain([3, 3, 3]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert median_known([3, None, 1, 2]) == 2
    assert median_known([None]) is None
    assert median_ratio([2, 30, 2], [1, 10, 2]) == 2
    assert best([3, None, 2]) == 2
    assert best([3, 2], highest=True) == 3
    assert best([]) is None


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
