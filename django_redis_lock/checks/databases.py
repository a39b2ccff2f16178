"""The checks of what ``clear()`` of a cache deletes, by the settings of all that may share its
database."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.connection import parse_url

from ..cache import lock_cache, lock_caches
from ..conf import Conf
from .catalogue import check, found

#: The settings in which projects keep the URL of Celery's broker.
BROKERS = ("CELERY_BROKER_URL", "BROKER_URL")
SESSIONS_IN_CACHE = "django.contrib.sessions.backends.cache"

Database = tuple[Any, ...]


@check()
def check_clear() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        try:
            clear = Conf(settings.CACHES[alias].get("OPTIONS")).CLEAR
        except ImproperlyConfigured:
            continue  # E002 reports it.
        yield from _wrong_keys(alias) if clear == "prefix" else _lost_by_others(alias)


def _wrong_keys(alias: str) -> Iterator[CheckMessage]:
    try:
        cache: Any = lock_cache(alias)
        cache.own_pattern()
    except ImproperlyConfigured as error:
        hint = "Until then clear() of this cache raises ImproperlyConfigured."
        yield found("E009", f"The cache {alias!r}: {error}.", hint)


def _lost_by_others(alias: str) -> Iterator[CheckMessage]:
    if others := ", ".join(_others(alias)):
        hint = (
            f'Set "LOCK_CLEAR": "prefix" in the OPTIONS of {alias!r}: then it deletes only keys '
            "with its own KEY_PREFIX and VERSION. Or give each another database."
        )
        if alias == settings.SESSION_CACHE_ALIAS:
            hint += " For sessions, set SESSION_CACHE_ALIAS to a cache with another KEY_PREFIX."
        text = f"clear() of the cache {alias!r} empties its database. That also contains {others}."
        yield found("W013", text, hint)


def _others(alias: str) -> Iterator[str]:
    """What else is in the database of the cache ``alias``."""
    databases = _databases_of(alias)
    for other in settings.CACHES:
        if other != alias and databases & _databases_of(other):
            yield f"the cache {other!r}"
    for name in BROKERS:
        if databases & _databases(getattr(settings, name, None)):
            yield f"Celery's messages ({name})"
    in_cache = settings.SESSION_ENGINE == SESSIONS_IN_CACHE
    if in_cache and databases & _databases_of(settings.SESSION_CACHE_ALIAS):
        yield "the sessions (SESSION_ENGINE)"


def _databases_of(alias: str) -> set[Database]:
    """The databases of a cache; none if it is not in Redis."""
    config = settings.CACHES.get(alias, {})
    options: Mapping[str, Any] = config.get("OPTIONS") or {}
    # Django's own backend has it in OPTIONS, django-redis among the arguments of the pool.
    number = options.get("db") or (options.get("CONNECTION_POOL_KWARGS") or {}).get("db") or 0
    return _databases(config.get("LOCATION"), int(number))


def _databases(location: Any, number: int = 0) -> set[Database]:
    """The databases that URLs name, by host and port or path, and number.

    Args:
        number: of the database where a URL does not name it.
    """
    urls = [location] if isinstance(location, str) else location or ()
    databases = set()
    for url in (part.strip() for each in urls for part in re.split("[,;]", str(each))):
        try:
            where = dict(parse_url(url))  # type: ignore[no-untyped-call]  # redis-py
        except ValueError:
            continue  # It does not lead to Redis.
        host = where.get("host", "localhost")
        server = (
            where.get("path"),
            "localhost" if host in ("127.0.0.1", "::1") else host,
            where.get("port", 6379),
        )
        databases.add((*server, where.get("db", number)))
    return databases
