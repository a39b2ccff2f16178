"""The app that is not installed, and so registers no checks."""

from __future__ import annotations

import logging
from functools import cache

from django.core.checks import CheckMessage

from .settings import found

logger = logging.getLogger("django_redis_lock.checks")

TEXT = (
    "A cache uses django_redis_lock, which is not in INSTALLED_APPS: its system checks, commands, "
    "template tags, signals, figures and admin page are missing."
)
HINT = 'Add "django_redis_lock" to INSTALLED_APPS.'


@cache
def not_installed() -> CheckMessage:
    """The message of the system check."""
    return found("W018", TEXT, HINT)


@cache
def log_not_installed() -> None:
    """Log it once in a process, unless the system check has reported it."""
    if not not_installed.cache_info().currsize:
        logger.warning("%s %s", TEXT, HINT)
