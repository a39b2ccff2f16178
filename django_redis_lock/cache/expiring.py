"""When a value expires: what says that it is over at once is a delete, and ends its flight too."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

__all__ = ["Expiring"]


class Expiring:
    """The part of ``RedisCache`` that changes lifetimes, as django-redis does."""

    client: Any
    _by: Any

    def expire(
        self,
        key: str,
        timeout: float | timedelta,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return bool(self.client.expire(key, timeout, version, **self._by(client)))

    def pexpire(
        self,
        key: str,
        timeout: float | timedelta,
        version: int | None = None,
        client: Any = None,
    ) -> Any:
        return self.client.pexpire(key, timeout, version, **self._by(client))

    def expire_at(
        self, key: str, when: int | datetime, version: int | None = None, client: Any = None
    ) -> Any:
        return bool(self.client.expire_at(key, when, version, **self._by(client)))

    def pexpire_at(
        self, key: str, when: int | datetime, version: int | None = None, client: Any = None
    ) -> Any:
        return self.client.pexpire_at(key, when, version, **self._by(client))
