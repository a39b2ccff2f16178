"""What a user installs: the wheel, built from the source distribution as a package index would."""

from __future__ import annotations

import email
import re
import runpy
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.python import python

ROOT = Path(__file__).parents[2]
#: Where nothing of the distribution is, and what a build would leave behind in the source tree.
NOT_SOURCE = (".*", "__pycache__", "build", "dist", "*.egg-info", "db.sqlite3")

pytestmark = pytest.mark.slow


def build(what: str, source: Path, into: Path) -> Path:
    """Build ``what`` ("sdist" or "wheel") from ``source`` with the setuptools installed here."""
    into.mkdir()
    code = f"from setuptools.build_meta import build_{what} as build; build({str(into)!r})"
    python("-c", code, cwd=source)
    (built,) = into.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = shutil.copytree(ROOT, folder / "source", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    return build("sdist", source, folder / "built")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        # The default from Python 3.14 on; the last patch releases of all others know it.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)
    source = folder / sdist.name.removesuffix(".tar.gz")
    return zipfile.ZipFile(build("wheel", source, folder / "built"))


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(wheel.read(name))


def test_every_file_of_the_package_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    package = ROOT / "django_redis_lock"
    wanted = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
        if path.suffix != ".po"  # The source of the catalogues that are there.
    }
    assert "django_redis_lock/py.typed" in wanted
    for language in ("de", "zh_Hans"):
        assert f"django_redis_lock/locale/{language}/LC_MESSAGES/django.mo" in wanted
    assert "django_redis_lock/migrations/0001_initial.py" in wanted
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == wanted | {"django_redis_lock_pytest.py"}


#: What somebody does who has installed it: settings, migrations, a lock, the list of locks.
SMOKE = """
import sys
import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_redis_lock"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    CACHES={"default": {"BACKEND": "django_redis_lock.cache.LocMemCache"}},
)
django.setup()
import django_redis_lock
from django.core.cache import cache
from django.core.management import call_command

assert django_redis_lock.__file__.startswith(sys.argv[1]), django_redis_lock.__file__
call_command("check")
call_command("migrate", verbosity=0)
with cache.lock("import") as lock:
    assert cache.get_or_set("report", lambda: "done", 60) == "done"
    call_command("locks")
"""


@pytest.mark.sample(0)
def test_what_is_installed_from_the_wheel_works(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    place = tmp_path / "site"
    install = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile")
    python(*install, "--target", place, str(wheel.filename))
    done = python("-c", SMOKE, place, cwd=tmp_path, PYTHONPATH=place)
    assert "1 lock is held" in done.stdout


def test_the_description_has_no_link_that_is_dead_on_a_package_index(
    metadata: email.message.Message,
) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "## Quick start" in text
    assert "## Which part do I need?" in text
    assert "make demo" not in text, "it needs the sources, which have no URL yet"
    targets = re.findall(r"\]\(([^)]*)\)", text)
    assert [target for target in targets if not re.match(r"https?://", target)] == []


def test_links_lead_to_the_source_once_it_has_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("setuptools.setup", lambda **options: None)
    setup = runpy.run_path("setup.py")
    readme = "![x](docs/x.png) [a](docs/a.md#b) [c](https://c.example)"
    assert setup["description"](readme, "") == " a [c](https://c.example)"
    at = "https://s.example/x"
    assert setup["description"](readme, at) == (
        f"![x]({at}/raw/HEAD/docs/x.png) [a]({at}/blob/HEAD/docs/a.md#b) [c](https://c.example)"
    )
    assert setup["source_url"](f'[project.urls]\nSource = "{at}/"\n') == at
    assert setup["source_url"]('Source = "https://s.example/OWNER/x"\n') == ""


def test_what_it_takes_to_run_the_tests_comes_with_the_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "ruff.toml", "tests/conftest.py", "manage.py"} <= names
    assert "testproject/settings.py" in names
    assert not any(name.endswith(".png") for name in names)
    assert sdist.stat().st_size < 2_000_000
