"""Code under its lock: one call of it, and the function that ``locked()`` makes."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import (
    AbstractContextManager,
    AsyncContextDecorator,
    ContextDecorator,
    contextmanager,
    nullcontext,
)
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.management.base import BaseCommand
from redis.exceptions import AuthenticationError, RedisError

from .. import events, transport
from ..activity import RequestActivity, doing, request_of
from ..cache import lock_cache
from ..clock import time
from ..conf import Conf
from ..contention import (
    OUTAGE,
    REFUSED_STATUS,
    RETRY_ONLY_CELERY,
    Conflict,
    of_this_moment,
    retry_task,
    service_unavailable,
    skip,
    unavailable,
)
from ..exceptions import LockError
from ..locking import BaseLock, unwinding
from ..protocol import printable
from ..steps import Steps, adrive, drive
from ..threads import get_logger, in_context, is_async
from ..transport import is_outage
from ..transport.refusals import is_unusable
from . import transactions
from .key_template import Args, Kwargs, Names, made_for_task, names_of
from .on_lost import CommandTerminator
from .options import EXIT_CODES, MISSING, OnLost, Options
from .targets import (
    API_VIEWS,
    CELERY_TASK,
    COMMAND,
    DJANGO_TASK,
    LOCKED,
    VIEWS,
    Target,
    bound_method,
    first_arguments,
    is_api_view,
    is_dispatch,
    sends_on,
    view_of,
)

if TYPE_CHECKING:
    from ..cache import CurrentLock

logger = get_logger("django_redis_lock.locked")

_CONF = Conf()

#: Between two attempts to reach Redis: the first time, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
PLAIN_FUNCTION = "{} must be a plain function, because {} is one"
_WAITS_FOR_ITSELF = (
    "This call already holds the lock and would wait for itself; give reentrant=True to both uses "
    "of locked()",
    "This call would wait for itself: the task or thread that it works for already holds the lock, "
    "and re-entry does not go from a task to a thread or back",
)


# -- the locks of the running call ---------------------------------------------------------------


_entered: ContextVar[tuple[Section, ...]] = ContextVar("django_redis_lock_entered", default=())


def current_lock() -> CurrentLock:
    """The innermost lock that ``locked()`` holds for the running call, for its ``fence``, ``lost``
    and ``ensure_held()``, or to ``extend`` it. Threads and tasks that the call starts find it too
    if they run in a copy of its context, as with ``sync_to_async`` and ``asyncio.create_task``::

        @locked("invoice-{pk}")
        def send_invoice(pk):
            for page in pages(pk):
                current_lock().ensure_held()  # raises LockLost; no round trip
                post(page, fence=current_lock().fence)

    Raises:
        LockError: no lock is held here.
    """
    entered = _entered.get()
    if not entered:
        raise LockError("current_lock() works inside what locked() decorates: no lock is held here")
    lock: object = entered[-1].lock
    return cast("CurrentLock", lock)


def caller() -> tuple[int, int]:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # No event loop runs in this thread.
        task = None
    return threading.get_ident(), 0 if task is None else id(task)


# -- outages -------------------------------------------------------------------------------------


class RetryUntil:
    """Whether and when a request that failed is repeated, until ``deadline`` (monotonic)."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.attempts = 0

    def left(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait until the next attempt; or raise ``error``."""
        left = self.left()
        if not left or not is_outage(error) or isinstance(error, AuthenticationError):
            raise error
        self.attempts += 1
        pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self.attempts - 1, 10)
        return min(pause, MAX_PAUSE_SECONDS, left)


@contextmanager
def outages_not_logged() -> Iterator[None]:
    """For a command that itself prints that Redis cannot be reached, but not that it goes ahead."""
    logger = logging.getLogger("django_redis_lock.outage")

    def errors_only(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(errors_only)
    try:
        yield
    finally:
        logger.removeFilter(errors_only)


# -- sections ------------------------------------------------------------------------------------


class Section:
    """One call under its lock. ``enter``, ``leave`` and ``conflict`` are generators of steps; see
    ``steps``. ``label`` and ``group`` are for options that leave them out."""

    lock: Any = None
    _taken_up = False
    _left = False  # Or never entered.

    def __init__(
        self,
        options: Options,
        names: Names,
        label: str | None = None,
        group: str | None = None,
        *,
        asynchronous: bool = False,
    ) -> None:
        self.options, self.names = options, names
        self.name = names if isinstance(names, str) else ", ".join(names)
        self.label, self.group = label, group
        self.using = options.using or _CONF.USING  # At each call: decorators run before settings.
        self.key = (self.using, names)
        self.on_lost: OnLost = options.on_lost if callable(options.on_lost) else None
        self.asynchronous = asynchronous
        self.caller = caller()

    def abandon(self) -> None:
        """A signal handler's exception interrupted the section: the keeper releases."""
        if self.lock is not None and not self._left:
            self._forget()
            self.lock._leave_to_keeper()

    def _forget(self) -> None:
        # It need not be the innermost, nor be there: a generator may be left in another context.
        _entered.set(tuple(section for section in _entered.get() if section is not self))

    # -- the lock ----------------------------------------------------------------------------

    def _new_lock(self, asynchronous: bool, **options: object) -> BaseLock:
        cache = lock_cache(self.using)
        make: Callable[..., BaseLock] = cache.alock if asynchronous else cache.lock
        of_lock = self.options.of_lock
        options["label"] = of_lock["label"] or self.label
        options["group"] = of_lock["group"] or self.group
        return make(self.names, **{**of_lock, **options})

    def _on_lost_callback(self) -> OnLost:
        """Runs in the context of the call, so that ``current_lock()`` works there."""
        on_lost = self.on_lost
        if on_lost is None:
            return None
        if not self.asynchronous and is_async(on_lost):
            raise TypeError(PLAIN_FUNCTION.format("on_lost", self.label or "a with block"))
        self._context = contextvars.copy_context()

        def callback() -> None:
            # An event loop calls it in the thread of the section.
            carried = self._context.run if self.asynchronous else partial(in_context, self._context)
            outcome = carried(on_lost)
            if asyncio.iscoroutine(outcome):
                self._context.run(transport.in_background, outcome)

        return callback

    # -- the steps ---------------------------------------------------------------------------

    def _in_callers_thread(self, function: Callable[[], object]) -> object:
        """Call ``function`` in the thread of the synchronous caller, who may have a transaction
        open; None if there is no such caller."""
        return _for_sync_caller(function) if self.asynchronous else function()

    def enter(self, on_wait: Callable[[Conflict], None] | None = None) -> Steps[bool]:
        """Acquire the lock; returns whether that succeeded. ``on_wait`` is called with the conflict
        before the wait begins."""
        again = yield self._in_callers_thread(partial(transactions.take_up, self.key))
        self._taken_up = again is not None and _is_held_here(again) and not again.lost
        self.lock = self._new_lock(self.asynchronous, on_lost=self._on_lost_callback())
        if hasattr(self.lock, "named"):
            yield self.lock.named()
        if self._taken_up:
            self.lock._take_over(again)
        else:
            self._refuse_to_wait_for_itself()
            if self.options.blocking and (
                yield self._in_callers_thread(partial(transactions.holds_part_of, self.key))
            ):
                raise LockError(
                    "This call would wait for itself: its transaction holds the lock", self.name
                )
            if not (yield from self._acquire(on_wait)):
                self._left = True
                return False
        self.lock._entered()
        _entered.set((*_entered.get(), self))
        if self.on_lost is not None:
            self._context = contextvars.copy_context()
        return True

    def _refuse_to_wait_for_itself(self) -> None:
        if not self.options.blocking or self.lock._is_inside():
            return
        for section in _entered.get():
            here, there = caller(), section.caller
            # Of a thread and a task with one context, one waits for the other: sync_to_async.
            across = bool(there[1]) is not bool(here[1])
            if not (across or there == here) or not transactions.overlap(section.key, self.key):
                continue
            if _is_held_here(section.lock) and not section.lock.lost:
                raise LockError(_WAITS_FOR_ITSELF[across], self.name)

    def _acquire(self, on_wait: Callable[[Conflict], None] | None) -> Steps[bool]:
        wait = self.options.blocking_timeout
        retry = RetryUntil(math.inf if wait is None else time.monotonic() + wait)
        if on_wait is not None and self.options.blocking:
            if (yield from self._try(retry, blocking=False)):
                return True
            on_wait((yield from self.conflict()))
        return (yield from self._try(retry))

    def _try(self, retry: RetryUntil, **options: object) -> Steps[bool]:
        while True:
            left = retry.left()
            if "blocking" not in options:
                options["blocking_timeout"] = None if math.isinf(left) else left
            try:
                acquired: bool = yield self.lock.acquire(**options)
                return acquired
            except RedisError as error:
                setattr(error, OUTAGE, (self.name, self.options.retry_after))
                if not self.options.wait_for_redis:
                    raise
                pause = retry.pause_after(error)
                yield time.asleep(pause) if self.asynchronous else time.sleep(pause)

    def leave(self, error: BaseException | None = None) -> Steps[None]:
        """Release the lock, now or when the transaction ends. An error from that is logged: it must
        not cost the result of the work. Raises LockLost if the work's ``error`` is the cancellation
        of its task because the lock was lost."""
        self._forget()
        lost = self.asynchronous and self.lock._is_cancelled_by_loss(error)
        waits = False
        try:
            waits = yield self._in_callers_thread(self._wait_for_transactions)
        finally:
            if not waits:
                yield from _release(self.lock, self.name)
        self._left = True
        if lost:
            raise self.lock._lost_error() from error

    def _wait_for_transactions(self) -> bool:
        """Whether the lock is released when open transactions of this thread end. There may be no
        event loop by then, so a lock for threads takes the place of one for asyncio."""
        if self.options.release == "now" and not self._taken_up:
            return False
        lock = self.lock
        if self.asynchronous:
            if not transactions.open_transactions():
                return False
            lock = self._new_lock(False, on_lost=None, cancel_on_lost=False)
            lock._take_over(self.lock)
        return transactions.wait_for(lock, self.key, lambda: drive(_release(lock, self.name)))

    def conflict(self) -> Steps[Conflict]:
        try:
            held = yield self.lock.held()
        except RedisError:  # It is taken; the holder is unknown.
            held = None
        given = self.options.retry_after
        usual = events.usual_hold(self.lock.subject) if given is None else None
        name = held.name if held is not None and held.name else self.name
        conflict = Conflict.of(name, held, self.using, given, usual)
        if isinstance(self.names, str) or name != self.name:
            return conflict
        return replace(conflict, first_name=self.names[0])


async def _for_sync_caller(function: Callable[[], object]) -> object:
    """Call it in the thread that waits for this task in ``async_to_sync``, if there is one."""
    waits = getattr(AsyncToSync.executors, "current", None) is not None
    if waits or asyncio.get_running_loop() in getattr(AsyncToSync, "loop_thread_executors", ()):
        return await sync_to_async(function)()
    return None


def _is_held_here(lock: BaseLock) -> bool:
    """False if the code itself has released the lock, and in a forked child, whose parent holds
    it."""
    hold = lock.local.hold
    return lock.local.token is not None and not (hold is not None and hold.from_parent_process)


def _release(lock: Any, name: str) -> Steps[None]:
    if not _is_held_here(lock):
        return
    before = lock.local.known()
    try:
        yield lock.release()
    except RedisError as error:
        about = {"lock": printable(name), "error": error}
        if isinstance(error, LockError):
            logger.warning("The lock %(lock)s ended before the locked code did: %(error)s", about)
        else:
            lock._leave_to_keeper(before)
            words = (
                "The locked code has ended, but its lock %(lock)s is not released yet: %(error)s"
            )
            logger.error(words, about)


# -- functions -----------------------------------------------------------------------------------

#: What other decorators make a function return: a block for ``with``, work in the background.
_RUN_LATER = (ContextDecorator, AsyncContextDecorator, Thread, Future)
ONLY_COMMANDS = (
    "only a management command can be ended when its lock is lost. Give on_lost a callable, or "
    "call current_lock().ensure_held() before each step that needs the lock"
)


class Stopped(RuntimeError):
    """What was called raised StopIteration, which cannot leave a generator."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__("the decorated function raised StopIteration")
        self.error = error


def called(function: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """``function(*args, **kwargs)``, for a generator of steps.

    Raises:
        Stopped: it raised StopIteration.
    """
    try:
        return function(*args, **kwargs)
    except StopIteration as error:
        raise Stopped(error) from None


def run_steps(asynchronous: bool, steps: Steps[object]) -> Any:
    """What ``steps`` return, for a task an awaitable of it."""
    if asynchronous:
        return adrive(steps)
    try:
        return drive(steps)
    except Stopped as stopped:
        raise stopped.error from None


def by_steps(function: Any, steps: Callable[[bool, Any, Any], Steps[object]]) -> Callable[..., Any]:
    """``like``, with a generator of steps: ``steps(asynchronous, args, kwargs)``."""

    def run(asynchronous: bool, args: Args, kwargs: Kwargs) -> object:
        return run_steps(asynchronous, steps(asynchronous, args, kwargs))

    return like(function, partial(run, False), partial(run, True))


def in_thread(asynchronous: bool, function: Callable[..., Any], *args: object) -> Any:
    """A step: what ``function`` returns, which for a task runs in Django's thread."""
    return sync_to_async(function)(*args) if asynchronous else called(function, *args)


def like(
    function: Any, call: Callable[[Any, Any], object], acall: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A function of the same kind as ``function``, which calls ``call``, or awaits ``acall``, with
    its arguments."""
    if is_async(function):

        async def awaited(*args: object, **kwargs: object) -> object:
            return await acall(args, kwargs)

        return awaited
    dispatches = is_dispatch(function)

    def plain(*args: object, **kwargs: object) -> object:
        # Django awaits the result if the methods of the view's class are coroutine functions.
        view = view_of(function, args) if dispatches else None
        return acall(args, kwargs) if view and view.view_is_async else call(args, kwargs)

    return plain


class LockedFunction:
    """A function that runs only once at a time.

    Attributes:
        target: its dotted name, which is the lock's by default.
        template: the lock's name as written, or the dotted name; None if a callable makes it.
        is_literal: whether a name was given that is the same for each call.
        may_raise_for_a_request: whether this is called with a request, and what it answers is not
            chosen.
    """

    def __init__(
        self,
        options: Options,
        function: Callable[..., object],
        dotted: str,
        is_handler: bool = False,
    ) -> None:
        if options.on_lost == "terminate" and getattr(function, "__name__", "") != "handle":
            raise TypeError(f'on_lost="terminate" means nothing for {dotted}: {ONLY_COMMANDS}')
        if not (is_async(function) or is_dispatch(function) or _is_djangos_dummy(function)):
            for name in ("on_lost", "on_conflict"):
                if is_async(getattr(options, name)):
                    raise TypeError(PLAIN_FUNCTION.format(name, dotted))
            if options.cancel_on_lost:
                raise TypeError(f"cancel_on_lost must be False: {dotted} is no coroutine function")
        arguments = first_arguments(function)
        takes_request = "request" in (arguments or ())
        if arguments == []:
            options.refuse("a function without arguments", *EXIT_CODES, "status_code")
        if takes_request:
            options.refuse("a view", *EXIT_CODES)
        self.options = options
        self.function = function
        self.is_handler = is_handler  # Of a view of Django REST framework.
        self.target = dotted
        names = names_of(options.key, function, dotted)
        self.name_of = names if callable(names) else lambda args, kwargs: names
        self.template = None if callable(options.key) else options.template or dotted
        self.name = self.template or dotted
        self.is_literal = isinstance(options.key, str) and not callable(names)
        self.group = options.group or events.as_group(self.name)
        self._chosen = options.on_conflict is not None or options.default is not MISSING
        of_class = is_handler or bound_method(function) is not None
        self.may_raise_for_a_request = takes_request and not (self._chosen or of_class)
        # The clients of a view that Django REST framework's @api_view made are programs.
        self.json = is_api_view(getattr(function, "cls", None))

    @property
    def using(self) -> str:
        return self.options.using or _CONF.USING

    def wrapper(self) -> Callable[..., Any]:
        function = self.function
        wrapper = like(function, self.run, self.arun)
        functools.update_wrapper(wrapper, function)
        setattr(wrapper, LOCKED, self)
        if not _is_djangos_dummy(function):
            _declared[self] = None
        return wrapper

    def run(self, args: Args, kwargs: Kwargs) -> object:
        section = Section(self.options, self.name_of(args, kwargs), self.target, self.group)
        command, terminates = _command(args), self.options.on_lost == "terminate"
        if command is None and terminates:
            raise TypeError(f"{self.target} is not a management command: {ONLY_COMMANDS}")

        def run() -> object:
            try:
                return drive(self._steps(section, args, kwargs))
            except BaseException as error:
                section.abandon()
                if isinstance(error, Stopped):
                    raise error.error from None
                raise

        if command is None:
            return run()
        with unwinding():
            if not terminates:
                return run()
            ending = CommandTerminator(
                command,
                self.options.lost_exit_code,
                section.name,
                lambda: str(getattr(section.lock, "lost_reason", "")),
            )
            section.on_lost = ending
            return ending.run(run)

    async def arun(self, args: Args, kwargs: Kwargs) -> object:
        by_function = callable(self.options.key)
        name = await made_for_task(self.name_of, args, kwargs, by_function=by_function)
        section = Section(self.options, name, self.target, self.group, asynchronous=True)
        return await adrive(self._steps(section, args, kwargs))

    def _steps(self, section: Section, args: Args, kwargs: Kwargs) -> Steps[object]:
        asynchronous = section.asynchronous
        try:
            with self._entering(args, kwargs):
                entered = yield from section.enter(_print_waiting(_command(args), kwargs))
        except RedisError as error:
            request, command = None, _command(args)
            if is_unusable(error) and not self._chosen:
                request = self._request_of_view(args, kwargs)
            if request is not None:  # Its template may query the database.
                answer = request, section.name, error, self.options.retry_after, self.json
                return (yield in_thread(asynchronous, service_unavailable, *answer))
            if command is None or (isinstance(error, LockError) and not is_outage(error)):
                raise
            raise unavailable(section.name, error, self.options.unavailable_exit_code) from error
        if not entered:
            return of_this_moment((yield from self._refuse(section, args, kwargs)))
        try:
            result = called(self.function, *args, **kwargs)
            if asynchronous and inspect.isawaitable(result):  # Not a response of a dispatch().
                result = yield result
        except BaseException as error:
            yield from section.leave(error)
            raise
        yield from section.leave()
        return _complete(result, self.target)

    def _entering(self, args: Args, kwargs: Kwargs) -> AbstractContextManager[None]:
        """A view acquires the lock for its request; a command itself prints that Redis is down."""
        if _command(args) is not None:
            return nullcontext() if self.options.wait_for_redis else outages_not_logged()
        request = request_of(args, kwargs)
        return nullcontext() if request is None else doing(RequestActivity(request))

    def _request_of_view(self, args: Args, kwargs: Kwargs) -> object:
        """The request, if this is a call of a view."""
        request = request_of(args, kwargs)
        if request is None or self.is_handler:
            return request
        return request if sends_on(self, self.function, args, kwargs, request) else None

    def _refuse(self, section: Section, args: Args, kwargs: Kwargs) -> Steps[object]:
        conflict = yield from section.conflict()
        if is_async(self.options.on_conflict):
            answer = self._answer(conflict, args, kwargs)
        else:
            # A template, or the project's on_conflict, may query the database.
            answer = yield in_thread(section.asynchronous, self._answer, conflict, args, kwargs)
        return (yield answer) if section.asynchronous and inspect.isawaitable(answer) else answer

    def _answer(self, conflict: Conflict, args: Args, kwargs: Kwargs) -> Any:
        options, command = self.options, _command(args)
        if options.on_conflict is skip and self._request_of_view(args, kwargs) is None:
            return None
        if options.on_conflict is not None:
            return options.on_conflict(conflict, *args, **kwargs)
        if options.default is not MISSING:
            return options.default
        if command is not None:
            if options.exit_code:
                raise conflict.command_error(options.exit_code)
            if kwargs.get("verbosity", 1):
                command.stderr.write(conflict.line(), command.style.WARNING)
            return None
        request = self._request_of_view(args, kwargs)
        if request is None:
            error = conflict.error()
            setattr(error, REFUSED_STATUS, options.status_code)
            raise error
        return conflict.response(request, options.status_code, json=self.json)


#: Each lives as long as its wrapper, so a reloaded module leaves none behind.
_declared: weakref.WeakKeyDictionary[LockedFunction, None] = weakref.WeakKeyDictionary()


def declarations() -> list[LockedFunction]:
    """All uses of ``locked()`` as a decorator in the modules imported so far, ordered by the name
    of what they decorate. A function that ``method_decorator`` decorates is included from its first
    call on."""
    known = filter(None, [declared() for declared in _declared.keyrefs()])
    return sorted(known, key=lambda lock: (lock.target, lock.name))


def _complete(result: object, dotted: str) -> object:
    """``result``. Raises TypeError if some of what the function ``dotted`` has returned has yet to
    run, when its lock is released."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        instead = 'return a list, or take the lock inside the generator: with locked("name")'
    elif inspect.isawaitable(result):
        instead = "make it a coroutine function, or mark it: asgiref.sync.markcoroutinefunction"
    elif isinstance(result, _RUN_LATER):
        instead = 'take the lock inside of what runs later: with locked("name")'
    else:
        return result
    if _is_over(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    kind = type(result).__name__.strip("_").removeprefix("async_")
    returned = f"{dotted} returned a {kind}, which would run after the lock's release"
    raise TypeError(f"{returned}: {instead}")


def _is_over(result: object) -> bool:
    if isinstance(result, Thread):
        return result.ident is not None and not result.is_alive()
    return bool(hasattr(result, "done") and result.done())


def _is_djangos_dummy(function: object) -> bool:
    """Whether ``method_decorator`` only tries out what the decorator does to a function."""
    return getattr(function, "__module__", "") == "django.utils.decorators"


def _command(args: Args) -> BaseCommand | None:
    """The management command, of a call of its ``handle``."""
    return args[0] if args and isinstance(args[0], BaseCommand) else None


def _print_waiting(
    command: BaseCommand | None, kwargs: Kwargs
) -> Callable[[Conflict], None] | None:
    if command is None or not kwargs.get("verbosity", 1):
        return None

    def show(conflict: Conflict) -> None:
        command.stderr.write(f"{conflict.line()}. Waiting …", command.style.WARNING)
        command.stderr.flush()

    return show


def decorate(options: Options, given: object) -> Any:
    """``given``, decorated.

    Raises:
        TypeError, ValueError: it cannot be, or not with these options.
    """
    target = Target("locked", given)
    kind = target.kind
    if options.on_conflict is retry_task and kind in (COMMAND, VIEWS, API_VIEWS, DJANGO_TASK):
        raise TypeError(f"{RETRY_ONLY_CELERY}, not in {given!r}")
    if kind in (VIEWS, API_VIEWS):
        options.refuse("a view", *EXIT_CODES, "default")
        if options.on_lost == "terminate":
            raise TypeError(f'on_lost="terminate" means nothing for a view: {ONLY_COMMANDS}')
    elif kind == COMMAND:
        options.refuse("a command", "status_code", "retry_after", "default")
    elif kind in (CELERY_TASK, DJANGO_TASK):
        options.refuse("a task", *EXIT_CODES, "status_code")
    else:
        target.check_named(options.key)

    def make(function: Any, dotted: str) -> Any:
        return LockedFunction(options, function, dotted, is_handler=kind == API_VIEWS).wrapper()

    return target.wrap(make)
