"""Telling Prometheus and OpenTelemetry what happens to locks and computations.

Each exporter is a listener, switched on by the setting ``EXPORTERS`` or by its ``start()``. What
goes wrong in one is logged and touches no lock.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from ..conf import Conf

__all__ = ["load", "start", "start_configured"]

logger = logging.getLogger("django_redis_lock.metrics")

_NEEDS = {
    "prometheus": ("prometheus_client", "prometheus"),
    "opentelemetry": ("opentelemetry", "otel"),
}


def start(names: Iterable[str]) -> None:
    """Start the exporters with these names.

    Raises:
        ImproperlyConfigured: what one of them needs is not installed.
    """
    for name in names:
        load(name).start()


def start_configured() -> None:
    """Start those of the setting EXPORTERS. Mistakes in it are logged, and found by a system check,
    but do not keep the site from starting."""
    try:
        names = Conf().EXPORTERS
    except ImproperlyConfigured as error:
        logger.error("No exporter is started: %s", error)
        return
    for name in names:
        try:
            start([name])
        except ImproperlyConfigured as error:
            logger.error("The exporter is not started: %s", error)


def load(name: str) -> Any:
    """The module of the exporter with this name.

    Raises:
        ImproperlyConfigured: what it needs is not installed.
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
