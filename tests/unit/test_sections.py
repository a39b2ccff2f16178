"""Code under its lock, as far as it needs no server: how long to wait for Redis, and what is left
of a block that was interrupted."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import io
import logging
import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from django.core.management.base import BaseCommand, CommandError
from django.views import View

from django_redis_lock import Lock, current_lock, locked
from django_redis_lock.contention import Conflict
from django_redis_lock.contrib.testing import MemoryServer
from django_redis_lock.decorators import (
    RetryUntil,
    on_lost,
    outages_not_logged,
    section,
    transactions,
    views,
    wrapper,
)
from django_redis_lock.decorators.options import Options
from django_redis_lock.decorators.section import Section
from django_redis_lock.decorators.views import complete
from django_redis_lock.exceptions import LockError, LockNotOwnedError
from tests.processes import until
from tests.support.background import Background

OUTAGE = redis.ConnectionError("Redis is down")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """It is always 100."""
    found = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr(section, "time", found)
    return found


# -- waiting for Redis -----------------------------------------------------------------------------


def test_the_pauses_double_up_to_a_second(clock: Any) -> None:
    retry = RetryUntil(math.inf)
    pauses = [retry.pause_after(OUTAGE) for _ in range(1100)]  # 2.0**1024 is too large.
    assert pauses[:7] == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert set(pauses[5:]) == {1.0}


def test_no_pause_is_longer_than_the_time_left(clock: Any) -> None:
    assert RetryUntil(100.03).pause_after(OUTAGE) == pytest.approx(0.03)
    assert RetryUntil(100.5).left() == 0.5


@pytest.mark.parametrize("deadline", [100.0, 99.0, -math.inf])
def test_after_the_deadline_the_error_is_raised(clock: Any, deadline: float) -> None:
    assert RetryUntil(deadline).left() == 0
    with pytest.raises(redis.ConnectionError):
        RetryUntil(deadline).pause_after(OUTAGE)


@pytest.mark.parametrize("error", [redis.ResponseError("no"), redis.AuthenticationError("no")])
def test_what_does_not_pass_is_raised_at_once(clock: Any, error: Exception) -> None:
    with pytest.raises(type(error)):
        RetryUntil(math.inf).pause_after(error)


def test_outages_are_not_logged_but_errors_are(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("django_redis_lock.outage")
    with outages_not_logged():
        logger.warning("hidden")
        logger.error("shown")
    logger.warning("shown afterwards")
    assert caplog.messages == ["shown", "shown afterwards"]


# -- blocks ----------------------------------------------------------------------------------------


class Interrupted(BaseException):
    """As of a signal handler."""


def raising(*args: Any) -> Any:
    raise Interrupted


def without_a_lock(entered: Any, *args: Any) -> bool:
    """Entered, and interrupted right after that."""
    return True


#: What happens to a block, and where.
INTERRUPTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "before it is entered": ("enter", raising),
    "when it has been entered": ("enter", without_a_lock),
    "before it is left": ("leave", raising),
}


@pytest.mark.parametrize("where", INTERRUPTIONS)
def test_an_interrupted_block_leaves_no_section_and_no_lock(
    redis_locks: MemoryServer, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, act = INTERRUPTIONS[where]
    monkeypatch.setattr(Section, method, act)
    block = locked("export")
    with pytest.raises((Interrupted, AttributeError)), block:
        assert method == "leave"
    assert not block._sections
    redis_locks.clock.advance(0)  # The keeper releases it.
    assert not redis_locks.held()


def test_blocks_that_are_left_leave_no_section(redis_locks: MemoryServer) -> None:
    block = locked("export")

    async def main() -> None:
        async with block:
            assert len(block._sections) == 1

    for _ in range(2):
        with block:
            assert len(block._sections) == 1
        assert not block._sections
        asyncio.run(main())
        assert not block._sections


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_loss_before_the_block_has_begun_is_told(asynchronous: bool) -> None:
    told: list[str] = []
    options = Options(on_lost=lambda: told.append("lost"))
    tell = Section(options, "export", asynchronous=asynchronous)._on_lost_callback()
    assert tell is not None
    tell()
    assert told == ["lost"]


# -- what a function returns -----------------------------------------------------------------------


def over() -> threading.Thread:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return thread


def done() -> Future[int]:
    future: Future[int] = Future()
    future.set_result(5)
    return future


async def coroutine_function() -> int:
    return 5


#: What is returned, and what the refusal calls it; empty if the lock's release may follow.
RESULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a value": (lambda: 5, ""),
    "a generator": (lambda: (n for n in (1, 2)), "generator"),
    "a coroutine": (coroutine_function, "coroutine"),
    "a thread to start": (threading.Thread, "Thread"),
    "a thread that runs": (threading.main_thread, "MainThread"),
    "a thread that is over": (over, ""),
    "a future": (Future, "Future"),
    "a future that is done": (done, ""),
    "a context manager": (contextmanager(lambda: iter(())), "GeneratorContextManager"),
}


@pytest.mark.parametrize("what", RESULTS)
def test_what_has_yet_to_run_when_the_lock_is_released_is_refused(what: str) -> None:
    make, kind = RESULTS[what]
    result: Any = make()
    if not kind:
        assert complete(result, "shop.work") is result
        return
    with pytest.raises(TypeError, match=f"shop.work returned a {kind}, which would run after"):
        complete(result, "shop.work")
    if kind == "coroutine":
        assert inspect.getcoroutinestate(result) == inspect.CORO_CLOSED


class Page(View):
    def dispatch(self, request: Any) -> Any: ...

    def get(self, request: Any) -> Any: ...


async def on_loss() -> None: ...


def djangos(request: Any) -> None: ...


djangos.__module__ = "django.utils.decorators"  # What ``method_decorator`` tries out.


@pytest.mark.parametrize(
    ("function", "taken"),
    [(coroutine_function, True), (Page.dispatch, True), (djangos, True), (Page.get, False)],
)
@pytest.mark.parametrize("options", [{"on_lost": on_loss}, {"cancel_on_lost": True}])
def test_what_a_task_may_have(function: Any, taken: bool, options: Any) -> None:
    if taken:
        assert callable(locked("x", **options)(function))
        return
    with pytest.raises(TypeError, match=r"must be (a plain function|False)"):
        locked("x", **options)(function)


class NamedDispatch:
    __name__ = "dispatch"

    def __call__(self) -> None: ...


def by_method_decorator(method: Any) -> Any:
    """As Django's ``method_decorator`` passes it on."""
    return functools.update_wrapper(functools.partial(method), method)


