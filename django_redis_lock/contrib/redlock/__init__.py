"""One lock over several independent servers, for threads and for asyncio.

A caller sends its request to all servers at once, and has the lock if more than half of them grant
it. Otherwise it releases what it got from the servers after the first one that refused, keeps what
it got before, and waits in the fair queue of the server that refused. All callers use the same
order of servers, so no two wait for each other. If a server is down, the next takes its place.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any
from weakref import WeakKeyDictionary

from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...clock import time
from ...history import note_vanished
from ...keeper import release_later
from ...locking import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    AsyncLock,
    BaseLock,
    Hold,
    Lifeline,
    Lock,
    TaskWaiter,
    ThreadWaiter,
)
from ...protocol import (
    EXTEND,
    LAST_TRY_SECONDS,
    AcquireRequest,
    Call,
    Clock,
    Reply,
    Taken,
    milliseconds,
    named_token,
    parse_acquire,
)
from ...protocol.holder_scripts import holders_call
from ...protocol.holders import HolderInfo
from ...protocol.lock_scripts import RELEASE
from ...protocol.validation import check_time
from ...steps import Steps
from ...threads import ThreadPool
from ...transport import (
    Answer,
    CircuitOpen,
    Client,
    Server,
    encoded,
    is_outage,
    may_have_run,
    run,
    server_of,
)
from ...transport.aio_client import arun
from ...transport.aio_connection import wait_awake
from .votes import (
    Ballot,
    QuorumAcquisition,
    QuorumHold,
    Vote,
    VotedRenewal,
    drift,
    majority,
    merged,
    too_few,
    vote_call,
)

__all__ = ["AsyncRedlock", "Redlock"]

#: The shortest lifetime that the clock drift leaves usable.
MIN_TIMEOUT_SECONDS = 0.01
#: The default of ``server_timeout``, at most.
SERVER_TIMEOUT_SECONDS = 0.25
#: By which the fence of a round is ahead of the fastest server's clock, so that all servers store
#: the same number.
FENCE_LEAD_MICROSECONDS = 10_000
#: The reply to a release that was sent twice, of which the first may still be on its way.
RELEASED_TWICE = 2


#: The last known reading of each server's clock.
_clocks: WeakKeyDictionary[Server, Clock] = WeakKeyDictionary()
#: The last fence that each server gave to this process, for any lock.
_fences: WeakKeyDictionary[Server, int] = WeakKeyDictionary()


class Election:
    """One call of ``acquire``.

    Attributes:
        request: has the current token and attempt. Both change when a server does not reply to a
            release: the server may execute the release later, and must not end a newer grant.
    """

    def __init__(self, lock: Quorum, request: AcquireRequest) -> None:
        self._chosen = request.chosen
        self._lock = lock
        self._servers = lock._servers
        self._places = lock._order()
        self._limit = lock.server_timeout
        self._unanswered: set[int] = set()
        self._granted: set[int] = set()
        self.request = request
        request.may_hold.clear()
        if not self._chosen:
            self._renew_token()

    def _renew_token(self) -> None:
        token = self.request.token if self._chosen else named_token()
        attempt = secrets.token_hex(8).encode()
        self.request = self.request._replace(token=token, attempt=attempt)

    def _record_token(self) -> None:
        """Record the token before sending it; see ``AcquireRequest.may_hold``."""
        mine, recorded = (self.request.token, self._attempt, 1), self.request.may_hold
        if mine not in recorded:
            recorded.append(mine)

    def vote(self, floor: int = 0) -> Steps[Ballot]:
        self._record_token()
        request, limit = self.request, self._limit
        if request.deadline is not None:
            limit = min(limit, request.left() + LAST_TRY_SECONDS)
        asked = (request.token, milliseconds(request.lifetime), self._attempt)
        call = vote_call(request.keys, *asked, floor or self._floor(), request.unanswered)
        sent_at = time.monotonic()
        answers = yield self._lock._ask_servers(dict.fromkeys(self._places, call), limit)
        votes: dict[int, Vote] = {}
        for place in self._places:
            answer = answers.get(place)
            if isinstance(answer, Exception):
                votes[place] = answer
                if may_have_run(answer) or place in self._granted:
                    self._unanswered.add(place)
                continue
            vote = votes[place] = parse_acquire(answer, sent_at)
            server = self._servers[place]
            _clocks[server] = vote.clock
            if isinstance(vote, Taken) and vote.vanished is not None:
                note_vanished(server, request.keys, vote.vanished, request.subject)
        ballot = Ballot(len(self._places), votes, sent_at, request.lifetime)
        self._granted = set(ballot.fences)
        for place, fence in ballot.fences.items():
            _fences[self._servers[place]] = fence
        return ballot

    def _floor(self) -> int:
        now = time.monotonic()
        clocks = [clock for s in self._servers if (clock := _clocks.get(s)) is not None]
        ahead = max(
            (int(c.server_us + (now - c.read_at) * 1e6) + FENCE_LEAD_MICROSECONDS for c in clocks),
            default=0,
        )
        # The estimate is not exact, and the servers may have lost their data.
        last = max(_fences.get(s, 0) for s in self._servers)
        return last + 1 if ahead <= last < ahead + FENCE_LEAD_MICROSECONDS else ahead

    def queue(self, gate: int) -> Steps[bool]:
        """Wait in the queue of the server at ``gate``; False at the deadline."""
        self._record_token()
        try:
            granted = (yield self._lock._wait_at(gate, self.request)) is not None
        except RedisError as error:
            if not is_outage(error):
                raise
            self._unanswered.add(gate)
            return True  # The other servers may be enough.
        if granted:
            self._granted.add(gate)
        return granted

    def release(self, gate: int | None = None) -> Steps[None]:
        """Release what the servers granted: all of it, or only from ``gate`` on."""
        begin = 0 if gate is None else self._places.index(gate)
        yield from self._release(self._places[begin:])
        if self._unanswered:
            # Use a new token from now on, so that late effects do no harm: neither those of calls
            # without a reply, nor the release that the keeper repeats.
            yield from self._release(self._places[:begin])
            for place in self._unanswered:
                release_later(self._servers[place], self._back, self.request.lifetime, late=True)
            self._unanswered = set()
            self.request.may_hold.clear()
            self._renew_token()
        elif gate is None:
            self.request.may_hold.clear()

    def _release(self, places: Sequence[int]) -> Steps[None]:
        calls = {place: self._back for place in places if place in self._granted}
        self._granted.difference_update(calls)
        if calls:
            answers = yield self._lock._ask_servers(calls, self._limit)
            self._unanswered.update(
                place
                for place, answer in answers.items()
                if isinstance(answer, Exception) or answer == RELEASED_TWICE
            )

    @property
    def _attempt(self) -> bytes:
        """Empty for a random token, which names the attempt itself."""
        return self.request.attempt if self._chosen else b""

    @property
    def _back(self) -> Call:
        return self.request.release_call(self.request.token, self._attempt)

    def acquired(self, ballot: Ballot, fence: int, contended: bool) -> QuorumAcquisition:
        facts = (self.request.token, fence, ballot.sent_at, ballot.deadline, self._attempt)
        elected = QuorumAcquisition(*facts, contended=contended)
        elected.votes = ballot.votes
        return elected


class Quorum(BaseLock):
    """A lock on several servers.

    Args:
        redis: the redis-py clients, one for each server; at least three.
        server_timeout: seconds to wait for one server, which then counts as down. Default: a
            quarter of a second, but at most a quarter of ``timeout``.

    The other arguments are those of ``BaseLock``.
    """

    redis: Sequence[Any]
    _hold_class = QuorumHold
    #: Replies to these calls, or errors, by place, within so many seconds.
    _ask_servers: Callable[[Mapping[int, Call], float], object]

    def __init__(
        self,
        redis: Iterable[object],
        name: str | bytes,
        timeout: float | None = None,
        *args: Any,
        server_timeout: float | None = None,
        **options: Any,
    ) -> None:
        clients = _checked(redis)
        super().__init__(clients, name, timeout, *args, **options)
        if self.timeout is not None and self.timeout < MIN_TIMEOUT_SECONDS:
            raise ValueError(
                f"timeout must be at least {MIN_TIMEOUT_SECONDS} seconds for a lock on several "
                f"servers: their clocks may drift by as much, not {timeout!r}"
            )
        if self.replicas:
            raise ValueError("replicas are for a lock on one server; this one has several")
        if self.limit > 1:
            raise ValueError("limit must be 1 for a lock on several servers")
        usual = "a quarter of a second"
        given = check_time("server_timeout", server_timeout, none=usual)
        self.server_timeout = given or min(SERVER_TIMEOUT_SECONDS, (self.timeout or math.inf) / 4)

    @property
    def _servers(self) -> tuple[Server, ...]:
        return tuple(server_of(client) for client in self.redis)

    def _encode(self, value: str | bytes) -> bytes:
        return encoded(self.redis[0], value)

    def _wait_at(self, place: int, request: AcquireRequest) -> object:
        """Wait for one server's part of the lock; the grant, or None at the deadline."""
        waiter = TaskWaiter if self.asynchronous else ThreadWaiter
        return waiter(self.redis[place], request).wait()

    def _sleep(self, seconds: float) -> object:
        return time.asleep(seconds) if self.asynchronous else time.sleep(seconds)

    # -- acquire ------------------------------------------------------------------------------

    def _new_waiter(self) -> bytes:
        return b""  # It waits with another id on each server.

    def _obtain(
        self, request: AcquireRequest, wait: float | None
    ) -> Steps[QuorumAcquisition | None]:
        """Raises TooFewServers after the first round, or at the end of the wait."""
        election = Election(self, request._replace(outage_patience=0.0))
        pause, contended = FIRST_PAUSE_SECONDS, False
        while True:
            ballot = yield from election.vote()
            if ballot.won:
                fence, stored = ballot.fence, ballot.stored
                if not stored:
                    ballot = yield from election.vote(fence)
                if ballot.won:
                    return election.acquired(ballot, fence, contended)
            if ballot.refused and not contended:
                self._on_contended(wait)
            left = 0.0 if wait == 0 else election.request.left()
            if ballot.too_few or not left:
                yield from election.release()
                refused = wait is not None and ballot.passes and not request.falls_back
                if ballot.too_few and (not left or not (contended or refused)):
                    raise too_few(ballot.errors, len(self.redis), self._shown)
                if not left:
                    return None
                # A random pause, so that competing callers do not retry at the same moment.
                yield self._sleep(min(pause * (1 + secrets.randbelow(100) / 100), left))
                pause, contended = min(pause * 2, MAX_PAUSE_SECONDS), True
                continue
            pause, contended = FIRST_PAUSE_SECONDS, True
            if not ballot.refused:  # They granted the lock, but too late.
                yield from election.release()
                continue
            gate = ballot.refused[0]
            yield from election.release(gate)
            if not (yield from election.queue(gate)):
                yield from election.release()
                return None

    def _order(self) -> list[int]:
        """The order in which all callers wait for the servers. It differs between locks, to
        distribute the load."""
        count = len(self.redis)
        first = zlib.crc32(self.keys.lock) % count
        return [(first + n) % count for n in range(count)]

    # -- other methods ------------------------------------------------------------------------

    def _reset_steps(self) -> Steps[bool]:
        """End the lock on each server, as ``Lock.reset`` does on one."""
        call = holders_call(self.keys)
        answers = yield self._ask_servers(self._calls(call), self.server_timeout)
        held = {p: a for p, a in answers.items() if a and not isinstance(a, Exception)}
        order = [p for p in reversed(self._order()) if p in held]
        resets = {p: self._reset_call(HolderInfo(held[p])) for p in order}
        ended = (yield self._ask_servers(resets, self.server_timeout)) if resets else {}
        holder = merged(call, answers, len(self.redis), self._shown)
        away = {p: a for p, a in {**answers, **ended}.items() if isinstance(a, Exception)}
        if len(away) > len(self.redis) - majority(len(self.redis)):
            raise too_few(away, len(self.redis), self._shown)
        return holder is not None

    def _calls(self, call: Call) -> dict[int, Call]:
        """Sends to the first in order last: a waiter there then finds the others released."""
        return dict.fromkeys(reversed(self._order()), call)

    def _merge(self, call: Call, sent_at: float, answers: Mapping[int, Reply]) -> Answer:
        if call.script is RELEASE:
            for place, answer in answers.items():
                if isinstance(answer, Exception):
                    release_later(self._servers[place], call, self.timeout)
        hold = self.local.hold
        if call.script is EXTEND and isinstance(hold, QuorumHold):
            _, amount, replace, *_ = call.args
            lifetime = int(amount) / 1000
            for place, answer in answers.items():
                if isinstance(answer, Exception):
                    continue
                begins = sent_at if replace == "1" else hold.votes[place]
                until = begins + lifetime - drift(lifetime)
                hold.vote(place, until if int(answer) > 0 else -math.inf, sent_at)
        return Answer(merged(call, answers, len(self.redis), self._shown), sent_twice=False)

    # -- renewal ------------------------------------------------------------------------------

    def _new_lifeline(self) -> Lifeline:
        hold: Any = self._new_hold()
        jobs = (VotedRenewal(server, hold, place) for place, server in enumerate(self._servers))
        return Lifeline(hold, *jobs)

    def _prolonged(self, hold: Hold, deadline: float, asked_at: float) -> None:
        if self.local.renewal is not None:
            self.local.renewal.reschedule(asked_at)


