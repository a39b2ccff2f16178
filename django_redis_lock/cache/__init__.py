"""The cache backend: django-redis's, with locks and with a ``get_or_set`` that computes once."""

from .aliases import BACKEND, lock_cache, lock_caches
from .backend import RedisCache
from .get_or_set import OnWaitTimeout
from .lock_factory import check_policy, check_using
from .options import SETTING

__all__ = [
    "BACKEND",
    "SETTING",
    "OnWaitTimeout",
    "RedisCache",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
]
