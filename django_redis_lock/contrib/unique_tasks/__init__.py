"""A task that is already waiting is not queued again.

A message in the queue has a name, made from the arguments of its task, and holds a lock of that
name: it carries the token. The sender of a task acquires the lock for it, or learns which other one
has it. The worker that starts the task releases the lock, or renews it until the task has ended. If
the message is lost, the lock ends with its lifetime.

``celery`` and ``django``: where token and name travel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ...decorators.targets import DJANGO_TASK, Target
from ...extension import part
from .messages import PATIENCE as PATIENCE
from .messages import PREFIX as PREFIX
from .messages import AlreadyQueued, Duplicate, TaskNotQueued, Unique
from .messages import declared as declared

__all__ = ["AlreadyQueued", "Duplicate", "TaskNotQueued", "unique_task"]

V = TypeVar("V")


def unique_task(
    key: str | Callable[..., str],
    *,
    timeout: float,
    until: Literal["start", "done"] = "start",
    on_duplicate: Literal["skip", "raise"] | Callable[..., object] = "skip",
    using: str | None = None,
    on_redis_down: Literal["raise", "local", "run"] | None = None,
) -> Callable[[V], V]:
    """Queue a task only if none with the same name is queued: ``@unique_task("sync-{shop}",
    timeout=3600)`` above ``@shared_task`` or ``@app.task`` of Celery, or ``@task`` of Django.

    * It concerns all that sends the task itself: ``delay``, ``apply_async``, chains, beat,
      ``enqueue``, ``aenqueue``; not Celery's ``send_task``. A direct call runs at once.
    * A retry is the same task: it is always sent, and has the name again if that is free.
    * A task that others wait for (by a chain, a chord, ``link``) is not skipped, but sent without
      the name.
    * The name is free at once if sending fails, and after ``timeout`` if the message is lost.

    A broker may deliver a message twice, so this does not mean that one *runs* at a time: for that
    put ``@locked`` below.

    Args:
        key: the name: a template over the arguments of the task, or a callable that takes them.
        timeout: seconds for which the name is taken, if the task does not start; a ``countdown`` or
            ``eta`` is added.
        until: ``"start"``: the name is free when the task starts, so that what changes during the
            run is queued. ``"done"``: when the task has ended; until then it is renewed.
        on_duplicate: ``"skip"``: the caller gets ``Duplicate.result``, that of the task that is
            queued. ``"raise"``: ``AlreadyQueued``. Or called with a ``Duplicate`` and the arguments
            of the task; the caller gets its result.
        using: the cache alias. Default: the setting USING.
        on_redis_down: ``"raise"``: the caller gets ``TaskNotQueued``, and a worker does not run the
            task. ``"run"``, ``"local"``: it is queued, and runs, perhaps more than once. Default:
            the setting.

    Raises:
        TypeError, ValueError: an argument is invalid, or the target is no task.
    """
    rules = Unique(key, timeout, until, on_duplicate, using, on_redis_down)

    def decorate(target: object) -> Any:
        kind = Target("unique_task", target).kind
        return part("django_tasks" if kind == DJANGO_TASK else "celery_tasks").unique(rules, target)

    return decorate
