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


def work(link: Link, url: str) -> None:
    with redis.Redis.from_url(url) as client, unwinding(), Lock(client, "import", timeout=60):
        link.say("at work")
        while True:  # A signal that comes just before a wait without end does not end that.
            time.sleep(0.1)


def test_sigterm_releases(client: redis.Redis, redis_server) -> None:
    with processes(work, redis_server.url) as crew:
        crew.go()
        assert crew[0].hear() == "at work"
        os.kill(crew[0].pid, signal.SIGTERM)
        assert Lock(client, "import", timeout=5).acquire(blocking_timeout=20)
        with pytest.raises(SystemExit) as ended:
            crew[0].result()
        assert ended.value.code == 128 + signal.SIGTERM


def test_the_handlers_of_before_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with unwinding(signal.SIGTERM, signal.SIGHUP):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_main_thread_can_ask_for_it() -> None:
    refused: list[BaseException] = []

    def ask() -> None:
        try:
            with unwinding():
                pass
        except ValueError as error:
            refused.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert len(refused) == 1


def test_an_unknown_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="signal"), unwinding(signal.SIGTERM, 12345):
        pass
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
