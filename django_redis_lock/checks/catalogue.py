"""The list of all system checks, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Info, Warning, register
from django.core.exceptions import ImproperlyConfigured

from ..conf import given

TAG = "redis_lock"

#: Every number and its meaning, as ``docs/checks.md`` lists them. A number is never used again.
CHECKS = {
    "E001": "`DJANGO_REDIS_LOCK` is not a dict",
    "E002": "a setting has an invalid value",
    "E003": "the lifetime of locks, `TIMEOUT`, is infinite",
    "E004": "a cache's `CLIENT_CLASS` does not support locks",
    "E005": "a use of `locked()` names a cache that does not exist",
    "E006": "the `on_conflict` of a use of `locked()` takes no arguments",
    "E007": "the setting `USING` names a cache that does not exist",
    "E008": "the setting `EXPORTERS` names an exporter whose package is not installed",
    "E009": '`CLEAR` is `"prefix"`, and the `KEY_FUNCTION` of the cache makes keys without one',
    "E010": "`CachedPageMiddleware` is at a place in `MIDDLEWARE` where it stores wrong pages",
    "W001": "`DJANGO_REDIS_LOCK` has an unknown key",
    "W002": "a cache's `OPTIONS` contain a setting that has no effect there",
    "W003": "no cache supports locks",
    "W004": "a cache's `CLIENT_CLASS` does not support `get_or_set`",
    "W005": "a cache ignores errors of Redis, but its locks do not",
    "W006": "the lifetime of locks is so short or so long that its unit may be wrong",
    "W007": "`GRANT_TIMEOUT` is longer than `TIMEOUT`",
    "W008": "a lock of `locked()` never expires",
    "W009": "a use of `locked()` has a `min_hold` longer than its `timeout`",
    "W010": "two uses of `locked()` have the same name and different settings",
    "W011": "a use of `locked()` has an option that has no effect together with `on_conflict`",
    "W012": "a cache that `locked()` is to use does not support locks",
    "W013": "`clear()` of a cache also deletes what others keep in its database",
    "E101": "the server is older than the oldest supported version",
    "E102": "the cache is connected to a replica, which cannot take locks",
    "E103": "the server belongs to a cluster, and the `CLIENT_CLASS` does not support clusters",
    "E104": "the Redis user lacks rights that locks need",
    "W101": "the server can evict locks when it runs out of memory",
    "W102": "the server rejects writes",
    "W103": "the Redis user may not run blocking commands, so waiters poll",
    "W105": "a cache keeps its locks in the memory of each process",
    "I101": "a request to Redis failed",
}


def found(number: str, text: str, hint: str) -> CheckMessage:
    """The message of the check ``number``; its letter determines the kind."""
    if number not in CHECKS:
        raise LookupError(f"{number} is not in CHECKS")
    kinds: dict[str, Callable[..., CheckMessage]] = {"E": Error, "W": Warning, "I": Info}
    return kinds[number[0]](text, hint=hint, id=f"django_redis_lock.{number}")


Check = Callable[[], Iterator[CheckMessage]]


def check(*, deploy: bool = False) -> Callable[[Check], Check]:
    """Register a check, for settings that are a dict; with ``deploy`` for ``--deploy`` only."""

    def decorate(look: Check) -> Check:
        def run(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
            try:
                given()
            except ImproperlyConfigured:
                return []  # E001 reports it.
            return list(look())

        register(run, TAG, deploy=deploy)
        return look

    return decorate
