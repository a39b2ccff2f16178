"""Who imports what: ``docs/architecture.md`` has the packages and their floors."""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import django_redis_lock
from django_redis_lock.extension import PARTS
from tests.support.python import python
from tests.support.sources import tree

PACKAGE = "django_redis_lock"
FOLDER = Path(django_redis_lock.__file__).parent

#: Of the package itself, and of what Django looks for, the page says nothing.
NOT_ON_THE_PAGE = ("", "apps", "migrations")


def _floors() -> tuple[dict[str, int], int, int]:
    """The number of the floor of every package and of every module at the top, as the page has
    them; and the last floor that must not know Django, and the last that each site loads."""
    page = (FOLDER.parent / "docs" / "architecture.md").read_text()
    table = page.partition("| floor |")[2].partition("\n\n")[0]
    floors: dict[str, int] = {}
    number = without_django = always_loaded = 0
    for _, floor, packages, told, *_ in (row.split("|") for row in table.splitlines()[2:]):
        number = int(floor) if floor.strip() else number
        names = (name.rstrip("/") for name in re.findall(r"`([^`]+)`", packages))
        floors |= {name: number for name in names if "/" not in name}
        if "Django begins here" in told:
            without_django = number
        elif "loaded when it is used" in told:
            always_loaded = number
    floors |= dict.fromkeys(NOT_ON_THE_PAGE, always_loaded)
    return floors, without_django, always_loaded


#: A package imports from its own floor and from those below.
FLOOR_OF, WITHOUT_DJANGO, ALWAYS_LOADED = _floors()


def _name(path: Path) -> str:
    """The dotted name within the package; empty for the package itself."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(FOLDER.rglob("*.py"))}


def _package(module: str) -> str:
    """The package or module at the top that ``module`` belongs to; in ``contrib`` and ``ops`` the
    one there."""
    top, _, rest = module.partition(".")
    return f"{top}.{rest.partition('.')[0]}" if top in ("contrib", "ops") and rest else top


def _imported(within: ast.AST, package: str) -> Iterator[str]:
    """Full names of what a module in ``package`` imports when it runs, inside functions too."""
    for node in ast.iter_child_nodes(within):
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


@cache
def imports_of(module: str) -> set[str]:
    """Full names of what ``module`` imports: modules, or names in them."""
    path = MODULES[module]
    package = ".".join((PACKAGE, *path.relative_to(FOLDER).parent.parts))
    return set(_imported(tree(path), package))


@cache
def own_imports_of(module: str) -> set[str]:
    """The modules of this package that ``module`` imports."""
    found = set()
    for imported in imports_of(module):
        package, _, name = imported.partition(".")
        if package == PACKAGE:
            found.add(_origin(name))
    return found - {module}


def _origin(name: str) -> str:
    """The module that ``from ... import`` takes ``name`` from: a face's name before a module's."""
    parent, _, last = name.rpartition(".")
    return name if name in MODULES and last not in _names_of(parent) else parent


@cache
def _names_of(module: str) -> list[str]:
    """What a module offers: its ``__all__``, or what a face imports as what it is."""
    listed = getattr(importlib.import_module(f"{PACKAGE}.{module}".rstrip(".")), "__all__", None)
    if listed is not None:
        return list(listed)
    imports = [n for n in tree(MODULES[module]).body if isinstance(n, ast.ImportFrom)]
    return [name.name for found in imports for name in found.names if name.name == name.asname]


def test_every_package_has_a_floor() -> None:
    assert set(FLOOR_OF) == {_package(module) for module in MODULES}


def test_a_module_imports_from_its_own_floor_and_below() -> None:
    assert not {
        f"{module} imports {name}"
        for module in MODULES
        for name in own_imports_of(module)
        if FLOOR_OF[_package(name)] > FLOOR_OF[_package(module)]
    }


def test_what_each_site_loads_imports_nothing_optional() -> None:
    always = {package for package, floor in FLOOR_OF.items() if floor <= ALWAYS_LOADED}
    assert not {
        f"{module} imports {name}"
        for module in MODULES
        if _package(module) in always
        for name in own_imports_of(module)
        if _package(name) not in always
    }


def test_a_module_imports_other_packages_by_their_face() -> None:
    assert not {
        f"{module} imports {name}"
        for module in MODULES
        for name in own_imports_of(module)
        if name != _package(name) != _package(module) and name not in SECOND_FACES
    }


#: Faces besides a package's ``__init__``, each for one subject: the names of keys, the checks of
#: arguments, what tasks use, which errors pass. And what optional parts are made of, as the core
#: is.
SECOND_FACES = {f"protocol.{name}" for name in ("identity", "keys", "validation", "holders")}
SECOND_FACES |= {f"protocol.{name}" for name in ("lock_scripts", "holder_scripts", "script")}
SECOND_FACES |= {
    f"transport.{name}" for name in ("refusals", "hints", "aio_client", "aio_connection")
}
SECOND_FACES |= {f"transport.{name}" for name in ("address", "plain", "server")}
SECOND_FACES |= {
    f"decorators.{name}"
    for name in ("key_template", "on_lost", "section", "targets", "transactions")
}


def test_no_packages_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for module in MODULES:
        package = _package(module)
        graph.setdefault(package, set()).update(
            {_package(name) for name in own_imports_of(module)} - {package}
        )
    list(graphlib.TopologicalSorter(graph).static_order())


def test_no_modules_import_each_other() -> None:
    graph = {module: own_imports_of(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())


def test_optional_parts_are_named_in_one_place() -> None:
    named = {
        str(argument.value)
        for module in MODULES
        for node in ast.walk(tree(MODULES[module]))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "part" and node.args
        for argument in ast.walk(node.args[0])
        if isinstance(argument, ast.Constant)
    }
    assert named <= set(PARTS)
    assert {path for path, _ in PARTS.values()} <= set(MODULES)


def test_the_core_knows_no_django() -> None:
    core = [module for module in MODULES if FLOOR_OF[_package(module)] <= WITHOUT_DJANGO]
    assert not {
        f"{module} imports {name}"
        for module in core
        for name in imports_of(module)
        if name.partition(".")[0] in ("django", "django_redis")
    }


def test_the_package_can_be_imported_before_django_is_set_up() -> None:
    """And the app imports no package that the project does not use."""
    code = f"""