def _checked(redis: Iterable[Any]) -> tuple[object, ...]:
    if isinstance(redis, (str, bytes)) or not isinstance(redis, Iterable):
        raise TypeError(f"a lock on several servers needs their clients, not {redis!r}")
    clients = tuple(redis)
    if len(clients) < 3:
        raise ValueError(f"a lock on several servers needs at least 3 of them, not {len(clients)}")
    servers = [server_of(client) for client in clients]
    if any(server.is_topology for server in servers):
        raise TypeError("a lock on several servers needs single servers: no cluster, no Sentinel")
    if len({server.database for server in servers}) < len(clients):
        raise ValueError("the servers of a lock must be different ones")
    return clients


class Redlock(Lock, Quorum):
    """A lock held on a majority of several independent servers, with the methods of ``Lock`` and
    the arguments of ``Quorum``::

        servers = [redis.Redis(host) for host in ("lock1", "lock2", "lock3")]
        with Redlock(servers, "import", timeout=30, renew=True, blocking_timeout=10) as lock:
            import_prices(fence=lock.fence)

    A minority of servers that are down or hang delays a call by ``server_timeout`` at most, and not
    at all once the circuit breaker knows. ``TooFewServers`` means that no majority can be reached,
    not that the lock is taken. A timeline, with three servers and ``timeout=30``:

    ====  =======================================================================================
    0 s   A acquires on all three; B waits, in the queue of the first.
    5 s   The first server dies. B waits on at the second; A holds two of three.
    9 s   A releases, and B has the second and the third.
    12 s  The second server dies: B holds one of three, and loses the lock 30 s after the last
          renewal that two servers confirmed. ``on_lost`` is called shortly before that.
    ====  =======================================================================================

    Raises:
        TooFewServers: from every method that sends requests to the servers.
    """

    def _ask_servers(self, calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
        return ask(self.redis, calls, seconds)

    def _run(self, call: Call, until: float | None = None) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, *sent)


