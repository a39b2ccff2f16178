"""The one background thread of a process, its jobs, and a pool of threads for background work."""

from .job import Job
from .thread import keeper
from .thread_pool import Background, background

__all__ = ["Background", "Job", "background", "keeper"]
