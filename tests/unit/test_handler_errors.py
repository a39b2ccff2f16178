"""Which errors a signal handler has raised: by the frames that they have passed."""

from __future__ import annotations

import functools
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from django_redis_lock.transport.interrupts import interrupt_in


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
