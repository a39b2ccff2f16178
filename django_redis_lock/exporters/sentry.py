"""The public names of ``contrib.exporters.sentry``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..extension import on_first_use

if TYPE_CHECKING:
    from ..contrib.exporters.sentry import Sentry, start

__all__ = ["Sentry", "start"]

__getattr__ = on_first_use(__name__, {"contrib.exporters.sentry": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
