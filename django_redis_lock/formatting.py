"""Durations as people read them: once for the admin, the commands and the charts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from django.utils.translation import gettext_noop


@dataclass(frozen=True)
class DurationFormat:
    """The patterns of one language, which may be lazy translations.

    Attributes:
        pairs: for less than a second, seconds, minutes, hours and days; from minutes on with the
            next smaller unit.
        units: of one number in µs, ms, s, min, h and d.
        number: formats a number, given with a decimal point.
    """

    pairs: Sequence[Any]
    units: Sequence[Any]
    number: Callable[[str], str] = str

    def duration(self, seconds: float) -> str:
        """In the two largest units: ``4 min 12 s``."""
        whole = int(min(seconds, 1e12))
        pattern = self.pairs[sum(whole >= limit for limit in (1, 60, 3600, 86400))]
        return str(pattern) % {
            "days": whole // 86400,
            "hours": whole // 3600 % 24,
            "minutes": whole // 60 % 60,
            "seconds": whole % 60,
        }

    def brief(self, seconds: float) -> str:
        """In the largest unit, for counts and choices: ``3 min``."""
        whole = int(min(seconds, 1e12))
        for size, unit in ((86400, 5), (3600, 4), (60, 3)):
            if whole >= size:
                return self._counted(str(whole // size), unit)
        return self.duration(whole)

    def measured(self, seconds: float) -> str:
        """With three digits below a minute: ``250 µs``, ``2.5 ms``, ``2 min 1 s``."""
        if seconds >= 59.95:
            whole = round(seconds)
            unit = next(size for size in (86400, 3600, 60) if whole >= size)
            return self.duration(whole) if whole % unit else self.brief(whole)
        unit = (seconds >= 0.9995e-3) + (seconds >= 0.9995)
        amount = seconds * (1e6, 1e3, 1)[unit]
        return self._counted(f"{amount:.0f}" if amount >= 99.95 else f"{amount:.3g}", unit)

    def _counted(self, number: str, unit: int) -> str:
        return str(self.units[unit]) % {"n": self.number(number)}


ENGLISH = DurationFormat(
    (
        gettext_noop("under 1 s"),
        gettext_noop("%(seconds)d s"),
        gettext_noop("%(minutes)d min %(seconds)d s"),
        gettext_noop("%(hours)d h %(minutes)d min"),
        gettext_noop("%(days)d d %(hours)d h"),
    ),
    (
        gettext_noop("%(n)s µs"),
        gettext_noop("%(n)s ms"),
        gettext_noop("%(n)s s"),
        gettext_noop("%(n)s min"),
        gettext_noop("%(n)s h"),
        gettext_noop("%(n)s d"),
    ),
)
