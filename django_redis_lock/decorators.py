"""``locked()``: one view, management command or function at a time, across all machines."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar, overload

from asgiref.sync import iscoroutinefunction
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand
from django.http import HttpRequest
from redis.exceptions import RedisError

from .cache import RedisCache
from .contention import Conflict, OnConflict
from .declared import declare
from .locking.arguments import check_seconds
from .locking.lock import Lock
from .naming import namer

__all__ = ["locked"]

logger = logging.getLogger("django_redis_lock.locked")

Target = TypeVar("Target", bound=Callable[..., Any])

#: For an option left out where None means something.
_SETTING: Any = object()


@overload
def locked(target: Target, /) -> Target: ...
@overload
def locked(
    name: str | None = None,
    /,
    *,
    key: str | Callable[..., str] | None = None,
    using: str = "default",
    timeout: float | None = ...,
    blocking: bool = False,
    blocking_timeout: float | None = None,
    min_hold: float = 0,
    max_hold: float | None = None,
    on_conflict: OnConflict | None = None,
    status_code: int = 409,
    exit_code: int = 1,
    label: str | None = None,
) -> Locked: ...
def locked(target: Any = None, /, **options: Any) -> Any:
    """Let a callable run only once at a time; for views, management commands and functions.

    ``@locked`` alone, ``@locked("name")``, or with options. While another runs, a view answers 409
    with ``Retry-After``, a command ends with one line on stderr and ``exit_code``, any other
    function raises ``LockNotAcquired``.

    Args:
        key: the lock's name: a string; a template over the arguments of the call, such as
            ``"invoice-{pk}"`` or ``"user-{request.user.pk}"``; or (by keyword) a callable that
            takes those arguments. Left out: the dotted name of what is decorated.
        using: the cache alias.
        timeout: seconds the lock lives; left out, the setting TIMEOUT, renewed while it runs.
        blocking: wait for the lock instead of giving up at once.
        blocking_timeout: seconds to wait at most; None: without end.
        min_hold: seconds the lock stays taken even if the work ends before.
        max_hold: seconds after which the lock is renewed no more.
        on_conflict: called with a ``Conflict`` and the arguments of the call instead of the above.
        status_code: of the answer to a request.
        exit_code: of a command; 0 to skip quietly.
        label: what the lock is for, as shown in the admin.

    Raises:
        TypeError, ValueError: an option makes no sense, or the template names an argument that
            the callable does not have.
        redis.exceptions.RedisError: at the call: Redis is away, so nothing may run.
    """
    if callable(target):
        return Locked()(target)
    if target is not None:
        if options.get("key") is not None:
            raise TypeError("locked() takes the name of the lock once")
        options["key"] = target
    return Locked(**options)


class Locked:
    """What ``locked()`` was told; called with a callable, it decorates it."""

    def __init__(
        self,
        *,
        key: str | Callable[..., str] | None = None,
        using: str = "default",
        timeout: float | None = _SETTING,
        blocking: bool = False,
        blocking_timeout: float | None = None,
        min_hold: float = 0,
        max_hold: float | None = None,
        on_conflict: OnConflict | None = None,
        status_code: int = 409,
        exit_code: int = 1,
        label: str | None = None,
    ) -> None:
        if key is not None and not callable(key) and not isinstance(key, str):
            raise TypeError(f"key must be a str, a callable or None, not {key!r}")
        if isinstance(key, str) and not key.strip():
            raise ValueError("key must not be empty")
        if blocking_timeout is not None and not blocking:
            raise ValueError("blocking_timeout needs blocking=True")
        if on_conflict is not None and not callable(on_conflict):
            raise TypeError(f"on_conflict must be callable, not {on_conflict!r}")
        if timeout is not _SETTING:
            check_seconds("timeout", timeout, none="a lock that never expires")
        check_seconds("blocking_timeout", blocking_timeout, zero=True, none="a wait without end")
        check_seconds("min_hold", min_hold, zero=True)
        check_seconds("max_hold", max_hold, none="no end to its renewal")
        if max_hold is not None and timeout is None:
            raise ValueError("max_hold needs a timeout: a lock without one never expires")
        if max_hold is not None and min_hold > max_hold:
            raise ValueError("min_hold must not be longer than max_hold")
        _check_code("status_code", status_code, 100, 599)
        _check_code("exit_code", exit_code, 0, 255)
        self.key = key
        self.using = using
        given = {"blocking": blocking, "blocking_timeout": blocking_timeout, "min_hold": min_hold}
        self.given = {**given, "max_hold": max_hold, "label": label}
        if timeout is not _SETTING:
            self.given["timeout"] = timeout
        self.wait: dict[str, Any] = {"blocking": blocking, "blocking_timeout": blocking_timeout}
        self.options: dict[str, Any] = {"min_hold": min_hold, "max_hold": max_hold, "label": label}
        if timeout is not _SETTING:
            self.options["timeout"] = timeout
            # A lifetime of one's own is renewed too: what runs longer must not run twice.
            self.options["renew"] = timeout is not None
        self.on_conflict = on_conflict
        self.status_code = status_code
        self.exit_code = exit_code

    def __call__(self, target: Target) -> Target:
        if isinstance(target, type) and issubclass(target, BaseCommand):
            dotted = f"{target.__module__}.{target.__qualname__}"
            target.handle = self._wrap(target.handle, dotted)  # type: ignore[method-assign]
            return target
        if isinstance(target, type) or not callable(target):
            raise TypeError(f"locked() decorates functions and management commands, not {target!r}")
        named = target if hasattr(target, "__qualname__") else type(target)
        if named is not target and self.key is None:
            raise TypeError(f"{target!r} has no name to give its lock: give a key")
        return self._wrap(target, f"{named.__module__}.{named.__qualname__}")

    def _wrap(self, function: Target, dotted: str) -> Target:
        if _runs_later(function):
            raise TypeError(
                f"locked() cannot decorate {function!r}: calling it only makes a coroutine or a "
                "generator, which would run when the lock has been released"
            )
        name_of = namer(self.key, function, dotted)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            name = name_of(args, kwargs)
            lock = self._lock(name, dotted)
            if not lock.acquire(**self.wait):
                return self._conflict(Conflict.over(lock, name), args, kwargs)
            done = False
            try:
                with ExitStack() as stack:
                    stack.push(lock)
                    result = function(*args, **kwargs)
                    done = True
            except (RedisError, OSError) as error:
                if not done:
                    raise
                # The loss of a lock must not cost the result of the work.
                logger.error("%s is done, its lock %s was not released: %s", dotted, name, error)
            return result

        template = dotted if self.key is None else self.key
        declare(wrapper, dotted, None if callable(template) else template, self.using, self.given)
        return wrapper  # type: ignore[return-value]

    def _lock(self, name: str, dotted: str) -> Lock:
        cache = caches[self.using]
        if not isinstance(cache, RedisCache):
            raise ImproperlyConfigured(
                f"locked() uses the cache {self.using!r}, which cannot lock: its BACKEND must be "
                '"django_redis_lock.cache.RedisCache"'
            )
        options = {**self.options, "label": self.options["label"] or dotted}
        return cache.lock(name, raise_on_release_error=False, **options)

    def _conflict(self, conflict: Conflict, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.on_conflict is not None:
            return self.on_conflict(conflict, *args, **kwargs)
        # A view's request, or that of a method of a view.
        for argument in (*args[:2], *kwargs.values()):
            if isinstance(argument, HttpRequest):
                return conflict.response(argument, self.status_code)
        if args and isinstance(args[0], BaseCommand):
            if self.exit_code:
                raise conflict.command_error(self.exit_code)
            args[0].stderr.write(str(conflict))
            return None
        raise conflict.error()


def _runs_later(function: Callable[..., Any]) -> bool:
    """Whether calling ``function`` only makes something that is still to run."""
    tests = (iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(test(code) for test in tests for code in (function, type(function).__call__))


def _check_code(what: str, value: Any, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{what} must be a whole number from {lowest} to {highest}, not {value!r}")
