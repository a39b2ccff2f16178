"""``get_or_set_many``: ``get_or_set`` for several keys at once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT

from ..clock import time
from ..exceptions import LockNotAcquired
from ..singleflight import AsyncRunner, CoordinationError, MultiFlight, Steps, ThreadRunner
from .get_or_set import GetOrSet, awaitable
from .options import GetOrSetOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .options import GetOrSetManyArguments


class GetOrSetMany(GetOrSet):
    """The part of both backends that computes several missing values at once."""

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, Any]],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, Any]:
        """The values of ``keys``; one call of ``default_many`` computes the missing ones.

        ``default_many`` gets the list of the keys that no other caller is computing, and returns a
        dict; a key that is not in it is not in the result either. This call waits for the values
        that others compute. If ``default_many`` raises, the caller gets the exception.

        Args and Raises: as for ``get_or_set``, without ``stale`` and ``background``. All keys are
        counted in one metrics group; the default is that of the first key.
        """
        chosen = self._many_options(timeout, options)
        names = list(dict.fromkeys(keys))
        found, outage = self._read_many(names, version)
        runner = self._thread_runner()
        produce = default_many
        steps = self._values(runner, names, found, produce, timeout, version, chosen, outage)
        return _in_order(names, runner.do(steps))

    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, Any]:
        """``get_or_set_many`` for asyncio."""
        chosen = self._many_options(timeout, options)
        names = list(dict.fromkeys(keys))
        runner = self._async_runner()
        produce = awaitable(default_many)
        steps = self._values(runner, names, {}, produce, timeout, version, chosen)
        return _in_order(names, await runner.do(steps))

    def _many_options(
        self, timeout: float | None, options: GetOrSetManyArguments
    ) -> GetOrSetOptions:
        given: dict[str, Any] = {**options}
        for name in ("stale", "background"):
            if name in given:
                raise TypeError(f"get_or_set_many has no option {name!r}")
        return GetOrSetOptions.of(self.conf, self._timeout(timeout), **given, stale=0.0)

    def _values(
        self,
        runner: ThreadRunner | AsyncRunner,
        names: list[str],
        found: dict[str, Any],
        default_many: Callable[[list[str]], Any],
        timeout: float | None,
        version: int | None,
        chosen: GetOrSetOptions,
        outage: BaseException | None = None,
    ) -> Steps:
        deadline = time.monotonic() + chosen.wait
        missing = {self._encoded_key(name, version): name for name in names if name not in found}
        first = names[0] if names else ""
        producer = self._producer(first, default_many, timeout, chosen)

        def by_key(values: Any, nkeys: list[bytes]) -> dict[bytes, Any]:
            if not isinstance(values, Mapping):
                raise TypeError(f"default_many must return a dict by key, not {values!r}")
            return {nkey: values[missing[nkey]] for nkey in nkeys if missing[nkey] in values}

        async def by_key_later(values: Any, nkeys: list[bytes]) -> dict[bytes, Any]:
            while inspect.isawaitable(values):
                values = await values
            return by_key(values, nkeys)

        def produce(nkeys: list[bytes]) -> Any:
            values = default_many([missing[nkey] for nkey in nkeys])
            return (by_key_later if inspect.isawaitable(values) else by_key)(values, nkeys)

        if not missing:
            return found
        flight = MultiFlight(runner, self.conf.FLIGHT_TIMEOUT, producer, produce)
        got, late = {}, list(missing)
        if outage is None:
            try:
                got, late = yield from flight.get_or_compute(late, deadline)
            except CoordinationError as error:
                outage = self._without_redis(error.__cause__ or error)
        if outage is not None:
            got, late = (yield from flight.compute_alone(late, outage)), []
        if late and chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing a value", missing[late[0]])
        if late and chosen.on_wait_timeout == "compute":
            got.update((yield from flight.compute_anyway(late)))
        return {**found, **{missing[nkey]: value for nkey, value in got.items()}}


def _in_order(names: list[str], values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}
