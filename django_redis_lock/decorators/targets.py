"""What can be decorated: one table for ``locked()``, ``cached()``, ``cached_page()``,
``idempotent()`` and ``unique_task()``."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Final

from django.core.management.base import BaseCommand
from django.urls import get_urlconf
from django.views import View

#: Attributes of what ``locked()``, and what ``cached()`` and ``cached_page()`` return. As all
#: attributes, they are copied to what other decorators put around it.
LOCKED, STORED = "_redis_lock_is_taken", "_redis_lock_value_is_stored"

# The kinds of targets.
FUNCTION: Final = "function, coroutine function, method"
STATIC: Final = "static method"
CLASS_METHOD: Final = "class method"
PARTIAL: Final = "partial"
OBJECT: Final = "object that is called"
GENERATOR: Final = "generator function"
VIEWS: Final = "class of views"
API_VIEWS: Final = "class of views of Django REST framework"
COMMAND: Final = "class of a management command"
CLASS: Final = "other class"
CELERY_TASK: Final = "Celery task"
SHARED_TASK: Final = "shared task of Celery"
DJANGO_TASK: Final = "task of Django"
OTHER: Final = "what cannot be called"

#: Which decorators take a target of each kind.
TAKEN_BY: Final[dict[str, set[str]]] = {
    FUNCTION: {"locked", "cached", "cached_page", "idempotent"},
    STATIC: {"locked", "cached", "cached_page", "idempotent"},
    CLASS_METHOD: {"locked", "cached", "idempotent"},
    PARTIAL: {"locked", "cached_page", "idempotent"},
    OBJECT: {"cached_page", "idempotent"},
    GENERATOR: set(),
    VIEWS: {"locked", "idempotent"},
    API_VIEWS: {"locked", "idempotent"},
    COMMAND: {"locked"},
    CLASS: set(),
    CELERY_TASK: {"locked", "unique_task"},
    SHARED_TASK: {"unique_task"},
    DJANGO_TASK: {"locked", "unique_task"},
    OTHER: set(),
}
_DECORATES: Final = {
    "locked": "functions, views, management commands and tasks",
    "cached": "functions",
    "cached_page": "views",
    "idempotent": "views",
    "unique_task": "tasks",
}
_BY_METHOD: Final = 'write @method_decorator(cached_page(300), name="dispatch")'
_NEXT_TO_IT: Final = "put it directly above the function, below the decorator that makes the task"
#: What to write instead, by decorator and kind, or for all decorators.
_INSTEAD: Final[dict[str | tuple[str, str], str]] = {
    ("locked", GENERATOR): (
        "a call returns a generator, which would run after the release of the lock. Take the lock "
        'inside: with locked("name")'
    ),
    ("cached", GENERATOR): "its generators cannot be stored: they can be read only once",
    GENERATOR: "a call returns a generator",
    ("locked", OBJECT): (
        "it is what another decorator made of a function, and the lock would not be held while "
        "that runs: put @locked directly above the function, below the other decorators. For an "
        "object that runs its code when called: locked(...)(it.__call__)"
    ),
    ("cached", OBJECT): "decorate a function that calls it, with what it depends on as arguments",
    ("cached", PARTIAL): "no key names its arguments; decorate a function that calls it",
    ("cached_page", VIEWS): _BY_METHOD,
    ("cached_page", API_VIEWS): _BY_METHOD,
    ("cached_page", CLASS_METHOD): "its first argument is no request",
    ("locked", CLASS): "decorate its methods",
    ("cached", CLASS): "decorate its methods",
    ("locked", SHARED_TASK): (
        "each Celery app has its own copy of a shared task, and this would decorate only one: put "
        "@locked below @shared_task, next to the function"
    ),
    ("cached", CELERY_TASK): _NEXT_TO_IT,
    ("cached", SHARED_TASK): _NEXT_TO_IT,
    ("cached", DJANGO_TASK): _NEXT_TO_IT,
    ("unique_task", FUNCTION): "put it above @shared_task, @app.task or @task",
    ("locked", OTHER): (
        'of a lock it takes the name, and its other options by name: @locked("name", timeout=30)'
    ),
}


class Target:
    """What ``decorator`` is to decorate.

    Args:
        decorator: its name, of TAKEN_BY.
        given: any object.

    Attributes:
        kind: a key of TAKEN_BY.
        dotted: the dotted name, of a class or task as well as of a function.

    Raises:
        TypeError: the decorator does not take it; says what to write instead.
    """

    def __init__(self, decorator: str, given: Any) -> None:
        self.decorator, self.given = decorator, given
        self.kind = _kind(given)
        if decorator not in TAKEN_BY[self.kind]:
            words = f"{decorator}() decorates {_DECORATES[decorator]}, not {_shown(given)}"
            instead = _INSTEAD.get((decorator, self.kind)) or _INSTEAD.get(self.kind)
            raise TypeError(f"{words}: {instead}" if instead else words)
        #: What runs, of one that is no class and no task.
        self.function = given.__func__ if self.kind in (STATIC, CLASS_METHOD) else given

    @functools.cached_property
    def dotted(self) -> str:
        return _dotted(self.function)

    def check_named(self, key: object) -> None:
        """
        Raises:
            TypeError: no key was given, and others have the same dotted name.
        """
        function = self.function
        of_its_own = not isinstance(function, functools.partial) or bound_method(function)
        if key is None and (not of_its_own or self.dotted.endswith("<lambda>")):
            raise TypeError(f"{self.given!r} has no dotted name of its own: give a key")

    def wrap(self, make: Callable[[Any, str], Any], dotted: str = "") -> Any:
        """The target with ``make(function, dotted)`` in place of the function that runs. Of a class
        or a task that is a method, as if the decorator stood there; the dotted name is then that of
        the class."""
        given = self.given
        dotted = dotted or (self.dotted if isinstance(given, type) else "")

        def within(function: object) -> Any:
            return Target(self.decorator, function).wrap(make, dotted)

        if self.kind in (STATIC, CLASS_METHOD):
            return type(given)(within(given.__func__))
        if self.kind == COMMAND:
            given.handle = within(given.handle)
        elif self.kind == VIEWS:
            given.dispatch = within(given.dispatch)
        elif self.kind == API_VIEWS:
            _around_handlers(given, lambda handle: make(handle, dotted))
        elif self.kind == CELERY_TASK:
            given.run = within(given.run)
        elif self.kind == DJANGO_TASK:
            # The worker looks a task up by the dotted name of its function, which is unchanged.
            return dataclasses.replace(given, func=within(given.func))
        else:
            return make(given, dotted or self.dotted)
        return given


def _kind(given: Any) -> str:
    local = sys.modules.get("celery.local")
    if local is not None and type(given) is local.Proxy:  # Not evaluated: that would need the app.
        return SHARED_TASK
    if isinstance(given, type):
        if issubclass(given, BaseCommand):
            return COMMAND
        if is_api_view(given):
            return API_VIEWS
        return VIEWS if issubclass(given, View) else CLASS
    for type_, kind in ((staticmethod, STATIC), (classmethod, CLASS_METHOD)):
        if isinstance(given, type_):
            return kind
    for kind, module, name in _TASKS:
        made_by = getattr(sys.modules.get(module), name, None)
        if made_by is not None and isinstance(given, made_by):
            return kind
    if not callable(given):
        return OTHER
    if any(map(_is_generator, (given, type(given).__call__))):
        return GENERATOR
    # What method_decorator makes of a method has its name.
    if isinstance(given, functools.partial) and not hasattr(given, "__wrapped__"):
        return PARTIAL if _kind(given.func) in (FUNCTION, PARTIAL) else OBJECT
    if bound_method(given) is not None or inspect.isroutine(given) or isinstance(given, _CACHE):
        return FUNCTION
    return OBJECT


#: The classes of tasks; the last is of a backport.
_TASKS = (
    (CELERY_TASK, "celery.app.task", "Task"),
    (DJANGO_TASK, "django.tasks.base", "Task"),
    (DJANGO_TASK, "django_tasks.base", "Task"),
)
_CACHE = type(functools.cache(_kind))


def _is_generator(function: object) -> bool:
    return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)


def _shown(given: object) -> str:
    return "a shared task" if _kind(given) == SHARED_TASK else repr(given)


def _dotted(given: Any) -> str:
    method = bound_method(given)
    if method is not None:  # From method_decorator; may be inherited from Django's View.
        kind = type(method.__self__)
        return f"{kind.__module__}.{kind.__qualname__}.{method.__name__}"
    while isinstance(given, functools.partial):
        given = given.func
    named = given if hasattr(given, "__qualname__") else type(given)
    return f"{named.__module__}.{named.__qualname__}"


def bound_method(function: object) -> MethodType | None:
    """The bound method, with the signature of the call, that Django's ``method_decorator`` has made
    into ``function``."""
    while function is not None:
        if isinstance(function, functools.partial) and inspect.ismethod(function.func):
            return function.func
        function = getattr(function, "__wrapped__", None)
    return None


# -- views -----------------------------------------------------------------------------------------


def view_of(function: object, args: tuple[object, ...]) -> View | None:
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


#: An attribute of the views of Django REST framework: their handlers, by what is around them.
_HANDLERS = "_redis_lock_handlers"


def _around_handlers(target: Any, make: Callable[[Any], Any]) -> None:
    """Wrap the handlers (``get``, ``post`` or an action) of a class of views: by then the user is
    authenticated, and a request that is not permitted takes no lock."""
    initial = target.initial

    def handle(self: Any, request: object, *args: object, **kwargs: object) -> object:
        return vars(self)[_HANDLERS][handle](request, *args, **kwargs)

    wrapped = make(handle)

    @functools.wraps(initial)
    def then(self: Any, request: Any, *args: object, **kwargs: object) -> None:
        initial(self, request, *args, **kwargs)
        method = request.method.lower()
        if method in self.http_method_names and method != "options" and hasattr(self, method):
            # A base class, or another decorator, may wrap them, too.
            vars(self).setdefault(_HANDLERS, {})[handle] = getattr(self, method)
            setattr(self, method, functools.partial(wrapped, self))

    target.initial = then


# -- who gets a response ---------------------------------------------------------------------------
#
# When a lock is taken, or cannot be requested, who is known to send a response on gets one;
# elsewhere it would be a value, and true. Everybody else gets an exception, and
# ``RefusalMiddleware`` makes the same response of one that reaches Django.


def sends_on(locked: object, function: object, args: Any, kwargs: Any, request: Any) -> bool:
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


def _is_handler(view: View, function: object, request: Any) -> bool:
    """Whether ``function`` is a method of ``view`` that gets requests, and answers."""
    method = bound_method(function)
    name = getattr(function if method is None else method, "__name__", "")
    chosen = getattr(view, (request.method or "").lower(), None)  # Perhaps an action of a view set.
    return name in {"dispatch", getattr(chosen, "__name__", ""), *view.http_method_names}


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


def first_arguments(function: Callable[..., object]) -> list[str] | None:
    """The names of two at most; None if they are unknown, as those of a function in C may be."""
    try:
        return [*inspect.signature(bound_method(function) or function).parameters][:2]
    except (TypeError, ValueError):
        return None
