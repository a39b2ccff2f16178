"""The private names of other packages that this one uses: ``private_names.md`` lists them all.

A new version of those may drop a private name without a word. So each that no module of ours
defines is in the table there, and each row is checked on the versions that are installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.sources import nodes, tree

FOLDER = Path(__file__).parents[2] / "django_redis_lock"
PAGE = Path(__file__).with_name("private_names.md")

#: Private by their form, public by their documentation: of a named tuple, and ``os._exit``.
DOCUMENTED = {"_asdict", "_replace", "_make", "_fields", "_exit"}
#: Attributes that this package adds to objects of Django's and of users' classes, and one of what
#: django-redis calls a connection.
ADDED = {"_cached_pages", "_cluster", "_fresh_until", "_of_this_moment", "_rendering"}
ADDED |= {"_without_lock"}
#: Packages whose absence is no fault: this one only recognizes their objects.
OPTIONAL = {"celery", "csp", "rest_framework", "sentry_sdk"}


def uses() -> set[str]:
    """The private names that modules of this package use, and none of them defines."""
    ours: set[str] = set()
    used: set[str] = set()
    for node in (node for path in FOLDER.rglob("*.py") for node in nodes(tree(path))):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            ours.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            ours.add(node.id)
        elif isinstance(node, ast.Attribute):
            own = isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("self", "cls")
            (ours if own else used).add(node.attr)
        elif isinstance(node, ast.Import):
            used |= {part for alias in node.names for part in alias.name.split(".")}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            used |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
    private = {name for name in used if re.match(r"_[a-zA-Z]", name)}
    return private - ours - DOCUMENTED - ADDED


class Row(NamedTuple):
    name: str
    owner: str
    files: tuple[str, ...]
    why: str


@cache
def table() -> tuple[Row, ...]:
    section = PAGE.read_text().partition("\n## Private names of other packages\n")[2]
    rows = []
    for line in section.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            path, files, why = (cell.strip() for cell in line.strip("|").split(" | "))
            owner, _, name = path.strip("`").rpartition(".")
            rows.append(Row(name, owner or name, tuple(re.findall(r"`([^`]+)`", files)), why))
    return tuple(rows)


def test_the_table_lists_each_private_name_that_is_used() -> None:
    assert not uses() - {row.name for row in table()}


def test_each_row_says_why() -> None:
    assert len(table()) > 20
    assert not [row.name for row in table() if not row.files or len(row.why) < 10]


def resolve(path: str) -> Any:
    """The module, or the class in one, at a dotted path."""
    found: Any = None
    for part in path.split("."):
        name = f"{found.__name__}.{part}" if inspect.ismodule(found) else part
        if found is None or (inspect.ismodule(found) and not hasattr(found, part)):
            found = importlib.import_module(name)
        else:
            found = getattr(found, part)
    return found


def exists(row: Row) -> bool:
    owner = resolve(row.owner)
    if row.name == row.owner or hasattr(owner, row.name):
        return True
    # Attributes that a method sets, also on another object.
    sources = owner.__mro__[:-1] if isinstance(owner, type) else [owner]
    return any(re.search(rf"\b{row.name}\b", inspect.getsource(each)) for each in sources)


def is_due(row: Row) -> bool:
    """Whether the name must exist here: not that of a package that is not installed."""
    top = row.owner.partition(".")[0]
    if top in OPTIONAL and importlib.util.find_spec(top) is None:
        return False
    before = re.search(r"Python before 3\.(\d+)", row.why)
    if before and sys.version_info >= (3, int(before[1])):
        return False
    since = re.search(r"since redis-py (\d+)", row.why)
    return not since or int(importlib.import_module("redis").__version__[:1]) >= int(since[1])


@pytest.mark.parametrize(
    "row", [r for r in table() if is_due(r)], ids=lambda r: f"{r.owner}.{r.name}"
)
def test_the_installed_version_has_it(row: Row) -> None:
    assert exists(row)


def test_a_name_that_is_gone_is_noticed() -> None:
    assert not exists(Row("_sock_of_old", "redis.connection.Connection", (), ""))
    assert not exists(Row("_of_old", "asyncio", (), ""))


def test_only_optional_packages_may_be_absent() -> None:
    absent = {row.owner.partition(".")[0] for row in table() if not is_due(row)}
    assert absent <= OPTIONAL | {"asyncio", "redis"}
