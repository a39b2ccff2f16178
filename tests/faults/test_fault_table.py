"""The table of ``fault_by_caller.md``: what a fault does to each caller, with a real server behind
a proxy.

Kind: a fault in one caller is a fault in all. One bad connection of a server that is well costs
nobody a call; while nothing gets through, or writes are refused, each caller does what its column
says: what passes by itself ends no wait, no renewal and no release early. Nothing is left behind,
no reply is taken for that to another call, and soon after the fault all works again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from django.conf import settings
from django.core.cache import caches
from django.core.management import BaseCommand, CommandError, call_command
from django.http import HttpResponse
from django.test import RequestFactory, override_settings
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    ResponseError,
    TryAgainError,
)

from django_redis_lock import Lock, Redlock, extension, locked
from django_redis_lock.cache import RedisCache
from django_redis_lock.contrib import instant_loss, metrics
from django_redis_lock.contrib.metrics import report
from django_redis_lock.decorators import cached_page
from django_redis_lock.exceptions import TooFewServers
from django_redis_lock.history import Heartbeat
from django_redis_lock.keeper import DeferredRelease, keeper
from django_redis_lock.locking import Renewal
from django_redis_lock.locking.waiting import QueueWatch
from django_redis_lock.ops.held_locks import held_locks
from django_redis_lock.ops.inventory import list_held, listing
from django_redis_lock.singleflight.scripts import TAKE_FLIGHT
from tests.faults.proxy import Proxy
from tests.holding import deferred_releases, hurry, settle
from tests.integration.locks.test_lock_redis_py import TLS
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.tasks import Tasks
from tests.support.values import Producer

PAGE = Path(__file__).with_name("fault_by_caller.md")
#: Seconds: the time-out of a socket, and of one with TLS; within which a call ends, whatever it
#: does; and within which all works again after a fault. The latter are generous.
TIMEOUT, TLS_TIMEOUT, SOON, AGAIN = 0.5, 3.0, PATIENCE / 2, PATIENCE
#: Errors: redis-py's, what django-redis makes of them, and a Redlock's.
FAILED = (redis.RedisError, ConnectionInterrupted, TooFewServers)
#: Where no server is.
AWAY = "127.0.0.2:"
USER, PASSWORD = "app", "secret"


class World:
    """A server, its proxy, and what leads there, during one fault."""

    def __init__(
        self, server: RedisServer, second: RedisServer, proxy: Proxy, fault: Fault, pace: int
    ) -> None:
        self.server, self.second, self.proxy = server, second, proxy
        self.fault, self.pace = fault, pace
        self.cache: Any = caches["default"]
        self._tasks = Tasks()
        self.close, self.start = self._tasks.close, self._tasks.start

    def do(self, work: Any) -> Any:
        """Await ``work`` in the event loop of this world."""
        return self.start(work).result(PATIENCE)

    def direct(self) -> redis.Redis:
        """A client that the fault does not concern, unless the server itself refuses."""
        return redis.Redis(port=self.server.port)

    def unconcerned(self) -> list[redis.Redis]:
        """Clients of what counts as two servers more."""
        return [redis.Redis(port=self.second.port, db=db) for db in (1, 2)]

    def holder(self) -> Lock:
        """Of ``name``, in another process as it were."""
        key = self.cache.lock("name").keys.lock
        lock = Lock(self.direct(), key, timeout=60, thread_local=False)
        assert lock.acquire(blocking=False)
        return lock

    @property
    def another_cache(self) -> tuple[str, dict[str, Any]]:
        """The same server, as if it were another."""
        alias = settings.CACHES["default"]
        return alias["LOCATION"].replace("127.0.0.1", "localhost"), {"OPTIONS": alias["OPTIONS"]}

    def delay_a_reply(self, proxy: Proxy) -> None:
        proxy.delay_reply(1.6 * TIMEOUT * self.pace)

    @property
    def lasts(self) -> bool:
        return self.fault.errors is not None

    def meets(self, call: Callable[[], Any]) -> None:
        """``call`` during the fault: it ends soon, as the fault says."""
        began = time.monotonic()
        if self.fault.errors is None:
            call()
        else:
            with pytest.raises(self.fault.errors):
                call()
        assert time.monotonic() - began < SOON

    def again(self, call: Callable[[], Any]) -> None:
        """``call`` after the fault: soon it works."""
        began = time.monotonic()
        while True:
            try:
                return call()
            except FAILED:
                if time.monotonic() > began + AGAIN:
                    raise
                time.sleep(0.02)

    def expect_nothing_left(self) -> None:
        until(lambda: (attempt_releases(), not self._left())[1])

    def _left(self) -> list[Any]:
        jobs = (DeferredRelease, Renewal, QueueWatch)
        left: list[Any] = [job for job in keeper().jobs() if isinstance(job, jobs)]
        left = [job for job in left if AWAY not in str(job.server)]
        names = (b"name", b"one", b"two", b"held")
        for client in (self.direct(), *self.unconcerned()):
            with client:
                # Values stay, and what is remembered of a lock.
                left += [k for k in client.keys("*") if k.rpartition(b":")[2] in names]
                left += client.keys("*:flight")
        clients = self.server.asking.client_list()
        left += [c for c in clients if "b" in c["flags"]]
        return left + clients[40:]


def attempt_releases() -> None:
    """Have the keeper try, and wait until it has."""
    hurry(DeferredRelease)
    jobs = deferred_releases()
    until(lambda: all(job.due > time.monotonic() + 0.1 or job not in keeper() for job in jobs))


# -- the faults ------------------------------------------------------------------------------------


class Fault(NamedTuple):
    """A row of the table.

    Attributes:
        errors: those of a call without a wait, or None if all goes on; then the server is well.
        refuses: whether the server answers, or its proxy does.
        itself: whether it refuses whoever comes directly, too, by a rule of its own.
        reads: whether it refuses writes only.
    """

    name: str
    happens: Callable[[World], AbstractContextManager[Any]]
    errors: tuple[type[BaseException], ...] | None = None
    refuses: bool = False
    tls: bool = False
    itself: bool = False
    reads: bool = False


@contextmanager
def once(world: World, act: Callable[[Proxy], Any]) -> Iterator[None]:
    act(world.proxy)
    yield


@contextmanager
def restarted(world: World) -> Iterator[None]:
    """It reads its data from disk."""
    with world.proxy.refusing(b"LOADING Redis is loading the dataset in memory"):
        world.proxy.cut()
        yield


@contextmanager
def credentials_refused(world: World) -> Iterator[None]:
    """As while a password is replaced: here sooner than there."""
    world.server.asking.acl_deluser(USER)  # That ends its connections, too.
    yield
    add_user(world.server)


@contextmanager
def no_more_clients(world: World, *, cut: bool = False) -> Iterator[None]:
    """``cut``: those that there are have to connect again."""
    asking = world.server.asking
    before = asking.config_get("maxclients")["maxclients"]
    asking.config_set("maxclients", 1)
    try:
        for client in asking.client_list() if cut else ():
            if not client["cmd"].startswith("client"):
                asking.client_kill_filter(_id=client["id"])
        yield
    finally:
        asking.config_set("maxclients", before)


@contextmanager
def configured(world: World, name: str, value: str, after: str) -> Iterator[None]:
    world.server.asking.config_set(name, value)
    try:
        yield
    finally:
        world.server.asking.config_set(name, after)


@contextmanager
def failed_save(world: World) -> Iterator[None]:
    """Its folder is gone, as a disk that is full or was removed."""
    asking, folder = world.server.asking, world.server._folder / "gone"
    folder.mkdir()
    asking.config_set("dir", str(folder))
    folder.rmdir()
    with configured(world, "save", "3600 1", ""):
        with suppress(redis.ResponseError):  # The server may have begun one by itself.
            asking.bgsave()
        until(lambda: asking.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield


@contextmanager
def replica(world: World) -> Iterator[None]:
    world.server.asking.replicaof("127.0.0.1", "1")
    try:
        yield
    finally:
        world.server.asking.replicaof("NO", "ONE")


@contextmanager
def replica_without_link(world: World) -> Iterator[None]:
    with configured(world, "replica-serve-stale-data", "no", "yes"), replica(world):
        yield


def add_user(server: RedisServer) -> None:
    words = ("on", f">{PASSWORD}", "allkeys", "allchannels", "+@all")
    server.asking.execute_command("ACL", "SETUSER", USER, *words)


def refused(reply: bytes) -> Callable[[World], AbstractContextManager[Any]]:
    return lambda world: world.proxy.refusing(reply)


NO_ANSWER = (redis.TimeoutError, redis.ConnectionError)
FAULTS = [
    Fault("one reply later than the time-out", lambda w: once(w, w.delay_a_reply)),
    Fault("one reset after a request", lambda w: once(w, Proxy.reset_after_request)),
    Fault("idle connections are reset", lambda w: once(w, Proxy.reset)),
    Fault("connections are forgotten", lambda w: once(w, Proxy.forget)),
    Fault("`max number of clients`, with a connection", no_more_clients),
    Fault("accepted, never answered", lambda w: w.proxy.unanswered(), NO_ANSWER),
    Fault("another program answers", lambda w: w.proxy.another_program(), (redis.ConnectionError,)),
    Fault("reset in the handshake", lambda w: w.proxy.no_handshake(), (redis.ConnectionError,)),
    Fault(
        "TLS handshake cut", lambda w: w.proxy.no_handshake(), (redis.ConnectionError,), tls=True
    ),
    Fault("`WRONGPASS`", credentials_refused, (AuthenticationError,)),
    Fault("`NOAUTH`", refused(b"NOAUTH Authentication required."), (AuthenticationError,)),
    Fault("`upstream failure`", refused(b"upstream failure"), (ResponseError,)),
    Fault("`Connection refused` of a proxy", refused(b"ERR Connection refused"), (ResponseError,)),
    Fault("`LOADING`", restarted, (BusyLoadingError,), True),
    # A call that may last so long ends by its own time-out, or by the server's refusal.
    Fault("`BUSY`", refused(b"BUSY Redis is busy running a script."), NO_ANSWER, True),
    Fault("`CLUSTERDOWN`", refused(b"CLUSTERDOWN The cluster is down"), (ClusterDownError,), True),
    Fault("`TRYAGAIN`", refused(b"TRYAGAIN Multiple keys request"), (TryAgainError,), True),
    Fault(
        "`max number of clients`, without a connection",
        lambda w: no_more_clients(w, cut=True),
        (redis.ConnectionError,),
        True,
        itself=True,
    ),
    Fault("`MASTERDOWN`", replica_without_link, (ResponseError,), True, itself=True),
    *(
        Fault(name, happens, (ResponseError,), True, itself=True, reads=True)
        for name, happens in {
            "`READONLY`, no other server": replica,
            "`NOREPLICAS`": lambda w: configured(w, "min-replicas-to-write", "1", "0"),
            "`OOM`": lambda w: configured(w, "maxmemory", "1kb", "0"),
            "`MISCONF`": failed_save,
        }.items()
    ),
]


# -- the callers -----------------------------------------------------------------------------------

Caller = Callable[[World], Iterator[None]]

#: The columns: what callers do while all goes on, while the server refuses, and, if that is
#: another thing, while it cannot be reached.
COLUMNS = {
    "call without a wait": ("works", "error"),
    "with a `blocking_timeout`": ("works", "waits", "error"),
    "waiter": ("waits on", "waits on"),
    "Redlock's member": ("works", "counts as away"),
    "renewal": ("still held", "later"),
    "release": ("works", "later"),
    "subscription": ("told", "told later"),
    "fallback": ("not used", "used"),
    "`get_or_set` and its like": ("works", "computes, returns"),
    "leader, follower": ("value stored, followed", "value returned, follower goes on"),
    "`cache.get`, `set`": ("works, or redis-py's error", "error"),
    "`locked` view, command": ("works", "503, exit code"),
    "page": ("works", "computed"),
    "metrics, inventory": ("works", "error"),
}
#: What is otherwise while only writes are refused.
READS = {"`cache.get`, `set`": "reads work", "metrics, inventory": "works"}
#: Each runs to its first ``yield`` before the fault, to the second while it lasts, and then to its
#: end.
CALLERS: dict[str, tuple[str, Caller]] = {}


def caller(column: str, name: str = "") -> Callable[[Caller], Caller]:
    def note(function: Caller) -> Caller:
        assert column in COLUMNS
        CALLERS[name or function.__name__] = column, function
        return function

    return note


def calling(column: str, name: str, call: Callable[[World], Any]) -> None:
    @caller(column, name)
    def steps(world: World) -> Iterator[None]:
        call(world)
        yield
        if world.fault.reads and column == READING:
            call(world)
        else:
            world.meets(lambda: call(world))
        assert not world.fault.reads or not deferred_releases(), "nothing has run"
        yield
        world.again(lambda: call(world))


def take(world: World, name: Any = "name", **options: Any) -> None:
    with world.cache.lock(name, **{"blocking": False, **options}) as lock:
        lock.ensure_held()


async def atake(world: World, name: Any = "name", **options: Any) -> None:
    async with world.cache.alock(name, blocking=False, **options) as lock:
        lock.ensure_held()


def summary(world: World) -> None:
    metrics.summary()


def inventory(world: World) -> None:
    list_held(world.cache._lock_client(), world.cache._lock_key(""), 10)


WITHOUT_A_WAIT, READING = "call without a wait", "metrics, inventory"
calling(WITHOUT_A_WAIT, "lock", take)
calling(WITHOUT_A_WAIT, "limit", lambda world: take(world, limit=2))
calling(WITHOUT_A_WAIT, "several names", lambda world: take(world, ["one", "two"]))
calling(WITHOUT_A_WAIT, "async lock", lambda world: world.do(atake(world)))
calling(WITHOUT_A_WAIT, "async limit", lambda world: world.do(atake(world, limit=2)))
calling(WITHOUT_A_WAIT, "async names", lambda world: world.do(atake(world, ["one", "two"])))
calling(READING, "metrics", summary)
calling(READING, "inventory", inventory)


@caller(READING)
def held_locks_of_all_caches(world: World) -> Iterator[None]:
    assert not held_locks().failures
    yield
    assert bool(held_locks().failures) == (world.lasts and not world.fault.reads)
    yield
    until(lambda: not held_locks().failures)


@contextmanager
def attempts() -> Iterator[list[str]]:
    """Those of waiters that failed."""

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("Waiting for"):
                failed.append(record.getMessage())

    failed: list[str] = []
    logger, handler = logging.getLogger("django_redis_lock.waiting"), Kept()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield failed
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def newcomer(
    name: str, acquire: Callable[..., Callable[[], Any]], names: Any = "name", **options: Any
) -> None:
    @caller("with a `blocking_timeout`", name)
    def steps(world: World) -> Iterator[None]:
        take(world)
        world.do(atake(world))
        yield
        refused = world.proxy.refused
        with attempts() as failed:
            result = acquire(world, names, **options)
            if world.fault.refuses:
                # Of BUSY, a call bears so many refusals.
                until(lambda: len(failed) > 2 or world.proxy.refused > refused + 2)
                began, before = time.monotonic(), len(failed)
                time.sleep(0.3)
                often = (len(failed) - before) / (time.monotonic() - began)
                assert often < 50, "it polls without a pause"
            else:
                world.meets(result)
        yield
        if world.fault.refuses:
            assert result()
        world.again(lambda: take(world))


def thread_of(world: World, name: Any, **options: Any) -> Callable[[], Any]:
    def work() -> bool:
        with world.cache.lock(name, blocking_timeout=PATIENCE, **options):
            return True

    return Background(work).result


def task_of(world: World, name: Any) -> Callable[[], Any]:
    async def work() -> bool:
        async with world.cache.alock(name, blocking_timeout=PATIENCE):
            return True

    task = world.start(work())
    return lambda: task.result(PATIENCE)


newcomer("newcomer", thread_of)
newcomer("newcomer for a place", thread_of, limit=2)
newcomer("newcomer for several names", thread_of, ["one", "two"])
newcomer("newcomer task", task_of)


@caller("with a `blocking_timeout`")
def wait_that_ends_meanwhile(world: World) -> Iterator[None]:
    take(world)
    yield
    began = time.monotonic()
    with pytest.raises(FAILED) if world.lasts else nullcontext():
        take(world, blocking=True, blocking_timeout=0.3)
    # A round trip before its end.
    assert time.monotonic() - began >= 0.28 or not world.fault.refuses
    yield


def waiter(name: str, acquire: Callable[[World, Any], Callable[[], Any]]) -> None:
    @caller("waiter", name)
    def steps(world: World) -> Iterator[None]:
        holder = world.holder()
        result = acquire(world, "name")
        until(lambda: blocked(world))
        yield
        hurry()
        yield
        holder.release()
        assert result()


def blocked(world: World) -> bool:
    return bool(world.server.asking.info("clients")["blocked_clients"])


waiter("waiting thread", thread_of)
waiter("waiting task", task_of)


@caller("Redlock's member")
def redlock(world: World) -> Iterator[None]:
    member = world.cache._lock_client()
    others = world.unconcerned()
    timeout = TIMEOUT * world.pace
    away = redis.Redis(host=AWAY[:-1], port=1, socket_timeout=timeout)

    def take_with(*clients: redis.Redis) -> None:
        with Redlock(clients, "name", timeout=30, server_timeout=timeout, blocking_timeout=SOON):
            pass

    take_with(member, *others)
    yield
    take_with(member, *others)
    yield
    world.again(lambda: take_with(member, others[0], away))


@caller("renewal")
def renewal(world: World) -> Iterator[None]:
    with world.cache.lock("name", timeout=60, renew=True) as lock:
        hurry()
        settle()
        yield
        hurry()
        hurry()
        lock.ensure_held()
        yield
        key, asking = lock.keys.lock, world.server.asking
        asking.pexpire(key, 30_000)
        until(lambda: (hurry(), asking.pttl(key) > 50_000)[1])
        lock.ensure_held()


def end_of_a_block(name: str, locks: Any, **options: Any) -> None:
    @caller("release", name)
    def steps(world: World) -> Iterator[None]:
        """Of a lock that never expires."""
        lock = world.cache.lock(locks, timeout=None, **options)
        lock.acquire()
        yield
        with suppress(*FAILED if world.lasts else ()):
            lock.__exit__(None, None, None)
        for _ in range(3 if world.fault.refuses else 0):  # Once it gave it up after two refusals.
            attempt_releases()
        yield


end_of_a_block("end of a block", "name")
end_of_a_block("end of a block with a limit", "name", limit=2)
end_of_a_block("end of a block with several names", ["one", "two"])


@caller("release")
def end_of_a_block_of_a_task(world: World) -> Iterator[None]:
    async def acquire() -> Any:
        lock = world.cache.alock("name", timeout=None, thread_local=False)
        await lock.acquire()
        return lock

    lock = world.do(acquire())
    yield
    with suppress(*FAILED if world.lasts else ()):
        world.do(lock.__aexit__(None, None, None))
    yield


@caller("release")
def end_of_a_section(world: World) -> Iterator[None]:
    """``locked`` hides no result behind the error of a release."""
    slow = Producer()
    slow.finish.clear()

    @locked("name", timeout=None)
    def work() -> object:
        return slow()

    working = Background(work)
    assert slow.begun.wait(PATIENCE)
    yield
    slow.finish.set()
    assert working.result() == "computed"
    yield


@caller("subscription")
def forced_release(world: World) -> Iterator[None]:
    """The next renewal is minutes away."""
    lost = threading.Event()
    lock = world.cache.lock("name", timeout=300, on_lost=lost.set, thread_local=False)
    lock.acquire()
    operator = Lock(world.direct(), lock.keys.lock)
    assert operator.locked()  # It is connected.
    hurry()
    settle()
    yield
    if not world.fault.itself:
        assert operator.reset()
    if not world.lasts:
        assert lost.wait(PATIENCE)
    yield
    if world.fault.itself:
        assert world.again(operator.reset)
    assert lost.wait(PATIENCE)


@caller("fallback")
def fallback(world: World) -> Iterator[None]:
    take(world)
    yield
    for how in ("run", "local"):
        for wait in ({"blocking": False}, {"blocking_timeout": PATIENCE}):
            with world.cache.lock("name", on_redis_down=how, **wait) as lock:
                assert lock.degraded == (how if world.lasts else None)
    yield
    for how in ("run", "local"):
        until(lambda how=how: not fell_back(world, how))


def fell_back(world: World, how: str) -> bool:
    with world.cache.lock("name", on_redis_down=how, blocking=False) as lock:
        return lock.degraded is not None


def value(world: World, key: str) -> None:
    assert world.cache.get_or_set(key, lambda: key, 300) == key


def values(world: World, key: str) -> None:
    wanted = {key: key, f"{key}-2": f"{key}-2"}
    assert world.cache.get_or_set_many(list(wanted), lambda keys: wanted, 300) == wanted


def value_of_a_task(world: World, key: str) -> None:
    assert world.do(world.cache.aget_or_set(key, lambda: key, 300)) == key


def getting(name: str, call: Callable[[World, str], None]) -> None:
    @caller("`get_or_set` and its like", name)
    def steps(world: World) -> Iterator[None]:
        call(world, "a")
        yield
        for key in ("a", "b", "a"):
            call(world, key)
        yield
        until(lambda: (call(world, "c"), world.again(lambda: world.cache.get("c")) == "c")[1])


getting("get_or_set", value)
getting("get_or_set_many", values)
getting("aget_or_set", value_of_a_task)


@caller("leader, follower")
def computation(world: World) -> Iterator[None]:
    slow = Producer()
    slow.finish.clear()
    leader = Background(world.cache.get_or_set, "led", slow, 300)
    assert slow.begun.wait(PATIENCE)
    other = RedisCache(*world.another_cache)  # As another process.
    follower = Background(lambda: other.get_or_set("led", lambda: "other's", 300, wait=PATIENCE))
    until(lambda: blocked(world))
    yield
    slow.finish.set()
    assert leader.result() == "computed"
    if not world.lasts:
        assert follower.result() == "computed"
    yield
    until(lambda: (attempt_releases(), follower.done)[1])
    assert follower.result() in ("computed", "other's")


@caller("`cache.get`, `set`")
def reads_and_writes(world: World) -> Iterator[None]:
    """Through redis-py's pool: a reply is never taken for that to another call."""
    cache = world.cache
    cache.set("a", "a")
    cache.set("b", "b")

    def read() -> None:
        assert cache.get("a") == "a"
        assert cache.get("b") == "b"
        assert cache.get_many(["b", "a"]) == {"a": "a", "b": "b"}

    read()
    yield
    for _ in range(3):
        if world.fault.reads:
            read()
            with pytest.raises(FAILED):
                cache.set("a", "a")
        elif world.lasts:
            with pytest.raises(FAILED):
                read()
        else:
            with suppress(*FAILED):
                read()
    yield
    world.again(read)
    world.again(lambda: cache.set("a", "a"))
    read()


