"""Caches for whole pages, requests for them, and who waits for one."""

from __future__ import annotations

import asyncio
from typing import Any

from django.core.cache import cache
from django.http import HttpRequest
from django.test import RequestFactory

from tests.processes import waiting_in

MEMORY = {"BACKEND": "django_redis_lock.cache.LocMemCache", "LOCATION": "pages"}
PLAIN = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache", "LOCATION": "plain pages"}


def ask(path: str = "/page/", method: str = "get", **headers: str) -> HttpRequest:
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    request: HttpRequest = getattr(RequestFactory(), method)(path, headers=given)
    return request


def finished(response: Any) -> Any:
    """``response``, awaited and rendered, as Django's handlers do."""
    if asyncio.iscoroutine(response):
        response = asyncio.run(response)
    return response.render() if hasattr(response, "render") else response


def expire_pages() -> None:
    """Make pages with ``stale=1000`` stale, as time would."""
    for key in cache.keys("*cache_page.*.GET.*"):
        assert cache.expire(key, 999)


def followers() -> int:
    return waiting_in("django_redis_lock.singleflight.runners")
