"""``run_locked --shell``: all that comes of a program ends with it, wherever that has gone.

Each way out of the process group, for each way to end; one test lists all that was left.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
import redis
from django.core.cache import caches

from django_redis_lock import process_tree
from django_redis_lock.management.job import _in_new_group
from tests.processes import ManageCommand, until

#: A daemon by the book: two forks, a session, no streams.
DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for stream in range(3): os.dup2(os.open(os.devnull, os.O_RDWR), stream)
os.execvp(sys.argv[1], sys.argv[1:])
"""
#: Never the same pid for long, each in a session.
STORM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(4):
    if os.fork() == 0:
        while True:
            os.setsid()
            time.sleep(0.005)
            if os.fork(): os._exit(0)
time.sleep(1000)
"""
COUNTING = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: os.write(1, f"{sys.argv[1]}\\n".encode()))
os.write(1, b"ready\\n")
while True: signal.pause()
"""
#: Lines for a shell; {sleep} stays until it is ended, and "{run}" runs Python code.
WAYS = {
    "timeout": "timeout 3600 {sleep}",
    "timeout in timeout": "timeout 3600 timeout 3600 sh -c '{sleep}; true'",
    "setsid": "setsid {sleep}",
    "setsid -w": "setsid -w {sleep}; true",
    "nested shells": "sh -c \"sh -c 'setsid {sleep}; true'; true\"; true",
    "nohup": "nohup {sleep} > /dev/null 2>&1 & wait",
    "an orphan": "(setsid {sleep} > /dev/null 2>&1 &); {sleep}",
    "a daemon": "{run} {daemon} {sleep}; {sleep}",
    "a clean environment": "env -i setsid {sleep}; true",
    "deaf": "trap '' TERM INT; setsid {sleep} & {sleep}",
    "a deaf daemon": "trap '' TERM INT HUP; {run} {daemon} {sleep}; exec timeout 3600 {sleep}",
    "stopped": "setsid sh -c 'kill -STOP $$; {sleep}'",
    "a storm": "{run} {storm} {token}",
}


#: Of these, those whose program does not end when it is told to.
DEAF = ("deaf", "a deaf daemon", "stopped", "a storm")


