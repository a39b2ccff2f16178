"""Several names held as one: all of them or none.

A caller asks for all names in one request. If one of them is taken, it keeps none and waits, in
the queue of that one. Granted it, the caller asks for the rest, and from then on keeps what comes
before the first that is taken, in the order of their keys, while it waits for that one. So no two
wait for each other, and each caller waits in each queue twice at most.

A lock for several names is made of its locks for each, whose steps run side by side. Its scripts
are made of those for one lock; their keys must be in one slot of a cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import ref

from redis.exceptions import RedisError

from ...clock import time
from ...exceptions import LockError
from ...history import note_vanished
from ...locking import AsyncLock, BaseLock, Hold, Known, Lock, release_late
from ...protocol import (
    AcquireRequest,
    Acquisition,
    Call,
    Refused,
    Reply,
    Script,
    Taken,
    named_token,
    new_token,
    parse_acquire,
    printable,
    release_call,
)
from ...protocol.holders import HolderInfo
from ...protocol.keys import slot_of
from ...steps import Step, Steps
from ...threads import Mutex
from ...transport import Answer, NotReady, Server, is_cluster, is_outage, is_refusal, server_of

R = TypeVar("R")

#: The most names of one lock.
MAX_NAMES = 100

#: Options of the whole, which no single name has.
OF_THE_WHOLE = ("blocking", "blocking_timeout", "on_lost", "cancel_on_lost", "id", "reentrant")


def check_names(names: object) -> list[str]:
    """``names``, each once. Raises TypeError or ValueError."""
    if isinstance(names, (str, bytes)) or not isinstance(names, Iterable):
        raise TypeError(f"the names of a lock must be a list of str, not {names!r}")
    found = list(dict.fromkeys(names))
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"each name of a lock must be a str, not {name!r}")
    if not 0 < len(found) <= MAX_NAMES:
        raise ValueError(f"a lock must have 1 to {MAX_NAMES} names, not {len(found)}")
    return found


class SeveralNames(BaseLock):
    """A lock for several ``names`` (str; duplicates count once), made of ``members``: a lock for
    each, in the order of their keys."""

    def __init__(
        self,
        redis: Any,
        names: Iterable[str],
        timeout: float | None = None,
        *,
        lock_class: Any = None,
        **options: Any,
    ) -> None:
        found = check_names(names)
        for option, usual in (("id", None), ("reentrant", False), ("limit", 1)):
            if options.get(option, usual) != usual:
                raise ValueError(f"{option} is for a lock with one name, not with several")
        of_each = {name: options[name] for name in options if name not in OF_THE_WHOLE}
        member = member_class(lock_class or (AsyncLock if self.asynchronous else Lock))
        members = (member(redis, name, timeout, **of_each) for name in found)
        self.members = tuple(sorted(members, key=lambda member: bytes(member.keys.lock)))
        super().__init__(redis, self.members[0].name, timeout, **options)
        self.name: Any = tuple(member.name for member in self.members)
        self._in_one_place = True
        if is_cluster(redis):
            self._in_one_place = len({slot_of(member.keys.lock) for member in self.members}) == 1
        each_alone = self.replicas or self.on_redis_down != "raise"
        self._at_once = self._in_one_place and not each_alone

    def _take_over(self, other: Any) -> None:
        super()._take_over(other)
        for mine, theirs in zip(self.members, other.members, strict=True):
            mine._take_over(theirs)

    @property
    def _shown(self) -> str:
        return ", ".join(member._shown for member in self.members)

    @property
    def fences(self) -> dict[str, int | None]:
        """The fencing token of each name."""
        return {member._shown: member.fence for member in self.members}

    @property
    def fence(self) -> int | None:
        """The greatest of ``fences``. For what one name protects, use that name's."""
        return None if None in self.fences.values() else super().fence

    @property
    def degraded(self) -> str | None:
        return next(filter(None, (member.degraded for member in self.members)), None)

    def _together(self, *all_steps: Steps[R]) -> Steps[list[R]]:
        return together(self._run, self._in_one_place, all_steps)

    # -- acquire -----------------------------------------------------------------------------

    def _request(self, *args: Any) -> tuple[AcquireRequest, float | None]:
        if args[-1] is not None:
            raise ValueError("token must be left out: a lock with several names chooses its own")
        request, wait = super()._request(*args)
        request.may_hold.clear()  # What is asked for each name; see ``_note_request``.
        return request, wait

    def _note_request(self, member: Member, asked: AcquireRequest, to: AcquireRequest) -> None:
        """For ``_abandon``: what is about to be asked for ``member``."""
        noted: list[Any] = to.may_hold
        noted.append((member, asked, member.local.hold))

    def _abandon(
        self, request: AcquireRequest, error: BaseException, before: Known | None = None
    ) -> None:
        noted: list[Any] = request.may_hold
        for member, asked, earlier in noted:
            member._abandon(asked, error)
            hold = member.local.hold
            if hold is None or hold is earlier:
                continue
            # Else it is that of another task, which shares this handle.
            if member.degraded or any(hold.token == token for token, *_ in asked.may_hold):
                member._leave_to_keeper()
        if before is not None:
            self._restore(before)

    def _acquire_steps(self, request: AcquireRequest, wait: float | None) -> Steps[bool]:
        take = self._take_at_once if self._at_once else self._take_in_order
        while True:
            held: list[Member] = []
            acquired = yield from take(request, wait, held)
            if acquired and (wait == 0 or (yield from self._are_held())):
                break
            yield from self._give_up(held)
            if not acquired:
                noted: list[Any] = request.may_hold
                for _, asked, _ in noted:
                    release_late(asked)
                return False
        holds = self._holds()
        on_lost = None if self.on_lost is None else self._for_keeper(self.on_lost)
        hold: Any = MultiHold(holds, server_of(self.redis), self.grant_timeout, on_lost)
        self.local.hold, self.local.token = hold, holds[0].token
        return True

    def _holds(self) -> list[Hold]:
        return [member.local.hold for member in self.members if member.local.hold is not None]

    def _take_at_once(
        self, request: AcquireRequest, wait: float | None, held: list[Member]
    ) -> Steps[bool]:
        """Take all, and add them to ``held``; False if the wait has ended."""
        began, contended, waits = time.monotonic(), False, wait != 0
        while len(held) < len(self.members):
            one = request._replace(token=named_token(), waiter=self._new_waiter() if waits else b"")
            asked = [self._asked_for(m, one, request) for m in self.members if m not in held]
            sent_at = time.monotonic()
            try:
                call = _acquire_all([mine for _, mine in asked], keep=contended)
                answer = yield self._run(call, request.reply_until())
                reply = parse_acquire_all(answer.value, sent_at)
            except Exception as error:
                if not waits or not _passes(error, contended, wait):
                    raise
                self._abandon(request._replace(may_hold=request.may_hold[-len(asked) :]), error)
                # It waits for the first, through the outage.
                one = request._replace(token=named_token())
                asked[0] = self._asked_for(asked[0][0], one, request)
                reply = AllReply((), 0, None, sent_at)
            for (member, mine), taken in zip(asked, reply.taken, strict=False):
                if taken.vanished is not None:
                    server = server_of(member.redis)
                    note_vanished(server, member.keys, taken.vanished, member.subject)
                self._note(member, mine, mine.acquired_by_reply(taken, contended), began, held)
            if reply.gate is None:
                break
            if not (yield from self._wait_at(*asked[reply.gate], reply, waits, began, held)):
                return False
            contended = True
        return True

    def _asked_for(
        self, member: Member, one: AcquireRequest, to: AcquireRequest
    ) -> tuple[Member, AcquireRequest]:
        may_hold = [(one.token, b"", 1)]
        mine = one._replace(keys=member.keys, subject=member.subject, may_hold=may_hold)
        self._note_request(member, mine, to)
        return member, mine

    def _wait_at(
        self,
        member: Member,
        mine: AcquireRequest,
        reply: AllReply,
        waits: bool,
        began: float,
        held: list[Member],
    ) -> Steps[bool]:
        """Wait for the name that is taken, while only those before it are held."""
        left = None if mine.deadline is None else mine.left()
        member._on_contended(left if waits else 0.0)
        behind = [each for each in held if each.keys.lock > member.keys.lock]
        yield from self._give_up(behind)
        held[:] = [each for each in held if each not in behind]
        granted = None
        if waits:
            granted = yield member._wait(mine.with_margin(reply.sent_at), reply.refused)
        if granted is None:
            member._emit_timed_out(began, waits)
            return False
        self._note(member, mine, granted, began, held)
        return True

    def _note(
        self,
        member: Member,
        mine: AcquireRequest,
        acquired: Acquisition,
        asked_at: float,
        held: list[Member],
    ) -> None:
        hold = member._start_renewal(mine, acquired, member._new_lifeline())
        held.append(member)
        member._emit_acquired(hold, asked_at, acquired.contended)

    def _take_in_order(
        self, request: AcquireRequest, wait: float | None, held: list[Member]
    ) -> Steps[bool]:
        """The same, one after the other: they are on several servers, or each may fall back."""
        for member in self.members:
            left = None if request.deadline is None else request.left()
            asked, wait_for_it = member._request(None, wait != 0, left, None)
            self._note_request(member, asked, request)
            (acquired,) = yield from self._together(member._acquire_steps(asked, wait_for_it))
            if not acquired:
                return False
            held.append(member)
        return True

    def _are_held(self) -> Steps[bool]:
        """Whether no name was lost while the caller waited. All have their full lifetime now."""
        holds = self._holds()
        oldest = min(hold.began for hold in holds)
        if not all(hold.is_valid for hold in holds):
            return False
        if self.timeout is None or self.renew or time.monotonic() < oldest + self.timeout / 10:
            return True
        try:
            steps = (member._change_steps("extend", self.timeout, True) for member in self.members)
            yield from self._together(*steps)
        except LockError:
            return False
        # The first may have ended, and been noted as lost, while the extension was on its way.
        return all(hold.is_valid for hold in holds)

    def _give_up(self, members: Sequence[Member]) -> Steps[None]:
        try:
            yield from self._together(*(member._release_steps() for member in members))
        except RedisError:
            for member in members:
                member._leave_to_keeper()

    # -- release -----------------------------------------------------------------------------

    def _release_steps(self) -> Steps[None]:
        self._owned_token("release")
        hold: Any = self.local.hold
        hold.end()
        # Those that an earlier call has released before it failed have no token.
        members = [member for member in self.members if member.local.token is not None]
        try:
            yield from self._together(*(member._release_steps() for member in members))
        except LockError:
            for member in members:  # One that could not be reached still has its token.
                member._leave_to_keeper()
            self._forget(hold)
            raise
        self._forget(hold)

    def _leave_to_keeper(self, before: Known | None = None) -> None:
        hold: Any = self.local.hold
        if before is not None and hold is not before.hold:
            return  # Another user of this handle has the lock by now.
        if hold is None or hold.from_parent_process or self._held_by_another_thread:
            return
        hold.end()
        for member in self.members:
            member._leave_to_keeper()
        self.local.token = None

    def _entered(self) -> None:
        for member in self.members:
            member._entered()
        super()._entered()

    # -- other methods -----------------------------------------------------------------------

    def _change_steps(self, verb: str, seconds: float, replace: bool) -> Steps[Literal[True]]:
        self._owned_token(verb)
        steps = (member._change_steps(verb, seconds, replace) for member in self.members)
        yield from self._together(*steps)
        return True

    def _owned_steps(self) -> Steps[bool]:
        if self.local.token is None:
            return (yield from super()._owned_steps())
        return all((yield from self._together(*(each._owned_steps() for each in self.members))))

    def _holders_steps(self) -> Steps[list[HolderInfo]]:
        held = yield from self._together(*(each._held_steps() for each in self.members))
        return self._one_holder(held)

    def _one_holder(self, holders: Sequence[HolderInfo | None]) -> list[HolderInfo]:
        """The holder of the first name that another holds, or else of the first that is held."""
        mine: list[HolderInfo] = []
        others: list[HolderInfo] = []
        for member, held in zip(self.members, holders, strict=True):
            if held is not None:
                held.name = member._shown
                (mine if held.token == member.local.token else others).append(held)
        return (others or mine)[:1]

    def _reset_steps(self) -> Steps[bool]:
        return any((yield from self._together(*(member._reset_steps() for member in self.members))))


