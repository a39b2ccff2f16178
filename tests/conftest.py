"""Fixtures: an empty Redis for each test outside ``tests/unit``.

``client`` here is a redis-py client; for views there is ``django.test.Client``.
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.test import override_settings
from hypothesis import settings as hypothesis_settings

from django_redis_lock import keeper
from django_redis_lock.contrib import metrics, redlock, unique_tasks
from django_redis_lock.contrib.fallback import file_lock
from django_redis_lock.contrib.locmem.memory import Database, client_of
from django_redis_lock.contrib.metrics import collecting
from django_redis_lock.decorators import section
from django_redis_lock.protocol import acquisition
from django_redis_lock_pytest import redis_locks  # noqa: F401  # as projects have it

from . import lanes
from .pace import is_paced, pace  # noqa: F401  # a fixture
from .processes import LAST_TRY, STARTUP
from .redis_server import GivenServer, RedisServer
from .redis_topologies import ClusterServers, SentinelServers, cluster, sentinels
from .support.machine import Watch
from .support.quiet import until_quiet

# How long one example takes says something of the machine only.
hypothesis_settings.register_profile("no deadline", deadline=None)
hypothesis_settings.load_profile("no deadline")

ROOT = Path(__file__).parents[1]
WATCH = pytest.StashKey[Watch]()
#: Workers for each core, and at most. With more, little is gained.
EACH_CORE, MOST = 4, 8
INTEGRATION, UNIT = "tests/integration/", "tests/unit/"
TOPOLOGIES = "tests/integration/topologies/"
GROUPS = {"sentinel_servers", "cluster_servers"}
NOT_ON_FAKEREDIS = ("test_flight_scripts", "test_index_of_another_type_is_replaced")
_groups = ExitStack()
AT_LAST = acquisition.LAST_TRY_SECONDS

# To store the password of a test's user takes a third of a second otherwise.
settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

# redis-py from 8 on looks its version up on disk for each client and each connection: half a
# millisecond, thousands of times.
redis.utils.get_lib_version = cache(redis.utils.get_lib_version)

if str(STARTUP) not in (path := os.environ.get("PYTHONPATH", "")):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(STARTUP), path)))

# A server that stands still with the machine is not down.
redlock.SERVER_TIMEOUT_SECONDS = collecting.FLUSH_TIMEOUT = keeper.FLUSH_SECONDS = 5.0

# A shell without job control has started us in the background, or nohup has. The processes that
# tests start and interrupt must not inherit that.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is collected stays to the end: no search for garbage need look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what ``sample`` leaves out")
    parser.addoption("--pace", type=int, help="only what takes the fixture pace, and at this")


def pytest_configure(config: pytest.Config) -> None:
    lanes.is_named = any("::" in name for name in config.args)
    lanes.everything = config.getoption("--all") or lanes.is_named


def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: tests wait more than they compute, so several workers for each core.
    Each has servers of its own; a server that was given can only be for one."""
    return 1 if os.environ.get("REDIS_URL") else min((os.cpu_count() or 1) * EACH_CORE, MOST)


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, Any, Any]:
    result = yield
    lanes.thin(metafunc)
    return result


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    gone = set(lanes.left_out(items))
    paced = {item for item in items if is_paced(item)}
    if config.getoption("pace"):
        gone |= {item for item in items if item not in paced}
    else:
        for item in paced:
            item.add_marker(pytest.mark.flaky(reruns=1))
    if gone:
        config.hook.pytest_deselected(items=list(gone))
        items[:] = [item for item in items if item not in gone]
    # One after the other: their servers are started in few processes, and run briefly.
    items.sort(key=_uses_groups, reverse=True)


def _uses_groups(item: pytest.Item) -> bool:
    return item.nodeid.startswith(TOPOLOGIES) or not GROUPS.isdisjoint(item.fixturenames)


def pytest_report_collectionfinish() -> str | None:
    number = lanes.not_built.total()
    return f"{number} more cells of tables are not run" if number else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[WATCH] = Watch()
    # No brief wait fails because its server stands still with the machine just when it ends. Tests
    # of faults are about servers that stand still: they ask for ``patient`` themselves.
    acquisition.LAST_TRY_SECONDS = LAST_TRY if item.nodeid.startswith(INTEGRATION) else AT_LAST


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """When all that the test had is closed, what goes on in the background ends at once."""
    try:
        return (yield)
    finally:
        until_quiet()
        metrics._metrics._reset()
        if nextitem is None or not _uses_groups(nextitem):
            # They talk with each other all the time.
            _groups.close()
            _group.cache_clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    """Each failure says how busy the machine was."""
    report = yield
    if report.failed and (watch := item.stash.get(WATCH, None)):
        report.sections.append(("The machine since the test began", watch.report()))
    return report


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer | GivenServer]:
    """The server for all tests that do it no harm; ``CACHES`` and ``REDIS_URL`` lead to it."""
    given = os.environ.get("REDIS_URL")
    if given:
        server = GivenServer(given)
        yield server
        server.flush()
        return
    with RedisServer() as private, pytest.MonkeyPatch.context() as patch:
        # Also for the processes that tests start.
        patch.setenv("REDIS_URL", private.url)
        # Django has read the settings before any fixture could run, so they are read again.
        module = sys.modules[os.environ["DJANGO_SETTINGS_MODULE"]]
        with override_settings(CACHES=runpy.run_path(str(module.__file__))["CACHES"]):
            yield private


