"""One lock over several independent servers."""

from .aio import AsyncRedlock
from .lock import Redlock

__all__ = ["AsyncRedlock", "Redlock"]
