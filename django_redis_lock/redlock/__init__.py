"""One lock over several independent servers."""

from .lock import AsyncRedlock, Redlock

__all__ = ["AsyncRedlock", "Redlock"]
