"""The two lanes of the suite. The first runs on each occasion, and has each capability, each
invariant and one run of each fault; with ``--all`` everything runs, as each night. So does a test
that is named (``file::test``).

A table of many cells runs each second or third, but for those of faults, of which each cell runs
that has no mark. ``@pytest.mark.sample(n)`` leaves cells out: of a table, it runs each n-th (0:
none); of a class, each n-th test; with ``of="file"``, each n-th of all such tests of a file. Where
n and the length of a row have no common factor, each row and each column has cells that run. A
second number is the first that runs: of n classes with the same tests, each then runs other ones.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

import pytest

T = TypeVar("T")

#: Whether ``--all`` or the name of a test was given; ``conftest`` sets it.
everything = False

#: Of a table of more cells than the first number, each n-th runs.
LONG = ((30, 3), (12, 2))

#: The second of the servers that many tests are run on.
IN_MEMORY = pytest.param("memory", marks=pytest.mark.sample(3, of="file"))


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Those that do not run, by their marks."""
    if everything:
        return []
    seen: Counter[str] = Counter()
    cells = Counter(map(_table, items))
    left_out = []
    for item in items:
        if _is_left_out_of(cells[_table(item)], item):
            left_out.append(item)
            continue
        for node, mark in item.iter_markers_with_node("sample"):
            by_file = mark.kwargs.get("of") == "file"
            table = str(item.path) if by_file else node.nodeid.partition("[")[0]
            each, first = (*mark.args, 0)[:2]
            if not each or (seen[table] - first) % each:
                left_out.append(item)
            seen[table] += 1
            break  # The closest one counts.
    return left_out


def _table(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _is_left_out_of(cells: int, item: pytest.Item) -> bool:
    """By its name, and not by its number: each row and each column of a table has cells that run,
    whatever its form."""
    if "tests/faults/" in item.nodeid or item.get_closest_marker("sample"):
        return False
    each = next((each for number, each in LONG if cells > number), 1)
    return bool(zlib.crc32(item.nodeid.encode()) % each)


def some(cases: Iterable[T], each: int) -> list[T]:
    """Each n-th of the cases within one test; with ``--all``, all of them. Each test begins with
    another one, the same in each run."""
    first = zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].encode())
    return list(cases) if everything else list(cases)[first % each :: each]


def examples(number: int) -> int:
    """How often something is tried at random; with ``--all``, ``number`` times."""
    return number if everything else number // 4
