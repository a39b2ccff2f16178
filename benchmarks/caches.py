"""The caches that are compared, each asked for one value that may have to be computed.

A process configures Django once, for all of them; see ``open_cache``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ClassVar

import django
from django.conf import settings

from .results import OURS

__all__ = ["ABSENT", "CACHES", "Cache", "open_cache"]

Ask = Callable[[], Any]

#: Seconds the values are kept.
KEEP = 60


class Cache(ABC):
    """One contender in one process."""

    module = "django_redis"

    def __init__(self, url: str) -> None:
        self.backend: Any = self.connect(url)

    @abstractmethod
    def connect(self, url: str) -> Any: ...

    @abstractmethod
    def asker(self, key: str, produce: Ask) -> Ask:
        """What gives the value of ``key``, by ``produce`` if there is none."""

    def pool(self) -> Any:
        return self.backend.client.get_client().connection_pool

    def close(self) -> None:
        """Start the next round without connections."""
        self.pool().disconnect()


class DjangoRedis(Cache):
    options: ClassVar[dict[str, Any]] = {}

    def connect(self, url: str) -> Any:
        from django_redis.cache import RedisCache

        return RedisCache(url, {"OPTIONS": self.options})

    def asker(self, key: str, produce: Ask) -> Ask:
        return lambda: self.backend.get_or_set(key, produce, KEEP)


class HerdClient(DjangoRedis):
    options: ClassVar[dict[str, Any]] = {"CLIENT_CLASS": "django_redis.client.HerdClient"}


class Ours(DjangoRedis):
    def connect(self, url: str) -> Any:
        from django_redis_lock.cache import RedisCache

        # django-redis keeps one pool for each URL, and ours guards its connections.
        return RedisCache(f"{url}?db={url.rpartition('/')[2]}", {})

    def close(self) -> None:
        from django_redis_lock.transport.server import server_of

        server_of(self.backend.client.get_client()).close()
        super().close()


class PythonRedisLock(DjangoRedis):
    module = "redis_lock"

    def connect(self, url: str) -> Any:
        from redis_lock.django_cache import RedisCache

        return RedisCache(url, {})

    def asker(self, key: str, produce: Ask) -> Ask:
        return lambda: self.backend.locked_get_or_set(key, produce, timeout=KEEP)


class DjangoBuiltIn(Cache):
    module = "django"

    def connect(self, url: str) -> Any:
        from django.core.cache.backends.redis import RedisCache

        return RedisCache(url, {})

    def asker(self, key: str, produce: Ask) -> Ask:
        return lambda: self.backend.get_or_set(key, produce, KEEP)

    def pool(self) -> Any:
        return self.backend._cache.get_client().connection_pool


class Dogpile(Cache):
    module = "dogpile"

    def connect(self, url: str) -> Any:
        from dogpile.cache import make_region

        arguments = {"url": url, "distributed_lock": True, "thread_local_lock": False}
        return make_region().configure("dogpile.cache.redis", arguments=arguments)

    def asker(self, key: str, produce: Ask) -> Ask:
        return lambda: self.backend.get_or_create(key, produce, KEEP)

    def pool(self) -> Any:
        return self.backend.backend.writer_client.connection_pool


class Cacheops(Cache):
    module = "cacheops"

    def connect(self, url: str) -> Any:
        from cacheops.redis import redis_client

        return redis_client

    def asker(self, key: str, produce: Ask) -> Ask:
        from cacheops import cached_as
        from django.contrib.auth.models import Group

        cached: Ask = cached_as(Group, timeout=KEEP, extra=key, lock=True)(produce)
        return cached

    def pool(self) -> Any:
        return self.backend.connection_pool


_ALL: dict[str, type[Cache]] = {
    "django-redis": DjangoRedis,
    "django-redis herd": HerdClient,
    "Django's own": DjangoBuiltIn,
    "python-redis-lock": PythonRedisLock,
    "dogpile.cache": Dogpile,
    "django-cacheops": Cacheops,
    OURS: Ours,
}

CACHES = tuple(name for name, kind in _ALL.items() if find_spec(kind.module))
#: Names of those that are not installed.
ABSENT = tuple(name for name in _ALL if name not in CACHES)


@functools.cache
def open_cache(contender: str, url: str) -> Cache:
    """The one cache of this kind in this process."""
    if not settings.configured:
        contrib = ["django.contrib.contenttypes", "django.contrib.auth"]
        settings.configure(
            INSTALLED_APPS=contrib + ["cacheops"] * bool(find_spec("cacheops")),
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            CACHEOPS_REDIS=url,
            CACHEOPS={"*.*": {"timeout": KEEP}},
        )
        django.setup()
    return _ALL[contender](url)
