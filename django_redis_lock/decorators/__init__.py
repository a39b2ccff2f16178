"""``locked()``, ``cached()`` and ``cached_page()``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from asgiref.sync import sync_to_async

from ..steps import adrive, drive
from .cached import CachedFunction, cached, cached_page
from .key_template import Names, Template, names_from, short
from .options import EXIT_CODES, LockOptions, Options
from .section import Section, caller, current_lock, decorate

if TYPE_CHECKING:
    from django.http import HttpRequest
    from django.http.response import HttpResponseBase
    from typing_extensions import Unpack

    from ..contention import Raised, Skipped
    from ..locking import AsyncLock, Lock

    Response = HttpResponseBase | Coroutine[Any, Any, HttpResponseBase]
    View = TypeVar("View", bound=Callable[Concatenate[HttpRequest, ...], Response])

__all__ = [
    "CachedFunction",
    "Locked",
    "LockedWithDefault",
    "cached",
    "cached_page",
    "current_lock",
    "locked",
]

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")
T = TypeVar("T")
Class = TypeVar("Class", bound=type)


@overload
def locked(
    name: str | Sequence[str] | None = None,
    /,
    *,
    on_conflict: None = None,
    **options: Unpack[LockOptions],
) -> Locked: ...
@overload
def locked(
    name: str | Sequence[str] | None = None,
    /,
    *,
    on_conflict: Callable[..., Coroutine[Any, Any, D]],
    **options: Unpack[LockOptions],
) -> LockedWithDefault[D]: ...
@overload
def locked(
    name: str | Sequence[str] | None = None,
    /,
    *,
    on_conflict: Callable[..., D],
    **options: Unpack[LockOptions],
) -> LockedWithDefault[D]: ...
@overload
def locked(
    name: str | Sequence[str] | None = None, /, *, default: D, **options: Unpack[LockOptions]
) -> LockedWithDefault[D]: ...
@overload
def locked(target: T, /) -> T: ...
def locked(target: object = None, /, *others: object, **options: object) -> Any:
    """Run code only once at a time: ``@locked``, ``@locked("name")`` or ``@locked(option=…)`` on a
    view, a management command, a task, a function, or the class of a view or command; ``with
    locked("name"):`` or ``async with locked("name"):`` around a block.

    While another caller holds the lock, a view answers 409 with ``Retry-After``, a command prints
    one line on stderr and exits with ``exit_code``, and everything else raises
    ``LockNotAcquired``. ``current_lock()`` returns the lock to the code that runs under it.

    Args:
        key: the lock's name: a string; a template over the arguments of the call, such as
            ``"invoice-{pk}"``, ``"user-{request.user.pk}"`` or ``"{self.kwargs[slug]}"``; or (by
            keyword) a callable that takes those arguments. A list of names or templates, or a
            callable that returns a list: the call holds all of them. Default: the dotted name of
            the target.
        using: the cache alias; or a list of three or more, for a ``Redlock`` over their servers.
            Default: the setting USING.
        on_redis_down: ``"raise"``; ``"local"``: take a lock of this host instead; ``"run"``: run
            without a lock. Default: the setting.
        critical: never run without Redis, regardless of the setting.
        replicas: how many replicas of the server must confirm the lock before the work begins.
            Default: the setting.
        timeout: seconds; the lifetime of the lock, which is renewed during the work. Default: the
            setting TIMEOUT. None: the lock never expires, not even after a crash.
        blocking: wait for the lock instead of failing at once.
        blocking_timeout: seconds to wait at most; None: without end.
        wait_for_redis: while waiting, also wait for a Redis that cannot be reached.
        min_hold: seconds the lock stays taken even if the work ends earlier, by the server's clock.
        max_hold: seconds after which the lock is no longer renewed.
        limit: how many callers may run this code at a time. Default: 1.
        reentrant: let a thread or task that holds the lock, by a use of ``locked()`` or a lock that
            is reentrant, too, run this code at once; the outermost releases the lock.
        release: ``"transaction"``: if a database transaction is open when the work ends, release
            the lock when the transaction has ended; ``"now"``: release it when the work ends.
        on_conflict: called with a ``Conflict`` and the arguments of the call when the lock is
            taken; the caller gets its result. ``django_redis_lock.contention`` has ready-made ones.
        default: returned when the lock is taken, instead of raising ``LockNotAcquired``.
        on_lost: called without arguments, in a separate thread (for a coroutine function, in its
            event loop), when the lock is lost during the work. ``"terminate"``, for commands: end
            the command with ``lost_exit_code``.
        cancel_on_lost: for a coroutine function and ``async with``: cancel the task when the lock
            is lost; the caller gets ``LockLost``.
        status_code: of the response on conflict; that while Redis is down has 503.
        retry_after: seconds after which clients should try again (``Retry-After``,
            ``retry_task``). Default: how long this process usually holds such locks, or 2; while
            Redis is down 10.
        exit_code: of a command that finds the lock taken; 0: the command is skipped.
        lost_exit_code: of a command that was ended because it lost its lock.
        unavailable_exit_code: of a command that did not run because Redis is down.
        label: what the lock is for, shown in the admin. Default: the dotted name.
        group: the metrics group. Default: the template or the dotted name.
        warn_after: seconds after which a warning is logged that the lock is still held. Default:
            80 % of ``max_hold``.

    Raises:
        TypeError, ValueError: at import: an option is invalid, contradicts another one or does not
            fit the target, or the template names an argument that the callable does not have. At
            the call: the arguments do not give a name.
        ImproperlyConfigured: at the call: there is no such cache, or it cannot lock.
        redis.exceptions.RedisError: at the call: Redis is down, and nothing was run. (From a
            command: CommandError. A view without ``on_conflict`` and ``default`` answers 503.)
    """
    if others:
        raise TypeError('locked() takes its options by name: locked("name", timeout=30)')
    if target is None or isinstance(target, (str, list, tuple)):
        if target is not None and options.get("key") is not None:
            raise TypeError("locked() takes the name of the lock once")
        given = options if target is None else {**options, "key": target}
        return Locked(Options.of(given))
    if options:
        raise TypeError(
            "locked() takes either options or what to decorate: locked(option=…)(function)"
        )
    return Locked(Options()).__call__(target)


class Locked:
    """A decorator and a context manager.

    Several threads and tasks may enter it, also at the same time. Each entry acquires a separate
    lock object with the same name, so a nested entry finds the lock taken, unless ``reentrant``.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._sections: list[Section] = []

    def __call__(self, target: T) -> T:
        decorated: T = decorate(self.options, target)
        return decorated

    # -- as a context manager ----------------------------------------------------------------

    def __enter__(self) -> Lock:
        """
        Raises:
            LockNotAcquired: the lock is taken, and the time to wait is over.
        """
        section = Section(self.options, self._name())
        try:
            if drive(section.enter()):
                self._sections.append(section)
                lock: Lock = section.lock
                return lock
        except BaseException:
            section.abandon()
            if section in self._sections:
                self._sections.remove(section)
            raise
        raise drive(section.conflict()).error()

    def __exit__(self, *exc_info: object) -> None:
        try:
            drive(self._last_entered().leave())
        except BaseException:
            self._last_entered().abandon()
            raise
        finally:
            self._sections.remove(self._last_entered())

    async def __aenter__(self) -> AsyncLock:
        by_function = callable(self.options.key)
        name = await sync_to_async(self._name)() if by_function else self._name()
        section = Section(self.options, name, asynchronous=True)
        if not await adrive(section.enter()):
            raise (await adrive(section.conflict())).error()
        self._sections.append(section)
        lock: AsyncLock = section.lock
        return lock

    async def __aexit__(
        self, exc_type: object, exc_value: BaseException | None, traceback: object
    ) -> None:
        section = self._last_entered()
        self._sections.remove(section)
        await adrive(section.leave(exc_value))

    def _last_entered(self) -> Section:
        """The section that this thread or task entered last; if there is none (a test's fixture may
        be left in another task), the last of all."""
        mine, entered = caller(), tuple(self._sections)
        return next((each for each in reversed(entered) if each.caller == mine), entered[-1])

    def _name(self) -> Names:
        """The lock's name, or names, for a ``with`` block, which has no arguments."""
        options = self.options
        options.refuse("a with block", "on_conflict", "status_code", "default", *EXIT_CODES)
        if options.on_lost == "terminate":
            raise TypeError('on_lost="terminate" is for management commands')
        if callable(options.key):
            return names_from(options.key(), "a with block")
        if options.key is None:
            raise TypeError('a with block needs a name: with locked("name")')
        if isinstance(options.key, str):
            return _filled(options.key)
        return tuple(map(_filled, options.key))


