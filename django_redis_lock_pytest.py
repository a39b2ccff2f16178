"""The fixture ``redis_locks``. pytest imports this module in every project that has
django_redis_lock; so it is no part of the package, which is imported only by those who use it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from django_redis_lock.contrib.testing import MemoryServer


@pytest.fixture
def redis_locks() -> Iterator[MemoryServer]:
    """All locks and caches in memory: ``django_redis_lock.testing.override()``; gives its
    server."""
    from django_redis_lock.contrib.testing import override  # noqa: PLC0415  # see above

    with override() as server:
        yield server
