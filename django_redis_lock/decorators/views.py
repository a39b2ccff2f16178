"""Which calls of a locked function are those of a view: only then the caller sends a response on.
Elsewhere a response would be a value, and true. And what the lock of a function would not protect.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncContextDecorator, ContextDecorator
from threading import Thread
from typing import Any

from django.urls import get_urlconf
from django.views import View

from .key_template import Args, Kwargs, bound_method

#: What other decorators make a function return: a block for ``with``, work in the background.
_RUN_LATER = (ContextDecorator, AsyncContextDecorator, Thread, Future)
#: Attributes of what ``locked()``, and what ``cached()`` and ``cached_page()`` return. As all
#: attributes, they are copied to what other decorators put around it.
LOCKED, STORED = "_redis_lock_is_taken", "_redis_lock_value_is_stored"


def is_locked_above_its_values(function: Any) -> bool:
    """Whether ``locked()`` is around ``cached()`` or ``cached_page()`` in ``function``."""
    while function is not None:
        within = getattr(function, "__wrapped__", None)
        # A list of decorators, for Django's method_decorator, is one layer, the innermost first.
        layer = [name for name in vars(function) if name in (LOCKED, STORED)]
        if LOCKED in layer and not hasattr(within, LOCKED):
            methods = getattr(getattr(function, "view_class", None), "http_method_names", ())
            handlers = [getattr(function.view_class, name, None) for name in methods]
            stored = any(hasattr(each, STORED) for each in (within, *handlers))
            return stored or layer == [STORED, LOCKED]
        function = within
    return False


def refuse_object(target: object) -> None:
    """
    Raises:
        TypeError: ``target`` is what another decorator made of a function, so a lock around it
            would not be held while the function runs.
    """
    if isinstance(target, functools.partial):
        return refuse_object(target.func)
    if not (inspect.isroutine(target) or isinstance(target, type(functools.cache(complete)))):
        raise TypeError(
            f"{target!r} is what another decorator made of a function, and the lock would not be "
            "held while that runs: put @locked directly above the function, below the other "
            "decorators. For an object that runs its code when called: locked(...)(it.__call__)"
        )


def complete(result: object, dotted: str) -> object:
    """``result``. Raises TypeError if some of what the function ``dotted`` has returned has yet to
    run, when its lock is released."""
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        instead = 'return a list, or take the lock inside the generator: with locked("name")'
    elif inspect.isawaitable(result):
        instead = "make it a coroutine function, or mark it: asgiref.sync.markcoroutinefunction"
    elif isinstance(result, _RUN_LATER):
        instead = 'take the lock inside of what runs later: with locked("name")'
    else:
        return result
    if _is_over(result):
        return result
    if inspect.iscoroutine(result):
        result.close()
    kind = type(result).__name__.strip("_").removeprefix("async_")
    returned = f"{dotted} returned a {kind}, which would run after the lock's release"
    raise TypeError(f"{returned}: {instead}")


def _is_over(result: object) -> bool:
    if isinstance(result, Thread):
        return result.ident is not None and not result.is_alive()
    return bool(hasattr(result, "done") and result.done())


def sends_on(locked: object, function: object, args: Args, kwargs: Kwargs, request: Any) -> bool:
    """Whether Django sends on what this call returns: ``locked``, made from ``function``, is what
    the URL of the request leads to, or a method to which that class of views dispatches. Where
    Django's handler knows nothing of the request, as in a test, whatever takes it first is."""
    match = getattr(request, "resolver_match", None)
    if match is None and get_urlconf() is not None:
        return False  # Django's handler has yet to resolve it, for a middleware.
    view = view_of(function, args)
    if view is not None:
        kinds = [getattr(match and match.func, name, None) for name in ("view_class", "cls")]
        return (match is None or type(view) in kinds) and _is_handler(view, function, request)
    if match is None:
        if bound_method(function) is not None:
            return False
        return args[0] is request if args else "sender" not in kwargs  # Of a signal.
    return any(vars(layer).get(LOCKED) is locked for layer in layers(match.func))


def layers(view: Any) -> Iterator[Any]:
    """``view``, and what it calls as far as Python's own attributes say so."""
    while view is not None:
        view = getattr(view, "__func__", view)
        if isinstance(view, functools.partial):
            yield view
            view = getattr(view, "__wrapped__", view.func)
        elif inspect.isfunction(view):
            yield view
            view = getattr(view, "__wrapped__", None)
        elif callable(view) and not inspect.isroutine(view):
            view = type(view).__call__
        else:
            return


def takes_request(function: Callable[..., object]) -> bool:
    """Whether this is a function or method with a request among its first two arguments."""
    return "request" in _first_arguments(function)


def view_of(function: object, args: Args) -> View | None:
    """The instance of a class of views of which ``function``, called with ``args``, is a method."""
    method = bound_method(function)
    first = next(iter(args), None) if method is None else method.__self__
    return first if isinstance(first, View) else None


def is_api_view(kind: object) -> bool:
    """Whether ``kind`` is a view class of Django REST framework."""
    module = sys.modules.get("rest_framework.views")
    return module is not None and isinstance(kind, type) and issubclass(kind, module.APIView)


def is_dispatch(function: object) -> bool:
    method = bound_method(function)
    if method is not None:
        return method.__name__ == "dispatch" and isinstance(method.__self__, View)
    return getattr(function, "__name__", "") == "dispatch" and inspect.isfunction(function)


def _is_handler(view: View, function: object, request: Any) -> bool:
    """Whether ``function`` is a method of ``view`` that gets requests, and answers."""
    method = bound_method(function)
    name = getattr(function if method is None else method, "__name__", "")
    chosen = getattr(view, (request.method or "").lower(), None)  # Perhaps an action of a view set.
    return name in {"dispatch", getattr(chosen, "__name__", ""), *view.http_method_names}


def _first_arguments(function: Callable[..., object]) -> list[str]:
    try:
        return [*inspect.signature(bound_method(function) or function).parameters][:2]
    except (TypeError, ValueError):  # Of a function in C they may be unknown.
        return []
