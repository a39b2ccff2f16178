"""An exception from a signal handler at each point at which one can come."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

from django_redis_lock.locking.lock import ThreadWaiter
from django_redis_lock.locking.waiting import POPPING
from tests.lanes import some
from tests.support.background import Background

#: The code that is interrupted: ours, and what it calls.
MODULES = ("django_redis_lock.", "redis.", "threading")


class Interrupt(BaseException):
    """From a signal handler, as KeyboardInterrupt."""


class TimeLimit(Exception):
    """From a signal handler, as SoftTimeLimitExceeded of Celery."""


class TooLate(TimeoutError):
    """From a signal handler, of the kind that redis-py takes for an error of the connection."""


#: Flags of the code of generators and coroutines.
GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


#: What sends or reads a blocking pop; redis-py's parsers read where they are to see what has come.
IN_A_POP = ("begin_pop", "pop_ended", "reply")

#: How often a point is tried again that each way passes and an interrupt has not reached.
TRIES = 5

#: What was called or is about to run, and where: the frames of MODULES, the innermost first.
Place = tuple[Any, ...]


class Points:
    """Notes the points at which this thread can be interrupted, or interrupts it at one.

    Args:
        at: the point; None: note them all in ``places``.
        begin: the function (as ``module.name``) with which this begins; left out, at once.
        modules: what the names of those begin with whose points count.
        error: what the signal handler raises.
        slowly: look at all points, as if they were to be noted: the replies of servers then come no
            later than they did.
        function, meanwhile: what is called before that function does anything.
    """

    def __init__(
        self,
        at: Place | None = None,
        begin: str = "",
        function: str = "",
        meanwhile: Callable[[], Any] | None = None,
        modules: tuple[str, ...] = MODULES,
        error: type[BaseException] = Interrupt,
        slowly: bool = False,
    ) -> None:
        self.places: dict[Place, None] = {}
        self.where = ""
        #: Whether it was at the entry of ``__exit__``: what was taken is given back when the handle
        #: is collected, and not before.
        self.at_the_end = False
        #: Whether it was between sending a blocking pop and having its answer at hand.
        self.in_a_pop = False
        self._at = at
        #: The kind of that point, and the code it is in: nothing else need be traced then.
        self._event, self._code = (at[0], at[1][0]) if at else (None, None)
        self._all = slowly or at is None
        self._blocks: list[tuple[FrameType, int]] = []
        #: The frame of the function that was entered last, until its first line.
        self._begun: FrameType | None = None
        self._begin = begin
        self.function = function
        self.meanwhile = meanwhile
        self._modules = modules
        self._error = error
        self._late: Background | None = None

    def _traced(self, frame: FrameType, event: str, arg: Any) -> Any:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(self._modules):
            return None
        if event == "call":
            function = f"{module.rpartition('.')[2]}.{frame.f_code.co_name}"
            if function == self._begin:
                self._begin = ""
            if function == self.function and self.meanwhile:
                meanwhile, self.meanwhile = self.meanwhile, None
                profiling = sys.getprofile()
                sys.setprofile(None)
                meanwhile()
                sys.setprofile(profiling)
            # What is raised where a generator goes on is raised within it, at one of its lines.
            if not frame.f_code.co_flags & GENERATOR:
                self._begun = frame
                self._pass(frame, event)
        elif event == "line" and not self._at_a_block(frame) and not self._is_first(frame):
            self._pass(frame, event)
        return self._traced if self._is_sought("line", frame.f_code) else None

    def _is_first(self, frame: FrameType) -> bool:
        """Whether nothing has been done since the entry of this function, which is a point, too."""
        begun, self._begun = self._begun, None
        return begun is frame

    def _is_sought(self, event: str, code: CodeType | None = None) -> bool:
        """Whether such points matter, in ``code`` or anywhere."""
        return self._all or (self._event == event and code in (None, self._code))

    def _profiled(self, frame: FrameType, event: str, arg: Any) -> None:
        module = str(frame.f_globals.get("__name__", ""))
        if event == "c_return" and module.startswith(self._modules):
            self._pass(frame, event)

    def _at_a_block(self, frame: FrameType) -> bool:
        """Whether no signal handler can run here: nothing is done at a ``try``, nothing more at the
        return of a constant, and the line of a ``with`` comes up again at the end of its block,
        which is left in the same step."""
        line = _line(frame.f_code.co_filename, frame.f_lineno)
        if not line.startswith("with "):
            return line.startswith(("try:", "return True"))
        entered = (frame, frame.f_lineno)
        if entered in self._blocks:
            self._blocks.remove(entered)
            return True
        self._blocks.append(entered)
        return False

    def _pass(self, frame: FrameType, event: str) -> None:
        if self._begin:
            return
        if self._at is None:
            place = (event, *_stack(frame))
            # Python passes over what is raised in a destructor.
            if not any(code.co_name == "__del__" for code, _ in place[1:]):
                self.places[place] = None
        elif self._at[1] == (frame.f_code, frame.f_lineno) and (
            self._at == (event, *_stack(frame))
        ):
            self._interrupt(frame, event)

    def _interrupt(self, frame: FrameType, event: str) -> None:
        self.where = f"{event} {frame.f_code.co_filename}:{frame.f_lineno}"
        self.at_the_end = event == "call" and frame.f_code.co_name == "__exit__"
        self.in_a_pop = _in_a_pop(frame)
        sys.setprofile(None)
        sys.settrace(None)
        self._blocks.clear()  # What their frames refer to must go with them.
        self._begun = None
        if self.meanwhile and issubclass(self._error, Exception):
            # What guards listeners may have passed over it: then the wait must end all the same.
            self._late, self.meanwhile = Background(self.meanwhile), None
        raise self._error

    @contextmanager
    def watched(self) -> Iterator[None]:
        tracing, profiling = sys.gettrace(), sys.getprofile()
        try:
            sys.settrace(self._traced)
            if self._is_sought("c_return"):
                sys.setprofile(self._profiled)
            yield
        finally:
            sys.setprofile(profiling)
            sys.settrace(tracing)
            self._begun = None
            if self._late:
                self._late.result()


@cache
def _line(file: str, number: int) -> str:
    return linecache.getline(file, number).lstrip()


def _stack(frame: FrameType | None) -> Iterator[tuple[Any, int]]:
    walked = (*MODULES, "contextlib")
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(walked):
        yield frame.f_code, frame.f_lineno
        frame = frame.f_back


def _in_a_pop(frame: FrameType | None) -> bool:
    """While it is sent or read. Elsewhere the keeper sees to it."""
    inside = False
    while frame is not None:
        inside = inside or frame.f_code.co_name in IN_A_POP
        if frame.f_code is ThreadWaiter.wait.__code__:
            if not inside:
                return False
            waiter = frame.f_locals["self"]
            return waiter._reply is POPPING
        frame = frame.f_back
    return False


def each_point(attempt: Callable[[Points], None], **options: Any) -> None:
    """``attempt`` with an interrupt at each of its points in turn; without ``--all``, at each
    twentieth. Each in a thread of its own: Python may go on taking the interrupted thread for one
    that handles an exception."""
    # At first without one, so that connections are there, and nothing is done only once.
    Background(lambda: attempt(Points(**options))).result()

    def way() -> dict[Place, None]:
        points = Points(**options)
        Background(partial(attempt, points)).result()
        return points.places

    ways = [way() for _ in range(3)]
    noted = ways[0] | ways[1] | ways[2]
    chosen = some(noted, each=20)
    reached = set()

    def reach(place: Place, slowly: bool = False) -> None:
        points = Points(place, slowly=slowly, **options)
        Background(partial(attempt, points)).result()
        if points.where:
            reached.add(place)

    for place in chosen:
        reach(place)
    assert len(reached) > 25 * len(chosen) / len(noted)
    # Not each attempt takes the same way: one that had to wait for a server took another, and on a
    # machine that was busy at first, they all did.
    ways += [way() for _ in range(2)]
    usual = set.intersection(*map(set, ways))
    assert len(usual) > 25
    usual &= set(chosen)
    for _ in range(TRIES):
        for place in usual - reached:
            reach(place, slowly=True)
    assert len(reached & usual) > len(usual) * 0.8
