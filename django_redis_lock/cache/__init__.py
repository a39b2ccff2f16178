"""The cache backends: django-redis's, and Django's for local memory, with locks and with a
``get_or_set`` that computes once."""

from .backend import RedisCache
from .lock_factory import (
    BACKEND,
    LOCAL_BACKEND,
    AlreadyAcquired,
    BackendCannotLock,
    NotAcquired,
    check_policy,
    check_using,
    lock_cache,
    lock_caches,
    reset_all,
)
from .locmem import LocMemCache
from .reading import MISSING

__all__ = [
    "BACKEND",
    "LOCAL_BACKEND",
    "MISSING",
    "AlreadyAcquired",
    "BackendCannotLock",
    "LocMemCache",
    "NotAcquired",
    "RedisCache",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
    "reset_all",
]
