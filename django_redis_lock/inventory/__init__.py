"""Which locks are held in a database, and their forced release."""

from .database import KEYS_PER_SCRIPT, delete_matching, empty, indexed_locks
from .forced_release import Outcome, release
from .listing import (
    FLIGHT,
    LOCK,
    MAX_DESCRIBED,
    MAX_ENTRIES,
    Inspection,
    Inventory,
    LockInfo,
    WaiterInfo,
    inspect,
    list_held,
)

__all__ = [
    "FLIGHT",
    "KEYS_PER_SCRIPT",
    "LOCK",
    "MAX_DESCRIBED",
    "MAX_ENTRIES",
    "Inspection",
    "Inventory",
    "LockInfo",
    "Outcome",
    "WaiterInfo",
    "delete_matching",
    "empty",
    "indexed_locks",
    "inspect",
    "list_held",
    "release",
]
