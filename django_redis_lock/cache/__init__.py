"""The cache backends: django-redis's, with locks and with a ``get_or_set`` that computes once, and
the same on a server in memory.

``"BACKEND": "django_redis_lock.cache.RedisCache"``
"""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .aliases import Caches as Caches
from .aliases import cache as cache
from .aliases import caches as caches
from .aliases import value_cache as value_cache
from .backend import BACKEND as BACKEND
from .backend import LOCAL_BACKEND as LOCAL_BACKEND
from .backend import URL_HINT as URL_HINT
from .backend import BackendCannotLock as BackendCannotLock
from .backend import lock_cache as lock_cache
from .backend import lock_caches as lock_caches
from .keys import NamedKey as NamedKey
from .keys import UnfitKeyFunction as UnfitKeyFunction
from .keys import starts_of_locks as starts_of_locks
from .locks import AlreadyAcquired as AlreadyAcquired
from .locks import Locks as Locks
from .locks import NotAcquired as NotAcquired
from .locks import check_using as check_using
from .on_commit import FunctionOnCommit as FunctionOnCommit
from .on_commit import OnCommit as OnCommit
from .values import MISSING as MISSING

# Two names are those of optional parts, which know this package: here only, it knows them, too.
if TYPE_CHECKING:
    from ..contrib.locmem import LocMemCache as LocMemCache
    from ..ops.inventory import reset_all as reset_all
    from .arguments import AsyncLockArguments as AsyncLockArguments
    from .arguments import CurrentLock as CurrentLock
    from .arguments import GetOrSetArguments as GetOrSetArguments
    from .arguments import LockArguments as LockArguments
    from .typed import RedisCache as RedisCache
else:
    from .backend import RedisCache as RedisCache

__getattr__ = on_first_use(
    __name__,
    {
        "contrib.locmem": "LocMemCache",
        "ops.inventory": "reset_all",
        "cache.arguments": "AsyncLockArguments CurrentLock GetOrSetArguments LockArguments",
    },
)
