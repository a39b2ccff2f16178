"""What threads need: a mutex, cleanup in forked children, and threads for work that must not delay
its caller, above all the keeper.

A fork copies only the thread that forks: a mutex that another thread holds at that moment would
stay locked in the child forever, and the child must not use the records of its parent's threads
and connections.

A log handler or a listener may block (a mail server, a full pipe), and whatever runs in the
keeper's thread delays the renewal of every lock of the process. So users' code never runs there:
the keeper's log records and events go into a queue, and another thread delivers them in order.
"""

from __future__ import annotations

import _thread
import contextvars
import logging
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from asgiref import sync

from .clock import time as clock

# -- signal handlers -------------------------------------------------------------------------------


if TYPE_CHECKING or sys.version_info < (3, 14):
    Mutex = threading.RLock
else:

    class Mutex(type(threading.RLock())):
        """For ``with``: in Python 3.14 an exception from a signal handler may come after an
        ``RLock`` was locked by ``__enter__`` and before its block begins; later, one from a
        profiler."""

        def __enter__(self) -> bool:
            try:
                return self.acquire()
            except BaseException:
                try:
                    self.release()
                except RuntimeError:
                    pass  # It was still waiting for the mutex.
                raise


# -- forks ---------------------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[[], object])
M = TypeVar("M")
T = TypeVar("T")

_mutexes: WeakSet[Any] = WeakSet()
_resets: list[Callable[[], object]] = []


def free_after_fork(mutex: M) -> M:
    """Release ``mutex`` (a ``Lock``, ``RLock`` or ``Condition`` of ``threading``) in each forked
    child; returns it."""
    _mutexes.add(mutex)
    return mutex


def after_fork(reset: F) -> F:
    """Call ``reset`` in each forked child, after all mutexes are released; returns it."""
    _resets.append(reset)
    return reset


class Process:
    """A process of ours, and its number."""

    def __init__(self, pid: int) -> None:
        self.pid = pid


def _in_child() -> None:
    global _process
    for mutex in tuple(_mutexes):
        mutex._at_fork_reinit()  # As in the standard library.
    for reset in _resets:
        reset()
    _process = Process(os.getpid())


#: Held while the process forks, and by ``no_fork``.
_forking = free_after_fork(Mutex())
#: How long a fork waits for an import in another thread; and that for a fork, which takes a moment.
#: They only end a deadlock: of a module that forks, or of what others do before a fork.
IMPORT_SECONDS, FORK_SECONDS = 30.0, 2.0


@contextmanager
def no_fork() -> Iterator[None]:
    """Let no other thread fork while this one imports: what one thread has begun to import, the
    child of another can never import."""
    held = _forking.acquire(timeout=FORK_SECONDS)
    try:
        yield
    finally:
        if held:
            _forking.release()


def _before_fork() -> None:
    _forking.acquire(timeout=IMPORT_SECONDS)


def _in_parent() -> None:
    with suppress(RuntimeError):  # The wait has timed out.
        _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)

#: uWSGI forks its workers without Python's hooks, unless an option says otherwise.
FORKS_UNNOTICED = "uwsgi" in sys.modules
_process = Process(os.getpid())
_noticing = Mutex()


def notice_fork() -> None:
    """To be called if FORKS_UNNOTICED, before anything that a parent process may have made is
    used."""
    if os.getpid() != _process.pid:
        with _noticing:
            if os.getpid() != _process.pid:
                _in_child()


def this_process() -> Process:
    """Another object in each forked child; asking the system for the process's number takes
    longer."""
    if FORKS_UNNOTICED:
        notice_fork()
    return _process


# -- work that must not delay its caller -----------------------------------------------------------

Work = Callable[[], object]


def start(thread: threading.Thread, failed: Callable[[RuntimeError], object]) -> None:
    """Start ``thread``, by way of another one. ``Thread.start`` waits until the thread runs, and an
    exception from a signal handler, which comes in the main thread, breaks that wait: it may turn
    into ``RuntimeError: release unlocked lock``.

    Args:
        failed: called with the error if there are too many threads, or the interpreter ends; in
            any thread.
    """

    def run() -> None:
        try:
            thread.start()
        except RuntimeError as error:
            failed(error)

    try:
        _thread.start_new_thread(run, ())
    except RuntimeError as error:
        failed(error)


