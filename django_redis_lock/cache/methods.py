"""Django's methods of a cache. django-redis's, with their encoding, timeouts and versions, get
something else instead of a redis-py client:

* ``FlightEnding``, for writes: a value computed from older data must not overwrite them (invariant
  C2). It sends each write as one script, so there is no additional round trip.
* ``Replies``, for asyncio, as django-redis has methods for threads only. Such a method runs until
  it needs a reply from Redis; that is awaited, and the method runs again from its beginning, with
  the replies so far.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterable, Iterator
from datetime import datetime, timedelta
from functools import partial, wraps
from typing import Any

from asgiref.sync import sync_to_async
from django.core.cache.backends.base import BaseCache
from django.core.exceptions import ImproperlyConfigured
from django_redis.client import DefaultClient
from redis.exceptions import DataError, NoScriptError, RedisError

from .. import transport
from ..conf import SETTING, GetOrSetOptions
from ..protocol import Call, Script, flight_key
from ..singleflight import (
    DELETE,
    EXPIRE_AT,
    LETTING_GO,
    MARK_STALE,
    WRITE,
    Runner,
    Steps,
    own_flights,
)
from ..transport import is_cluster, run_all
from .get_or_set import GetOrSet, waiting_thread


class FlightEnding:
    """A redis-py client, or pipeline, whose writes end the flights of the keys they write."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._encode = client.get_encoder().encode if hasattr(client, "get_encoder") else None
        #: The scripts whose source a pipeline has sent before its next command.
        self._sent: set[Script] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def set(
        self, name: str, value: Any, nx: bool = False, px: int | None = None, xx: bool = False
    ) -> Any:
        if nx and xx:
            raise DataError("nx and xx are mutually exclusive")
        key = self._key(name)
        mode = "NX" if nx else "XX" if xx else ""
        if isinstance(value, int):
            value = int(value)  # A subclass may have another ``str()``.
        args = (value, "" if px is None else px, mode, *own_flights((key,)).values())
        return self._run(Call(WRITE, (key, flight_key(key)), args))

    def delete(self, *names: str) -> Any:
        return self._run(_deletion(*map(self._key, names)))

    def expire(self, name: str, time: int | timedelta) -> Any:
        if _is_over(time):
            return bool(self.delete(name))
        own_flights((self._key(name),))
        return self._client.expire(name, time)

    def pexpire(self, name: str, time: int | timedelta) -> Any:
        if _is_over(time):
            return self.delete(name)
        own_flights((self._key(name),))
        return self._client.pexpire(name, time)

    def persist(self, name: str) -> Any:
        own_flights((self._key(name),))
        return self._client.persist(name)

    def expireat(self, name: str, when: int | datetime) -> Any:
        at = when.timestamp() if isinstance(when, datetime) else when
        return self._expire_at(name, "EXPIREAT", int(at))

    def pexpireat(self, name: str, when: int | datetime) -> Any:
        at = when.timestamp() * 1000 if isinstance(when, datetime) else when
        return self._expire_at(name, "PEXPIREAT", int(at))

    def _expire_at(self, name: str, command: str, at: int) -> Any:
        key = self._key(name)
        args: tuple[bytes | str | int, ...] = (command, at, *own_flights((key,)).values())
        return bool(self._run(Call(EXPIRE_AT, (key, flight_key(key)), args)))

    def eval(self, script: str, numkeys: int, name: str, *args: Any) -> Any:
        """django-redis increments by a script, which returns nothing if there is no number."""
        key = self._key(name)
        counting = f"""
{LETTING_GO}
local function count() {script} end
local number = count()
if number then let_go(KEYS[2], {len(args) + 1}) end
return number
"""
        own = own_flights((key,)).values()
        return self._client.eval(counting, 2, key, flight_key(key), *args, *own)

    def pipeline(self, *args: Any, **kwargs: Any) -> FlightEnding:
        return FlightEnding(self._client.pipeline(*args, **kwargs))

    def _key(self, name: str) -> bytes:
        encode = self._encode or self._client.connection_pool.get_encoder().encode
        encoded: bytes = encode(name)
        return encoded

    def _run(self, call: Call) -> Any:
        # Named methods, because some tools see only those.
        evalsha, evaluate = self._client.evalsha, self._client.eval
        # Bytes for the same reason as in ``pack_words``.
        args = (a if isinstance(a, bytes) else str(a).encode() for a in call.args)
        words = (b"%d" % len(call.keys), *call.keys, *args)
        stack = getattr(self._client, "command_stack", None)
        if stack is not None:  # A pipeline cannot react to NOSCRIPT: send the source first.
            if not stack:
                self._sent.clear()
            if call.script in self._sent:
                return evalsha(call.script.sha, *words)
            self._sent.add(call.script)
            return evaluate(call.script.source, *words)
        try:
            return evalsha(call.script.sha, *words)
        except NoScriptError:
            return evaluate(call.script.source, *words)


def _deletion(*keys: bytes) -> Call:
    own = own_flights(keys, "deleted").values()
    return Call(DELETE, (*keys, *map(flight_key, keys)), tuple(own))


