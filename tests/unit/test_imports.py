"""The shape of the package: which module imports which, what needs Django, how long a module is."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

import django_redis_lock

PACKAGE = "django_redis_lock"
FOLDER = Path(django_redis_lock.__file__).parent

#: From the bottom to the top: a module imports from its own layer and from those below.
LAYERS = (
    (
        "exceptions",
        "locking",
        "locking.keys",
        "locking.forks",
        "locking.scripts",
        "locking.flight_scripts",
        "locking.inventory_scripts",
        "locking.figure_scripts",
        "locking.arguments",
        "locking.owner",
        "locking.notices",
        "locking.events",
        "locking.hold",
        "locking.interrupts",
        "locking.state",
        "locking.grants",
        "locking.breaker",
        "locking.connections",
        "locking.node",
        "locking.topology",
        "locking.sentinel",
        "locking.cluster",
        "locking.server",
        "locking.routes",
        "locking.driver",
        "locking.packing",
        "locking.calls",
        "locking.aio_connections",
        "locking.aio_calls",
        "locking.aio_clients",
    ),
    (
        "locking.job",
        "locking.replicas",
        "locking.keeper",
        "locking.chronicle",
        "locking.heartbeat",
        "locking.renewal",
        "locking.line",
        "locking.pop",
        "locking.watch",
        "locking.thread_line",
        "locking.waiting",
        "locking.aio_line",
        "locking.aio_waiting",
    ),
    ("locking.handle", "locking.kept", "locking.telling"),
    ("locking.lock", "locking.aio"),
    (
        "locking.quorum_scripts",
        "locking.votes",
        "locking.parallel",
        "locking.voted_renewal",
        "locking.campaign",
        "locking.quorum",
        "locking.redlock",
        "locking.aio_redlock",
        "locking.whole",
        "locking.local",
        "locking.degrading",
        "locking.stand_ins",
        "locking.inventory",
        "locking.inspection",
        "locking.forced",
        "flights*",
        "writes",
        "memory",
        "testing",
    ),
    ("conf", "signals"),
    ("decorating", "decorating.declared", "computing", "computing.terms", "computing.awaitables"),
    ("kinds",),
    ("computing.*", "expiring", "python_redis_lock", "cache", "clients"),
    ("aliases",),
    ("contention", "metrics*", "doctor*", "models", "holdings"),
    (
        "exporters*",
        "decorating.naming",
        "decorating.current",
        "decorating.lost",
        "decorating.tasks",
        "decorating.transactions",
        "decorating.options",
        "decorating.outages",
    ),
    ("decorating.sections",),
    ("decorating.guards",),
    ("decorating.targets",),
    ("decorators", "caching", "admin*", "checks*"),
    ("", "apps", "management*", "migrations*", "templatetags*"),
)
KNOWS_NO_DJANGO = ("exceptions", "flights*", "memory", "testing", "writes", "locking", "locking.*")

#: Lines of the longest module: one class with its documentation fits, a second one does not.
LONGEST = 420
#: Modules that are longer, and the number of lines they must not exceed either.
LONGER = {
    # All Lua in one place, each script under its contract.
    "locking.scripts": 520,
}


def _name(path: Path) -> str:
    """The dotted name within the package; empty for the package itself."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(FOLDER.rglob("*.py"))}


def _layer(module: str) -> int:
    for number, patterns in enumerate(LAYERS):
        if any(fnmatchcase(module, pattern) for pattern in patterns):
            return number
    raise AssertionError(f"{module} has no layer yet: give it one in LAYERS")


def _imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Full names of what a module in ``package`` imports when it runs, inside functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for statement in node.orelse:
                yield from _imported(ast.Module([statement], []), package)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        else:
            yield from _imported(node, package)


def imports_of(module: str) -> set[str]:
    """Full names of what ``module`` imports: modules, or names in them."""
    path = MODULES[module]
    package = ".".join((PACKAGE, *path.relative_to(FOLDER).parent.parts))
    return set(_imported(ast.parse(path.read_text()), package))


def own_imports_of(module: str) -> set[str]:
    """The modules of this package that ``module`` imports."""
    found = set()
    for imported in imports_of(module):
        package, _, name = imported.partition(".")
        if package == PACKAGE:
            found.add(name if name in MODULES else name.rpartition(".")[0])
    return found - {module}


def test_the_imports_of_a_module_are_found() -> None:
    source = """
import os
from typing import TYPE_CHECKING
from . import keys
from .owner import Owner
from .. import exceptions
if TYPE_CHECKING:
    from ..admin import HeldLocks
else:
    from ..conf import Conf
def later():
    from ..cache import RedisCache
"""
    assert set(_imported(ast.parse(source), f"{PACKAGE}.locking")) == {
        "os",
        "typing.TYPE_CHECKING",
        f"{PACKAGE}.locking.keys",
        f"{PACKAGE}.locking.owner.Owner",
        f"{PACKAGE}.exceptions",
        f"{PACKAGE}.conf.Conf",
        f"{PACKAGE}.cache.RedisCache",
    }
    assert "locking.scripts" in own_imports_of("locking.calls")
    assert "locking.lock" in own_imports_of("")


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    upwards = {name for name in own_imports_of(module) if _layer(name) > _layer(module)}
    assert not upwards


def test_no_modules_import_each_other() -> None:
    graph = {module: own_imports_of(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "module", [m for m in MODULES if any(fnmatchcase(m, known) for known in KNOWS_NO_DJANGO)]
)
def test_the_core_knows_no_django(module: str) -> None:
    roots = {name.partition(".")[0] for name in imports_of(module)}
    assert not roots & {"django", "django_redis"}


def test_the_package_can_be_imported_before_django_is_set_up() -> None:
    code = f"""
import sys
from {PACKAGE} import *
from django.conf import settings
assert not settings.configured
assert "{PACKAGE}.models" not in sys.modules
"""
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=FOLDER.parent, check=True)


@pytest.mark.parametrize("module", MODULES)
def test_all_names_resolve(module: str) -> None:
    imported = importlib.import_module(f"{PACKAGE}.{module}".rstrip("."))
    names = getattr(imported, "__all__", [])
    assert len(names) == len(set(names))
    for name in names:
        getattr(imported, name)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_is_too_long(module: str) -> None:
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= LONGER.get(module, LONGEST)


def test_exceptions_to_the_length_are_still_needed() -> None:
    needed = {m for m, path in MODULES.items() if len(path.read_text().splitlines()) > LONGEST}
    assert not set(LONGER) - needed, "take these out of LONGER"
