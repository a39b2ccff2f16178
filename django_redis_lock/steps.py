"""One algorithm for threads and tasks: a generator of steps, which ``drive`` and ``adrive`` run.

A generator calls methods that do a step, and yields what these return: for threads the result
itself, for tasks an awaitable of it::

    answer = yield self._run(call)

Between two steps no line of the generator runs. A signal handler that raises there ends ``drive``,
and the generator's ``except`` and ``finally`` run when it is collected, or never. So what must be
undone then is passed to ``drive``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")

#: What a method returns that does a step: for threads the result, for tasks an awaitable of it.
Step: TypeAlias = R | Awaitable[R]
#: A generator of steps, which returns the result of them all.
Steps = Generator[Any, Any, R]
#: Called with what has ended the steps before they returned.
Undo: TypeAlias = Callable[[BaseException], object]


def drive(steps: Steps[R], undo: Undo | None = None) -> R:
    """Run ``steps`` in this thread; returns what they return."""
    try:
        try:
            result_of_step = next(steps)
            while True:
                result_of_step = steps.send(result_of_step)
        except StopIteration as end:
            result: R = end.value
            return result
    except BaseException as error:
        if undo is not None:
            undo(error)
        raise


async def adrive(steps: Steps[R], undo: Undo | None = None) -> R:
    """``drive`` for tasks."""
    try:
        step = next(steps)
        while True:
            try:
                result_of_step = await step
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(result_of_step)
    except StopIteration as end:
        result: R = end.value
        return result
    except BaseException as error:
        if undo is not None:
            undo(error)
        raise
