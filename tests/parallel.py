"""Run the tests in several processes: ``--processes N``, or ``auto``.

All tests are imported and collected once; then the processes are forked, and have them. With
pytest-xdist each process is a new interpreter that imports and collects for itself (its issues 353
and 695): with six, that was a seventh of all that this suite computes.

A process asks for more tests when it begins its last one: whether fixtures stay for the next is to
be known by then. ``testpaths`` begins with tests that wait most of their time and ends with those
that compute. Half of the processes take from the beginning and half from the end, so that while
some wait, the others use the cores.

For fixtures and plugins such a process is one of pytest-xdist: its ``config.workerinput`` has a
name. It ends with the one that has started it, also when that is killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count, pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from _pytest import tmpdir
from _pytest.capture import FDCapture

from .scheduling import units

#: Processes that ``auto`` means: for each core, and at most. With more, little is gained.
EACH_CORE, MOST = 4, 8
#: Seconds a process may take to close what its tests have used.
PATIENCE = 30
#: Seconds without any report after which the processes are looked at.
LOOK_SECONDS = 1.0
#: Of ``<sys/prctl.h>``: the signal this process gets when its parent ends.
PR_SET_PDEATHSIG = 1

fork = get_context("fork")


def number(text: str) -> int:
    """Tests wait more than they compute, so there are several processes for each core. Each has
    servers of its own; a server that was given can only be for one."""
    if text != "auto":
        return int(text)
    return 1 if os.environ.get("REDIS_URL") else min((os.cpu_count() or 1) * EACH_CORE, MOST)


def configure(config: pytest.Config) -> None:
    """Have as many processes run the tests as ``--processes`` says."""
    option = config.option
    alone = option.collectonly or option.usepdb or option.capture == "no"
    if option.processes > 1 and not alone:
        config.pluginmanager.register(Processes(config), Processes.__name__)


@dataclass
class Run:
    """A process that runs tests, as the one sees it that has started it."""

    name: str
    connection: Connection
    process: Any = None
    #: The numbers of the tests that it has and has not reported.
    tests: deque[int] = field(default_factory=deque)
    last: int = 0


class Processes:
    """Starts the processes, hands the tests out, and reports."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._number = config.option.processes
        self._started = count()
        self._runs: dict[Connection, Run] = {}
        self._left: deque[deque[int]] = deque()

    def pytest_report_collectionfinish(self) -> str:
        return f"{self._number} processes run them"

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed and not self._config.option.continue_on_collection_errors:
            return None  # pytest says so.
        self._left = units(session.items)
        try:
            for _ in range(min(self._number, len(self._left))):
                self._start(session)
            while self._runs:
                heard = wait(list(self._runs), LOOK_SECONDS)
                for run in [self._runs[connection] for connection in heard]:
                    self._hear(run, session)
                    if session.shouldfail:
                        raise session.Failed(session.shouldfail)
                    if session.shouldstop:
                        raise session.Interrupted(session.shouldstop)
                for run in list(self._runs.values()) if not heard else ():
                    # What a test has forked may have the connection still.
                    if not run.process.is_alive():
                        self._end(run, session)
        finally:
            for run in self._runs.values():
                run.connection.close()  # After its present test, it ends.
            for run in self._runs.values():
                run.process.join(PATIENCE)
                run.process.kill()
        return True

    def _start(self, session: pytest.Session) -> None:
        ours, theirs = fork.Pipe()
        number = next(self._started)
        self._runs[ours] = run = Run(f"gw{number}", ours)
        folder = self._config._tmp_path_factory.getbasetemp() / run.name
        others = list(self._runs)
        arguments = (session, run.name, theirs, others, str(folder))
        run.process = fork.Process(target=_process, args=arguments)
        run.process.start()
        theirs.close()

    def _hear(self, run: Run, session: pytest.Session) -> None:
        try:
            kind, *content = run.connection.recv()
        except EOFError:
            self._end(run, session)
            return
        if kind == "more":
            self._hand_out(run)
        elif kind == "reports":
            run.last = run.tests.popleft()
            self._report(session.items[run.last], *content)
        elif kind == "warning":
            self._warn(*content)
        else:
            raise RuntimeError(*content)

    def _hand_out(self, run: Run) -> None:
        tests: deque[int] = deque()
        if self._left:
            from_the_end = int(run.name[2:]) % 2
            tests = self._left.pop() if from_the_end else self._left.popleft()
        run.tests += tests
        run.connection.send(list(tests))

    def _report(self, item: pytest.Item, reports: list[dict[str, Any]]) -> None:
        hook = self._config.hook
        for data in reports:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _warn(self, message: tuple[Any, ...], where: dict[str, Any]) -> None:
        warning = warnings.WarningMessage(*message)
        found = {"warning_message": warning, **where}
        self._config.hook.pytest_warning_recorded.call_historic(kwargs=found)

    def _end(self, run: Run, session: pytest.Session) -> None:
        """What it had begun has failed, if it has not ended as it should; another one does what it
        has left."""
        del self._runs[run.connection]
        run.connection.close()
        run.process.join()
        if run.tests or run.process.exitcode:
            when = "call" if run.tests else "teardown"
            number = run.tests.popleft() if run.tests else run.last
            item = session.items[number]
            said = f"The process of this test has ended with exit status {run.process.exitcode}"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", said, when)
            self._config.hook.pytest_runtest_logreport(report=report)
        if run.tests:
            self._left.appendleft(run.tests)
        if self._left and len(self._runs) < self._number:
            self._start(session)


def _process(
    session: pytest.Session,
    name: str,
    connection: Connection,
    others: list[Connection],
    folder: str,
) -> None:
    """Run tests as long as there are some."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    for other in others:
        other.close()
    config = session.config
    config.workerinput = {"workerid": name}
    config.pluginmanager.unregister(name=Processes.__name__)
    config.pluginmanager.register(Reports(config, connection))
    _write_for_itself(config)
    config.option.basetemp = folder
    tmpdir.pytest_configure(config)
    with suppress(KeyboardInterrupt, EOFError, ConnectionError):
        try:
            items = (session.items[test] for test in _tests(connection))
            for item, nextitem in pairwise(chain(items, [None])):
                config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
        except Exception:
            connection.send(("error", traceback.format_exc()))
            raise
        finally:
            config.hook.pytest_sessionfinish(session=session, exitstatus=0)


def _tests(connection: Connection) -> Iterator[int]:
    while True:
        connection.send(("more",))
        tests = connection.recv()
        if not tests:
            return
        yield from tests


def _write_for_itself(config: pytest.Config) -> None:
    """What tests print goes to files of this process's own. What pytest says of the tests, the
    process says that has started this one."""
    capture = config.pluginmanager.getplugin("capturemanager")._global_capturing
    for each in (capture.out, capture.err):
        if isinstance(each, FDCapture):
            with tempfile.TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), each.tmpfile.fileno())
    config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115  # to the end


class Reports:
    """Tells the process that reports. Of a test that passes, one thing, that it has: what pytest
    says of its set-up and its end takes longer than most tests. All is sent where somebody reads
    it (``--verbose``, ``--durations``, ``--junit-xml``)."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        option = config.option
        self._all = bool(option.verbose > 0 or option.durations is not None or option.xmlpath)
        self._config = config
        self._connection = connection
        self._reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call" and not self._all:
            return
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(("reports", self._reports))
        self._reports = []

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        told = warning_message
        message = (str(told.message), told.category, told.filename, told.lineno)
        where = {"when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", message, where))
