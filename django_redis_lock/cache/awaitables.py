"""Callables for a running event loop."""

from __future__ import annotations

import inspect
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async

from ..singleflight import DeferredCall

__all__ = ["awaitable"]


def awaitable(function: Any) -> Any:
    """``function`` so that calling it does not block the event loop."""
    if not callable(function) or any(
        is_coroutine(code)
        for is_coroutine in (inspect.iscoroutinefunction, iscoroutinefunction)
        for code in (function, type(function).__call__)
    ):
        return function
    return DeferredCall(function, sync_to_async)
