"""The public names of ``contrib.exporters.prometheus``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extension import on_first_use

if TYPE_CHECKING:
    from ..contrib.exporters.prometheus import Prometheus, start

__all__ = ["Prometheus", "start"]

__getattr__ = on_first_use(__name__, {"contrib.exporters.prometheus": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
