"""The lock scripts on a real server, driven at random, beside a reference in plain Python.

Several callers with waiters, every call also sent twice, companion keys that vanish or age at any
moment. After each step every key of the lock is looked at: its content, its lifetime, and that
there is no other.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.protocol import acquisition
from django_redis_lock.protocol.acquisition import AcquireRequest, renew_call
from django_redis_lock.protocol.holder_scripts import HELD, RESET
from django_redis_lock.protocol.identity import new_token
from django_redis_lock.protocol.keys import LAST_FENCE, lock_keys
from django_redis_lock.protocol.lock_scripts import EXTEND
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport import run as run_call
from tests.holding import table_of
from tests.lanes import examples
from tests.model.lock_reference import DAY, LockReference

pytestmark = pytest.mark.invariant("S1", "S3")

NAME = b"model"
KEYS = lock_keys(NAME)
PARTS = {
    "lock": NAME,
    "index": KEYS.held_index,
    "grants": KEYS.grants,
    "waiters": KEYS.waiters,
    "owner": KEYS.owner,
}
#: Seconds. They are so far apart, and so long, that no delay of the machine can confuse them.
LIFETIMES = st.sampled_from((300.0, 3000.0, math.inf))
GRANT = 1000.0
ALIVE = 700.0
TOLERANCE = 60.0
CHOSEN = b"chosen"
#: Other locks on the index.
ENDED, EXTENDED = b"ended", b"extended"

CALLERS = st.integers(min_value=0, max_value=2)
#: Mostly the present holder: what the others ask for comes to nothing.
HOLDERS = st.sampled_from((None, None, None, 0, 1, 2))
TWICE = st.booleans()
#: What happens just before a call: a companion key is gone, holds something else than it should
#: ("!"), memory is full, or all waiters are dead.
BEFORE = st.sampled_from(
    ("", "", "dead", "full", "fence", "!fence", "owner", "!owner", "!waiters", "!grants", "!index")
)
#: Fences that cannot be counted on from.
UNUSABLE_FENCES = (10**17, math.inf)


class Caller:
    """One that wants the lock: its present call of ``acquire`` and what has come of it."""

    def __init__(self, number: int) -> None:
        self.waiter = b"waiter %d" % number
        self.request = self.new_request(300.0, chosen=False)
        self.token, self.attempt = b"none yet", b""
        self.fence = 0
        self.popped, self.popped_fence = b"", 0

    def new_request(self, lifetime: float, *, chosen: bool) -> AcquireRequest:
        token, attempt = (CHOSEN, new_token()) if chosen else (new_token(), b"")
        self.request = AcquireRequest(
            KEYS, token, attempt, None if lifetime == math.inf else lifetime, GRANT, []
        )
        return self.request

    @property
    def lifetime(self) -> float:
        return self.request.lifetime or math.inf


class Scripts(RuleBasedStateMachine):
    """Real scripts and reference, side by side."""

    client: redis.Redis
    #: Whether its memory can be full.
    limited: bool

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        seconds, micros = self.client.time()
        self.ahead = seconds + micros / 1e6 - time.monotonic()
        self.model = LockReference(ALIVE, name=NAME)
        self.callers = [Caller(number) for number in range(3)]
        self.turns, self.full = 0, False
        #: Companion keys that hold something else than they should, until a script replaces it.
        self.broken: set[str] = set()

    # -- what callers do -----------------------------------------------------------------------

    @rule(who=CALLERS, lifetime=LIFETIMES, chosen=st.booleans(), waits=st.booleans(), twice=TWICE)
    def acquire(self, who: int, lifetime: float, chosen: bool, waits: bool, twice: bool) -> None:
        self._acquire(self.callers[who], lifetime, chosen, waits, times=1 + twice)
        self._look()

    def _acquire(
        self, caller: Caller, lifetime: float, chosen: bool, waits: bool, times: int = 1
    ) -> None:
        request = caller.new_request(lifetime, chosen=chosen)
        waiter = caller.waiter if waits else b""
        for _ in range(times):
            ended = self.model.ended
            got = self.model.acquire(request.token, lifetime, request.attempt, waiter)
            reply = table_of(self._run(request.acquire_call(waiter)))
            self._tried(caller, reply, got, ended)

    @rule(who=CALLERS, tries=st.booleans(), unregisters=st.booleans(), twice=TWICE)
    def leave(self, who: int, tries: bool, unregisters: bool, twice: bool) -> None:
        caller = self.callers[who]
        request, waiter = caller.request, caller.waiter if unregisters else b""
        for _ in range(1 + twice):
            ended = self.model.ended
            token = request.token if tries else b""
            got = self.model.leave(token, caller.lifetime, request.attempt, waiter)
            call = request.leave_call(waiter, try_again=tries)
            self._tried(caller, self._run(call), got, ended if tries else None)
            # It expires soon, so it is not for the machine to keep.
            assert self.client.lrange(request.wake, 0, -1) == [b"leave"]
            assert 0 < self.client.pttl(request.wake) <= 2000
            self.client.delete(request.wake)
        self._look()

    def _tried(self, caller: Caller, reply: Any, got: bool, ended: float | None) -> None:
        if got:
            assert reply[0] == 1
            caller.token, caller.attempt = caller.request.token, caller.request.attempt
            caller.fence = reply[1]
            self._fence_given(reply[1])
            assert (len(reply) > 3) == (ended is not None)
            if ended is not None:
                gone_at, owner = reply[3]
                assert abs((reply[2] - gone_at) / 1e6 - (time.monotonic() - ended)) < TOLERANCE
                assert owner
        else:
            assert reply[0] == 0
            self._lasts(reply[1], self.model.until.get("lock"))
            assert len(reply) == 3

    @precondition(lambda self: self.model.grant is not None)
    @rule(who=CALLERS)
    def pop(self, who: int) -> None:
        """What a waiter's blocking pop does."""
        element = self.client.lpop(KEYS.grants)
        caller = self.callers[who]
        caller.popped, caller.popped_fence, _ = acquisition.parse_grant(element)
        self.model.pop()
        self._look()

    @precondition(lambda self: self.model.grant or any(each.popped for each in self.callers))
    @rule(
        who=CALLERS,
        lifetime=LIFETIMES,
        chosen=st.booleans(),
        unregisters=st.booleans(),
        twice=TWICE,
        before=BEFORE,
    )
    def take_grant(
        self,
        who: int,
        lifetime: float,
        chosen: bool,
        unregisters: bool,
        twice: bool,
        before: str,
    ) -> None:
        """What a granted waiter sends, at once or after something else has happened."""
        caller = next((caller for caller in self.callers if caller.popped), self.callers[who])
        if not caller.popped:
            self.pop(who)
        self._happens_before(before)
        caller.new_request(lifetime, chosen=chosen)
        request, waiter = caller.request, caller.waiter if unregisters else b""
        own = (request.token, request.attempt) if request.chosen else (b"", b"")
        for _ in range(1 + twice):
            fence = caller.popped_fence
            taken = self.model.take_grant(caller.popped, caller.lifetime, waiter, *own, fence)
            call = request.take_grant_call(acquisition.Grant(caller.popped, fence), waiter)
            assert self._run(call) == taken
            if taken:
                caller.token, caller.attempt = own if own[0] else (caller.popped, b"")
                caller.fence = fence
        caller.popped = b""
        self._look()

    @rule(
        who=HOLDERS,
        rest=st.sampled_from((0.0, 0.0, 500.0)),
        held=st.sampled_from((-900, 200, 900)),
        before=BEFORE,
    )
    def release(self, who: int | None, rest: float, held: float, before: str) -> None:
        """Always twice: whoever hears no answer sends it again, and must hear the same."""
        caller = self._holder(who, before)
        call = acquisition.release_call(
            KEYS,
            caller.token,
            new_token(),
            GRANT,
            rest,
            self._server_us() - int(held * 1e6),
            caller.attempt,
        )
        left = min(rest, rest - held) if rest else 0.0
        for _ in range(2):
            fence = self.model.fences
            released = self.model.release(
                caller.token,
                call.args[1],
                GRANT,
                left,
                call.args[5],
            )
            assert self._run(call) == released
            if self.model.fences != fence:
                self._granted()
        self._look()

    @rule(who=HOLDERS, later=st.booleans(), before=BEFORE)
    def reset(self, who: int | None, later: bool, before: str) -> None:
        """Always twice, as ``release``. With ``later``, another holder has come meanwhile."""
        caller, successor = self._holder(who, before), new_token()
        token, fence = caller.token, caller.fence - later
        args = (successor, int(GRANT * 1000), token, fence)
        for _ in range(2):
            known = self.model.fences
            ended = self.model.reset(successor, GRANT, token, fence)
            assert self._run(Call(RESET, KEYS, args)) == ended
            if self.model.fences != known:
                self._granted()
        self._look()

    @rule(
        who=HOLDERS,
        lifetime=st.sampled_from((0.0, 300.0, 3000.0, math.inf)),
        described=st.booleans(),
        twice=TWICE,
        before=BEFORE,
    )
    def renew(
        self, who: int | None, lifetime: float, described: bool, twice: bool, before: str
    ) -> None:
        caller = self._holder(who, before)
        attempt = caller.attempt
        fields = {b"host": b"here", b"label": b"x"} if described else {}
        wanted = -1 if lifetime == math.inf else int(lifetime * 1000)
        flat = [each.decode() for pair in fields.items() for each in pair]
        for _ in range(1 + twice):
            renewed = self.model.renew(caller.token, lifetime, attempt, fields)
            left = self._run(renew_call(KEYS, caller.token, attempt, *flat, wanted=wanted))
            if renewed:
                self._lasts(left, self.model.until["lock"])
            else:
                assert isinstance(left, list)
        self._look()

    @rule(
        who=HOLDERS,
        seconds=st.sampled_from((300.0, 2000.0)),
        replace=st.booleans(),
        before=BEFORE,
    )
    def extend(self, who: int | None, seconds: float, replace: bool, before: str) -> None:
        """Always twice, as ``release``."""
        caller, name = self._holder(who, before), new_token()
        args = (caller.token, int(seconds * 1000), "1" if replace else "0", caller.attempt, name)
        for _ in range(2):
            expected = self.model.extend(caller.token, seconds, replace, caller.attempt, name)
            assert self._run(Call(EXTEND, KEYS, args)) == expected
        self._look()

    @rule(who=CALLERS, twice=TWICE)
    def watch(self, who: int, twice: bool) -> None:
        caller = self.callers[who]
        for _ in range(1 + twice):
            call = caller.request.watch_call(caller.waiter)
            ended, fence = self.model.ended, self.model.fences
            untaken = self.model.watch(caller.waiter, call.args[2], GRANT)
            reply = self._run(call)
            self._lasts(reply[0], self.model.until["lock"])
            assert abs(reply[1] - self._server_us()) < TOLERANCE * 1e6
            assert reply[2] == untaken
            assert (len(reply) > 3) == (ended is not None)
            if self.model.fences != fence:
                self._granted()
        self._look()

    def _held(self) -> None:
        reply = self._run(Call(HELD, KEYS, ()))
        if self.model.token is None or self.model.untaken:
            assert reply is None
            return
        assert reply[0] == self.model.token
        self._lasts(reply[1], self.model.until["lock"])
        assert set(reply[2][::2]) == set(self.model.owner)
        assert abs(reply[3] - self._server_us()) < TOLERANCE * 1e6

    # -- what happens to the keys --------------------------------------------------------------

    @rule(
        what=st.sampled_from(
            (
                "a key vanishes",
                "a key vanishes",
                "everything vanishes",
                "the holder vanishes",
                "a waiter dies",
                "the clock is set back",
                "another lock ended",
                "another lock was extended",
                "another library takes it",
            )
        ),
        which=st.integers(min_value=0, max_value=5),
    )
    def something_happens(self, what: str, which: int) -> None:
        getattr(self, "_" + what.replace(" ", "_"))(which)
        self._look()

    def _a_key_vanishes(self, which: int) -> None:
        """It expires, is evicted or deleted."""
        there = [*self.model.until, *(["index"] if self.model.index else [])]
        if there:
            part = there[which % len(there)]
            self.client.delete(PARTS[part])
            self._vanished(part)

    def _everything_vanishes(self, _: int) -> None:
        self.client.flushall()
        for part in PARTS:
            self._vanished(part)

    def _the_holder_vanishes(self, _: int) -> None:
        """It has not released the lock, and nobody has wanted it for a while since."""
        self._holder(None, "")
        holder = self.model.token or b""
        assert self.model.renew(holder, 0.0, b"", {b"host": b"here"})
        self._run(renew_call(KEYS, holder, b"", "host", "here"))
        self.client.delete(NAME)
        self.model.vanish("lock")
        self.client.pexpire(KEYS.owner, int((DAY - 900) * 1000))
        self.model.until["owner"] = time.monotonic() + DAY - 900

    def _a_waiter_dies(self, which: int) -> None:
        for waiter in (*self.model.waiters,)[which % 3 :]:
            self.client.zadd(KEYS.waiters, {waiter: self._server_us() // 1000 - 1000})
            self.model.waiters[waiter] = -math.inf

    def _the_clock_is_set_back(self, _: int) -> None:
        """Then the last fence is ahead of it."""
        if self.model.fence is not None:
            self.model.fence = self.model.last_fence = self.model.last_fence + 10**9
            self.client.zadd(KEYS.held_index, {LAST_FENCE: self.model.fence})

    def _another_lock_ended(self, _: int) -> None:
        """Without a release, so that it is still on the index: any script may drop it."""
        if "index" not in self.broken:
            self.client.zadd(KEYS.held_index, {ENDED: self._server_us() / 1000 - 7_200_000})

    def _another_lock_was_extended(self, _: int) -> None:
        """By a program that does not know the index: no script may drop it."""
        if "index" not in self.broken:
            self.client.set(EXTENDED, "token", px=3_000_000)
            self.client.zadd(KEYS.held_index, {EXTENDED: self._server_us() / 1000 - 7_200_000})
            self.model.index[EXTENDED] = time.monotonic() + 3000

    def _another_library_takes_it(self, which: int) -> None:
        """It sets the key, knows nothing of companions, and deletes it in the end."""
        if self.model.token is None:
            self.client.set(NAME, b"foreign", px=300_000)
            self.model.token = b"foreign"
            self.model.until["lock"] = time.monotonic() + 300
            self._acquire(self.callers[which % 3], 300.0, False, True)
            self._look()
            self.client.delete(NAME)
            self.model.vanish("lock")

    def _vanished(self, part: str) -> None:
        self.model.vanish(part)
        if self.model.fence is None:
            # Without a counter the clock is the floor. Of a clock that was set back as well nobody
            # knows.
            self.model.last_fence = min(self.model.last_fence, self._server_us())

    # -- both ----------------------------------------------------------------------------------

    def _run(self, call: Call) -> Any:
        return run_call(self.client, call).value

    def _server_us(self) -> int:
        return int((time.monotonic() + self.ahead) * 1e6)

    def _granted(self) -> None:
        """A script has made a grant; its fence is on the list."""
        token, fence, _ = acquisition.parse_grant(self.client.lindex(KEYS.grants, 0))
        self._fence_given(fence)
        self.model.grant = token, fence

    def _fence_given(self, fence: int) -> None:
        """The server's clock, or one more than the last if that is ahead of it."""
        last, ahead = self.model.last_fence, self.model.fence is not None
        self.model.fence_given(fence)
        if ahead and last > self._server_us() + TOLERANCE * 1e6:
            assert fence == last + 1
        else:
            assert abs(fence - self._server_us()) < TOLERANCE * 1e6

    @staticmethod
    def _lasts(pttl: int, until: float | None) -> None:
        if until is None:
            assert pttl == -2
        elif until == math.inf:
            assert pttl == -1
        else:
            assert abs(time.monotonic() + pttl / 1000 - until) < TOLERANCE

    def _holder(self, who: int | None, before: str) -> Caller:
        """A caller; None for the one that holds the lock, which is the first if nobody does."""
        if self.model.token is None or self.model.untaken:
            self.turns += 1
            self._acquire(self.callers[0], 300.0, self.turns % 2 == 0, False)
        holding = (caller for caller in self.callers if caller.token == self.model.token)
        self._happens_before(before)
        return next(holding, self.callers[0]) if who is None else self.callers[who]

    def _happens_before(self, what: str) -> None:
        part = what.lstrip("!")
        if what == "full" and self.limited:
            self.client.config_set("maxmemory", 1)
            self.full = True
        elif what == "dead":
            self._a_waiter_dies(0)
        elif part == "fence" and "index" not in self.broken:
            self.client.zrem(KEYS.held_index, LAST_FENCE)
            self._vanished(part)
            if part != what:
                self.turns += 1
                self.client.zadd(KEYS.held_index, {LAST_FENCE: UNUSABLE_FENCES[self.turns % 2]})
        elif part and part not in ("full", "fence"):
            self.client.delete(PARTS[part])
            self._vanished(part)
            if part != what:
                self.client.set(PARTS[part], "another type")
                self.broken.add(part)

    def _look(self) -> None:
        """Every key is as the reference has it, and there is no other."""
        if self.full:
            self.client.config_set("maxmemory", 0)
            self.full = False
        self._held()
        model = self.model
        with self.client.pipeline(transaction=False) as pipe:
            pipe.keys("*").get(NAME).lrange(KEYS.grants, 0, -1)
            pipe.zrange(KEYS.waiters, 0, -1, withscores=True)
            pipe.hgetall(KEYS.owner).zrange(KEYS.held_index, 0, -1, withscores=True)
            for key in PARTS.values():
                pipe.pttl(key)
            keys, token, listed, waiters, owner, index, *ttls = pipe.execute(raise_on_error=False)
        self.broken -= {*model.until, *(["index"] if model.index or model.fence else [])}
        broken = {PARTS[part] for part in self.broken}
        there = {PARTS[part] for part in model.until}
        assert set(keys) - {KEYS.held_index, EXTENDED} - broken == there
        for part, pttl in zip(PARTS, ttls, strict=True):
            if part != "index" and part not in self.broken:
                self._lasts(pttl, model.until.get(part))
        server_ms = self._server_us() / 1000
        assert token == model.token
        listed, waiters, owner, index = (
            empty if part in self.broken else value
            for part, value, empty in (
                ("grants", listed, []),
                ("waiters", waiters, []),
                ("owner", owner, {}),
                ("index", index, []),
            )
        )
        assert listed == ([b"%b:%d" % model.grant] if model.grant else [])
        last = dict(index).pop(LAST_FENCE, None)
        assert last == model.fence or (model.fence is None and last in UNUSABLE_FENCES)
        index = [entry for entry in index if entry[0] != LAST_FENCE]
        assert {field: value for field, value in owner.items() if field != b"seen"} == {
            field: value for field, value in model.owner.items() if field != b"seen"
        }
        if b"seen" in model.owner:
            assert abs(int(owner[b"seen"]) - self._server_us()) < TOLERANCE * 1e6
        self._ends(waiters, model.waiters)
        # Scripts drop a lock that has ended, or note its true end, now and then.
        stale = [each for each in index if each[0] == EXTENDED and each[1] < server_ms]
        current = {
            lock: end for lock, end in model.index.items() if not (stale and lock == EXTENDED)
        }
        self._ends([each for each in index if each[0] != ENDED and each not in stale], current)

    def _ends(self, listed: list[tuple[bytes, float]], expected: dict[bytes, float]) -> None:
        assert {member for member, _ in listed} == set(expected)
        for member, score in listed:
            if expected[member] == -math.inf:
                assert score / 1000 - self.ahead < time.monotonic()
            elif expected[member] == math.inf:
                assert score == math.inf
            else:
                assert abs(score / 1000 - self.ahead - expected[member]) < TOLERANCE


@pytest.mark.parametrize("where", ["redis", "memory"])
def test_the_scripts_behave_as_their_reference(
    where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "WAITER_LIFETIME_SECONDS", ALIVE)
    Scripts.limited = where == "redis"
    Scripts.client = (
        request.getfixturevalue("own_server").client()
        if Scripts.limited
        else client_of(Database("memory"))
    )
    run_state_machine_as_test(
        Scripts,
        settings=settings(
            # The same ones each time; who tests mutants wants more of them.
            max_examples=200 if os.environ.get("TESTING_MUTANTS") else examples(100),
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            # Who tests mutants wants to know that this fails, not the shortest way to it.
            phases=tuple(Phase)[:3] if os.environ.get("TESTING_MUTANTS") else tuple(Phase),
            suppress_health_check=list(HealthCheck),
        ),
    )
