"""Django's asynchronous methods: what django-redis's methods do for threads, on the connection that
the tasks of an event loop share. Loaded when the first of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partialmethod
from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django_redis.util import CacheKey
from redis.exceptions import ResponseError

from ..singleflight import encode_value
from ..steps import adrive
from ..transport import is_observed
from ..transport.aio_client import aexchange, arun_all
from .connections import FAILED, FlightEnding, OwnConnections
from .values import MISSING


class TaskCommands(OwnConnections):
    """The same for a ``redis.asyncio`` client: on the connection that its loop's tasks share."""

    _do = staticmethod(adrive)
    _exchange = staticmethod(aexchange)
    _run_all = staticmethod(arun_all)


class ObservedCommands(FlightEnding):
    """The same through the client, while a tool observes that."""

    _do = staticmethod(adrive)


#: As django-redis's: INCRBY would begin with 0.
COUNT = (
    "if redis.call('EXISTS', KEYS[1]) == 1 then return redis.call('INCRBY', KEYS[1], ARGV[1]) end"
)
COUNT_ALSO_NEW = "return redis.call('INCRBY', KEYS[1], ARGV[1])"


class AsyncMethods:
    """The methods of a ``cache``, a backend, for tasks.

    Args:
        client: of redis.asyncio, of the running loop.
    """

    def __init__(self, cache: Any, client: Any) -> None:
        self._cache = cache
        self._commands: Any = (ObservedCommands if is_observed(client) else TaskCommands)(client)
        self._make_key = cache.client.make_key

    async def get(self, key: str, default: object = None, version: int | None = None) -> Any:
        stored = await self._commands.get(self._make_key(key, version=version))
        return default if stored is None else self._cache.client.decode(stored)

    async def get_many(self, keys: Iterable[str], version: int | None = None) -> dict[str, object]:
        names = {self._make_key(key, version=version): key for key in keys}
        values = await self._commands.mget(*names) if names else ()
        pairs, decode = zip(names.values(), values, strict=True), self._cache.client.decode
        return {key: decode(value) for key, value in pairs if value is not None}

    async def has_key(self, key: str, version: int | None = None) -> bool:
        return bool(await self._commands.exists(self._make_key(key, version=version)) == 1)

    async def set(
        self,
        key: str,
        value: object,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        nx: bool = False,
        xx: bool = False,
    ) -> bool:
        nkey = self._make_key(key, version=version)
        encoded = encode_value(self._cache.client.encode, key, value)
        px = self._milliseconds(timeout)
        if px is None or px > 0:
            return bool(await self._commands.set(nkey, encoded, nx=nx, px=px, xx=xx))
        if nx:
            return not await self._commands.exists(nkey)
        return bool(await self._commands.delete(nkey))

    add = partialmethod(set, nx=True)

    async def set_many(
        self,
        data: Mapping[str, object],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
    ) -> list[str]:
        batch, px = self._commands.pipeline(), self._milliseconds(timeout)
        for key, value in data.items():
            nkey = self._make_key(key, version=version)
            encoded = encode_value(self._cache.client.encode, key, value)
            if px is None or px > 0:
                batch.set(nkey, encoded, px=px)
            else:
                batch.delete(nkey)
        if data:
            await batch.execute()
        return []

    async def touch(
        self, key: str, timeout: float | None = DEFAULT_TIMEOUT, version: int | None = None
    ) -> bool:
        nkey, px = self._make_key(key, version=version), self._milliseconds(timeout)
        commands = self._commands
        return bool(await (commands.persist(nkey) if px is None else commands.pexpire(nkey, px)))

    async def delete(self, key: str, version: int | None = None, prefix: object = None) -> bool:
        nkey = self._make_key(key, version=version, prefix=prefix)
        return bool(await self._commands.delete(nkey))

    async def delete_many(self, keys: Iterable[str], version: int | None = None) -> Any:
        nkeys = [self._make_key(key, version=version) for key in keys]
        return await self._commands.delete(*nkeys) if nkeys else 0

    async def incr(
        self,
        key: str,
        delta: int = 1,
        version: int | None = None,
        *,
        ignore_key_check: bool = False,
    ) -> Any:
        nkey = self._make_key(key, version=version)
        try:
            script = COUNT_ALSO_NEW if ignore_key_check else COUNT
            number = await self._commands.eval(script, 1, nkey, delta)
        except ResponseError:  # The number is larger than those of Redis: stored as an object.
            left = await self._commands.ttl(nkey)
            number = await self.get(nkey) + delta
            await self.set(nkey, number, None if left == -1 else max(left, 0))
        if number is None:
            raise ValueError(f"Key {nkey!r} not found")
        return number

    async def decr(self, key: str, delta: int = 1, version: int | None = None) -> Any:
        return await self.incr(key, -delta, version)

    async def incr_version(self, key: str, delta: int = 1, version: int | None = None) -> int:
        before: int = self._cache.version if version is None else version
        value = await self.get(key, MISSING, before)
        if value is MISSING:
            raise ValueError(f"Key {key!r} not found")
        left = await self._commands.pttl(self._make_key(key, version=before))
        original = key.original_key() if isinstance(key, CacheKey) else key
        lifetime = None if left == -1 else max(left, 0) / 1000
        await self.set(original, value, lifetime, before + delta)
        await self.delete(key, before)
        return before + delta

    def _milliseconds(self, timeout: float | None) -> int | None:
        timeout = self._cache.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
        return None if timeout is None else int(timeout * 1000)


async def call(cache: Any, client: Any, name: str, *args: Any, **options: Any) -> object:
    """The method ``name`` of ``cache`` by the loop's ``client``."""
    try:
        return await getattr(AsyncMethods(cache, client), name)(*args, **options)
    except FAILED:
        # As in django-redis, ``touch`` raises them always.
        if not cache._ignore_exceptions or name == "touch":
            raise
        if cache._log_ignored_exceptions:
            cache.logger.exception("Exception ignored")
        arguments = dict(zip(("key", "default"), args, strict=False)) | options
        if name == "set_many":
            return list(options["data"] if "data" in options else args[0])
        return {"get": arguments.get("default"), "get_many": {}}.get(name)
