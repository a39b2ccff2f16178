"""Words that names and prose must not use; ``docs/architecture.md`` has the glossary.

A name is the field's standard term. In prose the subject is what acts, and the verb is the API's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: Names of modules, classes, functions, attributes and constants that have a better one.
REPLACED = """
    Handle Kept Telling Granted Came Turn Farewell Departure Abandoned Aboard Speaker Several
    ThreadCrew TaskCrew Landing Depart Follow Await Looks Terms Campaign Elected VotedHold StandIn
    Guard LockedOrElse Ending Cut ServerAway CHANGED_HANDS lock_stood_in stood_in
    tell told heard unlisten board outlasting run_or_end canvassing given_up settle endures
    owed urgency
    ROOM MOST LONGEST SHORTEST LOOK PATIENCE GRACE FRESH PAUSE GLANCE TURN AHEAD SOON LATER
    words wording refs tables showing diagnosis crews
"""
NAMES = frozenset(REPLACED.split())
#: Parts of constants that do not say what they limit: LONGEST_PAUSE is MAX_PAUSE_SECONDS.
PARTS = frozenset(("ROOM", "MOST", "LONGEST", "SHORTEST", "LOOK", "GLANCE"))

#: Words that make a riddle of a sentence.
RIDDLES = (
    "whoever|nobody|beside|of its own|of their own|of one's own|meanwhile|anew|in vain|at rest"
)
PROSE = re.compile(rf"\b({RIDDLES})\b", re.IGNORECASE)

#: What is still to be removed: for each file the words that it may have.
ALLOWED: dict[str, set[str]] = {
    "django_redis_lock/contrib/locmem/memory/lua.py": {"of its own"},
}

PACKAGE = sorted((ROOT / "django_redis_lock").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def defined(path: Path) -> Iterator[str]:
    """The names that a module defines, and its own."""
    yield path.stem
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (each for one in targets for each in ast.walk(one)):
                if isinstance(target, ast.Attribute):
                    yield target.attr
                elif isinstance(target, ast.Name) and target.id.isupper():
                    yield target.id


def is_forbidden(name: str) -> bool:
    name = name.lstrip("_")
    return name in NAMES or (name.isupper() and not PARTS.isdisjoint(name.split("_")))


@pytest.mark.parametrize("path", [p for p in PACKAGE if p.name != "__init__.py"], ids=_path)
def test_names_are_standard_terms(path: Path) -> None:
    found = {name for name in defined(path) if is_forbidden(name)}
    assert found <= ALLOWED.get(_path(path), set())


@pytest.mark.parametrize("path", [*PACKAGE, *PAGES], ids=_path)
def test_prose_is_plain(path: Path) -> None:
    text = " ".join(line.strip(" #") for line in path.read_text().splitlines())
    found = {match[0].lower() for match in PROSE.finditer(text)}
    assert found <= ALLOWED.get(_path(path), set())


@pytest.mark.parametrize("path", TESTS, ids=_path)
def test_test_names_are_plain(path: Path) -> None:
    names = [name.replace("_", " ") for name in defined(path) if name.startswith("test_")]
    found = {match[0].lower() for name in names for match in PROSE.finditer(name)}
    assert found <= ALLOWED.get(_path(path), set())


def test_the_allow_list_names_only_files_that_exist() -> None:
    assert all((ROOT / path).exists() for path in ALLOWED)
