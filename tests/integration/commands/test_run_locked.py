"""``manage.py run_locked``: in this process where it will do, in real ones where it matters."""

from __future__ import annotations

import fcntl
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.cache import caches
from django.core.management import CommandError, call_command

from django_redis_lock import Lock
from django_redis_lock.management import Exit
from django_redis_lock.management.commands.run_locked import Command
from django_redis_lock.management.job import Program
from tests.holding import hurry
from tests.processes import PATIENCE, ManageCommand, gone, until
from tests.redis_server import RedisServer, closed_port
from tests.support.commands import called
from tests.support.logs import logged
from tests.support.python import python

ROOT = Path(__file__).parents[3]
KEY = ":lock:1:job"


@contextmanager
def run(*words: str) -> Iterator[ManageCommand]:
    """``manage.py run_locked job …`` in a process of its own."""
    running = ManageCommand("run_locked", "job", *words, apps=("tests.commands_site",))
    try:
        yield running
    finally:
        running.close()


def here(capfd: Any, words: Sequence[str]) -> tuple[Any, str, str]:
    """The same in this process: exit code, standard output and error."""
    return called(Command(), capfd, "run_locked", *words)


def lock(**options: Any) -> Lock:
    return caches["default"].lock("job", **options)


# -- what to run -------------------------------------------------------------------------------


def test_a_management_command_runs_with_its_options_and_gives_the_lock_back(capfd: Any) -> None:
    code, out, err = here(capfd, ["job", "--", "check", "--list-tags"])
    assert (code, err) == (0, "")
    assert "redis_lock" in out.split()
    assert not lock().locked()


@pytest.mark.usefixtures("nothing_is_declared")
def test_called_from_code_it_passes_streams_and_errors_on() -> None:
    out = StringIO()
    call_command("run_locked", "job", "--", "check", "--tag", "redis_lock", stdout=out)
    assert "no issues" in out.getvalue()
    with lock(), pytest.raises(CommandError, match="job is held by") as caught:
        call_command("run_locked", "job", "--", "check")
    assert caught.value.returncode == Exit.TAKEN
    with pytest.raises(CommandError) as caught:
        call_command("run_locked", "job", "--shell", "--", "exit 3")
    assert caught.value.returncode == 3


def test_a_line_for_the_shell_knows_name_and_fence(capfd: Any) -> None:
    line = "echo $REDIS_LOCK_NAME:$REDIS_LOCK_FENCE | tr : ' '; exit 4"
    code, out, _ = here(capfd, ["job", "--shell", "--", line])
    name, fence = out.split()
    assert (code, name) == (4, "job")
    assert int(fence) > 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["job"], 2, "the command to run is missing"),
        (["job", "migrate", "--noinput"], 2, "The command to run comes after --"),
        (["job", "--", "migrat"], 127, "did you mean migrate?"),
        (["job", "--shell", "--", "/no/such", "program"], 127, "no program '/no/such'"),
        (["job", "--", "check", "--settings=x"], 2, "--settings has no effect"),
        (["job", "--using", "nope", "--", "check"], 2, "CACHES has no 'nope'"),
        (["job", "--using", "plain", "--", "check"], 2, "the cache 'plain' cannot lock"),
        (["", "--", "check"], 2, "name must not be empty"),
        (["job", "--wait", "-1", "--", "check"], 2, "--wait: it must be a number of seconds"),
        (["job", "--wait", "nan", "--", "check"], 2, "--wait: it must be a number of seconds"),
        (["job", "--timeout", "0", "--", "check"], 2, "a number of seconds greater than 0"),
        (["job", "--skip-exit-code", "256", "--", "check"], 2, "from 0 to 255, not '256'"),
        (["--", "check"], 2, "NAME"),
    ],
)
def test_what_makes_no_sense_is_refused(
    capfd: Any, words: list[str], code: int, message: str
) -> None:
    found, out, err = here(capfd, words)
    assert (found, out) == (code, "")
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err


# -- taken -------------------------------------------------------------------------------------


def test_a_lock_that_is_taken(capfd: Any, client: redis.Redis) -> None:
    with lock(label="the other"):
        hurry()
        until(lambda: client.exists("{:lock:1:job}:owner"))
        code, out, err = here(capfd, ["job", "--", "check"])
        assert (code, out) == (75, "")
        assert err.startswith("CommandError: nothing was run: job is held by ")
        assert "(the other)" in err
        assert err.endswith("More: manage.py locks show job\n")
        assert len(err.splitlines()) == 1
        code, out, err = here(capfd, ["job", "--skip-exit-code", "0", "--", "check"])
        assert (code, out) == (0, "")
        assert err.startswith("Nothing was run: job is held by ")
        assert here(capfd, ["job", "--skip-exit-code", "0", "-v0", "--", "check"]) == (0, "", "")


