"""``get_or_set`` and ``compute``: Django's arguments on one side, ``singleflight`` on the other."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asgiref.sync import AsyncToSync, iscoroutinefunction, sync_to_async
from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.db import connections
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ..exceptions import LockNotAcquired
from ..singleflight import (
    TOO_LATE,
    AsyncRunner,
    CoordinationError,
    DeferredCall,
    Producer,
    Steps,
    ThreadRunner,
)
from ..transport import asyncio_client
from .options import GetOrSetOptions
from .reading import MISSING, Reading

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import GetOrSetArguments

__all__ = ["GetOrSet", "awaitable"]


class GetOrSet(Reading):
    """The part of ``RedisCache`` and ``LocMemCache`` that computes missing values."""

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """The value of ``key``; if there is none, ``default`` is called for it, once.

        Callers that ask while it runs (threads, tasks, processes and hosts) wait for that one
        result. A ``set`` or ``delete`` of the key in that time wins: the result is then returned to
        its own caller but not stored. None is a value like any other.

        Args:
            default: a callable without arguments, or the value itself.
            timeout: seconds after which the value is computed again; left out, the cache's own;
                None, never.
            stale: seconds after that for which the old value may still be served, at once, while
                one caller computes the new one; also if that fails.
            background: the caller that computes gets the old value at once, too.
            wait: seconds to wait at most for another's computation of a missing value.
            on_wait_timeout: what to do then: ``"compute"`` the value here as well, ``"raise"``
                LockNotAcquired, or return the ``"default"``: the value given as ``default``, None
                for a callable.
            jitter: shorten the timeout by a random share of up to this much (0 to 1), so that what
                was stored together does not have to be computed together again.
            error_ttl: seconds after a failed computation during which no caller tries again; they
                fail with the same message.
            group: under which it is counted in metrics, such as ``"report-{year}"``; None: the key
                with ``*`` for each number, UUID and hash in it.

        Raises:
            LockNotAcquired: see ``on_wait_timeout``.
            ComputationFailed: see ``error_ttl``.
            LockError: ``default`` asked for its own key.
            TypeError, ValueError: an option makes no sense.
            redis.exceptions.RedisError: Redis is away, and VALUES_ON_REDIS_DOWN is ``"raise"``;
                otherwise the value is computed, and not stored.
        """
        # A hit must cost what a plain GET costs, so the settings are read after it.
        if options:
            GetOrSetOptions.check(**options)
        may_be_stale = options.get("stale", self.conf.STALE)
        if may_be_stale and "stale" not in options:
            may_be_stale = self._timeout(timeout) is not None
        outage: BaseException | None = None
        if not may_be_stale:
            try:
                value = self._read_or_join(key, version)
                if value is not MISSING:
                    return value
            except ConnectionInterrupted as error:
                outage = self._without_redis(error.__cause__ or error)
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, default, timeout, terms)
        runner = self._thread_runner()
        nkey = self._encoded_key(key, version)
        read = bool(terms.stale)
        return runner.do(self._value(runner, key, nkey, producer, terms, default, outage, read))

    async def aget_or_set(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """As ``get_or_set``, for asyncio. ``default`` may be a coroutine function, which is
        awaited; any other callable runs in Django's thread for synchronous code."""
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, awaitable(default), timeout, terms)
        runner = self._async_runner()
        nkey = self._encoded_key(key, version)
        steps = self._value(runner, key, nkey, producer, terms, default, outage=None, read=True)
        return await runner.do(steps)

    def compute(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """Compute and store the value of ``key`` even if there is one, and return it. Callers that
        find none while it is computed wait for this one; a write in that time wins. Arguments as
        for ``get_or_set``."""
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, default, timeout, terms)
        runner = self._thread_runner()
        return runner.do(runner.flights.compute_anyway(self._encoded_key(key, version), producer))

    async def acompute(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """As ``compute``, for asyncio."""
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, awaitable(default), timeout, terms)
        runner = self._async_runner()
        nkey = self._encoded_key(key, version)
        return await runner.do(runner.flights.compute_anyway(nkey, producer))

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], Any],
        version: int | None = None,
        expire: float | None = None,
        id: str | bytes | None = None,
        lock_key: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT,
    ) -> Any:
        """``get_or_set`` by python-redis-lock's name. None is a value here, and kept.

        Args:
            lock_key: a lock to hold while ``value_creator`` runs, so that values with the same
                ``lock_key`` are computed one after another. Left out, no lock is needed: a value
                is computed once in any case.
            expire: seconds that lock lives; left out, the setting TIMEOUT, renewed meanwhile.
                Without ``lock_key`` it means nothing: FLIGHT_TIMEOUT and its renewal do.
            id: the token of that lock.
        """

        def create() -> Any:
            if lock_key is None:
                return value_creator()
            lifetime: dict[str, Any] = {} if expire is None else {"timeout": expire}
            with self.lock(lock_key, id=id, **lifetime):
                return value_creator()

        return self.get_or_set(key, create, timeout, version)

    # -- the same for threads and tasks --------------------------------------------------------

    def _value(
        self,
        runner: ThreadRunner | AsyncRunner,
        key: str,
        nkey: bytes,
        producer: Producer,
        terms: GetOrSetOptions,
        default: Any,
        outage: BaseException | None,
        read: bool,
    ) -> Steps:
        deadline = time.monotonic() + terms.wait
        flights = runner.flights
        if read:
            kept = None
            try:
                kept = yield from self._read(flights.flight_id(nkey), bool(producer.stale))
            except (RedisError, OSError) as error:
                outage = self._without_redis(error)
            if kept is not None:
                value, left = kept
                if 0 <= int(left) <= producer.stale:
                    return (yield from flights.refresh(nkey, value, producer, terms.background))
                return producer.decode(value)
        try:
            found = yield from flights.get_or_compute(nkey, producer, deadline, outage)
        except CoordinationError as error:
            outage = self._without_redis(error.__cause__ or error)
            found = yield from flights.get_or_compute(nkey, producer, deadline, outage)
        if found is not TOO_LATE:
            return found
        if terms.on_wait_timeout == "raise":
            raise LockNotAcquired("The value is still being computed elsewhere", key)
        if terms.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flights.compute_anyway(nkey, producer, outage))

    def _without_redis(self, error: BaseException) -> BaseException:
        """Redis is away, or refuses to answer: ``error``. The caller gets its value nevertheless
        (invariant C3), unless the setting VALUES_ON_REDIS_DOWN is ``"raise"``."""
        if self.conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def _producer(
        self,
        key: str,
        default: Any,
        timeout: float | None,
        terms: GetOrSetOptions,
    ) -> Producer:
        return Producer(
            default if callable(default) else lambda: default,
            self._encoded,
            self._decode,
            terms.lifetime(self._timeout(timeout)),
            int(terms.stale * 1000),
            int(terms.error_ttl * 1000),
            str(key),
            terms.group or "",
            self,
        )

    def _encode(self, value: Any) -> Any:
        raise NotImplementedError

    def _decode(self, kept: Any) -> Any:
        raise NotImplementedError

    def _encoded(self, value: Any) -> bytes | int:
        """As the server is to keep it. Serializers and compressors may give any buffer."""
        encoded = self._encode(value)
        return encoded if isinstance(encoded, (bytes, int)) else bytes(encoded)

    def _timeout(self, timeout: float | None) -> float | None:
        return self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout

    def _thread_runner(self) -> ThreadRunner:
        return ThreadRunner(self._lock_client(), self.conf.FLIGHT_TIMEOUT, connections.close_all)

    def _async_runner(self) -> AsyncRunner:
        # With asgiref's async_to_sync a thread waits for this task, and is known to it by this.
        thread = getattr(AsyncToSync.executors, "current", None)
        return AsyncRunner(asyncio_client(self._lock_client()), self.conf.FLIGHT_TIMEOUT, thread)


def awaitable(function: Any) -> Any:
    """``function`` so that calling it does not block the event loop."""
    if not callable(function) or any(
        is_coroutine(code)
        for is_coroutine in (inspect.iscoroutinefunction, iscoroutinefunction)
        for code in (function, type(function).__call__)
    ):
        return function
    return DeferredCall(function, sync_to_async)
