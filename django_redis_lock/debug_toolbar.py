"""The public name of ``contrib.debug_toolbar``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .extension import on_first_use

if TYPE_CHECKING:
    from .contrib.debug_toolbar import LocksPanel

__all__ = ["LocksPanel"]

__getattr__ = on_first_use(__name__, {"contrib.debug_toolbar": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
