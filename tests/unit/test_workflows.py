"""The workflows run what there is, pinned, with few rights."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()


def _name(path: Path) -> str:
    return path.name


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} == {"ci", "nightly", "release"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    used = re.findall(r"uses: (.*)", path.read_text())
    assert used
    assert [
        line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)
    ] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_a_workflow_may_only_read(path: Path) -> None:
    text = path.read_text()
    assert "\npermissions:\n  contents: read\n" in text
    assert re.findall(r"^ +([\w-]+): write$", text, re.MULTILINE) == (
        ["id-token"] if path.stem == "release" else []
    )


@pytest.mark.parametrize("path", WORKFLOWS, ids=_name)
def test_every_target_of_make_exists(path: Path) -> None:
    text = path.read_text()
    called = set(re.findall(r"make ([a-z-]+)", text))
    called |= {
        name for found in re.findall(r"target: \[(.*)\]", text) for name in found.split(", ")
    }
    assert called
    assert {name for name in called if not re.search(rf"^{name}:", MAKEFILE, re.MULTILINE)} == set()


def test_what_ci_runs_the_workflow_runs_too() -> None:
    here = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    there = re.findall(r"target: \[(.*)\]", (ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert len(here) >= 4
    assert set(here) <= set(there[0].split(", "))


def test_the_matrix_is_that_of_tox() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    listed = re.findall(
        r"^    (py\d+-django\d+)-redis\{(.*)\}$", (ROOT / "tox.ini").read_text(), re.M
    )
    wanted = {f"{head}-redis{number}" for head, tail in listed for number in tail.split(",")}
    assert len(wanted) == 16
    pairs = re.findall(r'python: "3\.(\d+)", env: (py3(\d+)-\S+)', text)
    assert {env for _, env, _ in pairs} == wanted
    assert all(python == minor for python, _, minor in pairs)


def test_every_pair_of_a_django_and_a_redis_py_is_run() -> None:
    listed = re.findall(
        r"^    py\d+-django(\d+)-redis\{(.*)\}$", (ROOT / "tox.ini").read_text(), re.M
    )
    pairs = {(django, number) for django, tail in listed for number in tail.split(",")}
    assert pairs == {(django, number) for django in ("52", "60", "61") for number in "5678"}


def test_brief_tests_are_the_same_for_make_and_tox() -> None:
    brief = MAKEFILE.partition("BRIEF := ")[2].partition("\n#")[0]
    tests = set(re.findall(r"tests/\S+\.py", brief))
    assert len(tests) > 5
    assert set(re.findall(r"tests/\S+\.py", (ROOT / "tox.ini").read_text())) == tests
