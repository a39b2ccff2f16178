"""``get_or_set`` as the cache backend has it: Django's arguments in front, the rule of flights
behind."""

from __future__ import annotations

import time
from typing import Any, Literal

from django.core.cache.backends.base import DEFAULT_TIMEOUT
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.utils.functional import cached_property
from django_redis.client import HerdClient
from django_redis.exceptions import ConnectionInterrupted
from redis.exceptions import RedisError

from ..conf import Conf
from ..events import check_group
from ..exceptions import LockNotAcquired
from ..singleflight import TOO_LATE, AsyncRunner, CoordinationError, Producer, Steps, ThreadRunner
from ..transport import asyncio_client
from .awaitables import awaitable
from .options import SETTING, GetOrSetOptions
from .reading import MISSING, Reading

__all__ = ["Computing", "OnWaitTimeout"]

OnWaitTimeout = Literal["compute", "raise", "default"]


class Computing(Reading):
    """The part of ``RedisCache`` that computes missing values."""

    default_timeout: float | None
    get_many: Any
    _params: dict[str, Any]

    @cached_property
    def conf(self) -> Conf:
        return Conf(self._params.get("OPTIONS"))

    def get_or_set(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        stale: float = SETTING,
        wait: float = SETTING,
        on_wait_timeout: OnWaitTimeout = SETTING,
        jitter: float = SETTING,
        background: bool = SETTING,
        error_ttl: float = SETTING,
        group: str | None = None,
    ) -> Any:
        """The value of ``key``; if there is none, ``default`` is called for it, once.

        Whoever asks while it is being called (other threads, tasks, processes and hosts) waits for
        that one result. A ``set`` or ``delete`` of the key meanwhile wins: the result is then
        returned to its own caller but not stored. None is a value like any other.

        Args:
            default: a callable without arguments, or the value itself.
            timeout: seconds after which the value is to be computed anew; left out, the cache's
                own; None, never.
            stale: seconds after that for which the old value may still be served, at once, while
                one caller computes the new one. If that fails, the old one is served on.
            background: that caller too gets the old value at once.
            wait: seconds to wait at most for another's computation of a missing value.
            on_wait_timeout: what to do then: ``"compute"`` the value here as well, ``"raise"``
                LockNotAcquired, or return the ``"default"``: the value given as ``default``, None
                for a callable.
            jitter: shorten the timeout by a random share of up to this much (0 to 1), so that what
                was stored together does not have to be computed together again.
            error_ttl: seconds after a failed computation in which nobody tries again; others fail
                with the same message.
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
        # A hit is to cost what a plain GET costs, so the settings have to wait.
        given: dict[str, Any] = {}
        if (
            stale is not SETTING
            or wait is not SETTING
            or on_wait_timeout is not SETTING
            or jitter is not SETTING
            or background is not SETTING
            or error_ttl is not SETTING
            or group is not None
        ):
            check_group(group)
            given = GetOrSetOptions.given(
                stale=stale,
                wait=wait,
                on_wait_timeout=on_wait_timeout,
                jitter=jitter,
                background=background,
                error_ttl=error_ttl,
            )
        may_be_stale = self.conf.STALE if stale is SETTING else stale
        if may_be_stale and stale is SETTING:
            may_be_stale = self._timeout(timeout) is not None
        alone: BaseException | None = None
        if not may_be_stale:
            try:
                value = self._look(key, version)
                if value is not MISSING:
                    return value
            except ConnectionInterrupted as error:
                alone = self._go_on_alone(error.__cause__ or error)
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **given)
        producer = self._producer(key, default, timeout, terms, group)
        crew = self._thread_crew()
        nkey = self._encoded_key(key, version)
        read = bool(terms.stale)
        return crew.do(self._value(crew, key, nkey, producer, terms, default, alone, read))

    async def aget_or_set(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        stale: float = SETTING,
        wait: float = SETTING,
        on_wait_timeout: OnWaitTimeout = SETTING,
        jitter: float = SETTING,
        background: bool = SETTING,
        error_ttl: float = SETTING,
        group: str | None = None,
    ) -> Any:
        """As ``get_or_set``, for asyncio. ``default`` may be a coroutine function, which is
        awaited; any other callable runs in Django's thread for synchronous code."""
        terms = GetOrSetOptions.of(
            self.conf,
            self._timeout(timeout),
            stale=stale,
            wait=wait,
            on_wait_timeout=on_wait_timeout,
            jitter=jitter,
            background=background,
            error_ttl=error_ttl,
        )
        producer = self._producer(key, awaitable(default), timeout, terms, group)
        crew = self._task_crew()
        nkey = self._encoded_key(key, version)
        steps = self._value(crew, key, nkey, producer, terms, default, alone=None, read=True)
        return await crew.do(steps)

    # -- the same for threads and tasks --------------------------------------------------------

    def _value(
        self,
        crew: ThreadRunner | AsyncRunner,
        key: str,
        nkey: bytes,
        producer: Producer,
        terms: GetOrSetOptions,
        default: Any,
        alone: BaseException | None,
        read: bool,
    ) -> Steps:
        deadline = time.monotonic() + terms.wait
        flights = crew.flights
        if read:
            kept = None
            try:
                kept = yield from self._read(flights.place(nkey), bool(producer.stale))
            except (RedisError, OSError) as error:
                alone = self._go_on_alone(error)
            if kept is not None:
                value, left = kept
                if 0 <= int(left) <= producer.stale:
                    return (yield from flights.refresh(nkey, value, producer, terms.background))
                return producer.decode(value)
        try:
            found = yield from flights.get_or_compute(nkey, producer, deadline, alone)
        except CoordinationError as error:
            alone = self._go_on_alone(error.__cause__ or error)
            found = yield from flights.get_or_compute(nkey, producer, deadline, alone)
        if found is not TOO_LATE:
            return found
        if terms.on_wait_timeout == "raise":
            raise LockNotAcquired("The value is still being computed elsewhere", key)
        if terms.on_wait_timeout == "default":
            return None if callable(default) else default
        return (yield from flights.compute_anyway(nkey, producer, alone))

    def _go_on_alone(self, error: BaseException) -> BaseException:
        """Redis is away, or refuses to answer: ``error``. Whatever goes wrong with it, the caller
        gets its value (invariant C3), unless the setting says that errors are to show."""
        if self.conf.VALUES_ON_REDIS_DOWN == "raise":
            raise error
        return error

    def _producer(
        self,
        key: str,
        default: Any,
        timeout: float | None,
        terms: GetOrSetOptions,
        group: str | None,
    ) -> Producer:
        if isinstance(self.client, HerdClient):
            raise ImproperlyConfigured(
                "HerdClient keeps values in a form of its own, which get_or_set cannot share. "
                "Use django-redis's DefaultClient: get_or_set needs no herd"
            )
        return Producer(
            default if callable(default) else lambda: default,
            self._encoded,
            self.client.decode,
            terms.lifetime(self._timeout(timeout)),
            int(terms.stale * 1000),
            int(terms.error_ttl * 1000),
            str(key),
            check_group(group),
            self,
        )

    def _encoded(self, value: Any) -> bytes | int:
        """As Redis is to keep it. Serializers and compressors may give any buffer."""
        encoded: bytes | int = self.client.encode(value)
        return encoded if isinstance(encoded, (bytes, int)) else bytes(encoded)

    def _timeout(self, timeout: float | None) -> float | None:
        return self.default_timeout if timeout is DEFAULT_TIMEOUT else timeout

    def _thread_crew(self) -> ThreadRunner:
        return ThreadRunner(self._lock_client(), self.conf.FLIGHT_TIMEOUT, connections.close_all)

    def _task_crew(self) -> AsyncRunner:
        return AsyncRunner(asyncio_client(self._lock_client()), self.conf.FLIGHT_TIMEOUT)