def _filled(text: str) -> str:
    template = Template(text)
    fields = list(template.fields())
    if fields:
        raise ValueError(
            f"a with block has no arguments to fill {{{fields[0]}}} in from: write "
            f"f{text!r}, and double a brace that belongs to the name"
        )
    return short(template.fill({}))


class LockedWithDefault(Generic[D], Locked):
    """``locked(default=…)`` and ``locked(on_conflict=…)``: the decorated function may return the
    default, or what ``on_conflict`` returns."""

    if TYPE_CHECKING:
        # Narrower than Locked.__call__, which returns the type it is given.
        @overload  # type: ignore[override]
        def __call__(self, target: Class) -> Class: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]  # The others are for all others.
            self: LockedWithDefault[Raised], target: T
        ) -> T: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]  # The next is for all others.
            self: LockedWithDefault[Skipped], target: View
        ) -> View: ...
        @overload
        def __call__(
            self: LockedWithDefault[Skipped], target: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
        @overload
        def __call__(  # type: ignore[overload-overlap]  # As above.
            self: LockedWithDefault[Skipped], target: Callable[P, R]
        ) -> Callable[P, R | None]: ...
        @overload
        def __call__(
            self, target: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | D]]: ...
        @overload
        def __call__(self, target: Callable[P, R]) -> Callable[P, R | D]: ...
        def __call__(self, target: object) -> object: ...
