"""The cache backends: django-redis's, and Django's for local memory, with locks and with a
``get_or_set`` that computes once."""

from .backend import RedisCache
from .lock_factory import (
    BACKEND,
    LOCAL_BACKEND,
    BackendCannotLock,
    check_policy,
    check_using,
    lock_cache,
    lock_caches,
)
from .locmem import LocMemCache
from .options import GetOrSetArguments, GetOrSetOptions, Timeout
from .reading import MISSING

__all__ = [
    "BACKEND",
    "LOCAL_BACKEND",
    "MISSING",
    "BackendCannotLock",
    "GetOrSetArguments",
    "GetOrSetOptions",
    "LocMemCache",
    "RedisCache",
    "Timeout",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
]
