"""``locked()`` and ``cached()``."""

from .cached import CachedFunction, cached
from .current import current_lock
from .locked import Locked, LockedWithDefault, locked
from .on_lost import interrupt_main_thread
from .outages import RetryUntil, outages_not_logged
from .registry import Declaration, declarations

__all__ = [
    "CachedFunction",
    "Declaration",
    "Locked",
    "LockedWithDefault",
    "RetryUntil",
    "cached",
    "current_lock",
    "declarations",
    "interrupt_main_thread",
    "locked",
    "outages_not_logged",
]
