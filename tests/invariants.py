"""Which tests keep which invariant of ``docs/how_it_works.md``, "What must hold".

    python -m tests.invariants

A test says it by ``pytest.mark.invariant("S1")``, on itself, its class or its module. Only those
count that run without ``--all``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([A-Z]\d) \| (.*) \|$", re.MULTILINE)


def invariants() -> dict[str, str]:
    """Each with its sentence."""
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    return dict(ROW.findall(page.partition("## What must hold")[2].partition("\n## ")[0]))


def by_invariant() -> dict[str, list[str]]:
    """The tests, classes and modules that name an invariant, by its name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if ".mark.invariant(" in (text := path.read_text()):
            name = path.relative_to(ROOT).as_posix()
            for id, test in _marked(ast.parse(text).body, name):
                found.setdefault(id, []).append(test)
    return found


def _marked(body: list[ast.stmt], name: str) -> Iterator[tuple[str, str]]:
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from ((id, name) for id in _ids([node.value]))
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            test = f"{name}::{node.name}"
            if not any(ast.unparse(mark).endswith(".sample(0)") for mark in node.decorator_list):
                yield from ((id, test) for id in _ids(node.decorator_list))
                if isinstance(node, ast.ClassDef):
                    yield from _marked(node.body, test)


def _ids(marks: list[ast.expr]) -> Iterator[str]:
    for call in (node for mark in marks for node in ast.walk(mark) if isinstance(node, ast.Call)):
        if ast.unparse(call.func) == "pytest.mark.invariant":
            yield from (ast.literal_eval(id) for id in call.args)


def main() -> None:
    tests = by_invariant()
    for id, sentence in invariants().items():
        print(f"{id}  {sentence}")
        for test in tests.get(id, ["NO TEST"]):
            print(f"    {test}")


if __name__ == "__main__":
    main()
