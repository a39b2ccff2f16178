"""Refreshes in the background. Keys and values are made where the caller's state is (tenant, user,
language), or not at all: the value of one user must not be stored for another (invariant U1). So a
refresh makes its key again there, and does not compute if it is another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

from asgiref.sync import sync_to_async

from .. import singleflight
from ..protocol import printable
from ..singleflight import DeferredCall, Overtaken, Producer, Runner, ThreadRunner
from ..steps import Steps
from ..threads import Work, get_logger, may_log, was_logged
from .keys import NamedKey

logger = get_logger("django_redis_lock.flights")


#: When refreshes were last refused, by what makes their keys.
_refused_at: dict[object, float] = {}


class OtherContext(Overtaken):
    """In the background, the key of the value would be another."""


class Refresh:
    """A refresh in the background.

    Args:
        cache: the backend.
        key, version: as the caller gave them.
        made: the key in Redis that the caller has made of them.
    """

    def __init__(self, cache: Any, key: str, version: int | None, made: bytes) -> None:
        self._cache, self._key, self._version, self._made = cache, key, version, made
        maker: object = getattr(key, "maker", cache.key_func)
        self._checks = isinstance(key, NamedKey) or not cache._has_plain_keys
        self._make_context = cache.conf.BACKGROUND_CONTEXT
        self._context: Any = nullcontext()
        self._entered = ExitStack()
        self._kind = id(maker), self._make_context

    def value(
        self, runner: Runner, producer: Producer, old: object, wait: float | None
    ) -> Steps[object]:
        """The ``old`` value, or the new one if there is one within ``wait`` seconds. With None the
        caller computes it, and if another refresh was refused less than a minute ago."""
        if wait is not None:
            if was_logged(self._kind, _refused_at):
                wait = None
            else:
                producer = yield from self._prepare(runner, producer)
        flight_timeout = self._cache.conf.FLIGHT_TIMEOUT
        flight = singleflight.Flight(runner, flight_timeout, producer, self._made)
        return (yield from flight.refresh(old, wait))

    def _prepare(self, runner: Runner, producer: Producer) -> Steps[Producer]:
        """``producer``, for the background. The caller's part: call BACKGROUND_CONTEXT."""
        in_thread = isinstance(runner, ThreadRunner)
        if (make := self._make_context) is not None:
            self._context = make() if in_thread else (yield sync_to_async(make)())
            if not hasattr(type(self._context), "__enter__"):
                wrong = f"BACKGROUND_CONTEXT must return a context manager, not {self._context!r}"
                raise TypeError(wrong)
        compute = producer.compute
        if isinstance(runner, ThreadRunner):
            runner.carried, compute = self._carried, self._in_thread(compute)
        elif isinstance(compute, DeferredCall):
            compute = DeferredCall(self._in_djangos_thread(compute.function))
        elif self._checks:
            compute = self._in_loop(compute)
        return producer._replace(compute=compute)

    def _carried(self, work: Work) -> Work:
        def run() -> None:
            with self._entered:
                work()

        return run

    def _in_thread(self, compute: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            # Until the value is encoded: that may query the database.
            self._entered.enter_context(self._context)
            self._check()
            return compute()

        return run

    def _in_djangos_thread(self, compute: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with self._context:
                self._check()
                value = compute()
            return self._in_loop(lambda: value)() if inspect.isawaitable(value) else value

        return run

    def _in_loop(self, compute: Callable[[], object]) -> Callable[[], object]:
        async def run() -> object:
            await sync_to_async(self._check)()
            value = compute()
            while inspect.isawaitable(value):
                value = await value
            # Django's thread ends with the request, perhaps during the computation.
            await sync_to_async(self._check)()
            return value

        return run

    def _check(self) -> None:
        """Raises OtherContext if the key would be another, or cannot be made."""
        if not self._checks:
            return
        error: Exception | None = None
        try:
            key = self._key.make() if isinstance(self._key, NamedKey) else self._key
            if self._cache._encoded_key(key, self._version) == self._made:
                return
        except Exception as failed:
            error = failed
        if may_log(self._kind, _refused_at):
            logger.error(
                "%(key)s is not refreshed in the background: what makes its key reads something "
                "(a tenant, a user) that is missing or different there, and so the value might be "
                "another's. Carry it with the setting BACKGROUND_CONTEXT. Until then callers "
                "refresh such values themselves",
                {"key": printable(self._made)},
                exc_info=error,
            )
        raise OtherContext
