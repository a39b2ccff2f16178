"""Django's tasks, also its backport's. Their message is their arguments, so one more has token and
name: TRAVELS, which the function does not get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache, partial, wraps
from inspect import Parameter, Signature, signature
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.utils.module_loading import import_string
from django.utils.timezone import is_aware, make_aware, now

from ...decorators.section import by_steps, called, in_thread
from ...decorators.transactions import after_commit, wait_for
from ...protocol import new_token
from ...steps import Steps
from .messages import PREFIX, Duplicate, Message, Unique

TRAVELS = "_unique_task"


def unique(rules: Unique, task: Any) -> Any:
    function = task.func
    of_calls = partial(function, None) if task.takes_context else function
    unique = rules.of(of_calls, task.module_path)

    def message_of(args: Any, kwargs: Any) -> Message | None:
        token, _, name = kwargs.pop(TRAVELS, "").partition(" ")
        result = getattr(args[0], "task_result", None) if args else None  # Of the context.
        return unique.to_run(name, token, getattr(result, "id", "")) if name else None

    def steps(asynchronous: bool, args: Any, kwargs: Any) -> Steps[object]:
        message = yield in_thread(asynchronous, message_of, args, kwargs)
        if message is None:
            return (yield called(function, *args, **kwargs))
        yield in_thread(asynchronous, message.begin)
        try:
            return (yield called(function, *args, **kwargs))
        finally:
            yield in_thread(asynchronous, message.end)

    wrapped: Any = wraps(function)(by_steps(function, steps))
    wrapped.unique = unique
    known = [*signature(function).parameters.values()]
    if not any(each.kind is each.VAR_KEYWORD for each in known):
        # Decorators above this one see the argument, too.
        travels = Parameter(TRAVELS, Parameter.KEYWORD_ONLY, default="")
        wrapped.__signature__ = Signature([*known, travels])
    kind: object = type(task)
    return _kind(kind)(**{**_fields(task), "func": wrapped})


def _fields(task: Any) -> dict[str, object]:
    return {field.name: getattr(task, field.name) for field in fields(task)}


@cache
def _kind(base: Any) -> Any:
    """The class of unique tasks of a backend."""

    class UniqueTask(base):  # type: ignore[misc]  # known at run time only
        __slots__ = ()

        def enqueue(self, *args: object, **kwargs: object) -> Any:
            return _enqueue(self, args, kwargs, super().enqueue)

        async def aenqueue(self, *args: object, **kwargs: object) -> Any:
            enqueue = async_to_sync(super().aenqueue)
            return await sync_to_async(_enqueue)(self, args, kwargs, enqueue)

        def __reduce__(self) -> Any:
            return _restored, (self.module_path, {**_fields(self), "func": None})

    return UniqueTask


def _restored(path: str, changes: dict[str, object]) -> object:
    task = import_string(path)
    return replace(task, **{**changes, "func": task.func})


def _enqueue(task: Any, args: Any, kwargs: Any, enqueue: Callable[..., object]) -> object:
    unique, token, later = task.func.unique, new_token().decode(), task.run_after or now()
    later = later if is_aware(later) else make_aware(later)
    delay = max(0.0, later.timestamp() - now().timestamp())
    message = unique.to_send(args, kwargs, token, delay)
    if other := message.take():
        return unique.refuse(Duplicate(message.name, other[1] or None, task), args, kwargs)
    travels = {TRAVELS: f"{token} {message.name}"} if message.named else {}
    ends: list[str] = []  # A backend in the database takes the task back if that rolls back.
    if wait_for(message.lock, (PREFIX, token), lambda: None if ends else message.free()):
        after_commit(lambda: ends.append("committed"))
    return message.publish(lambda: enqueue(*args, **kwargs, **travels))
