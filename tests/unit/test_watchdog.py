"""Nothing of a run of the tests stays behind, also when that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.processes import until

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


def test_servers_and_folders_end_with_a_run_that_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", RUN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as run:
        assert run.stdout is not None
        servers = [run.stdout.readline().split() for _ in range(2)]
        assert all(psutil.pid_exists(int(pid)) for pid, _ in servers)
        run.kill()
    for pid, folder in servers:
        until(lambda pid=int(pid): not psutil.pid_exists(pid))
        until(lambda folder=folder: not Path(folder).exists())
