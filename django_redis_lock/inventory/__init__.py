"""Which locks are held in a database, and ending them by force."""

from .database import STEP, delete_matching, empty, indexed_locks
from .forced_release import Outcome, release
from .inspection import Inspection, Waiter, inspect
from .listing import (
    FLIGHT,
    LOCK,
    MOST_DESCRIBED,
    MOST_ENTRIES,
    HeldLock,
    Inventory,
    list_flights,
    list_held,
)

__all__ = [
    "FLIGHT",
    "LOCK",
    "MOST_DESCRIBED",
    "MOST_ENTRIES",
    "STEP",
    "HeldLock",
    "Inspection",
    "Inventory",
    "Outcome",
    "Waiter",
    "delete_matching",
    "empty",
    "indexed_locks",
    "inspect",
    "list_flights",
    "list_held",
    "release",
]
