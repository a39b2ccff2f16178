"""Rules that are written once, for threads and for tasks, as generators.

With ``drive`` and ``adrive`` a generator yields descriptions of what is to be done next, and is
sent what came of it. With ``finish`` and ``afinish`` it calls methods that do it, and yields what
they return: for threads that is the result itself, for tasks an awaitable::

    answer = yield self._run(call)

A thread may be interrupted by a signal handler between two steps, when no code of the generator
runs. So what an interrupt must undo is undone by the caller of ``finish``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

S = TypeVar("S")
R = TypeVar("R")


def drive(steps: Generator[S, Any, R], do: Callable[[S], Any]) -> R:
    """What ``steps`` return in the end, when ``do`` does each of them. What it raises is raised
    where the step was yielded."""
    try:
        step = next(steps)
        while True:
            try:
                came = do(step)
            except BaseException as trouble:
                step = steps.throw(trouble)
            else:
                step = steps.send(came)
    except StopIteration as end:
        result: R = end.value
        return result


async def adrive(steps: Generator[S, Any, R], do: Callable[[S], Awaitable[Any]]) -> R:
    """``drive`` for tasks."""
    try:
        step = next(steps)
        while True:
            try:
                came = await do(step)
            except BaseException as trouble:
                step = steps.throw(trouble)
            else:
                step = steps.send(came)
    except StopIteration as end:
        result: R = end.value
        return result


def finish(steps: Generator[Any, Any, R]) -> R:
    """What ``steps`` return in the end, when each was done before it was yielded."""
    try:
        came = next(steps)
        while True:
            came = steps.send(came)
    except StopIteration as end:
        result: R = end.value
        return result


def afinish(steps: Generator[Any, Any, R]) -> Coroutine[Any, Any, R]:
    """What ``steps`` return in the end, when each yields an awaitable."""
    return adrive(steps, _itself)


def _itself(step: Awaitable[Any]) -> Awaitable[Any]:
    return step
