"""Locks with a limit: what a place costs while one is free, and how processes that want more places
than there are get theirs.

Beside it what one can write with redis-py: a sorted set of holders, polled each millisecond; and a
list of tokens, the shortest way to pass a place on, whose places are gone when their holders crash.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import redis

from django_redis_lock import Lock

from ..bench import Bench, in_turns
from ..contenders import BARE, load_bare_script, make_lock
from ..figures import jain, median, median_ratio, percentile
from ..results import OURS, Result, Target
from ..workers import Crew, Seat
from .handover import FAIR, FAIRNESS, HOLD, OF_QUEUE, P99, PROCESSES, Turn, turns_with

__all__ = ["measure"]

FREE_LIMIT, RATIO, MOST_RATIO = 5, "ratio to bare", 1.25
LIMIT = 4
USED = "places used %"
MOSTLY_USED = 97.0
PLAIN = f"{OURS}, limit=1"
SORTED_SET = "a sorted set, polled"
TOKENS = "a list of tokens"
#: Seconds between two looks at the places.
LOOK_EVERY = 0.004


class SortedSet:
    """A semaphore with a member for each holder, whose score is when its lifetime ends."""

    POLL = 0.001
    ACQUIRE = """
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
    if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
    return redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
    """

    def __init__(self, client: redis.Redis, name: str, limit: int, timeout: int = 10) -> None:
        self._client, self._name, self._terms = client, name, (limit, timeout * 1000)
        self._acquire = client.register_script(self.ACQUIRE)

    def acquire(self) -> None:
        self._token = secrets.token_hex(16)
        while not self._acquire([self._name], [self._token, *self._terms]):
            time.sleep(self.POLL)

    def release(self) -> None:
        self._client.zrem(self._name, self._token)


class Tokens:
    """A semaphore of tokens in a list: BLPOP takes one, RPUSH gives it back. It is the least that a
    fair semaphore costs. Nothing bounds how long a holder keeps its token."""

    def __init__(self, client: redis.Redis, name: str, limit: int) -> None:
        self._client, self._name = client, name
        if client.set(f"{name}:made", 1, nx=True):
            client.rpush(name, *range(limit))

    def acquire(self) -> None:
        _, self._token = self._client.blpop([self._name])

    def release(self) -> None:
        self._client.rpush(self._name, self._token)


def _ours(client: redis.Redis, name: str, limit: int) -> Any:
    return Lock(client, name, 10, limit=limit)


KINDS: dict[str, Callable[[redis.Redis, str, int], Any]] = {
    OURS: _ours,
    SORTED_SET: SortedSet,
    TOKENS: Tokens,
}


def measure(bench: Bench) -> list[Result]:
    return [*bench.everywhere(lambda: _free(bench)), _contended(bench)]


def _free(bench: Bench) -> Result:
    result = Result(
        f"One process, no waiters, limit={FREE_LIMIT}: acquire and release",
        ("µs", RATIO),
        note="Each acquisition looks at all places.",
    )
    bench.empty()
    load_bare_script(bench.client)
    name = "bench:places:free"
    locks = {
        BARE: make_lock(BARE, bench.client, f"{name}:bare"),
        SORTED_SET: SortedSet(bench.client, f"{name}:set", FREE_LIMIT),
        TOKENS: Tokens(bench.client, f"{name}:tokens", FREE_LIMIT),
        PLAIN: _ours(bench.client, f"{name}:plain", 1),
        OURS: _ours(bench.client, name, FREE_LIMIT),
    }
    rounds = bench.pick(quick=30, full=300)
    found = in_turns(rounds, {kind: partial(_cycle, lock) for kind, lock in locks.items()})
    for kind, times in found.items():
        result.rows[kind] = (median(times), median_ratio(times, found[BARE]))
    ratio = result.number(OURS, RATIO)
    aim = f"at most {MOST_RATIO:.2f} × two bare trips"
    result.targets = [Target.at_most(aim, ratio, MOST_RATIO)]
    return result


def _cycle(lock: Any, count: int = 10) -> float:
    """The microseconds of one cycle."""
    began = time.perf_counter()
    for _ in range(count):
        lock.acquire()
        lock.release()
    return (time.perf_counter() - began) / count * 1e6


def _contended(bench: Bench) -> Result:
    result = Result(
        f"{PROCESSES} processes after {LIMIT} places, each held for {HOLD * 1000:.0f} ms",
        ("wait p50 ms", P99, "longest ms", FAIRNESS, USED, "turns/s"),
        note="A place is used while Redis has its key: it has a holder, or was just passed on. If "
        f"no time were lost, each process would wait {_queue_ms():.0f} ms.",
    )
    bench.empty()
    seconds = bench.pick(quick=0.7, full=2.0)
    with Crew(PROCESSES) as crew:
        found = in_turns(
            bench.pick(quick=1, full=5),
            {kind: partial(_round, bench, crew, kind, seconds) for kind in KINDS},
        )
    for kind, rounds in found.items():
        result.rows[kind] = tuple(median(column) for column in zip(*rounds, strict=True))
    queue = OF_QUEUE * _queue_ms()
    result.targets = [
        Target.at_least(f"fairness at least {FAIR}", result.number(OURS, FAIRNESS), FAIR),
        Target.at_most(
            f"wait p99 at most {OF_QUEUE} × (waiters / places × hold), ms",
            result.number(OURS, P99),
            queue,
        ),
        Target.at_least(
            f"places used at least {MOSTLY_USED:g} %", result.number(OURS, USED), MOSTLY_USED
        ),
    ]
    return result


def _queue_ms() -> float:
    return (PROCESSES - LIMIT) / LIMIT * HOLD * 1000


def _round(bench: Bench, crew: Crew, kind: str, seconds: float) -> tuple[float, ...]:
    """The columns of one round."""
    looks: list[tuple[float, int]] = []
    name = f"bench:places:{kind}"

    def look() -> None:
        while not crew.ended():
            began = time.monotonic()
            looks.append((began, _places_used(bench.client, kind, name)))
            time.sleep(LOOK_EVERY)

    turns: list[list[Turn]] = crew.run(take_turns, bench.url, kind, name, seconds, meanwhile=look)
    waits = [(turn.got - turn.asked) * 1000 for mine in turns for turn in mine]
    return (
        percentile(waits, 50) or 0.0,
        percentile(waits, 99) or 0.0,
        max(waits),
        jain([len(mine) for mine in turns]),
        _percent_used(looks, turns),
        len(waits) / seconds,
    )


def _places_used(client: redis.Redis, kind: str, name: str) -> int:
    if kind == SORTED_SET:
        return int(client.zcard(name))
    if kind == TOKENS:
        return LIMIT - int(client.llen(name))
    keys = _ours(client, name, LIMIT).keys
    return int(client.exists(*(keys.at_place(place).lock for place in range(1, LIMIT + 1))))


def _percent_used(looks: Sequence[tuple[float, int]], turns: Sequence[Sequence[Turn]]) -> float:
    """How many of the places were used, while all processes wanted one."""
    first, last = max(mine[0].got for mine in turns), min(mine[-1].got for mine in turns)
    found = [used for at, used in looks if first <= at <= last]
    return 100 * sum(found) / (LIMIT * len(found)) if found else 0.0


def take_turns(seat: Seat, url: str, kind: str, name: str, seconds: float) -> list[Turn]:
    with redis.Redis.from_url(url) as client:
        return turns_with(KINDS[kind](client, name, LIMIT), client, seat, seconds)
