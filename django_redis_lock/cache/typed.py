"""Types for type checkers. Nothing imports this module when it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, overload

from ..conf import Timeout
from ..locking import LockOperations
from .get_or_set import GetOrSet

if TYPE_CHECKING:
    from typing_extensions import Unpack

T = TypeVar("T")


class GetOrSetManyArguments(TypedDict, total=False):
    """The options of ``RedisCache.get_or_set_many``, explained at ``get_or_set``."""

    wait: float
    on_wait_timeout: Literal["compute", "raise", "default"]
    jitter: float
    error_ttl: float
    group: str | None


class GetOrSetArguments(GetOrSetManyArguments, total=False):
    """The options of ``RedisCache.get_or_set``, explained there."""

    stale: float
    background: bool
    soft_timeout: float | None


class LockArguments(TypedDict, total=False):
    """The options of ``cache.lock()`` that are not arguments of it, explained there and at
    ``Lock``."""

    using: Sequence[str] | None
    on_redis_down: Literal["raise", "local", "run"] | None
    critical: bool
    replicas: int | None
    limit: int
    renew: bool
    max_hold: float | None
    min_hold: float
    on_lost: Callable[[], object] | None
    label: str | None
    group: str | None
    warn_after: float | None
    id: str | bytes | None
    grant_timeout: float
    reentrant: bool
    raise_on_release_error: bool


class AsyncLockArguments(LockArguments, total=False):
    """The options of ``cache.alock()``."""

    sleep: float
    blocking: bool
    blocking_timeout: float | None
    thread_local: bool
    cancel_on_lost: bool


class CurrentLock(LockOperations):
    """What ``current_lock()`` returns: a ``Lock``, or in coroutines an ``AsyncLock``, of which
    these methods are awaited."""

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Any:
        """See ``Lock.extend``."""

    def reacquire(self) -> Any:
        """See ``Lock.reacquire``."""

    def ttl(self) -> Any:
        """See ``Lock.ttl``."""

    def owned(self) -> Any:
        """See ``Lock.owned``."""

    def holder(self) -> Any:
        """See ``Lock.holder``."""

    def held(self) -> Any:
        """See ``Lock.held``."""

    def holders(self) -> Any:
        """See ``Lock.holders``."""


class TypedValues(GetOrSet):
    """The results are of the type of what ``default`` returns."""

    @overload
    def get_or_set(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    def get_or_set(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    def get_or_set(self, *args: object, **options: object) -> Any: ...

    @overload
    async def aget_or_set(
        self,
        key: str,
        default: Callable[[], Awaitable[T]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    async def aget_or_set(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    async def aget_or_set(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    async def aget_or_set(self, *args: object, **options: object) -> Any: ...

    @overload
    def compute(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    def compute(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    def compute(self, *args: object, **options: object) -> Any: ...

    @overload
    async def acompute(
        self,
        key: str,
        default: Callable[[], Awaitable[T]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    async def acompute(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    async def acompute(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    async def acompute(self, *args: object, **options: object) -> Any: ...

    def get_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, T]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, T]:
        raise NotImplementedError

    @overload
    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Awaitable[Mapping[str, T]]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, T]: ...
    @overload
    async def aget_or_set_many(
        self,
        keys: Iterable[str],
        default_many: Callable[[list[str]], Mapping[str, T]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetManyArguments],
    ) -> dict[str, T]: ...
    async def aget_or_set_many(self, *args: object, **options: object) -> Any: ...
