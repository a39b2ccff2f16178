"""The shape of the package: its packages and their floors, who imports what, how long a module is.

``docs/architecture.md`` describes the same shape in prose.
"""

from __future__ import annotations

import ast
import graphlib
import importlib
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import django_redis_lock
from benchmarks.twins import repeated_lines
from django_redis_lock.extension import PARTS
from tests.support.sources import nodes, tree

PACKAGE = "django_redis_lock"
FOLDER = Path(django_redis_lock.__file__).parent

#: Every package, and every module at the top, by floor, with what it is. A package imports from
#: its own floor and from those below; nothing imports past a package's ``__init__``.
FLOORS: tuple[dict[str, str], ...] = (
    {
        "extension": "the optional parts, and when they are loaded",
        "clock": "the time, which tests can move",
        "exceptions": "the errors; each carries the lock's name and holder",
        "steps": "one algorithm for threads and for tasks: generators of steps",
        "events": "what happens to locks and computations, and who listens",
        "threads": "what a forked child begins anew; work that must not delay its caller",
    },
    {"protocol": "what is in Redis: keys, scripts, what their answers mean; no input or output"},
    {"transport": "how a script reaches a server; the only user of redis-py's connections"},
    {
        "keeper": "the one background thread of a process, and threads for background work",
        "history": "who held a lock before, and why it was lost",
        "pools": "redis-py's own pools, each connection of which serves one call at a time",
    },
    {"locking": "the locks on one server, for threads and for asyncio, and how they wait"},
    {"singleflight": "one computation of a missing value, awaited by everyone else"},
    # Django begins here.
    {
        "conf": "the settings, and the options of one get_or_set that they complete",
        "signals": "Django signals for what happens",
    },
    {"cache": "the cache backend"},
    {
        "activity": "which request or task acquires a lock",
        "conditions": "what one request says about a page or a fragment",
    },
    {
        "contention": "what to answer when a lock is taken",
        "formatting": "durations as people read them",
        "decorators": "locked() and cached()",
        "models": "the model without a table behind the admin page",
        "": "the public names",
        "admin": "the class that is registered with Django's admin",
        "apps": "Django's entry",
        "migrations": "the permissions of the admin page",
        "templatetags": "{% cached %}",
    },
    {
        "contrib.instant_loss": "how a holder learns of a loss at once",
        "contrib.limit": "the scripts of a lock with several holders",
        "contrib.locmem": "a cache backend on a server in this process's memory",
        "contrib.metrics": "figures of locks and computations",
        "contrib.other_backends": "values in caches that cannot lock",
        "contrib.pages": "whole pages",
        "middleware": "the middleware",
        "contrib.process_tree": "all that a process has started: signals to it, and its end",
        "contrib.redlock": "one lock over several servers",
        "contrib.several_names": "several names held as one lock",
        "contrib.topology": "clusters, and services of sentinels",
    },
    {
        "contrib.debug_toolbar": "the panel of django-debug-toolbar",
        "contrib.exporters": "Prometheus, OpenTelemetry and Sentry",
        "contrib.fallback": "what a lock does while Redis is down",
        "contrib.idempotency": "the same request twice gives the same answer once",
        "contrib.unique_tasks": "a task that is already waiting is not queued again",
        "ops.inventory": "which locks are held, and ending them by force",
    },
    {
        "contrib.testing": "locks and caches without Redis, for the tests of projects",
        "ops.facts": "what people are told of a held lock",
        "ops.held_locks": "the held locks of all caches, for people",
    },
    {
        "ops.admin": "the pages of held locks",
        "ops.doctor": "is Redis set up as locks need it?",
    },
    {"ops.checks": "the system checks"},
    {
        "clients": "a public name",
        "contrib": "the optional parts",
        "debug_toolbar": "a public name",
        "exporters": "public names",
        "management": "the commands",
        "metrics": "public names",
        "ops": "what people see of locks",
        "testing": "public names",
    },
)
#: The number of floors, from the bottom, that must not know Django.
WITHOUT_DJANGO = 6
#: The number of floors that each site loads; they import nothing from above.
ALWAYS_LOADED = 10


def _name(path: Path) -> str:
    """The dotted name within the package; empty for the package itself."""
    parts = path.relative_to(FOLDER).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_name(path): path for path in sorted(FOLDER.rglob("*.py"))}
FLOOR_OF = {package: number for number, floor in enumerate(FLOORS) for package in floor}


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


def test_the_imports_of_a_module_are_found() -> None:
    source = """
import os
from typing import TYPE_CHECKING
from . import keys
from .holders import Owner
from .. import exceptions
if TYPE_CHECKING:
    from ..admin import HeldLocks
else:
    from ..conf import Conf
def later():
    from ..cache import RedisCache
"""
    assert set(_imported(ast.parse(source), f"{PACKAGE}.protocol")) == {
        "os",
        "typing.TYPE_CHECKING",
        f"{PACKAGE}.protocol.keys",
        f"{PACKAGE}.protocol.holders.Owner",
        f"{PACKAGE}.exceptions",
        f"{PACKAGE}.conf.Conf",
        f"{PACKAGE}.cache.RedisCache",
    }
    assert "protocol" in own_imports_of("transport.server")
    assert "protocol.keys" in own_imports_of("protocol.holders") | own_imports_of("protocol")
    assert "locking" in own_imports_of("")


