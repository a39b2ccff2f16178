"""A lock for several names: its locks for each name, whose steps run side by side; and scripts for
several locks, made of those for one. Their keys must be in one slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import ref

from ...locking import BaseLock, Hold
from ...protocol import (
    AcquireRequest,
    Call,
    Refused,
    Reply,
    Script,
    Taken,
    new_token,
    parse_acquire,
    printable,
    release_call,
)
from ...steps import Step, Steps
from ...threads import Mutex
from ...transport import Answer, Server

R = TypeVar("R")


class MultiHold:
    """The holds of all names, as a lock object knows one. ``on_lost`` is called once."""

    ended = shared = False
    also_on_lost: Mapping[ref[Any], Callable[[], object]] = {}

    def __init__(
        self,
        holds: Sequence[Hold],
        server: Server,
        grant_timeout: float,
        on_lost: Callable[[], object] | None,
    ) -> None:
        self._holds = holds
        self.keys = holds[0].keys
        self._server = server
        self._grant_timeout = grant_timeout
        self._on_lost = on_lost
        self._handled = False
        self._mutex = Mutex()
        for hold in holds:
            hold.on_lost = self._lose
        if self.lost:
            self._lose()

    @property
    def reason(self) -> str:
        """Why the first of them was lost."""
        return next((hold.reason for hold in self._holds if hold.lost and hold.reason), "")

    @property
    def fence(self) -> int:
        return max(int(hold.fence) for hold in self._holds)

    @property
    def deadline(self) -> float:
        return min(float(hold.deadline) for hold in self._holds)

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

    def release_late(self) -> None:
        """The hold of each name does."""

    def _lose(self) -> None:
        """A name is lost: so are the others, which are released."""
        with self._mutex:  # The caller may find out at the same time as the keeper.
            if self._handled or self.ended:
                return
            self._handled = True
        lost = next((hold for hold in self._holds if hold.reason), self._holds[0])
        reason = f"it was held with {printable(lost.keys.name)}, which was lost: {lost.reason}"
        for hold in self._holds:
            # One without a fence was taken without Redis.
            if hold.lose(reason) and hold.fence:
                hold.release_later(self._server, self._grant_timeout)
        others = (tell for key, tell in self.also_on_lost.items() if key())
        for tell in (self._on_lost, *others):
            if tell is not None:
                tell()


class Member(BaseLock):
    """The lock for one of the names. The whole sends what its steps ask of Redis."""

    def _run(self, call: Call, until: float | None = None) -> Any:
        return call if until is None else super()._run(call, until)

    @property
    def _shown(self) -> str:
        return str(super()._shown)

    def _release_call(self, token: bytes, hold: Hold | None) -> Call:
        if hold is not None and hold.on_lost is None:  # The whole was not acquired.
            return release_call(self.keys, token, new_token(), self.grant_timeout)
        return super()._release_call(token, hold)


class Asked(NamedTuple):
    """What one request to Redis asks for one of the names."""

    member: Member
    request: AcquireRequest


@cache
def member_class(lock_class: Any) -> type[Member]:
    return type(f"Member{lock_class.__name__}", (Member, lock_class), {})


def together(
    run: Callable[[Call], Step[Answer]], in_one_place: bool, all_steps: Sequence[Steps[R]]
) -> Steps[list[R]]:
    """Take these steps of members side by side, so that what they ask of Redis at the same time
    is one request if their keys are ``in_one_place``; what they return. When all have ended, the
    error of the first of them that failed is raised."""
    outcomes: dict[int, R] = {}
    errors: dict[int, Exception] = {}
    asked: dict[int, Call] = {}

    def go_on(place: int, answer: Answer | Exception | None) -> Steps[None]:
        steps = all_steps[place]
        try:
            step = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
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
            errors[place] = error

    for place in range(len(all_steps)):
        yield from go_on(place, None)
    while asked:
        answers = yield from _answers(run, in_one_place, list(asked.values()))
        places = list(asked)
        asked.clear()
        for place, answer in zip(places, answers, strict=True):
            yield from go_on(place, answer)
    if errors:
        raise errors[min(errors)]
    return [outcome for _, outcome in sorted(outcomes.items())]


def _answers(
    run: Callable[[Call], Step[Answer]], in_one_place: bool, calls: list[Call]
) -> Steps[list[Answer | Exception]]:
    """The answer to each of these calls of one script, or the error."""
    if in_one_place and len(calls) > 1:
        try:
            answer = yield run(for_each(*calls))
        except Exception as error:
            return [error] * len(calls)
        return [Answer(value, answer.sent_twice) for value in answer.value]
    answers: list[Answer | Exception] = []
    for call in calls:
        try:
            answers.append((yield run(call)))
        except Exception as error:
            answers.append(error)
    return answers


# -- scripts for several locks ---------------------------------------------------------------------

#: The shared functions work on the lock whose keys KEYS has.
_VARIABLES = "local ALL_KEYS, ALL_ARGS, KEYS, ARGV = KEYS, ARGV, KEYS, ARGV\n"


@cache
def _for_each(one: Script) -> Script:
    body = f"""
