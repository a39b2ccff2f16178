"""``locked()`` on management commands and plain functions."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
from io import StringIO
from typing import Any, ClassVar

import pytest
import redis
from django.core.cache import caches
from django.core.management import CommandError, call_command, get_commands
from django.core.management.base import BaseCommand

from django_redis_lock import LockError, LockNotAcquired, current_lock, locked
from django_redis_lock.decorators import on_lost
from django_redis_lock.decorators.section import RetryUntil
from django_redis_lock.protocol.identity import hostname
from tests.holding import hold, hurry
from tests.processes import Link, gone, in_threads, processes, until
from tests.redis_server import RedisServer

OWNER = b"{:lock:1:nightly}:owner"


def hang_in_a_process(link: Link) -> None:
    on_lost.CLEANUP_SECONDS = 0.2

    @locked("fragile", timeout=60, on_lost="terminate", lost_exit_code=3)
    class Hanging(Ran):
        def handle(self, *args: Any, **options: Any) -> str | None:
            link.say(subprocess.Popen(["sleep", "120"]).pid)
            while True:
                try:
                    threading.Event().wait()
                except SystemExit:
                    link.say("no")

    run(Hanging, link)


class Ran(BaseCommand):
    """A command that notes its runs; ``link`` holds it up in the midst of one."""

    help = "Notes that it ran."
    requires_system_checks: ClassVar[list[str]] = []

    def __init__(self, link: Link | None = None, **streams: Any) -> None:
        super().__init__(no_color=True, **streams)
        self.link, self.runs = link, 0

    def handle(self, *args: Any, **options: Any) -> str | None:
        self.runs += 1
        if self.link is not None:
            self.link.say("running")
            self.link.hear()
        return "done"


@locked("nightly")
class Nightly(Ran):
    pass


@locked("nightly", exit_code=0)
class Quiet(Ran):
    pass


@locked("nightly", exit_code=75)
class Loud(Ran):
    pass


@locked("nightly", unavailable_exit_code=70)
class Unavailable(Ran):
    pass


class ByItsHandle(Ran):
    @locked("nightly")
    def handle(self, *args: Any, **options: Any) -> str | None:
        return super().handle(*args, **options)


def run(kind: type[Ran], link: Link | None = None) -> tuple[int, str, str, int]:
    """As from a shell: exit code, standard output and error, and the number of runs."""
    command = kind(link, stdout=StringIO(), stderr=StringIO())
    code: Any = 0
    try:
        command.run_from_argv(["manage.py", "nightly"])
    except SystemExit as end:
        code = end.code
    return code, command.stdout.getvalue(), command.stderr.getvalue(), command.runs


# -- commands ----------------------------------------------------------------------------------

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@pytest.mark.parametrize("kind", [Nightly, Quiet, Loud, ByItsHandle])
def test_a_free_command_runs_and_gives_its_lock_back(kind: type[Ran]) -> None:
    before = [signal.getsignal(number) for number in ENDINGS]
    assert [run(kind) for _ in range(2)] == [(0, "done\n", "", 1)] * 2
    assert [signal.getsignal(number) for number in ENDINGS] == before
    assert not caches["default"].lock("nightly").locked()


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "code"), [(Nightly, 1), (Loud, 75), (ByItsHandle, 1), (Quiet, 0)])
def test_a_command_whose_lock_is_taken_prints_one_line_with_the_holder(
    client: redis.Redis, kind: type[Ran], code: int
) -> None:
    with hold("nightly", label="the other run"):
        hurry()
        until(lambda: client.exists(OWNER))
        found, out, errors, runs = run(kind)
    assert (found, out, runs) == (code, "", 0)
    (line,) = errors.splitlines()
    assert line.startswith("CommandError: " * bool(code) + "nightly is held by ")
    assert "(the other run)" in line
    assert hostname() in line
    assert "its lock ends in" in line
    assert line.endswith(". More: manage.py locks show nightly")


def test_a_holder_that_has_not_described_itself_is_named_by_its_token() -> None:
    with hold("nightly"):
        _, _, errors, _ = run(Nightly)
    assert f"nightly is held by {hostname()}, process {os.getpid()}" in errors


@pytest.mark.parametrize("end", [CommandError("no disk"), SystemExit(4), KeyboardInterrupt()])
def test_a_command_that_fails_or_is_broken_off_releases_its_lock(end: BaseException) -> None:
    @locked("nightly")
    class Broken(Ran):
        def handle(self, *args: Any, **options: Any) -> None:
            raise end

    with pytest.raises(type(end)) as caught:
        Broken().handle()
    assert caught.value is end
    assert not caches["default"].lock("nightly").locked()


def run_in_a_process(link: Link, kind: type[Ran]) -> tuple[int, str, str, int]:
    return run(kind, link)


# -- a command whose lock is lost, or that is told to end ----------------------------------------


@locked("fragile", timeout=60, on_lost="terminate")
class Fragile(Ran):
    def handle(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().handle(*args, **options)
        finally:
            if self.link is not None:
                self.link.say("cleaning up")


@locked("fragile", timeout=60, on_lost="terminate", lost_exit_code=3)
class Stubborn(Ran):
    def handle(self, *args: Any, **options: Any) -> str | None:
        try:
            return super().handle(*args, **options)
        except SystemExit:
            return "never mind"


class FragileHandle(Ran):
    @locked("fragile", timeout=60, on_lost="terminate", lost_exit_code=3)
    def handle(self, *args: Any, **options: Any) -> str | None:
        return super().handle(*args, **options)


@pytest.mark.parametrize(("kind", "code"), [(Fragile, 76), (FragileHandle, 3), (Stubborn, 3)])
def test_a_command_that_loses_its_lock_is_ended(
    redis_server: RedisServer, client: redis.Redis, kind: type[Ran], code: int
) -> None:
    with processes(run_in_a_process, kind) as (worker,):
        worker.go()
        assert worker.hear() == "running"
        client.set(":lock:1:fragile", "another's")
        if kind is Fragile:
            assert worker.hear() == "cleaning up"
        found, out, errors, runs = worker.result()
    assert (found, out, runs) == (code, "", 1)
    (line,) = errors.splitlines()
    told = r"CommandError: the lock fragile was lost while this ran \(its key was deleted [^)]*\); "
    assert re.fullmatch(f"{told}another run may have started", line)


def test_to_be_ended_it_must_run_in_the_main_thread() -> None:
    (error,) = in_threads(1, Fragile().handle)
    assert isinstance(error, RuntimeError)
    assert "works only in the main thread" in str(error)
    assert not caches["default"].lock("fragile").locked()


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("kind", [Nightly, Fragile, ByItsHandle])
def test_a_signal_that_ends_a_command_releases_its_lock(
    redis_server: RedisServer, client: redis.Redis, kind: type[Ran], number: signal.Signals
) -> None:
    with processes(run_in_a_process, kind) as (worker,):
        worker.go()
        assert worker.hear() == "running"
        os.kill(worker.pid, number)
        if kind is Fragile:
            assert worker.hear() == "cleaning up"
        assert worker.result()[0] == 128 + number
    assert not client.keys(":lock:1:*")


def heed_in_a_process(
    link: Link, kind: type[Ran], heeded: int, ignored: int
) -> tuple[int, list[int], bool]:
    """With a handler, as under ``nohup``, and with a dump on SIGQUIT; of one thread, as CPython may
    crash while it looks at others that run."""
    heard: list[int] = []

    def heed(number: int, frame: object) -> None:
        heard.append(number)

    signal.signal(heeded, heed)
    signal.signal(ignored, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in ENDINGS]
    with open(os.devnull, "w") as nowhere:
        faulthandler.register(signal.SIGQUIT, file=nowhere, all_threads=False)
        code = run(kind, link)[0]
        signal.raise_signal(signal.SIGQUIT)
    return code, heard, before == [signal.getsignal(number) for number in ENDINGS]


class RunLocked(Ran):
    """In its process, as ``manage.py run_locked`` runs it."""

    def handle(self, *args: Any, **options: Any) -> None:
        get_commands()["ran"] = Ran(self.link)
        call_command("run_locked", "nightly", "--", "ran")


def run_with_handlers(link: Link, kind: type[Ran]) -> tuple[int, str, str, int]:
    """With handlers of its own, as a program may have them."""
    for number in ENDINGS:
        signal.signal(number, lambda number, frame: sys.exit(3))
    return run(kind, link)


@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("kind", [Nightly, Fragile, RunLocked])
def test_the_handler_of_a_program_is_called_and_chooses_the_exit_code(
    redis_server: RedisServer, client: redis.Redis, kind: type[Ran], number: signal.Signals
) -> None:
    with processes(run_with_handlers, kind) as (worker,):
        worker.go()
        assert worker.hear() == "running"
        os.kill(worker.pid, number)
        if kind is Fragile:
            assert worker.hear() == "cleaning up"
        assert worker.result()[0] == 3
    assert not client.keys(":lock:1:*")


@pytest.mark.parametrize("heeded", [ENDINGS[:2], ENDINGS[1::-1]])
@pytest.mark.parametrize("kind", [Nightly, Stubborn, RunLocked])
def test_a_signal_that_is_heeded_ignored_or_only_asks_for_a_dump_ends_no_command(
    redis_server: RedisServer, kind: type[Ran], heeded: tuple[int, int]
) -> None:
    with processes(heed_in_a_process, kind, *heeded) as (worker,):
        worker.go()
        assert worker.hear() == "running"
        for number in ENDINGS:
            os.kill(worker.pid, number)
        worker.say("finish")
        assert worker.result() == (0, [heeded[0]], True)


@locked("nightly", blocking=True)
class Target(Ran):
    pass


def test_a_command_that_waits_says_for_whom(redis_server: RedisServer, client: redis.Redis) -> None:
    lock = caches["default"].lock("nightly", label="the other run")
    assert lock.acquire(blocking=False)
    hurry()
    until(lambda: client.exists(OWNER))
    with processes(run_in_a_process, Target) as (worker,):
        worker.go()
        until(lambda: client.info("clients")["blocked_clients"])
        lock.release()
        assert worker.hear() == "running"
        worker.say("finish")
        code, out, errors, _ = worker.result()
    assert (code, out) == (0, "done\n")
    (line,) = errors.splitlines()
    assert line.startswith("nightly is held by ")
    assert "(the other run)" in line
    assert line.endswith(". More: manage.py locks show nightly. Waiting …")
    assert run(Target) == (0, "done\n", "", 1)


@pytest.mark.parametrize("options", [{"status_code": 503}, {"default": None}])
def test_what_means_nothing_for_a_command_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="means nothing for a command"):
        locked("nightly", **options)(type("Command", (Ran,), {}))


# -- functions ---------------------------------------------------------------------------------


@locked("nightly", label="the sums")
def add(a: int, b: int = 1) -> int:
    return a + b


def test_a_function_whose_lock_is_taken_raises_with_attributes(client: redis.Redis) -> None:
    with hold("nightly", timeout=20, label="the other run"):
        hurry()
        until(lambda: client.exists(OWNER))
        with pytest.raises(LockNotAcquired) as caught:
            add(1)
    error = caught.value
    assert error.lock_name == "nightly"
    assert error.holder is not None
    assert (error.holder.label, error.holder.host) == ("the other run", hostname())
    assert error.retry_after == 2  # It has been held for half a second.
    assert isinstance(error, redis.exceptions.LockError)
    assert "the other run" in str(error)


def test_its_label_is_the_dotted_name_if_it_has_none() -> None:
    @locked("nightly")
    def nameless() -> str:
        return str(current_lock().label)

    assert nameless().endswith("<locals>.nameless")


def test_a_rest_after_the_work(client: redis.Redis) -> None:
    """Two hosts whose clocks differ start a short job nearly at once: it runs once."""

    @locked("nightly", min_hold=60)
    def work() -> str:
        return "ran"

    assert work() == "ran"
    with pytest.raises(LockNotAcquired) as caught:
        work()
    assert 50_000 < client.pttl(":lock:1:nightly") <= 60_000
    assert caught.value.retry_after is not None
    assert 50 < caught.value.retry_after <= 60
    assert "nightly was released, and its min_hold ends in " in str(caught.value)
    with pytest.raises(LockNotAcquired, match="it was released, and its min_hold is not over"):
        caches["default"].lock("nightly", blocking=False).__enter__()


# -- without Redis -----------------------------------------------------------------------------


@pytest.fixture
def away(own_server: RedisServer, settings: Any) -> RedisServer:
    """A server that is not up yet, of the cache."""
    own_server.stop()
    default = {**settings.CACHES["default"], "LOCATION": own_server.url}
    settings.CACHES = {"default": default}
    return own_server


@pytest.mark.usefixtures("away")
@pytest.mark.parametrize(("kind", "code"), [(Nightly, 69), (Unavailable, 70)])
def test_a_command_says_in_one_line_that_redis_is_away(
    kind: type[Ran], code: int, capfd: Any
) -> None:
    command = kind()
    with pytest.raises(SystemExit) as ended:
        command.run_from_argv(["manage.py", "nightly"])
    assert (ended.value.code, command.runs) == (code, 0)
    said = capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("CommandError: nothing was run: the lock nightly could not be requested")


def test_a_mistake_is_no_outage() -> None:
    """A command that would wait for itself raises what a function does."""

    @locked("nightly", blocking=True)
    class Waiting(Ran):
        pass

    command = Waiting()
    with locked("nightly"), pytest.raises(LockError, match="would wait for itself"):
        call_command(command)
    assert not command.runs


def test_it_waits_for_redis_if_asked_to(away: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    pause_after = RetryUntil.pause_after

    def pause_and_start(self: RetryUntil, error: Exception) -> float:
        pause = pause_after(self, error)
        if not away.runs:
            away.start()
        return pause

    monkeypatch.setattr(RetryUntil, "pause_after", pause_and_start)
    waits = locked("late", blocking=True, blocking_timeout=30, wait_for_redis=True)

    @waits
    async def coroutine() -> str:
        return "done"

    for call in (waits(lambda: "done"), lambda: asyncio.run(coroutine())):
        assert call() == "done"
        away.stop()


def test_a_command_that_hangs_then_is_ended_all_the_same(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    """And so is what it has started."""
    with processes(hang_in_a_process) as (worker,):
        worker.go()
        started = worker.hear()
        client.set(":lock:1:fragile", "another's")
        assert worker.hear() == "no"
        assert worker.exit_code() == 3
        until(lambda: gone(started))
