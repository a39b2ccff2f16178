"""``get_or_set`` and ``compute``: Django's arguments for ``singleflight``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, ClassVar

from asgiref.sync import AsyncToSync, iscoroutinefunction, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.db import connections
from django.utils import timezone, translation
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from .. import events
from ..clock import time
from ..conf import GetOrSetOptions, Timeout
from ..events import Read
from ..exceptions import LockNotAcquired
from ..singleflight import (
    TOO_LATE,
    AsyncRunner,
    CoordinationError,
    DeferredCall,
    Flights,
    InProcessFlight,
    Producer,
    Runner,
    Steps,
    ThreadRunner,
    in_flight,
)
from ..threads import Work
from ..transport import asyncio_client, server_of
from .reading import MISSING, CacheReader

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..conf import GetOrSetArguments


class GetOrSet(CacheReader):
    """The part of ``RedisCache`` and ``LocMemCache`` that computes missing values."""

    #: The methods that tools replace to observe reads; see ``originals``.
    _methods: ClassVar[dict[str, tuple[Any, Any]]]
    #: Those of them that take what reads give them.
    _usable: Collection[str] = ("get",)

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
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
            TypeError, ValueError: an option is invalid, or what ``timeout`` returns.
            redis.exceptions.RedisError: Redis is down, and VALUES_ON_REDIS_DOWN is ``"raise"``;
                otherwise the value is computed, and not stored.
        """
        # A hit must cost what a plain GET costs, so the settings are read after it.
        may_be_stale = options.get("stale", self.conf.STALE)
        if may_be_stale and "stale" not in options:
            may_be_stale = self._timeout(timeout) is not None
        outage: BaseException | None = None
        began = time.monotonic()
        if not may_be_stale:
            if options:
                GetOrSetOptions.check_without_stale(**options)
            try:
                value = self._read_or_join(key, version)
                if value is not MISSING:
                    self._record_read(key, options.get("group"), "hit", began)
                    return value
            except ConnectionInterrupted as error:
                outage = self._without_redis(error.__cause__ or error)
        runner, what = self._thread_runner(), (key, default, timeout, version)
        tried = None if may_be_stale else (began, time.monotonic() - began)
        return runner.do(self._value(runner, *what, options, outage, tried))

    async def aget_or_set(
        self,
        key: str,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``get_or_set`` for asyncio. A coroutine function as ``default`` is awaited; any other
        callable runs in Django's thread for synchronous code."""
        runner, what = self._async_runner(), (key, awaitable(default), timeout, version)
        return await runner.do(self._value(runner, *what, options))

    def compute(
        self,
        key: str,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """Compute, store and return the value of ``key`` even if there is one. Callers that find no
        value wait for this one. If the key is written during the computation, the result
        is not stored. Arguments as for ``get_or_set``."""
        runner, what = self._thread_runner(), (key, default, timeout, version)
        return runner.do(self._computed(runner, *what, options))

    async def acompute(
        self,
        key: str,
        default: Any,
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``compute`` for asyncio."""
        runner, what = self._async_runner(), (key, awaitable(default), timeout, version)
        return await runner.do(self._computed(runner, *what, options))

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], Any],
        version: int | None = None,
        expire: float | None = None,
        id: str | bytes | None = None,
        lock_key: str | None = None,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> Any:
        """``get_or_set`` under python-redis-lock's name. None is a value, and stored.

        Args:
            lock_key: a lock to hold while ``value_creator`` runs, so that values with the same
                ``lock_key`` are computed one after another. Not needed to compute a value once.
            expire: timeout of that lock in seconds. Default: the setting TIMEOUT, renewed. No
                effect without ``lock_key``.
            id: the token of that lock.
        """

        def create() -> Any:
            if lock_key is None:
                return value_creator()
            lifetime: dict[str, Any] = {} if expire is None else {"timeout": expire}
            with self.lock(lock_key, id=id, **lifetime):
                return value_creator()

        return self.get_or_set(key, create, timeout, version)

    # -- a hit ---------------------------------------------------------------------------------

    def _read_or_join(self, key: str, version: int | None) -> Any:
        """The value; MISSING also if the caller is to join a computation of this process. Raises
        ConnectionInterrupted."""
        raise NotImplementedError

    def _read_many(
        self, names: list[str], version: int | None
    ) -> tuple[dict[str, Any], BaseException | None]:
        """The stored values, and the error if Redis is down."""
        raise NotImplementedError

    def _in_flight(self, key: str, version: int | None) -> InProcessFlight | None:
        if not in_flight:
            return None
        flight_id = (server_of(self._lock_client()), self._encoded_key(key, version), None)
        return in_flight.get(flight_id)

    def _is_replaced(self, method: str) -> bool:
        """Whether a tool observes ``method``: has replaced it on the class (django-prometheus), on
        this instance (Sentry), or its code (Datadog). Then reads go through it."""
        return not self._is_original(method) and method in self._usable

    def _is_original(self, method: str) -> bool:
        function, code = self._methods[method]
        is_own = getattr(type(self), method) is function and function.__code__ is code
        return is_own and method not in self.__dict__

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
        if events.count_read is not None:
            events.count_read(self, key, group or "", result, values)
        if events.read_listeners:
            seconds = time.monotonic() - began if seconds is None else seconds
            events.emit(Read(self, str(key), group or "", result, values, began, seconds))

    # -- the steps -----------------------------------------------------------------------------

    def _computed(
        self,
        runner: Runner,
        key: str,
        default: Any,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
    ) -> Steps:
        chosen = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer, nkey = (
            self._producer(key, default, timeout, chosen),
            self._encoded_key(key, version),
        )
        return (yield from self._flights(runner).compute_anyway(nkey, producer))

    def _value(
        self,
        runner: Runner,
        key: str,
        default: Any,
        timeout: Timeout,
        version: int | None,
        options: GetOrSetArguments,
        outage: BaseException | None = None,
        read_at: tuple[float, float] | None = None,
    ) -> Steps:
        """The steps of ``get_or_set``, after a read that found nothing: it failed with ``outage``,
        began, and took seconds (``read_at``); None if there was none."""
        began = time.monotonic()
        chosen = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        stale, nkey = int(chosen.stale * 1000), self._encoded_key(key, version)
        stored: Any = None
        is_stale = False
        if read_at is None:
            value: Any = MISSING
            try:
                replaced = self._is_replaced("get")
                steps = self._read(runner, nkey, bool(stale or replaced or runner.is_observed))
                if replaced:
                    stored, value = yield from self._read_observed(runner, steps, key, version)
                else:
                    stored = yield from steps
            except (RedisError, OSError) as error:
                outage = self._without_redis(error)
            read_at = began, time.monotonic() - began
            is_stale = stored is not None and 0 <= int(stored[1]) <= stale
            if not is_stale and (stored is not None or value is not MISSING):
                self._record_read(key, chosen.group, "hit", *read_at)
                return self._decode(stored[0]) if value is MISSING else value
        producer, flights = self._producer(key, default, timeout, chosen), self._flights(runner)
        if is_stale:
            self._record_read(key, chosen.group, "stale", *read_at)
            return (yield from flights.refresh(nkey, stored[0], producer, chosen.refresh_wait))
        deadline = began + chosen.wait
        try:
            try:
                found = yield from flights.get_or_compute(nkey, producer, deadline, outage)
            except CoordinationError as error:
                outage = self._without_redis(error.__cause__ or error)
                found = yield from flights.get_or_compute(nkey, producer, deadline, outage)
        finally:
            if flights.was_there:
                self._record_read(key, chosen.group, "hit", read_at[0])
            else:
                self._record_read(key, chosen.group, "miss", *read_at)
        if found is not TOO_LATE:
            return found
        if chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing the value", key)
        if chosen.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flights.compute_anyway(nkey, producer, outage))

    def _without_redis(self, error: BaseException) -> BaseException:
        """``error``, an outage or a refusal of Redis, or raise it (VALUES_ON_REDIS_DOWN)."""
        if self.conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def _producer(
        self, key: str, default: Any, timeout: Timeout, chosen: GetOrSetOptions
    ) -> Producer:
        return Producer(
            default if callable(default) else lambda: default,
            self._encoded,
            self._decode,
            chosen.lifetime(self._timeout(timeout)),
            int(chosen.stale * 1000),
            int(chosen.error_ttl * 1000),
            str(key),
            chosen.group or "",
            self,
        )

    def _encode(self, value: Any) -> Any:
        raise NotImplementedError

    def _decode(self, stored: Any) -> Any:
        raise NotImplementedError

    def _encoded(self, value: Any) -> bytes | int:
        """``value`` as the server stores it. Serializers and compressors may return any buffer."""
        encoded = self._encode(value)
        return encoded if isinstance(encoded, (bytes, int)) else bytes(encoded)

    def _timeout(self, timeout: Any) -> Any:
        return self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout

    def _flights(self, runner: Runner) -> Flights:
        return Flights(runner, self.conf.FLIGHT_TIMEOUT)

    def _thread_runner(self) -> ThreadRunner:
        return ThreadRunner(self._lock_client(), _with_language)

    def _async_runner(self) -> AsyncRunner:
        return AsyncRunner(asyncio_client(self._lock_client()), waiting_thread())


def _with_language(work: Work) -> Work:
    """``work`` with the caller's language and time zone, and without database connections
    afterwards."""
    language, time_zone = translation.get_language(), timezone.get_current_timezone()

    def run() -> None:
        try:
            with translation.override(language), timezone.override(time_zone):
                work()
        finally:
            connections.close_all()

    return run


def waiting_thread() -> Any:
    """What stands for the thread that waits for the running task in ``async_to_sync``."""
    return getattr(AsyncToSync.executors, "current", None)


def awaitable(function: Any) -> Any:
    if not callable(function) or any(
        is_coroutine(code)
        for is_coroutine in (inspect.iscoroutinefunction, iscoroutinefunction)
        for code in (function, type(function).__call__)
    ):
        return function
    return DeferredCall(function, sync_to_async)