def test_every_package_has_a_floor() -> None:
    assert set(FLOOR_OF) == {_package(module) for module in MODULES}


def test_the_floors_are_those_of_the_page() -> None:
    page = (FOLDER.parent / "docs" / "architecture.md").read_text()
    table = page.partition("| floor |")[2].partition("\n\n")[0]
    floors: dict[str, int] = {}
    number = 0
    for _, floor, packages, *_ in (row.split("|") for row in table.splitlines()[2:]):
        number = int(floor) if floor.strip() else number
        floors |= {name.rstrip("/"): number - 1 for name in re.findall(r"`([^`]+)`", packages)}
    described = {name: floor for name, floor in floors.items() if "/" not in name}
    described |= dict.fromkeys(("", "apps", "migrations"), ALWAYS_LOADED - 1)
    assert described == FLOOR_OF


def test_a_module_imports_from_its_own_floor_and_below() -> None:
    assert not {
        f"{module} imports {name}"
        for module in MODULES
        for name in own_imports_of(module)
        if FLOOR_OF[_package(name)] > FLOOR_OF[_package(module)]
    }


def test_what_each_site_loads_imports_nothing_optional() -> None:
    always = {package for floor in FLOORS[:ALWAYS_LOADED] for package in floor}
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


#: The most names that a package may offer to the others of the core.
MOST_NAMES = {"protocol": 40, "transport": 25}


def test_faces_are_narrow_and_used() -> None:
    core = [module for module in MODULES if FLOOR_OF[_package(module)] < ALWAYS_LOADED]
    for face, most in MOST_NAMES.items():
        offered = set(_offered(face))
        imported = {name for module in core for name in imports_of(module)}
        used = {name for name in offered if f"{PACKAGE}.{face}.{name}" in imported}
        used |= {n for n in offered for m in core if f"{face}.{n}" in MODULES[m].read_text()}
        assert len(offered) <= most
        assert not offered - used, "only optional parts use these: not from the face"


def _offered(face: str) -> list[str]:
    """Also those that are imported when they are used."""
    imports = [each for each in nodes(tree(MODULES[face])) if isinstance(each, ast.ImportFrom)]
    return [name.name for node in imports for name in node.names if name.name == name.asname]


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


#: What a module names, and an upper floor has: in an annotation, or to offer it. Why.
NAMED_ABOVE = {
    ("exceptions", "protocol"): "an error has the holder of the lock, whose class it only names",
    ("cache", "contrib.locmem"): "LocMemCache is a public name of the cache, and made of it",
    ("cache", "ops.inventory"): "reset_all() is a public name of the cache",
    ("cache.backend", "ops.inventory"): "the type of what a cache's held_locks() returns",
}


def named_by(module: str) -> set[str]:
    """What ``module`` imports, and what it names elsewhere: under TYPE_CHECKING, as what a package
    offers on first use, as a dotted text. What ``part`` loads is named in ``extension`` alone."""
    path, found = MODULES[module], own_imports_of(module)
    package = ".".join((PACKAGE, *path.relative_to(FOLDER).parent.parts))
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            names = _imported(ast.Module([node], []), package)
            of_ours = (n.partition(".") for n in names if n.startswith(f"{PACKAGE}."))
            found = found | {_origin(name) for _, _, name in of_ours}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "on_first_use":
            texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            found = found | {text for text in texts if text in MODULES}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "import_module":
            texts = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            found = found | {str(text).removeprefix(f"{PACKAGE}.") for text in texts} & set(MODULES)
    return found - {module}


def test_names_lead_down_too() -> None:
    up = {
        (module, name)
        for module in MODULES
        if module  # The package itself offers names of all floors.
        for name in named_by(module)
        if FLOOR_OF[_package(name)] > FLOOR_OF[_package(module)]
    }
    shorter = {(module, _package(name)) for module, name in up}
    assert shorter == set(NAMED_ABOVE)


def test_one_circle_of_names_is_left() -> None:
    """The cache offers ``LocMemCache``, which is a cache."""
    graph = {module: named_by(module) for module in MODULES if module}
    assert "contrib.locmem" in graph["cache"]
    graph["cache"] -= {"contrib.locmem"}
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
    core = [module for module in MODULES if FLOOR_OF[_package(module)] < WITHOUT_DJANGO]
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
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"},
        cwd=FOLDER.parent,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "\n"


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
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    command = [sys.executable, "-OO", "-c", WITHOUT_DOCSTRINGS, *names]
    done = subprocess.run(
        command, env=environment, cwd=FOLDER.parent, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
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


#: What waits for files and sockets only, whose time no test can move.
BY_REAL_TIME: set[str] = set()


def test_deadlines_are_kept_by_one_clock() -> None:
    """``clock.time`` and not Python's: a test that moves the clock moves all of them."""
    packages = {"cache", "contrib.fallback", "contrib.redlock", "contrib.several_names"}
    packages |= {"keeper", "locking", "protocol", "singleflight"}
    by_real_time = {m for m in MODULES if _package(m) in packages and "time" in imports_of(m)}
    assert by_real_time == BY_REAL_TIME


def test_little_stands_there_twice_for_threads_and_for_tasks() -> None:
    assert sum(repeated_lines(FOLDER).values()) <= 150
