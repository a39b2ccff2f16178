"""``compute``: as ``single``, whether there is a value or not."""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.base import DEFAULT_TIMEOUT

from .awaitables import awaitable
from .get_or_set import Computing
from .options import GetOrSetOptions

__all__ = ["ComputingAnew"]


class ComputingAnew(Computing):
    """The part of ``RedisCache`` that computes a value although there is one."""

    def compute(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        group: str | None = None,
        **options: Any,
    ) -> Any:
        """The value of ``key``, computed anew even if there is one, and kept. Whoever finds none
        meanwhile waits for this one; a write meanwhile wins. Arguments as for ``get_or_set``."""
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, default, timeout, terms, group)
        crew = self._thread_crew()
        nkey = self._encoded_key(key, version)
        return crew.do(crew.flights.compute_anyway(nkey, producer))

    async def acompute(
        self,
        key: str,
        default: Any,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        *,
        group: str | None = None,
        **options: Any,
    ) -> Any:
        """As ``compute``, for asyncio."""
        terms = GetOrSetOptions.of(self.conf, self._timeout(timeout), **options)
        producer = self._producer(key, awaitable(default), timeout, terms, group)
        crew = self._task_crew()
        nkey = self._encoded_key(key, version)
        return await crew.do(crew.flights.compute_anyway(nkey, producer))
