"""``LocMemCache``: the cache backend on a server in the memory of this process."""

from __future__ import annotations

import logging
import os
import sys
from functools import lru_cache
from typing import Any

from django.conf import settings
from django_redis.client import DefaultClient

from ...cache import BACKEND, Locks, RedisCache, lock_cache
from ...locking import Lock
from ...protocol.validation import check_name_in_cache
from .memory import Database as Database
from .memory import client_of as client_of
from .memory import databases as databases

logger = logging.getLogger("django_redis_lock.lock")

#: What the LOCATION begins with in the tests of a project.
TESTING = "testing "
#: The processes whose log says that other processes have other locks: this one, and its parents.
_noted_in: dict[int, object] = {}


class MemoryClient(DefaultClient):  # type: ignore[misc]  # django-redis ships no types
    """django-redis's client of a server in memory, one for each LOCATION. Values are pickled."""

    def __init__(self, location: str, params: dict[str, Any], backend: object) -> None:
        # Its other options are about a server elsewhere, and Django's may have another factory.
        options = {"CONNECTION_FACTORY": "django_redis.pool.ConnectionFactory"}
        super().__init__([location], {**params, "OPTIONS": options}, backend)

    def connect(self, index: int = 0) -> object:
        database = databases.setdefault(self._server[index], Database("this process's memory"))
        database.max_values = self._backend._max_entries
        database.cull_frequency = self._backend._cull_frequency
        return client_of(database)


def _note_workers(location: str) -> None:
    """At the first lock of a process that may be one of several, which exclude each other with
    Redis only: not while a project is developed or tested."""
    if (process := os.getpid()) in _noted_in or location.startswith(TESTING):
        return
    if _noted_in.setdefault(process, mine := object()) is not mine:
        return  # Another thread came first.
    is_tested = hasattr(sys.modules.get("django.core.mail"), "outbox")
    silenced = settings.SILENCED_SYSTEM_CHECKS
    if not (settings.DEBUG or is_tested or "django_redis_lock.W105" in silenced):
        logger.warning(
            "Locks are kept in the memory of this process, by a LocMemCache, and DEBUG is False: "
            "if other processes take the same locks, each has its own. Write BACKEND: %r. "
            'If there is one process only: SILENCED_SYSTEM_CHECKS = ["django_redis_lock.W105"]',
            BACKEND,
        )


@lru_cache(maxsize=1)
def _host() -> object:
    """A client of no server, so that this host's lock is taken instead."""
    project = getattr(settings, "BASE_DIR", None) or settings.SETTINGS_MODULE
    nowhere = Database(f"this host, for {project}")
    nowhere.away = True
    return client_of(nowhere)


class LocksInMemory(Locks):
    def make(self, *args: Any, **options: Any) -> Any:
        server = self._cache._server
        _note_workers(server[0] if isinstance(server, list) else server)
        return super().make(*args, **options)


class LocMemCache(RedisCache):
    """``RedisCache`` on a server in the memory of this process. Caches with the same LOCATION share
    values and locks, also between threads and event loops."""

    in_memory = True

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        self._client_cls = MemoryClient
        self._locks = LocksInMemory(self, lock_cache)

    def _check_client(self, client: object) -> None:
        if client is not None:
            raise ValueError("client needs Redis: leave it out, this cache's locks are in memory")

    def command_lock(self, key: str, **options: object) -> Lock:
        """A lock of this host: a file, as with ``ON_REDIS_DOWN = "local"``. Other processes cannot
        see this one's memory."""
        del options["replicas"]
        of_host: Any = {"timeout": self.conf.TIMEOUT, "on_redis_down": "local", **options}
        of_host["local_folder"] = self.conf.LOCAL_LOCK_FOLDER
        name = self._lock_name(check_name_in_cache(key), None)
        lock: Lock = self._locks.configured(Lock(_host(), name, **of_host), key)
        return lock
