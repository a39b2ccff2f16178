"""Each optional part can be deleted: the core works without it, and what needs it says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import django_redis_lock
from tests.redis_server import GivenServer, RedisServer

FOLDER = Path(django_redis_lock.__file__).parent
PARTS = sorted(
    path.stem
    for path in (FOLDER / "contrib").iterdir()
    if path.stem not in ("__init__", "__pycache__")
)


@pytest.mark.sample(7)
@pytest.mark.parametrize("part", PARTS)
def test_the_core_works_without(
    part: str, tmp_path: Path, redis_server: RedisServer | GivenServer
) -> None:
    copy = tmp_path / FOLDER.name
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("locale"))
    for path in (copy / "contrib").glob(f"{part}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("core_road.py"), part],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
