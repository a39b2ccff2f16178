"""How a script is run: in one round trip, without redis-py's retries.

With a retry hidden in the client, an acquire would find its own key taken, and a release its own
work done, without the caller's knowledge (redis-py's ``Redis`` retries ten times by default,
django-redis's pools never). Here a call whose reply was lost is sent once more, and the answer
says so.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, Protocol

import redis
from redis.exceptions import (
    AskError,
    BusyLoadingError,
    ClusterError,
    NoScriptError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..protocol import EXTEND, LEAVE, RELEASE, RENEW, Call
from .address import RawConnection, may_have_run, note_sent
from .circuit_breaker import Breaker
from .discovery import Topology
from .drive import finish
from .packing import ASKING, pack, pack_all
from .registry import server_of
from .retry import RetryPolicy, is_busy
from .server import Server, Unread

#: What an absent, restarting or failing-over Redis looks like.
OUTAGE: tuple[type[Exception], ...] = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    AskError,  # Slots that have moved, are being moved, or have no owner at this moment.
    TryAgainError,
    ClusterError,
    OSError,
)
#: The same, as a script or a blocking pop reports it.
_OUTAGE_REPLIES = (
    *("UNBLOCKED", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"),
    "BUSY ",  # Not BUSYKEY and the like.
)

#: Calls that keep or end a lock that is held, or leave a queue: no circuit breaker refuses them.
NEVER_HELD_BACK = (RELEASE, EXTEND, RENEW, LEAVE)

#: The errors of a call after which ``RetryPolicy`` decides.
REPORTED = (RedisConnectionError, RedisTimeoutError, ResponseError)

#: redis-py before 5.3 wants the name of the command a connection is for, later ones object to it.
FOR_COMMAND = () if tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3) else ("EVALSHA",)


def is_outage(error: BaseException) -> bool:
    """Whether ``error`` may pass by itself, so that a waiter should try again."""
    if isinstance(error, ResponseError):
        # Redis 6 reports an error in a script after "Error running script", with a hyphen.
        said = f"-{error}"
        return any(f"-{reply}" in said for reply in _OUTAGE_REPLIES) or isinstance(error, OUTAGE)
    return isinstance(error, OUTAGE)


def is_pool_exhausted(error: BaseException) -> bool:
    """Whether ``error`` is about the pool and not about the server."""
    return str(error).startswith(("Too many connections", "No connection available"))


class Answer(NamedTuple):
    """What a script returned, and whether it may have run twice."""

    value: Any
    sent_twice: bool


class Exchange(Protocol):
    """How calls reach the servers of a client. What a method returns is the result for threads, and
    an awaitable of it for tasks."""

    @property
    def server(self) -> Server: ...
    def run(self, node: Server, call: Call, patience: float | None, asking: bool) -> Any: ...
    def run_all(self, node: Server, calls: Sequence[Call]) -> Any: ...
    def answer(self, call: Call) -> Any: ...
    def locate(self, keys: Sequence[bytes]) -> Any: ...
    def sleep(self, seconds: float) -> Any: ...
    def close_idle(self, node: Server) -> None: ...


def run_again(
    exchange: Exchange,
    node: Server | None,
    error: Exception,
    call: Call,
    patience: float | None,
) -> Generator[Any, Any, Answer]:
    """The steps after ``call`` has failed with ``error`` at ``node``, as ``RetryPolicy`` says."""
    policy = RetryPolicy(exchange.server, patience)
    while True:
        if pause := policy.after(error, node):
            yield exchange.sleep(pause)
        node = None
        try:
            node = policy.towards or (yield exchange.locate(call.keys))
            assert node is not None
            answer = yield exchange.run(node, call, patience, policy.asking)
            return Answer(answer, policy.sent_twice)
        except REPORTED as another:
            error = another


def run_all_steps(exchange: Exchange, calls: Sequence[Call]) -> Generator[Any, Any, list[Any]]:
    """The steps of ``run_all``."""
    if len(calls) == 1:
        return (yield from _one_at_a_time(exchange, calls))
    server = exchange.server
    if isinstance(server, Topology):
        return (yield from _run_all_at(exchange, server, calls))
    try:
        answers: list[Any] = yield exchange.run_all(server, calls)
        return answers
    except ResponseError as error:
        if not is_busy(error):
            raise
    except (RedisConnectionError, RedisTimeoutError) as error:
        exchange.close_idle(server)
        if is_pool_exhausted(error) or not may_have_run(error):
            raise
        answers = yield exchange.run_all(server, calls)
        return answers
    return (yield from _one_at_a_time(exchange, calls))


def _one_at_a_time(exchange: Exchange, calls: Sequence[Call]) -> Generator[Any, Any, list[Any]]:
    answers = []
    for call in calls:
        answer = yield exchange.answer(call)
        answers.append(answer.value)
    return answers


def _run_all_at(
    exchange: Exchange, server: Topology, calls: Sequence[Call]
) -> Generator[Any, Any, list[Any]]:
    """In one trip for each server that has some of the keys; what failed there, one at a time."""
    places_at: dict[Server, list[int]] = {}
    for place, call in enumerate(calls):
        node = yield exchange.locate(call.keys)
        places_at.setdefault(node, []).append(place)
    answers: list[Any] = [None] * len(calls)
    for node, places in places_at.items():
        some = [calls[place] for place in places]
        try:
            found = yield exchange.run_all(node, some)
        except REPORTED as error:
            server.on_error(error)
            exchange.close_idle(node)
            found = yield from _one_at_a_time(exchange, some)
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
    return answers


def send(connection: RawConnection, call: Call) -> None:
    """Send ``call`` without waiting for the reply."""
    connection.send_packed_command([pack(call)])


def receive(connection: RawConnection, call: Call) -> Any:
    """The reply to ``call``; the script is sent to a server that does not know it."""
    try:
        return connection.read_response()
    except NoScriptError:
        connection.send_packed_command([pack(call, known=False)])
        return connection.read_response()


def run(client: Any, call: Call, *, patience: float | None = None) -> Answer:
    """Run ``call`` in one round trip, on a connection of our own to ``client``'s server; once more
    if the connection broke before the reply.

    Args:
        patience: seconds to wait for the reply, and no second try if it does not come; None
            leaves the wait to the pool's socket timeout.

    Raises:
        redis.exceptions.RedisError: as redis-py's; the outcome is then unknown.
    """
    server = server_of(client)
    node = None
    try:
        node = server.at(call.keys)
        return Answer(_run(node, call, patience), sent_twice=False)
    except REPORTED as error:
        return finish(run_again(_Blocking(client, server), node, error, call, patience))


def run_all(client: Any, calls: Sequence[Call]) -> list[Any]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat: they are sent
    once more if the connection broke before the last reply."""
    return finish(run_all_steps(_Blocking(client, server_of(client)), calls))


