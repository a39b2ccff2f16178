"""What a user installs: the wheel, built from the source distribution as a package index would."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from django_redis_lock import __version__

ROOT = Path(__file__).parents[2]
#: Where nothing of the distribution is, and what a build would leave behind in the source tree.
NOT_SOURCE = (".*", "__pycache__", "build", "dist", "*.egg-info", "db.sqlite3")

pytestmark = pytest.mark.slow


def build(what: str, source: Path, into: Path) -> Path:
    """Build ``what`` ("sdist" or "wheel") from ``source`` with the setuptools installed here."""
    into.mkdir()
    code = f"from setuptools.build_meta import build_{what} as build; build({str(into)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
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
    }
    assert "django_redis_lock/py.typed" in wanted
    for language in ("de", "zh_Hans"):
        assert f"django_redis_lock/locale/{language}/LC_MESSAGES/django.mo" in wanted
    assert "django_redis_lock/migrations/0001_initial.py" in wanted
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == wanted | {"django_redis_lock_pytest.py"}


def test_name_version_and_licence(metadata: email.message.Message, wheel: zipfile.ZipFile) -> None:
    assert metadata["Name"] == "django-redis-lock"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata["Requires-Python"] == ">=3.10"
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_what_is_required(metadata: email.message.Message) -> None:
    required = {
        requirement.partition(";")[0].strip()
        for requirement in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in requirement
    }
    assert required == {"django>=5.2", "django-redis>=7", "redis<9,>=5.0"}


def test_what_it_takes_to_run_the_tests_comes_with_the_source(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "Makefile", "ruff.toml", "tests/conftest.py", "manage.py"} <= names
    assert "testproject/settings.py" in names
