"""Export metrics and traces to Prometheus, OpenTelemetry and Sentry.

Each exporter is a listener, started by the setting ``EXPORTERS`` or by its ``start()``. Its errors
are logged and affect no lock.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import Conf

__all__ = ["load", "start_configured"]

logger = logging.getLogger("django_redis_lock.metrics")

_NEEDS = {
    "prometheus": ("prometheus_client", "prometheus"),
    "opentelemetry": ("opentelemetry", "otel"),
    "sentry": ("sentry_sdk", "sentry"),
}


def start_configured() -> None:
    """Start the exporters of the setting EXPORTERS. An error in it is logged, and reported by a
    system check, but does not keep the site from starting."""
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


def load(name: str) -> Any:
    """The module of the exporter with this name.

    Raises:
        ImproperlyConfigured: its package is not installed.
    """
    package, extra = _NEEDS[name]
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ImproperlyConfigured(
            f"DJANGO_REDIS_LOCK: EXPORTERS has {name!r}, which needs the package {package}: "
            f"pip install django-redis-lock[{extra}]"
        ) from error
