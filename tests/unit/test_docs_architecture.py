"""What ``docs/architecture.md`` names is there."""

from __future__ import annotations

import re
from pathlib import Path

import django_redis_lock

FOLDER = Path(django_redis_lock.__file__).parent
TEXT = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()


def test_every_file_is_there() -> None:
    files = {
        name for name in re.findall(r"`([a-z_/]+\.py)`", TEXT) if not name.startswith("tests/")
    }
    assert len(files) > 20
    assert not {name for name in files if not (FOLDER / name).is_file()}


def test_every_function_is_in_its_file() -> None:
    steps = re.findall(r"`([a-z_/]+\.py)` · ((?:`\w+`(?:, )?)+)", TEXT)
    assert len(steps) > 10
    missing = [
        f"{file} · {name}"
        for file, names in steps
        for name in re.findall(r"\w+", names)
        if not re.search(
            rf"^ *(?:async )?(?:def|class) {name}\b", (FOLDER / file).read_text(), re.M
        )
    ]
    assert not missing
