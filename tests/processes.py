"""Real processes and threads for the tests.

Each process runs one function of a test module, and talks with the test over a pipe::

    def ask(link, url):
        link.say("here")
        return link.hear()

    with processes(ask, url, count=4) as crew:  # started, waiting for the signal
        crew.go()  # all at once
        assert crew[0].hear() == "here"
        crew.say("thanks")
        assert crew.results() == ["thanks"] * 4

They are forked from a process that has done nothing but import, so that nine of them are there at
once. Such a process ends without ``atexit``; where its end matters, ``spawned`` asks for one with
an interpreter of its own. Either way the function must be found by its module and name.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import django
import psutil
from django.apps import apps
from django.conf import settings as django_settings
from django.core.management import execute_from_command_line
from django.test import override_settings

from django_redis_lock.protocol import acquisition
from django_redis_lock.threads import ThreadEvent

__all__ = [
    "LAST_TRY",
    "PATIENCE",
    "STARTUP",
    "WHOLE_END",
    "Crew",
    "Link",
    "ManageCommand",
    "Worker",
    "gone",
    "in_threads",
    "processes",
    "until",
    "waiting_in",
]

#: Seconds after which what has not happened will not happen any more.
PATIENCE = 30.0
#: The same for a process that has to be started: on a busy machine nine of them import for long.
STARTING = 120.0
#: That the last try of a wait has, instead of a tenth of one: a server that stands still with the
#: machine just when a brief wait ends is not down.
LAST_TRY = 5.0

#: What PYTHONPATH leads to first, so that processes with an interpreter of their own end quickly.
STARTUP = Path(__file__).with_name("startup")
#: To be added to the environment of those whose end a test is about.
WHOLE_END = {"WHOLE_END": "1"}

if sys.modules.get("opentelemetry.sdk.metrics", sys) is None:
    del sys.modules["opentelemetry.sdk.metrics"]  # See ``startup/sitecustomize.py``.

_spawn = multiprocessing.get_context("spawn")
_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "redis.asyncio",
        "django.test",
        "django_redis_lock.decorators",
        __name__,
        "tests.forked",
    ]
)


class Link:
    """One end of the pipe between a test and one of its processes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def say(self, message: Any) -> None:
        with self._sending:
            self._connection.send(("said", message))

    def hear(self) -> Any:
        """What the other end says next."""
        kind, message = self.hear_anything()
        assert kind == "said", f"it did not say anything, it {kind} {message!r}"
        return message

    def speaks(self) -> bool:
        """Whether there is something to hear."""
        return self._connection.poll()

    def hear_anything(self, patience: float = PATIENCE) -> tuple[str, Any]:
        """What comes next, after ``"said"``, ``"returned"`` or ``"raised"``."""
        # In parts: Python hears of a signal that comes just before the system call at its end.
        if not any(self._connection.poll(patience / 100) for _ in range(100)):
            raise AssertionError(f"nothing was said for {patience:.0f} s")
        message: tuple[str, Any] = self._connection.recv()
        return message


class Worker(Link):
    """A process, as its test sees it."""

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], spawned: bool = False
    ) -> None:
        here, there = multiprocessing.Pipe()
        super().__init__(here)
        context: Any = _spawn if spawned else _forkserver
        self._process = context.Process(
            target=_work, args=(there, _Environment(), function, args), daemon=True
        )
        self._process.start()
        there.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def go(self) -> None:
        """Let it begin."""
        self.say("go")

    def result(self) -> Any:
        """What its function returned; what it raised is raised here."""
        kind, value = self.hear_anything()
        if kind == "raised":
            raise value
        assert kind == "returned", f"it did not end, it {kind} {value!r}"
        return value

    def ends(self) -> None:
        """Wait until it has ended of itself."""
        self._process.join(PATIENCE)
        assert self._process.exitcode == 0

    def kill(self) -> None:
        """End it at once; it cannot do anything about it."""
        self._process.kill()
        self._process.join(PATIENCE)

    def exit_code(self) -> int | None:
        """That of its process, once it has ended; negative for a signal."""
        self._process.join(PATIENCE)
        return self._process.exitcode

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


class Crew(list[Worker]):
    """Processes that run the same function."""

    def go(self) -> None:
        """Let all begin at once."""
        for worker in self:
            worker.go()

    def say(self, message: Any) -> None:
        for worker in self:
            worker.say(message)

    def results(self) -> list[Any]:
        return [worker.result() for worker in self]


@contextmanager
def processes(
    function: Callable[..., Any], *args: Any, count: int = 1, spawned: bool = False
) -> Iterator[Crew]:
    """``count`` processes that are ready to run ``function(link, *args)``; killed at the end."""
    crew = Crew()
    try:
        for _ in range(count):
            crew.append(Worker(function, args, spawned))
        for worker in crew:
            assert worker.hear_anything(STARTING) == ("said", "ready")
        yield crew
    finally:
        for worker in crew:
            worker.kill()


