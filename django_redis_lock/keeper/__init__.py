"""The one background thread of a process, its jobs, and a pool of threads for background work."""

from .thread import Job, keeper
from .thread_pool import Background, background

__all__ = ["Background", "Job", "background", "keeper"]
