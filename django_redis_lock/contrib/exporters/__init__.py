"""Metrics and traces for Prometheus, OpenTelemetry and Sentry: each exporter is a listener, started
by the setting ``EXPORTERS`` or by its ``start()``."""

from __future__ import annotations

import logging
from types import ModuleType

from django.core.exceptions import ImproperlyConfigured

from ...conf import Conf
from ...extension import part

__all__ = ["load", "start_configured"]

logger = logging.getLogger("django_redis_lock.metrics")

#: The package that each needs, and the extra that installs it.
_NEEDS = {
    "prometheus": ("prometheus_client", "prometheus"),
    "opentelemetry": ("opentelemetry", "otel"),
    "sentry": ("sentry_sdk", "sentry"),
}


def start_configured() -> None:
    """An error in the setting EXPORTERS is logged, and reported by a system check, but does not
    keep the site from starting."""
    try:
        names = Conf().EXPORTERS
    except ImproperlyConfigured as error:
        logger.error("No exporter is started: %s", error)
        return
    for name in names:
        try:
            load(name).start()
        except ImproperlyConfigured as error:
            logger.error("The exporter is not started: %s", error)


def load(name: str) -> ModuleType:
    """The module of the exporter with this name.

    Raises:
        ImproperlyConfigured: its package is not installed.
    """
    package, extra = _NEEDS[name]
    try:
        module: ModuleType = part(name)
        return module
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImproperlyConfigured(
            f"DJANGO_REDIS_LOCK: EXPORTERS has {name!r}, which needs the package {package}: "
            f"pip install django-redis-lock[{extra}]"
        ) from error
