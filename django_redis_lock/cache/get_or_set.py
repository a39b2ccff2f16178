"""``get_or_set``, ``get_or_set_many`` and ``compute``: Django's arguments for ``singleflight``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from asgiref.sync import AsyncToSync, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.functional import cached_property
from django_redis.client import DefaultClient, HerdClient
from django_redis.serializers.pickle import PickleSerializer

from .. import events, singleflight, transport
from ..clock import time
from ..conf import SETTING, GetOrSetOptions, Timeout, given
from ..events import Read
from ..exceptions import LockNotAcquired
from ..singleflight import (
    TOO_LATE,
    CoordinationError,
    DeferredCall,
    MultiFlight,
    Producer,
    Runner,
    SingleFlight,
    ThreadRunner,
)
from ..steps import Steps
from ..threads import is_async
from .context import Refresh
from .reading import MISSING, CacheReader, FirstRead

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .typed import GetOrSetArguments, GetOrSetManyArguments


class GetOrSet(CacheReader):
    """The part of ``RedisCache`` and ``LocMemCache`` that computes missing values."""

    #: The options of a call that has none, and the settings that they are made of.
    _usual_options: tuple[Mapping[str, object], GetOrSetOptions] | None = None

    def get_or_set(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """The value of ``key``. If it is missing, one caller computes it with ``default``.

        Other callers (threads, tasks, processes and hosts) wait for that result. If the key is set
        or deleted during the computation, the result is returned to its caller but not stored. None
        is a value like any other.

        Args:
            default: a callable without arguments, or the value itself.
            timeout: seconds after which the value is computed again. Default: that of the cache;
                None: never; 0: it is not stored, only the callers that wait for it get it. Or a
                function of the value that returns one of these.
            stale: seconds after the timeout during which callers get the old value at once while
                one of them computes the new one; also if the computation fails.
            background: compute in the background, so that this one gets the old value at once too.
            soft_timeout: seconds to wait at most for the value that this call computes while there
                is an old one. Then it returns the old one, and the computation goes on in the
                background.
            wait: seconds to wait at most for another caller's computation of a missing value.
            on_wait_timeout: what to do then: ``"compute"`` the value here as well, ``"raise"``
                LockNotAcquired, or return the ``"default"``: the value given as ``default``, None
                for a callable.
            jitter: shorten the timeout by a random share up to this much (0 to 1), so that values
                stored together do not expire together.
            error_ttl: seconds after a failed computation during which no caller tries again; they
                get an error with the same message.
            group: the metrics group, such as ``"report-{year}"``. Default: the key with ``*`` for
                each number, UUID and hash in it.

        Raises:
            LockNotAcquired: see ``on_wait_timeout``.
            ComputationFailed: see ``error_ttl``.
            LockError: ``default`` requested its own key.
            TypeError, ValueError: an option or ``timeout`` is invalid, or what that returns.
            redis.exceptions.RedisError: Redis is down, and VALUES_ON_REDIS_DOWN is ``"raise"``;
                otherwise the value is computed, and not stored.
        """
        # A hit must cost what a plain GET costs, so the settings are read after it.
        may_be_stale = options.get("stale", self.conf.STALE)
        if may_be_stale and "stale" not in options:
            may_be_stale = self._timeout(timeout) is not None
        read: FirstRead | None = None
        if not may_be_stale:
            if options:
                GetOrSetOptions.check_without_stale(**options)
            if type(timeout) is not int and timeout is not SETTING:
                GetOrSetOptions.check_timeout(self._timeout(timeout))
            began, value, outage = time.monotonic(), MISSING, None
            if self._reads_first():
                try:
                    value = self._read_or_join(key, version)
                except Exception as error:
                    outage = self._outage_of_read(error, key, version)
            if value is not MISSING:
                self._misses_in_a_row = 0
                self._record_read(key, options.get("group"), "hit", began)
                return value
            read = FirstRead(MISSING, began, time.monotonic() - began, False, True, outage)
        runner = self._thread_runner()
        return runner.do(self._value(runner, key, default, timeout, version, options, read))

    async def aget_or_set(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``get_or_set`` for asyncio. A coroutine function as ``default`` is awaited; any other
        callable, but for built-in types, runs in Django's thread for synchronous code."""
        runner = self._async_runner()
        steps = self._value(runner, key, awaitable(default), timeout, version, options, None)
        return await runner.do(steps)

    def compute(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """Compute, store and return the value of ``key`` even if there is one. Callers that find no
        value wait for this one. If the key is written during the computation, the result
        is not stored. While Redis is down, the value is computed, whatever VALUES_ON_REDIS_DOWN
        is. Arguments as for ``get_or_set``."""
        runner, what = self._thread_runner(), (key, default, timeout, version)
        return runner.do(self._computed(runner, *what, options))

    async def acompute(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``compute`` for asyncio."""
        runner, what = self._async_runner(), (key, awaitable(default), timeout, version)
        return await runner.do(self._computed(runner, *what, options))

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, object]],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, object]:
        """The values of ``keys``; one call of ``default_many`` computes the missing ones.

        ``default_many`` gets the list of the keys that no other caller is computing, and returns a
        dict; a key that is not in it is not in the result either. This call waits for the values
        that others compute. If ``default_many`` raises, the caller gets the exception.

        Args and Raises: as for ``get_or_set``, without ``stale``, ``background`` and
        ``soft_timeout``. All keys are counted in one metrics group; the default is that of the
        first key.
        """
        runner, what = self._thread_runner(), (keys, default_many, timeout, version)
        values: dict[str, object] = runner.do(self._values(runner, *what, options, read=True))
        return values

    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, object]:
        """``get_or_set_many`` for asyncio."""
        runner, what = self._async_runner(), (keys, awaitable(default_many), timeout, version)
        values: dict[str, object] = await runner.do(self._values(runner, *what, options))
        return values

    # -- the steps -----------------------------------------------------------------------------

    def _computed(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
    ) -> Steps[object]:
        chosen = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        [nkey] = yield from self._keys(runner, [key], version)
        producer = self._producer(key, default, timeout, chosen)
        flight = MultiFlight(runner, self.conf.FLIGHT_TIMEOUT, producer)
        return (yield from flight.compute_anyway([nkey], replace=True))[nkey]

    def _value(
        self,
        runner: Runner,
        key: str,
        default: object,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
        read: FirstRead | None,
    ) -> Steps[object]:
        """The steps of ``get_or_set``, after a ``read`` that returned no value, or without one."""
        began = time.monotonic()
        chosen = self._options(timeout, options)
        if self._has_plain_keys:  # As in most caches, without a generator.
            nkey = self._encoded_key(key, version)
        else:
            [nkey] = yield from self._keys(runner, [key], version)
        if read is None:
            read = yield from self._first_read_steps(runner, nkey, key, version, chosen)
            if read.value is not MISSING and not read.is_stale:
                self._misses_in_a_row = 0
                self._record_read(key, chosen.group, "hit", read.began, read.seconds)
                return read.value
        producer = self._producer(key, default, timeout, chosen)
        if read.is_stale:
            self._record_read(key, chosen.group, "stale", read.began, read.seconds)
            refresh = Refresh(self, key, version, nkey)
            return (yield from refresh.value(runner, producer, read.value, chosen.refresh_wait))
        flight = SingleFlight(runner, self.conf.FLIGHT_TIMEOUT, producer, nkey)
        flight.unseen = read.unseen
        outage = read.outage
        try:
            try:
                value = yield from flight.get_value(began + chosen.wait, outage)
            except CoordinationError as error:
                outage = self._without_redis(error.__cause__ or error)
                value = yield from flight.get_value(began + chosen.wait, outage)
        finally:
            if flight.were_there:
                self._misses_in_a_row = 0
                self._record_read(key, chosen.group, "hit", read.began)
            else:
                self._misses_in_a_row += 1
                self._record_read(key, chosen.group, "miss", read.began, read.seconds)
        if value is not TOO_LATE:
            return value
        if chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing the value", key)
        if chosen.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flight.compute_value(outage))

    def _values(
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
        chosen = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options, stale=0.0)
        deadline = time.monotonic() + chosen.wait
        names = list(dict.fromkeys(keys))
        began = time.monotonic()
        values, outage = dict[str, object](), None
        if read:
            values, outage = self._read_many(names, version)
        elif not self._is_plain:
            values, outage = yield sync_to_async(self._read_many)(names, version)
        read_at, hits = (began, time.monotonic() - began), len(values)
        names_missing = [name for name in names if name not in values]
        nkeys = yield from self._keys(runner, names_missing, version)
        missing = dict(zip(nkeys, names_missing, strict=True))
        if missing:
            producer = self._producer(names[0], default_many, timeout, chosen)
            flight = MultiFlight(runner, self.conf.FLIGHT_TIMEOUT, producer, missing)
            try:
                yield from self._get_missing(flight, missing, chosen, deadline, outage)
            finally:
                hits += flight.were_there
                if misses := len(names) - hits:
                    self._record_read(names[0], chosen.group, "miss", *read_at, values=misses)
            values.update((missing[nkey], value) for nkey, value in flight.values.items())
        if hits:
            self._record_read(names[0], chosen.group, "hit", *read_at, values=hits)
        return {name: values[name] for name in names if name in values}

    def _get_missing(
        self,
        flight: MultiFlight,
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
                outage = self._without_redis(error.__cause__ or error)
                late = [key for key in late if key not in values]
        if outage is not None:
            values.update((yield from flight.leader(late).without_redis(outage)))
        elif late and chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing a value", missing[late[0]])

    def _options(self, timeout: Timeout, arguments: GetOrSetArguments) -> GetOrSetOptions:
        """The options of a call; without ``arguments`` the same until a setting changes."""
        seconds = self._timeout(timeout)
        if arguments or type(seconds) is not int:
            return GetOrSetOptions.of(self.conf, seconds, **arguments)
        settings, usual = given(), self._usual_options
        if usual is None or usual[0] is not settings:
            usual = self._usual_options = settings, GetOrSetOptions.of(self.conf, seconds)
        return usual[1]

    def _record_read(
        self,
        key: str,
        group: str | None,
        result: str,
        began: float,
        seconds: float | None = None,
        values: int = 1,
    ) -> None:
        """Count a read, and emit a ``Read``; see there. Without ``seconds`` it ends now."""
        if (count := events.count_read) is not None:
            count(self, key, group or "", result, values)
        if events.read_listeners:
            seconds = time.monotonic() - began if seconds is None else seconds
            events.emit(Read(self, str(key), group or "", result, values, began, seconds))

    def _producer(
        self, key: str, default: object, timeout: Timeout, chosen: GetOrSetOptions
    ) -> Producer:
        return Producer(
            default if callable(default) else lambda: default,
            self._encoded,
            partial(self._decoded, key, chosen.group),
            chosen.lifetime(self._timeout(timeout)),
            int(chosen.stale * 1000),
            int(chosen.error_ttl * 1000),
            self._keeps_objects,
            str(key),
            chosen.group or "",
            self,
        )

    @cached_property
    def _keeps_objects(self) -> bool:
        """Whether what is stored is decoded to an equal object."""
        client = self.client
        return type(getattr(client, "_serializer", None)) is PickleSerializer and (
            type(client).decode is DefaultClient.decode
        )

    def _encoded(self, value: object) -> bytes | int:
        """``value`` as the server stores it. Serializers and compressors may return any buffer."""
        if isinstance(self.client, HerdClient):
            raise ImproperlyConfigured(
                "HerdClient stores values in a format that get_or_set cannot use. "
                "Use django-redis's DefaultClient: get_or_set needs no herd"
            )
        encoded = self.client.encode(value)
        return encoded if isinstance(encoded, (bytes, int)) else bytes(encoded)

    def _timeout(self, timeout: Timeout) -> Timeout:
        left_out = timeout is SETTING or timeout is DEFAULT_TIMEOUT
        return self.default_timeout if left_out else timeout

    def _keys(
        self, runner: Runner, names: Iterable[str], version: int | None
    ) -> Steps[list[bytes]]:
        """The keys of ``names`` in Redis. A task may have to make them in Django's thread."""
        if self._has_plain_keys or isinstance(runner, ThreadRunner):
            return [self._encoded_key(name, version) for name in names]
        make = sync_to_async(lambda: [self._encoded_key(name, version) for name in names])
        keys: list[bytes] = yield make()
        return keys

    def _thread_runner(self) -> ThreadRunner:
        own = self._own
        client = self._lock_client() if own is None else own.client
        return ThreadRunner(client, connections.close_all)

    def _async_runner(self) -> singleflight.AsyncRunner:
        client = transport.asyncio_client(self._lock_client())
        return singleflight.AsyncRunner(client, waiting_thread())


def waiting_thread() -> object:
    """What stands for the thread that waits for the running task in ``async_to_sync``."""
    return getattr(AsyncToSync.executors, "current", None)


def awaitable(function: object) -> Any:
    waits_for_nothing = type(function) is type and function.__module__ == "builtins"  # ``list``
    if waits_for_nothing or not callable(function) or is_async(function):
        return function
    return DeferredCall(function, sync_to_async)
