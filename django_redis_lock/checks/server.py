"""What the running Redis says against the settings; only with ``--deploy``, as it must be asked."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from ..cache import lock_caches
from ..doctor import SETTINGS, examine
from .catalogue import check, found

__all__: list[str] = []


@check(deploy=True)
def check_servers() -> Iterator[CheckMessage]:
    for alias in lock_caches():
        where = f"The cache {alias!r}"
        try:
            findings = list(examine(alias, SETTINGS))
        except ImproperlyConfigured:
            continue  # Another check says so.
        except (RedisError, OSError) as error:
            # Where images are built there often is no Redis, so this must not fail.
            hint = "Where it runs, manage.py locks doctor says more."
            yield found("I101", f"{where}: Redis could not be asked: {error}", hint)
            continue
        for finding in findings:
            if finding.number:
                text = f"{where}: {finding.topic}: {finding.text}."
                yield found(finding.number, text, finding.hint)
