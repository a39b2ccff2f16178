"""Each optional part can be deleted, with the line that names it: the core works without it, and
what needs it says so in a sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import django_redis_lock
from tests.redis_server import GivenServer, RedisServer
from tests.support.python import python

FOLDER = Path(django_redis_lock.__file__).parent
PARTS = [
    f"{folder}/{path.stem}"
    for folder in ("contrib", "ops")
    for path in sorted((FOLDER / folder).iterdir())
    if path.stem not in ("__init__", "__pycache__")
]
#: What says what is missing instead of working, by the part; all else works.
SAY_SO = {
    "contrib/locmem": {"testing.override"},
    "contrib/metrics": {"locks stats"},
    "contrib/process_tree": {"run_locked --shell"},
    "contrib/testing": {"testing.override"},
    "ops/admin": {"admin list", "admin lock", "admin events", "admin processes"},
    "ops/checks": {"check"},
    "ops/doctor": {"check", "locks doctor"},
}
#: All of it stands on these.
OF_OPS = {"admin list", "admin lock", "admin events", "admin processes", "locks", "locks stats"}
SAY_SO["ops/held_locks"] = SAY_SO["ops/facts"] = OF_OPS
SAY_SO["ops/inventory"] = {*OF_OPS, "clear", "testing.override"}


def without(part: str, folder: Path) -> Path:
    copy = folder / FOLDER.name
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("locale"))
    path = copy / part
    shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()
    return copy


def run(script: str, part: str, folder: Path, server: RedisServer | GivenServer) -> str:
    words = (Path(__file__).with_name(script), part.partition("/")[2])
    path = {"PYTHONPATH": folder, "PYTHONSAFEPATH": "1"}
    done = python(*words, REDIS_URL=server.url, **path)
    return done.stdout


@pytest.mark.sample(7)
@pytest.mark.parametrize("part", [part for part in PARTS if part.startswith("contrib/")])
def test_the_core_works_without(
    part: str, tmp_path: Path, redis_server: RedisServer | GivenServer
) -> None:
    without(part, tmp_path)
    run("core_road.py", part, tmp_path, redis_server)


@pytest.mark.sample(5)
@pytest.mark.parametrize("part", PARTS)
def test_what_people_see_works_without(
    part: str, tmp_path: Path, redis_server: RedisServer | GivenServer
) -> None:
    names = without(part, tmp_path) / "extension.py"
    module = re.escape(part.replace("/", "."))
    names.write_text(re.sub(rf'    "\w+": \("{module}\b.*\n', "", names.read_text()))
    said = json.loads(run("whole_road.py", part, tmp_path, redis_server))
    assert {name for name, text in said.items() if text} == SAY_SO.get(part, set()), said
    for text in filter(None, said.values()):
        assert "not installed" in text
        assert "\n" not in text
        assert "Error" not in text
