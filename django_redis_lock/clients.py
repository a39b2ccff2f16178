"""The public name of ``contrib.topology.client``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .extension import on_first_use

if TYPE_CHECKING:
    from .contrib.topology.client import ClusterClient

__all__ = ["ClusterClient"]

__getattr__ = on_first_use(__name__, {"contrib.topology.client": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
