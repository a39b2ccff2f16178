"""How a test is run and reported.

In some tests something must not be over too soon: a lifetime while it is looked at, a wait until
others wait, too. On a machine that stands still for a moment, it may be. Such a test takes the
fixture ``pace`` and multiplies its seconds by it. If it fails at 1, it runs again at 10, and the
run says so among its warnings. A fault fails each time. ``--pace 10`` runs only these tests, and at
once at 10, so that the second try of none can fail by its own fault; as each night.

Of a test that passes, a process that runs tests for another tells one thing, that it has. pytest
has six messages for it, and they take longer than most tests; all are sent where somebody reads
them (``--verbose``, ``--durations``, ``--junit-xml``).
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
    brief = _brief(item.config)
    again = is_paced(item) and not item.config.getoption("pace")
    if not (brief or again):
        return None
    if not brief:
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, nextitem=nextitem, log=False)
    if again and (failed := [report for report in reports if report.failed]):
        told = "; ".join(content for name, content in failed[0].sections if "machine" in name)
        crash = getattr(failed[0].longrepr, "reprcrash", None)
        error = getattr(crash, "message", failed[0].when)
        warnings.warn(f"{item.nodeid} was too quick: {error} ({told})", stacklevel=1)
        item.stash[PACE] = SLOWER
        item._initrequest()
        reports = runtestprotocol(item, nextitem=nextitem, log=False)
    for report in reports:
        if not (brief and report.passed and report.when != "call"):
            item.ihook.pytest_runtest_logreport(report=report)
    if not brief:
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _brief(config: pytest.Config) -> bool:
    reads = config.option
    read = reads.verbose > 0 or reads.durations is not None or getattr(reads, "xmlpath", None)
    return hasattr(config, "workerinput") and not read