def answer(request: Any) -> HttpResponse:
    return HttpResponse("made")


@caller("`locked` view, command")
def view(world: World) -> Iterator[None]:
    request, locked_view = RequestFactory().get("/"), locked("name")(answer)
    locked_async_view = locked("name")(async_answer)

    def answers() -> list[Any]:
        return [locked_view(request), world.do(locked_async_view(request))]

    def are_well() -> bool:
        return [each.status_code for each in answers()] == [200, 200]

    assert are_well()
    yield
    for found in answers() if world.lasts else ():
        assert (found.status_code, "Retry-After" in found) == (503, True)
    assert world.lasts or are_well()
    yield
    until(are_well)


async def async_answer(request: Any) -> HttpResponse:
    return answer(request)


@caller("`locked` view, command")
def command(world: World) -> Iterator[None]:
    class Command(BaseCommand):
        @locked("command")
        def handle(self, *args: Any, **options: Any) -> None:
            self.stdout.write("done")

    def call() -> None:
        output = StringIO()
        call_command(Command(stderr=StringIO()), stdout=output)
        assert "done" in output.getvalue()

    call()
    yield
    if world.lasts:
        with pytest.raises(CommandError, match="could not be requested") as caught:
            call()
        assert caught.value.returncode not in (0, 1)
    else:
        call()
    yield
    world.again(call)


