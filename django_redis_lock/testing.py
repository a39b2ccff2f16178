"""The public names of ``contrib.testing``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .extension import on_first_use

if TYPE_CHECKING:
    from .contrib.testing import MemoryServer, RedisLocksMixin, VirtualClock, override

__all__ = ["MemoryServer", "RedisLocksMixin", "VirtualClock", "override"]

__getattr__ = on_first_use(__name__, {"contrib.testing": " ".join(__all__)})


def __dir__() -> list[str]:
    return __all__