def left(token: str) -> list[int]:
    """The processes of a line, without the guard, which has it as an argument."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if token in words and process_tree.__file__ not in words:
                found.append(process.pid)
    return found


class Run:
    """``run_locked`` of one line."""

    def __init__(self, stack: ExitStack, way: str, line: str, *options: str) -> None:
        self.way, self.name = way, f"tree-{way.replace(' ', '-')}"
        self.token = f"1000.{secrets.randbelow(10**12):012}"
        sources = {"daemon": DAEMON, "storm": STORM, "counting": COUNTING}
        quoted = {name: f"'{source}'" for name, source in sources.items()}
        self.line = line.format(
            sleep=f"sleep {self.token}", run=f"{sys.executable} -c", token=self.token, **quoted
        )
        self.command = ManageCommand("run_locked", self.name, *options, "--", self.line)
        stack.callback(self.close)

    def close(self) -> None:
        self.command.close()
        while pids := left(self.token):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lose(run: Run) -> None:
    assert caches["default"].lock(run.name).reset()


ENDS: dict[str, Callable[[Run], object]] = {
    "lost": lose,
    "SIGTERM": lambda run: run.command.send_signal(signal.SIGTERM),
    "SIGINT": lambda run: run.command.send_signal(signal.SIGINT),
    "killed": lambda run: run.command.kill(),
}


@pytest.mark.parametrize("end", ENDS)
def test_all_that_it_has_started_ends(client: redis.Redis, stack: ExitStack, end: str) -> None:
    options = ("--timeout", "3", "--grace", "0.5", "--shell")
    runs = [Run(stack, way, line, *options) for way, line in WAYS.items()]
    for run in runs:
        until(lambda run=run: left(run.token))
        ENDS[end](run)
    failures = []
    for run in runs:
        killed = end == "killed" or (end != "lost" and run.way in DEAF)
        if killed:  # Otherwise it waits for a deaf program.
            run.command.kill()
        code, _, said = run.command.end()
        if killed:
            with suppress(AssertionError):
                until(lambda run=run: not left(run.token))
        expected = {"killed": (-9,), "lost": (76,)}.get(end, (124, 130, 143, *[-9] * killed))
        if code not in expected or left(run.token):
            failures.append(f"{run.way}: {code}, {left(run.token)}, {said}")
    assert not failures, "\n".join(failures)


def test_what_it_leaves_behind_at_its_end_runs_on(client: redis.Redis, stack: ExitStack) -> None:
    """A daemon that is started under a lock."""
    run = Run(stack, "left", "{run} {daemon} {sleep}; exit 7", "--shell")
    assert run.command.end()[0] == 7
    assert not caches["default"].lock(run.name).locked()
    until(lambda: left(run.token))
    (daemon,) = left(run.token)
    assert psutil.Process(daemon).ppid() == 1


def test_a_program_that_ends_in_its_own_way_keeps_the_lock_until_all_has_ended(
    client: redis.Redis, stack: ExitStack
) -> None:
    line = "trap 'exit 3' TERM; (trap '' TERM; setsid {sleep}) & echo ready; wait"
    run = Run(stack, "own way", line, "--grace", "0.5", "--shell")
    assert run.command.stdout.readline() == "ready\n"
    run.command.send_signal(signal.SIGTERM)
    assert run.command.end()[0] == 3
    assert not left(run.token)


def test_a_signal_reaches_each_process_once(client: redis.Redis, stack: ExitStack) -> None:
    started = "{run} {counting} inside {token} & setsid {run} {counting} outside {token} &"
    run = Run(stack, "once", f"trap : USR1; {started} wait; wait; wait", "--shell")
    assert [run.command.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    run.command.send_signal(signal.SIGUSR1)
    assert {run.command.stdout.readline() for _ in range(2)} == {"inside\n", "outside\n"}
    run.command.send_signal(signal.SIGTERM)
    assert run.command.end()[:2] == (143, "")
    assert not left(run.token)


def test_a_group_that_is_stopped_ends(client: redis.Redis, stack: ExitStack) -> None:
    run = Run(stack, "stopped group", "{sleep}", "--grace", "0.3", "--shell")
    until(lambda: left(run.token))
    os.killpg(os.getpgid(left(run.token)[0]), signal.SIGSTOP)
    lose(run)
    assert run.command.end()[0] == 76
    assert not left(run.token)


def test_a_killed_guard_takes_the_group_along(client: redis.Redis, stack: ExitStack) -> None:
    run = Run(stack, "guard", "{sleep}; true", "--shell")
    until(lambda: left(run.token))
    os.kill(os.getpgid(left(run.token)[0]), signal.SIGKILL)
    assert run.command.end()[0] == 137
    until(lambda: not left(run.token))


def test_what_a_management_command_has_started_ends_with_its_process(
    client: redis.Redis, stack: ExitStack
) -> None:
    """Only then: until it is killed, it is in charge of it."""
    token = f"1000.{secrets.randbelow(10**12):012}"
    words = ("--timeout", "1", "--grace", "0.3", "--", "obey", "--deaf", "--start", token)
    command = ManageCommand("run_locked", "started", *words, apps=("tests.commands_site",))
    stack.callback(command.close)
    until(lambda: left(token))
    assert caches["default"].lock("started").reset()
    assert command.end()[0] == 76
    until(lambda: not left(token))


def test_without_a_subreaper_the_group_ends(tmp_path: Path) -> None:
    """As on systems other than Linux."""
    source = Path(process_tree.__file__).read_text()
    assert source.count('startswith("linux")') == 1
    script = tmp_path / "process_tree.py"
    script.write_text(source.replace('startswith("linux")', 'startswith("another")'))
    for order, patience, code in ((signal.SIGTERM, 0.2, b"143"), (signal.SIGKILL, 9, b"137")):
        token = f"1000.{secrets.randbelow(10**12):012}"
        line = f"(trap '' TERM; sleep {token}) & sleep {token}"
        ours, guards = socket.socketpair()
        with ours, guards:
            words = [str(guards.fileno()), "1", str(patience), "", "/bin/sh", "sh", "-c", line]
            guard = subprocess.Popen(
                [sys.executable, str(script), *words],
                pass_fds=[guards.fileno()],
                **_in_new_group(),
            )
            guards.close()
            ours.send(process_tree.START)
            until(lambda token=token: len(left(token)) == 4)
            ours.send(bytes([order]))
            assert ours.recv(100) == code
            assert guard.wait() == 0
        assert left(token) == []
