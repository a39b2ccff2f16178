"""``locked()``, ``cached()`` and ``cached_page()``."""

from .cached import CachedFunction, cached, cached_page
from .locked import Locked, LockedWithDefault, locked
from .on_lost import interrupt_main_thread
from .options import Declaration, declarations
from .section import RetryUntil, current_lock, outages_not_logged

__all__ = [
    "CachedFunction",
    "Declaration",
    "Locked",
    "LockedWithDefault",
    "RetryUntil",
    "cached",
    "cached_page",
    "current_lock",
    "declarations",
    "interrupt_main_thread",
    "locked",
    "outages_not_logged",
]
