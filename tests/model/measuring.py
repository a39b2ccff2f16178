"""A plugin of pytest: how long each test takes, and, under coverage, that what runs in a process
which a test starts counts as the test's."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from pathlib import Path

import pytest

CONFIG = "COVERAGE_PROCESS_CONFIG"
_seconds: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds", type=Path, help="where to write how long each test takes")


def pytest_runtest_logstart(nodeid: str) -> None:
    if config := os.environ.get(CONFIG):
        found = json.loads(base64.b64decode(config)) | {"context": nodeid}
        os.environ[CONFIG] = base64.b64encode(json.dumps(found).encode()).decode()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not (path := session.config.getoption("seconds")):
        return
    path.write_text(json.dumps(_seconds))
