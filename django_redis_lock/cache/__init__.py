"""The cache backend: django-redis's, with locks and with a ``get_or_set`` that computes once."""

from .backend import RedisCache
from .lock_factory import BACKEND, check_policy, check_using, lock_cache, lock_caches
from .options import SETTING, GetOrSetArguments, GetOrSetOptions

__all__ = [
    "BACKEND",
    "SETTING",
    "GetOrSetArguments",
    "GetOrSetOptions",
    "RedisCache",
    "check_policy",
    "check_using",
    "lock_cache",
    "lock_caches",
]
