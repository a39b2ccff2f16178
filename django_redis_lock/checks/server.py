"""Checks of the running Redis; only with ``--deploy``."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from ..cache import lock_caches
from ..doctor import examine
from .catalogue import check, found


@check(deploy=True)
def check_servers() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        where = f"The cache {alias!r}"
        try:
            findings = list(examine(alias, with_trial=False))
        except ImproperlyConfigured:
            continue  # Another check says so.
        except (RedisError, OSError) as error:
            # Images are often built without a Redis, so this must not fail.
            hint = "Run manage.py locks doctor where Redis can be reached."
            yield found("I101", f"{where}: the request to Redis failed: {error}", hint)
            continue
        for finding in findings:
            if finding.number:
                text = f"{where}: {finding.topic}: {finding.text}."
                yield found(finding.number, text, finding.hint)
