"""The public names of ``contrib.exporters``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extension import on_first_use

if TYPE_CHECKING:
    from ..contrib.exporters import load, start_configured

__all__ = ["load", "start_configured"]

__getattr__ = on_first_use(__name__, {"contrib.exporters": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
