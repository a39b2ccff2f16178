"""Unique tasks of Django, or of its backport for older versions.

The message of such a task is its arguments. So one more travels with them, TRAVELS, which the
function does not get: the token and the name.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.utils import timezone
from django.utils.module_loading import import_string

from ...decorators import after_commit, wait_for
from ...protocol import new_token
from . import Duplicate, Message, Other, Rules, Unique

TRAVELS = "_unique_task"


def unique(rules: Rules, task: Any) -> Any:
    """``task``, which is queued only once."""
    function = task.func
    named = functools.partial(function, None) if task.takes_context else function
    wrapped = _wrapped(Unique(rules, named, task.module_path), function)
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return _kind(type(task))(**{**fields, "func": wrapped})


@functools.cache
def _kind(base: Any) -> Any:
    """The class of tasks of a backend, for unique ones."""

    class UniqueTask(base):  # type: ignore[misc]  # known at run time only
        __slots__ = ()

        def enqueue(self, *args: Any, **kwargs: Any) -> Any:
            return _enqueue(self, args, kwargs, super().enqueue)

        async def aenqueue(self, *args: Any, **kwargs: Any) -> Any:
            enqueue = async_to_sync(super().aenqueue)
            return await sync_to_async(_enqueue)(self, args, kwargs, enqueue)

        def __reduce__(self) -> Any:
            fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
            del fields["func"]
            return _restored, (self.module_path, fields)

    UniqueTask.__doc__ = base.__doc__
    return UniqueTask


def _restored(path: str, fields: dict[str, Any]) -> Any:
    return dataclasses.replace(import_string(path), **fields)


def _enqueue(task: Any, args: Any, kwargs: Any, enqueue: Callable[..., Any]) -> Any:
    unique: Unique = task.func.unique
    name, token = unique.name_of(args, kwargs), new_token().decode()
    message = unique.message(name, token)
    delay = 0.0
    if task.run_after is not None:
        now = timezone.now() if timezone.is_aware(task.run_after) else timezone.localtime()
        delay = max(0.0, (task.run_after - now.replace(tzinfo=task.run_after.tzinfo)).total_seconds())

    def publish(with_name: bool) -> Any:
        if not with_name:
            return enqueue(*args, **kwargs)
        _release_if_rolled_back(message)
        result = enqueue(*args, **kwargs, **{TRAVELS: f"{token} {name}"})
        if not result.is_finished:
            message.note_id(result.id)
        return result

    def refuse(other: Other) -> Any:
        return unique.refuse(Duplicate(name, other.task_id or None, task), args, kwargs)

    return unique.send(message, token, delay, publish, refuse)


def _release_if_rolled_back(message: Message) -> None:
    """A backend that keeps its tasks in the database takes them back with the transaction."""
    ends: list[str] = []
    key = (message.unique.title, f"{message.name} {message.lock.id!r}")
    if wait_for(message.lock, key, lambda: None if ends else message.release()):
        after_commit(lambda: ends.append("committed"))


def _wrapped(unique: Unique, function: Any) -> Any:
    def message_of(args: Any, kwargs: Any) -> Message | None:
        token, _, name = kwargs.pop(TRAVELS, "").partition(" ")
        result = getattr(args[0], "task_result", None) if args else None  # Of the context.
        return unique.message(name, token, getattr(result, "id", "")) if name else None

    async def acall(*args: Any, **kwargs: Any) -> Any:
        message = await sync_to_async(message_of)(args, kwargs)
        if message is None:
            return await function(*args, **kwargs)
        await sync_to_async(message.begin)()
        try:
            return await function(*args, **kwargs)
        finally:
            await sync_to_async(message.end)()

    def call(*args: Any, **kwargs: Any) -> Any:
        message = message_of(args, kwargs)
        if message is None:
            return function(*args, **kwargs)
        with message.running():
            return function(*args, **kwargs)

    wrapped: Any = functools.wraps(function)(acall if iscoroutinefunction(function) else call)
    wrapped.unique = unique
    wrapped.__signature__ = _with_travels(inspect.signature(function))
    return wrapped


def _with_travels(signature: inspect.Signature) -> inspect.Signature:
    """For decorators above this one, which see this argument, too."""
    known = list(signature.parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in known):
        return signature
    travels = inspect.Parameter(TRAVELS, inspect.Parameter.KEYWORD_ONLY, default=None)
    return signature.replace(parameters=[*known, travels])
