"""Which locks are held in a database, and their forced release: of the acquisition that was shown,
if its holder still has the lock."""

from __future__ import annotations

from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Any

from redis.exceptions import RedisError

from ..locking import note_call
from ..protocol import (
    MAX_FENCE,
    MAX_LIMIT,
    PLACE_HELD,
    PLACE_RESET,
    RESET,
    Call,
    HolderInfo,
    as_bytes,
    fingerprint,
    flight_key,
    flight_stream,
    is_lock,
    is_reserved,
    keys_at,
    milliseconds,
    new_token,
)
from ..singleflight import END_FLIGHT
from ..transport import is_cluster, run
from .database import KEYS_PER_SCRIPT as KEYS_PER_SCRIPT
from .database import delete_matching as delete_matching
from .database import empty as empty
from .listing import FLIGHT as FLIGHT
from .listing import LOCK as LOCK
from .listing import MAX_DESCRIBED as MAX_DESCRIBED
from .listing import MAX_ENTRIES as MAX_ENTRIES
from .listing import REPLY_TIMEOUT_SECONDS
from .listing import Inspection as Inspection
from .listing import Inventory as Inventory
from .listing import LockInfo as LockInfo
from .listing import WaiterInfo as WaiterInfo
from .listing import inspect as inspect
from .listing import list_held as list_held

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
    if kind == FLIGHT:
        return Outcome.FREE if is_reserved(key) else _end_flight(client, key, owner_id)
    if not is_lock(key):
        return Outcome.FREE
    send = partial(run, client, patience=REPLY_TIMEOUT_SECONDS)
    keys = keys_at(key, is_cluster(client))
    asking = Call(PLACE_HELD, keys, ())
    reply = send(asking).value
    if reply is None:
        return Outcome.FREE
    held = HolderInfo(reply)
    if held.owner.id != owner_id:
        return Outcome.NOT_OWNER
    grant = (new_token(), milliseconds(grant_timeout))
    if keys.place > 1 or held.limit > 1:
        limit = held.limit if held.limit > 1 else MAX_LIMIT
        ending = Call(PLACE_RESET, keys, (*grant, held.token, MAX_FENCE, limit))
    else:
        seen = held.fence if fence is None else fence
        ending = Call(RESET, keys, (*grant, held.token, seen))
    answer = send(ending)
    if not answer.value and not answer.sent_twice:
        return Outcome.FREE if send(asking).value is None else Outcome.NOT_OWNER
    with suppress(RedisError, OSError):  # It is released nevertheless.
        send(note_call(keys.name, "reset", held.owner, by, held.held_for))
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
