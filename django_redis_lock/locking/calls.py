"""How a script is run: in one round trip on a connection of the client's pool.

redis-py's own retries stay out. A retry hidden in the client would make an acquire meet its own
key, and a release find its own work done, without anybody knowing (redis-py's ``Redis`` retries
ten times by default, django-redis's pools never). Here a call whose reply was lost is sent once
more, and the answer says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis
from redis.exceptions import BusyLoadingError, NoScriptError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from .scripts import Call
from .server import RawConnection, server_of

__all__ = [
    "OUTAGE",
    "Answer",
    "by_name",
    "by_source",
    "is_outage",
    "may_have_run",
    "receive",
    "run",
    "send",
]

#: What an absent, restarting or failing-over Redis looks like.
OUTAGE: tuple[type[Exception], ...] = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    OSError,
)
#: The same, as a script or a blocking pop reports it.
_OUTAGE_REPLIES = ("UNBLOCKED", "READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN")

#: redis-py before 5.3 wants the name of the command a connection is for, later ones object to it.
FOR_COMMAND = () if tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3) else ("EVALSHA",)


def is_outage(error: BaseException) -> bool:
    """Whether ``error`` may pass by itself, so that a waiter should try again."""
    if isinstance(error, ResponseError):
        return str(error).startswith(_OUTAGE_REPLIES) or isinstance(error, OUTAGE)
    return isinstance(error, OUTAGE)


def note_sent(error: BaseException, sent: bool) -> None:
    """Note on ``error`` whether anything was sent before it came."""
    error.__dict__["sent_to_redis"] = sent


def may_have_run(error: BaseException) -> bool:
    """Whether Redis may have carried out the call that ended with ``error``."""
    return bool(error.__dict__.get("sent_to_redis", True))


def is_pool_exhausted(error: BaseException) -> bool:
    """Whether ``error`` speaks of the pool and not of the server."""
    return str(error).startswith(("Too many connections", "No connection available"))


class Answer(NamedTuple):
    """What a script returned, and whether it may have run twice."""

    value: Any
    sent_twice: bool


def by_name(call: Call) -> tuple[Any, ...]:
    """The command that runs a script the server may know."""
    return ("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)


def by_source(call: Call) -> tuple[Any, ...]:
    """The command that always works, and teaches the server the script."""
    return ("EVAL", call.script.source, len(call.keys), *call.keys, *call.args)


def send(connection: RawConnection, call: Call) -> None:
    """Send ``call`` without waiting for the reply."""
    connection.send_command(*by_name(call))


def receive(connection: RawConnection, call: Call) -> Any:
    """The reply to ``call``; a server that does not know the script yet is taught it."""
    try:
        return connection.read_response()
    except NoScriptError:
        connection.send_command(*by_source(call))
        return connection.read_response()


def run(client: Any, call: Call, *, patience: float | None = None) -> Answer:
    """Run ``call`` in one round trip on a connection of ``client``'s pool; once more if the
    connection broke before the reply.

    Args:
        patience: seconds to wait for the reply, and then no second try; None leaves the wait to
            the pool's socket timeout.

    Raises:
        redis.exceptions.RedisError: as redis-py's; nothing is known of the outcome then.
    """
    pool = client.connection_pool
    try:
        return Answer(_run_pooled(pool, call, patience), sent_twice=False)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if is_pool_exhausted(error):
            # The application has used its pool up. A holder must be able to release even so.
            connection = server_of(client).connect(timeout=5.0)
            try:
                return Answer(_exchange(connection, call, patience), sent_twice=False)
            finally:
                connection.disconnect()
        if patience is not None or not may_have_run(error):
            raise
        try:
            return Answer(_run_pooled(pool, call, patience), sent_twice=True)
        except Exception as second:
            note_sent(second, True)
            raise


def run_all(client: Any, calls: Sequence[Call]) -> list[Any]:
    """What ``calls`` return, all in one round trip. They must be safe to repeat: they are sent
    once more if the connection broke before the last reply."""
    if len(calls) == 1:
        return [(run(client, calls[0])).value]
    try:
        return _run_all(client.connection_pool, calls)
    except (RedisConnectionError, RedisTimeoutError) as error:
        if is_pool_exhausted(error) or not may_have_run(error):
            raise
        return _run_all(client.connection_pool, calls)


def _run_all(pool: Any, calls: Sequence[Call]) -> list[Any]:
    connection = _connected(pool)
    try:
        # The first of each script by its source, so that none can be unknown.
        known: set[str] = set()
        for call in calls:
            words = by_name(call) if call.script.sha in known else by_source(call)
            known.add(call.script.sha)
            connection.send_command(*words)
        return [connection.read_response() for _ in calls]
    except BaseException:
        connection.disconnect()
        raise
    finally:
        pool.release(connection)


def _run_pooled(pool: Any, call: Call, patience: float | None) -> Any:
    connection = _connected(pool)
    try:
        return _exchange(connection, call, patience)
    finally:
        pool.release(connection)


def _connected(pool: Any) -> Any:
    """A connection of ``pool``; an error says that nothing was sent."""
    try:
        return pool.get_connection(*FOR_COMMAND)
    except Exception as error:
        note_sent(error, False)
        raise


def _exchange(connection: RawConnection, call: Call, patience: float | None) -> Any:
    try:
        send(connection, call)
        if patience is not None and not connection.can_read(patience):
            raise RedisTimeoutError(f"Redis did not answer within {patience:.3f} s")
        return receive(connection, call)
    except ResponseError:
        raise
    except BaseException:
        # Also for KeyboardInterrupt: a connection with a reply still to come is of no use.
        connection.disconnect()
        raise
