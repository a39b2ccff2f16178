"""The list of all system checks, and how one is made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Info, Warning, register
from django.core.exceptions import ImproperlyConfigured

from ..conf import given

__all__ = ["CHECKS", "TAG", "check", "found"]

TAG = "redis_lock"

#: Every number and what it says; ``docs/checks.md`` lists the same. A number is never used again.
CHECKS = {
    "E001": "`DJANGO_REDIS_LOCK` is not a dict",
    "E002": "a setting has a value that it cannot have",
    "E003": "the lifetime of locks, `TIMEOUT`, has no end",
    "E004": "a cache's `CLIENT_CLASS` cannot lock",
    "E005": "a use of `locked()` names a cache that does not exist or cannot lock",
    "E006": "the `on_conflict` of a use of `locked()` takes no argument",
    "E007": "the setting `USING` names a cache that does not exist or cannot lock",
    "E008": "the setting `EXPORTERS` has one whose package is not installed",
    "W001": "`DJANGO_REDIS_LOCK` has a key that is no setting",
    "W002": "a cache's `OPTIONS` have a setting that is not read there",
    "W003": "no cache can lock",
    "W004": "a cache's `CLIENT_CLASS` cannot share what `get_or_set` computes",
    "W005": "a cache ignores errors, but its locks do not",
    "W006": "the lifetime of locks is so short or so long that its unit may be wrong",
    "W007": "a lock that is passed on may live longer than one that is taken",
    "W008": "a use of `locked()` never expires",
    "W009": "a use of `locked()` has a `min_hold` longer than its `timeout`",
    "W010": "two uses of `locked()` give one name different settings",
    "W011": "a use of `locked()` has an option that means nothing beside its `on_conflict`",
    "E101": "the server is older than the oldest that is supported",
    "E102": "the cache leads to a replica, which takes no locks",
    "E103": "the server belongs to a cluster, and the `CLIENT_CLASS` does not know it",
    "E104": "the user may not do in Redis what locks need",
    "W101": "the server can evict locks when it is short of memory",
    "W102": "the server refuses writes, or will",
    "W103": "the user may not block in Redis, so that waiting becomes polling",
    "W104": "a Redis that does not answer is waited for longer than locks live",
    "I101": "Redis could not be asked",
}


def found(number: str, text: str, hint: str, obj: Any = None) -> CheckMessage:
    """The message of the check ``number``, of the kind that its letter says."""
    if number not in CHECKS:
        raise LookupError(f"{number} is not in CHECKS")
    kinds: dict[str, Callable[..., CheckMessage]] = {"E": Error, "W": Warning, "I": Info}
    return kinds[number[0]](text, hint=hint, obj=obj, id=f"django_redis_lock.{number}")


Check = Callable[[], Iterator[CheckMessage]]


def check(*, first: bool = False, deploy: bool = False) -> Callable[[Check], Check]:
    """Register a check.

    Args:
        first: run it also if the settings are no dict; the others would fail then.
        deploy: run it with ``--deploy`` only.
    """

    def decorate(look: Check) -> Check:
        def run(app_configs: Any = None, **kwargs: Any) -> list[CheckMessage]:
            try:
                given()
            except ImproperlyConfigured:
                if not first:
                    return []
            return list(look())

        register(run, TAG, deploy=deploy)
        return look

    return decorate
