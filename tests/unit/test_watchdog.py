"""Nothing of a run of the tests stays behind, also when that is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import leftovers
from tests.processes import until
from tests.redis_server import RedisServer, fresh_port

ROOT = Path(__file__).parents[2]

#: A run with a server that answers, and one that is frozen.
RUN = """
import sys
from tests.redis_server import RedisServer

servers = [RedisServer() for _ in range(2)]
for server in servers:
    server.start()
servers[1].pause()
for server in servers:
    print(server._process.pid, server._folder, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        yield run
        run.kill()


def servers_of(run: subprocess.Popen[str]) -> list[tuple[int, Path]]:
    assert run.stdout is not None
    lines = [run.stdout.readline().split() for _ in range(2)]
    servers = [(int(pid), Path(folder)) for pid, folder in lines]
    assert all(psutil.pid_exists(pid) for pid, _ in servers)
    return servers


def until_gone(servers: list[tuple[int, Path]]) -> None:
    for pid, folder in servers:
        until(lambda pid=pid: not psutil.pid_exists(pid))
        until(lambda folder=folder: not folder.exists())


def test_servers_and_folders_end_with_a_run_that_is_killed(run: subprocess.Popen[str]) -> None:
    servers = servers_of(run)
    run.kill()
    until_gone(servers)


def test_what_a_run_leaves_whose_watchdog_is_killed_as_well_is_removed_later(
    run: subprocess.Popen[str], redis_server: RedisServer
) -> None:
    servers = servers_of(run)
    (watchdog,) = (p for p in psutil.Process(run.pid).children() if "-S" in p.cmdline())
    watchdog.kill()
    leftovers.remove()
    assert all(psutil.pid_exists(pid) for pid, _ in servers), "its run goes on"
    run.kill()
    run.wait()
    assert all(folder.exists() for _, folder in servers)
    leftovers.remove()
    until_gone(servers)
    assert redis_server.client().ping(), "that of a run that goes on"


@pytest.mark.parametrize("sentinel", [False, True])
def test_a_server_whose_port_another_process_has_gets_a_second_one(
    monkeypatch: pytest.MonkeyPatch, sentinel: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        ports = [fresh_port(), taken]
        monkeypatch.setattr("tests.redis_server.fresh_port", ports.pop)
        with RedisServer(sentinel=sentinel) as server:
            assert server.port != taken