class _Blocking(NamedTuple):
    """``Exchange`` for threads."""

    client: Any
    server: Server

    def run(self, node: Server, call: Call, patience: float | None, asking: bool) -> Any:
        return _run(node, call, patience, asking)

    def run_all(self, node: Server, calls: Sequence[Call]) -> list[Any]:
        return _run_all(node, calls)

    def answer(self, call: Call) -> Answer:
        return run(self.client, call)

    def locate(self, keys: Sequence[bytes]) -> Server:
        return self.server.at(keys)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close_idle(self, node: Server) -> None:
        node.close()


def _run(server: Server, call: Call, patience: float | None, asking: bool = False) -> Any:
    if server.breaker.failing:
        patience = admitted(server.breaker, patience, call)
    connection, unread = _checked_out(server, patience)
    try:
        if asking:
            # By its source: NOSCRIPT would need a second ASKING.
            connection.send_packed_command([ASKING, pack(call, known=False)])
        else:
            send(connection, call)
        _await_answer(connection, unread, patience)
        if asking:
            connection.read_response()
        answer = receive(connection, call)
    except ResponseError:
        if asking:  # ASKING may have been refused, and the reply to the call is still to come.
            connection.disconnect()
        else:
            server.checkin(connection)
        server.breaker.answered()
        raise
    except BaseException as error:
        # Also for KeyboardInterrupt: a connection with an unread reply cannot be used again.
        connection.disconnect()
        if isinstance(error, RedisTimeoutError):
            server.breaker.failed(error, server.timeout if patience is None else patience)
        raise
    server.checkin(connection)
    server.answered()
    return answer


def _await_answer(connection: RawConnection, unread: Unread | None, patience: float | None) -> None:
    """Wait for the reply to the last call, at most ``patience`` seconds after ``unread`` came."""
    if patience is not None and not connection.can_read(patience):
        raise RedisTimeoutError(f"Redis did not answer within {patience:.3f} s")
    if unread is not None:
        unread.confirm(True)
        _await_answer(connection, None, patience)


def run_at(server: Server, node: Server, call: Call) -> Any:
    """What ``call`` returns at ``node``, one of those of ``server``, wherever its keys are."""
    try:
        return _run(node, call, None)
    except REPORTED as error:
        server.on_error(error)
        node.close()
        if not may_have_run(error) or isinstance(error, ResponseError):
            raise
        return _run(node, call, None)


def _run_all(server: Server, calls: Sequence[Call]) -> list[Any]:
    patience = admitted(server.breaker, None, *calls) if server.breaker.failing else None
    connection, unread = _checked_out(server, patience)
    try:
        connection.send_packed_command([pack_all(calls)])
        _await_answer(connection, unread, patience)
        answers = [connection.read_response() for _ in calls]
    except BaseException as error:
        connection.disconnect()
        if isinstance(error, RedisTimeoutError):
            server.breaker.failed(error, server.timeout if patience is None else patience)
        raise
    server.checkin(connection)
    server.answered()
    return answers


def admitted(breaker: Breaker, patience: float | None, *calls: Call) -> float | None:
    """How many seconds ``calls`` may wait, if the breaker lets them through.

    Raises:
        CircuitOpen: it does not; nothing was sent.
    """
    if any(call.script in NEVER_HELD_BACK for call in calls):
        return breaker.insist(patience)
    try:
        return breaker.admit(patience)
    except Exception as error:
        note_sent(error, False)
        raise


def _checked_out(server: Server, patience: float | None) -> tuple[RawConnection, Unread | None]:
    """A connection to ``server``; an error says that nothing was sent."""
    try:
        return server.checkout_unread(patience)
    except Exception as error:
        note_sent(error, False)
        raise
