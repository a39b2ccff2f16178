"""Source distributions of packages from the index: only they have a package's own tests."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path


def download(name: str, version: str, folder: Path) -> Path | None:
    """The source of this version of a package, unpacked in the empty or new ``folder``; None if it
    cannot be downloaded."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command = [*pip, "--no-binary", name, "--dest", str(folder)]
    if subprocess.run([*command, f"{name}=={version}"], check=False).returncode != 0:
        return None
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(path for path in folder.iterdir() if path.is_dir())
