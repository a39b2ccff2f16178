"""Locks and caches without Redis, for the tests of projects that use them."""

from .clock import VirtualClock
from .override import MemoryServer, RedisLocksMixin, override

__all__ = ["MemoryServer", "RedisLocksMixin", "VirtualClock", "override"]
