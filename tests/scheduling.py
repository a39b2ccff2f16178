"""Which tests stay together where several processes run them.

Each test function may run in another process, so that none is left with much when the others end;
but a file stays together whose fixtures are made once, and so do those that read the same sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

#: What starts for these is started once.
TOGETHER = "tests/browser/"
#: What a file has that stays together: a fixture for all of it, or something that it remembers.
MADE_ONCE = ('scope="module"', "from functools import cache")
#: What all files have that read the package's sources.
SOURCES = "from tests.support.sources import"


def units(items: Iterable[pytest.Item]) -> deque[deque[int]]:
    """The numbers of the tests that stay together, in the order of the first of them."""
    found: dict[str, deque[int]] = {}
    for number, item in enumerate(items):
        scope = _scope(item.nodeid.partition("[")[0], item.path)
        found.setdefault(scope, deque()).append(number)
    return deque(found.values())


@cache
def _scope(function: str, path: Path) -> str:
    if function.startswith(TOGETHER):
        return TOGETHER
    text = _text(path)
    if SOURCES in text:
        return SOURCES
    return str(path) if any(made in text for made in MADE_ONCE) else function


@cache
def _text(path: Path) -> str:
    return path.read_text()
