"""Who holds a lock: each question is one call, and a function that reads its reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from redis.exceptions import RedisError

from .. import events, history
from ..exceptions import LockNotAcquired
from ..extension import part
from ..protocol import AcquireRequest, Call, Owner, Reply
from ..protocol.holder_scripts import HELD, reset_call
from ..protocol.holders import HolderInfo, seconds_to_retry
from .hold import Hold

if TYPE_CHECKING:
    from .operations import LockOperations

R = TypeVar("R")
S = TypeVar("S")


class Query(Generic[R]):
    """One question to Redis.

    Args:
        call: what is sent; None if the answer is known without Redis.
        parse: the answer, from the reply; from None without a call.
        after: the answer after an error; raises the error if there is none.
        queries: what is asked instead of a call, all at once; ``parse`` gets their answers.
    """

    __slots__ = ("after", "call", "parse", "queries")

    def __init__(
        self,
        call: Call | None,
        parse: Callable[[Reply], R],
        after: Callable[[Exception], R] | None = None,
        queries: Sequence[Query[Any]] = (),
    ) -> None:
        self.call, self.parse, self.after = call, parse, after or _raise
        self.queries = queries

    def then(self, change: Callable[[R], S]) -> Query[S]:
        """The same question, whose answer ``change`` makes of this one's."""
        return Query(
            self.call,
            lambda reply: change(self.parse(reply)),
            lambda error: change(self.after(error)),
            self.queries,
        )

    def or_else(self, after: Callable[[Exception], R]) -> Query[R]:
        return Query(self.call, self.parse, after, self.queries)


def _raise(error: Exception) -> NoReturn:
    raise error


def holders(lock: LockOperations) -> Query[list[HolderInfo]]:
    in_redis = Query(holders_call(lock), partial(parse_holders, lock.limit))
    if lock.on_redis_down == "raise":
        return in_redis
    in_either: Query[list[HolderInfo]] = part("fallback").holders(lock, in_redis)
    return in_either


def holders_call(lock: LockOperations | AcquireRequest) -> Call:
    if lock.limit == 1:
        return Call(HELD, lock.keys, ())
    return Call(part("limit").HOLDERS, lock.keys, (lock.limit,))


def parse_holders(limit: int, reply: Reply) -> list[HolderInfo]:
    """The reply to ``holders_call``; the one whose lifetime ends first comes first."""
    if limit == 1:
        return [] if reply is None else [HolderInfo(reply)]
    return sorted((HolderInfo(one, limit) for one in reply), key=lambda holder: holder.ttl)


def held_call(lock: LockOperations, hold: Hold | None = None) -> Call:
    """For who has the lock; with ``hold``, who has its place."""
    return Call(HELD, lock.keys if hold is None else hold.keys, ())


def held(lock: LockOperations) -> Query[HolderInfo | None]:
    return lock._holders_query().then(lambda holders: holders[0] if holders else None)


def locked(lock: LockOperations) -> Query[bool]:
    # A holder without Redis has no token, and the lock for itself.
    return lock._holders_query().then(
        lambda holders: len(holders) >= lock.limit or not all(held.token for held in holders)
    )


def owned(lock: LockOperations) -> Query[bool]:
    hold: Hold | None = lock.local.hold
    if lock.local.token is None or lock.degraded:
        return Query(None, lambda _: lock.degraded is not None)
    if hold is None and lock.limit > 1:
        query = lock._holders_query()
    else:
        query = Query(held_call(lock, hold), partial(parse_holders, 1))
    return query.then(lambda holders: _is_mine(lock, holders))


def _is_mine(lock: LockOperations, holders: list[HolderInfo]) -> bool:
    hold, token = lock.local.hold, lock.local.token
    if token is None or (hold is not None and not hold.is_valid):
        return False
    mine = token if isinstance(token, bytes) else lock._encode(token)
    return any(held.token == mine for held in holders)


def heartbeat(held: HolderInfo | None) -> Query[Owner | None]:
    """The holder, and when its process was last heard of."""
    owner = None if held is None else held.in_the_way
    call = None if owner is None else history.heartbeat_call(owner)
    return Query(call, lambda reply: history.with_heartbeat(owner, reply))


def owner_id(lock: LockOperations) -> Query[str | None]:
    return held(lock).then(lambda held: held.token.decode(errors="replace") if held else None)


def ttl(lock: LockOperations) -> Query[float | None]:
    return held(lock).then(lambda held: held.ttl if held else None)


def not_acquired(lock: LockOperations) -> Query[LockNotAcquired]:
    """The error of a ``with`` block."""
    query = held(lock)

    def without_redis(error: Exception) -> HolderInfo | None:
        with suppress(RedisError):
            return query.after(error)
        return None

    def error_about(held: HolderInfo | None) -> LockNotAcquired:
        seconds = seconds_to_retry(held, events.usual_hold(lock.subject))
        return LockNotAcquired.from_held(lock._shown, held, float(seconds))

    return query.or_else(without_redis).then(error_about)


def reset_call_of(lock: LockOperations, held: HolderInfo) -> Call:
    of_it = held.in_the_way, history.code_here(), held.held_for, lock.stored_name
    event = history.event_args(lock.keys.name, "reset", *of_it)
    return reset_call(lock.keys, held, lock.grant_timeout, lock.limit, event=event)
