"""The figures of one group as a process counts them, and as Redis stores them: in one list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: The group that counts the events of all groups above a limit.
OTHER = "other"

#: Upper bounds of the classes of waits, holds and computations, in seconds; the last class has
#: none. After a change of them, the stored figures of the last day are wrong.
BOUNDS = (
    *(0.0001, 0.00016, 0.00025, 0.0004, 0.00063, 0.001, 0.0016, 0.0025, 0.004, 0.0063),
    *(0.01, 0.016, 0.025, 0.04, 0.063, 0.1, 0.16, 0.25, 0.4, 0.63, 1.0, 1.6, 2.5, 4.0, 6.3),
    *(10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 180.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0),
)
#: Upper bounds of the exporters' histogram buckets. They are fewer, because each is a time series
#: for each group, and round, because queries and alerts name them.
EXPORTED_BOUNDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
CLASSES = len(BOUNDS) + 1

# Places in the list of one group's figures.
CONTENDED, TIMED_OUT, REJECTED, LOST, COMPUTED, FAILED, SHARED, STALE, REFRESH_FAILED = range(9)
# A distribution is the sum in microseconds, the largest in microseconds, then the classes.
WAITS, HOLDS, COMPUTING = (9 + n * (2 + CLASSES) for n in range(3))
FALLBACKS = 9 + 3 * (2 + CLASSES)
WITHOUT_REDIS = FALLBACKS + 1
CRASHED = WITHOUT_REDIS + 1
HITS, STALE_HITS, MISSES = range(CRASHED + 1, CRASHED + 4)
_LENGTH = MISSES + 1
_LARGEST = frozenset(index + 1 for index in (WAITS, HOLDS, COMPUTING))


class Period(NamedTuple):
    """``buckets`` of ``width`` seconds each: one more than fill the period, because the last
    one is incomplete."""

    width: int
    buckets: int


PERIODS = {"hour": Period(300, 13), "day": Period(3600, 25)}


def new() -> list[int]:
    return [0] * _LENGTH


def add(figures: list[int], more: Iterable[int]) -> None:
    for index, number in enumerate(more):
        if number and index < _LENGTH:
            if index in _LARGEST:
                figures[index] = max(figures[index], number)
            else:
                figures[index] += number


def pack(figures: list[int]) -> bytes:
    """As Redis stores them; ``m`` marks a number of which the largest counts, not the sum."""
    return b" ".join(
        b"m%d" % number if index in _LARGEST else b"%d" % number
        for index, number in enumerate(figures)
    )


def unpack(stored: bytes) -> list[int]:
    return [int(number.lstrip(b"m")) for number in stored.split()]


def average(figures: list[int], begins: int) -> float | None:
    """Of the distribution that begins there, in seconds; None without samples."""
    count = sum(figures[begins + 2 : begins + 2 + CLASSES])
    return figures[begins] / 1e6 / count if count else None
