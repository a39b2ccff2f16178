"""What can be seen to be wrong in the uses of ``locked()``."""

from __future__ import annotations

from collections.abc import Iterator

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.urls import get_resolver

from ..aliases import lock_cache
from ..declared import Declaration, declarations
from .catalogue import check, found

__all__: list[str] = []


def _declarations() -> tuple[Declaration, ...]:
    """Those of the views too: they are imported with the URLconf, in whatever order checks run."""
    try:
        _ = get_resolver().url_patterns
    except Exception:  # Django's own checks say what is wrong with it.
        pass
    return declarations()


@check()
def check_caches() -> Iterator[CheckMessage]:
    for lock in _declarations():
        try:
            lock_cache(lock.using)
        except ImproperlyConfigured as error:
            hint = "Give that cache this BACKEND, or name another one: locked(using=...)."
            yield found("E005", f"locked() of {lock.target}: {error}.", hint)


@check()
def check_lifetimes() -> Iterator[CheckMessage]:
    for lock in _declarations():
        if "timeout" not in lock.options:
            continue
        timeout, min_hold = lock.options["timeout"], lock.options.get("min_hold", 0)
        if timeout is None:
            yield found(
                "W008",
                f"locked() of {lock.target}: with timeout=None the lock never expires.",
                "If the process is killed, nothing runs any more until somebody releases the lock "
                "by hand. Leave timeout out: the lock is then renewed as long as the work takes.",
            )
        elif min_hold > timeout:
            yield found(
                "W009",
                f"locked() of {lock.target}: min_hold, {min_hold:g} seconds, is longer than "
                f"timeout, {timeout:g} seconds.",
                "If the process is killed, the lock ends with its timeout, before min_hold is "
                "over. If the work must not begin again earlier even then, raise timeout.",
            )
