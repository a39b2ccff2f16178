"""How a script is run: in one round trip, without redis-py's retries.

With a retry hidden in the client, an acquire would find its own key taken, and a release its own
work done, without the caller's knowledge (redis-py's ``Redis`` retries ten times by default,
django-redis's pools never). Here a call whose reply was lost is sent once more, and the answer
says so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

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
from .packing import ASKING, pack, pack_all
from .registry import server_of
from .retry import RetryPolicy, is_busy
from .server import Server, Unread

__all__ = [
    "ASKING",
    "OUTAGE",
    "Answer",
    "admitted",
    "is_outage",
    "may_have_run",
    "note_sent",
    "receive",
    "run",
    "run_all",
    "run_at",
    "send",
]

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
        return _run_again(server, node, error, call, patience)


def _run_again(
    server: Server, node: Server | None, error: Exception, call: Call, patience: float | None
) -> Answer:
    route = RetryPolicy(server, patience)
    while True:
        if pause := route.after(error, node):
            time.sleep(pause)
        node = None
        try:
            node = route.towards or server.at(call.keys)
            answer = _run(node, call, patience, route.asking)
            return Answer(answer, route.sent_twice)
        except REPORTED as another:
            error = another


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


def run_all(client: Any, calls: Sequence[Call]) -> list[Any]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat: they are sent
    once more if the connection broke before the last reply."""
    if len(calls) == 1:
        return [run(client, calls[0]).value]
    server = server_of(client)
    if isinstance(server, Topology):
        return _run_all_at(server, client, calls)
    try:
        return _run_all(server, calls)
    except ResponseError as error:
        if not is_busy(error):
            raise
        return [run(client, call).value for call in calls]
    except (RedisConnectionError, RedisTimeoutError) as error:
        server.close()
        if not may_have_run(error):
            raise
        return _run_all(server, calls)


def _run_all_at(server: Topology, client: Any, calls: Sequence[Call]) -> list[Any]:
    """In one trip for each server that has some of the keys; what failed there, one at a time."""
    answers: list[Any] = [None] * len(calls)
    for node, places in by_node(server, calls).items():
        some = [calls[place] for place in places]
        try:
            found = _run_all(node, some)
        except REPORTED as error:
            server.on_error(error)
            node.close()
            found = [run(client, call).value for call in some]
        for place, answer in zip(places, found, strict=True):
            answers[place] = answer
    return answers


def by_node(server: Server, calls: Sequence[Call]) -> dict[Server, list[int]]:
    """The servers that have the keys of ``calls``, each with the places of its calls."""
    found: dict[Server, list[int]] = {}
    for place, call in enumerate(calls):
        found.setdefault(server.at(call.keys), []).append(place)
    return found


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