class ThreadEvent:
    """``threading.Event`` without a mutex. A signal handler that raises at the wrong moment leaves
    such a mutex taken, and then all who wait for the event, or set it, hang."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: set[threading.Lock] = set()  # Its single operations are atomic.

    def set(self) -> None:
        self._is_set = True
        for waiter in list(self._waiters):
            with suppress(RuntimeError):  # It was woken before.
                waiter.release()

    def wait(self, seconds: float) -> bool:
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.add(waiter)
        try:
            parts = clock.parts(seconds)
            return self._is_set or any(map(partial(waiter.acquire, True), parts))
        finally:
            self._waiters.discard(waiter)


class ThreadPool:
    """So many daemon threads ``name``, which start on demand and end after ``idle_seconds`` without
    work, and a bounded queue of work for them. Work that has not ended when the process ends is
    abandoned. In a forked child the pool is empty."""

    def __init__(self, name: str, threads: int, max_waiting: int, idle_seconds: float) -> None:
        self._name = name
        self._max_threads = threads
        self._max_waiting = max_waiting
        self._idle_seconds = idle_seconds
        self._reset()
        after_fork(self._reset)

    def _reset(self) -> None:
        # ``submit`` enters the mutex and not the condition, because a signal handler may interrupt
        # it at any line; for the same reason the threads do the counting.
        self._mutex = Mutex()
        self._condition = threading.Condition(self._mutex)
        self._waiting: deque[Work] = deque()
        self._threads: set[threading.Thread] = set()
        self._busy = 0

    def submit(self, *work: Work) -> bool:
        """Run each of ``work`` in turn, in one thread, in a copy of the caller's context. False if
        the queue is full, or no thread can be started."""
        context = contextvars.copy_context()

        def run() -> None:
            context.run(_take_over_locals, context)
            for part in work:
                try:
                    context.run(part)
                except BaseException:  # Not even SystemExit may end a thread of the pool.
                    logger.exception("Work in the thread %r failed", self._name)

        with self._mutex:
            if len(self._waiting) >= self._max_waiting:
                return False
            self._waiting.append(run)  # Before a thread is started: ``flush`` must see it.
            self._condition.notify()
            # Without an id it has not begun yet.
            self._threads = {t for t in self._threads if t.ident is None or t.is_alive()}
            idle = len(self._threads) - self._busy
            if len(self._waiting) > idle and len(self._threads) < self._max_threads:
                self._start()
            if not self._threads:
                self._waiting.remove(run)
                return False
        return True

    def has_room(self) -> bool:
        return len(self._waiting) < self._max_waiting

    def flush(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (self._waiting or self._busy) and time.monotonic() < deadline:
            time.sleep(0.002)

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)

        def failed(error: RuntimeError) -> None:
            with self._mutex:  # ``submit`` replaces the set.
                self._threads.discard(thread)
            logger.warning("Could not start the thread %r: %s", self._name, error)

        try:
            start(thread, failed)
        except BaseException:
            self._threads.discard(thread)  # It may not have been started.
            raise

    def _run(self) -> None:
        while (work := self._next()) is not None:
            work()
            with self._mutex:
                self._busy -= 1

    def _next(self) -> Work | None:
        with self._mutex:
            while not self._waiting:
                if not self._condition.wait(self._idle_seconds) and not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return None
            self._busy += 1
            return self._waiting.popleft()


def is_async(function: object) -> bool:
    """Whether a call of ``function``, which may be an object, returns a coroutine."""
    return any(map(sync.iscoroutinefunction, (function, type(function).__call__)))


def check_plain(what: str, function: object) -> None:
    """Raises TypeError if a call of ``function`` returns a coroutine, which nothing awaits."""
    if is_async(function):
        raise TypeError(f"{what} must be a plain function, not the coroutine function {function!r}")


#: What asgiref itself does where it moves a context to another thread.
_move: Callable[[contextvars.Context], Any] = getattr(
    sync, "_restore_context", lambda context: None
)


def in_context(context: contextvars.Context, function: Callable[[], T]) -> T:
    """Call ``function`` in ``context``, a copy of that of another thread."""
    context.run(_take_over_locals, context)
    return context.run(function)


def _take_over_locals(context: contextvars.Context) -> None:
    """Let this thread see what each ``asgiref.local.Local`` has in ``context``. Since asgiref 3.12
    the data bear the id of their thread; before, a copied context shares them with the original."""
    _move(context)
    for variable, value in context.items():
        if variable.name == "asgiref.local" and isinstance(value, dict):
            variable.set(value.copy())
    sync.AsyncToSync.executors.current = None  # No thread waits for this one.


class InCaller:
    """In place of a ``ThreadPool``: does the work before ``submit`` returns, and nothing after it,
    as the caller goes on to use what the thread of a pool would close."""

    def submit(self, work: Work, *afterwards: Work) -> bool:
        work()
        return True

    def has_room(self) -> bool:
        return True


# -- the keeper's notices ------------------------------------------------------------------------

#: More are dropped, and the log says how many.
MAX_WAITING = 10_000

_notices = ThreadPool("django_redis_lock notices", 1, MAX_WAITING, idle_seconds=1.0)
_dropped = 0


class _ThisThread(threading.local):
    #: Set by the keeper in its own thread, in which users' code must not run.
    is_keeper = False


this_thread = _ThisThread()


def run_later(notice: Work) -> None:
    """Run ``notice``, which is users' code, in the thread for notices."""
    global _dropped
    if not _notices.submit(notice, _log_dropped):
        _dropped += 1


