"""The two lanes of the suite. The first runs on each occasion, and has each capability, each
invariant and one run of each fault; with ``--all`` everything runs, as each night.

Cells of a table are left out by ``@pytest.mark.sample``, cases within one test by ``some``.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")

#: Whether ``--all`` was given; ``conftest`` sets it.
everything = False


def some(cases: Iterable[T], each: int) -> list[T]:
    """Each n-th of the cases; with ``--all``, all of them. Each test begins with another one, the
    same in each run."""
    first = zlib.crc32(os.environ["PYTEST_CURRENT_TEST"].partition(" ")[0].encode())
    return list(cases) if everything else list(cases)[first % each :: each]
