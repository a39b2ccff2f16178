"""The two lanes of the suite. The first runs on each occasion, and has each capability, each
invariant and one run of each fault; with ``--all`` there is more, as each night. A test that is
named (``file::test``) has all its cells.

Of a table, the first lane has so many cells that each value of each ``parametrize`` is tried once;
of a long one, each second to fifth of these, but for those of faults. ``--all`` has so many that
each two values of two ``parametrize`` meet once; ``@pytest.mark.whole`` says that a table needs the
whole product. ``@pytest.mark.sample(n)`` says what the first lane has otherwise: of a table, each
n-th cell (0: none); of a class, each n-th test; with ``of="file"``, each n-th of all such tests of
a file. A second number is the first that runs: of n classes with the same tests, each then runs
other ones. The closest mark counts, so ``sample(1)`` is for a test of such a class that always
runs.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import combinations
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

#: Whether ``--all`` or the name of a test was given; ``conftest`` sets it.
everything = False
#: Whether the name of a test was given.
is_named = False

#: Of more cells than the first number, the first lane has each n-th.
LONG = ((30, 5), (12, 4), (6, 3), (3, 2))

#: The second of the servers that many tests are run on.
IN_MEMORY = pytest.param("memory", marks=pytest.mark.sample(7, of="file"))
#: The third, only each night.
ON_FAKEREDIS = pytest.param("fakeredis", marks=pytest.mark.sample(0))


#: How many cells of each test are not built; and tests of which no cell runs.
not_built: Counter[str] = Counter()
_without_cells: set[str] = set()


def thin(metafunc: pytest.Metafunc) -> None:
    """Of a test's cells, build only those that run by its marks and theirs: to build a cell takes
    longer than to look at it, and each process builds them."""
    definition, calls = metafunc.definition, metafunc._calls
    if is_named or (everything and definition.get_closest_marker("whole")):
        return
    if everything:
        kept = {call.id for call in _covering(calls, 2)}
    else:
        kept = _of_first_lane(definition, calls)
    if calls and not kept:
        _without_cells.add(definition.nodeid)
        kept = {calls[0].id}  # Without any, the test would be built without parameters.
    not_built[definition.nodeid] = len(calls) - len(kept)
    calls[:] = [call for call in calls if call.id in kept]


def _of_first_lane(definition: Any, calls: list[Any]) -> set[str]:
    closest = definition.get_closest_marker("sample")
    own = closest if closest in definition.own_markers else None
    cells, kept, seen = [], set(), 0
    for call in calls:
        mark = own or next((mark for mark in call.marks if mark.name == "sample"), closest)
        if mark is None:
            cells.append(call)
        elif mark.kwargs.get("of") == "file" or (mark is not own and mark is closest):
            kept.add(call.id)  # Counted with the cells of other tests, by ``left_out``.
        else:
            kept |= {call.id} if _runs(mark, seen) else set()
            seen += 1
    if len(cells) > 1:
        cells = _shortened(_covering(cells, 1), definition.nodeid)
    return kept | {call.id for call in cells}


def left_out(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of what is built, that which the first lane leaves out: by the marks of a class, a module or
    a file."""
    if everything:
        return []
    seen: Counter[str] = Counter()
    left_out = []
    for item in items:
        table, cell = item.nodeid.partition("[")[:2]
        for node, mark in item.iter_markers_with_node("sample"):
            by_file = mark.kwargs.get("of") == "file"
            if node is item and cell and not by_file:
                break  # See ``thin``.
            counted = str(item.path) if by_file else node.nodeid.partition("[")[0]
            if not _runs(mark, seen[counted]):
                left_out.append(item)
            seen[counted] += 1
            break  # The closest one counts.
        if table in _without_cells:
            left_out.append(item)
    return left_out


def _runs(mark: pytest.Mark, number: int) -> bool:
    each, first = (*mark.args, 0)[:2]
    return bool(each) and (number - first) % each == 0


def _covering(cells: list[Any], axes: int) -> list[Any]:
    """As few cells as have each combination of values of so many ``parametrize`` once, each value
    as often as another."""
    values = {cell.id: list(enumerate(cell._idlist)) for cell in cells}
    met = {each: {*combinations(own, min(axes, len(own)))} for each, own in values.items()}
    missing = set().union(*met.values())
    if len(missing) == len(cells):
        return cells
    used: Counter[tuple[int, str]] = Counter()
    chosen = []

    def merit(cell: Any) -> tuple[int, int]:
        return len(met[cell.id] & missing), -sum(used[value] for value in values[cell.id])

    while missing:
        chosen.append(cell := max(cells, key=merit))
        missing -= met[cell.id]
        used.update(values[cell.id])
    return chosen


def _shortened(cells: list[Any], test: str) -> list[Any]:
    each = next((each for number, each in LONG if len(cells) > number), 1)
    if test.startswith("tests/faults/"):
        return cells
    return cells[zlib.crc32(f"{test}[{cells[0].id}]".encode()) % each :: each]


def some(cases: Iterable[T], each: int) -> list[T]:
    """Each n-th of the cases within one test; with ``--all``, all of them. Each test begins with
    another one, the same in each run."""
    first = zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].encode())
    return list(cases) if everything else list(cases)[first % each :: each]


def examples(number: int) -> int:
    """How often something is tried at random; with ``--all``, ``number`` times."""
    return number if everything else max(1, number // 10)
