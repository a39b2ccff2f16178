"""A process that can start no further thread, or is interrupted while it starts one."""

from __future__ import annotations

import _thread
import logging
from typing import Any

import pytest
import redis
from django.core.cache import caches

from django_redis_lock import Lock, Redlock
from tests.holding import renew
from tests.processes import Link, processes, until
from tests.redis_server import RedisServer
from tests.support.interrupts import Interrupt
from tests.support.redlocks import AMPLE


def crowded(link: Link, address: str) -> None:
    def start(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("django_redis_lock.keeper").addHandler(handler)
    clients = [redis.Redis.from_url(f"{address}/{db}") for db in range(3)]
    renewed, released = (Lock(clients[0], name, 60, renew=True) for name in ("renewed", "released"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", start)
        assert caches["default"].get_or_set("value", str, 60) == "cached"
        assert not said  # Its figures are written as the process ends.
        assert renewed.acquire()
        assert "locks will not be renewed: can't start new thread" in said[0]
        with released, Redlock(clients, "of several", 60, server_timeout=AMPLE, blocking=False):
            pass
    assert not clients[0].exists("released")
    assert Lock(clients[0], "another", 60).acquire()
    renew(clients[0], "renewed")


def test_locks_are_renewed_once_threads_can_be_started_again(
    client: redis.Redis, own_server: RedisServer
) -> None:
    """Until then the log says that they are not."""
    caches["default"].set("value", "cached")
    with processes(crowded, own_server.url.rpartition("/")[0]) as crew:
        crew.go()
        crew.results()


def interrupted(link: Link, url: str, begins: bool) -> None:
    begin, client = _thread.start_new_thread, redis.Redis.from_url(url)

    def start(*args: Any) -> None:
        if begins:
            begin(*args)
        raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_thread, "start_new_thread", start)
        with pytest.raises(Interrupt):
            Lock(client, "interrupted", 60).acquire(blocking=False)
    if not begins:  # Whose thread does it.
        assert Lock(client, "another", 60).acquire()
    until(lambda: not client.exists("interrupted"))


@pytest.mark.parametrize("begins", [True, False])
def test_what_an_interrupted_acquire_got_is_released(
    client: redis.Redis, redis_server: RedisServer, begins: bool
) -> None:
    """A signal handler raises, again and again, when the keeper's thread is about to begin."""
    with processes(interrupted, redis_server.url, begins) as crew:
        crew.go()
        crew.results()
