"""The scripts of a lock with places, driven at random, beside a model of what each place has.

Callers act as waiters do, but each step by itself: between a release, the pop of its grant and
TAKE_GRANT anything may happen. Each call may be sent twice.
"""

from __future__ import annotations

from typing import Any

import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from django_redis_lock.protocol import Call, lock_keys, new_token, parse_grant
from django_redis_lock.protocol.acquisition import (
    AcquireRequest,
    Grant,
    release_call,
)
from django_redis_lock.protocol.keys import INDEX
from django_redis_lock.transport import run as run_call
from tests.holding import table_of
from tests.lanes import examples

LIMIT = 2
KEYS = lock_keys(b"model")
#: One caller has a smaller limit than the others.
LIMITS = (LIMIT, LIMIT, LIMIT, 1)
CALLERS = st.integers(0, len(LIMITS) - 1)
LONG = 1000.0


class Caller:
    """What one caller knows.

    Attributes:
        request: its last request.
        held: its token and place; None if it holds none.
        popped: the grant that its pop has returned, until it is taken.
        waiter: its id in the register.
    """

    def __init__(self, number: int) -> None:
        self.limit = LIMITS[number]
        self.waiter = b"%d 1.000 1 host thread" % number
        self.held: Grant | None = None
        self.popped: Grant | None = None
        self.new_request()

    def new_request(self) -> None:
        self.request = AcquireRequest(KEYS, new_token(), b"", LONG, LONG, [], limit=self.limit)


