"""Rules that are written once, for threads and for tasks: a generator says what is to be done next,
and is sent what came of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

__all__ = ["adrive", "drive"]

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
