"""``RedisCache``: all methods of a cache, those of Django, of django-redis and ours. It is put
together of ``Values``, ``Locks`` and ``Connections``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from asgiref.sync import sync_to_async
from django.apps import apps
from django.conf import settings
from django.core.cache import InvalidCacheBackendError, caches
from django.core.cache.backends.base import DEFAULT_TIMEOUT, BaseCache
from django.core.exceptions import ImproperlyConfigured
from django.utils.functional import cached_property
from django.utils.module_loading import import_string
from django_redis.cache import CONNECTION_INTERRUPTED, omit_exception
from django_redis.cache import RedisCache as DjangoRedisCache
from django_redis.client import DefaultClient, HerdClient, ShardClient
from django_redis.exceptions import ConnectionInterrupted
from django_redis.util import CacheKey

from .. import pools, transport
from ..conf import SETTING, Conf, Timeout, given
from ..events import Subject
from ..extension import PACKAGE, PartMissing, part
from ..singleflight import encode_value
from ..transport import server_of
from ..transport.refusals import raise_interrupt
from ..transport.server import encoding
from .connections import Connections, failing_as_django_redis, flight_ending
from .keys import Keys, Listing, has_plain_keys
from .locks import Locks, version_by_name
from .on_commit import OnCommit
from .values import MISSING, FirstRead, Values, waiting_thread

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..locking import AsyncLock, Lock
    from ..ops.inventory import Inventory
    from .arguments import (
        AsyncLockArguments,
        GetOrSetArguments,
        GetOrSetManyArguments,
        LockArguments,
    )

#: The BACKEND of a cache that can lock, or a subclass of it.
BACKEND = f"{PACKAGE}.cache.RedisCache"
#: The same without Redis: its locks exclude the threads and tasks of one process.
LOCAL_BACKEND = f"{PACKAGE}.cache.LocMemCache"
NO_LOCATION = 'the cache has no LOCATION: give it the address of Redis, "LOCATION": "redis://127.0.0.1:6379/1"'
URL_HINT = (
    "it begins with redis://, rediss:// or unix://, and special characters in a password are "
    "percent-encoded"
)

_Method = TypeVar("_Method", bound=Callable[..., object])

#: Decorates methods that raise no outages if IGNORE_EXCEPTIONS is set.
_ignoring_outages: Callable[[_Method], _Method] = omit_exception


def _returning(value: object) -> Callable[[_Method], _Method]:
    """The same, where a method then returns ``value``."""
    ignoring: Callable[[_Method], _Method] = omit_exception(return_value=value)
    return ignoring


def _name_unencodable(
    encode: Callable[[object], object], error: Exception, data: Mapping[str, object]
) -> None:
    """If ``error`` is that of a value in ``data`` which ``encode`` cannot encode, name its key."""
    for key, value in data.items():
        try:
            encode_value(encode, key, value)
        except Exception as again:
            if type(again) is type(error):
                error.args = again.args
            return


def _encoded(encode: Callable[..., object], value: object, **options: object) -> object:
    """What ``encode`` makes of ``value``. A subclass of int may have another ``str()``."""
    encoded = encode(value, **options)
    return int(encoded) if isinstance(encoded, int) else encoded


def _by_client(name: str, writes: bool = False) -> Any:
    """django-redis's method ``name``, whose ``client`` is ours if the caller gives none."""
    theirs = getattr(DefaultClient, name)
    _, *names = signature(theirs).parameters
    at = names.index("client")

    @wraps(theirs)
    def method(self: RedisCache, *args: Any, **options: Any) -> Any:
        if len(args) > at:
            options.update(zip(names[at:], args[at:], strict=False))
            args = args[:at]
        client = options.pop("client", None)
        by = self._by(client) if writes else {"client": client or self._direct()}
        return getattr(self.client, name)(*args, **options, **by)

    return _ignoring_outages(method)


def _awaiting(name: str) -> Any:
    """Django's asynchronous twin of the method ``name``."""

    @wraps(getattr(BaseCache, f"a{name}"))
    async def method(self: RedisCache, *args: object, **kwargs: object) -> Any:
        in_thread, client = getattr(self, name), self._client_for(name)
        if client is None:
            return await sync_to_async(in_thread)(*args, **kwargs)
        return await part("asyncio").call(self, client, name, *args, **kwargs)

    return method


