"""What a grant is worth that a waiter's blocking pop brings. Decisions only: no Redis runs here."""

from __future__ import annotations

import math
import socket
import time
from typing import Any

import pytest
import redis
from redis.connection import _RESP2Parser

from django_redis_lock.keeper import Job, Keeper, SentOnce
from django_redis_lock.locking.waiting.queue import QueueWatch, WaitQueue
from django_redis_lock.locking.waiting.threads import PendingReply, ThreadWakeEvent
from django_redis_lock.protocol import Call
from django_redis_lock.protocol.acquisition import MAX_GRANT_AGE_SECONDS, AcquireRequest, Clock
from django_redis_lock.protocol.identity import new_token
from django_redis_lock.protocol.keys import lock_keys
from django_redis_lock.protocol.lock_scripts import TAKE_GRANT
from django_redis_lock.transport import Server

KEYS = lock_keys(b"report")
#: What the server's clock shows at the beginning of each test, in microseconds.
NOW = 1_800_000_000_000_000


class FakeServer:
    def answered(self) -> None:
        pass


class FakeQueue(WaitQueue):
    def end(self) -> None:
        pass

    def wake(self) -> None:
        pass


class FakeWaiter:
    turn: Any = None


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """What the keeper is given to do."""
    given: list[Job] = []
    monkeypatch.setattr(Keeper, "add", lambda self, job: given.append(job))
    return given


def request(grant_timeout: float = 2.0, attempt: bytes = b"", **options: Any) -> AcquireRequest:
    lifetime = options.get("lifetime", 30.0)
    return AcquireRequest(KEYS, new_token(), attempt, lifetime, grant_timeout, [])


def queue_for(wanted: AcquireRequest) -> FakeQueue:
    server: Any = FakeServer()
    queue = FakeQueue(server, wanted)
    queue.clock = Clock(NOW, time.monotonic())
    return queue


def grant_made(ago: float) -> tuple[bytes, bytes]:
    """What the pop answers; ``ago`` in seconds."""
    return KEYS.grants, b"T:%d" % (NOW - ago * 1e6)


def deadline(wanted: AcquireRequest, ago: float) -> float | None:
    """Until when a grant is believed."""
    grant = queue_for(wanted).received(wanted, grant_made(ago))
    assert grant is not None
    assert grant.grant.token == b"T"
    return grant.until


class TestAge:
    def test_a_fresh_grant_is_the_lock_as_long_as_it_lasts(self) -> None:
        until = deadline(request(), ago=0.1)
        assert until is not None
        assert 1.8 < until - time.monotonic() <= 1.9

    def test_the_lock_has_the_token_and_the_fence_of_its_grant(self) -> None:
        wanted = request()
        grant = queue_for(wanted).received(wanted, grant_made(0.1))
        assert grant is not None
        acquired = wanted.acquired_by_grant(grant.grant, grant.arrived_at, grant.arrived_at)
        assert (acquired.token, acquired.fence) == (b"T", NOW - 100_000)

    @pytest.mark.parametrize(
        "ago", [MAX_GRANT_AGE_SECONDS + 0.01, 3, 3600, -MAX_GRANT_AGE_SECONDS - 1, -3600]
    )
    def test_an_old_grant_must_be_confirmed_and_so_must_one_from_the_future(
        self, ago: float
    ) -> None:
        assert deadline(request(), ago) is None

    @pytest.mark.parametrize("grant_timeout", [0.01, 0.1, 0.4, 1.0])
    def test_a_short_one_is_old_sooner(self, grant_timeout: float) -> None:
        """Nothing is believed that may be over."""
        for ago in (grant_timeout / 2, grant_timeout, grant_timeout * 1.1):
            assert deadline(request(grant_timeout), ago) is None

    def test_a_clock_that_was_never_heard_proves_nothing(self) -> None:
        wanted = request()
        queue = queue_for(wanted)
        queue.clock = None
        grant = queue.received(wanted, grant_made(0))
        assert grant is not None
        assert grant.until is None

    def test_one_for_a_chosen_token_is_asked_about(self) -> None:
        assert deadline(request(attempt=b"1"), ago=0) is None

    def test_it_is_never_believed_longer_than_the_lock_would_live(self) -> None:
        until = deadline(request(lifetime=0.05), ago=0)
        assert until is not None
        assert until <= time.monotonic() + 0.05


