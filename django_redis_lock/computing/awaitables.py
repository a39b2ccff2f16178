"""Callables for a running event loop."""

from __future__ import annotations

import inspect
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async

__all__ = ["awaitable"]


def awaitable(function: Any) -> Any:
    """``function`` so that calling it does not block the event loop."""
    if not callable(function) or any(
        is_coroutine(code)
        for is_coroutine in (inspect.iscoroutinefunction, iscoroutinefunction)
        for code in (function, type(function).__call__)
    ):
        return function
    return sync_to_async(function, thread_sensitive=True)