class _Environment:
    """Brings the environment variables of this process to the one in which it is unpickled."""

    def __reduce__(self) -> Any:
        return _set_environment, (dict(os.environ),)


#: Under coverage: notes what this process has run until now.
_note_lines: Callable[[], object] | None = None


def _set_environment(variables: dict[str, str]) -> None:
    global _note_lines
    os.environ.clear()
    os.environ.update(variables)
    if "COVERAGE_PROCESS_CONFIG" in variables:  # What runs here counts as this test's.
        from coverage import process_startup  # noqa: PLC0415  # only measuring needs it

        if (measured := process_startup(force=True)) is not None:
            _note_lines = measured.save
            Finalize(None, _note_lines, exitpriority=0)  # ``multiprocessing`` calls no atexit.


class ManageCommand:
    """``manage.py`` with ``words`` in a process that is forked as the others are, at once.

    Args:
        apps: installed in addition.
    """

    def __init__(self, *words: str, apps: tuple[str, ...] = ()) -> None:
        (stdin, mine), (out, stdout), (err, stderr) = (
            multiprocessing.Pipe(duplex=False) for _ in range(3)
        )
        theirs = (stdin, stdout, stderr)
        self._process = _forkserver.Process(
            target=_manage, args=(_Environment(), words, apps, theirs), daemon=True
        )
        self._process.start()
        for end in theirs:
            end.close()
        self.stdin = os.fdopen(os.dup(mine.fileno()), "w", buffering=1)
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno())) for end in (out, err))

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it at once; its children live on."""
        self._process.kill()
        self._process.join(PATIENCE)

    def close(self) -> None:
        self.kill()
        for stream in (self.stdin, self.stdout, self.stderr):
            stream.close()

    def end(self) -> tuple[int, str, str]:
        """Its exit code, once it has ended of itself, and what else it said on both streams."""
        self._process.join(PATIENCE)
        code = self._process.exitcode
        assert code is not None, "it did not end"
        return code, self.stdout.read(), self.stderr.read()


def _manage(
    _: None, words: tuple[str, ...], more_apps: tuple[str, ...], streams: tuple[Connection, ...]
) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", 1, closefd=False),
    )
    _read_settings()
    installed = [*django_settings.INSTALLED_APPS, *more_apps]
    try:
        with override_settings(INSTALLED_APPS=installed):
            execute_from_command_line(["manage.py", *words])
    except KeyboardInterrupt:  # As the interpreter ends then.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)


def _read_settings() -> None:
    """Read them again: the environment was that of the first process there was."""
    settings = sys.modules[os.environ["DJANGO_SETTINGS_MODULE"]]
    django_settings.CACHES = runpy.run_path(str(settings.__file__))["CACHES"]


def _work(
    connection: Connection, _: None, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    link = Link(connection)
    if apps.ready:
        _read_settings()
    else:
        django.setup()
    acquisition.LAST_TRY_SECONDS = LAST_TRY
    link.say("ready")
    link.hear()
    try:
        result = function(link, *args)
        if _note_lines is not None:  # Its test may kill it as soon as it has the result.
            _note_lines()
        connection.send(("returned", result))
    except BaseException as error:
        connection.send(("raised", error))


def in_threads(count: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``function(*args)`` returns, or raises, in each of ``count`` threads that begin at
    once."""
    barrier = threading.Barrier(count)
    found: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait(PATIENCE)
        try:
            found[number] = function(*args)
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    return found


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until(condition: Callable[[], Any]) -> None:
    """Wait until ``condition()`` holds."""
    now, pause = time.monotonic(), 0.001
    deadline = now + PATIENCE
    while not condition():
        began, now = now, time.monotonic()
        assert now < deadline, "it did not happen"
        # What takes long, to happen or to look at, is not asked for so often.
        time.sleep(max(pause, min(now - began, 0.1)))
        now, pause = time.monotonic(), min(pause * 1.1, 0.01)


_looking, SWITCH_SECONDS = threading.Lock(), sys.getswitchinterval()


def waiting_in(module: str) -> int:
    """How many threads of this process wait for an event or a lock in ``module``."""
    # They must not go on while their frames are looked at: that ends in a segmentation fault. And
    # until Python 3.12, a garbage collection within this call can hang the process (gh-106883).
    with _looking:
        sys.setswitchinterval(PATIENCE)
        gc.disable()
        try:
            # Who waits for the interpreter does so by the interval that was when it began.
            time.sleep(2 * SWITCH_SECONDS)
            frames = sys._current_frames().values()
            return [*map(_caller_of_a_wait, frames)].count(module)
        finally:
            gc.enable()
            sys.setswitchinterval(SWITCH_SECONDS)


def _caller_of_a_wait(frame: Any) -> Any:
    inside = False
    while frame is not None and (
        frame.f_globals.get("__name__") == "threading" or frame.f_code is ThreadEvent.wait.__code__
    ):
        inside, frame = True, frame.f_back
    return inside and frame is not None and frame.f_globals.get("__name__")
