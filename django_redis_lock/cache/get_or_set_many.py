"""``get_or_set`` for several keys at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT

from ..clock import time
from ..conf import GetOrSetOptions, Timeout
from ..exceptions import LockNotAcquired
from ..singleflight import CoordinationError, MultiFlight, Runner, Steps
from .get_or_set import GetOrSet, awaitable

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..conf import GetOrSetManyArguments


class GetOrSetMany(GetOrSet):
    """The part of both backends that computes several missing values at once."""

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, Any]],
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, Any]:
        """The values of ``keys``; one call of ``default_many`` computes the missing ones.

        ``default_many`` gets the list of the keys that no other caller is computing, and returns a
        dict; a key that is not in it is not in the result either. This call waits for the values
        that others compute. If ``default_many`` raises, the caller gets the exception.

        Args and Raises: as for ``get_or_set``, without ``stale``, ``background`` and
        ``soft_timeout``. All keys are counted in one metrics group; the default is that of the
        first key.
        """
        runner, what = self._thread_runner(), (keys, default_many, timeout, version)
        values: dict[str, Any] = runner.do(self._values(runner, *what, options, read=True))
        return values

    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: Timeout = DEFAULT_TIMEOUT,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, Any]:
        """``get_or_set_many`` for asyncio."""
        runner, what = self._async_runner(), (keys, awaitable(default_many), timeout, version)
        values: dict[str, Any] = await runner.do(self._values(runner, *what, options))
        return values

    def _values(
        self,
        runner: Runner,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: Timeout,
        version: int | None,
        options: GetOrSetManyArguments,
        read: bool = False,
    ) -> Steps:
        """The steps of ``get_or_set_many``; ``read`` all values first, with one command."""
        for name in ("stale", "background", "soft_timeout"):
            if name in options:
                raise TypeError(f"get_or_set_many has no option {name!r}")
        chosen = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options, stale=0.0)
        deadline = time.monotonic() + chosen.wait
        names = list(dict.fromkeys(keys))
        began = time.monotonic()
        found, outage = self._read_many(names, version) if read else ({}, None)
        read_at, hits = (began, time.monotonic() - began), len(found)
        missing = {self._encoded_key(name, version): name for name in names if name not in found}
        if missing:
            producer = self._producer(names[0], default_many, timeout, chosen)
            flight = MultiFlight(runner, self.conf.FLIGHT_TIMEOUT, producer, missing)
            try:
                got = yield from self._missing_values(flight, missing, chosen, deadline, outage)
            finally:
                hits += flight.were_there
                if misses := len(names) - hits:
                    self._record_read(names[0], chosen.group, "miss", *read_at, values=misses)
            found.update((missing[nkey], value) for nkey, value in got.items())
        if hits:
            self._record_read(names[0], chosen.group, "hit", *read_at, values=hits)
        return {name: found[name] for name in names if name in found}

    def _missing_values(
        self,
        flight: MultiFlight,
        missing: Mapping[bytes, str],
        chosen: GetOrSetOptions,
        deadline: float,
        outage: BaseException | None,
    ) -> Steps:
        got, late = {}, list(missing)
        if outage is None:
            try:
                got, late = yield from flight.get_or_compute(late, deadline)
            except CoordinationError as error:
                outage = self._without_redis(error.__cause__ or error)
        if outage is not None:
            return (yield from flight.compute_alone(late, outage))
        if late and chosen.on_wait_timeout == "raise":
            raise LockNotAcquired("Another caller is still computing a value", missing[late[0]])
        if late and chosen.on_wait_timeout == "compute":
            got.update((yield from flight.compute_anyway(late)))
        return got
