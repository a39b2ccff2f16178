"""Which cells of a table the first lane builds, and which are the rest."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests import lanes

#: Two ``parametrize`` of three and four values.
CELLS = [f"{row}-{column}" for row, column in product("abc", "1234")]
THIRD = ["a-1", "a-4", "b-3", "c-2"]


@pytest.fixture(autouse=True)
def _first_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "everything", False)
    monkeypatch.setattr(lanes, "rest", False)
    for name in ("not_built", "_without_cells", "_of_first_lane"):
        monkeypatch.setattr(lanes, name, type(getattr(lanes, name))())


def table(*marks: Any, of_class: Any = None) -> Any:
    """What pytest hands to the hook ``pytest_generate_tests``; the test has ``marks``."""
    own = [mark.mark for mark in marks]
    inherited = [*own, *([of_class.mark] if of_class else [])]
    definition = SimpleNamespace(
        nodeid="tests/faults/test_x.py::test_table",
        own_markers=own,
        get_closest_marker=lambda name: next((m for m in inherited if m.name == name), None),
    )
    calls = [SimpleNamespace(id=cell, _idlist=cell.split("-"), marks=[]) for cell in CELLS]
    return SimpleNamespace(definition=definition, _calls=calls)


def built(metafunc: Any) -> list[str]:
    lanes.thin(metafunc)
    return [call.id for call in metafunc._calls]


def test_each_row_and_column_has_a_cell() -> None:
    cells = built(table())
    assert {cell[0] for cell in cells} == set("abc")
    assert {cell[2] for cell in cells} == set("1234")
    assert len(cells) == 4
    assert lanes.not_built.total() == len(CELLS) - 4


@pytest.mark.parametrize(
    ("mark", "cells"),
    [
        (pytest.mark.sample(3), THIRD),
        (pytest.mark.sample(5, 1), ["a-2", "b-3", "c-4"]),
        (pytest.mark.sample(1), CELLS),
        # Without any, pytest would build the test without parameters; ``left_out`` drops it.
        (pytest.mark.sample(0), CELLS[:1]),
        # The cells of all such tests of the file count, so these are left out later.
        (pytest.mark.sample(3, of="file"), CELLS),
    ],
)
def test_a_mark_says_it_otherwise(mark: Any, cells: list[str]) -> None:
    assert built(table(mark)) == cells
    assert bool(lanes._without_cells) is (mark.mark.args == (0,))


def test_the_mark_of_a_class_is_for_its_tests_and_not_their_cells() -> None:
    assert built(table(of_class=pytest.mark.sample(3))) == CELLS
    assert built(table(pytest.mark.sample(3), of_class=pytest.mark.sample(0))) == THIRD


def test_a_cell_may_have_a_mark() -> None:
    metafunc = table()
    metafunc._calls[5].marks.append(pytest.mark.sample(0).mark)
    assert CELLS[5] not in built(metafunc)


def test_everything_is_built_with_all_and_with_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "everything", True)
    assert built(table()) == CELLS
    monkeypatch.setattr(lanes, "rest", True)
    assert built(table(pytest.mark.sample(3))) == CELLS
    assert sorted(lanes._of_first_lane["tests/faults/test_x.py::test_table"]) == THIRD
