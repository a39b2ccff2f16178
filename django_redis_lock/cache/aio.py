"""The asynchronous methods of ``RedisCache``, on connections of the running event loop.

django-redis has methods for threads only. Such a method runs until it needs a reply from Redis;
that is awaited, and the method runs again from its beginning, with the replies so far. So keys,
encoding, timeouts, and which writes end a computation, are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from functools import partial, wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.core.cache.backends.base import BaseCache
from django_redis.client import DefaultClient
from redis.exceptions import RedisError

from ..transport import asyncio_client, command
from .get_or_set import waiting_thread
from .invalidation import Writes


class _Unanswered(BaseException):
    """A method needs the reply to ``request``."""

    def __init__(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        super().__init__()
        self.request = request


class Replies:
    """What methods for threads use as their redis-py client, in place of the event loop's."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._replies: list[Any] = []
        self._used = 0

    async def complete(self, method: Callable[..., Any]) -> Any:
        while True:
            self._used = 0
            try:
                return method(client=self)
            except _Unanswered as unanswered:
                request = unanswered.request
            try:
                self._replies.append(await request())
            except (RedisError, OSError) as error:
                self._replies.append(error)

    def _next(self, request: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        if self._used == len(self._replies):
            raise _Unanswered(request)
        self._used += 1
        reply = self._replies[self._used - 1]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name in ("connection_pool", "get_encoder"):
            return found
        return lambda *args, **options: self._next(
            partial(command, self._client, name, *args, **options)
        )

    def pipeline(self) -> Any:
        return _Pipeline(self._client.pipeline(), self._next)


class _Pipeline:
    """Only ``execute`` needs Redis."""

    def __init__(self, pipeline: Any, reply: Callable[..., Any]) -> None:
        self._pipeline = pipeline
        self._reply = reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pipeline, name)

    def execute(self) -> Any:
        return self._reply(self._pipeline.execute)


def _awaiting(name: str) -> Any:
    """Django's asynchronous twin of the method ``name``."""

    @wraps(getattr(BaseCache, f"a{name}"))
    async def method(self: AsyncMethods, *args: Any, **kwargs: Any) -> Any:
        return await self._await(name, *args, **kwargs)

    return method


class AsyncMethods(Writes):
    """Django's asynchronous methods. In front of a cluster, behind sentinels, with replicas, with a
    client or connection class of the project's own, in ``async_to_sync``, and where a subclass or a
    tool has replaced the method for threads, they call that one in Django's thread for synchronous
    code, as Django's do."""

    client: Any
    _breaker: Any

    async def _await(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method, client = getattr(self, name), self._client_for(name)
        if client is None:
            return await sync_to_async(method)(*args, **kwargs)
        # The method may run more than once, and an iterator of keys ends.
        args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
        return await Replies(client).complete(partial(method, *args, **kwargs))

    def _client_for(self, method: str) -> Any:
        """None if ``method`` is to run in Django's thread."""
        one_server = type(self.client) is DefaultClient and self._breaker is not None
        # A loop for which a thread waits lasts for one call, and would have to connect for each.
        if not one_server or not self._is_original(method) or waiting_thread() is not None:
            return None
        try:
            return asyncio_client(self._lock_client())
        except TypeError:  # Its connections are of a class without an asyncio twin.
            return None

    aget = _awaiting("get")
    aget_many = _awaiting("get_many")
    ahas_key = _awaiting("has_key")
    aset = _awaiting("set")
    aadd = _awaiting("add")
    aset_many = _awaiting("set_many")
    atouch = _awaiting("touch")
    adelete = _awaiting("delete")
    adelete_many = _awaiting("delete_many")
    aincr = _awaiting("incr")
    adecr = _awaiting("decr")
    aincr_version = _awaiting("incr_version")
