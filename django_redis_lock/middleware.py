"""The middleware: whole pages, the answers of locks that are taken, and for which request a lock is
held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponseBase
from django.utils.decorators import sync_and_async_middleware

from .activity import RequestActivity, doing, note_tasks
from .extension import on_first_use

if TYPE_CHECKING:
    from .contrib.pages import CachedPageMiddleware
    from .decorators.refusals import RefusalMiddleware

__all__ = [
    "CachedPageMiddleware",
    "RefusalMiddleware",
    "RequestActivity",
    "doing",
    "note_request",
    "note_tasks",
]


@sync_and_async_middleware
def note_request(get_response: Callable[[HttpRequest], Any]) -> Callable[[HttpRequest], Any]:
    """A middleware: the description of a lock's holder says for which request it was acquired.
    Views with ``locked()`` do not need it."""
    if iscoroutinefunction(get_response):

        async def acall(request: HttpRequest) -> HttpResponseBase:
            with doing(RequestActivity(request)):
                response: HttpResponseBase = await get_response(request)
                return response

        return acall

    def call(request: HttpRequest) -> HttpResponseBase:
        with doing(RequestActivity(request)):
            response: HttpResponseBase = get_response(request)
            return response

    return call


__getattr__ = on_first_use(
    __name__,
    {"contrib.pages": "CachedPageMiddleware", "decorators.refusals": "RefusalMiddleware"},
)
