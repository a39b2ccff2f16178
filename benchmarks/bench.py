"""What a measurement is given, and how it takes turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from .placement import pinned, placements
from .results import Result

__all__ = ["Bench", "in_turns"]

T = TypeVar("T")


@dataclass
class Bench:
    """One run.

    Attributes:
        url: an empty Redis for this run alone.
        server: its process.
        quick: see that it works; the figures are rough then.
    """

    url: str
    server: int
    quick: bool = False
    client: redis.Redis = field(init=False)

    def __post_init__(self) -> None:
        self.client = redis.Redis.from_url(self.url)

    def pick(self, quick: T, full: T) -> T:
        return quick if self.quick else full

    def everywhere(self, measure: Callable[[], Result]) -> list[Result]:
        """What ``measure`` gives with each placement of the server and its clients, or, in a quick
        run, with one."""
        return list(self._everywhere(measure)) or [measure()]

    def _everywhere(self, measure: Callable[[], Result]) -> Iterator[Result]:
        for name in list(placements())[-1 if self.quick else 0 :]:
            with pinned(self.server, name):
                result = measure()
            result.title += f"; {name}"
            yield result

    def empty(self) -> None:
        """Start from an empty Redis that knows its scripts still."""
        self.client.flushall()


def in_turns(rounds: int, contenders: Mapping[str, Callable[[], Any]]) -> dict[str, list[Any]]:
    """What each contender gives in each round.

    Within a round they take turns, in another order each time: what else goes on on this machine
    meets all of them alike, and so does what the one before leaves behind.
    """
    found: dict[str, list[Any]] = {name: [] for name in contenders}
    order, chance = list(contenders), random.Random(rounds)
    for _ in range(rounds):
        chance.shuffle(order)
        for name in order:
            found[name].append(contenders[name]())
    return found
