"""Which errors a signal handler has raised: by the frames that they have passed."""

from __future__ import annotations

import functools
import select
import signal
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.connection import Connection

from django_redis_lock.transport import interrupts
from django_redis_lock.transport.interrupts import Interruptible, interrupt_in, interruptible
from tests.support.background import Background


class TimeLimit(OSError):
    """What a handler raises."""


def plain(number: int, frame: Any) -> None:
    raise TimeLimit


def any_arguments(*args: Any) -> None:
    raise TimeLimit


def only_set(*args: Any) -> None:
    del args
    raise TimeLimit


def with_more(more: str, *args: Any) -> None:
    del args
    raise TimeLimit


class Instance:
    def __call__(self, *args: Any) -> None:
        del args
        raise TimeLimit


@pytest.fixture
def handled() -> Iterator[Callable[[Any], None]]:
    """Make a handler that of a signal."""
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGUSR1, before)


def interrupt(handler: Any) -> None:
    """Call ``handler`` as Python does."""
    handler(signal.SIGUSR1, sys._getframe())


def raised(work: Callable[[], object]) -> BaseException:
    try:
        work()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("handler", [plain, any_arguments])
def test_who_gets_the_frame_is_a_handler(handler: Any) -> None:
    error = raised(lambda: interrupt(handler))
    assert interrupt_in(error) is error


def test_python_runs_handlers_in_the_main_thread_only() -> None:
    work = Background(lambda: interrupt_in(raised(lambda: interrupt(plain))))
    assert work.result() is None


@pytest.mark.parametrize("handler", [only_set, functools.partial(with_more, "more"), Instance()])
def test_what_is_set_is_a_handler(handler: Any, handled: Callable[[Any], None]) -> None:
    error = raised(lambda: interrupt(handler))
    assert interrupt_in(error) is None
    handled(handler)
    assert interrupt_in(error) is error


def test_an_error_may_have_been_turned_into_another() -> None:
    def turned() -> None:
        try:
            interrupt(plain)
        except TimeLimit as error:
            raise redis.ConnectionError("broke") from error

    def in_its_place() -> None:
        try:
            interrupt(plain)
        except TimeLimit:
            raise redis.ConnectionError("broke")  # noqa: B904  # as it may be

    for work in (turned, in_its_place):
        error = raised(work)
        assert isinstance(error, redis.ConnectionError)
        assert isinstance(interrupt_in(error), TimeLimit)


def test_what_was_handled_when_a_call_began_is_not_its_error() -> None:
    def call() -> None:
        raise redis.ConnectionError("broke")

    def handling() -> Any:
        try:
            interrupt(plain)
        except TimeLimit:
            return raised(call)

    error = handling()
    assert isinstance(error.__context__, TimeLimit)
    assert interrupt_in(error) is None
    assert interrupt_in(None) is None
    assert interrupt_in(ValueError()) is None


# -- connections of redis-py -----------------------------------------------------------------------


class Base:
    """As redis-py's."""

    def __init__(self) -> None:
        self._sock: Any = SimpleNamespace(fileno=lambda: 7)
        self.asked: list[float] = []
        self.ready = [False, False, True]

    def disconnect(self) -> None:
        self._sock = None

    def can_read(self, timeout: float = 0) -> bool:
        self.asked.append(timeout)
        return self.ready.pop(0)


class Guarded(Interruptible, Base):
    pass


class Polls:
    """In place of the system's, on a clock that it moves."""

    POLLIN = select.POLLIN

    def __init__(self) -> None:
        self.now = 1000.0
        self.done: list[Any] = []

    def monotonic(self) -> float:
        return self.now

    def poll(self, milliseconds: float | None = None) -> Any:
        if milliseconds is None:
            return self
        self.done.append(milliseconds)
        self.now += 0.1

    def register(self, sock: Any, what: int) -> None:
        self.done.append((sock.fileno(), what))


@pytest.mark.parametrize(("timeout", "readable"), [(0.25, True), (0.1, False)])
def test_a_wait_goes_on_after_a_signal(
    monkeypatch: pytest.MonkeyPatch, timeout: float, readable: bool
) -> None:
    polls, connection = Polls(), Guarded()
    monkeypatch.setattr(interrupts, "select", polls)
    monkeypatch.setattr(interrupts, "time", polls)
    assert connection.can_read(timeout) is readable
    lefts = [timeout - 0.1 * number for number in range(2 if readable else 1)]
    assert polls.done[::2] == [(7, select.POLLIN)] * len(lefts)
    assert polls.done[1::2] == pytest.approx([1000 * left for left in lefts])
    assert connection.asked == [0] * (3 if readable else 2)


@pytest.mark.parametrize(("timeout", "sock"), [(0, None), (0.25, object())])
def test_what_is_not_waited_for_is_looked_up(timeout: float, sock: Any) -> None:
    connection = Guarded()
    connection._sock = sock or connection._sock
    assert not connection.can_read(timeout)
    assert connection.asked == [timeout]


@pytest.mark.parametrize("module", ["redis.connection", "project"])
@pytest.mark.parametrize("by_handler", [True, False])
def test_redis_py_turns_no_handlers_error_into_another(module: str, by_handler: bool) -> None:
    """It disconnects first."""
    connection, names = Guarded(), {"__name__": module}
    text = "def send(work, disconnect):\n try: work()\n except OSError:\n  disconnect()\n  return 1"
    exec(text, names)
    send: Any = names["send"]

    def broken() -> None:
        raise BrokenPipeError

    work = (lambda: interrupt(plain)) if by_handler else broken
    if by_handler and module != "project":
        assert isinstance(raised(lambda: send(work, connection.disconnect)), TimeLimit)
    else:
        assert send(work, connection.disconnect) == 1
    assert connection._sock is None
    connection.disconnect()  # Nothing is being handled.


def test_only_connections_for_threads_are_guarded() -> None:
    assert interruptible(AsyncConnection) is AsyncConnection
    made = interruptible(Connection)
    assert issubclass(made, Interruptible)
    assert (made.__name__, made.guards) == ("Connection", Connection)
