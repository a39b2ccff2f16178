"""``locked()``: one view, management command, task or function at a time, across all machines."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from ..locking import AsyncLock, Lock
from . import current
from .key_template import Template, short
from .options import LockOptions, Options
from .section import AsyncSection, Section
from .targets import decorate

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["Locked", "LockedWithDefault", "locked"]

P = ParamSpec("P")
R = TypeVar("R")
D = TypeVar("D")
Target = TypeVar("Target")


@overload
def locked(name: str | None = None, /, **options: Unpack[LockOptions]) -> Locked: ...
@overload
def locked(
    name: str | None = None, /, *, default: D, **options: Unpack[LockOptions]
) -> LockedWithDefault[D]: ...
@overload
def locked(target: Target, /) -> Target: ...
def locked(target: Any = None, /, **options: Any) -> Any:
    """Let something run only once at a time: ``@locked`` alone, ``@locked("name")`` or with options
    on a view, a management command, a task, a function, or the class of a view or command; and
    ``with locked("name"):`` or ``async with locked("name"):`` around a few lines.

    While another has the lock a view answers 409 with ``Retry-After``, a command ends with one line
    on stderr and ``exit_code``, anything else raises ``LockNotAcquired``. The body reaches its lock
    by ``current_lock()``.

    Args:
        key: the lock's name: a string; a template over the arguments of the call, such as
            ``"invoice-{pk}"``, ``"user-{request.user.pk}"`` or ``"{self.kwargs[slug]}"``; or (by
            keyword) a callable that takes those arguments. Left out: the dotted name of what is
            decorated.
        using: the cache alias; or a list of three or more, for a ``Redlock`` over their servers.
            Left out, the setting USING.
        on_redis_down: ``"raise"``; ``"local"``: a lock of this host stands in; ``"run"``: go ahead
            without. Left out, the setting.
        critical: never do without Redis, whatever the setting says.
        replicas: how many replicas of the server must have confirmed that the lock is taken before
            it counts; left out, the setting.
        timeout: seconds the lock lives; left out, the setting TIMEOUT. It is renewed while the work
            goes on. None: without end, which a crash makes for ever.
        blocking: wait for the lock instead of giving up at once.
        blocking_timeout: seconds to wait at most; None: without end.
        wait_for_redis: within the same time also wait for a Redis that cannot be reached at first,
            instead of failing at once.
        min_hold: seconds the lock stays taken even if the work ends before, by the server's clock.
        max_hold: seconds after which the lock is renewed no more.
        release: ``"transaction"``: if a database transaction is open when the work ends, the lock
            is released when the transaction has ended, too; ``"now"``: it does not wait for that.
        on_conflict: called with a ``Conflict`` and the arguments of the call instead of the above;
            ``django_redis_lock.contention`` has some ready-made.
        default: to return instead of raising ``LockNotAcquired``.
        on_lost: called without arguments, in a thread of its own (for a coroutine function, in its
            event loop), when the lock is lost while the work goes on. ``"terminate"``, for
            commands: end the command with ``lost_exit_code``.
        status_code: of the answer to a request.
        retry_after: seconds after which others are told to try again (``Retry-After``,
            ``retry_task``); left out, how long this process has usually held such locks, and 2
            where that is not known.
        exit_code: of a command that finds the lock taken; 0: it is skipped.
        lost_exit_code: of a command that was ended because it lost its lock.
        unavailable_exit_code: of a command that did not run because Redis is away.
        label: what the lock is for, as shown in the admin; left out, the dotted name.
        group: under which it is counted in metrics; left out, the template or the dotted name.
        warn_after: seconds after which the log says that it is held still; left out, 80 % of
            ``max_hold``.

    Raises:
        TypeError, ValueError: at import: an option makes no sense, contradicts another or the kind
            of what is decorated, or the template names an argument that the callable does not have.
            At the call: no name can be made of the arguments.
        ImproperlyConfigured: at the call: there is no such cache, or it cannot lock.
        redis.exceptions.RedisError: at the call: Redis is away, so nothing may run. (From a
            command: CommandError.)
    """
    if target is None or isinstance(target, str):
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
    """What ``locked()`` was told: it decorates what it is called with, and is a context manager.

    As that it may be entered any number of times, also by several threads and tasks; each entry
    takes a lock of its own of that name, so one inside another finds it taken.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self._sections: list[tuple[tuple[int, int], Any]] = []

    def __call__(self, target: Target) -> Target:
        decorated: Target = decorate(self.options, target)
        return decorated

    # -- as a context manager ----------------------------------------------------------------

    def __enter__(self) -> Lock:
        """
        Raises:
            LockNotAcquired: it is taken, and the time to wait is over.
        """
        section = Section(self.options, self._name())
        try:
            if section.enter():
                self._sections.append((current.caller(), section))
                return section.lock
        except BaseException:
            section.abandon()
            for entered in tuple(self._sections):
                if entered[1] is section:
                    self._sections.remove(entered)
            raise
        raise section.conflict().error()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            entered = self._last_entered()
            entered[1].leave()
        except BaseException:
            entered = self._last_entered()
            entered[1].abandon()
            self._sections.remove(entered)
            raise
        self._sections.remove(entered)

    async def __aenter__(self) -> AsyncLock | Lock:
        section = AsyncSection(self.options, self._name())
        if not await section.enter():
            raise (await section.conflict()).error()
        self._sections.append((current.caller(), section))
        return section.lock

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        entered = self._last_entered()
        self._sections.remove(entered)
        await entered[1].leave()

    def _last_entered(self) -> tuple[tuple[int, int], Any]:
        """The section this thread or task has entered last; if there is none, as where a fixture of
        a test is left in another task, the last of all."""
        caller, entered = current.caller(), tuple(self._sections)
        return next((e for e in reversed(entered) if e[0] == caller), entered[-1])

    def _name(self) -> str:
        """The lock's name where there is no call to take arguments from."""
        options = self.options
        options.refuse("a with block", "on_conflict", "status_code", "default")
        options.refuse("a with block", "exit_code", "lost_exit_code", "unavailable_exit_code")
        if options.on_lost == "terminate":
            raise TypeError('on_lost="terminate" is for management commands')
        if callable(options.key):
            return short(str(options.key()))
        if options.key is None:
            raise TypeError('a with block has no name of its own: with locked("name")')
        template = Template(options.key)
        fields = list(template.fields())
        if fields:
            raise ValueError(
                f"a with block has no arguments to fill {{{fields[0]}}} in from: write "
                f"f{options.key!r}, and double a brace that belongs to the name"
            )
        return short(template.fill({}))


class LockedWithDefault(Generic[D], Locked):
    """``locked(default=…)``: what it decorates may return the default."""

    if TYPE_CHECKING:
        # For a caller with its types it narrows what Locked says: there, what goes in comes out.
        @overload  # type: ignore[override]
        def __call__(
            self, target: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | D]]: ...
        @overload
        def __call__(self, target: Callable[P, R]) -> Callable[P, R | D]: ...
        def __call__(self, target: Any) -> Any: ...
