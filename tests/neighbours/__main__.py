"""``python -m tests.neighbours [NAME ...]``: the own tests of third-party packages, from their
source distributions, once with django-redis's backend and once with ours instead of the cache in
memory that they configure. A test with another outcome on ours is a failure.

The packages, and what their tests need, are installed in build/neighbours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple
from xml.etree import ElementTree

from ..redis_server import RedisServer
from ..source_distribution import download

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "neighbours"
PYTHON = BUILD / "venv" / "bin" / "python"
BACKENDS = ("django_redis.cache.RedisCache", "django_redis_lock.cache.RedisCache")
TIMEOUT_SECONDS = 600

#: Functions of one name in two modules; django-cache-memoize's tests need a package with two such.
MEMOIZED = """
from functools import wraps
from cache_memoize import cache_memoize

def plain(function):
    @wraps(function)
    def called(*args):
        return function(*args)
    return called

class DummyClass:
    @cache_memoize(10)
    def func(self): return 1
    @cache_memoize(10)
    @plain
    def decorated_func(self): return 2
    @cache_memoize(10)
    @plain
    def another_decorated_func(self): return 3

@cache_memoize(10)
def func(): return 4
@cache_memoize(10)
@plain
def decorated_func(): return 5
@cache_memoize(10)
@plain
def another_decorated_func(): return 6

def func_factory():
    @cache_memoize(10)
    def func(): return 7
    return func
"""

#: As their own configuration does, which it does not have either.
CLEARED = """
import pytest
from django.core.cache import cache

@pytest.fixture(autouse=True)
def empty_cache():
    cache.clear()
"""


class Neighbour(NamedTuple):
    """``paths``: what pytest runs; nothing if the source distribution has no tests. ``left_out``:
    modules of tests that need what it does not have. ``given``: files that it does not have."""

    name: str
    version: str
    paths: tuple[str, ...]
    settings: str = "plain_settings"
    needs: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    given: tuple[tuple[str, str], ...] = ()


NEIGHBOURS = (
    Neighbour("django-ratelimit", "4.1.0", ("django_ratelimit/tests.py",)),
    Neighbour("django-axes", "8.3.1", ("tests",), "tests.settings", ("django-ipware",)),
    Neighbour("django-constance", "4.4.0", ("tests",), "tests.settings"),
    Neighbour(
        "django-waffle",
        "5.0.0",
        ("waffle/tests",),
        left_out=("decorators", "mixin", "templates", "views", "waffle"),
    ),
    Neighbour(
        "django-cache-memoize",
        "0.2.1",
        ("tests",),
        given=(
            ("__init__.py", ""),
            ("conftest.py", CLEARED),
            ("dummy_package/__init__.py", ""),
            ("dummy_package/a.py", MEMOIZED),
            ("dummy_package/b.py", MEMOIZED),
        ),
    ),
    Neighbour("django-solo", "2.5.1", ("solo/tests/tests.py",), "solo.tests.settings"),
    Neighbour(
        "djangorestframework",
        "3.18.3",
        ("tests/test_throttling.py",),
        settings="",
        needs=("dj-database-url",),
    ),
    Neighbour("wagtail-cache", "3.0.0", ()),
    Neighbour("sorl-thumbnail", "13.4.0", ("tests",), "tests.settings.pil", ("pillow",)),
)

#: A test's name, and how it ended.
Outcomes = dict[str, str]


def install() -> None:
    """All of them: several share one module of settings."""
    if not PYTHON.exists():
        venv.create(BUILD / "venv", with_pip=True)
    ours = [need for need in metadata.requires("django-redis-lock") or [] if "extra ==" not in need]
    theirs = [f"{each.name}=={each.version}" for each in NEIGHBOURS if each.paths]
    needs = [need for each in NEIGHBOURS for need in each.needs]
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    tools = ["pytest", "pytest-django", "pytest-subtests"]
    subprocess.run([*pip, *tools, *ours, *theirs, *needs], check=True)
    (BUILD / "pytest.ini").touch()  # A package without a configuration must not get ours.


def source_of(neighbour: Neighbour) -> Path:
    folder = BUILD / neighbour.name
    rmtree(folder, ignore_errors=True)
    source = download(neighbour.name, neighbour.version, folder)
    if source is None:
        sys.exit(f"The source of {neighbour.name} {neighbour.version} cannot be downloaded.")
    for name, text in neighbour.given:
        path = source / neighbour.paths[0] / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return source


def run(neighbour: Neighbour, source: Path, backend: str, url: str) -> Outcomes:
    report = source.parent / f"{backend.partition('.')[0]}.xml"
    command = [str(PYTHON), "-m", "pytest", "-p", "swapped_backend", "-p", "no:cacheprovider"]
    # Neither its own options (coverage) nor this project, of which there is a part above.
    command += ["--override-ini=addopts=", "--override-ini=django_find_project=false"]
    command += ["--quiet", f"--junitxml={report}", *neighbour.paths]
    command += [f"--ignore-glob=*/test_{name}.py" for name in neighbour.left_out]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), str(ROOT))),
        "DJANGO_SETTINGS_MODULE": neighbour.settings,
        "NEIGHBOUR_BACKEND": backend,
        "NEIGHBOUR_URL": url,
    }
    ended = f"did not end within {TIMEOUT_SECONDS} seconds"
    with report.with_suffix(".log").open("w") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(
            command,
            cwd=source,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        ended = "did not run"
    if not report.exists():
        sys.exit(f"The tests of {neighbour.name} {ended}: see {report.with_suffix('.log')}")
    return outcomes(report)


def on_both(neighbour: Neighbour, source: Path) -> list[Outcomes]:
    found = []
    for backend in BACKENDS:
        with RedisServer() as server:
            found.append(run(neighbour, source, backend, server.url.rpartition("/")[0]))
    return found


def differences(theirs: Outcomes, ours: Outcomes) -> list[str]:
    return sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))


def outcomes(report: Path) -> Outcomes:
    """A test may be in the report several times, once for each of its parts: then the worst."""
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}.{case.get('name')}"
        kinds = {child.tag for child in case} & {"error", "failure", "skipped"}
        found[name] = min(min(kinds, default="passed"), found.get(name, "skipped"))
    return found


def main(names: Sequence[str]) -> int:
    """Returns 1 if a test ends otherwise on our backend, or if a package's tests do not run."""
    unknown = set(names) - {each.name for each in NEIGHBOURS}
    if unknown:
        sys.exit(f"not among the neighbours: {', '.join(sorted(unknown))}")
    chosen = [each for each in NEIGHBOURS if not names or each.name in names]
    install()
    print("| package | version | tests | passed | failed | skipped | different |")
    print("|---|---|--:|--:|--:|--:|--:|")
    failed = False
    for neighbour in chosen:
        if not neighbour.paths:
            print(f"| {neighbour.name} | {neighbour.version} | none in its source distribution |")
            continue
        source = source_of(neighbour)
        theirs, ours = on_both(neighbour, source)
        different = differences(theirs, ours)
        if different:  # Some depend on the clock: a cool-off of two seconds, on a busy machine.
            different = sorted({*different} & {*differences(*on_both(neighbour, source))})
        failed = failed or bool(different) or "passed" not in ours.values()
        counted = Counter(ours.values())
        numbers = (
            len(ours),
            counted["passed"],
            counted["failure"] + counted["error"],
            counted["skipped"],
            len(different),
        )
        cells = (neighbour.name, neighbour.version, *map(str, numbers))
        print("|", " | ".join(cells), "|", flush=True)
        for name in different:
            print(f"  {name}: {theirs.get(name)} with django-redis, {ours.get(name)} with ours")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
