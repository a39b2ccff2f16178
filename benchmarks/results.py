"""What a measurement hands back."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["OURS", "Cell", "Result", "Target"]

#: The name under which this package takes part.
OURS = "django_redis_lock"

Cell = float | str | None


@dataclass(frozen=True)
class Target:
    """What was aimed at.

    Attributes:
        aim: in words.
        reached: what it came to, in words.
        met: None where it cannot be said, because a peer is not installed, say.
    """

    aim: str
    reached: str
    met: bool | None

    @classmethod
    def at_most(cls, aim: str, value: float | None, limit: float | None) -> Target:
        return cls._judged(aim, value, limit, 1)

    @classmethod
    def at_least(cls, aim: str, value: float | None, limit: float | None) -> Target:
        return cls._judged(aim, value, limit, -1)

    @classmethod
    def _judged(cls, aim: str, value: float | None, limit: float | None, sign: int) -> Target:
        if value is None or limit is None:
            return cls(aim, "cannot be said", None)
        return cls(aim, f"{value:.4g}, limit {limit:.4g}", sign * value <= sign * limit)


@dataclass
class Result:
    """A table: one row for each contender.

    Attributes:
        columns: heads of the columns after the first, which names the contender; with their units.
        rows: contender to its cells.
        note: what one must know to read the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: dict[str, tuple[Cell, ...]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    note: str = ""

    def cell(self, contender: str, column: str) -> Cell:
        """None also for a contender that took no part."""
        row = self.rows.get(contender)
        return None if row is None else row[self.columns.index(column)]

    def number(self, contender: str, column: str) -> float | None:
        cell = self.cell(contender, column)
        return cell if isinstance(cell, (int, float)) else None

    def peers(self, column: str, *others: str) -> list[float]:
        """The numbers in ``column`` of all but ours and ``others``."""
        apart = (OURS, *others)
        numbers = (self.number(name, column) for name in self.rows if name not in apart)
        return [number for number in numbers if number is not None]
