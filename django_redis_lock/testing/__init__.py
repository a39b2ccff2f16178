"""Locks without Redis, for the tests of projects that use them."""

from .locks import Clock, MemoryLock, MemoryServer, VirtualClock, override

__all__ = ["Clock", "MemoryLock", "MemoryServer", "VirtualClock", "override"]