@pytest.fixture
def emptied(redis_server: RedisServer | GivenServer) -> Iterator[RedisServer | GivenServer]:
    """The server for all tests, with an empty database."""
    redis_server.flush()
    yield redis_server
    if isinstance(redis_server, RedisServer):
        _expect_nobody_waits(redis_server.asking)


@pytest.fixture
def client(emptied: RedisServer | GivenServer) -> Iterator[redis.Redis]:
    """A redis-py client of an empty database."""
    with emptied.client() as client:
        yield client


@pytest.fixture(scope="session")
def fakeredis_client() -> Iterator[redis.Redis]:
    """A client of fakeredis with its Lua: another implementation of each command than Redis's and
    than that of the server in memory. Each night, where it is installed."""
    for package in ("lupa", "fakeredis"):
        pytest.importorskip(package, reason="the package fakeredis[lua] is not installed")
    fakeredis = sys.modules["fakeredis"]
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_version=(7,))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    with redis.Redis(port=server.server_address[1]) as client:
        yield client
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(params=["redis", lanes.IN_MEMORY, lanes.ON_FAKEREDIS])
def any_client(request: pytest.FixtureRequest) -> redis.Redis:
    """``client``, or one of another empty server, for what all must do alike."""
    if request.param == "memory":
        return client_of(Database("memory"))
    if request.param == "fakeredis":
        if any(name in request.node.nodeid for name in NOT_ON_FAKEREDIS):
            pytest.skip("fakeredis sends bytes that are no text as a simple string")
        fake: redis.Redis = request.getfixturevalue("fakeredis_client")
        fake.flushall()
        return fake
    found: redis.Redis = request.getfixturevalue("client")
    return found


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """A server for one test, which may stop, kill, restart or freeze it."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def sentinel_servers() -> SentinelServers:
    """A primary, empty, with replicas and sentinels, for tests that do them no harm."""
    servers: SentinelServers = _group(sentinels)
    servers.flush()
    return servers


@pytest.fixture
def cluster_servers() -> ClusterServers:
    """A cluster, empty, for tests that do it no harm beyond moving a slot."""
    servers: ClusterServers = _group(cluster)
    servers.flush()
    return servers


@cache
def _group(make: Callable[[], AbstractContextManager[Any]]) -> Any:
    """Servers that belong together, until ``_groups`` is closed."""
    return _groups.enter_context(make())


@pytest.fixture(scope="session")
def django_db_modify_db_settings(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A database in a file: there the threads of a live server wait for each other and the test.
    SQLite in memory refuses a table that another thread reads."""
    database = settings.DATABASES["default"]
    database["TEST"]["NAME"] = str(tmp_path_factory.mktemp("database") / "db.sqlite3")
    database["OPTIONS"] = {"init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF"}


@pytest.fixture
def nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """No decorated function is known: those of other tests contradict each other, as checks would
    say."""
    monkeypatch.setattr(section, "_declared", weakref.WeakKeyDictionary())
    monkeypatch.setattr(unique_tasks.messages, "declared", weakref.WeakSet())


@pytest.fixture(autouse=True)
def _empty_redis(request: pytest.FixtureRequest) -> None:
    """Tests that only use Django's caches start with an empty Redis too; those of ``tests/unit``
    have none."""
    if not request.node.nodeid.startswith(UNIT):
        request.getfixturevalue("emptied")


@pytest.fixture(scope="session", autouse=True)
def _own_host_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Commands list the locks of this host; other workers test at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_lock, "FOLDER", f"{tmp_path_factory.mktemp('host')}/locks-%d")
        yield


@pytest.fixture
def patient() -> None:
    """No brief wait fails because its server stands still with the machine just when it ends. Until
    the next test begins."""
    acquisition.LAST_TRY_SECONDS = LAST_TRY


def _expect_nobody_waits(client: redis.Redis) -> None:
    """Whoever still waited for a lock could take one from the tests to come."""
    deadline = time.monotonic() + 2
    while (waiting := client.info("clients")["blocked_clients"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    if waiting:
        # They are this test's fault, not that of the tests to come.
        for blocked in (c for c in client.client_list() if "b" in c["flags"]):
            client.client_kill_filter(_id=blocked["id"])
    threads = ", ".join(sorted(thread.name for thread in threading.enumerate()))
    assert not waiting, f"the test has left {waiting} waiting behind; its threads: {threads}"
