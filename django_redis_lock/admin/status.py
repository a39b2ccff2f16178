"""What can be told of a holder's health, the most urgent first."""

from __future__ import annotations

import math

from django.utils.translation import gettext_lazy

from ..inventory import LockInfo

__all__ = ["STATUSES", "status_of", "urgency"]

STATUSES = {
    "broken": gettext_lazy("cannot be read"),
    "silent": gettext_lazy("silent"),
    "expiring": gettext_lazy("expiring"),
    "unknown": gettext_lazy("not known"),
    "alive": gettext_lazy("alive"),
    "resting": gettext_lazy("resting"),
}
_URGENCY = {name: number for number, name in enumerate(STATUSES)}

#: A lock that nothing renews is expiring when so much of its lifetime is left, and no more seconds.
LAST_SHARE, LAST_SECONDS = 0.2, 60.0


def status_of(lock: LockInfo) -> str:
    """One of STATUSES."""
    if lock.resting:
        return "resting"
    if lock.broken:
        return "broken"
    if lock.silent:
        return "silent"
    if _is_expiring(lock):
        return "expiring"
    return "unknown" if lock.silent is None else "alive"


def urgency(lock: LockInfo) -> int:
    """0 for what wants looking at first."""
    return _URGENCY[status_of(lock)]


def _is_expiring(lock: LockInfo) -> bool:
    if lock.renews is not False or lock.lifetime is None or math.isinf(lock.ttl):
        return False
    return lock.ttl <= min(LAST_SECONDS, LAST_SHARE * lock.lifetime)
