"""The mutants of the Lua scripts and of Python: that there are some of each script and module, and
that they are run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from django_redis_lock.protocol import Script, lock_scripts
from tests.model import mutations_python
from tests.model.mutations import Workshop, blocks, files_for, mutants


@pytest.mark.sample(7)
@pytest.mark.parametrize("block", blocks(), ids=lambda block: block.name)
def test_each_script_has_mutants_and_tests_to_catch_them(block) -> None:
    found = mutants(block)
    assert found or len(block.lines) <= 3, "a longer script without anything to change?"
    assert files_for(block)
    for mutant in found:
        assert mutant.number in block.lines
        assert mutant.before != mutant.after
    sample = mutants(block, most=10)
    assert len(sample) == min(10, len(found))
    assert sample == mutants(block, most=10)


def test_all_scripts_are_found() -> None:
    known = {n for n, value in vars(lock_scripts).items() if isinstance(value, Script)}
    assert known <= {block.name for block in blocks()}
    shared = next(block for block in blocks() if block.name == "_REGISTER")
    assert {"ACQUIRE", "WATCH"} <= shared.scripts
    first = next(block for block in blocks() if block.name == "ACQUIRE_FIRST")
    assert first.scripts == {"ACQUIRE"}


@pytest.mark.sample(0)
@pytest.mark.slow
def test_a_mutant_is_caught_and_the_checkout_stays_as_it_is(tmp_path: Path) -> None:
    release = next(block for block in blocks() if block.name == "RELEASE")
    before = release.path.read_bytes()
    mutant = mutants(release)[-1]
    assert "return 0" in mutant.after
    workshop = Workshop(tmp_path, timeout=120)
    assert workshop.run(mutant).caught_by
    assert release.path.read_bytes() == before
    assert not workshop.run_unchanged([str(Path("tests", "unit", "test_owner.py"))])


def test_mutants_of_python_are_python() -> None:
    name = "locking.waiting"
    path = mutations_python.modules()[name]
    lines = path.read_text().splitlines()
    found = mutations_python.mutants(name, path)
    assert {"drop", "condition", "comparison", "constant"} <= {mutant.kind for mutant in found}
    for mutant in found[::10]:
        assert mutant.before == lines[mutant.number] != mutant.after
        ast.parse("\n".join([*lines[: mutant.number], mutant.after, *lines[mutant.number + 1 :]]))
    chosen = mutations_python.chosen(found, seed=1, most=5)
    assert len({mutant.number for mutant in chosen}) == 5
    assert chosen == mutations_python.chosen(found, seed=1, most=5)
