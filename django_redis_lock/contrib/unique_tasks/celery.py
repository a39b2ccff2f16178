"""Unique tasks of Celery: the token is the id of the task, and the name is in a header."""

from __future__ import annotations

import functools
import inspect
import secrets
from datetime import datetime
from typing import Any

from celery import _state, signals, uuid
from celery.exceptions import Reject
from celery.local import maybe_evaluate
from celery.utils.time import maybe_make_aware

from . import Duplicate, Message, Other, Rules, Unique

HEADER = "unique_task"


def unique(rules: Rules, target: Any) -> Any:
    """``target``, which is queued only once: a task, or what ``shared_task`` has made."""
    if type(target).__name__ == "Proxy":
        _on_each_app(rules, target)
    else:
        _decorate(rules, maybe_evaluate(target))
    return target


def _on_each_app(rules: Rules, shared: Any) -> None:
    """Each app has its own copy of a shared task, which it makes at the end of its set-up."""
    makes = inspect.getclosurevars(object.__getattribute__(shared, "_Proxy__local")).nonlocals
    function = makes["fun"]
    Unique(rules, function, function.__qualname__)  # Raises if the template does not fit.

    def decorate(sender: Any, **_: Any) -> None:
        name = makes["name"] or sender.gen_task_name(function.__name__, function.__module__)
        _decorate(rules, sender.tasks[name])

    def finalize(app: Any) -> None:
        app.on_after_finalize.connect(decorate, weak=False)

    _state.connect_on_app_finalize(finalize)
    for app in _state._get_active_apps():
        if app.finalized:
            decorate(app)


def _decorate(rules: Rules, task: Any) -> None:
    run, of_class = task.run, type(task).apply_async
    task.unique = Unique(rules, run, task.name)

    @functools.wraps(of_class)
    def apply_async(
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> Any:
        options.update(producer=producer, link=link, link_error=link_error, shadow=shadow)
        return _apply_async(task, args, kwargs, task_id, options)

    @functools.wraps(run)
    def run_once(*args: Any, **kwargs: Any) -> Any:
        message = _message_of(task, task.request)
        if message is None or task.request.called_directly:
            return run(*args, **kwargs)
        task.request.unique = message
        with message.running():
            try:
                return run(*args, **kwargs)
            except Reject as rejected:
                if rejected.requeue:
                    _keep(message)
                raise

    task.apply_async, task.run = apply_async, run_once


def _apply_async(
    task: Any, args: Any, kwargs: Any, task_id: str | None, options: dict[str, Any]
) -> Any:
    unique: Unique = task.unique
    name, token = unique.name_of(args or (), kwargs or {}), task_id or uuid()
    headers = {key: value for key, value in (options.pop("headers", None) or {}).items()}
    headers.pop(HEADER, None)
    running: Message | None = getattr(task.request, "unique", None)
    again = bool(options.get("retries")) or token == task.request.id

    def publish(with_name: bool) -> Any:
        if with_name:
            headers[HEADER] = name
            if again and running is not None and running.name == name:
                running.stop()
                running.kept = True
        send = type(task).apply_async
        return send(task, args, kwargs, task_id=token, headers=headers or None, **options)

    def refuse(other: Other) -> Any:
        awaited = any(options.get(way) for way in ("chain", "chord", "link", "link_error"))
        if awaited and unique.rules.on_duplicate == "skip":
            return publish(False)
        id = other.task_id or other.token
        if task_id not in (None, id):  # Who has chosen the id may wait for its result.
            reason = f"not queued, because the task {id} is"
            task.backend.mark_as_revoked(task_id, reason, store_result=not task.ignore_result)
        return unique.refuse(Duplicate(name, id, task), args or (), kwargs or {})

    message = unique.message(name, token, token)
    attempt = "" if again else secrets.token_hex(8)
    return unique.send(message, attempt, _delay(task.app, options), publish, refuse)


def _delay(app: Any, options: dict[str, Any]) -> float:
    """Seconds before which the task cannot start."""
    eta = options.get("eta")
    if options.get("countdown") or not eta:
        return max(0.0, options.get("countdown") or 0.0)
    eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    return max(0.0, float((maybe_make_aware(eta, app.timezone) - app.now()).total_seconds()))


def _keep(message: Message) -> None:
    """The broker delivers it again."""
    message.stop()
    message.kept = message.take("queued") is None


def _message_of(task: Any, request: Any) -> Message | None:
    name = (request.headers or {}).get(HEADER)
    return task.unique.message(name, request.id, request.id) if name else None


@signals.task_revoked.connect
def _release_revoked(sender: Any = None, request: Any = None, **_: Any) -> None:
    message = _message_of(sender, request) if hasattr(sender, "unique") else None
    if message is not None:
        message.release()
