"""A process that is told to end while it holds a lock."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import redis

from django_redis_lock import Lock
from django_redis_lock.locking import unwinding

from ..processes import Link, processes
from ..redis_server import RedisServer

ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def work(link: Link, url: str) -> None:
    with redis.Redis.from_url(url) as client, unwinding(), Lock(client, "import", timeout=60):
        link.say("at work")
        while True:  # A signal that comes just before a wait without end does not end that.
            time.sleep(0.1)


@pytest.mark.parametrize("number", ENDINGS)
def test_a_signal_that_ends_it_releases(
    client: redis.Redis, redis_server: RedisServer, number: signal.Signals
) -> None:
    with processes(work, redis_server.url) as crew:
        crew.go()
        assert crew[0].hear() == "at work"
        os.kill(crew[0].pid, number)
        assert Lock(client, "import", timeout=5).acquire(blocking_timeout=20)
        with pytest.raises(SystemExit) as ended:
            crew[0].result()
        assert ended.value.code == 128 + number


def test_the_handlers_of_before_come_back() -> None:
    before = [signal.getsignal(number) for number in ENDINGS]
    with unwinding():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in ENDINGS] == before


def test_a_handler_that_is_set_meanwhile_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with unwinding():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_which_gets_no_signals_nothing_changes() -> None:
    found: list[object] = []

    def ask() -> None:
        with unwinding():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]
