"""Who holds a lock: each question is one call, and a function that reads its reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NoReturn, Protocol, TypeVar

from .. import history
from ..extension import part
from ..protocol import Call, LockKeys, Owner, Reply
from ..protocol.holder_scripts import HELD, reset_call
from ..protocol.holders import HolderInfo

R = TypeVar("R")
S = TypeVar("S")


class Asked(Protocol):
    """A lock, or a request for one."""

    @property
    def keys(self) -> LockKeys: ...
    @property
    def limit(self) -> int: ...


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


def holders_call(asked: Asked) -> Call:
    if asked.limit == 1:
        return held_call(asked.keys)
    return Call(part("limit").HOLDERS, asked.keys, (asked.limit,))


def parse_holders(limit: int, reply: Reply) -> list[HolderInfo]:
    """The reply to ``holders_call``; the one whose lifetime ends first comes first."""
    if limit == 1:
        return [] if reply is None else [HolderInfo(reply)]
    return sorted((HolderInfo(one, limit) for one in reply), key=lambda holder: holder.ttl)


def held_call(keys: LockKeys) -> Call:
    """For who has a plain lock, or one place."""
    return Call(HELD, keys, ())


def heartbeat(held: HolderInfo | None) -> Query[Owner | None]:
    """The holder, and when its process was last heard of."""
    owner = None if held is None else held.in_the_way
    call = None if owner is None else history.heartbeat_call(owner)
    return Query(call, lambda reply: history.with_heartbeat(owner, reply))


def reset_call_of(lock: Any, held: HolderInfo) -> Call:
    of_it = held.in_the_way, history.code_here(), held.held_for, lock.stored_name
    event = history.event_args(lock.keys.name, "reset", *of_it)
    return reset_call(lock.keys, held, lock.grant_timeout, lock.limit, event=event)
