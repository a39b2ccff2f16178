"""What a lock for several names is made of: a lock for each name, whose steps run side by side."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any

from ..keeper import DeferredRelease, keeper
from ..protocol import Call, for_each, new_token, release_call
from ..transport import Answer, Server, Steps
from .hold import Hold
from .operations import LockOperations


class MultiHold:
    """The holds of all names, as a lock object knows one.

    Args:
        on_lost: what to do, once, when a name is lost.
    """

    cancellation: Any = None
    ended = False

    def __init__(
        self,
        holds: Sequence[Any],
        server: Server,
        grant_timeout: float,
        on_lost: Callable[[], Any] | None,
    ) -> None:
        self._holds = holds
        self._server = server
        self._grant_timeout = grant_timeout
        self._on_lost = on_lost
        self._handled = False
        for hold in holds:
            hold.on_lost = self._lose
        if self.lost:
            self._lose()

    @property
    def fence(self) -> int:
        return max(int(hold.fence) for hold in self._holds)

    @property
    def lost(self) -> bool:
        return any(hold.lost for hold in self._holds)

    @property
    def is_valid(self) -> bool:
        return not self.ended and all(hold.is_valid for hold in self._holds)

    @property
    def from_parent_process(self) -> bool:
        return bool(self._holds[0].from_parent_process)

    @property
    def by_this_thread(self) -> bool:
        return bool(self._holds[0].by_this_thread)

    def end(self) -> None:
        self.ended = True

    def _lose(self) -> None:
        """A name is lost: so are the others, which are released. Called by the keeper, for each."""
        if self._handled or self.ended:
            return
        self._handled = True
        for hold in self._holds:
            # One without a fence was taken without Redis.
            if hold.lose("another name that was held with it was lost") and hold.fence:
                of_it = (hold.keys, hold.token, new_token(), self._grant_timeout)
                release = release_call(*of_it, attempt=hold.attempt)
                keeper().add(DeferredRelease(self._server, release, hold.lifetime))
        for tell in (self._on_lost, self.cancellation and self.cancellation.request):
            if tell is not None:
                tell()


class Member(LockOperations):
    """The lock for one of the names. What its steps ask of Redis they leave to the whole."""

    def _run(self, call: Call) -> Any:
        return call

    def _release_call(self, token: bytes) -> Call:
        hold: Hold | None = self.local.hold
        if hold is not None and hold.on_lost is None:  # The whole was not acquired.
            return release_call(self.keys, token, new_token(), self.grant_timeout)
        return super()._release_call(token)


@cache
def member_class(lock_class: Any) -> Any:
    """The class of the locks for single names."""
    return type(f"Member{lock_class.__name__}", (Member, lock_class), {})


def together(
    run: Callable[[Call], Any], in_one_place: bool, all_steps: Sequence[Steps[Any]]
) -> Steps[list[Any]]:
    """Take these steps of members side by side, so that what they ask of Redis at the same time
    is one request; what they return.

    Args:
        run: sends a request.
        in_one_place: whether the keys of all members are on one server, and in one slot.

    Raises:
        Exception: what the first of those has raised that failed, when all have ended.
    """
    outcomes: list[Any] = [None] * len(all_steps)
    errors: list[Exception] = []
    asked: dict[int, Call] = {}

    def go_on(place: int, answer: Any) -> Generator[Any, Any, None]:
        """Until the next request, or the end."""
        steps = all_steps[place]
        try:
            failed = isinstance(answer, Exception)
            step = steps.throw(answer) if failed else steps.send(answer)
            while not isinstance(step, Call):
                try:
                    came = yield step
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(came)
            asked[place] = step
        except StopIteration as end:
            outcomes[place] = end.value
        except Exception as error:
            errors.append(error)

    for place in range(len(all_steps)):
        yield from go_on(place, None)
    while asked:
        answers = yield from _answers(run, in_one_place, list(asked.values()))
        places = list(asked)
        asked.clear()
        for place, answer in zip(places, answers, strict=True):
            yield from go_on(place, answer)
    if errors:
        raise errors[0]
    return outcomes


def _answers(run: Callable[[Call], Any], in_one_place: bool, calls: list[Call]) -> Steps[list[Any]]:
    """The answer to each of these calls of one script, or its error."""
    if in_one_place and len(calls) > 1:
        try:
            answer = yield run(for_each(*calls))
        except Exception as error:
            return [error] * len(calls)
        return [Answer(value, answer.sent_twice) for value in answer.value]
    answers: list[Any] = []
    for call in calls:
        try:
            answers.append((yield run(call)))
        except Exception as error:
            answers.append(error)
    return answers