def test_a_wait_says_what_it_waits_for(capfd: Any, pace: int) -> None:
    assert lock(timeout=0.5 * pace).acquire()
    code, out, err = here(capfd, ["job", "--wait", "30", "--", "check", "--tag", "urls"])
    assert code == 0
    assert "no issues" in out
    first, last = err.splitlines()[:2]
    assert first.startswith("job is held by ")
    assert first.endswith("Waiting up to 30 s …")
    assert last.startswith("job was acquired after ")


def test_a_wait_ends(capfd: Any) -> None:
    with lock():
        code, out, err = here(capfd, ["job", "--wait", "0.002m", "--", "check"])
    assert (code, out) == (75, "")
    assert err.splitlines()[-1].startswith("CommandError: nothing was run: job is held by")


def test_without_redis_nothing_runs(capfd: Any, settings: Any) -> None:
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {"default": {"BACKEND": backend, "LOCATION": "redis://127.0.0.1:1/0"}}
    code, out, err = here(capfd, ["job", "--", "check"])
    assert (code, out) == (69, "")
    assert err.startswith("CommandError: nothing was run: the lock job could not be requested")


@pytest.mark.usefixtures("nothing_is_declared")
def test_what_runs_without_redis_is_logged(
    capfd: Any, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with closed_port() as port:
        default = {
            "BACKEND": "django_redis_lock.cache.RedisCache",
            "LOCATION": f"redis://127.0.0.1:{port}/0",
            "OPTIONS": {"LOCK_ON_REDIS_DOWN": "run"},
        }
        settings.CACHES = {"default": default}
        assert here(capfd, ["job", "--", "check"])[0] == 0
    (message,) = logged(caplog, "outage", "the lock :lock:1:job")
    assert message.startswith("Redis is down; the lock :lock:1:job is skipped, its code runs")


def test_it_waits_for_a_redis_that_is_not_up_yet(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.stop()
    monkeypatch.setenv("REDIS_URL", own_server.url)
    with run("--wait", "60", "--shell", "--", "echo ran") as job:
        said = job.stderr.readline()
        assert said.startswith("Redis cannot be reached: ")
        assert said.endswith("Waiting up to 60 s …\n")
        own_server.start()
        assert job.end()[:2] == (0, "ran\n")


def test_of_ten_processes_one_migrates_and_the_others_find_nothing_to_do(tmp_path: Path) -> None:
    with ExitStack() as stack:
        words = ("--wait", "100", "--", "migrate_once", str(tmp_path))
        ends = [one.end() for one in [stack.enter_context(run(*words)) for _ in range(10)]]
    assert [code for code, *_ in ends] == [0] * 10, ends
    assert sorted(out for _, out, _ in ends) == ["migrated\n"] + ["nothing to do\n"] * 9


# -- ends --------------------------------------------------------------------------------------


def test_lines_come_through_at_once_and_codes_too() -> None:
    for word, code, said in (
        ("fail", 3, "CommandError: failed as told"),
        ("crash", 1, "ValueError: crashed as told"),
    ):
        with run("--", "obey", "a", "--", "b") as running:
            assert running.stdout.readline() == "running job a b\n"
            print("hello", file=running.stdin)
            assert running.stdout.readline() == "heard ['hello']\n"
            assert lock().locked()
            print(word, file=running.stdin)
            found, _, err = running.end()
            assert (found, said in err) == (code, True), err
            assert not lock().locked()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGQUIT, 131), (signal.SIGINT, -2)],
)
def test_a_signal_releases_the_lock_at_once(number: signal.Signals, code: int) -> None:
    with run("--timeout", "60", "--", "obey") as running:
        assert running.stdout.readline().startswith("running")
        running.send_signal(number)
        assert running.end()[0] == code
        assert not lock().locked()


def test_a_signal_ends_the_wait(client: redis.Redis) -> None:
    with lock(), run("--wait", "forever", "--", "obey") as waiting:
        until(lambda: client.zcard("{:lock:1:job}:waiters"))
        waiting.send_signal(signal.SIGINT)
        code, _, said = waiting.end()
        assert code == 130
        assert said.splitlines()[-1] == "CommandError: interrupted while waiting"


# -- lost --------------------------------------------------------------------------------------


@pytest.mark.parametrize("deaf", [[], ["--deaf"]])
def test_a_command_whose_lock_is_lost_is_ended(deaf: list[str]) -> None:
    with run("--timeout", "3", "--grace", "0.3", "--", "obey", *deaf) as running:
        assert running.stdout.readline().startswith("running")
        assert lock().reset()
        with lock():  # Another has it now, and keeps it.
            code, _, said = running.end()
            assert lock().locked()
    assert code == 76
    why = "released by force by reset() in "
    assert f"The lock job is lost: {why}" in said
    assert "; ending manage.py obey." in said
    assert deaf or f"the lock job was lost while the command ran ({why}" in said