class AsyncRedlock(AsyncLock, Quorum):
    """``Redlock`` for asyncio, over clients of redis.asyncio."""

    async def _ask_servers(self, calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
        return await _aask(self.redis, calls, seconds)

    async def _run(self, call: Call, until: float | None = None) -> Answer:
        sent = time.monotonic(), self._ask_servers(self._calls(call), self.server_timeout)
        return self._merge(call, sent[0], await sent[1])


# -- each server is asked in a thread, or by a task, of its own ------------------------------------


async def _aask(
    clients: Sequence[Client], calls: Mapping[int, Call], seconds: float
) -> dict[int, Reply]:
    until, away = time.monotonic() + seconds, spared(clients, calls)

    async def one(place: int) -> Reply:
        try:
            return _value(calls[place], await arun(clients[place], calls[place], until=until))
        except Exception as error:  # ``arun`` has told the breaker.
            return error

    asking = {place: asyncio.ensure_future(one(place)) for place in calls if place not in away}
    try:
        await wait_awake(asking.values(), seconds)
    finally:
        for task in asking.values():
            task.cancel()
    if asking:
        await asyncio.wait(asking.values())
    late = {p: _late(clients[p], seconds) for p, task in asking.items() if task.cancelled()}
    return away | late | {p: task.result() for p, task in asking.items() if p not in late}


def _late(client: Client, seconds: float) -> Exception:
    error = RedisTimeoutError("Redis did not answer in time")
    server_of(client).breaker.failed(error, seconds, seconds)
    return error


def _value(call: Call, answer: Answer) -> Reply:
    """What it means: a release that was sent twice may find that the first has run."""
    released = call.script is RELEASE and not isinstance(answer.value, Exception)
    return RELEASED_TWICE if released and answer.sent_twice else answer.value


#: A server that hangs keeps a thread as long as its caller waits.
_asking = ThreadPool("django_redis_lock redlock", 64, 1024, idle_seconds=1.0)
PARTS = 10


def ask(clients: Sequence[Client], calls: Mapping[int, Call], seconds: float) -> dict[int, Reply]:
    """The replies to ``calls``, or their errors, by place. It waits for ``PARTS`` parts of
    ``seconds`` in which none comes. If the process is stopped, replies may arrive, so that counts
    as one part at most."""
    away = spared(clients, calls)
    came: SimpleQueue[tuple[int, Reply]] = SimpleQueue()
    given_up = False

    def one(place: int) -> None:
        if given_up:
            return
        try:
            until = time.monotonic() + seconds
            outcome = _value(calls[place], run(clients[place], calls[place], until=until))
        except Exception as error:
            outcome = error
        came.put((place, outcome))

    asked = [place for place in calls if place not in away]
    outcomes: dict[int, Reply] = {}
    left = PARTS
    try:
        for place in asked:
            if not _asking.submit(partial(one, place)):
                one(place)  # There are too many threads.
        while len(outcomes) < len(asked) and left:
            try:
                place, outcomes[place] = came.get(timeout=seconds / PARTS)
            except Empty:
                left -= 1
    finally:
        given_up = True
    late = {place: _late(clients[place], seconds) for place in asked if place not in outcomes}
    return away | late | outcomes


def spared(clients: Sequence[Client], calls: Mapping[int, Call]) -> dict[int, Reply]:
    """A minority of servers that get no request because their circuit breaker is open: by place,
    with its error. The keeper releases a lock there."""
    away: dict[int, Reply] = {}
    breakers = {place: server_of(clients[place]).breaker for place in calls}
    held_back = [place for place, breaker in breakers.items() if breaker.held_back]
    if 2 * len(held_back) < len(clients):
        for place in held_back:
            try:
                breakers[place].admit(None)
            except CircuitOpen as error:
                away[place] = error
    return away
