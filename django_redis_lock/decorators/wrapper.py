"""What ``locked()`` puts around a function, and all such wrappers that this process knows."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import (
    AbstractContextManager,
    AsyncContextDecorator,
    ContextDecorator,
    nullcontext,
)
from threading import Thread
from typing import Any

from asgiref.sync import sync_to_async
from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..activity import RequestActivity, doing, request_of
from ..conf import Conf
from ..contention import (
    RETRY_ONLY_CELERY,
    Conflict,
    of_this_moment,
    retry_task,
    service_unavailable,
    skip,
    unavailable,
)
from ..events import as_group
from ..exceptions import LockError
from ..locking import unwinding
from ..threads import is_async
from ..transport import is_outage
from ..transport.refusals import is_unusable
from .key_template import Args, Kwargs, Template, made_for_task, names_of
from .on_lost import CommandTerminator
from .options import EXIT_CODES, MISSING, Options
from .refusals import sends_on, takes_request, with_status
from .section import PLAIN_FUNCTION, Section, outages_not_logged
from .targets import (
    API_VIEWS,
    CELERY_TASK,
    COMMAND,
    DJANGO_TASK,
    LOCKED,
    VIEWS,
    Target,
    bound_method,
    is_api_view,
    is_dispatch,
    view_of,
)

#: What other decorators make a function return: a block for ``with``, work in the background.
_RUN_LATER = (ContextDecorator, AsyncContextDecorator, Thread, Future)
ONLY_COMMANDS = (
    "only a management command can be ended when its lock is lost. Give on_lost a callable, or "
    "call current_lock().ensure_held() before each step that needs the lock"
)


def like(
    function: Any, call: Callable[[Any, Any], object], acall: Callable[[Any, Any], Any]
) -> Callable[..., Any]:
    """A function of the same kind as ``function``, which calls ``call``, or awaits ``acall``, with
    its arguments."""
    if is_async(function):

        async def awaited(*args: object, **kwargs: object) -> object:
            return await acall(args, kwargs)

        return awaited
    dispatches = is_dispatch(function)

    def called(*args: object, **kwargs: object) -> object:
        # Django awaits the result if the methods of the view's class are coroutine functions.
        view = view_of(function, args) if dispatches else None
        return acall(args, kwargs) if view and view.view_is_async else call(args, kwargs)

    return called


class LockedFunction:
    """A function that runs only once at a time.

    Attributes:
        target: its dotted name, which is the lock's by default.
        template: the lock's name as written, or the dotted name; None if a callable makes it.
    """

    def __init__(
        self,
        options: Options,
        function: Callable[..., object],
        dotted: str,
        is_handler: bool = False,
    ) -> None:
        if options.on_lost == "terminate" and getattr(function, "__name__", "") != "handle":
            raise TypeError(f'on_lost="terminate" means nothing for {dotted}: {ONLY_COMMANDS}')
        if not (is_async(function) or is_dispatch(function) or _is_djangos_dummy(function)):
            for name in ("on_lost", "on_conflict"):
                if is_async(getattr(options, name)):
                    raise TypeError(PLAIN_FUNCTION.format(name, dotted))
            if options.cancel_on_lost:
                raise TypeError(f"cancel_on_lost must be False: {dotted} is no coroutine function")
        if not _takes_arguments(function):
            options.refuse("a function without arguments", *EXIT_CODES, "status_code")
        if takes_request(function):
            options.refuse("a view", *EXIT_CODES)
        self.options = options
        self.function = function
        self.is_handler = is_handler  # Of a view of Django REST framework.
        self.target = dotted
        names = names_of(options.key, function, dotted)
        self.name_of = names if callable(names) else lambda args, kwargs: names
        self.template = None if callable(options.key) else options.template or dotted
        self.name = self.template or dotted
        self.group = options.group or as_group(self.name)
        # The clients of a view that Django REST framework's @api_view made are programs.
        self.json = is_api_view(getattr(function, "cls", None))

    @property
    def using(self) -> str:
        return self.options.using or Conf().USING

    @property
    def is_literal(self) -> bool:
        """Whether a name was given that is the same for each call."""
        return isinstance(self.options.key, str) and not list(Template(self.options.key).fields())

    @property
    def may_raise_for_a_request(self) -> bool:
        """Whether this is called with a request, and what it answers is not chosen."""
        options = self.options
        chosen = options.on_conflict is not None or options.default is not MISSING
        of_class = self.is_handler or bound_method(self.function) is not None
        return not (chosen or of_class) and takes_request(self.function)

    def wrapper(self) -> Callable[..., Any]:
        function = self.function
        wrapper = like(function, self.run, self.arun)
        functools.update_wrapper(wrapper, function)
        setattr(wrapper, LOCKED, self)
        if not _is_djangos_dummy(function):
            _declared[self] = None
        return wrapper

    # -- threads -----------------------------------------------------------------------------

    def run(self, args: Args, kwargs: Kwargs) -> object:
        section = Section(self.options, self.name_of(args, kwargs), self.target, self.group)
        if not (args and isinstance(args[0], BaseCommand)):
            if self.options.on_lost == "terminate":
                raise TypeError(f"{self.target} is not a management command: {ONLY_COMMANDS}")
            return self._run(section, args, kwargs)
        with unwinding():
            if self.options.on_lost != "terminate":
                return self._run(section, args, kwargs)
            ending = CommandTerminator(
                args[0], self.options.lost_exit_code, section.name, section.lost_reason
            )
            section.on_lost = ending
            return ending.run(lambda: self._run(section, args, kwargs))

    def _run(self, section: Section, args: Args, kwargs: Kwargs) -> object:
        entered = None
        try:
            entered = self._entered(section, args, kwargs)
            if entered:
                try:
                    result = self.function(*args, **kwargs)
                finally:
                    section.leave()
        except BaseException as error:
            section.abandon()
            if entered is None and isinstance(error, RedisError):
                request = self._request_to_answer(error, args, kwargs)
                if request is not None:
                    return self._unavailable(request, section.name, error)
                self._end_command(section.name, error, args)
            raise
        if not entered:
            return of_this_moment(self._answer(section.conflict(), args, kwargs))
        return _complete(result, self.target)

    def _entered(self, section: Section, args: Args, kwargs: Kwargs) -> bool:
        if not (args and isinstance(args[0], BaseCommand)):
            with _request_noted(args, kwargs):
                return bool(section.enter())
        waits_on = self.options.wait_for_redis
        with nullcontext() if waits_on else outages_not_logged():
            return bool(section.enter(_print_waiting(args[0], kwargs)))

    def _end_command(self, name: str, error: Exception, args: Args) -> None:
        """The lock could not be requested."""
        refused = isinstance(error, LockError) and not is_outage(error)
        if args and isinstance(args[0], BaseCommand) and not refused:
            raise unavailable(name, error, self.options.unavailable_exit_code) from error

    def _request_to_answer(self, error: Exception, args: Args, kwargs: Kwargs) -> object:
        """The request of a view that answers 503 because of ``error``, or None. With a default or
        its own ``on_conflict``, the error is raised."""
        chosen = self.options.on_conflict is not None or self.options.default is not MISSING
        return None if chosen or not is_unusable(error) else self._request_of_view(args, kwargs)

    def _request_of_view(self, args: Args, kwargs: Kwargs) -> object:
        """The request, if this is a call of a view."""
        request = request_of(args, kwargs)
        if request is None or self.is_handler:
            return request
        return request if sends_on(self, self.function, args, kwargs, request) else None

    def _unavailable(self, request: object, name: str, error: Exception) -> object:
        return service_unavailable(request, name, error, self.options.retry_after, self.json)

    def _answer(self, conflict: Conflict, args: Args, kwargs: Kwargs) -> Any:
        options = self.options
        if options.on_conflict is skip and self._request_of_view(args, kwargs) is None:
            return None
        if options.on_conflict is not None:
            return options.on_conflict(conflict, *args, **kwargs)
        if options.default is not MISSING:
            return options.default
        if args and isinstance(args[0], BaseCommand):
            if options.exit_code:
                raise conflict.command_error(options.exit_code)
            if kwargs.get("verbosity", 1):
                args[0].stderr.write(conflict.line(), args[0].style.WARNING)
            return None
        request = self._request_of_view(args, kwargs)
        if request is None:
            raise with_status(conflict.error(), options.status_code)
        return conflict.response(request, options.status_code, json=self.json)

    # -- tasks -------------------------------------------------------------------------------

    async def arun(self, args: Args, kwargs: Kwargs) -> object:
        by_function = callable(self.options.key)
        name = await made_for_task(self.name_of, args, kwargs, by_function=by_function)
        section = Section(self.options, name, self.target, self.group, asynchronous=True)
        try:
            with _request_noted(args, kwargs):
                entered = await section.enter()
        except RedisError as error:
            request = self._request_to_answer(error, args, kwargs)
            if request is None:
                raise
            # Its template may query the database.
            return await sync_to_async(self._unavailable)(request, section.name, error)
        if not entered:
            answer = await self._aanswer(await section.conflict(), args, kwargs)
            return of_this_moment(answer)
        try:
            result = self.function(*args, **kwargs)
            # A mixin's dispatch() may return a response.
            result = await result if inspect.isawaitable(result) else result
        except BaseException as error:
            await section.leave(error)
            raise
        await section.leave()
        return _complete(result, self.target)

    async def _aanswer(self, conflict: Conflict, args: Args, kwargs: Kwargs) -> object:
        if is_async(self.options.on_conflict):
            return await self._answer(conflict, args, kwargs)
        # A template, or the project's on_conflict, may query the database.
        answer = await sync_to_async(self._answer)(conflict, args, kwargs)
        return await answer if inspect.isawaitable(answer) else answer


#: Each lives as long as its wrapper, so a reloaded module leaves none behind.
_declared: weakref.WeakKeyDictionary[LockedFunction, None] = weakref.WeakKeyDictionary()


def declarations() -> list[LockedFunction]:
    """All uses of ``locked()`` as a decorator in the modules imported so far, ordered by the name
    of what they decorate. A function that ``method_decorator`` decorates is included from its first
    call on."""
    known = filter(None, [declared() for declared in _declared.keyrefs()])
    return sorted(known, key=lambda lock: (lock.target, lock.name))


def _request_noted(args: Args, kwargs: Kwargs) -> AbstractContextManager[None]:
    """Locks are acquired for the request in the arguments of a view."""
    request = request_of(args, kwargs)
    return nullcontext() if request is None else doing(RequestActivity(request))


def _complete(result: object, dotted: str) -> object:
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


def _takes_arguments(function: Callable[..., object]) -> bool:
    try:
        return bool(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # Of a function in C it may be unknown.
        return True


def _is_djangos_dummy(function: object) -> bool:
    """Whether ``method_decorator`` only tries out what the decorator does to a function."""
    return getattr(function, "__module__", "") == "django.utils.decorators"


def _print_waiting(command: BaseCommand, kwargs: Kwargs) -> Callable[[Conflict], None] | None:
    if not kwargs.get("verbosity", 1):
        return None

    def show(conflict: Conflict) -> None:
        command.stderr.write(f"{conflict.line()}. Waiting …", command.style.WARNING)
        command.stderr.flush()

    return show


def decorate(options: Options, given: object) -> Any:
    """``given``, decorated.

    Raises:
        TypeError, ValueError: it cannot be, or not with these options.
    """
    target = Target("locked", given)
    kind = target.kind
    if options.on_conflict is retry_task and kind in (COMMAND, VIEWS, API_VIEWS, DJANGO_TASK):
        raise TypeError(f"{RETRY_ONLY_CELERY}, not in {given!r}")
    if kind in (VIEWS, API_VIEWS):
        options.refuse("a view", *EXIT_CODES, "default")
        if options.on_lost == "terminate":
            raise TypeError(f'on_lost="terminate" means nothing for a view: {ONLY_COMMANDS}')
    elif kind == COMMAND:
        options.refuse("a command", "status_code", "retry_after", "default")
    elif kind in (CELERY_TASK, DJANGO_TASK):
        options.refuse("a task", *EXIT_CODES, "status_code")
    else:
        target.check_named(options.key)
    of_class = target.dotted if kind in (COMMAND, VIEWS, API_VIEWS) else ""

    def make(function: Any) -> Any:
        dotted = of_class or Target("locked", function).dotted
        return LockedFunction(options, function, dotted, is_handler=kind == API_VIEWS).wrapper()

    return target.wrap(make)
