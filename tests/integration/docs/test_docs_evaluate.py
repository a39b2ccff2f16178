"""The commands of docs/evaluate.md are understood, and its holder learns of a loss."""

from __future__ import annotations

import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis.sentinel import Sentinel

from django_redis_lock import Lock, LockNotOwnedError
from django_redis_lock.management.commands import locks, run_locked
from tests.processes import PATIENCE, until
from tests.redis_topologies import SentinelServers

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "evaluate.md").read_text()
(HOLD,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
SHELL = "".join(re.findall(r"```shell\n(.*?)```", TEXT, re.DOTALL))
COMMANDS = {"locks": locks.Command, "run_locked": run_locked.Command}


@pytest.mark.parametrize("line", re.findall(r"^manage (.*?)(?: &)?$", SHELL, re.MULTILINE))
def test_each_command_is_understood(line: str) -> None:
    name, *words = shlex.split(line)
    COMMANDS[name]().create_parser("manage.py", name).parse_args(words)


def test_the_demo_prints_the_address_that_the_other_terminal_needs() -> None:
    assert "make demo\n" in SHELL
    source = "".join(path.read_text() for path in (ROOT / "testproject" / "demo").glob("*.py"))
    assert "REDIS_URL=" in source


def test_the_holder_learns_of_a_loss(
    sentinel_servers: SentinelServers, capsys: pytest.CaptureFixture[str]
) -> None:
    code = HOLD.replace('("127.0.0.1", 7003)', repr(sentinel_servers.addresses[0]))
    client: Any = Sentinel(sentinel_servers.addresses).master_for("main")
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(exec, code, {})
        lock = Lock(client, "payout")
        until(lock.locked)
        lock.reset()
        with pytest.raises(LockNotOwnedError):
            held.result(PATIENCE)
    assert " held " in capsys.readouterr().out
