"""Django's asynchronous methods: what django-redis's methods do for threads, on the connection that
the tasks of an event loop share. Loaded when the first of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django_redis.util import CacheKey
from redis.exceptions import NoScriptError, ResponseError

from ..protocol import Call, Reply
from ..singleflight import encode_value, own_flights
from ..steps import Step
from ..transport import is_observed, pack, pack_words
from ..transport.aio_client import aexchange, arun, arun_all
from ..transport.refusals import genuine
from .commands import (
    Batch,
    OwnConnections,
    Seen,
    Write,
    in_transaction,
    look_at_flights,
    outcomes,
)
from .reading import FAILED, MISSING
from .redis_py import FlightEnding

if TYPE_CHECKING:
    from .methods import AsyncMethods


class TaskCommands(OwnConnections):
    """The same for the ``redis.asyncio`` client of a loop, on the connection that its tasks share.
    While a tool observes the client, that sends all."""

    async def eval(self, script: str, numkeys: int, name: str, *args: object) -> Reply:
        call = self._counting(script, name, args)
        if is_observed(self.client):
            return await self.client.eval(call.script.source, 2, *call.keys, *call.args)
        try:
            return await aexchange(self.client, pack(call), may_run_twice=False)
        except NoScriptError:
            return await aexchange(self.client, pack(call, known=False), may_run_twice=False)

    def batch(self) -> Batch | FlightEnding:
        """What collects writes that are then sent together."""
        return FlightEnding(self.client.pipeline()) if is_observed(self.client) else Batch(self)

    async def send(self, batch: Batch | FlightEnding) -> None:
        if not isinstance(batch, Batch):
            await batch.execute()
        elif batch.writes:
            replies = await aexchange(self.client, *in_transaction(batch.writes))
            await self._end(Seen(batch.writes, *outcomes(replies), batch.own))

    async def _send(self, command: str, *parts: object) -> Reply:
        if is_observed(self.client):
            return await getattr(self.client, command.lower())(*parts)
        return await aexchange(self.client, pack_words(command.encode(), *map(self._key, parts)))

    def _keep(self, command: str, name: str, *time: object) -> Step[Reply]:
        own_flights((self._key(name),))
        return self._send(command.upper(), name, *time)

    async def _write(self, write: Write, own: Mapping[bytes, bytes]) -> Reply:
        if is_observed(self.client):
            return await self._run(write.call(own))
        command, may_run_twice = write.packed() + look_at_flights(write.keys), write.may_run_twice
        reply, tokens = await aexchange(self.client, command, 2, may_run_twice=may_run_twice)
        if tokens and (type(tokens) is not list or any(tokens)):
            await self._end(Seen([write], [reply], tokens, own))
        return reply

    async def _end(self, seen: Seen) -> None:
        if seen and (again := seen.again(await arun_all(self.client, seen.end()))):
            await arun_all(self.client, again)

    async def _run(self, call: Call) -> Reply:
        if not is_observed(self.client):
            return (await arun(self.client, call)).value
        parts = (len(call.keys), *call.keys, *call.args)
        try:
            return await self.client.evalsha(call.script.sha, *parts)
        except NoScriptError:
            return await self.client.eval(call.script.source, *parts)


#: As django-redis's: INCRBY would begin with 0.
COUNT = (
    "if redis.call('EXISTS', KEYS[1]) == 1 then return redis.call('INCRBY', KEYS[1], ARGV[1]) end"
)
COUNT_ALSO_NEW = "return redis.call('INCRBY', KEYS[1], ARGV[1])"

_Version = int | None


async def get(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    default: object = None,
    version: _Version = None,
) -> Any:
    stored = await commands.get(cache.client.make_key(key, version=version))
    return default if stored is None else cache.client.decode(stored)


async def get_many(
    cache: AsyncMethods, commands: TaskCommands, keys: Iterable[str], version: _Version = None
) -> dict[str, object]:
    names = {cache.client.make_key(key, version=version): key for key in keys}
    values = await commands.mget(*names) if names else ()
    pairs = zip(names.values(), values, strict=True)
    return {key: cache.client.decode(value) for key, value in pairs if value is not None}


async def has_key(
    cache: AsyncMethods, commands: TaskCommands, key: str, version: _Version = None
) -> bool:
    return bool(await commands.exists(cache.client.make_key(key, version=version)) == 1)


async def set(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    value: object,
    timeout: float | None = DEFAULT_TIMEOUT,
    version: _Version = None,
    *,
    nx: bool = False,
    xx: bool = False,
) -> bool:
    nkey, encoded = (
        cache.client.make_key(key, version=version),
        encode_value(cache.client.encode, key, value),
    )
    px = _milliseconds(cache, timeout)
    if px is None or px > 0:
        return bool(await commands.set(nkey, encoded, nx=nx, px=px, xx=xx))
    if nx:
        return not await commands.exists(nkey)
    return bool(await commands.delete(nkey))


async def add(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    value: object,
    timeout: float | None = DEFAULT_TIMEOUT,
    version: _Version = None,
) -> bool:
    return await set(cache, commands, key, value, timeout, version, nx=True)


async def set_many(
    cache: AsyncMethods,
    commands: TaskCommands,
    data: Mapping[str, object],
    timeout: float | None = DEFAULT_TIMEOUT,
    version: _Version = None,
) -> list[str]:
    batch, px = commands.batch(), _milliseconds(cache, timeout)
    for key, value in data.items():
        nkey, encoded = (
            cache.client.make_key(key, version=version),
            encode_value(cache.client.encode, key, value),
        )
        if px is None or px > 0:
            batch.set(nkey, encoded, px=px)
        else:
            batch.delete(nkey)
    if data:
        await commands.send(batch)
    return []


async def touch(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    timeout: float | None = DEFAULT_TIMEOUT,
    version: _Version = None,
) -> bool:
    nkey, px = cache.client.make_key(key, version=version), _milliseconds(cache, timeout)
    done = commands.persist(nkey) if px is None else commands.pexpire(nkey, px)
    return bool(await done)


async def delete(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    version: _Version = None,
    prefix: object = None,
) -> bool:
    nkey = cache.client.make_key(key, version=version, prefix=prefix)
    return bool(await commands.delete(nkey))


async def delete_many(
    cache: AsyncMethods, commands: TaskCommands, keys: Iterable[str], version: _Version = None
) -> Any:
    nkeys = [cache.client.make_key(key, version=version) for key in keys]
    return await commands.delete(*nkeys) if nkeys else 0


async def incr(
    cache: AsyncMethods,
    commands: TaskCommands,
    key: str,
    delta: int = 1,
    version: _Version = None,
    *,
    ignore_key_check: bool = False,
) -> Any:
    nkey = cache.client.make_key(key, version=version)
    try:
        script = COUNT_ALSO_NEW if ignore_key_check else COUNT
        number = await commands.eval(script, 1, nkey, delta)
    except ResponseError:  # The number is larger than those of Redis, and so stored as an object.
        left = await commands.ttl(nkey)
        number = await get(cache, commands, nkey) + delta
        await set(cache, commands, nkey, number, None if left == -1 else max(left, 0))
    if number is None:
        raise ValueError(f"Key {nkey!r} not found")
    return number


async def decr(
    cache: AsyncMethods, commands: TaskCommands, key: str, delta: int = 1, version: _Version = None
) -> Any:
    return await incr(cache, commands, key, -delta, version)


async def incr_version(
    cache: AsyncMethods, commands: TaskCommands, key: str, delta: int = 1, version: _Version = None
) -> int:
    before = cache.version if version is None else version
    value = await get(cache, commands, key, MISSING, before)
    if value is MISSING:
        raise ValueError(f"Key {key!r} not found")
    left = await commands.pttl(cache.client.make_key(key, version=before))
    original = key.original_key() if isinstance(key, CacheKey) else key
    lifetime = None if left == -1 else max(left, 0) / 1000
    await set(cache, commands, original, value, lifetime, before + delta)
    await delete(cache, commands, key, before)
    return int(before + delta)


def _milliseconds(cache: AsyncMethods, timeout: float | None) -> int | None:
    timeout = cache.default_timeout if timeout is DEFAULT_TIMEOUT else timeout
    return None if timeout is None else int(timeout * 1000)


_METHODS = (get, get_many, has_key, set, add, set_many, touch, delete, delete_many)
METHODS = {method.__name__: method for method in (*_METHODS, incr, decr, incr_version)}


async def call(
    cache: AsyncMethods, client: object, name: str, *args: Any, **options: Any
) -> object:
    """The method ``name`` of ``cache`` by the loop's ``client``."""
    try:
        return await METHODS[name](cache, TaskCommands(client), *args, **options)
    except genuine(*FAILED):
        # As in django-redis, ``touch`` raises them always.
        if not cache._ignore_exceptions or name == "touch":
            raise
        if cache._log_ignored_exceptions:
            cache.logger.exception("Exception ignored")
        arguments = dict(zip(("key", "default"), args, strict=False)) | options
        if name == "set_many":
            return list(options["data"] if "data" in options else args[0])
        return {"get": arguments.get("default"), "get_many": {}}.get(name)