local function run()
{one.body}
end
local locks, replies = tonumber(ALL_ARGS[1]), {{}}
local keys, args = #ALL_KEYS / locks, (#ALL_ARGS - 1) / locks
for i = 0, locks - 1 do
  KEYS = {{unpack(ALL_KEYS, i * keys + 1, i * keys + keys)}}
  ARGV = {{unpack(ALL_ARGS, i * args + 2, i * args + args + 1)}}
  replies[i + 1] = run() or false
end
return replies
"""
    return Script(body, before=_VARIABLES, urgent=one.urgent)


def for_each(*calls: Call) -> Call:
    """These calls of one script, with as many keys and arguments each, as one."""
    keys, args = (
        tuple(chain(*parts)) for parts in zip(*(call[1:3] for call in calls), strict=True)
    )
    return Call(_for_each(calls[0].script), keys, (len(calls), *args))


#: Take all of these locks if each of them is free. Else register as a waiter for the first that is
#: taken, and take none; or, if requested, those before it.
#:
#: KEYS  keys of the first lock, of the second, ...
#: ARGV  what ACQUIRE has, the same for each; how many locks; '1' to take those before the first
#:       that is taken, else ''
#: returns {which is the first that is taken (0 if none is), the reply of ACQUIRE for each lock that
#:         was taken, and for that one}
#: atomic because none may be taken while another is not to be had.
ACQUIRE_ALL = Script(
    """
local locks, taken = tonumber(ARGV[6]), 0
local keys = #ALL_KEYS / locks
local function turn_to(i) KEYS = {unpack(ALL_KEYS, (i - 1) * keys + 1, i * keys)} end
for i = 1, locks do
  if taken == 0 then
    turn_to(i)
    local holder = redis.call('GET', KEYS[1])
    if holder and holder ~= ARGV[1] and not untaken(holder) then taken = i end
  end
end
local replies, before = {taken}, locks
if taken > 0 then before = taken - 1 end
if taken > 0 and ARGV[7] == '' then before = 0 end
for i = 1, before do
  turn_to(i)
  local fence, gone = try(ARGV[1], ARGV[2], ARGV[3])
  replies[i + 1] = {1, fence, now(), gone}
end
if taken > 0 then
  turn_to(taken)
  if ARGV[4] ~= '' then register(ARGV[4], tonumber(ARGV[5])) end
  replies[before + 2] = {0, redis.call('PTTL', KEYS[1]), now()}
end
return replies
""",
    before=_VARIABLES,
)


class AllReply(NamedTuple):
    """The reply to ACQUIRE_ALL.

    Attributes:
        taken: the locks that the caller has, in order, the first of them before all others.
        gate: the number of the first that another holds, from 0; None if there is none.
        refused: the reply about that one; None if there was no reply.
    """

    taken: Sequence[Taken]
    gate: int | None
    refused: Refused | None
    sent_at: float


def parse_acquire_all(reply: Reply, sent_at: float) -> AllReply:
    first, *replies = reply
    parsed = [parse_acquire(each, sent_at) for each in replies]
    taken = [each for each in parsed if isinstance(each, Taken)]
    refused = next((each for each in parsed if isinstance(each, Refused)), None)
    return AllReply(taken, first - 1 if first else None, refused, sent_at)
