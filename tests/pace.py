"""In some tests something must not be over too soon: a lifetime while it is looked at, a wait until
others wait, too. On a machine that stands still for a moment, it may be. Such a test takes the
fixture ``pace`` and multiplies its seconds by it. If it fails at 1, pytest-rerunfailures runs it
again at 10, and pytest's summary lists it among the reruns. A fault fails each time. ``--pace 10``
runs only these tests, and at once at 10, so that the second try of none can fail by its own fault;
as each night.
"""

from __future__ import annotations

import pytest

SLOWER = 10


@pytest.fixture
def pace(request: pytest.FixtureRequest) -> int:
    """By what this test multiplies the seconds that it gives to others: 1, then more."""
    given: int | None = request.config.getoption("pace")
    return given or (SLOWER if getattr(request.node, "execution_count", 1) > 1 else 1)


def is_paced(item: pytest.Item) -> bool:
    return "pace" in getattr(item, "fixturenames", ())
