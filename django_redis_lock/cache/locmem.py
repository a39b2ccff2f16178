"""What ``LocMemCache`` asks instead of Redis."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from django.conf import settings
from django_redis.client import DefaultClient

from ..memory import Database, client_of, databases

#: Other options are about a server elsewhere. Django may have another factory for the other caches.
_OPTIONS = {"CONNECTION_FACTORY": "django_redis.pool.ConnectionFactory"}


class MemoryClient(DefaultClient):  # type: ignore[misc]  # django-redis ships no types
    """django-redis's client of a server in memory, one for each LOCATION. Values are pickled."""

    def __init__(self, location: str, params: dict[str, Any], backend: Any) -> None:
        super().__init__([location], {**params, "OPTIONS": _OPTIONS}, backend)

    def connect(self, index: int = 0) -> Any:
        database = Database("the memory of this process")
        database = databases.setdefault(self._server[index], database)
        database.max_values = self._backend._max_entries
        database.cull_frequency = self._backend._cull_frequency
        return client_of(database)


@lru_cache(maxsize=1)
def host() -> Any:
    """A client of no server, so that this host's lock is taken instead."""
    project = getattr(settings, "BASE_DIR", None) or settings.SETTINGS_MODULE
    nowhere = Database(f"this host, for {project}")
    nowhere.away = True
    return client_of(nowhere)
