"""A server that takes no further connection (``maxclients``): what the process has must do. A held
lock stays its holder's, a computation its leader's, and what was deferred is done, whether the
server was full from the beginning or the keeper's connection is cut later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis
import redis.asyncio
from django.core.cache import caches
from django.test import override_settings
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock import Lock, MultiLock, Redlock
from django_redis_lock.keeper import keeper, spare_of_a_loop
from django_redis_lock.transport import asyncio_client, pack_words, server_of
from django_redis_lock.transport.aio_client import aexchange
from tests.holding import hurry_until, until_released
from tests.processes import PATIENCE, until
from tests.redis_server import RedisServer
from tests.support.background import Background
from tests.support.tasks import in_tasks
from tests.support.values import Producer

pytestmark = pytest.mark.invariant("L4", "P3")

#: Seconds: fewer than the server is full for, so that a lock that is not renewed is lost.
TIMEOUT = 0.7


@pytest.fixture(autouse=True)
def _at_the_pace(monkeypatch: pytest.MonkeyPatch, pace: int) -> None:
    monkeypatch.setitem(globals(), "TIMEOUT", TIMEOUT * pace)


class Full:
    """The server, with no connection left but the admin's and those that are there."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.admin = server.client(retry=Retry(NoBackoff(), 0))
        self.admin.ping()

    def ids(self) -> set[int]:
        return {int(each["id"]) for each in self.admin.client_list()}

    def fill(self) -> None:
        """From now on no connection is added to those that are there."""
        self.admin.config_set("maxclients", len(self.admin.client_list()))
        with pytest.raises(redis.ConnectionError):
            self.server.client(retry=Retry(NoBackoff(), 0)).ping()

    def cut(self, but: set[int]) -> None:
        """Cut the connections that are not in ``but``, and let nothing take their room."""
        mine = self.admin.client_id()
        self.admin.config_set("maxclients", len(but | {mine}))
        for each in self.ids() - but - {mine}:
            self.admin.client_kill_filter(_id=str(each))
        until(lambda: self.ids() <= but | {mine})


@pytest.fixture
def full(own_server: RedisServer) -> Full:
    return Full(own_server)


class Held:
    """What is held, and whether it still is."""

    def __init__(self, check: Callable[[], None], end: Callable[[], None]) -> None:
        self.check, self.end = check, end


@contextmanager
def lock(full: Full, **options: Any) -> Iterator[Held]:
    held = Lock(client_of(full), "held", TIMEOUT, renew=True, **options)
    assert held.acquire()
    yield Held(held.ensure_held, held.release)


@contextmanager
def several_names(full: Full) -> Iterator[Held]:
    held = MultiLock(client_of(full), ["a", "b"], TIMEOUT, renew=True)
    assert held.acquire()
    yield Held(held.ensure_held, held.release)


@contextmanager
def redlock(full: Full) -> Iterator[Held]:
    """One of its servers is full."""
    with ExitStack() as stack:
        others = [stack.enter_context(RedisServer()).client() for _ in range(2)]
        held = Redlock([client_of(full), *others], "held", TIMEOUT, renew=True)
        assert held.acquire()
        key = held.keys.lock

        def check() -> None:
            held.ensure_held()
            assert full.admin.exists(key)

        yield Held(check, held.release)


@contextmanager
def async_lock(full: Full) -> Iterator[Held]:
    """Its connection is that of an event loop, and the keeper's is a thread."""
    with in_tasks(client_of(full)) as tasks:
        held = tasks.make_lock("held", timeout=TIMEOUT, renew=True)
        assert held.acquire()
        yield Held(held.ensure_held, held.release)


@contextmanager
def flight(full: Full) -> Iterator[Held]:
    """Another caller would compute the value once more if the flight ended."""
    backend = "django_redis_lock.cache.RedisCache"
    options = {"LOCK_FLIGHT_TIMEOUT": TIMEOUT}
    alias = {"BACKEND": backend, "LOCATION": full.server.url, "OPTIONS": options}
    with override_settings(CACHES={"default": alias}):
        cache: Any = caches["default"]
        slow = Producer()
        slow.finish.clear()
        leader = Background(cache.get_or_set, "held", slow, 60)
        assert slow.begun.wait(PATIENCE)

        def check() -> None:
            assert any(key.endswith(b"flight") for key in full.admin.keys("*held*"))

        def end() -> None:
            slow.finish.set()
            assert leader.result() == "computed"
            assert full.admin.keys("*held")

        yield Held(check, end)


def client_of(full: Full) -> redis.Redis:
    return full.server.client(retry=Retry(NoBackoff(), 0))


HELD: dict[str, Callable[[Full], Any]] = {
    "lock": lock,
    "limit": lambda full: lock(full, limit=2),
    "reentrant": lambda full: lock(full, reentrant=True),
    "several names": several_names,
    "redlock": redlock,
    "async lock": async_lock,
    "flight": flight,
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("when", ["from the beginning", "once the keeper is cut off"])
@pytest.mark.parametrize("name", HELD)
def test_what_is_held_stays(full: Full, name: str, when: str) -> None:
    before = full.ids()
    with HELD[name](full) as held:
        mine = full.ids() - before
        if when != "from the beginning":
            if name != "flight":  # For that the keeper needs no other connection.
                until(lambda: full.ids() > before | mine)
            full.cut(but=before | mine)
        full.fill()
        until_over = time.monotonic() + 1.5 * TIMEOUT
        while time.monotonic() < until_over:
            held.check()
            time.sleep(0.05)
        held.end()


def test_a_deferred_release_is_done(full: Full) -> None:
    client = client_of(full)
    held = Lock(client, "held", 60)
    assert held.acquire()
    full.fill()
    hold: Any = held.local.hold
    hold.release_later(server_of(client), 2.0)
    until(lambda: not full.admin.exists("held"))
    until_released()


def test_a_loop_that_ends_before_the_reply_is_an_outage_for_the_keeper(
    own_server: RedisServer,
) -> None:
    client = own_server.client()

    async def main() -> Any:
        await aexchange(asyncio_client(client), pack_words(b"PING"))
        spare = spare_of_a_loop(server_of(client))
        spare.send_packed_command([pack_words(b"BLPOP", b"nothing", b"0")])
        with own_server.client() as other:
            while other.info("clients")["blocked_clients"] == 0:
                await asyncio.sleep(0.005)
        return spare

    spare = asyncio.run(main())
    with pytest.raises(redis.ConnectionError):
        spare.read_response()


def test_without_any_connection_the_keeper_tries_until_one_is_free(full: Full) -> None:
    before = full.ids()
    held = Lock(client_of(full), "held", 20, renew=True)
    assert held.acquire()
    full.cut(but=before)
    full.fill()
    refused = full.admin.info("stats")["rejected_connections"]
    hurry_until(lambda: full.admin.info("stats")["rejected_connections"] > refused + 2)
    full.admin.config_set("maxclients", 100)
    keeper().hurry()
    until(lambda: full.admin.hgetall("{held}:owner"))
    held.ensure_held()
    held.release()
