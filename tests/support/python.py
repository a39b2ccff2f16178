"""Python in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python(
    *words: str | Path, cwd: Path = ROOT, code: int = 0, **variables: str | Path | None
) -> subprocess.CompletedProcess[str]:
    """Run ``python WORDS`` in this project's root, without this site's settings; it must end with
    this exit ``code``. A variable of the environment that is None is not there."""
    given = {"DJANGO_SETTINGS_MODULE": None, **variables}
    inherited = {name: value for name, value in os.environ.items() if name not in given}
    environment = {name: str(value) for name, value in given.items() if value is not None}
    done = subprocess.run(
        [sys.executable, *words],
        env={**inherited, **environment},
        cwd=cwd,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    return done
