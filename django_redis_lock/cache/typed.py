"""``RedisCache`` as type checkers know it. Nothing imports this module when it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

from ..conf import Timeout
from . import backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import GetOrSetArguments, GetOrSetManyArguments

T = TypeVar("T")


class Computes(Protocol):
    """The result is of the type of what ``default`` returns."""

    @overload
    def __call__(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...
    @overload
    def __call__(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> T: ...


class AsyncComputes(Protocol):
    """The same for tasks."""

    @overload
    def __call__(
        self,
        key: str,
        default: Callable[[], Awaitable[T]],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        key: str,
        default: Callable[[], T],
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> Coroutine[Any, Any, T]: ...
    @overload
    def __call__(
        self,
        key: str,
        default: T,
        timeout: Timeout = ...,
        version: int | None = ...,
        **options: Unpack[GetOrSetArguments],
    ) -> Coroutine[Any, Any, T]: ...


class RedisCache(backend.RedisCache):
    get_or_set: Computes
    compute: Computes
    aget_or_set: AsyncComputes
    acompute: AsyncComputes

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
