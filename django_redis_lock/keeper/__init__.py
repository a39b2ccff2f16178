"""The one background thread of a process, and its jobs."""

from .thread import Job, keeper

__all__ = ["Job", "keeper"]
