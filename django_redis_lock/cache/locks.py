"""The locks of a cache: which kind ``cache.lock()`` makes, with which options."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache, partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from asgiref.sync import iscoroutinefunction, sync_to_async

from .. import locking, transport
from ..conf import SETTING
from ..exceptions import LockError
from ..extension import part
from ..protocol.validation import check_name_in_cache, check_policy, longest_hold

if TYPE_CHECKING:
    from ..locking import AsyncLock

_Method = TypeVar("_Method", bound=Callable[..., object])


def version_by_name(method: _Method) -> _Method:
    """``lock("x", 10)`` has a version and no timeout, as with django-redis: few who write that mean
    it."""

    @wraps(method)
    def called(self: object, key: Any, *args: Any, **options: Any) -> object:
        if len(args) == 1 and args[0] is not None and "timeout" not in options:
            name = method.__name__
            text = f"{name}({key!r}, {args[0]!r}): the second argument is the version of the key. "
            text += f"Write timeout={args[0]!r} if seconds were meant, else version={args[0]!r}"
            warnings.warn(text, stacklevel=2)
        return method(self, key, *args, **options)

    return cast(_Method, called)


class Locks:
    """Makes the locks of one ``cache``, a backend.

    Args:
        cache_of: returns the cache of an alias, for ``using``; see ``lock_cache``.
    """

    def __init__(self, cache: Any, cache_of: Callable[[str], Any]) -> None:
        self._cache, self._conf = cache, cache.conf
        self._cache_of = cache_of

    def lock(
        self,
        key: str | Collection[str],
        version: int | None,
        timeout: float | None,
        client: object,
        options: dict[str, Any],
        asynchronous: bool = False,
    ) -> Any:
        name_of = partial(self._cache._lock_name, version=version)
        if not asynchronous or self._cache._has_plain_keys:
            return self.make(key, timeout, client, options, asynchronous, name_of)
        what = key, timeout, client
        return named_later(lambda *by: self.make(*what, {**options}, True, *by), name_of)

    def make(
        self,
        key: str | Collection[str],
        timeout: float | None,
        client: object,
        options: dict[str, Any],
        asynchronous: bool,
        name_of: Callable[[str], str],
        kind_of: Callable[[type], type] = lambda kind: kind,
    ) -> Any:
        self._cache._check_client(client)
        aliases = check_using(options.pop("using", None))
        if aliases and client is not None:
            raise ValueError("give either using or client: both say where the lock is")
        several = isinstance(key, (list, tuple, set, frozenset))
        if aliases and several:
            raise ValueError("several names are for a lock on one server: leave using out")
        self._choose_policy(options)
        if options.get("replicas") is None:
            # A lock on several servers needs none.
            options["replicas"] = 0 if aliases else self._conf.REPLICAS
        if timeout is SETTING:
            timeout = self._conf.TIMEOUT
            options.setdefault("renew", True)
        options.setdefault("grant_timeout", self._conf.GRANT_TIMEOUT)

        def client_of(cache: Any) -> Any:
            found = cache._lock_client()
            return transport.asyncio_client(found) if asynchronous else found

        if aliases:
            client = [client_of(self._cache_of(alias)) for alias in aliases]
        kind = _lock_class(asynchronous, bool(aliases))
        client = client or client_of(self._cache)
        if not several:
            name = check_name_in_cache(key)
            return self.configured(kind_of(kind)(client, name_of(name), timeout, **options), name)
        parts = part("several_names")
        names = {name_of(check_name_in_cache(each)): each for each in parts.check_names(key)}
        multi = kind_of(parts.AsyncMultiLock if asynchronous else parts.MultiLock)
        lock = multi(client, names, timeout, lock_class=kind, **options)
        for member in lock.members:
            self.configured(member, names[member.name])
        return self.configured(lock, ", ".join(names[name] for name in lock.name))

    def _choose_policy(self, options: dict[str, object]) -> None:
        given, critical = options.pop("on_redis_down", None), options.pop("critical", False)
        if given is not None or critical is not False:
            check_policy(given, critical)
        policy = "raise" if critical else given or self._conf.ON_REDIS_DOWN
        if policy != "raise":
            options.update(on_redis_down=policy, local_folder=self._conf.LOCAL_LOCK_FOLDER)

    def configured(self, lock: Any, key: str) -> Any:
        lock.cache, lock.cache_key = self._cache, key
        if not self._cache._has_plain_keys:
            lock.stored_name = key
        if lock.warn_after is None:
            longest = longest_hold(lock.renew, lock.timeout, lock.max_hold)
            lock.warns_after = self._conf.warn_after(longest)
        return lock


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


#: python-redis-lock's names: raised when a lock object acquires a lock that it already holds
#: without a timeout, and when a lock that is not held is released or extended.
AlreadyAcquired = NotAcquired = LockError


# -- for tasks whose keys are made in another thread ----------------------------------------------


def named_later(make: Callable[..., Any], name_of: Callable[[str], str]) -> AsyncLock:
    """A lock for tasks whose key is made in Django's thread when the lock is first used; until then
    its ``name`` is that which the caller gave.

    Args:
        make: makes the lock, given what makes a key of a name, and what makes its class of the
            usual one.
        name_of: makes a key of a name.
    """
    names: list[str] = []

    def note(name: str) -> str:
        names.append(name)
        return name

    lock: Any = make(note, _named_later)
    lock._make, lock._keys = make, lambda: {name: name_of(name) for name in names}
    named: AsyncLock = lock
    return named


@cache
def _named_later(kind: type[AsyncLock]) -> type[AsyncLock]:
    """``kind``, whose methods first see to the lock's key."""

    def named(method: Callable[..., object]) -> Callable[..., object]:
        @wraps(method)
        def call(self: object, *args: object, **options: object) -> Any:
            return after(self, method(self, *args, **options))

        return call

    async def after(lock: Any, call: Any) -> Any:
        try:
            await lock.named()
        except BaseException:
            call.close()
            raise
        return await call

    methods = inspect.getmembers(kind, iscoroutinefunction)
    public = {name: named(method) for name, method in methods if not name.startswith("_")}
    return type(kind.__name__, (kind,), {**public, "named": _named, "__module__": kind.__module__})


async def _named(lock: Any) -> None:
    if lock._make is None:
        return
    keys = await sync_to_async(lock._keys)()
    if lock._make is not None:  # Another task may have been quicker.
        states, right = lock._states, lock._make(keys.__getitem__)
        vars(lock).update(vars(right), _make=None, _states=states)
