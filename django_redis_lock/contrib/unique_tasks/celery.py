"""Celery's tasks. The token is the id of the task, and the name is in a header."""

from __future__ import annotations

from datetime import datetime
from inspect import getattr_static
from types import MethodType
from typing import Any

from celery import Task, _state, signals, uuid
from celery.local import Proxy, maybe_evaluate
from celery.utils.time import maybe_make_aware
from django.utils.functional import cached_property

from .messages import Duplicate, Message, Unique

HEADER = "unique_task"


class _Unique(Task):  # type: ignore[misc]  # Celery has no types
    """What makes a task unique; without it, its class is as Celery has made it."""

    abstract = True
    unique_rules: Unique

    @cached_property
    def unique_task(self) -> Unique:
        """Not before the message is sent: Celery hides errors at the end of an app's set-up."""
        return self.unique_rules.of(self.run, self.name)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        request, call = self.request, super().__call__
        if request.called_directly:
            return call(*args, **kwargs)
        if call.__func__ is Task.__call__:  # It would hide the request from the run.
            call = self.run
        message = _message_of(self, request)
        if message is None:
            return call(*args, **kwargs)
        request.unique_run = message
        message.begin()
        try:
            return call(*args, **kwargs)
        except BaseException as error:
            if getattr(error, "requeue", False):  # Celery's Reject: the broker delivers it again.
                message.hand_over()
            raise
        finally:
            message.end()

    def apply_async(
        self,
        args: Any = None,
        kwargs: Any = None,
        task_id: str | None = None,
        *others: Any,
        **options: Any,
    ) -> object:
        options.update(zip(("producer", "link", "link_error", "shadow"), others, strict=False))
        unique, request, token = self.unique_task, self.request, task_id or uuid()
        again = bool(options.get("retries")) or token == request.id
        message = unique.to_send(args or (), kwargs or {}, token, _delay(self.app, options))
        other = message.take(again)
        waited_for = any(options.get(way) for way in ("chain", "chord", "link", "link_error"))
        if other and not again and not (waited_for and unique.on_duplicate == "skip"):
            id = other[1] or other[0]
            if task_id not in (None, id):  # Who has chosen the id may wait for its result.
                reason = f"not queued, because the task {id} is"
                self.backend.mark_as_revoked(task_id, reason, store_result=not self.ignore_result)
            return unique.refuse(Duplicate(message.name, id, self), args or (), kwargs or {})
        headers = dict(options.pop("headers", None) or {})
        headers.pop(HEADER, None)
        if message.named:
            headers[HEADER] = message.name
            running: Message | None = getattr(request, "unique_run", None)
            if again and running is not None and running.name == message.name:
                running.hand_over()
        send, options = super().apply_async, {**options, "headers": headers or None}
        return message.publish(lambda: send(args, kwargs, token, **options))


class UniqueTask(_Unique):
    """The base class of a task that is queued once, with the arguments of ``unique_task`` as
    options::

        @shared_task(base=UniqueTask, unique="sync-{shop}", unique_timeout=3600)
        def sync(shop): ...

    In a class of your own they are attributes.

    Attributes:
        unique: the name: a template over the arguments of the task, or a callable that takes them.

    Raises:
        TypeError, ValueError: when Celery binds the task to its app: one of them is invalid.
    """

    abstract = True
    unique: Any = None
    unique_timeout: Any = None
    unique_until: Any = "start"
    unique_on_duplicate: Any = "skip"
    unique_using: Any = None
    unique_on_redis_down: Any = None

    @classmethod
    def on_bound(cls, app: Any) -> None:
        super().on_bound(app)
        options = cls.unique_until, cls.unique_on_duplicate, cls.unique_using
        rules = Unique(cls.unique, cls.unique_timeout, *options, cls.unique_on_redis_down)
        run = getattr_static(cls, "run")
        of_calls = run.__func__ if isinstance(run, staticmethod) else MethodType(run, cls)
        # Each subclass has its own; the attribute is declared for any.
        cls.unique_task = rules.of(of_calls, cls.name)  # type: ignore[assignment, method-assign]


def unique(rules: Unique, target: object) -> Any:
    if type(target) is Proxy:
        _of_each_app(rules, target)
    else:
        _make_unique(rules, maybe_evaluate(target))
    return target


def _make_unique(rules: Unique, task: Any) -> None:
    kind = type(task)
    task.__class__ = type(kind.__name__, (_Unique, kind), {"unique_rules": rules})
    _ = task.unique_task  # Raises if the name does not fit.


def _of_each_app(rules: Unique, shared: Any) -> None:
    """Each app makes its copy of a shared task at the end of its set-up."""

    def decorate(sender: Any, **_: object) -> None:
        before = _state._tls.current_app
        sender.set_current()
        try:
            _make_unique(rules, shared._get_current_object())
        finally:
            _state._set_current_app(before)

    _state.connect_on_app_finalize(lambda app: app.on_after_finalize.connect(decorate, weak=False))
    for app in _state._get_active_apps():
        if app.finalized:
            decorate(app)


def _message_of(task: Any, request: Any) -> Message | None:
    name = (request.headers or {}).get(HEADER)
    return task.unique_task.to_run(name, request.id, request.id) if name else None


def _on_revoked(sender: Any = None, request: object = None, **_: object) -> None:
    message = _message_of(sender, request) if isinstance(sender, _Unique) else None
    if message is not None:
        message.free()


def _delay(app: Any, options: dict[str, Any]) -> float:
    """Seconds before which the task cannot start."""
    eta = options.get("eta")
    if options.get("countdown") or not eta:
        return max(0.0, options.get("countdown") or 0.0)
    eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
    return max(0.0, float((maybe_make_aware(eta, app.timezone) - app.now()).total_seconds()))


signals.task_revoked.connect(_on_revoked)
