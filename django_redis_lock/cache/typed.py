"""``RedisCache`` as type checkers know it. Nothing imports this module when it runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ..conf import Timeout
from . import backend

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import GetOrSetArguments, GetOrSetManyArguments

T = TypeVar("T")


class RedisCache(backend.RedisCache):
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
