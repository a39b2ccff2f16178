"""From many numbers to a few."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

__all__ = ["best", "jain", "median", "median_known", "median_ratio", "percentile"]


def percentile(values: Iterable[float], percent: float) -> float | None:
    """The smallest of ``values`` that ``percent`` % of them do not exceed; None of none."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def median_known(values: Iterable[float | None]) -> float | None:
    """The median of what is known; None if nothing is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def jain(shares: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all shares are equal, 1/n if one has everything."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the rounds' ratios: steadier than the ratio of the medians, because what
    disturbs a round disturbs both."""
    return median(value / against for value, against in zip(values, base, strict=True))


def best(values: Iterable[float | None], *, highest: bool = False) -> float | None:
    """The best of what peers reach; None if no peer is there."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return max(known) if highest else min(known)
