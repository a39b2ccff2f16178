"""Celery's tasks. The token is the id of the task, and the name is in a header."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import wraps
from inspect import getclosurevars
from typing import Any

from celery import _state, signals, uuid
from celery.local import Proxy, maybe_evaluate
from celery.utils.time import maybe_make_aware

from . import Duplicate, Message, Unique

HEADER = "unique_task"


def unique(rules: Callable[..., Unique], target: object) -> Any:
    if type(target).__name__ == "Proxy":
        _of_each_app(rules, target)
    else:
        _decorate(rules, maybe_evaluate(target))
    return target


def _of_each_app(rules: Callable[..., Unique], shared: object) -> None:
    """Each app makes its copy of a shared task at the end of its set-up."""
    makes = getclosurevars(Proxy._Proxy__local.__get__(shared)).nonlocals
    function = makes["fun"]
    rules(function, function.__qualname__)  # Raises if the template does not fit.

    def decorate(sender: Any, **_: object) -> None:
        name = makes["name"] or sender.gen_task_name(function.__name__, function.__module__)
        _decorate(rules, sender.tasks[name])

    def finalize(app: Any) -> None:
        app.on_after_finalize.connect(decorate, weak=False)

    _state.connect_on_app_finalize(finalize)
    for app in _state._get_active_apps():
        if app.finalized:
            decorate(app)


def _decorate(rules: Callable[..., Unique], task: Any) -> None:
    send, run = type(task).apply_async, task.run
    task.unique_task = rules(run, task.name)

    @wraps(send)
    def apply_async(*args: Any, **options: Any) -> Any:
        names = ("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow")
        return _apply_async(task, **dict(zip(names, args, strict=False)), **options)

    @wraps(run)
    def run_unique(*args: object, **kwargs: object) -> Any:
        request = task.request
        message = None if request.called_directly else _message_of(task, request)
        if message is None:
            return run(*args, **kwargs)
        request.unique_run = message
        message.begin()
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            if getattr(error, "requeue", False):  # Celery's Reject: the broker delivers it again.
                message.hand_over()
            raise
        finally:
            message.end()

    task.apply_async, task.run = apply_async, run_unique


def _message_of(task: Any, request: Any) -> Message | None:
    name = (request.headers or {}).get(HEADER)
    return task.unique_task.to_run(name, request.id, request.id) if name else None


def _on_revoked(sender: Any = None, request: object = None, **_: object) -> None:
    message = _message_of(sender, request) if hasattr(sender, "unique_task") else None
    if message is not None:
        message.free()


def _apply_async(
    task: Any,
    args: object = None,
    kwargs: object = None,
    task_id: str | None = None,
    **options: Any,
) -> object:
    unique, request, token = task.unique_task, task.request, task_id or uuid()
    again = bool(options.get("retries")) or token == request.id
    message = unique.to_send(args or (), kwargs or {}, token, _delay(task.app, options))
    other = message.take(again)
    waited_for = any(options.get(way) for way in ("chain", "chord", "link", "link_error"))
    if other and not again and not (waited_for and unique.on_duplicate == "skip"):
        id = other[1] or other[0]
        if task_id not in (None, id):  # Who has chosen the id may wait for its result.
            reason = f"not queued, because the task {id} is"
            task.backend.mark_as_revoked(task_id, reason, store_result=not task.ignore_result)
        return unique.refuse(Duplicate(message.name, id, task), args or (), kwargs or {})
    headers = dict(options.pop("headers", None) or {})
    headers.pop(HEADER, None)
    if message.named:
        headers[HEADER] = message.name
        running: Message | None = getattr(request, "unique_run", None)
        if again and running is not None and running.name == message.name:
            running.hand_over()
    send, options = type(task).apply_async, {**options, "headers": headers or None}
    return message.publish(lambda: send(task, args, kwargs, token, **options))


def _delay(app: Any, options: dict[str, Any]) -> float:
    """Seconds before which the task cannot start."""
    eta = options.get("eta")
    if options.get("countdown") or not eta:
        return max(0.0, options.get("countdown") or 0.0)
    eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    return max(0.0, float((maybe_make_aware(eta, app.timezone) - app.now()).total_seconds()))


signals.task_revoked.connect(_on_revoked)