def test_a_command_may_go_on_without_its_lock() -> None:
    with run("--timeout", "3", "--on-lost", "ignore", "--", "obey") as running:
        assert running.stdout.readline().startswith("running")
        assert lock().reset()
        while "continues without it" not in running.stderr.readline():
            pass
        print("end", file=running.stdin)
        assert running.end()[0] == 0


# -- programs ----------------------------------------------------------------------------------


def test_signals_reach_a_program_and_its_code_comes_back() -> None:
    script = "trap 'echo caught; exit 7' TERM; echo ready; while :; do sleep 0.02; done"
    with run("--shell", "--", script) as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGTERM)
        assert running.stdout.readline() == "caught\n"
        assert running.end()[0] == 7
        assert not lock().locked()
    with run("--shell", "--", "sh", "-c", "echo ready; exec sleep 100") as running:
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGINT)
        assert running.end()[0] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_that_comes_while_a_program_is_being_started_reaches_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    start = subprocess.Popen

    def meanwhile(argv: list[str], **options: Any) -> subprocess.Popen[bytes]:
        if argv[-1] == "100":
            signal.raise_signal(number)
        return start(argv, **options)

    monkeypatch.setattr(subprocess, "Popen", meanwhile)
    assert Program(["sleep", "100"], grace=1).run({}, within=1) == 128 + number


def test_a_program_never_outlives_its_run_however_early_that_is_killed(
    client: redis.Redis,
) -> None:
    script = "echo $$; kill -KILL $PPID; trap : TERM; while :; do sleep 0.1; done"
    with run("--timeout", "2", "--grace", "0.3", "--shell", "--", script) as running:
        pid = int(running.stdout.readline())
        until(lambda: gone(pid))
    until(lambda: not client.exists(KEY))


def test_a_program_that_cannot_be_started(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("exit 3")  # It does not say which program is to read it.
    script.chmod(0o700)
    long = ("--grace", "900", "--timeout", "1800")
    with run(*long, "--shell", "--", str(script), "word") as running:
        code, _, said = running.end()
    assert code == 127
    assert said == f"CommandError: {script} cannot be started: Exec format error\n"
    assert not lock().locked()


ZIPPED = """
import sys
from django.conf import settings
from django.core.management import execute_from_command_line

settings.configure(
    INSTALLED_APPS=["django_redis_lock"],
    CACHES={"default": {"BACKEND": "django_redis_lock.cache.RedisCache", "LOCATION": sys.argv[2]}},
)
import django_redis_lock
assert django_redis_lock.__file__.startswith(sys.argv[1])
execute_from_command_line(["manage.py", "run_locked", "job", "--shell", "--", *sys.argv[3:]])
"""


@pytest.mark.sample(0)
def test_a_program_started_by_an_application_in_a_zip(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    """As ``python -m zipapp``, shiv and pex make them."""
    place = tmp_path / "app.zip"
    with zipfile.ZipFile(place, "w") as file:
        for each in (ROOT / "django_redis_lock").rglob("*.py"):
            file.write(each, each.relative_to(ROOT))
    words = (place, redis_server.url, "echo done; exit 3")
    done = python("-c", ZIPPED, *words, cwd=tmp_path, code=3, PYTHONPATH=place)
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_a_python_that_cannot_be_started_is_named(
    capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for executable in ("/nowhere/python", ""):
        monkeypatch.setattr(sys, "executable", executable)
        code, out, err = here(capfd, ["job", "--shell", "--", "echo done"])
        assert (code, out) == (127, "")
        assert f"Python ({executable!r}) cannot be started" in err
        assert "echo" not in err
    assert not lock().locked()


def test_a_guard_that_does_not_run_is_named(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    code, _, err = here(capfd, ["job", "--shell", "--", "echo done"])
    assert code == 1
    assert "the process that was to start it ended with code 1" in err


def test_a_program_has_the_terminal() -> None:
    ours, theirs = pty.openpty()

    def control() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    script = "echo re''ady; read word; echo got $word; read word; echo more $word; exec sleep 100"
    words = ("run_locked", "job", "--timeout", "60", "--shell", "--", script)
    options: Any = {**streams, "start_new_session": True, "preexec_fn": control}
    running = subprocess.Popen([sys.executable, "manage.py", *words], cwd=ROOT, **options)
    try:
        os.close(theirs)
        screen = b""

        def see(text: bytes) -> None:
            nonlocal screen
            while text not in screen:
                screen += os.read(ours, 1000)

        see(b"ready")
        os.write(ours, b"this\n")
        see(b"got this")
        os.write(ours, b"\x1a")  # Ctrl-Z
        os.write(ours, b"that\n")
        see(b"more that")  # Nothing was stopped: others wait for the lock.
        os.write(ours, b"\x03")  # Ctrl-C
        assert running.wait(PATIENCE) == 130
    finally:
        running.kill()
        running.wait()
        os.close(ours)
    assert not lock().locked()
