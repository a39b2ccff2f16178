"""The middleware: whole pages, the answers of locks that are taken, and for which request a lock is
held."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware
from django.utils.deprecation import MiddlewareMixin

from .activity import RequestActivity, doing, note_tasks
from .contention import OUTAGE, REFUSED_STATUS, Conflict, service_unavailable
from .decorators.targets import is_api_view
from .exceptions import LockNotAcquired
from .extension import on_first_use
from .transport.refusals import is_unusable

if TYPE_CHECKING:
    from .contrib.pages import CachedPageMiddleware

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

        async def acall(request: HttpRequest) -> Any:
            with doing(RequestActivity(request)):
                return await get_response(request)

        return acall

    def call(request: HttpRequest) -> Any:
        with doing(RequestActivity(request)):
            return get_response(request)

    return call


class RefusalMiddleware(MiddlewareMixin):
    """Answers 409 with ``Retry-After`` if a view raises ``LockNotAcquired``, and 503 if it raises
    what ``locked()`` raises while Redis is down: HTML or JSON, as the client prefers.

    A view with ``locked()`` does not need it; what a view calls does, and what other packages call
    with a request: functions of Django REST framework and Django Ninja, actions of the admin.
    """

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        match = request.resolver_match
        json = match is not None and is_api_view(getattr(match.func, "cls", None))
        if isinstance(exception, LockNotAcquired) and exception.retry_after is not None:
            wait = exception.retry_after  # Not that of get_or_set(), which has none.
            conflict = Conflict.of(str(exception.lock_name), None, retry_after=wait)
            status_code: int = getattr(exception, REFUSED_STATUS, 409)
            return conflict.response(request, status_code, json=json)
        if hasattr(exception, OUTAGE) and is_unusable(exception):
            name, retry_after = getattr(exception, OUTAGE)
            return service_unavailable(request, name, exception, retry_after, json)
        return None


__getattr__ = on_first_use(__name__, {"contrib.pages": "CachedPageMiddleware"})
