"""In some tests something must not be over too soon: a lifetime while it is looked at, a wait until
others wait, too. On a machine that stands still for a moment, it may be. Such a test takes the
fixture ``pace`` and multiplies its seconds by it. If it fails at 1, it runs again at 10, and the
run says so among its warnings. A fault fails each time. ``--pace 10`` runs only these tests, and at
once at 10, so that the second try of none can fail by its own fault; as each night.
"""

from __future__ import annotations

import warnings

import pytest
from _pytest.runner import runtestprotocol

SLOWER = 10
PACE = pytest.StashKey[int]()


@pytest.fixture
def pace(request: pytest.FixtureRequest) -> int:
    """By what this test multiplies the seconds that it gives to others: 1, then more."""
    found: int = request.node.stash.get(PACE, request.config.getoption("pace") or 1)
    return found


def is_paced(item: pytest.Item) -> bool:
    return "pace" in getattr(item, "fixturenames", ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not is_paced(item) or item.config.getoption("pace"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if failed := [report for report in reports if report.failed]:
        told = "; ".join(content for name, content in failed[0].sections if "machine" in name)
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        error = getattr(crash, "message", failed[0].when)
        warnings.warn(f"{item.nodeid} was too quick: {error} ({told})", stacklevel=1)
        item.stash[PACE] = SLOWER
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