def _is_over(time: Any) -> bool:
    """Whether a value that is to be kept for ``time`` ends at once; False for no number."""
    length = time.total_seconds() if isinstance(time, timedelta) else time
    return isinstance(length, (int, float)) and length <= 0


class ClusterFlightEnding(FlightEnding):
    """For a cluster: a command with several keys goes to the node of each."""

    def delete(self, *names: str) -> Any:
        calls = [_deletion(key) for key in map(self._key, names)]
        return sum(map(int, run_all(self._client, calls))) if calls else 0

    def pipeline(self, *args: Any, **kwargs: Any) -> Batch:
        return Batch(self._client)


class Batch(ClusterFlightEnding):
    """Writes that are sent together, in one round trip for each node."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._calls: list[Call] = []

    def delete(self, *names: str) -> Any:
        for key in map(self._key, names):
            self._run(_deletion(key))

    def _run(self, call: Call) -> Any:
        self._calls.append(call)

    def execute(self) -> list[Any]:
        calls, self._calls = self._calls, []
        return run_all(self._client, calls) if calls else []


def flight_ending(client: Any) -> FlightEnding:
    return (ClusterFlightEnding if is_cluster(client) else FlightEnding)(client)


#: Keys that no prefix contains; the second is longer than some key functions leave a key.
_PROBES = ("9d41f0", "c7e25a" * 100)


class Writes(GetOrSet):
    """The part of the backends that marks values stale, and knows which keys are its own."""

    # Of django-redis.
    _ignore_exceptions: bool
    _log_ignored_exceptions: bool
    logger: Any
    _guard: Any

    def mark_stale(self, key: str, version: int | None = None, *, stale: float = SETTING) -> bool:
        """Let the value of ``key`` be stale from now on: the next ``get_or_set`` computes it again,
        other callers get the old value until then. Ends a computation under way: what it computes
        may be older.

        Args:
            stale: as in ``get_or_set`` of this key; of several, the smallest. After so many seconds
                the value is gone, unless it has been computed again. Default: the setting STALE.

        Returns:
            whether there is a value.

        Raises:
            TypeError, ValueError: ``stale`` is invalid or 0.
            redis.exceptions.RedisError: Redis is down, and IGNORE_EXCEPTIONS is not set.
        """
        return bool(self.mark_stale_many([key], version, stale=stale))

    async def amark_stale(
        self, key: str, version: int | None = None, *, stale: float = SETTING
    ) -> bool:
        """``mark_stale`` for asyncio."""
        return bool(await self.amark_stale_many([key], version, stale=stale))

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale`` for several keys, in one round trip; returns how many values there are."""
        runner = self._thread_runner()
        return int(runner.do(self._marked_stale(runner, keys, version, stale)))

    async def amark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale_many`` for asyncio."""
        runner = self._async_runner()
        return int(await runner.do(self._marked_stale(runner, keys, version, stale)))

    def _marked_stale(
        self, runner: Runner, keys: Iterable[str], version: int | None, stale: float
    ) -> Steps:
        seconds = GetOrSetOptions.check(stale=stale).get("stale", self.conf.STALE)
        if not seconds:
            raise ValueError(
                "mark_stale needs stale, the seconds for which callers may still get the value, as "
                "in get_or_set. To have it computed again at once, use delete"
            )
        names = yield from self._keys(runner, keys, version)
        args: tuple[bytes | str | int, ...] = (int(seconds * 1000), *own_flights(names).values())
        calls = [Call(MARK_STALE, (name, flight_key(name)), args) for name in names]
        try:
            return sum(map(int, (yield runner.run(*calls)))) if calls else 0
        except (RedisError, OSError):
            if not self._ignore_exceptions:
                raise
            if self._log_ignored_exceptions:
                self.logger.exception("Exception ignored")
            return 0

    def own_pattern(self) -> str:
        """What matches all keys of this cache's KEY_PREFIX and VERSION in Redis."""
        made = [self._guard.unchecked(probe) for probe in _PROBES]
        start, _, end = made[0].partition(_PROBES[0])
        if not start + end or made != [start + probe + end for probe in _PROBES]:
            raise ImproperlyConfigured(
                'CLEAR is "prefix", and KEY_FUNCTION makes keys that do not show whose they are. '
                'Set CLEAR to "database", or have it put a prefix before each key'
            )
        return "*".join(re.sub(r"([\\*?\[\]])", r"\\\1", part) for part in (start, end))


# -- asyncio ---------------------------------------------------------------------------------------


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
        return lambda *args, **options: self._next(partial(found, *args, **options))

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
    """Django's asynchronous methods. With several servers, with a client or connection class of the
    project's own, in ``async_to_sync``, and where the method for threads was replaced, they call
    that in Django's thread for synchronous code, as Django's do."""

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
        one_server = one_server and self._has_plain_keys
        # A loop for which a thread waits lasts for one call, and would have to connect for each.
        if not one_server or not self._is_original(method) or waiting_thread() is not None:
            return None
        try:
            return transport.asyncio_client(self._lock_client())
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
