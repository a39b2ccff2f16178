"""Telling Prometheus and OpenTelemetry what happens to locks and computations.

Each exporter is a listener, switched on by the setting ``EXPORTERS`` or by its ``start()``. What
goes wrong in one is logged and touches no lock.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from django.core.exceptions import ImproperlyConfigured

__all__ = ["start"]

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
        package, extra = _NEEDS[name]
        try:
            exporter = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != package:
                raise
            raise ImproperlyConfigured(
                f"DJANGO_REDIS_LOCK: EXPORTERS has {name!r}, which needs the package {package}: "
                f"pip install django-redis-lock[{extra}]"
            ) from error
        exporter.start()
