"""The cache backend: django-redis's, with locks and with a ``get_or_set`` that computes once."""

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
from .options import SETTING, GetOrSetArguments, GetOrSetOptions

__all__ = [
    "BACKEND",
    "LOCAL_BACKEND",
    "SETTING",
    "BackendCannotLock",
    "GetOrSetArguments",
    "GetOrSetOptions",
    "RedisCache",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
]
