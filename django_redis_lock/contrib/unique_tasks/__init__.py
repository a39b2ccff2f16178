"""A task that is already waiting is not queued again.

A message in the queue has a name, made from the arguments of its task. A lock with that name is
held by the message: it carries the lock's token. Whoever sends a task takes the lock for it, or
learns which task has it. The worker that starts the task releases the lock, or keeps it alive until
the task has ended. If the message is lost, the lock ends with its lifetime.

``celery`` and ``django`` say where the token travels.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal, NamedTuple, TypeVar

from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ... import events
from ...cache import lock_cache
from ...clock import time
from ...conf import Conf
from ...decorators import celery_task, is_django_task, namer
from ...exceptions import LockError
from ...keeper import DeferredRelease, keeper
from ...locking import Hold, Renewal, Renewals, note_vanished
from ...protocol import (
    Acquisition,
    Call,
    Owner,
    activity,
    as_bytes,
    fingerprint,
    hostname,
    milliseconds,
    new_token,
    parse_acquire,
    release_call,
    script,
)
from ...protocol.validation import check_policy, check_seconds
from ...threads import get_logger
from ...transport import is_outage, run, server_of
from ...transport.refusals import explained

__all__ = ["AlreadyQueued", "Duplicate", "TaskNotQueued", "unique_task"]

logger = get_logger("django_redis_lock.unique_tasks")

V = TypeVar("V")

#: Of the name of each lock: the run of the task may hold one of the same name, by ``locked()``.
PREFIX = "queued:"
#: Seconds for which a worker tries to reach Redis before it starts a task.
PATIENCE = 10.0
_FAILED = (ConnectionInterrupted, RedisError, OSError)

#: Give the lock to a message, or a new lifetime to the lock of a message that has it.
#:
#: KEYS  lock keys
#: ARGV  token, lifetime, attempt ('' if any acquisition with this token will do), then fields and
#:       values of the description
#: returns {1, fence, server time, vanished()}, or {0, token, id} of the task that has it
#: atomic because the description must be that of the token.
TAKE = script("""
local holder, id = redis.call('GET', KEYS[1]), redis.pcall('HGET', KEYS[4], 'task')
if type(id) ~= 'string' then id = '' end
if not may_take(holder, ARGV[1], ARGV[3]) then return {0, holder, id} end
if holder ~= ARGV[1] then id = '' end
local fence, gone = take(ARGV[1], ARGV[2], ARGV[3], holder, 1)
put('HSET', KEYS[4], 'fence', string.format('%d', fence), 'task', id, unpack(ARGV, 4))
redis.call('PEXPIRE', KEYS[4], ARGV[2])  -- A message that is lost is no holder that crashed.
return {1, fence, now(), gone}
""")

#: Note the id of a task that is known only now.
#:
#: KEYS  lock keys        ARGV  token, fields and values        returns 1, or 0 if it has not the lock
#: atomic because the description must be that of the token.
NOTE = script("""
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
put('HSET', KEYS[4], unpack(ARGV, 2))
return 1
""")


class TaskNotQueued(LockError):
    """Redis could not be reached, so that nobody knows whether the task is queued already."""


class AlreadyQueued(LockError):
    """The task is queued already.

    Attributes:
        task_id: of the task that is; None if it is not known.
    """

    task_id: str | None = None


class Duplicate(NamedTuple):
    """A task that was not queued, because another one with its name is.

    Attributes:
        name: made from the arguments.
        task_id: of the other task; None if it is not known.
        task: Celery's, or Django's.
    """

    name: str
    task_id: str | None
    task: Any

    @property
    def result(self) -> Any:
        """The ``AsyncResult`` (Celery) or ``TaskResult`` (Django) of the other task; None if its id
        is not known, or the backend does not give results."""
        if self.task_id is None:
            return None
        if hasattr(self.task, "AsyncResult"):
            return self.task.AsyncResult(self.task_id)
        try:
            return self.task.get_result(self.task_id)
        except Exception:  # Each backend has its own for a result that is not there.
            return None


def unique_task(
    key: str | Callable[..., str],
    *,
    timeout: float,
    until: Literal["start", "done"] = "start",
    on_duplicate: Literal["skip", "raise"] | Callable[..., Any] = "skip",
    using: str | None = None,
    on_redis_down: Literal["raise", "run"] | None = None,
) -> Callable[[V], V]:
    """Queue a task only if none with the same name is queued: ``@unique_task("sync-{shop}",
    timeout=3600)`` above ``@shared_task`` or ``@app.task`` of Celery, or ``@task`` of Django.

    It concerns all ways to send the task that know it: Celery's ``delay``, ``apply_async``, chains,
    retries and beat, not ``send_task`` by name; ``enqueue`` and ``aenqueue`` of Django. A direct
    call runs at once, as always.

    * A retry is the same task: it is sent in any case, and has the name again if it is free.
    * What others wait for (a step of a chain or chord, a task with ``link``) is not skipped: it is
      sent without the name.
    * If sending fails, the name is free at once; if the message is lost, after ``timeout``.

    At most one message with a name is queued. That is not "at most one runs": brokers may deliver a
    message twice. For the run use ``locked()``, below.

    Args:
        key: the name: a template over the arguments of the task, or a callable that takes them.
        timeout: seconds after which the name is free, if the task has not been started by then; a
            ``countdown`` or ``eta`` is added to it.
        until: ``"start"``: the name is free when the task starts, so that a change that comes
            during the run is queued. ``"done"``: when it has ended; the worker renews it until
            then.
        on_duplicate: ``"skip"``: the caller gets the ``AsyncResult`` or ``TaskResult`` of the task
            that is queued, see ``Duplicate.result``. ``"raise"``: ``AlreadyQueued``. Or called with
            a ``Duplicate`` and the arguments of the task; the caller gets its result.
        using: the cache alias. Default: the setting USING.
        on_redis_down: ``"raise"``: the caller gets ``TaskNotQueued``, and a worker does not run the
            task. ``"run"``: the task is queued, or runs, although it may not be the only one.
            Default: the setting; ``"local"`` there means ``"run"`` here.

    Raises:
        TypeError, ValueError: an argument is invalid, or the target is no task.
    """
    check_seconds("timeout", timeout)
    check_policy(on_redis_down)
    if not (callable(key) or (isinstance(key, str) and key.strip())):
        raise TypeError(f"key must be a non-empty str or a callable, not {key!r}")
    if until not in ("start", "done"):
        raise ValueError(f"until must be 'start' or 'done', not {until!r}")
    if not (on_duplicate in ("skip", "raise") or callable(on_duplicate)):
        raise ValueError(
            f"on_duplicate must be 'skip', 'raise' or a callable, not {on_duplicate!r}"
        )
    if on_redis_down == "local":
        raise ValueError("on_redis_down must be 'raise' or 'run': a queue is not of one host")
    if not (using is None or isinstance(using, str)):
        raise TypeError(f"using must be a cache alias, not {using!r}")
    rules = Rules(key, timeout, until, on_duplicate, using, on_redis_down)

    def decorate(target: Any) -> Any:
        kind = type(target)
        if is_django_task(target):
            from .django import unique
        elif (kind.__module__, kind.__name__) == ("celery.local", "Proxy") or celery_task(target):
            from .celery import unique
        else:
            raise TypeError(
                f"@unique_task(...) decorates tasks, not {target!r}: put it above @shared_task, "
                "@app.task or @task"
            )
        return unique(rules, target)

    return decorate


class Rules(NamedTuple):
    """The arguments of ``unique_task``."""

    key: Any
    timeout: float
    until: str
    on_duplicate: Any
    using: str | None
    on_redis_down: str | None


class Other(NamedTuple):
    """The message that has a name. ``task_id`` may be empty."""

    token: str
    task_id: str


class Unique:
    """The rules for one task.

    Args:
        function: whose arguments give the name.
        title: the dotted name of the task.
    """

    def __init__(self, rules: Rules, function: Callable[..., Any], title: str) -> None:
        self.rules, self.title = rules, title
        self._name = namer(rules.key, function, title)

    @property
    def _using(self) -> str:
        return self.rules.using or Conf().USING

    def name_of(self, args: Any, kwargs: Any) -> str:
        return self._name if isinstance(self._name, str) else self._name(tuple(args), kwargs)

    def message(self, name: str, token: str, task_id: str = "") -> Message:
        return Message(self, lock_cache(self._using), name, token, task_id)

    def send(
        self,
        message: Message,
        attempt: str,
        delay: float,
        publish: Callable[[bool], Any],
        duplicate: Callable[[Other], Any],
    ) -> Any:
        """Take the name and ``publish(True)``; ``publish(False)`` goes without it.

        Args:
            attempt: see TAKE; '' for a retry, which is sent in any case.
            delay: seconds before which the task cannot start.
            duplicate: called if another message has the name.
        """
        try:
            other = message.take("queued", attempt, delay)
        except BaseException as error:
            message.give_back()
            if not isinstance(error, _FAILED):
                raise
            if attempt and not self.goes_on(error):
                text = f"The task {self.title} was not queued, as its name could not be taken: "
                raise TaskNotQueued(text + explained(error), message.name) from error
            self.warn(error)
            return publish(False)
        if other is not None:
            return duplicate(other) if attempt else publish(False)
        try:
            return publish(True)
        except BaseException:
            message.release()
            raise

    def refuse(self, duplicate: Duplicate, args: Any, kwargs: Any) -> Any:
        """What the caller gets instead of a second task."""
        if callable(self.rules.on_duplicate):
            return self.rules.on_duplicate(duplicate, *args, **kwargs)
        if self.rules.on_duplicate == "skip":
            return duplicate.result
        text = f"The task {self.title} is queued already, as {duplicate.task_id or 'another'}"
        error = AlreadyQueued(text, duplicate.name)
        error.task_id = duplicate.task_id
        raise error

    def goes_on(self, error: Exception) -> bool:
        """Whether the work is done all the same while Redis is down."""
        conf: Conf = lock_cache(self._using).conf
        return (self.rules.on_redis_down or conf.ON_REDIS_DOWN) != "raise" and is_outage(error)

    def warn(self, error: BaseException) -> None:
        text = "Redis is down: the task %(task)s may be queued or run more than once: %(error)s"
        logger.warning(text, {"task": self.title, "error": error})


class Message:
    """A message and its lock.

    Attributes:
        name: of the message; that of the lock has PREFIX before it.
        kept: the message is queued again with its token, so the end of this run does not free it.
    """

    kept = False
    _renewals: Renewals | None = None

    def __init__(self, unique: Unique, cache: Any, name: str, token: str, task_id: str) -> None:
        self.unique, self.name, self.task_id = unique, name, task_id
        rules = unique.rules
        options = {
            "timeout": rules.timeout,
            "id": token,
            "group": f"{PREFIX}{unique.title if callable(rules.key) else rules.key}"[:100],
            "replicas": 0,
            "on_redis_down": "raise",
        }
        self.lock = cache.lock(f"{PREFIX}{name}", **options)
        self._server = server_of(self.lock.redis)

    # -- the lock ----------------------------------------------------------------------------

    def take(self, state: str, attempt: str = "", delay: float = 0.0) -> Other | None:
        """None if this message has the name now, else the one that has it."""
        lock, lifetime, sent_at = self.lock, self.unique.rules.timeout + delay, time.monotonic()
        args = (lock.id, milliseconds(lifetime), attempt, *self._description(state))
        reply = run(lock.redis, Call(TAKE, lock.keys, args)).value
        if not reply[0]:
            if events.listeners and attempt:
                events.emit(events.Rejected(lock.subject))
            return Other(*(as_bytes(part).decode(errors="replace") for part in reply[1:]))
        taken: Any = parse_acquire(reply, sent_at)
        if taken.vanished is not None:
            note_vanished(self._server, lock.keys, taken.vanished, lock.subject)
        if events.listeners and attempt:
            events.emit(events.Acquired(lock.subject, 0.0, False, taken.fence))
        if state == "running":
            self._renew(Acquisition(lock.id, taken.fence, sent_at, sent_at + lifetime))
        return None

    def _description(self, state: str) -> list[str]:
        """Fields and values, for people."""
        where = hostname(), os.getpid(), threading.current_thread().name
        doing = ""
        with suppress(Exception):  # From attributes that users have given to a request.
            doing = str(activity.get() or "")[:200]
        owner = Owner(fingerprint(self.lock.id), *where, self._label(state), doing=doing)
        more = {"task": self.task_id, "group": self.lock.subject.group, "limit": "1"}
        more["name"] = self.lock.stored_name
        return [*owner.fields(), *(text for pair in more.items() if pair[1] for text in pair)]

    def _label(self, state: str) -> str:
        return f"{state}: {self.unique.title}" + (f" ({self.task_id})" if self.task_id else "")

    def _renew(self, acquired: Acquisition) -> None:
        lock, label = self.lock, self._label("running")
        options = {"name": lock.stored_name, "subject": lock.subject}
        hold = Hold(lock.timeout, renews_for=math.inf, label=label, **options)
        hold.begin(acquired, lock.keys)
        self._renewals = Renewals(hold, Renewal(self._server, hold))
        self._renewals.begin()

    def note_id(self, task_id: str) -> None:
        """The task is queued, with this id."""
        self.task_id = task_id
        args = (self.lock.id, "task", task_id, "label", self._label("queued"))
        with suppress(*_FAILED):  # It is for people, and for those who are skipped.
            run(self.lock.redis, Call(NOTE, self.lock.keys, args))

    def _release_call(self) -> Call:
        return release_call(self.lock.keys, self.lock.id, new_token(), self.lock.grant_timeout)

    def give_back(self) -> None:
        """The keeper releases the lock, if this message has it, when it can."""
        lifetime = self.unique.rules.timeout
        keeper().add(DeferredRelease(self._server, self._release_call(), lifetime))

    def release(self) -> None:
        """Free the name, if this message has it: now, or else when Redis is up again."""
        try:
            run(self.lock.redis, self._release_call())
        except BaseException as error:
            self.give_back()
            if not isinstance(error, _FAILED):
                raise

    # -- the run -----------------------------------------------------------------------------

    def begin(self) -> None:
        """The worker starts the task. Nothing must run before the name is free: a change that was
        not queued, because this message was, would be lost."""
        until = time.monotonic() + PATIENCE
        starts = self.unique.rules.until == "start"
        while True:
            try:
                if starts:
                    run(self.lock.redis, self._release_call())
                else:
                    self.take("running")
                return
            except BaseException as error:
                goes_on = isinstance(error, _FAILED) and self.unique.goes_on(error)
                if not (is_outage(error) and time.monotonic() < until) or goes_on:
                    self.give_back()
                    if not goes_on:
                        raise
                    self.unique.warn(error)
                    return
            time.sleep(0.25)

    def stop(self) -> None:
        """Do not renew the lock any more."""
        if self._renewals is not None:
            self._renewals.discard()
            self._renewals.hold.end()

    def end(self) -> None:
        """The task has ended."""
        self.stop()
        if not self.kept and self.unique.rules.until == "done":
            self.release()

    @contextmanager
    def running(self) -> Iterator[Message]:
        self.begin()
        try:
            yield self
        finally:
            self.end()
