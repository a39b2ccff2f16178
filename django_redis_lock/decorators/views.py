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
from weakref import getweakrefcount

from django.urls import get_urlconf
from django.views import View

from ..middleware import request_of
from .key_template import Args, Kwargs, bound_method
from .options import EXIT_CODES, MISSING, Options

#: Methods that Django and Django REST framework call with a request, and whose result they take for
#: true or false, for a user, or for nothing.
HOOKS = frozenset(
    (
        *("has_permission", "has_object_permission", "allow_request"),
        *("authenticate", "aauthenticate"),
        *("has_add_permission", "has_change_permission", "has_delete_permission"),
        *("has_view_permission", "has_module_permission"),
        *("save_model", "delete_model", "delete_queryset"),
        *("save_form", "save_formset", "save_related"),
        *("log_addition", "log_change", "log_deletion", "log_deletions", "get_queryset"),
        *("process_request", "process_response", "process_view", "process_exception"),
        "process_template_response",
    )
)
#: Methods whose response the class that has them sends on: of the admin, of Django REST framework.
_OF_ADMIN = frozenset(
    (
        *("add_view", "change_view", "changeform_view", "changelist_view", "delete_view"),
        *("history_view", "render_change_form", "render_delete_form"),
        *("response_action", "response_add", "response_change", "response_delete"),
    )
)
_OF_REST = {"list", "create", "retrieve", "update", "partial_update", "destroy"}
#: What other decorators make a function return: a block for ``with``, work in the background.
_RUN_LATER = (ContextDecorator, AsyncContextDecorator, Thread, Future)
#: What task queues add to a function that they decorate.
_OF_TASKS = ("delay", "apply_async", "enqueue", "send", "defer", "schedule")

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


def refuse_hook(options: Options, function: Callable[..., object], dotted: str) -> None:
    """
    Raises:
        TypeError: ``function`` is a known hook, and the options do not say what it returns if the
            lock is taken; or it takes a request, and they are for commands.
    """
    name = getattr(function, "__name__", "") or ""
    if "request" in _first_arguments(function):
        options.refuse("a view", *EXIT_CODES)
    if name not in HOOKS or not _takes_request(function):
        return
    if options.default is not MISSING:
        return
    if options.on_conflict is None or hasattr(options.on_conflict, "status_of_response"):
        raise TypeError(
            f"Django does not send on what {dotted} returns, so a response would count as true, or "
            "be lost: give default=, or an on_conflict= that returns what the method may return, "
            "such as django_redis_lock.contention.raise_error"
        )


def refuse_object(target: object) -> None:
    """
    Raises:
        TypeError: ``target`` is what another decorator made of a function, so a lock around it
            would not be held while the function runs.
    """
    if isinstance(target, functools.partial):
        return refuse_object(target.func)
    kinds = (inspect.isroutine, lambda made: isinstance(made, type(functools.cache(_is_handler))))
    by_queue = [name for name in _OF_TASKS if callable(getattr(target, name, None))]
    if by_queue or hasattr(target, "_ninja_operation") or not any(is_(target) for is_ in kinds):
        raise TypeError(
            f"{target!r} is what another decorator made of a function, and the lock would not be "
            "held while that runs: put @locked directly above the function, below the other "
            "decorators. For an object that runs its code when called: locked(...)(it.__call__)"
        )
    # As Django's signals refer to their receivers, and its template libraries name their filters.
    if inspect.isfunction(target) and (getweakrefcount(target) or hasattr(target, "_filter_name")):
        raise TypeError(
            f"another decorator has registered {target!r}, and would call it without the lock: put "
            "@locked directly above the function, below @receiver(...) and the like"
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


def is_view(function: object, args: Args, kwargs: Kwargs) -> bool:
    """Whether the caller of ``function`` with these arguments, among them a request, sends on a
    response: it is the handler of a class of views, an action of the admin, or what the request's
    URL leads to. Without a URL, as in a test: a function that takes the request first."""
    method = bound_method(function)
    name = getattr(function if method is None else method, "__name__", "")
    view = view_of(function, args)
    if view is not None:
        return _is_handler(view, name)
    first = next(iter(args), None) if method is None else method.__self__
    request = request_of(args, kwargs)
    admin = sys.modules.get("django.contrib.admin.options")
    if (
        admin is not None
        and isinstance(first, admin.BaseModelAdmin)
        and (name in _OF_ADMIN or _is_action(first, function, request))
    ):
        return True
    match = getattr(request, "resolver_match", None)
    if match is None:
        return (
            get_urlconf() is None  # Else Django's handler has yet to resolve it, for a middleware.
            and method is None
            and (first is request or (first is None and "sender" not in kwargs))
            and name not in HOOKS
        )
    plain = getattr(function, "__func__", function)
    if any(each is plain for each in _unwrapped(match.func)):
        return True
    view = (getattr(request, "parser_context", None) or {}).get("view")  # Of @api_view.
    made = type(view)
    return view is not None and (made.__module__, made.__name__) == (plain.__module__, name)


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


def _is_handler(view: View, name: str) -> bool:
    handlers = {"dispatch", getattr(view, "action", None), *view.http_method_names}
    if is_api_view(type(view)):
        handlers |= _OF_REST
    return name in handlers or name in (getattr(view, "action_map", None) or {}).values()


def _is_action(model_admin: Any, function: object, request: Any) -> bool:
    """Whether the user of the admin has chosen this action. It may be registered by another name,
    and a page with two menus sends the choice of both."""
    chosen = request.POST.getlist("action")
    actions = model_admin.get_actions(request) if chosen else {}
    called = (call for name, (call, *_) in actions.items() if name in chosen)
    return any(each is function for call in called for each in _unwrapped(call))


def _takes_request(function: Callable[..., object]) -> bool:
    """Whether this is a method with a request as its first argument."""
    names = _first_arguments(function)
    return "request" in (names[:1] if bound_method(function) else names[1:])


def _first_arguments(function: Callable[..., object]) -> list[str]:
    try:
        return [*inspect.signature(bound_method(function) or function).parameters][:2]
    except (TypeError, ValueError):  # Of a function in C they may be unknown.
        return []


def _unwrapped(callback: object) -> Iterator[object]:
    """``callback`` and what it calls, as far as decorators say so."""
    seen: list[object] = []
    left = [callback]
    while left and len(seen) < 100:
        each = left.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        yield each
        left += [getattr(each, name, None) for name in ("__wrapped__", "__func__")]
        if isinstance(each, functools.partial):
            left.append(each.func)
        if not inspect.isroutine(each) and not isinstance(each, type):
            left.append(type(each).__call__)
        if getattr(each, "__module__", "") == "ninja.operation":
            left += _operations(each)


def _operations(view: object) -> Iterator[object]:
    """The functions of a path of Django Ninja, whose view refers to them in its closure."""
    for cell in getattr(view, "__closure__", None) or ():
        for operation in getattr(cell.cell_contents, "operations", ()):
            yield operation.view_func