class RedisCache(DjangoRedisCache):  # type: ignore[misc]  # no types
    """django-redis's cache. Each method documents its differences."""

    #: Whether its locks exclude the threads of one process only.
    in_memory = False
    #: Its methods that tools replace, with the code of each.
    _own_methods: ClassVar[dict[str, tuple[Any, object]]] = {}
    _client: Any
    _client_cls: Any
    _server: Any
    _params: dict[str, object]

    def __init__(self, location: str, params: dict[str, Any]) -> None:
        super().__init__(location, params)
        self.conf = Conf(params.get("OPTIONS"))
        self._keys = Keys(self)
        self._connections = Connections(self)
        self._direct = self._connections.direct
        self._values = Values(self, self._connections)
        self._locks = Locks(self, lock_cache)

    @property
    def client(self) -> Any:
        """django-redis's client: no value has the key of a lock, and of its connections none
        returns the reply to another call, nor stays with a server that has become a replica."""
        if self._client is None:
            if apps.ready and not apps.is_installed(PACKAGE):
                with suppress(PartMissing):
                    part("checks").log_not_installed()
            needs_one = issubclass(self._client_cls, DefaultClient) and not self.in_memory
            if needs_one and not self._server:
                raise ImproperlyConfigured(NO_LOCATION)
            client = self._client_cls(self._server, self._params, self)
            client.make_key = self._keys.make_key
            client.make_pattern = self._keys.make_pattern
            client.encode = partial(_encoded, client.encode)
            factory = client.connection_factory
            connect = factory.connect
            factory.connect = lambda url: pools.connect(factory, connect, url)
            self._client = client
        return self._client

    @property
    def _ignore_exceptions(self) -> bool:
        """Of django-redis: whether to ignore the error that is being handled."""
        if self._ignores_errors and (error := sys.exc_info()[1]) is not None:
            raise_interrupt(error)
        return self._ignores_errors

    @_ignore_exceptions.setter
    def _ignore_exceptions(self, ignores: bool) -> None:
        self._ignores_errors = ignores

    # -- Django's and django-redis's methods -------------------------------------------------------

    @_ignoring_outages
    def set(
        self,
        key: str,
        value: object,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
        nx: bool = False,
        xx: bool = False,
    ) -> Any:
        return self._set((key, value, timeout, version), client, nx=nx, xx=xx)

    def _set(self, values: tuple[object, ...], client: object, **how: bool) -> object:
        try:
            return self.client.set(*values, **how, **self._by(client))
        except ConnectionInterrupted as error:
            raise_interrupt(error)
            if client is not None or self.client._replica_read_only:
                raise
            # django-redis tries its other servers. The first, which stores the flights, is down, so
            # there are none to end.
            return self.client.set(*values, **how)
        except Exception as error:
            _name_unencodable(self.client.encode, error, {str(values[0]): values[1]})
            raise

    @_ignoring_outages
    def add(
        self,
        key: str,
        value: object,
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
    ) -> Any:
        return self._set((key, value, timeout, version), client, nx=True)

    def set_many(
        self,
        data: Mapping[str, object],
        timeout: float | None = DEFAULT_TIMEOUT,
        version: int | None = None,
        client: object = None,
        **options: object,
    ) -> list[str]:
        """As in Django, returns the keys that could not be set."""
        done = self._set_many(data, timeout, version, client=client, **options)
        return [] if done else list(data)

    @_ignoring_outages
    def _set_many(
        self, data: Mapping[str, object], *args: object, client: object, **options: object
    ) -> bool:
        try:
            if data:
                self.client.set_many(data, *args, **self._by(client), **options)
        except Exception as error:
            _name_unencodable(self.client.encode, error, data)
            raise
        return True

    @_ignoring_outages
    def delete_pattern(
        self,
        pattern: str,
        version: int | None = None,
        prefix: str | None = None,
        client: Any = None,
        itersize: int | None = None,
    ) -> Any:
        """As in django-redis, but does not delete held locks whose keys match.

        Args:
            itersize: how many keys Redis scans in one step; at most 500, the default.
        """
        self._check_client(client)
        if isinstance(self.client, ShardClient):
            return self.client.delete_pattern(pattern, version, prefix, client, itersize)
        redis = client or self.client.get_client(write=True)
        keys = redis.get_encoder().encode(self.client.make_pattern(pattern, version, prefix))
        with failing_as_django_redis(redis):
            return part("inventory").delete_matching(redis, keys, itersize)

    @_ignoring_outages
    def incr_version(
        self, key: str, delta: int = 1, version: int | None = None, client: Any = None
    ) -> int:
        """As in Django, also for None. The value keeps its lifetime."""
        version = self.version if version is None else version
        with failing_as_django_redis(client):
            by = self._by(client)
            value = self.client.get(key, MISSING, version=version, **by)
            if value is MISSING:
                raise ValueError(f"Key {key!r} not found")
            left = self.client.pttl(key, version=version, **by)
            original = key.original_key() if isinstance(key, CacheKey) else key
            lifetime = None if left is None else left / 1000
            self.client.set(original, value, lifetime, version=version + delta, **by)
            self.client.delete(key, version=version, **by)
        return version + delta

    @_returning(CONNECTION_INTERRUPTED)
    def _get(self, key: str, default: object, version: int | None, client: object) -> object:
        return self.client.get(key, default, version, client or self._direct())

    @_returning({})
    def get_many(
        self, keys: Iterable[str], version: int | None = None, client: object = None
    ) -> Any:
        return self.client.get_many(keys and list(keys), version, client or self._direct())

    @_ignoring_outages
    def delete(
        self, key: str, version: int | None = None, prefix: str | None = None, client: object = None
    ) -> bool:
        return bool(self.client.delete(key, version, prefix, **self._by(client)))

    has_key = _by_client("has_key")
    ttl = _by_client("ttl")
    pttl = _by_client("pttl")
    delete_many = _by_client("delete_many", writes=True)
    incr = _by_client("incr", writes=True)
    decr = _by_client("decr", writes=True)
    touch = _by_client("touch", writes=True)
    expire = _by_client("expire", writes=True)
    pexpire = _by_client("pexpire", writes=True)
    expire_at = _by_client("expire_at", writes=True)
    pexpire_at = _by_client("pexpire_at", writes=True)

    @_ignoring_outages
    def clear(self) -> Any:
        """Empty the database, as django-redis does, except for held locks and their metrics; with
        ``CLEAR = "prefix"`` only delete what has this cache's KEY_PREFIX and VERSION.

        Raises:
            ImproperlyConfigured: CLEAR is ``"prefix"``, and KEY_FUNCTION makes keys without one.
        """
        if self.conf.CLEAR == "prefix":
            self.delete_pattern(CacheKey(self._keys.own_pattern()))
            return None
        if isinstance(self.client, ShardClient):
            return self.client.clear()
        redis = self._lock_client()
        with failing_as_django_redis(redis):
            part("inventory").empty(redis)

    @_ignoring_outages
    def keys(self, search: str, version: int | None = None, client: object = None) -> Any:
        """As in django-redis."""
        return self.client.keys(search, version=version, **self._listing(client))

    @_ignoring_outages
    def iter_keys(
        self,
        search: str,
        itersize: int | None = None,
        client: object = None,
        version: int | None = None,
    ) -> Any:
        """As in django-redis."""
        by = self._listing(client)
        return self.client.iter_keys(search, itersize=itersize, version=version, **by)

    def _listing(self, client: object) -> dict[str, object]:
        self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {"client": client}
        return {"client": Listing(client or self.client.get_client(write=False))}

    def _by(self, client: object) -> dict[str, object]:
        """The argument that makes a method of django-redis's client end flights."""
        if client is None:
            if (own := self._direct()) is not None:
                return {"client": own}
        else:
            self._check_client(client)
        if isinstance(self.client, ShardClient):
            return {} if client is None else {"client": client}
        return {"client": flight_ending(client or self.client.get_client(write=True))}

    # -- Django's asynchronous methods -------------------------------------------------------------

    # With several servers, with a client or connection class of the project's own, in
    # ``async_to_sync``, and where the method for threads was replaced, they call that in Django's
    # thread for synchronous code, as Django's do.
    aget = _awaiting("get")
    aget_many = _awaiting("get_many")
    ahas_key = _awaiting("has_key")
    aset = _awaiting("set")
    aadd = _awaiting("add")
    aset_many = _awaiting("set_many")
    atouch = _awaiting("touch")
    adelete = _awaiting("delete")
    adelete_many = _awaiting("delete_many")
    aincr = _awaiting("incr")
    adecr = _awaiting("decr")
    aincr_version = _awaiting("incr_version")

    def _client_for(self, method: str) -> object:
        """None if ``method`` is to run in Django's thread."""
        one_server = type(self.client) is DefaultClient and self._connections.breaker is not None
        one_server = one_server and self._has_plain_keys and self._connections.plain
        # A loop for which a thread waits lasts for one call, and would have to connect for each.
        if not one_server or not self._is_own(method) or waiting_thread() is not None:
            return None
        try:
            return transport.asyncio_client(self._lock_client())
        except TypeError:  # Its connections are of a class without an asyncio twin.
            return None

    def _is_own(self, method: str) -> bool:
        """Whether no tool and no subclass has replaced ``method``."""
        function, code = self._own_methods[method]
        is_own = getattr(type(self), method) is function and function.__code__ is code
        return is_own and method not in self.__dict__

    # -- values that are computed once -------------------------------------------------------------

    def get_or_set(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """The value of ``key``. If it is missing, one caller computes it with ``default``.

        Other callers (threads, tasks, processes and hosts) wait for that result. If the key is set
        or deleted during the computation, the result is returned to its caller but not stored. None
        is a value like any other.

        Args:
            default: a callable without arguments, or the value itself.
            timeout: seconds after which the value is computed again. Default: that of the cache;
                None: never; 0: it is not stored, only the callers that wait for it get it. Or a
                function of the value that returns one of these.
            stale: seconds after the timeout during which callers get the old value at once while
                one of them computes the new one; also if the computation fails.
            background: compute in the background, so that this one gets the old value at once too.
            soft_timeout: seconds to wait at most for the value that this call computes while there
                is an old one. Then it returns the old one, and the computation goes on in the
                background.
            wait: seconds to wait at most for another caller's computation of a missing value.
            on_wait_timeout: what to do then: ``"compute"`` the value here as well, ``"raise"``
                LockNotAcquired, or return the ``"default"``: the value given as ``default``, None
                for a callable.
            jitter: shorten the timeout by a random share up to this much (0 to 1), so that values
                stored together do not expire together.
            error_ttl: seconds after a failed computation during which no caller tries again; they
                get an error with the same message.
            group: the metrics group, such as ``"report-{year}"``. Default: the key with ``*`` for
                each number, UUID and hash in it.

        Raises:
            LockNotAcquired: see ``on_wait_timeout``.
            ComputationFailed: see ``error_ttl``.
            LockError: ``default`` requested its own key.
            TypeError, ValueError: an option or ``timeout`` is invalid, or what that returns.
            redis.exceptions.RedisError: Redis is down, and VALUES_ON_REDIS_DOWN is ``"raise"``;
                otherwise the value is computed, and not stored.
        """
        read = self._values.first(key, timeout, version, options)
        if read is not MISSING and type(read) is not FirstRead:
            return read
        return self._values.do(self._values.value, key, default, timeout, version, options, read)

    async def aget_or_set(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``get_or_set`` for asyncio. A coroutine function as ``default`` is awaited; any other
        callable, but for built-in types, runs in Django's thread for synchronous code."""
        what = key, default, timeout, version, options
        return await self._values.ado(self._values.value, *what)

    def compute(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """Compute, store and return the value of ``key`` even if there is one. Callers that find no
        value wait for this one. If the key is written during the computation, the result
        is not stored. While Redis is down, the value is computed, whatever VALUES_ON_REDIS_DOWN
        is. Arguments as for ``get_or_set``."""
        return self._values.do(self._values.compute, key, default, timeout, version, options)

    async def acompute(
        self,
        key: str,
        default: object,
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetArguments],
    ) -> Any:
        """``compute`` for asyncio."""
        what = key, default, timeout, version, options
        return await self._values.ado(self._values.compute, *what)

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, object]],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, object]:
        """The values of ``keys``; one call of ``default_many`` computes the missing ones.

        ``default_many`` gets the list of the keys that no other caller is computing, and returns a
        dict; a key that is not in it is not in the result either. This call waits for the values
        that others compute. If ``default_many`` raises, the caller gets the exception.

        Args and Raises: as for ``get_or_set``, without ``stale``, ``background`` and
        ``soft_timeout``. All keys are counted in one metrics group; the default is that of the
        first key.
        """
        what = keys, default_many, timeout, version, options
        return self._values.do(self._values.values, *what)

    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Any],
        timeout: Timeout = SETTING,
        version: int | None = None,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, object]:
        """``get_or_set_many`` for asyncio."""
        what = keys, default_many, timeout, version, options
        return await self._values.ado(self._values.values, *what)

    def mark_stale(self, key: str, version: int | None = None, *, stale: float = SETTING) -> bool:
        """Let the value of ``key`` be stale from now on: the next ``get_or_set`` computes it again,
        other callers get the old value until then. Ends a computation under way: what it computes
        may be older.

        Args:
            stale: as in ``get_or_set`` of this key; of several, the smallest. After so many seconds
                the value is gone, unless it has been computed again. Default: the setting STALE.

        Returns:
            whether there is a value.

        Raises:
            TypeError, ValueError: ``stale`` is invalid or 0.
            redis.exceptions.RedisError: Redis is down, and IGNORE_EXCEPTIONS is not set.
        """
        return bool(self.mark_stale_many([key], version, stale=stale))

    async def amark_stale(
        self, key: str, version: int | None = None, *, stale: float = SETTING
    ) -> bool:
        """``mark_stale`` for asyncio."""
        return bool(await self.amark_stale_many([key], version, stale=stale))

    def mark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale`` for several keys, in one round trip; returns how many values there are."""
        return self._values.do(self._values.mark_stale, keys, version, stale)

    async def amark_stale_many(
        self, keys: Iterable[str], version: int | None = None, *, stale: float = SETTING
    ) -> int:
        """``mark_stale_many`` for asyncio."""
        return await self._values.ado(self._values.mark_stale, keys, version, stale)

    def on_commit(self, using: str | None = None, *, robust: bool = False) -> OnCommit:
        """``delete``, ``delete_many``, ``mark_stale`` and ``mark_stale_many`` for data that a
        database transaction changes, done after its commit: ``cache.on_commit().delete("report")``.
        At once if no transaction is open, never if it is rolled back.

        Args:
            using: the alias of the database, as of Django's ``transaction.on_commit``.
            robust: log an error of Redis instead of raising it after the commit.
        """
        return OnCommit(self, using, robust)

    # -- locks -------------------------------------------------------------------------------------

    @version_by_name
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
        """A lock named ``key``. No value of a cache can have its key.

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
        chosen: dict[str, Any] = {**options, "sleep": sleep, "blocking": blocking}
        chosen.update(blocking_timeout=blocking_timeout, thread_local=thread_local)
        lock: Lock = self._locks.lock(key, version, timeout, client, chosen)
        return lock

    @version_by_name
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
        lock: AsyncLock = self._locks.lock(key, version, timeout, client, {**options}, True)
        return lock

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

    # -- its keys, and where they are --------------------------------------------------------------

    def subject_of(self, key: str, group: str) -> Subject:
        return Subject.of(key, group, "", server_of(self._lock_client()), self)

    def _encoded_key(self, key: str, version: int | None) -> bytes:
        return bytes(self._encode_name(self.client.make_key(key, version=version)))

    @cached_property
    def _encode_name(self) -> Callable[[str], bytes]:
        """redis-py makes an encoder each time it is called for one."""
        return encoding(self._lock_client().get_encoder())

    def _lock_name(self, key: str, version: int | None) -> str:
        return self._keys.lock_name(key, version)

    def _lock_key(self, name: str) -> bytes:
        return bytes(self._lock_client().get_encoder().encode(self._lock_name(name, None)))

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


#: Those that Django's asynchronous methods have twins of.
_FOR_THREADS = (
    *("get", "get_many", "has_key", "set", "add", "delete", "set_many", "delete_many"),
    *("incr_version", "incr", "decr", "touch"),
)
for _name in _FOR_THREADS:
    _function = getattr(RedisCache, _name)
    RedisCache._own_methods[_name] = _function, _function.__code__

# -- the caches of the project that can lock -------------------------------------------------------


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
    return isinstance(backend, type) and issubclass(backend, RedisCache)


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


def lock_cache(alias: str) -> RedisCache:
    """The cache ``alias``, for locks. Raises ImproperlyConfigured if there is none of that name, or
    ``BackendCannotLock``."""
    try:
        cache = caches[alias]
    except InvalidCacheBackendError:
        cache = None
    if isinstance(cache, RedisCache):
        return cache
    if alias in settings.CACHES:
        raise BackendCannotLock(alias)
    known = ", ".join(map(repr, lock_caches())) or "none"
    raise ImproperlyConfigured(f"CACHES has no {alias!r}; caches that can lock: {known}")
