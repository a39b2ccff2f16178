"""The one background thread of a process, and its jobs."""

from .thread import Job, Keeper, keeper, use_keeper

__all__ = ["Job", "Keeper", "keeper", "use_keeper"]
