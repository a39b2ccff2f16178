"""One algorithm for threads and tasks: a generator of steps, which ``drive`` and ``adrive`` run.

A generator calls methods that do a step, and yields what these return: for threads the result
itself, for tasks an awaitable of it::

    answer = yield self._run(call)

Two rules for every such generator:

* Between two steps no line of the generator runs. A signal handler that raises there ends
  ``drive``, and the generator's ``except`` and ``finally`` run when it is collected, or never. So
  what an interrupt must undo, the caller of ``drive`` undoes.
* A single question is no generator, but a call and its parser; see ``locking.questions``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Generator
from typing import Any, TypeAlias, TypeVar

R = TypeVar("R")

#: What a method returns that does a step: for threads the result, for tasks an awaitable of it.
Step: TypeAlias = R | Awaitable[R]
#: A generator of steps, which returns the result of them all.
Steps = Generator[Any, Any, R]


def drive(steps: Steps[R]) -> R:
    """Run ``steps`` in this thread; returns what they return."""
    try:
        result_of_step = next(steps)
        while True:
            result_of_step = steps.send(result_of_step)
    except StopIteration as end:
        result: R = end.value
        return result


async def adrive(steps: Steps[R]) -> R:
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
