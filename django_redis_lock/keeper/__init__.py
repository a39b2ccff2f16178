"""The one background thread of a process, and its jobs."""

from .subscription import CHANGES as CHANGES
from .subscription import TRACK as TRACK
from .subscription import Subscription
from .thread import DeferredRelease, Job, Keeper, SentOnce, keeper, use_keeper

__all__ = ["DeferredRelease", "Job", "Keeper", "SentOnce", "Subscription", "keeper", "use_keeper"]
