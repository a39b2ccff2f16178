"""Invalidation when the database transaction around it has been committed: what is deleted before
is computed again by others from the old data, and stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, ParamSpec

from asgiref.sync import async_to_sync, iscoroutinefunction, sync_to_async
from django.db import transaction
from django_redis.util import CacheKey

from ..conf import SETTING

P = ParamSpec("P")


class OnCommit:
    """Methods of a cache that invalidate values, done after the commit: see ``cache.on_commit``.
    Keys are made at the call, from the caller's state."""

    def __init__(self, cache: Any, using: str | None, robust: bool) -> None:
        self._cache, self._using, self._robust = cache, using, robust

    def call(self, function: Callable[[], object]) -> None:
        """Have ``function`` called after the commit, in the same thread."""
        transaction.on_commit(function, using=self._using, robust=self._robust)

    def of_function(self, function: Any, key_of: Any, **options: Any) -> FunctionOnCommit[Any]:
        """The methods of a function with ``cached()``."""
        return FunctionOnCommit(function, self, key_of, **options)

    def delete(self, key: str, version: int | None = None) -> None:
        """``cache.delete``."""
        self.delete_many([key], version)

    def delete_many(self, keys: Iterable[str], version: int | None = None) -> None:
        """``cache.delete_many``."""
        made = self._made(keys, version)
        self.call(lambda: self._cache.delete_many(made))

    def mark_stale(self, key: str, version: int | None = None, *, stale: float = SETTING) -> None:
        """``cache.mark_stale``."""
        self.mark_stale_many([key], version, stale=stale)

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> None:
        """``cache.mark_stale_many``."""
        self._cache._values.stale_seconds(stale)  # Its errors belong to the caller.
        made = self._made(keys, version)
        self.call(lambda: self._cache.mark_stale_many(made, stale=stale))

    async def adelete(self, key: str, version: int | None = None) -> None:
        """``delete`` for asyncio: the transaction is in Django's thread for synchronous code."""
        await sync_to_async(self.delete)(key, version)

    async def adelete_many(self, keys: Iterable[str], version: int | None = None) -> None:
        """``delete_many`` for asyncio."""
        await sync_to_async(self.delete_many)(keys, version)

    async def amark_stale(
        self, key: str, version: int | None = None, *, stale: float = SETTING
    ) -> None:
        """``mark_stale`` for asyncio."""
        await sync_to_async(self.mark_stale)(key, version, stale=stale)

    async def amark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> None:
        """``mark_stale_many`` for asyncio."""
        await sync_to_async(self.mark_stale_many)(keys, version, stale=stale)

    def _made(self, keys: Iterable[str], version: int | None) -> list[str]:
        client = self._cache.client
        return [CacheKey(client.make_key(key, version=version)) for key in keys]


class FunctionOnCommit(Generic[P]):
    """The methods of a function with ``cached()``, done after the commit. They return None; those
    of a coroutine function are awaited.

    Args:
        function: the decorated one.
        key_of: makes a key from the arguments of a call.
        version, stale: as of the function's cache.
    """

    def __init__(
        self,
        function: Any,
        of_cache: OnCommit,
        key_of: Callable[[object, object], str],
        version: int | None,
        stale: float,
    ) -> None:
        self._function, self._of_cache, self._key_of = function, of_cache, key_of
        self._version, self._stale = version, stale

    def invalidate(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Delete the result for these arguments."""
        return self._call(lambda key: self._of_cache.delete(key, self._version), args, kwargs)

    def mark_stale(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Let the result for these arguments be stale."""
        what: dict[str, Any] = {"version": self._version, "stale": self._stale}
        return self._call(lambda key: self._of_cache.mark_stale(key, **what), args, kwargs)

    def refresh(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Compute and store the result for these arguments, from what is committed."""
        again = self._function.refresh
        if iscoroutinefunction(self._function):
            again = async_to_sync(again)
        refresh = partial(again, *args, **kwargs)
        return self._call(lambda _: self._of_cache.call(refresh), args, kwargs)

    def _call(self, then: Callable[[str], None], args: object, kwargs: object) -> Any:
        """Make the key now: its errors belong to the caller."""

        def call() -> None:
            then(self._key_of(args, kwargs))

        return sync_to_async(call)() if iscoroutinefunction(self._function) else call()