def dispatch(request: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "is_it"),
    [
        (Page.dispatch, True),
        (Page.get, False),
        (dispatch, True),
        (over, False),
        (NamedDispatch(), False),
        (by_method_decorator(Page().dispatch), True),
        (by_method_decorator(Page().get), False),
        (by_method_decorator(SimpleNamespace().__repr__), False),
    ],
)
def test_what_dispatches_the_methods_of_a_view(function: Any, is_it: bool) -> None:
    assert views.is_dispatch(function) is is_it


class Wrapper:
    """What a decorator that is a class makes of a function."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function

    def __call__(self) -> None: ...


def ninja_view() -> Any:
    """As Django Ninja makes the view of a path."""
    path = SimpleNamespace(operations=[SimpleNamespace(view_func=dispatch)])

    def view(request: Any) -> Any:
        return path

    view.__module__ = "ninja.operation"
    return view


#: What a URL leads to, and what it calls in the end.
CALLED: dict[str, tuple[Any, Any]] = {
    "a function": (dispatch, dispatch),
    "a decorated one": (functools.wraps(dispatch)(lambda request: None), dispatch),
    "a method": (Page().get, Page.get),
    "a partial function": (functools.partial(dispatch, 5), dispatch),
    "a path of Django Ninja": (ninja_view(), dispatch),
    "an object": (NamedDispatch(), NamedDispatch.__call__),
    "an object around it": (Wrapper(functools.partial(dispatch)), dispatch),
}


@pytest.mark.parametrize("kind", CALLED)
def test_what_a_url_leads_to(kind: str) -> None:
    callback, function = CALLED[kind]
    called = [*views._unwrapped(callback)]
    assert any(each is function for each in called)
    assert called[0] is callback
    assert len(called) == len({*map(id, called)})
    assert over not in called


@pytest.mark.parametrize("plain", [dispatch, len, Page])
def test_what_calls_nothing_else(plain: Any) -> None:
    assert [*views._unwrapped(plain)] == [plain]


def test_of_a_long_chain_of_decorators_a_hundred_are_looked_at() -> None:
    view: Any = dispatch
    for _ in range(200):
        view = functools.update_wrapper(lambda request: None, view)
    assert len([*views._unwrapped(view)]) == 100


def without_signature(function: Any) -> bool:
    try:
        inspect.signature(function)
    except ValueError:
        return True
    return False


def test_a_function_whose_arguments_are_unknown_may_be_of_any_kind() -> None:
    function = next(filter(without_signature, (min, iter, getattr, dir)))
    assert callable(locked("x", exit_code=3, status_code=423)(function))


# -- commands that have lost their lock ------------------------------------------------------------


def terminator(**attributes: Any) -> Any:
    command = BaseCommand()
    vars(command).update(attributes)
    return on_lost.CommandTerminator(command, 76, "nightly", lambda: "it expired")


def test_only_a_command_from_a_command_line_owns_its_process() -> None:
    assert not terminator().owns_process
    assert not terminator(_called_from_command_line=False).owns_process
    assert terminator(_called_from_command_line=True).owns_process


def test_a_loss_after_the_work_does_not_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the work and the loss exclude each other."""
    monkeypatch.setattr(on_lost, "interrupt_main_thread", lambda: pytest.fail("it is over"))
    ending = terminator()
    over_in_mutex = []

    class Noting:
        def __enter__(self) -> None: ...

        def __exit__(self, *exc_info: object) -> None:
            over_in_mutex.append(ending._over.is_set())

    ending._mutex = Noting()
    assert ending.run(lambda: 5) == 5
    assert over_in_mutex == [True]
    ending()
    assert not ending.lost


