"""How the missing values of a cache are computed: Django's arguments for ``singleflight``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from asgiref.sync import AsyncToSync, sync_to_async
from django.db import connections
from redis.exceptions import RedisError

from .. import singleflight, transport
from ..clock import time
from ..conf import GetOrSetOptions, Timeout, given
from ..exceptions import LockNotAcquired
from ..protocol import Call
from ..protocol.keys import flight_key
from ..singleflight import (
    MARK_STALE,
    TOO_LATE,
    CoordinationError,
    DeferredCall,
    Flight,
    Producer,
    Runner,
    ThreadRunner,
    own_flights,
)
from ..steps import Steps
from ..threads import is_async
from .background import Refresh
from .connections import Connections
from .values import MISSING, FirstRead, Values

if TYPE_CHECKING:
    from .arguments import GetOrSetArguments, GetOrSetManyArguments

R = TypeVar("R")


class Flights:
    """Computes the missing values of one ``cache``, a backend. Its methods with a ``runner`` are
    those of the backend, as steps."""

    def __init__(self, cache: Any, connections: Connections, values: Values) -> None:
        self._cache, self._conf = cache, cache.conf
        self._connections = connections
        self._values = values
        #: The options of a call that has none, and the settings that they are made of.
        self._usual_options: tuple[Mapping[str, object], GetOrSetOptions] | None = None

    def do(self, steps: Callable[..., Steps[R]], *args: object) -> R:
        """What ``steps`` return, in the calling thread."""
        runner = self.thread_runner()
        return runner.do(steps(runner, *args))

    async def ado(self, steps: Callable[..., Steps[R]], *args: object) -> R:
        """What ``steps`` return, in the calling task."""
        runner = self.async_runner()
        return await runner.do(steps(runner, *args))

    def thread_runner(self) -> ThreadRunner:
        own = self._connections.own
        client = self._cache._lock_client() if own is None else own.client
        return ThreadRunner(client, connections.close_all)

    def async_runner(self) -> singleflight.AsyncRunner:
        client = transport.asyncio_client(self._cache._lock_client())
        return singleflight.AsyncRunner(client, waiting_thread())

    def compute(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
    ) -> Steps[object]:
        chosen = GetOrSetOptions.of(self._conf, self._values.timeout(timeout), **options)
        [nkey] = yield from self.keys(runner, [key], version)
        producer = self._producer(key, default, timeout, chosen)
        flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, nkey)
        return (yield from flight.compute_anyway([nkey], replace=True))[nkey]

    def value(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
        read: object = None,
    ) -> Steps[object]:
        """The steps of ``get_or_set``, after a ``FirstRead`` that returned no value, or without."""
        began = time.monotonic()
        chosen = self._options(timeout, options)
        if self._cache._has_plain_keys:  # As in most caches, without a generator.
            nkey = self._cache._encoded_key(key, version)
        else:
            [nkey] = yield from self.keys(runner, [key], version)
        if not isinstance(read, FirstRead):
            read = yield from self._values.first_in_steps(runner, nkey, key, version, chosen)
            if read.value is not MISSING and not read.is_stale:
                self._values.misses_in_a_row = 0
                self._values.record_read(key, chosen.group, "hit", read.began, read.seconds)
                return read.value
        producer = self._producer(key, default, timeout, chosen)
        if read.is_stale:
            self._values.record_read(key, chosen.group, "stale", read.began, read.seconds)
            refresh = Refresh(self._cache, key, version, nkey)
            return (yield from refresh.value(runner, producer, read.value, chosen.refresh_wait))
        flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, nkey)
        flight.unseen = read.unseen
        outage = read.outage
        try:
            try:
                value = yield from flight.get_value(began + chosen.wait, outage)
            except CoordinationError as error:
                outage = self._values.without_redis(error.__cause__ or error)
                value = yield from flight.get_value(began + chosen.wait, outage)
        finally:
            if flight.were_there:
                self._values.misses_in_a_row = 0
                self._values.record_read(key, chosen.group, "hit", read.began)
            else:
                self._values.misses_in_a_row += 1
                self._values.record_read(key, chosen.group, "miss", read.began, read.seconds)
        if value is not TOO_LATE:
            return value
        if chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing the value", key)
        if chosen.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flight.compute_value(outage))

    def values(
        self,
        runner: Runner,
        keys: Iterable[str],
        default_many: Callable[[list[str]], object],
        timeout: Timeout,
        version: int | None,
        options: GetOrSetManyArguments,
        read: bool = False,
    ) -> Steps[dict[str, object]]:
        """The steps of ``get_or_set_many``; ``read`` all values first, with one command."""
        for name in ("stale", "background", "soft_timeout"):
            if name in options:
                raise TypeError(f"get_or_set_many has no option {name!r}")
        if not callable(default_many):
            wrong = f"default_many must be a function of the missing keys, not {default_many!r}"
            raise TypeError(wrong)
        chosen = GetOrSetOptions.of(self._conf, self._values.timeout(timeout), **options, stale=0.0)
        deadline = time.monotonic() + chosen.wait
        names = list(dict.fromkeys(keys))
        began = time.monotonic()
        values, outage = dict[str, object](), None
        if read:
            values, outage = self._values.read_many(names, version)
        elif not self._connections.plain:
            values, outage = yield sync_to_async(self._values.read_many)(names, version)
        read_at, hits = (began, time.monotonic() - began), len(values)
        names_missing = [name for name in names if name not in values]
        nkeys = yield from self.keys(runner, names_missing, version)
        missing = dict(zip(nkeys, names_missing, strict=True))
        if missing:
            producer = self._producer(names[0], default_many, timeout, chosen)
            flight = Flight(runner, self._conf.FLIGHT_TIMEOUT, producer, names=missing)
            try:
                yield from self._get_missing(flight, missing, chosen, deadline, outage)
            finally:
                hits += flight.were_there
                if misses := len(names) - hits:
                    self._values.record_read(
                        names[0], chosen.group, "miss", *read_at, values=misses
                    )
            values.update((missing[nkey], value) for nkey, value in flight.values.items())
        if hits:
            self._values.record_read(names[0], chosen.group, "hit", *read_at, values=hits)
        return {name: values[name] for name in names if name in values}

    def _get_missing(
        self,
        flight: Flight,
        missing: Mapping[bytes, str],
        chosen: GetOrSetOptions,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps[None]:
        """Complete the values of ``flight``."""
        values, late = flight.values, list(missing)
        if outage is None:
            try:
                late = yield from flight.get_values(late, deadline)
                if late and chosen.on_wait_timeout == "compute":
                    values.update((yield from flight.compute_anyway(late)))
            except CoordinationError as error:
                outage = self._values.without_redis(error.__cause__ or error)
                late = [key for key in late if key not in values]
        if outage is not None:
            values.update((yield from flight.without_redis(late, outage)))
        elif late and chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing a value", missing[late[0]])

    def _options(self, timeout: Timeout, arguments: GetOrSetArguments) -> GetOrSetOptions:
        """The options of a call; without ``arguments`` the same until a setting changes."""
        seconds = self._values.timeout(timeout)
        if arguments or type(seconds) is not int:
            return GetOrSetOptions.of(self._conf, seconds, **arguments)
        settings, usual = given(), self._usual_options
        if usual is None or usual[0] is not settings:
            usual = self._usual_options = settings, GetOrSetOptions.of(self._conf, seconds)
        return usual[1]

    def _producer(
        self, key: str, default: object, timeout: Timeout, chosen: GetOrSetOptions
    ) -> Producer:
        return Producer(
            default if callable(default) else lambda: default,
            self._values.encoded,
            partial(self._values.decoded, key, chosen.group),
            chosen.lifetime(self._values.timeout(timeout)),
            int(chosen.stale * 1000),
            int(chosen.error_ttl * 1000),
            self._values.keeps_objects,
            str(key),
            chosen.group or "",
            self._cache,
        )

    def mark_stale(
        self, runner: Runner, keys: Iterable[str], version: int | None, stale: float
    ) -> Steps[int]:
        cache, seconds = self._cache, self.stale_seconds(stale)
        names = yield from self.keys(runner, keys, version)
        args: tuple[bytes | str | int, ...] = (int(seconds * 1000), *own_flights(names).values())
        calls = [Call(MARK_STALE, (name, flight_key(name)), args) for name in names]
        try:
            return sum(map(int, (yield runner.run(*calls)))) if calls else 0
        except RedisError:
            if not cache._ignore_exceptions:
                raise
            if cache._log_ignored_exceptions:
                cache.logger.exception("Exception ignored")
            return 0

    def stale_seconds(self, stale: float) -> float:
        """``stale`` as ``mark_stale`` needs it, by default the setting. Raises as that."""
        given = GetOrSetOptions.check(stale=stale)
        seconds: float = given.get("stale", self._conf.STALE)
        if not seconds:
            raise ValueError(
                "mark_stale needs stale, the seconds for which callers may still get the value, as "
                "in get_or_set. To have it computed again at once, use delete"
            )
        return seconds

    def keys(self, runner: Runner, names: Iterable[str], version: int | None) -> Steps[list[bytes]]:
        """The keys of ``names`` in Redis. A task may have to make them in Django's thread."""
        if self._cache._has_plain_keys or isinstance(runner, ThreadRunner):
            return [self._cache._encoded_key(name, version) for name in names]
        make = sync_to_async(lambda: [self._cache._encoded_key(name, version) for name in names])
        keys: list[bytes] = yield make()
        return keys


def waiting_thread() -> object:
    """What stands for the thread that waits for the running task in ``async_to_sync``."""
    return getattr(AsyncToSync.executors, "current", None)


def awaitable(function: object) -> Any:
    waits_for_nothing = type(function) is type and function.__module__ == "builtins"  # ``list``
    if waits_for_nothing or not callable(function) or is_async(function):
        return function
    return DeferredCall(function, sync_to_async)
