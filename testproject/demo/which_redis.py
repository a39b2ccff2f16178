"""Which Redis the demo uses: the one in REDIS_URL, or an embedded one if there is none; or none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import redis
from django.conf import settings
from django.core.management.base import CommandError

from testproject.embedded_redis import EmbeddedRedis, RedisNotStarted

__all__ = ["chosen_redis", "keep_in_memory"]


def keep_in_memory() -> None:
    """Keep values and locks in this process. Django has read its settings already, but has not
    made a cache from them yet."""
    for alias in settings.CACHES:
        settings.CACHES[alias] = {"BACKEND": "django_redis_lock.cache.LocMemCache"}


@contextmanager
def chosen_redis() -> Iterator[EmbeddedRedis | None]:
    """Point this process, and those it starts, to the Redis; None if it is the one in REDIS_URL.

    Raises:
        CommandError: REDIS_URL leads nowhere, or no redis-server can be started.
    """
    given = os.environ.get("REDIS_URL")
    if given:
        _expect_redis(given)
        yield None
        return
    with ExitStack() as stack:
        try:
            embedded = stack.enter_context(EmbeddedRedis())
        except RedisNotStarted as error:
            raise CommandError(f"{error}. Or set REDIS_URL to the address of a Redis.") from error
        os.environ["REDIS_URL"] = embedded.url
        # Django has read its settings already, but has not made a cache from them yet.
        for config in settings.CACHES.values():
            config["LOCATION"] = embedded.url
        yield embedded


def _expect_redis(url: str) -> None:
    shown = re.sub(r"//[^@/]*@", "//***@", url)
    try:
        with redis.from_url(url, socket_connect_timeout=5, socket_timeout=5) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        raise CommandError(
            f"REDIS_URL is {shown}, but no Redis can be used there: {str(error).rstrip('.')}. "
            "Start it, correct the address, or unset REDIS_URL to use an embedded Redis."
        ) from error