class MultiLock(SeveralNames, Lock):
    """A lock for several names, all or none of which are held, as ``cache.lock(["a", "b"])`` makes
    it. Without Django::

        with MultiLock(client, ["account-1", "account-7"], timeout=30, renew=True) as lock:
            move(amount, fences=lock.fences)

    It has the methods of ``Lock`` and the arguments of ``BaseLock``, except for ``id``, ``limit``
    and ``reentrant``. Two callers never wait for each other, in whatever order they name them.
    """


class AsyncMultiLock(SeveralNames, AsyncLock):
    """``MultiLock`` for asyncio."""


def _acquire_all(asked: Sequence[AcquireRequest], *, keep: bool) -> Call:
    _, _, args, unanswered = asked[0].acquire_call(asked[0].waiter)
    keys = tuple(chain(*(one.keys for one in asked)))
    return Call(ACQUIRE_ALL, keys, (*args, len(asked), "1" if keep else ""), unanswered)


def _passes(error: Exception, contended: bool, wait: float | None) -> bool:
    """Whether a waiter waits through ``error``: an outage only if it has waited before, and a
    refusal also if the wait has an end."""
    refused = isinstance(error, NotReady) or (wait is not None and is_refusal(error))
    return refused or (contended and is_outage(error))


# -- the locks for each name -----------------------------------------------------------------------


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._holds[0], name)  # They were taken together.

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
