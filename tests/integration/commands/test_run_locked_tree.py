"""``run_locked --shell``: all that comes of a program ends with it, wherever that has gone.

Each way out of the process group, for each way to end; one test lists all that was left.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import redis
from django.core.cache import caches

from django_redis_lock.management.job import Program
from tests.processes import ManageCommand, until
from tests.support.background import Background

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left")

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
until = time.monotonic() + 60  # It must not outlive a test that was killed.
for _ in range(2):
    if os.fork() == 0:
        while time.monotonic() < until:
            os.setsid()
            time.sleep(0.02)
            if os.fork(): os._exit(0)
        os._exit(0)
time.sleep(60)
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
    """The processes of a line that have not ended, without the guard, which has it as an
    argument."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                words = (folder / "cmdline").read_bytes()
                if token.encode() in words and b"process_tree.py" not in words:
                    found.append(int(folder.name))
    return found


def token() -> str:
    return f"1000.{secrets.randbelow(10**12):012}"


def line(way: str, token: str) -> str:
    sources = {"daemon": DAEMON, "storm": STORM, "counting": COUNTING}
    quoted = {name: f"'{source}'" for name, source in sources.items()}
    run = f"{sys.executable} -S -c"
    return way.format(sleep=f"sleep {token}", run=run, token=token, **quoted)


class Run:
    """``run_locked`` of one line."""

    def __init__(self, stack: ExitStack, way: str, *options: str) -> None:
        self.token = token()
        self.command = ManageCommand(
            "run_locked", "tree", *options, "--shell", "--", line(way, self.token)
        )
        stack.callback(kill, self.token)
        stack.callback(self.command.close)


def kill(token: str) -> None:
    for pid in left(token):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lose() -> None:
    assert caches["default"].lock("tree").reset()


def shut(program: Program) -> None:
    """As the kernel does for a process that is killed."""
    assert program._link is not None
    program._link.shutdown(socket.SHUT_WR)


#: What run_locked does with its program, and what for.
ENDS: dict[str, Callable[[Program], object]] = {
    "the lock is lost": Program.terminate,
    "SIGTERM": lambda program: program._order(bytes([signal.SIGTERM])),
    "SIGINT": lambda program: program._order(bytes([signal.SIGINT])),
    "killed": shut,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("end", ENDS)
def test_all_that_it_has_started_ends(stack: ExitStack, end: str) -> None:
    running = {}
    for way, template in WAYS.items():
        program = Program([line(template, mark := token())], grace=0.5)
        stack.callback(kill, mark)
        running[way] = program, mark, Background(lambda p=program: p.run({}, within=0.5))
    failures = []
    for _, mark, _ in running.values():
        until(lambda mark=mark: left(mark))
    for program, _, _ in running.values():
        ENDS[end](program)
    for way, (program, mark, result) in running.items():
        if end == "the lock is lost" or way in DEAF:
            program.kill()  # When its time is over.
        code = result.result()
        if code not in (124, 130, 137, 143) or left(mark):
            failures.append(f"{way}: {code}, {left(mark)}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("end", ["lost", "killed"])
def test_run_locked_waits_for_all(client: redis.Redis, stack: ExitStack, end: str) -> None:
    options = ("--timeout", "3", "--grace", "0.3")
    run = Run(stack, "(trap '' TERM; setsid {sleep} &); timeout 3600 {sleep}", *options)
    until(lambda: len(left(run.token)) >= 3)
    if end == "lost":
        lose()
        assert run.command.end()[0] == 76
    else:
        run.command.kill()
        until(lambda: not left(run.token))
        until(lambda: not client.exists(":lock:1:tree"))
    assert not left(run.token)


def test_a_program_that_ends_in_its_own_way_keeps_the_lock_until_all_has_ended(
    client: redis.Redis, stack: ExitStack
) -> None:
    way = "trap 'exit 3' TERM; (trap '' TERM; setsid {sleep}) & echo ready; wait"
    run = Run(stack, way, "--grace", "0.5")
    assert run.command.stdout.readline() == "ready\n"
    run.command.send_signal(signal.SIGTERM)
    assert run.command.end()[0] == 3
    assert not left(run.token)


def test_a_signal_reaches_each_process_once(client: redis.Redis, stack: ExitStack) -> None:
    started = "{run} {counting} inside {token} & setsid {run} {counting} outside {token} &"
    run = Run(stack, f"trap : USR1; {started} wait; wait; wait")
    assert [run.command.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    run.command.send_signal(signal.SIGUSR1)
    assert {run.command.stdout.readline() for _ in range(2)} == {"inside\n", "outside\n"}
    run.command.send_signal(signal.SIGTERM)
    assert run.command.end()[:2] == (143, "")
    assert not left(run.token)


def test_a_killed_guard_takes_the_group_along(client: redis.Redis, stack: ExitStack) -> None:
    run = Run(stack, "{sleep}; true")
    until(lambda: left(run.token))
    os.kill(os.getpgid(left(run.token)[0]), signal.SIGKILL)
    assert run.command.end()[0] == 137
    until(lambda: not left(run.token))


def test_what_a_management_command_has_started_ends_with_its_process(
    client: redis.Redis, stack: ExitStack, pace: int
) -> None:
    """Only then: until it is killed, it is in charge of it."""
    mark = token()
    words = ("--timeout", str(pace), "--grace", "0.3", "--", "obey", "--deaf", "--start", mark)
    command = ManageCommand("run_locked", "tree", *words, apps=("tests.commands_site",))
    stack.callback(kill, mark)
    stack.callback(command.close)
    until(lambda: left(mark))
    lose()
    assert command.end()[0] == 76
    until(lambda: not left(mark))