class TestRegister:
    def test_what_the_keeper_put_there_at_the_last_moment_is_taken_off(
        self, jobs: list[Job]
    ) -> None:
        """WATCH was under way while the last member left."""
        queue = queue_for(request())
        waiter = FakeWaiter()
        queue.waiters.append(waiter)
        queue.registered = True
        watch = QueueWatch(queue)
        assert watch.call(time.monotonic()) is not None
        queue.leave(waiter)  # LEAVE has unregistered the queue.
        assert not jobs
        watch.answered([1000, NOW, 0], time.monotonic())
        assert [type(job) for job in jobs] == [SentOnce]

    def test_who_is_interrupted_leaves_it_to_the_keeper(self, jobs: list[Job]) -> None:
        queue = queue_for(request())
        waiter = FakeWaiter()
        queue.waiters.append(waiter)
        queue.registered = True
        for _ in range(2):
            queue.abandon(waiter)
        assert not queue.waiters
        assert SentOnce in [type(job) for job in jobs]

    def test_a_turn_is_passed_on_even_if_it_was_cut_short(self, jobs: list[Job]) -> None:
        queue = queue_for(request())
        first, second = FakeWaiter(), FakeWaiter()
        second.turn = ThreadWakeEvent()
        queue.waiters.append(second)  # The first has got as far as this.
        queue.abandon(first)
        assert second.turn.wait(0)
        assert not jobs


class TestAnswers:
    def test_the_farewell_is_no_grant(self) -> None:
        wanted = request()
        assert queue_for(wanted).received(wanted, (b"{report}:wake:x", b"leave")) is None

    def test_nor_is_a_pop_that_an_operator_ended(self) -> None:
        wanted = request()
        assert queue_for(wanted).received(wanted, None) is None

    def test_a_grant_that_was_over_sends_the_waiter_to_ask_again(self) -> None:
        wanted = request()
        queue = queue_for(wanted)
        queue.registered = True
        grant = queue.received(wanted, grant_made(60))
        assert grant is not None
        assert queue.note_confirmed(wanted, grant, -math.inf) is None
        assert not queue.registered

    def test_a_confirmed_one_is_the_lock(self) -> None:
        for wanted in (request(), request(attempt=b"1")):
            queue = queue_for(wanted)
            grant = queue.received(wanted, grant_made(60))
            assert grant is not None
            granted = queue.note_confirmed(wanted, grant, 1234.0)
            assert granted is not None
            assert granted.deadline == 1234.0
            assert granted.token == (wanted.token if wanted.chosen else b"T")


# -- without hiredis: a reply to TAKE_GRANT that does not come -------------------------------------


class Paired(redis.Connection):
    """Its server is the other end of a pair of sockets; redis-py's parser in Python reads."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, parser_class=_RESP2Parser)

    def _connect(self) -> Any:
        ours, self.theirs = socket.socketpair()
        return ours

    def on_connect_check_health(self, check_health: bool = True) -> None:
        self._parser.on_connect(self)

    on_connect = on_connect_check_health


def closed_here(server: Server, connection: Any, pending: PendingReply) -> float | None:
    connection.disconnect()  # As ``Server.close`` does.
    return pending.read_reply(True)


def closed_here_unnoticed(server: Server, connection: Any, pending: PendingReply) -> float | None:
    connection.disconnect()
    return pending.read_reply(False)


def closed_there(server: Server, connection: Any, pending: PendingReply) -> None:
    connection.theirs.close()
    with pytest.raises(redis.ConnectionError):
        server.exchange(b"PING")


@pytest.mark.parametrize("end", [closed_here, closed_here_unnoticed, closed_there])
def test_a_connection_that_was_closed_is_an_error_of_the_connection(end: Any) -> None:
    server = Server(redis.ConnectionPool(Paired))
    connection: Any = server.connect()
    pending = PendingReply(connection, Call(TAKE_GRANT, (b"key",), ()), server, 1.0)
    server.checkin(connection, pending)
    assert end(server, connection, pending) is None
    assert pending.read_reply(True) is None
    connection.theirs.close()
