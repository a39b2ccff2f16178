"""A lock that is taken, or that cannot be requested, as an exception that becomes a response.

Who is known to send a response on gets one (``views.sends_on``); everybody else gets an exception,
and ``RefusalMiddleware`` makes the same response of one that reaches Django.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.utils.deprecation import MiddlewareMixin

from ..contention import Conflict, service_unavailable
from ..exceptions import LockNotAcquired
from ..transport.refusals import is_unusable
from .views import is_api_view

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

#: Attributes of errors.
_STATUS, _OUTAGE = "_redis_lock_status", "_redis_lock_outage"


def with_status(error: LockNotAcquired, status_code: int) -> LockNotAcquired:
    """``error``, for a call that has its own ``status_code``."""
    setattr(error, _STATUS, status_code)
    return error


def note_outage(error: Exception, name: str, retry_after: float | None) -> None:
    """``locked()`` has run nothing, because of ``error``."""
    setattr(error, _OUTAGE, (name, retry_after))


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
            status_code: int = getattr(exception, _STATUS, 409)
            return conflict.response(request, status_code, json=json)
        if hasattr(exception, _OUTAGE) and is_unusable(exception):
            name, retry_after = getattr(exception, _OUTAGE)
            return service_unavailable(request, name, exception, retry_after, json)
        return None
