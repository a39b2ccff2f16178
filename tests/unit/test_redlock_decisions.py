"""Redlock's decisions in simulated time: seeded delays, servers that are away for a while, clocks
that run apart. What it asks for is done by the simulation; what it decides must keep the
invariants, whatever the order in which things happen."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import redis
from redis.exceptions import TimeoutError as RedisTimeoutError

from django_redis_lock import Redlock
from django_redis_lock.contrib import redlock
from django_redis_lock.contrib.redlock import votes
from django_redis_lock.contrib.redlock.votes import VOTE
from django_redis_lock.protocol import acquisition
from django_redis_lock.protocol.script import Call
from django_redis_lock.transport import server_of

SERVERS = 5
LIFETIME = 1.0
CLIENTS = [redis.Redis(port=7000 + n) for n in range(SERVERS)]
PLACES = {server_of(client): place for place, client in enumerate(CLIENTS)}


class Ask(NamedTuple):
    """A step of the lock, which the simulation does; so are the other two."""

    calls: Mapping[int, Call]
    patience: float


class Queue(NamedTuple):
    place: int
    request: Any


class Pause(NamedTuple):
    seconds: float


class World:
    """Everything there is, and the order in which it happens.

    Attributes:
        now: true time in seconds, which the clocks of the contenders show.
        reigns: when each of them held the lock: from, until, fence.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 100.0
        self.servers = [Server(self) for _ in range(SERVERS)]
        self.reigns: list[tuple[float, float, int]] = []
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), do))

    def run(self) -> None:
        for _ in range(200_000):
            if not self._events:
                return
            self.now, _, do = heapq.heappop(self._events)
            do()
        raise AssertionError("it goes on for ever")

    def release_later(self, whose: Any, release: Call, *_: Any, **__: Any) -> None:
        """As the keeper does."""
        server = self.servers[PLACES[whose]]

        def again() -> None:
            if server.away_until > self.now:
                self.after(0.1, again)
            else:
                server.run(release)

        self.after(self.delay() + 0.05, again)

    def delay(self) -> float:
        """Of one message; now and then one that is longer than anybody waits."""
        return self.random.expovariate(500) + (0.3 if self.random.random() < 0.01 else 0.0)


class Server:
    """What the scripts do. Its clock runs almost a hundredth too fast or too slow."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rate = world.random.choice((0.991, 1.0, 1.009, 1.009))
        self.offset = world.random.uniform(-1000, 1000)
        self.away_until = 0.0
        self.token, self.ends, self.fence = b"", 0.0, 0
        self.queue: list[tuple[Any, float, Callable[[Any], None]]] = []

    @property
    def clock(self) -> float:
        return self.world.now * self.rate + self.offset

    @property
    def holder(self) -> bytes:
        return self.token if self.clock < self.ends else b""

    def run(self, call: Call) -> Any:
        microseconds = int((self.clock + 2000) * 1e6)
        if call.script is not VOTE:
            token = call.args[0]
            if self.holder != token:
                return 0
            self.token = b""
            self.pass_on()
            return 1
        token, lifetime, _, floor = call.args
        if self.holder not in (b"", token):
            return [0, int((self.ends - self.clock) * 1000), microseconds]
        if self.holder != token:
            self.fence = max(self.fence + 1, microseconds)
        self.token, self.ends = token, self.clock + int(lifetime) / 1000
        self.fence = max(self.fence, int(floor))
        return [1, self.fence, microseconds]

    def pass_on(self) -> None:
        """To the first in the queue, as a grant, which becomes his at once."""
        while self.queue and not self.holder:
            request, deadline, emit = self.queue.pop(0)
            if self.world.now < deadline:
                self.token, self.ends = request.token, self.clock + request.lifetime
                self.fence = max(self.fence + 1, int((self.clock + 2000) * 1e6))
                self.world.after(self.world.delay(), lambda emit=emit: emit(True))

    def wait(self, request: Any, deadline: float, emit: Callable[[Any], None]) -> None:
        self.queue.append((request, deadline, emit))
        self.look()

    def look(self) -> None:
        """As the keepers of those who wait do: a holder's lifetime may be over."""
        self.pass_on()
        if self.queue:
            left = (self.ends - self.clock) / self.rate
            self.world.after(min(max(left, 0.0005), 0.05), self.look)