@caller("page")
def page(world: World) -> Iterator[None]:
    made = cached_page(300)(answer)
    for last in (False, False, True):
        assert made(RequestFactory().get("/page")).content == b"made"
        if not last:
            yield


# -- the table -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def second() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def tls(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TLS]:
    with TLS(server.port, tmp_path_factory.mktemp("tls")) as front:
        yield front


def url(port: int, host: str = "127.0.0.1", scheme: str = "redis") -> str:
    return f"{scheme}://{USER}:{PASSWORD}@{host}:{port}/0"


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    server: RedisServer,
    second: RedisServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pace: int,
) -> Iterator[World]:
    fault = request.param
    server.flush()
    second.flush()
    add_user(server)
    monkeypatch.setattr(instant_loss, "CHECK_AFTER_SECONDS", 0.3)
    # So long they bear a server that is busy; else the test would take longer, too.
    monkeypatch.setattr(report, "REPLY_TIMEOUT", 2.0)
    monkeypatch.setattr(listing, "REPLY_TIMEOUT_SECONDS", 2.0)
    monkeypatch.setattr(extension, "breaker_limits", lambda: (2, 0.3))
    options: dict[str, Any] = {"LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    options["SOCKET_TIMEOUT"] = (TLS_TIMEOUT if fault.tls else TIMEOUT) * pace
    scheme = "redis"
    with Proxy(server) as proxy:
        if fault.tls:
            scheme, front = "rediss", request.getfixturevalue("tls")
            proxy.lead_to(front)
            pool = {"ssl_ca_certs": front.certificate, "ssl_check_hostname": False}
            options |= {"CONNECTION_POOL_KWARGS": pool}
        backend = "django_redis_lock.cache.RedisCache"
        location = url(proxy.port, scheme=scheme)
        alias = {"BACKEND": backend, "LOCATION": location, "OPTIONS": options}
        with override_settings(CACHES={"default": alias}):
            world = World(server, second, proxy, fault, pace)
            yield world
            world.close()
        for job in keeper().jobs():
            if not isinstance(job, Heartbeat):
                keeper().discard(job)


@pytest.mark.parametrize("name", CALLERS)
@pytest.mark.parametrize("world", FAULTS, ids=[fault.name for fault in FAULTS], indirect=True)
@pytest.mark.invariant("L2", "P3")
def test_a_fault_and_a_caller(world: World, name: str) -> None:
    steps = CALLERS[name][1](world)
    next(steps)
    with world.fault.happens(world):
        next(steps)
    assert next(steps, None) is None
    world.expect_nothing_left()


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text()


def table() -> str:
    """Faults with the same cells are in one row."""
    faults: dict[tuple[str, ...], list[str]] = {}
    for fault in FAULTS:
        which = 0 if fault.errors is None else 1 if fault.refuses else -1
        reading = READS if fault.reads else {}
        cells = tuple(reading.get(name, cells[which]) for name, cells in COLUMNS.items())
        faults.setdefault(cells, []).append(fault.name)
    rows: list[tuple[str, ...]] = [("fault", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
    rows += [("; ".join(names), *cells) for cells, names in faults.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


@pytest.mark.parametrize("world", FAULTS[-3:], ids=lambda fault: fault.name, indirect=True)
def test_people_read_what_to_do(world: World) -> None:
    holder = world.holder()
    with world.fault.happens(world):
        output = StringIO()
        with pytest.raises(CommandError):
            call_command("locks", "doctor", stdout=output, no_color=True)
        assert "→" in output.getvalue()
        if world.fault.name != "`OOM`":  # A release needs no memory.
            with pytest.raises(
                CommandError, match=r"(?s)(NOREPLICAS|Not enough good|MISCONF).*look"
            ):
                call_command("locks", "release", "name", "--yes", stdout=StringIO())
    holder.release()


@pytest.mark.parametrize("late", [0.7, 1.6], ids=["it is nearly over", "it is over"])
@pytest.mark.parametrize("world", FAULTS[:1], ids=["late"], indirect=True)
@pytest.mark.parametrize("many", [False, True], ids=["one value", "several"])
def test_the_reply_that_makes_a_leader_comes_when_its_flight_ends(
    world: World, late: float, many: bool
) -> None:
    """Kind: what a late reply grants counts from its request."""
    location, options = world.another_cache
    options["OPTIONS"] |= {"SOCKET_TIMEOUT": PATIENCE, "LOCK_FLIGHT_TIMEOUT": 1.0 * world.pace}
    one = RedisCache(location, options)
    other = RedisCache(location.replace("localhost", "127.0.0.1"), options)
    one.get_or_set("warm", lambda: 1, 300)
    slow, second = Producer("first"), Producer("second")
    slow.finish.clear()

    def lead() -> object:
        if many:
            return one.get_or_set_many(["led"], lambda _: {"led": slow()}, 300)["led"]
        return one.get_or_set("led", slow, 300)

    # A single value that a read has just missed needs no script.
    world.proxy.delay_reply(late * world.pace, TAKE_FLIGHT.sha.encode() if many else b"NX")
    leader = Background(lead)
    assert slow.begun.wait(PATIENCE)
    # Nobody has renewed it so far: is it over now?
    time.sleep(max(0.0, 1.2 - late) * world.pace)
    follower = Background(lambda: other.get_or_set("led", second, 300, wait=PATIENCE))
    until(lambda: blocked(world) or second.calls)
    slow.finish.set()
    assert leader.result() == follower.result() == "first"
    assert (slow.calls, second.calls) == (1, 0)
