"""Tools that observe a cache replace its methods, and ``get_or_set`` reads by those. Loaded where
there are such."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async

from ..singleflight import Runner, ThreadRunner
from ..steps import Steps, drive
from ..transport.refusals import redis_errors

if TYPE_CHECKING:
    from .reading import CacheReader


class ObservedRead:
    """What ``get`` or ``get_many`` uses as its redis-py client while a tool observes a read.

    Attributes:
        stored: the result of ``read``: what Redis stores and the remaining lifetime in ms, or None.
        error: why it failed; IGNORE_EXCEPTIONS may hide that.
    """

    def __init__(self, read: Callable[[object], object]) -> None:
        self._read = read
        self.stored: Any = None
        self.error: Exception | None = None

    def get(self, *keys: object) -> object:
        try:
            self.stored = self._read(*keys)
        except redis_errors() as error:
            self.error = error
            raise
        return None if self.stored is None else self.stored[0]

    mget = mget_nonatomic = get


def observed(
    method: Callable[[ObservedRead], object], read: Callable[..., object], missing: object = None
) -> tuple[object, object]:
    """Call ``method``, which calls ``read``; returns the results of both, ``missing`` if the method
    has failed as the read did."""
    client, value = ObservedRead(read), missing
    try:
        value = method(client)
    except Exception:
        if client.error is None:
            raise
    if client.error is not None:
        raise client.error
    return client.stored, value


def get(
    cache: CacheReader, key: str, version: int | None, missing: object, read: Callable[..., object]
) -> tuple[object, object]:
    """Call the cache's ``get``, which calls ``read``; returns the results of both, ``missing`` if
    there is no value."""
    method: Any = cache.get
    return observed(lambda client: method(key, missing, version, client=client), read, missing)


def get_in_steps(
    cache: CacheReader,
    runner: Runner,
    steps: Steps[object],
    key: str,
    version: int | None,
    missing: object,
) -> Steps[tuple[object, object]]:
    """As ``get``. In an event loop the method must not wait: it is called afterwards."""
    if isinstance(runner, ThreadRunner):
        return get(cache, key, version, missing, lambda _: drive(steps))
    stored = yield from steps
    call = partial(get, cache, key, version, missing, lambda _: stored)
    return call() if cache._has_plain_keys else (yield sync_to_async(call)())
