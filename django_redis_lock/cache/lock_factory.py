"""Which kind of lock ``cache.lock()`` makes, and which caches can lock."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.base import BaseCache, default_key_func
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property
from django.utils.module_loading import import_string
from django_redis.client import DefaultClient, HerdClient, ShardClient

from .. import locking, transport
from ..conf import SETTING, Conf, given
from ..exceptions import LockError
from ..extension import part
from ..protocol.validation import check_name_in_cache, check_policy, longest_hold
from .context import named_later

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..locking import AsyncLock, Lock
    from ..ops.inventory import Inventory
    from .typed import AsyncLockArguments, LockArguments

    AnyLock = TypeVar("AnyLock", Lock, AsyncLock)

_Method = TypeVar("_Method", bound=Callable[..., object])

#: The BACKEND of a cache that can lock, or a subclass of it.
BACKEND = "django_redis_lock.cache.RedisCache"
#: The same without Redis: its locks exclude the threads and tasks of one process.
LOCAL_BACKEND = "django_redis_lock.cache.LocMemCache"
URL_HINT = (
    "it begins with redis://, rediss:// or unix://, and special characters in a password are "
    "percent-encoded"
)


def has_plain_keys(cache: BaseCache) -> bool:
    """Whether every thread makes the same keys: only Django's and django-redis's code makes them,
    of a fixed KEY_PREFIX and VERSION."""
    own, client = vars(cache), type(cache.client)  # type: ignore[attr-defined]  # django-redis's
    return (
        cache.key_func is default_key_func
        and type(cache).make_key is BaseCache.make_key
        and client.make_key is DefaultClient.make_key
        and type(own.get("key_prefix")) is str
        and type(own.get("version")) in (int, str)
    )


def _version_by_name(method: _Method) -> _Method:
    """``lock("x", 10)`` has a version and no timeout, as with django-redis: few who write that mean
    it."""

    @wraps(method)
    def called(self: LockCache, key: Any, *args: Any, **options: Any) -> object:
        if len(args) == 1 and args[0] is not None and "timeout" not in options:
            name = method.__name__
            text = f"{name}({key!r}, {args[0]!r}): the second argument is the version of the key. "
            text += f"Write timeout={args[0]!r} if seconds were meant, else version={args[0]!r}"
            warnings.warn(text, stacklevel=2)
        return method(self, key, *args, **options)

    return cast(_Method, called)


class LockCache(BaseCache):
    """The part of ``RedisCache`` and ``LocMemCache`` that makes locks."""

    #: Whether its locks exclude the threads of one process only.
    in_memory = False
    client: Any  # django-redis's

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)  # type: ignore[call-arg,arg-type]  # of a real backend
        self.conf = Conf(params.get("OPTIONS"))

    def _lock_client(self) -> Any:
        """That of the primary: whatever decides must be asked there. Raises ImproperlyConfigured if
        the settings of the cache lead to none."""
        if not self._has_primary:
            raise ImproperlyConfigured(
                f"{type(self.client).__name__} cannot lock: it has no single primary server. "
                "Use django-redis's DefaultClient or SentinelClient, or our ClusterClient"
            )
        try:
            return self.client.get_client(write=True)
        except ValueError:  # redis-py's, perhaps with a part of the password.
            raise ImproperlyConfigured(f"the LOCATION of the cache is no URL: {URL_HINT}") from None

    @cached_property
    def _has_plain_keys(self) -> bool:
        return has_plain_keys(self)

    @cached_property
    def computes_once(self) -> bool:
        """Whether ``get_or_set`` works, as it does not with some clients of django-redis."""
        return self._has_primary and not isinstance(self.client, HerdClient)

    @cached_property
    def _has_primary(self) -> bool:
        """Whether one server decides about each key."""
        client = self.client
        return isinstance(client, DefaultClient) and not isinstance(client, ShardClient)

    def _check_client(self, client: object) -> None:
        """Raises ValueError if the caller has given a ``client``, which this cache cannot use."""

    @_version_by_name
    def lock(
        self,
        key: str | Collection[str],
        version: int | None = None,
        timeout: float | None = SETTING,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        client: object = None,
        thread_local: bool = True,
        **options: Unpack[LockArguments],
    ) -> Lock:
        """A lock named ``key``. Its key in Redis cannot be the key of a cached value.

        Args:
            key: the name; or a list of names, all or none of which the caller gets (``MultiLock``).
            timeout: seconds. Default: the setting TIMEOUT, and the lock is renewed. None: the lock
                never expires, not even after a crash.
            using: three or more cache aliases, for a ``Redlock`` over their servers.
            on_redis_down: ``"raise"``, ``"local"`` or ``"run"`` (``docs/choosing_guarantees.md``).
                Default: the setting.
            critical: never hold the lock without Redis, regardless of the setting.
            replicas: how many replicas must confirm the lock. Default: the setting.
            limit: how many may hold the lock at a time. Default: 1.
            options: see ``django_redis_lock.Lock``.
        """
        chosen: Any = options
        chosen.update(sleep=sleep, blocking=blocking, blocking_timeout=blocking_timeout)
        chosen["thread_local"] = thread_local

        def name_of(name: str) -> str:
            return self._lock_name(name, version)

        lock: Lock = self._make(key, timeout, client, chosen, name_of, asynchronous=False)
        return lock

    @_version_by_name
    def alock(
        self,
        key: str | Collection[str],
        version: int | None = None,
        timeout: float | None = SETTING,
        *,
        client: object = None,
        **options: Unpack[AsyncLockArguments],
    ) -> AsyncLock:
        """``lock`` for asyncio: ``async with cache.alock("import"):``.

        Args:
            client: a redis.asyncio client. Default: one of the running event loop, to the server of
                this cache.

        Raises:
            RuntimeError: no event loop is running.
        """

        def make(made: Callable[[str], str], *kind_of: Callable[[type], type]) -> Any:
            return self._make(key, timeout, client, {**options}, made, *kind_of, asynchronous=True)

        def name_of(name: str) -> str:
            return self._lock_name(name, version)

        if self._has_plain_keys:
            lock: AsyncLock = make(name_of)
            return lock
        later: AsyncLock = named_later(make, name_of)
        return later

    def _make(
        self,
        key: str | Collection[str],
        timeout: float | None,
        client: object,
        options: dict[str, object],
        name_of: Callable[[str], str],
        kind_of: Callable[[type], type] = lambda kind: kind,
        *,
        asynchronous: bool,
    ) -> Any:
        self._check_client(client)
        aliases = check_using(options.pop("using", None))
        if aliases and client is not None:
            raise ValueError("give either using or client: both say where the lock is")
        several = isinstance(key, (list, tuple, set, frozenset))
        if aliases and several:
            raise ValueError("several names are for a lock on one server: leave using out")
        self._choose_policy(options)
        if options.get("replicas") is None:
            # A lock on several servers needs none.
            options["replicas"] = 0 if aliases else self.conf.REPLICAS
        if timeout is SETTING:
            timeout = self.conf.TIMEOUT
            options.setdefault("renew", True)
        options.setdefault("grant_timeout", self.conf.GRANT_TIMEOUT)

        def client_of(cache: LockCache) -> Any:
            found = cache._lock_client()
            return transport.asyncio_client(found) if asynchronous else found

        if aliases:
            client = [client_of(lock_cache(alias)) for alias in aliases]
        kind = _lock_class(asynchronous, bool(aliases))
        if several:
            options["lock_class"] = kind
            client = client or client_of(self)
            return self._several(key, timeout, client, options, name_of, kind_of)
        name = check_name_in_cache(key)
        made = kind_of(kind)(client or client_of(self), name_of(name), timeout, **options)
        return self._configured(made, name)

    def _several(
        self,
        keys: Collection[str],
        timeout: float | None,
        client: object,
        options: dict[str, Any],
        name_of: Callable[[str], str],
        kind_of: Callable[[type], type],
    ) -> object:
        several = part("several_names")
        names = {name_of(check_name_in_cache(key)): key for key in several.check_names(keys)}
        name = "AsyncMultiLock" if options["lock_class"].asynchronous else "MultiLock"
        kind = kind_of(getattr(several, name))
        lock = kind(client, names, timeout, **options)
        for member in lock.members:
            self._configured(member, names[member.name])
        return self._configured(lock, ", ".join(names[name] for name in lock.name))

    def _choose_policy(self, options: dict[str, object]) -> None:
        given, critical = options.pop("on_redis_down", None), options.pop("critical", False)
        if given is not None or critical is not False:
            check_policy(given, critical)
        policy = "raise" if critical else given or self.conf.ON_REDIS_DOWN
        if policy != "raise":
            options.update(on_redis_down=policy, local_folder=self.conf.LOCAL_LOCK_FOLDER)

    def _configured(self, lock: AnyLock, key: str) -> AnyLock:
        lock.cache, lock.cache_key = self, key
        if not self._has_plain_keys:
            lock.stored_name = key
        if lock.warn_after is None:
            longest = longest_hold(lock.renew, lock.timeout, lock.max_hold)
            lock.warns_after = self.conf.warn_after(longest)
        return lock

    def _lock_name(self, key: str, version: int | None) -> str:
        name: str = self.make_key(f"{self.conf.LOCK_PREFIX}{key}", version=version)
        return name

    def command_lock(self, key: str, **options: Any) -> Lock:
        """The lock that ``run_locked`` takes, which other processes respect."""
        return self.lock(key, **options)

    def held_locks(self, limit: int = 500) -> Inventory:
        """The locks of ``lock()`` and ``locked()`` that are held in this cache and its default
        version, at most ``limit`` of them. With a KEY_FUNCTION that does not show names in keys,
        waits until the holders have stored them, about half a second; raises as ``reset_all``."""
        held: Inventory = part("inventory").OwnLocks(self).held(limit)
        return held

    def reset_all(self) -> int:
        """Release all locks of this cache and its default version; ``on_lost`` of their holders is
        called. Returns how many. Does not touch values or locks with another key prefix.

        Raises:
            ImproperlyConfigured: KEY_FUNCTION makes keys that do not show which locks are of this
                cache, and neither do the holders of some. The others are released.
        """
        return int(part("inventory").OwnLocks(self).release_all())

    def locked_get_or_set(
        self,
        key: str,
        value_creator: Callable[[], object],
        version: int | None = None,
        expire: float | None = None,
        id: str | bytes | None = None,
        lock_key: str | None = None,
        timeout: Any = SETTING,
    ) -> Any:
        """``get_or_set`` under python-redis-lock's name. None is a value, and stored.

        Args:
            lock_key: a lock to hold while ``value_creator`` runs, so that values with the same
                ``lock_key`` are computed one after another. Not needed to compute a value once.
            expire: timeout of that lock in seconds. Default: the setting TIMEOUT, renewed. No
                effect without ``lock_key``.
            id: the token of that lock.
        """

        def create() -> object:
            if lock_key is None:
                return value_creator()
            lifetime: dict[str, Any] = {} if expire is None else {"timeout": expire}
            with self.lock(lock_key, id=id, **lifetime):
                return value_creator()

        return self.get_or_set(key, create, timeout, version)

    def _prefix(self) -> bytes:
        return self._lock_key("")

    def _lock_key(self, name: str) -> bytes:
        return bytes(self._lock_client().get_encoder().encode(self._lock_name(name, None)))


@cache
def _lock_class(asynchronous: bool, on_several_servers: bool) -> Any:
    name = f"{'Async' if asynchronous else ''}{'Redlock' if on_several_servers else 'Lock'}"
    return getattr(part("redlock") if on_several_servers else locking, name)


def check_using(value: Any) -> tuple[str, ...]:
    """``value`` as cache aliases; empty for None. Raises TypeError or ValueError."""
    if value is None:
        return ()
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    if not is_list or not all(isinstance(alias, str) for alias in value):
        raise TypeError(f"using must be a list of cache aliases, not {value!r}")
    if len(value) < 3 or len(set(value)) < len(value):
        raise ValueError(f"using must have three different caches or more, not {value!r}")
    return tuple(value)


def lock_caches() -> Iterator[str]:
    """The aliases of the caches that can hold locks, that of the setting USING first."""
    preferred = given().get("USING")
    for alias in sorted(settings.CACHES, key=lambda alias: alias != preferred):
        if can_lock(alias):
            yield alias


def can_lock(alias: str) -> bool:
    try:
        backend = import_string(settings.CACHES[alias]["BACKEND"])
    except (ImportError, KeyError):
        return False  # Django reports it where that cache is used.
    return isinstance(backend, type) and issubclass(backend, LockCache)


class BackendCannotLock(ImproperlyConfigured):
    """A cache has another BACKEND, which cannot lock."""

    def __init__(self, alias: str) -> None:
        write = (
            f'In CACHES[{alias!r}] write "BACKEND": "{BACKEND}", or, for development and tests '
            f'without Redis, "BACKEND": "{LOCAL_BACKEND}"'
        )
        if able := next(lock_caches(), None):
            write += f'; or name the cache that can: using="{able}", or, for all uses of locked(), '
            write += f'DJANGO_REDIS_LOCK = {{"USING": "{able}"}}'
        backend = settings.CACHES[alias].get("BACKEND")
        super().__init__(f"the cache {alias!r} cannot lock: its BACKEND is {backend!r}. {write}")


def lock_cache(alias: str) -> LockCache:
    """The cache ``alias``, for locks. Raises ImproperlyConfigured if there is none of that name, or
    ``BackendCannotLock``."""
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        cache = None
    if isinstance(cache, LockCache):
        return cache
    if alias in settings.CACHES:
        raise BackendCannotLock(alias)
    known = ", ".join(map(repr, lock_caches())) or "none"
    raise ImproperlyConfigured(f"CACHES has no {alias!r}; caches that can lock: {known}")


# -- the names of python-redis-lock ----------------------------------------------------------------

#: Raised when a lock object acquires a lock that it already holds without a timeout, and when a
#: lock that is not held is released or extended.
AlreadyAcquired = NotAcquired = LockError