class Contender:
    """Takes the lock, holds it, releases it; a few times."""

    def __init__(self, world: World, times: int) -> None:
        self.world, self.times, self.asked = world, times, 0
        self.lock = Redlock(CLIENTS, "simulated", timeout=LIFETIME, server_timeout=0.1)
        self.lock._ask_servers = Ask
        self.lock._wait_at = Queue
        self.lock._sleep = Pause
        world.after(world.random.random() * 0.01, self.begin)

    def begin(self) -> None:
        if self.times:
            self.times -= 1
            request, _ = self.lock._request(None, True, None, None)
            self.steps = self.lock._obtain(request, None)
            self.go_on(lambda: next(self.steps))

    def go_on(self, move: Callable[[], Any]) -> None:
        try:
            step = move()
        except StopIteration as end:
            self.hold(end.value)
            return
        except redis.exceptions.RedisError:  # TooFewServers
            self.world.after(0.05, self.begin)
            self.times += 1
            return
        self.asked += 1
        if isinstance(step, Ask):
            self.ask(step.calls, step.patience, self.sent)
        elif isinstance(step, Queue):
            self.queue(step)
        else:
            self.world.after(step.seconds, lambda: self.sent(None))

    def sent(self, came: Any) -> None:
        self.go_on(lambda: self.steps.send(came))

    def ask(self, calls: Any, patience: float, emit: Callable[[Any], None]) -> None:
        answers = {p: RedisTimeoutError("no answer") for p in calls}
        until, last = self.world.now + patience, 0.0
        for place, call in calls.items():
            there, back = self.world.delay(), self.world.delay()
            server = self.world.servers[place]
            if server.away_until > self.world.now + there:
                last = patience
                continue

            def arrive(place: int = place, call: Call = call, back: float = back) -> None:
                reply = self.world.servers[place].run(call)
                if self.world.now + back <= until:
                    answers[place] = reply

            self.world.after(there, arrive)
            last = max(last, min(there + back, patience))
        self.world.after(last + 1e-9, lambda: emit(answers))

    def queue(self, step: Queue) -> None:
        server, done = self.world.servers[step.place], []

        def emit(came: Any) -> None:
            if not done:
                done.append(came)
                self.sent(came)

        def fail() -> None:
            if not done:
                done.append(None)
                self.go_on(lambda: self.steps.throw(RedisTimeoutError("the server went away")))

        server.wait(step.request, self.world.now + 3600, emit)
        if server.away_until > self.world.now:
            self.world.after(0.1, fail)

    def hold(self, elected: Any) -> None:
        began, most = self.world.now, elected.votes
        deadline = sorted(most)[-(SERVERS // 2 + 1)]
        wanted = self.world.random.choice((0.001, 0.01, 0.1, 2.0))
        until = min(began + wanted, deadline)
        self.world.reigns.append((began, until, elected.fence))
        release = self.lock._release_call(elected.token, None)
        self.world.after(
            max(0.0, until - began),
            lambda: self.ask(dict.fromkeys(range(SERVERS), release), 0.1, self.released),
        )
        self.token, self.release = elected.token, release

    def released(self, answers: Any) -> None:
        for place, answer in answers.items():
            if isinstance(answer, Exception):
                self.world.release_later(server_of(CLIENTS[place]), self.release)
        self.world.after(self.world.random.random() * 0.01, self.begin)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], World]]:
    def make(seed: int) -> World:
        world = World(seed)
        clock = SimpleNamespace(monotonic=lambda: world.now)
        for module in (acquisition, redlock, votes):
            monkeypatch.setattr(module, "time", clock)
        chance = SimpleNamespace(
            token_hex=lambda n: f"{world.random.getrandbits(8 * n):0{2 * n}x}",
            randbelow=world.random.randrange,
        )
        for module in (acquisition, redlock):
            monkeypatch.setattr(module, "secrets", chance, raising=False)
        monkeypatch.setattr(redlock, "release_later", world.release_later)
        # What it learns of the servers' clocks is of this world only.
        redlock._clocks.clear()
        redlock._fences.clear()
        return world

    return make


def check(world: World, times: int) -> None:
    reigns = sorted(world.reigns)
    assert len(reigns) == times
    for (_, until, fence), (began, _, later) in itertools.pairwise(reigns):
        assert until <= began, "two hold it at once"
        assert fence < later, "a later fence is no greater"


@pytest.mark.parametrize("seed", range(12))
def test_eight_contenders(simulated: Callable[[int], World], seed: int) -> None:
    world = simulated(seed)
    crowd = [Contender(world, 4) for _ in range(8)]
    world.run()
    check(world, 8 * 4)
    assert sum(c.asked for c in crowd) < 8 * 4 * 60, "they keep each other from it"
    world.now += 10 * LIFETIME
    assert not any(server.holder for server in world.servers)


def test_servers_lose_their_data_and_their_clocks_are_set_back(
    simulated: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """This process knows what the last fence was."""
    world = simulated(1)
    monkeypatch.setattr(world, "delay", lambda: 0.0)
    monkeypatch.setattr(world.random, "choice", min)  # It holds the lock for a millisecond.
    contender = Contender(world, 3)

    def released(answers: Any) -> None:
        for server in world.servers:
            server.offset -= 0.005
            server.fence = 0
        contender.begin()

    monkeypatch.setattr(contender, "released", released)
    world.run()
    check(world, 3)


def test_an_acquisition_takes_one_round(
    simulated: Callable[[int], World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the servers' clocks are known: all servers then store the same fence."""
    world = simulated(1)
    monkeypatch.setattr(world, "delay", lambda: 0.0005)
    monkeypatch.setattr(world.random, "choice", lambda seconds: 0.1)
    contender = Contender(world, 4)
    world.run()
    check(world, 4)
    assert contender.asked == 1 + 4


# In the last four a release that came late once took back the vote of the round after it.
@pytest.mark.parametrize("seed", [*range(12), 2018, 2060, 2126, 2320])
def test_while_a_minority_is_away(simulated: Callable[[int], World], seed: int) -> None:
    world = simulated(seed)
    _crowd = [Contender(world, 4) for _ in range(4)]

    def go_away(round: int) -> None:
        for server in world.random.sample(world.servers, 2):
            server.away_until = world.now + 0.5
        if round:
            world.after(0.6, lambda: go_away(round - 1))

    world.after(0.005, lambda: go_away(5))
    world.run()
    check(world, 4 * 4)
