"""What a message in a queue of tasks has: a name, and the lock of that name."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ...cache import lock_cache
from ...clock import time
from ...conf import Conf
from ...decorators.key_template import Namer, namer
from ...exceptions import LockError, LockNotOwnedError
from ...locking import Hold, Lifeline, Renewal
from ...protocol import Acquisition, renew_call
from ...protocol.validation import check_policy, check_time
from ...threads import check_plain, get_logger
from ...transport import is_outage, run, server_of
from ...transport.hints import explained

logger = get_logger("django_redis_lock.unique_tasks")

#: Of the name of each lock: the run of the task may hold one of the same name, by ``locked()``.
PREFIX = "queued:"
#: Seconds for which a worker tries to reach Redis before it starts a task.
PATIENCE = 10.0
_FAILED = (ConnectionInterrupted, RedisError)


class TaskNotQueued(LockError):
    """Redis is down, so that it is not known whether the task is queued already."""


class AlreadyQueued(LockError):
    """The task is queued already; ``task_id`` says as which, if that is known."""

    task_id: str | None = None


class Duplicate(NamedTuple):
    """A ``task`` of Celery or Django that was not queued, because another message has its ``name``:
    that of ``task_id``, if that is known."""

    name: str
    task_id: str | None
    task: Any

    @property
    def result(self) -> Any:
        """The other task's ``AsyncResult`` or ``TaskResult``; None if its id is not known, or the
        backend does not give results."""
        if self.task_id and hasattr(self.task, "AsyncResult"):
            return self.task.AsyncResult(self.task_id)
        with suppress(Exception):  # Each backend has its own, for a result that is not there.
            return self.task.get_result(self.task_id)
        return None


#: For the system checks.
declared: weakref.WeakSet[Unique] = weakref.WeakSet()


@dataclass(eq=False)
class Unique:
    """The arguments of ``unique_task``; from ``of`` on for one task.

    Raises:
        TypeError, ValueError: one of them is invalid.
    """

    key: Any
    timeout: Any
    until: Any
    on_duplicate: Any
    using: Any
    on_redis_down: Any
    title: str = field(init=False)
    group: str = field(init=False)
    _name: str | Namer = field(init=False)

    def __post_init__(self) -> None:
        check_time("timeout", self.timeout)
        check_policy(self.on_redis_down)
        if not (callable(self.key) or (isinstance(self.key, str) and self.key.strip())):
            raise TypeError(f"key must be a non-empty str or a callable, not {self.key!r}")
        check_plain("key", self.key)
        if self.until not in ("start", "done"):
            raise ValueError(f"until must be 'start' or 'done', not {self.until!r}")
        if not (self.on_duplicate in ("skip", "raise") or callable(self.on_duplicate)):
            raise ValueError(
                f"on_duplicate must be 'skip', 'raise' or callable, not {self.on_duplicate!r}"
            )
        if not (self.using is None or isinstance(self.using, str)):
            raise TypeError(f"using must be a cache alias, not {self.using!r}")

    def of(self, function: Callable[..., object], title: str) -> Unique:
        """For the task ``title``; the arguments of ``function`` give the name of each message."""
        unique = replace(self)
        unique.title, unique._name = title, namer(self.key, function, title)
        unique.group = f"{PREFIX}{title if callable(self.key) else self.key}"[:100]
        declared.add(unique)
        return unique

    @property
    def cache(self) -> Any:
        return lock_cache(self.using or Conf().USING)

    def to_send(self, args: Any, kwargs: Any, token: str, delay: float) -> Message:
        name = self._name if isinstance(self._name, str) else self._name(tuple(args), kwargs)
        return Message(self, name, token, f"queued: {self.title}", timeout=self.timeout + delay)

    def to_run(self, name: str, token: str, task_id: str) -> Message:
        label = f"running: {self.title} ({task_id})"
        return Message(self, name, token, label, timeout=self.timeout, renew=True)

    def goes_on(self, error: BaseException) -> bool:
        """Whether the work is done all the same, as Redis is down."""
        if (self.on_redis_down or self.cache.conf.ON_REDIS_DOWN) == "raise" or not is_outage(error):
            return False
        text = "Redis is down: the task %(task)s may be queued or run more than once: %(error)s"
        logger.warning(text, {"task": self.title, "error": error})
        return True

    def refuse(self, duplicate: Duplicate, args: Any, kwargs: Any) -> Any:
        """What the caller gets instead of a second task."""
        if callable(self.on_duplicate):
            return self.on_duplicate(duplicate, *args, **kwargs)
        if self.on_duplicate == "skip":
            return duplicate.result
        text = f"The task {self.title} is queued already, as {duplicate.task_id or 'another'}"
        error = AlreadyQueued(text, duplicate.name)
        error.task_id = duplicate.task_id
        raise error


class Message:
    """A message and its lock.

    Attributes:
        named: whether it has the name.
        passed_on: it is queued again with its token: the end of this run does not free the name.
    """

    named = passed_on = False

    def __init__(
        self, unique: Unique, name: str, token: str, label: str, **options: object
    ) -> None:
        self.unique, self.name = unique, name
        options.update(id=token, label=label, group=unique.group, blocking=False)
        self.lock = unique.cache.lock(f"{PREFIX}{name}", on_redis_down="raise", **options)

    def take(self, again: bool = False) -> tuple[str, str] | None:
        """Take the name; or token and task id of the message that has it. A retry (``again``) has
        the token already, and is sent in any case, as others are if Redis may be down."""
        try:
            held = None
            while not (self.named or self.lock.acquire()):
                held = self.lock.held()
                if held is not None and not (again and held.token == self.lock.id):
                    return held.token.decode(errors="replace"), held.described.get("task", "")
                if held is not None:
                    self.named = self.lock.reacquire()
            self.named = True
            self.hand_over()
        except _FAILED as error:
            self.named = False
            if not self.unique.goes_on(error) and not again:
                text = f"The task {self.unique.title} was not queued, as its name could not be "
                raise TaskNotQueued(f"{text}taken: {explained(error)}", self.name) from error
        return None

    def publish(self, send: Callable[[], object]) -> Any:
        """The result of ``send``; if that fails, the name is free."""
        try:
            result = send()
        except BaseException:
            self.free()
            raise
        if self.named and (task_id := getattr(result, "id", "")):
            self._describe(task_id)
        return result

    def _describe(self, task_id: str) -> None:
        """For people, and for those who are skipped."""
        hold, lock = Hold(None, label=f"{self.lock.label} ({task_id})"), self.lock
        hold.begin(Acquisition(lock.id, 0, 0, 0), lock.keys)
        known = {"task": task_id, "group": lock.subject.group, "name": lock.stored_name}
        more = [text for pair in known.items() if pair[1] for text in pair]
        owner = replace(hold.owner(), process="")  # Heartbeats would be those of this process.
        fields = [*owner.fields(), "queued", "1", "lifetime", "", "limit", "1", *more]
        with suppress(*_FAILED):
            run(lock.redis, renew_call(lock.keys, lock.id, b"", *fields))

    def hand_over(self) -> None:
        """From now on the message has the lock, and not this process."""
        self.passed_on = True
        if self.lock.local.renewal is not None:
            self.lock.local.renewal.discard()
            self.lock.local.hold.end()

    def free(self) -> None:
        """Release the lock now, or when Redis can be reached; not that of another message."""
        with suppress(*_FAILED):
            self.lock.__exit__(None, None, None)

    def begin(self) -> None:
        """The task starts. It must not before the name is free: a change that was not queued,
        because this message was, would be lost."""
        until = time.monotonic() + PATIENCE
        while True:
            try:
                with suppress(LockNotOwnedError):
                    self._adopt() if self.unique.until == "done" else self.lock.release()
                return
            except BaseException as error:
                if not is_outage(error) or time.monotonic() > until:
                    self.free()
                    if isinstance(error, _FAILED) and self.unique.goes_on(error):
                        return
                    raise
            time.sleep(0.25)

    def _adopt(self) -> None:
        """This process renews the lock."""
        lock, now = self.lock, time.monotonic()
        try:
            lock.reacquire()
        except LockNotOwnedError:  # It has expired.
            lock.acquire()
            return
        options = {"label": lock.label, "name": lock.stored_name, "subject": lock.subject}
        hold, held = Hold(lock.timeout, renews_for=math.inf, **options), lock.held()
        fence = held.fence if held else 0
        hold.begin(Acquisition(lock.id, fence, now, now + lock.timeout), lock.keys)
        lock.local.hold = hold
        lock.local.renewal = Lifeline(hold, Renewal(server_of(lock.redis), hold))
        lock.local.renewal.begin()

    def end(self) -> None:
        if self.unique.until == "done" and not self.passed_on:
            self.free()
