"""Tests that several forked processes run: nothing that pytest says in one process gets lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.processes import until

CONFTEST = """
import os, signal
from pathlib import Path

import pytest

from tests import parallel

NOTES = Path(__file__).with_name("notes")

def note(text):
    with NOTES.open("a") as notes:
        notes.write(f"{text} {os.getpid()}\\n")

def pytest_addoption(parser):
    parser.addoption("--processes", type=parallel.number, default=1)

def pytest_configure(config):
    parallel.configure(config)

@pytest.fixture(scope="session")
def server():
    note("started")
    yield
    note("stopped")

@pytest.fixture
def broken():
    raise ValueError("broken")
"""

TESTS = """
import os, signal, sys, warnings

import pytest

def test_passes(server, tmp_path):
    tmp_path.joinpath("file").touch()

def test_fails():
    print("told before")
    assert 1 == 2

def test_skips():
    pytest.skip("no need")

@pytest.mark.xfail(strict=True)
def test_is_known():
    assert 0

def test_cannot_begin(broken):
    pass

def test_warns():
    warnings.warn("take care")

def test_is_killed(server):
    os.kill(os.getpid(), signal.SIGKILL)

@pytest.mark.parametrize("number", range(9))
def test_table(server, number):
    pass
"""

#: Of tests that wait for a signal.
WAITING = """
import signal
import pytest
from conftest import note

@pytest.mark.parametrize("number", range(2))
class TestWaits:
    def test_one(self, server, number):
        note("waits")
        signal.pause()

    def test_other(self, server, number):
        note("waits")
        signal.pause()
"""


def start(folder: Path, tests: str, *arguments: str) -> subprocess.Popen[str]:
    folder.joinpath("conftest.py").write_text(CONFTEST)
    folder.joinpath("test_them.py").write_text(tests)
    options = ("-p", "no:django", "-p", "no:django_redis_lock", "-p", "no:cacheprovider")
    root = Path(__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "--rootdir", str(folder), *options, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{os.environ['PYTHONPATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def notes(folder: Path) -> list[list[str]]:
    """What was noted, and by which process."""
    file = folder / "notes"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def test_all_that_pytest_says(tmp_path: Path) -> None:
    with start(tmp_path, TESTS, "--processes", "3", "-rs") as run:
        said, _ = run.communicate()
    assert run.returncode == 1
    end = "2 failed, 11 passed, 1 skipped, 1 xfailed, 1 warning, 1 error"
    assert end in said.splitlines()[-1], said
    for each in ("told before", "no need", "ValueError: broken", "take care", "exit status -9"):
        assert each in said
    # A process starts what its tests use, and stops it, but for the one that was killed.
    started = {process for what, process in notes(tmp_path) if what == "started"}
    stopped = {process for what, process in notes(tmp_path) if what == "stopped"}
    assert stopped < started
    assert len(started - stopped) == 1


def test_the_first_failure_ends_it(tmp_path: Path) -> None:
    with start(tmp_path, TESTS, "--processes", "2", "-x") as run:
        said, _ = run.communicate()
    assert run.returncode == 1
    assert "stopping after 1 failures" in said


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(
            signal.SIGKILL,
            marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells them"),
        ),
    ],
)
def test_all_end_with_the_first(tmp_path: Path, number: signal.Signals) -> None:
    """As with Ctrl-C, which is for the whole group."""
    with start(tmp_path, WAITING, "--processes", "2") as run:
        until(lambda: sum(what == "waits" for what, _ in notes(tmp_path)) == 2)
        processes = {int(process) for _, process in notes(tmp_path)}
        for pid in {run.pid, *processes} if number == signal.SIGINT else {run.pid}:
            os.kill(pid, number)
        run.communicate()
    until(lambda: not any(map(psutil.pid_exists, processes)))
    stopped = [what for what, _ in notes(tmp_path) if what == "stopped"]
    assert len(stopped) == (2 if number == signal.SIGINT else 0)
