"""Forced release of another caller's lock, if it is still the acquisition that was shown."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..locking import note_call
from ..protocol import (
    HELD,
    RESET,
    Call,
    HolderInfo,
    as_bytes,
    fingerprint,
    flight_key,
    flight_stream,
    is_reserved,
    lock_keys,
    milliseconds,
    new_token,
)
from ..singleflight import END_FLIGHT
from ..transport import is_cluster, run
from .listing import FLIGHT, LOCK, REPLY_TIMEOUT_SECONDS

#: Milliseconds for which the followers of an ended computation can read its end.
STREAM_LIFETIME = 10_000


class Outcome(Enum):
    """The result of a forced release."""

    #: The holder that was shown has lost it; the first waiter has it.
    RELEASED = "released"
    #: It was free.
    FREE = "free"
    #: Another holder has it, and keeps it.
    NOT_OWNER = "changed hands"


def release(
    client: Any,
    key: bytes,
    owner_id: str,
    *,
    fence: int | None = None,
    kind: str = LOCK,
    grant_timeout: float = 2.0,
    by: str = "",
) -> Outcome:
    """End the lock at ``key`` if its holder has the fingerprint ``owner_id``; the first waiter gets
    it at once. The holder's process is told at once, too, but is not stopped.

    Args:
        client: a redis-py client.
        key: of the lock, or the cache key of a computation.
        owner_id: ``LockInfo.owner.id``.
        fence: ``LockInfo.fence``, which distinguishes two acquisitions with one chosen token.
        kind: LOCK, or FLIGHT to end a computation: its result is not stored, and a follower leads.
        grant_timeout: seconds that the first waiter has to take the grant.
        by: the user, for the lock's list of events.

    Raises:
        redis.exceptions.RedisError: the request failed; the lock may have been released.
    """
    if is_reserved(key):
        return Outcome.FREE
    if kind == FLIGHT:
        return _end_flight(client, key, owner_id)
    send = partial(run, client, patience=REPLY_TIMEOUT_SECONDS)
    keys = lock_keys(key, is_cluster(client))
    reply = send(Call(HELD, keys, ())).value
    if reply is None:
        return Outcome.FREE
    held = HolderInfo(reply)
    if held.owner.id != owner_id:
        return Outcome.NOT_OWNER
    seen = held.fence if fence is None else fence
    wanted = (new_token(), milliseconds(grant_timeout), held.token, seen)
    answer = send(Call(RESET, keys, wanted))
    if not answer.value and not answer.sent_twice:
        free = send(Call(HELD, keys, ())).value is None
        return Outcome.FREE if free else Outcome.NOT_OWNER
    with suppress(RedisError, OSError):  # It is released nevertheless.
        send(note_call(key, "reset", held.owner, by, held.held_for))
    return Outcome.RELEASED


def _end_flight(client: Any, key: bytes, owner_id: str) -> Outcome:
    flight = flight_key(key)
    stored = client.get(flight)
    token = b"" if stored is None else as_bytes(stored)
    if not token or token.startswith(b"!"):
        return Outcome.FREE
    if fingerprint(token) != owner_id:
        return Outcome.NOT_OWNER
    ending = Call(
        END_FLIGHT, (key, flight, flight_stream(key, token)), (token, STREAM_LIFETIME, "", 0)
    )
    return Outcome.RELEASED if run(client, ending).value else Outcome.FREE
