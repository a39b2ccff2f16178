"""The public names of ``contrib.exporters.opentelemetry``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extension import on_first_use

if TYPE_CHECKING:
    from ..contrib.exporters.opentelemetry import OpenTelemetry, start, trace_parent

__all__ = ["OpenTelemetry", "start", "trace_parent"]

__getattr__ = on_first_use(__name__, {"contrib.exporters.opentelemetry": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
