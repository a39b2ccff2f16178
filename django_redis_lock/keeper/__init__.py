"""The one background thread of a process, and its jobs."""

from .thread import DeferredRelease, Job, Keeper, SentOnce, keeper, use_keeper

__all__ = ["DeferredRelease", "Job", "Keeper", "SentOnce", "keeper", "use_keeper"]
