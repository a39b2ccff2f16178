"""The private names of other packages that this one uses: ``private_names.md`` lists them all.

A new version of those may drop a private name without a word. So each use is a row of the table
there, and each row is checked on the versions that are installed.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import pytest

import django_redis_lock
from tests.support.sources import nodes, tree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "django_redis_lock"
PAGE = Path(__file__).with_name("private_names.md")

#: Private by their form, public by their documentation: of a named tuple, and ``os._exit``.
DOCUMENTED = {"_asdict", "_replace", "_make", "_fields", "_exit"}
#: Attributes that this package adds to objects of Django's and of users' classes, and one of what
#: django-redis calls a connection.
ADDED = {"_cached_pages", "_cluster", "_fresh_until", "_of_this_moment", "_rendering"}
ADDED |= {"_without_lock"}
#: What a receiver that is another package's is called in this one, so that a name counts as theirs
#: even if one of our classes has the same.
THEIRS = {"connection", "_connection", "pool", "client", "request", "response", "user", "task"}
THEIRS |= {"stdout", "asyncio", "settings"}
#: Packages whose absence is no fault: this one only recognizes their objects.
OPTIONAL = {"celery", "csp", "rest_framework", "sentry_sdk"}


def is_private(name: str) -> bool:
    return bool(re.match(r"_[a-zA-Z]", name)) and name not in DOCUMENTED | ADDED


@cache
def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(FOLDER)): tree(path) for path in sorted(FOLDER.rglob("*.py"))}


def defined_in(within: ast.AST) -> Iterator[str]:
    """Names of functions, classes and variables, and of attributes of ``self``."""
    for node in nodes(within):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from {node.attr} if receiver(node.value) in ("self", "cls") else ()


def receiver(node: ast.expr) -> str:
    """The last name of ``a.b.c``."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def of_super(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and receiver(node.value.func) == "super"
    )


def used_in(within: ast.AST, ours: set[str], theirs: Set[str] = frozenset()) -> Iterator[str]:
    """The private names of others in ``within``; ``ours``: those that our modules define, of which
    ``theirs`` are names of others, too."""
    classes = {node.name: node for node in nodes(within) if isinstance(node, ast.ClassDef)}
    for node in nodes(within):
        if isinstance(node, ast.Attribute):
            if node.attr not in ours or receiver(node.value) in THEIRS:
                yield node.attr
        elif isinstance(node, ast.ClassDef):
            bases = [classes.get(receiver(base)) for base in node.bases]
            if None not in bases:  # It is put before a class of others.
                inherited = {name for base in bases if base for name in defined_in(base)}
                yield from {e.attr for e in nodes(node) if of_super(e)} - inherited
        elif isinstance(node, ast.Import):
            yield from (part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (node.module or "").split(".")
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and receiver(node.func).endswith("attr"):
            names = {str(arg.value) for arg in node.args[1:2] if isinstance(arg, ast.Constant)}
            of = receiver(node.args[0]) if node.args else ""
            yield from names if of in THEIRS else names - (ours - theirs if of != "self" else ours)


@cache
def classes_in(module: str) -> dict[str, set[str]]:
    """By the name of a class, what its source defines, or uses of itself."""
    file = getattr(sys.modules[module], "__file__", None) or ""
    if not file.endswith(".py"):
        return {}
    found: dict[str, set[str]] = {}
    for node in nodes(tree(Path(file))):
        if isinstance(node, ast.ClassDef):
            names = found.setdefault(node.name, set(defined_in(node)))
            for each in nodes(node):
                if isinstance(each, ast.Attribute) and receiver(each.value) in ("self", "cls"):
                    names.add(each.attr)
    return found


@cache
def members(kind: type) -> set[str]:
    """The private names of a class: its methods, and its attributes."""
    written = classes_in(kind.__module__).get(kind.__name__, set()) | set(vars(kind))
    return {name for name in written if is_private(name)} - {"_abc_impl", "_is_protocol"}


def shared_with_bases() -> Iterator[tuple[str, str]]:
    """Private names that our classes have in common with their bases in other packages."""
    for module in pkgutil.walk_packages(django_redis_lock.__path__, "django_redis_lock."):
        try:
            classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
        except ImportError:  # It is for a package that is not installed.
            continue
        for _, kind in classes:
            if kind.__module__ != module.name:
                continue
            for base in kind.__mro__[1:]:
                top = base.__module__.partition(".")[0]
                if top in {"redis", "django", "django_redis", "asgiref", "asyncio"}:
                    file = Path(inspect.getfile(kind)).relative_to(FOLDER)
                    yield from ((name, str(file)) for name in members(kind) & members(base))


@cache
def uses() -> set[tuple[str, str]]:
    """Each private name of another package, with the file that uses it."""
    ours = {name for each in trees().values() for name in defined_in(each)}
    theirs = {name for each in trees().values() for name in used_in(each, ours)}
    written = {
        (name, file)
        for file, each in trees().items()
        for name in used_in(each, ours, theirs)
        if is_private(name)
    }
    return written | set(shared_with_bases())


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


def test_the_search_finds_each_kind_of_use() -> None:
    source = ast.parse("""
import _socket
from redis._parsers import _RESP
connection._sock.close()
self._lock = 1
asyncio._get_running_loop()
getattr(task, "_must_cancel", False)
class Guard:
    def _close(self):
        super()._close()
event._replace(x=1)
lock._state
""")
    found = {
        name for name in used_in(source, {"_sock", "_state", "_lock", "_close"}) if is_private(name)
    }
    assert found == {
        *("_socket", "_parsers", "_RESP", "_sock", "_get_running_loop", "_must_cancel", "_close"),
    }


def test_the_table_lists_each_private_name_that_is_used() -> None:
    assert not uses() - {(row.name, file) for row in table() for file in row.files}


def test_what_the_table_lists_is_used() -> None:
    assert not {(row.name, file) for row in table() for file in row.files} - uses()


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