class Places(RuleBasedStateMachine):
    """``tokens`` is what each place has, ``granted`` the grants on the list, in their order."""

    client: redis.Redis

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.callers = [Caller(number) for number in range(len(LIMITS))]
        self.tokens: dict[int, bytes] = {}
        self.granted: list[Grant] = []
        self.registered: set[bytes] = set()
        self.fence = 0

    def _run(self, call: Call, twice: bool) -> Any:
        answer = run_call(self.client, call).value
        return run_call(self.client, call).value if twice else answer

    def _next_fence(self, fence: int) -> int:
        assert fence > self.fence
        self.fence = fence
        return fence

    def _choose(self, limit: int) -> int | None:
        """The place that an ACQUIRE gets: a free one, or one whose grant is on the list."""
        lying = {grant.place for grant in self.granted}
        places = range(1, limit + 1)
        free = [place for place in places if place not in self.tokens]
        return next(iter([*free, *(place for place in places if place in lying)]), None)

    def _put(self, place: int, token: bytes) -> None:
        self.tokens[place] = token
        if self._plain:
            self.granted.clear()  # A plain lock does not know of other places.
        self.granted = [grant for grant in self.granted if grant.place != place]

    _plain = False

    def _passed_on(self, place: int, limit: int) -> None:
        """The holder of ``place`` is gone."""
        if self.registered and place <= limit:
            made = parse_grant(self.client.lindex(KEYS.grants, -1))
            assert made.place == place
            self._next_fence(made.fence)
            self._put(place, made.token)
            self.granted.append(made)
        else:
            del self.tokens[place]
            if self._plain:
                self.granted.clear()

    def _unregistered(self, waiter: bytes, several: bool) -> None:
        self.registered.discard(waiter)
        if several and not self.registered:
            for grant in self.granted:
                if self.tokens.get(grant.place) == grant.token:
                    del self.tokens[grant.place]
            self.granted.clear()

    @rule(who=CALLERS, waits=st.booleans(), twice=st.booleans())
    def acquire(self, who: int, waits: bool, twice: bool) -> None:
        caller = self.callers[who]
        if caller.held or caller.popped:
            return
        caller.new_request()
        self._plain = caller.limit == 1
        if self._plain:  # It looks only at the first grant.
            first = self.granted[0].place if self.granted else None
            place = 1 if 1 not in self.tokens or first == 1 else None
        else:
            place = self._choose(caller.limit)
        request = caller.request.acquire_call(caller.waiter if waits else b"")
        reply = table_of(self._run(request, twice))
        assert reply[0] == (place or 0)
        if place:
            self._put(place, caller.request.token)
            caller.held = Grant(caller.request.token, self._next_fence(reply[1]), place)
        elif waits:
            self.registered.add(caller.waiter)

    @rule(who=CALLERS)
    def pop(self, who: int) -> None:
        """What a waiter's blocking pop does."""
        caller = self.callers[who]
        if caller.popped or caller.held or caller.waiter not in self.registered:
            return
        if self.granted:
            caller.popped = self.granted.pop(0)
            assert parse_grant(self.client.lpop(KEYS.grants)) == caller.popped
            assert self.tokens.get(caller.popped.place) == caller.popped.token

    @rule(who=CALLERS, last=st.booleans(), twice=st.booleans())
    def take_grant(self, who: int, last: bool, twice: bool) -> None:
        caller = self.callers[who]
        grant, caller.popped = caller.popped, None
        if grant is None:
            return
        waiter = caller.waiter if last else b""
        valid = self.tokens.get(grant.place) == grant.token
        assert self._run(caller.request.take_grant_call(grant, waiter), twice) == int(valid)
        if last:
            self._unregistered(waiter, several=caller.limit > 1 or grant.place > 1)
        caller.held = grant if valid else None

    @rule(who=CALLERS, knows_its_place=st.booleans(), twice=st.booleans())
    def release(self, who: int, knows_its_place: bool, twice: bool) -> None:
        caller = self.callers[who]
        held, caller.held = caller.held, None
        if held is None:
            return
        limit = caller.limit if held.place <= caller.limit else 0
        known = knows_its_place or not limit or held.place == 1
        keys = KEYS.at_place(held.place) if known else KEYS
        call = release_call(keys, held.token, new_token(), LONG, limit=limit)
        owned = self.tokens.get(held.place) == held.token
        passes = bool(self.registered) and held.place <= limit
        answer = self._run(call, twice)
        # Who sends twice knows that the first may have done it.
        assert answer == int(owned and (not twice or (passes and known)))
        self._plain = limit == 1
        if owned:
            self._passed_on(held.place, limit)

    @rule(who=CALLERS, members=st.integers(1, 3), twice=st.booleans())
    def watch(self, who: int, members: int, twice: bool) -> None:
        caller = self.callers[who]
        if caller.waiter not in self.registered or caller.limit == 1:
            return
        places = range(1, caller.limit + 1)
        free = [place for place in places if place not in self.tokens]
        made = free[: max(0, members - len(self.granted))]
        self._run(caller.request.watch_call(caller.waiter, members), twice)
        self._plain = False
        for grant in map(parse_grant, self.client.lrange(KEYS.grants, 0, -1)):
            if grant not in self.granted:
                assert grant.place in made
                self._next_fence(grant.fence)
                self._put(grant.place, grant.token)
                self.granted.append(grant)
        assert set(made) <= set(self.tokens)

    @rule(who=CALLERS, tries=st.booleans(), twice=st.booleans())
    def leave(self, who: int, tries: bool, twice: bool) -> None:
        caller = self.callers[who]
        if caller.held or caller.popped or caller.limit == 1:
            return
        caller.new_request()
        place = self._choose(caller.limit) if tries else None
        reply = self._run(caller.request.leave_call(caller.waiter, try_again=tries), twice)
        assert reply[0] == (place or 0) or (twice and not place)
        self._plain = False
        if reply[0]:
            self._put(reply[0], caller.request.token)
            caller.held = Grant(caller.request.token, self._next_fence(reply[1]), reply[0])
        self._unregistered(caller.waiter, several=True)

    @rule(place=st.integers(1, LIMIT))
    def vanish(self, place: int) -> None:
        """The lifetime of a holder, or of a grant and the list, is over."""
        self.client.delete(KEYS.at_place(place).lock)
        if self.tokens.pop(place, None):
            self.granted = [grant for grant in self.granted if grant.place != place]
            kept = [_element(grant) for grant in self.granted]
            self.client.delete(KEYS.grants)
            if kept:
                self.client.rpush(KEYS.grants, *kept)

    @invariant()
    def each_place_has_what_the_model_says(self) -> None:
        for place in range(1, LIMIT + 1):
            found = self.client.get(KEYS.at_place(place).lock)
            assert found == self.tokens.get(place)
        holders = [caller for caller in self.callers if caller.held]
        valid = [c for c in holders if c.held and self.tokens.get(c.held.place) == c.held.token]
        assert len({caller.held.place for caller in valid if caller.held}) == len(valid) <= LIMIT

    @invariant()
    def each_grant_on_the_list_is_valid(self) -> None:
        found = [parse_grant(element) for element in self.client.lrange(KEYS.grants, 0, -1)]
        assert found == self.granted
        for grant in found:
            assert self.tokens.get(grant.place) == grant.token

    @invariant()
    def the_index_has_the_places_that_are_taken(self) -> None:
        taken = {KEYS.at_place(place).lock for place in self.tokens}
        assert taken <= set(self.client.zrange(INDEX, 0, -1))


def _element(grant: Grant) -> bytes:
    end = b"/%d" % grant.place if grant.place > 1 else b""
    return b"%b:%d%b" % (grant.token, grant.fence, end)


def test_places_behave_as_their_model(any_client: redis.Redis) -> None:
    machine: Any = type("OfThisServer", (Places,), {"client": any_client})
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples(150),
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=checks,
        ),
    )
