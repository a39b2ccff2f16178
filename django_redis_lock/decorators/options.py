"""The options of ``locked()``, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from django.utils.functional import cached_property

from ..cache import check_using
from ..conf import SETTING, Default
from ..contention import OnConflict, redirect_to, respond
from ..extension import part
from ..protocol.validation import (
    OPTIONS,
    check_bool,
    check_holds,
    check_policy,
    check_time,
    unknown_option,
)
from ..threads import check_plain

OnLost = Callable[[], object] | None

#: Stands for ``default`` left out; None would be a value.
MISSING: Any = Default("<nothing>")
#: Those of a command.
EXIT_CODES = ("exit_code", "lost_exit_code", "unavailable_exit_code")
#: Those that a lock has, too, each with the value that leaves it to the settings.
_OF_LOCKS = {
    **dict.fromkeys(("blocking", "blocking_timeout", "min_hold", "max_hold", "critical"), MISSING),
    **dict.fromkeys(("cancel_on_lost", "warn_after", "reentrant", "limit"), MISSING),
    **{"on_redis_down": None, "replicas": None, "timeout": SETTING, "label": None, "group": None},
}


class LockOptions(TypedDict, total=False):
    """The options of ``locked()``, explained there; without those that change the type of the
    result: ``default`` and ``on_conflict``."""

    key: str | Sequence[str] | Callable[..., str | Sequence[str]] | None
    using: str | Sequence[str] | None
    on_redis_down: Literal["raise", "local", "run"] | None
    critical: bool
    timeout: float | None
    blocking: bool
    blocking_timeout: float | None
    wait_for_redis: bool
    min_hold: float
    max_hold: float | None
    release: Literal["transaction", "now"]
    on_lost: Callable[[], object] | Literal["terminate"] | None
    cancel_on_lost: bool
    status_code: int
    retry_after: float | None
    exit_code: int
    lost_exit_code: int
    unavailable_exit_code: int
    label: str | None
    group: str | None
    warn_after: float | None
    replicas: int | None
    reentrant: bool
    limit: int


@dataclass(frozen=True)
class Options:
    """``LockOptions``, checked and complete.

    Attributes:
        several: the cache aliases of a lock on several servers; ``using`` is then the first.
    """

    key: str | Sequence[str] | Callable[..., str | Sequence[str]] | None = None
    using: str | None = None
    timeout: float | None = SETTING
    blocking: bool = False
    blocking_timeout: float | None = None
    wait_for_redis: bool = False
    min_hold: float = 0
    max_hold: float | None = None
    release: str = "transaction"
    on_conflict: OnConflict | None = None
    on_lost: Callable[[], object] | str | None = None
    cancel_on_lost: bool = False
    default: Any = MISSING
    status_code: int = 409
    retry_after: float | None = None
    exit_code: int = 1
    lost_exit_code: int = 76  # As run_locked's, and the next.
    unavailable_exit_code: int = 69
    label: str | None = None
    group: str | None = None
    warn_after: float | None = None
    on_redis_down: str | None = None
    critical: bool = False
    replicas: int | None = None
    reentrant: bool = False
    limit: int = 1
    several: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        known = [field.name for field in fields(cls) if field.init]
        for name in given:
            if name not in known:
                raise unknown_option("locked()", name, known)
        return cls(**given)

    def __post_init__(self) -> None:
        for name, left_out in _OF_LOCKS.items():
            value = getattr(self, name)
            if name in OPTIONS and value is not left_out:
                OPTIONS[name](value)
        self._check_key()
        self._check_servers()
        check_time("retry_after", self.retry_after, none="the time such locks are usually held")
        if self.blocking_timeout is not None and not self.blocking:
            raise ValueError("blocking_timeout needs blocking=True")
        if self.max_hold is not None and self.timeout is None:
            raise ValueError("max_hold needs a timeout: a lock without one never expires")
        check_holds(self.min_hold, self.max_hold)
        if self.release not in ("transaction", "now"):
            raise ValueError(f'release must be "transaction" or "now", not {self.release!r}')
        if self.on_conflict is not None and not callable(self.on_conflict):
            raise TypeError(
                f"on_conflict must be callable, as those in django_redis_lock.contention are, not "
                f"{self.on_conflict!r}"
            )
        if self.on_conflict in (redirect_to, respond):
            name = self.on_conflict.__name__
            raise TypeError(f"{name} makes an answer when it is called: on_conflict={name}(…)")
        if self.on_conflict is not None and self.default is not MISSING:
            raise ValueError(
                "give either on_conflict or default: both define the result of a conflict"
            )
        if not (self.on_lost is None or self.on_lost == "terminate" or callable(self.on_lost)):
            raise TypeError(f'on_lost must be callable or "terminate", not {self.on_lost!r}')
        _check_code("status_code", self.status_code, 100, 599)
        for name in EXIT_CODES:
            _check_code(name, getattr(self, name), 0, 255)
        check_bool("wait_for_redis", self.wait_for_redis)
        if self.wait_for_redis and not self.blocking:
            raise ValueError("wait_for_redis needs blocking=True")

    def _check_key(self) -> None:
        if isinstance(self.key, (list, tuple)):
            object.__setattr__(self, "key", tuple(part("several_names").check_names(self.key)))
            for option, usual in (("reentrant", False), ("limit", 1)):
                if getattr(self, option) != usual:
                    raise ValueError(f"{option} is for a lock with one name, not with several")
            if isinstance(self.using, (list, tuple)):
                raise ValueError("several names are for a lock on one server, not on several")
        elif self.key is not None and not callable(self.key) and not isinstance(self.key, str):
            raise TypeError(f"key must be a str, a list, a callable or None, not {self.key!r}")
        check_plain("key", self.key)
        names = (self.key,) if isinstance(self.key, str) else self.key
        if isinstance(names, tuple) and not all(name.strip() for name in names):
            raise ValueError("key must not be empty")

    @property
    def template(self) -> str | None:
        """The name as written, of several names all; None if a callable makes it."""
        if self.key is None or isinstance(self.key, str):
            return self.key
        return None if callable(self.key) else ", ".join(self.key)

    def _check_servers(self) -> None:
        if isinstance(self.using, (list, tuple)):
            several = check_using(self.using)
            object.__setattr__(self, "several", several)
            object.__setattr__(self, "using", several[0])
        if self.using is not None and not isinstance(self.using, str):
            kinds = "the alias of a cache, or a list of them"
            raise TypeError(f"using must be {kinds}, not {self.using!r}")
        check_policy(self.on_redis_down, self.critical)
        if self.replicas and self.several:
            raise ValueError("replicas are for a lock on one server; this one has several")
        if self.limit > 1 and self.several:
            raise ValueError("limit must be 1 for a lock on several servers")

    @cached_property
    def of_lock(self) -> dict[str, object]:
        """What a lock is made with, except for its ``on_lost``."""
        options = {name: getattr(self, name) for name in _OF_LOCKS if name != "timeout"}
        # Each call has its own lock object, which all threads of the call may use.
        options["thread_local"] = False
        if self.several:
            options["using"] = self.several
        if self.timeout is not SETTING:
            options["timeout"] = self.timeout
            # Renewed like the default: work that outlasts the timeout must not run twice.
            options["renew"] = self.timeout is not None
        return options

    def given(self) -> dict[str, object]:
        """The options that differ from their defaults, without ``key`` and ``using``."""
        left = [f for f in fields(self) if f.name not in ("key", "using")]
        return {f.name: getattr(self, f.name) for f in left if getattr(self, f.name) != f.default}

    def refuse(self, kind: str, *names: str) -> None:
        """Raises TypeError if an option was given that has no effect on a ``kind``."""
        given = self.given()
        for name in names:
            if name in given:
                raise TypeError(f"{name} means nothing for {kind}")


def _check_code(what: str, value: object, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{what} must be a whole number from {lowest} to {highest}, not {value!r}")
