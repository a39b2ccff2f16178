"""The public names of ``contrib.metrics``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .extension import on_first_use

if TYPE_CHECKING:
    from .contrib.metrics import (
        BOUNDS,
        EXPORTED_BOUNDS,
        OTHER,
        PERIODS,
        Distribution,
        Summary,
        flush,
        group_of,
        histogram_svg,
        site_of,
        sparkline_svg,
        start,
        summaries,
        summary,
    )

__all__ = [
    "BOUNDS",
    "EXPORTED_BOUNDS",
    "OTHER",
    "PERIODS",
    "Distribution",
    "Summary",
    "flush",
    "group_of",
    "histogram_svg",
    "site_of",
    "sparkline_svg",
    "start",
    "summaries",
    "summary",
]

__getattr__ = on_first_use(__name__, {"contrib.metrics": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