import sys
from {PACKAGE} import *
from django.conf import settings
assert not settings.configured
assert "{PACKAGE}.models" not in sys.modules
settings.configure(INSTALLED_APPS=["{PACKAGE}"])
import django
django.setup()
print(*sorted({{"celery", "django_tasks", "django.contrib.admin"}} & sys.modules.keys()))
"""
    assert python("-c", code).stdout == "\n"


#: Each decorator, and a call of what it makes.
WITHOUT_DOCSTRINGS = """
import importlib
import sys
from django.conf import settings

CACHE = {"BACKEND": "django_redis_lock.cache.LocMemCache"}
APPS = ["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes"]
settings.configure(
    ALLOWED_HOSTS=["testserver"],
    CACHES={"default": CACHE, "b": CACHE, "c": CACHE},
    INSTALLED_APPS=[*APPS, "django_redis_lock"],
)
import django
django.setup()
for name in sys.argv[1:]:
    importlib.import_module(name)

__name__ = "shop"  # Not a script, whose functions have no name of their own.
from celery import Celery
from django.core.management.base import BaseCommand
from django.http import HttpResponse
from django.test import RequestFactory
from django.views import View
from django_redis_lock import cached, cached_page, idempotent, locked, unique_task
from django_redis_lock.cache import cache

def said(): "Says it."
answers = [cached(said), cached("said-{x}")(lambda x: 1), cached(key=str)(lambda x: 1)]
help(answers[0])
help(answers[0].invalidate)
answers[0](), answers[1](1), answers[2](1), locked(said)()
for decorator in (locked, cached_page(5), idempotent(scope=None)):
    @decorator
    def view(request): "A page."; return HttpResponse()
    print(view(RequestFactory().get("/")).status_code)
@locked
class Class(View):
    def get(self, request): return HttpResponse()
print(Class.as_view()(RequestFactory().get("/")).status_code)
@locked
class Command(BaseCommand):
    def handle(self, **options): pass
Command().handle()
def task(x): pass
unique_task("x-{x}", timeout=5)(Celery("app", set_as_current=False).task(task))
with locked("block"), cache.lock("other"), cache.lock(["one", "two"]), cache.lock("n", limit=2):
    print(cache.get_or_set("value", int, 5))
"""


def test_all_of_it_works_without_docstrings() -> None:
    names = [f"{PACKAGE}.{module}".rstrip(".") for module in MODULES]
    done = python("-OO", "-c", WITHOUT_DOCSTRINGS, *names)
    assert done.stdout.splitlines()[-5:] == ["200", "200", "200", "200", "0"]


def test_an_editor_that_completes_names_finds_all_of_the_package() -> None:
    assert {"__version__", *django_redis_lock.__all__} == set(dir(django_redis_lock))


def test_all_names_resolve() -> None:
    names = {module: _names_of(module) for module in MODULES}
    assert not {module for module in MODULES if len(names[module]) != len(set(names[module]))}
    imported = {m: importlib.import_module(f"{PACKAGE}.{m}".rstrip(".")) for m in MODULES}
    missing = object()  # ``hasattr`` would hide that an optional part raises.
    assert not {
        f"{module}.{name}"
        for module in MODULES
        for name in names[module]
        if getattr(imported[module], name, missing) is missing
    }


def test_deadlines_are_kept_by_one_clock() -> None:
    """``clock.time`` and not Python's: a test that moves the clock moves all of them."""
    packages = {"cache", "contrib.fallback", "contrib.redlock", "contrib.several_names"}
    packages |= {"keeper", "locking", "protocol", "singleflight"}
    assert not {m for m in MODULES if _package(m) in packages and "time" in imports_of(m)}
