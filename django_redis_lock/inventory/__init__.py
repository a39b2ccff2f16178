"""Which locks are held in a database, and ending them by force."""

from .database import STEP, delete_matching, empty, indexed_locks
from .forced_release import Outcome, release
from .listing import (
    FLIGHT,
    LOCK,
    MOST_DESCRIBED,
    MOST_ENTRIES,
    Inspection,
    Inventory,
    LockInfo,
    WaiterInfo,
    inspect,
    list_flights,
    list_held,
)

__all__ = [
    "FLIGHT",
    "LOCK",
    "MOST_DESCRIBED",
    "MOST_ENTRIES",
    "STEP",
    "Inspection",
    "Inventory",
    "LockInfo",
    "Outcome",
    "WaiterInfo",
    "delete_matching",
    "empty",
    "indexed_locks",
    "inspect",
    "list_flights",
    "list_held",
    "release",
]