def test_an_interruption_at_the_end_ends_it_all_the_same() -> None:
    ending = terminator()

    class Interrupting:
        def __enter__(self) -> None:
            raise Interrupted

        def __exit__(self, *exc_info: object) -> None: ...

    ending._mutex = Interrupting()
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted):
        ending.run(lambda: 5)
    assert ending._over.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("owns", [False, True])
def test_a_command_that_hangs_is_ended_if_the_process_is_its_own(
    owns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(on_lost, "interrupt_main_thread", lambda: done.append("interrupted"))
    monkeypatch.setattr(on_lost.os, "_exit", done.append)
    monkeypatch.setattr(
        "django_redis_lock.contrib.process_tree.signal_descendants", lambda *of: done.append(of[1])
    )
    ending = terminator(_called_from_command_line=owns)
    ending.cleanup_seconds = 0.0
    ending()
    assert ending.lost
    assert done == ["interrupted", *([signal.SIGKILL, 76] if owns else [])]
    words = "its process is ended now" if owns else "it continues without the lock"
    assert words in caplog.text


def test_a_command_that_ends_in_time_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    ending = terminator(_called_from_command_line=True)
    losing = threading.Thread(target=ending)

    def work() -> None:
        losing.start()
        threading.Event().wait(60)

    with pytest.raises(CommandError, match=r"nightly was lost while this ran \(it exp") as ended:
        ending.run(work)
    assert ended.value.returncode == 76
    losing.join()
    assert "has not ended" not in caplog.text


@pytest.fixture
def handled(request: pytest.FixtureRequest) -> Iterator[Any]:
    """What handles SIGTERM before a command begins."""
    before = signal.signal(signal.SIGTERM, request.param)
    yield request.param
    signal.signal(signal.SIGTERM, before)


def own_handler(number: int, frame: Any) -> None:
    raise Interrupted


def guarded(work: Callable[[], Any]) -> Any:
    with on_lost.release_on_sigterm():
        return work()


def terminate() -> None:
    """As SIGTERM does, but for a process that does not handle it."""
    handler = signal.getsignal(signal.SIGTERM)
    assert handler != signal.SIG_DFL
    if callable(handler):
        handler(signal.SIGTERM, None)


#: What handles SIGTERM, what a command's SIGTERM then raises, and if its loss would end it.
HANDLERS: list[tuple[Any, type[BaseException] | None, type[BaseException] | None]] = [
    (signal.SIG_DFL, SystemExit, SystemExit),
    (signal.SIG_IGN, None, None),
    (own_handler, Interrupted, Interrupted),
]


@pytest.mark.parametrize(("handled", "alone", "armed"), HANDLERS, indirect=["handled"])
def test_what_sigterm_does_to_a_command(handled: Any, alone: Any, armed: Any) -> None:
    ways = [(guarded, alone), (terminator().run, armed)]
    for run, raised in ways:
        if raised is None:
            run(terminate)
        else:
            with pytest.raises(raised) as ended:
                run(terminate)
            assert getattr(ended.value, "code", 143) == 143
        assert signal.getsignal(signal.SIGTERM) is handled


def test_elsewhere_sigterm_is_not_handled() -> None:
    """Only the main thread may set what handles it."""
    assert Background(guarded, int).result() == 0
    with pytest.raises(RuntimeError, match="only in the main thread"):
        Background(terminator().run, int).result()


def test_a_command_that_loses_its_lock_is_told(
    redis_locks: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def noting(ending: Any) -> None:
        told.append(ending)

    monkeypatch.setattr(on_lost.CommandTerminator, "__call__", noting)

    @locked("export", on_lost="terminate")
    def handle(command: Any) -> int:
        lock: Any = current_lock()
        lock.local.hold.lose("test")
        return 5

    assert handle(BaseCommand()) == 5
    until(lambda: told)  # In a thread of its own.
    assert [(ending.name, ending.reason()) for ending in told] == [("export", "test")]


# -- how a section waits ---------------------------------------------------------------------------


def test_who_calls_is_told_by_thread_and_task() -> None:
    async def main() -> tuple[int, int]:
        assert section.caller()[1] == id(asyncio.current_task())
        return section.caller()

    assert section.caller() == (threading.get_ident(), 0)
    assert asyncio.run(main())[0] == threading.get_ident()


SHORT = 1 / 64  # Of a second; exact next to 100.
#: The options, whether the command prints that it waits, and what is called.
WAITS: list[tuple[dict[str, Any], bool, list[Any]]] = [
    ({}, False, [("acquire", {"blocking_timeout": None})]),
    ({}, True, [("acquire", {"blocking_timeout": None})]),
    (
        {"blocking": True, "blocking_timeout": SHORT},
        False,
        [("acquire", {"blocking_timeout": SHORT})],
    ),
    (
        {"blocking": True, "blocking_timeout": SHORT},
        True,
        [
            ("acquire", {"blocking": False}),
            ("held", {}),
            ("acquire", {"blocking_timeout": SHORT}),
        ],
    ),
]


@pytest.mark.parametrize(("options", "prints", "calls"), WAITS)
def test_how_a_section_waits(
    redis_locks: MemoryServer,
    clock: Any,
    options: dict[str, Any],
    prints: bool,
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[Any] = []
    call = Section._call

    def noting(entered: Section, method: str, **options: Any) -> Any:
        called.append((method, dict(options)))
        return call(entered, method, **options)

    monkeypatch.setattr(Section, "_call", noting)
    printed: list[Any] = []
    with locked("export"):
        called.clear()
        enter = Section(Options(**options), "export").enter
        assert Background(enter, printed.append if prints else None).result() is False
        assert called == calls
    assert [conflict.name for conflict in printed] == ["export"] * (len(calls) > 1)


@pytest.mark.parametrize(("name", "elsewhere"), [("a", False), ("a", True), ("b", False)])
def test_who_would_wait_for_itself_is_told(
    redis_locks: MemoryServer, name: str, elsewhere: bool
) -> None:
    """Not a thread that waits for another, from which it has its context, and not for other
    names."""
    with locked("a"):
        carried = contextvars.copy_context()
        waiting = Section(Options(blocking=True, blocking_timeout=SHORT), name)
        if elsewhere:
            assert Background(carried.run, waiting.enter).result() is False
        elif name == "a":
            with pytest.raises(LockError, match="would wait for itself"):
                waiting.enter()
        else:
            assert waiting.enter()
            waiting.leave()


@pytest.mark.parametrize("waits_on", [True, False])
def test_a_command_that_does_not_wait_for_redis_logs_no_outage(
    redis_locks: MemoryServer, waits_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It prints that."""
    hidden: list[str] = []

    @contextmanager
    def noting() -> Iterator[None]:
        hidden.append("")
        yield

    monkeypatch.setattr(wrapper, "outages_not_logged", noting)

    @locked("export", blocking=True, wait_for_redis=waits_on)
    def handle(command: Any) -> int:
        return 5

    assert handle(BaseCommand()) == 5
    assert bool(hidden) is not waits_on


@pytest.mark.parametrize(
    ("release", "taken_up", "waits"),
    [("transaction", False, True), ("now", False, False), ("now", True, True)],
)
def test_which_locks_are_held_until_the_transaction_ends(
    redis_locks: MemoryServer,
    release: str,
    taken_up: bool,
    waits: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also one that another call of the transaction has left to its end."""
    asked: list[Any] = []

    def wait_for(*args: Any) -> bool:
        asked.append(args)
        return False

    monkeypatch.setattr(section.transactions, "wait_for", wait_for)
    entered = Section(Options(release=release), "export")
    assert entered.enter()
    entered._taken_up = taken_up
    entered.leave()
    assert bool(asked) is waits
    assert not redis_locks.held()


def deferred(release: Callable[[], Any], watches: int) -> tuple[Any, list[Any]]:
    """A lock that is released when so many transactions have ended, and what sees their ends."""
    found: list[Any] = [SimpleNamespace(pending=[]) for _ in range(watches)]
    lock: Any = SimpleNamespace(lost=False)
    return transactions.DeferredUnlock(lock, ("default", "export"), release, found), found


@pytest.mark.parametrize("fails", [False, True])
def test_a_lock_is_released_when_the_last_transaction_ends(
    fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    released: list[int] = []

    def release() -> None:
        released.append(1)
        if fails:
            raise ZeroDivisionError

    unlock, (first, second) = deferred(release, 2)
    assert first.pending == second.pending == [unlock]
    unlock.ended(first)
    assert transactions.holds_part_of(unlock.key)
    assert not released
    unlock.ended(second)
    assert released
    assert not transactions.holds_part_of(unlock.key)
    assert caplog.messages == ["The lock export was not released"] * fails


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (("default", "a"), ("default", "a"), True),
        (("default", "a"), ("other", "a"), False),
        (("default", "a"), ("default", "ab"), False),
        (("default", ("a", "b")), ("default", "b"), True),
        (("default", ("a", "b")), ("default", ("c", "b")), True),
        (("default", ("a", "b")), ("default", ("c", "d")), False),
    ],
)
def test_which_locks_have_a_name_in_common(one: Any, other: Any, overlap: bool) -> None:
    assert transactions.overlap(one, other) is transactions.overlap(other, one) is overlap


def test_the_lock_of_a_transaction_that_is_used_again_is_not_released_by_its_first_use() -> None:
    unlock, watches = deferred(int, 2)
    assert transactions.take_up(unlock.key) is unlock.lock
    assert [each.pending for each in watches] == [[], []]
    assert transactions.take_up(unlock.key) is None


def test_a_lock_that_a_section_has_entered_knows_it(
    redis_locks: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is then released with the code, also at the end of the thread."""
    told: list[Any] = []
    monkeypatch.setattr(Lock, "_entered", lambda lock: told.append(lock))  # noqa: PLW0108  # as a method
    entered = Section(Options(), "export")
    assert entered.enter()
    assert told == [entered.lock]
    entered.leave()
    refused = Section(Options(), "export")
    with locked("export"):
        told.clear()
        assert not refused.enter()
    assert not told


@pytest.mark.parametrize("error", [OUTAGE, LockNotOwnedError("it is another's")])
def test_a_lock_that_cannot_be_released_is_left_to_the_keeper(
    redis_locks: MemoryServer, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it has ended."""

    def failing(lock: Any) -> None:
        raise error

    left: list[Any] = []
    leave = Lock._leave_to_keeper

    def noting(lock: Any, *before: Any) -> None:
        left.append(lock)
        leave(lock, *before)

    entered = Section(Options(), "export")
    assert entered.enter()
    monkeypatch.setattr(Lock, "release", failing)
    monkeypatch.setattr(Lock, "_leave_to_keeper", noting)
    entered.leave()
    monkeypatch.undo()
    assert left == [entered.lock] * (error is OUTAGE)
    redis_locks.clock.advance(0)
    assert bool(redis_locks.held()) is not bool(left)
    entered.lock.reset()


class Stream(io.StringIO):
    flushed = False

    def flush(self) -> None:
        self.flushed = bool(self.getvalue())


@pytest.mark.parametrize(("options", "prints"), [({}, True), ({"verbosity": 0}, False)])
def test_a_command_that_waits_says_so_at_once(
    redis_locks: MemoryServer, options: Any, prints: bool
) -> None:
    command = BaseCommand(stderr=Stream())
    stream: Any = command.stderr._out
    show = wrapper._print_waiting(command, options)
    assert (show is not None) is prints
    if show is not None:
        with locked("export"):
            show(Conflict.of("export", None, "default", None, None))
        assert "Waiting" in stream.getvalue()
        assert stream.flushed


@pytest.mark.parametrize("known", [True, False])
def test_a_conflict_of_several_names_has_the_first_if_it_is_unknown_which_is_held(
    redis_locks: MemoryServer, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Section(Options(), ("a", "b"))
    with locked("b"):
        assert waiting.enter() is False
        if not known:
            monkeypatch.setattr(type(waiting.lock), "held", raising_outage)
        conflict = waiting.conflict()
    assert (conflict.name, conflict.first_name) == (("b", "") if known else ("a, b", "a"))


@pytest.mark.parametrize("given", [None, 5])
def test_how_long_a_lock_is_held_matters_where_no_retry_after_is_given(
    redis_locks: MemoryServer, given: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    refused = Section(Options(retry_after=given), "export")
    with locked("export"):  # The first event of a process sets it, too.
        monkeypatch.setattr(section.events, "usual_hold", asked.append)
        assert not refused.enter()
        assert refused.conflict().retry_after == (given or 2)
    assert asked == ([] if given else [refused.lock.subject])


def raising_outage(*args: Any) -> Any:
    raise OUTAGE
