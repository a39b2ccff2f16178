"""The two lanes of the suite. The first runs on each occasion, and has each capability, each
invariant and one run of each fault; with ``--all`` everything runs, as each night. So does a test
that is named (``file::test``). With ``--rest``, what ``--all`` has and the first lane has not.

Of a table, so many cells run that each row and each column has one; of a long one, each second to
fifth of these, but for those of faults. ``@pytest.mark.sample(n)`` says it otherwise: of a table,
it runs each n-th cell (0: none); of a class, each n-th test; with ``of="file"``, each n-th of all
such tests of a file. Where n and the length of a row have no common factor, each row and each
column has cells that run. A second number is the first that runs: of n classes with the same
tests, each then runs other ones. The closest mark counts, so ``sample(1)`` is for a test of such a
class that always runs.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

#: Whether ``--all``, ``--rest`` or the name of a test was given; ``conftest`` sets it.
everything = False

#: Of more cells than the first number, each n-th runs.
LONG = ((30, 5), (12, 4), (6, 3), (3, 2))

#: The second of the servers that many tests are run on.
IN_MEMORY = pytest.param("memory", marks=pytest.mark.sample(7, of="file"))


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that the first lane leaves out, by their marks."""
    seen: Counter[str] = Counter()
    tables: dict[str, list[pytest.Item]] = {}
    left_out = []
    for item in items:
        for node, mark in item.iter_markers_with_node("sample"):
            by_file = mark.kwargs.get("of") == "file"
            table = str(item.path) if by_file else node.nodeid.partition("[")[0]
            each, first = (*mark.args, 0)[:2]
            if not each or (seen[table] - first) % each:
                left_out.append(item)
            seen[table] += 1
            break  # The closest one counts.
        else:
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cells in tables.values():
        if len(cells) > 1:
            left_out += {*cells} - {*_shortened(_each_row_and_column(cells))}
    return left_out


def has_a_size(item: pytest.Item) -> bool:
    """Whether the test may do more with ``--all``: as all of a file that uses ``some``."""
    return not {"lanes", "some", "examples"}.isdisjoint(vars(getattr(item, "module", item)))


def _each_row_and_column(cells: list[pytest.Item]) -> list[pytest.Item]:
    """As few of them as have each value of each ``parametrize`` once, each as often as another."""
    values = {cell: {*enumerate(cell.callspec._idlist)} for cell in cells}  # type: ignore[attr-defined]  # of tests with parameters
    missing = set().union(*values.values())
    used: Counter[tuple[int, str]] = Counter()
    chosen = []

    def merit(cell: pytest.Item) -> tuple[int, int]:
        return len(values[cell] & missing), -sum(used[value] for value in values[cell])

    while missing:
        chosen.append(cell := max(cells, key=merit))
        missing -= values[cell]
        used.update(values[cell])
    return chosen


def _shortened(cells: list[pytest.Item]) -> list[pytest.Item]:
    each = next((each for number, each in LONG if len(cells) > number), 1)
    if "tests/faults/" in cells[0].nodeid:
        return cells
    return cells[zlib.crc32(cells[0].nodeid.encode()) % each :: each]


def some(cases: Iterable[T], each: int) -> list[T]:
    """Each n-th of the cases within one test; with ``--all``, all of them. Each test begins with
    another one, the same in each run."""
    first = zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].encode())
    return list(cases) if everything else list(cases)[first % each :: each]


def examples(number: int) -> int:
    """How often something is tried at random; with ``--all``, ``number`` times."""
    return number if everything else max(1, number // 10)