def _log_dropped() -> None:
    global _dropped
    if _dropped:
        dropped, _dropped = _dropped, 0
        logger.error("%d notices were dropped: a log handler or listener blocks", dropped)


def flush(seconds: float) -> None:
    _notices.flush(seconds)


def get_logger(name: str) -> logging.Logger:
    """The logger ``name``, for a module that may log in the keeper's thread. If its argument is a
    dict, a record has the items as attributes, too."""
    found = logging.getLogger(name)
    if _not_in_the_keeper not in found.filters:
        found.addFilter(_not_in_the_keeper)
    return found


def _not_in_the_keeper(record: logging.LogRecord) -> bool:
    if isinstance(record.args, dict):
        vars(record).update(record.args)
    if not this_thread.is_keeper:
        return True
    run_later(partial(logging.getLogger(record.name).handle, record))
    return False


#: Seconds between two lines of the log about the same failure.
LOG_PAUSE_SECONDS = 60.0
_noting = free_after_fork(Mutex())


def may_log(about: T, logged_at: MutableMapping[T, float]) -> bool:
    """Whether the last line about the same is long enough ago; one is expected now."""
    with _noting:
        if was_logged(about, logged_at):
            return False
        logged_at[about] = time.monotonic()
        return True


def was_logged(about: T, logged_at: MutableMapping[T, float]) -> bool:
    """Whether the last line about the same is less than ``LOG_PAUSE_SECONDS`` old."""
    return time.monotonic() - logged_at.get(about, -math.inf) < LOG_PAUSE_SECONDS


class Repeated:
    """A warning that may come thousands of times a second: logged once a minute, with the number of
    those left out since."""

    def __init__(self, log: logging.Logger, text: str) -> None:
        self._log, self._text = log, text
        self._logged_at, self._left_out = -math.inf, 0

    def warn(self, *args: object, exc_info: BaseException | None = None) -> None:
        with _noting:
            if time.monotonic() - self._logged_at < LOG_PAUSE_SECONDS:
                self._left_out += 1
                return
            more, self._left_out, self._logged_at = self._left_out, 0, time.monotonic()
        text = f"{self._text} (and {more} more of such warnings before)" if more else self._text
        self._log.warning(text, *args, exc_info=exc_info)


logger = get_logger("django_redis_lock.background")


@after_fork
def _reset() -> None:
    this_thread.is_keeper = False
