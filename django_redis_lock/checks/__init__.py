"""System checks: mistakes in the settings and in declared locks that can be seen at start-up.

``manage.py check --tag redis_lock`` runs these alone. Those that must ask Redis run with
``--deploy`` only, as Django's own checks of what is good enough for production.
"""

from __future__ import annotations

from . import declared, settings
from .catalogue import CHECKS, TAG, found

__all__ = ["CHECKS", "TAG", "declared", "found", "settings"]
