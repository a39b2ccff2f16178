"""What ``locked()`` can be told, checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypedDict

from ..cache import SETTING, check_policy, check_using, lock_cache
from ..conf import Conf
from ..contention import OnConflict
from ..events import as_group, check_group
from ..locking import AsyncLock, Lock
from ..protocol import check_count, check_seconds

__all__ = ["MISSING", "Defaults", "LockOptions", "OnLost", "Options"]

OnLost = Callable[[], Any] | None

#: Made once, as each call asks for the cache; what it answers is read each time.
_CONF = Conf()

#: For ``default`` left out, where None means something.
MISSING: Any = object()


class Defaults(NamedTuple):
    """What ``locked()`` is used on: the label of its locks where the options give none, and the
    name under which they are counted."""

    label: str | None = None
    group: str | None = None


class LockOptions(TypedDict, total=False):
    """The options of ``locked()``, explained there."""

    key: str | Callable[..., str] | None
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
    on_conflict: OnConflict | None
    on_lost: Callable[[], Any] | Literal["terminate"] | None
    status_code: int
    retry_after: float | None
    exit_code: int
    lost_exit_code: int
    unavailable_exit_code: int
    label: str | None
    group: str | None
    warn_after: float | None
    replicas: int | None


@dataclass(frozen=True)
class Options:
    """As ``LockOptions``, complete and free of contradictions.

    Attributes:
        several: the caches of a lock on several servers; ``using`` is then the first of them.

    Raises:
        TypeError, ValueError: an option makes no sense; the message says what is allowed.
    """

    key: str | Callable[..., str] | None = None
    using: str | None = None
    timeout: float | None = SETTING
    blocking: bool = False
    blocking_timeout: float | None = None
    wait_for_redis: bool = False
    min_hold: float = 0
    max_hold: float | None = None
    release: str = "transaction"
    on_conflict: OnConflict | None = None
    on_lost: Callable[[], Any] | str | None = None
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
    several: tuple[str, ...] = field(default=(), init=False)

    @classmethod
    def of(cls, given: dict[str, Any]) -> Options:
        known = [field.name for field in fields(cls) if field.init]
        for name in given:
            if name not in known:
                raise TypeError(f"locked() has no option {name!r}; it has {', '.join(known)}")
        return cls(**given)

    def __post_init__(self) -> None:
        if self.key is not None and not callable(self.key) and not isinstance(self.key, str):
            raise TypeError(f"key must be a str, a callable or None, not {self.key!r}")
        if isinstance(self.key, str) and not self.key.strip():
            raise ValueError("key must not be empty")
        self._check_servers()
        if self.label is not None and not isinstance(self.label, str):
            raise TypeError(f"label must be a str or None, not {self.label!r}")
        check_group(self.group)
        self._check_times()
        if self.release not in ("transaction", "now"):
            raise ValueError(f'release must be "transaction" or "now", not {self.release!r}')
        if self.on_conflict is not None and not callable(self.on_conflict):
            raise TypeError(
                f"on_conflict must be callable, as those in django_redis_lock.contention are, not "
                f"{self.on_conflict!r}"
            )
        if self.on_conflict is not None and self.default is not MISSING:
            raise ValueError("give either on_conflict or default: both say what to return instead")
        if not (self.on_lost is None or self.on_lost == "terminate" or callable(self.on_lost)):
            raise TypeError(f'on_lost must be callable or "terminate", not {self.on_lost!r}')
        _check_code("status_code", self.status_code, 100, 599)
        _check_code("exit_code", self.exit_code, 0, 255)
        _check_code("lost_exit_code", self.lost_exit_code, 0, 255)
        _check_code("unavailable_exit_code", self.unavailable_exit_code, 0, 255)
        if not isinstance(self.wait_for_redis, bool):
            raise TypeError(f"wait_for_redis must be True or False, not {self.wait_for_redis!r}")
        if self.wait_for_redis and not self.blocking:
            raise ValueError("wait_for_redis needs blocking=True")

    def _check_servers(self) -> None:
        if isinstance(self.using, (list, tuple)):
            several = check_using(self.using)
            object.__setattr__(self, "several", several)
            object.__setattr__(self, "using", several[0])
        if self.using is not None and not isinstance(self.using, str):
            kinds = "the alias of a cache, or a list of them"
            raise TypeError(f"using must be {kinds}, not {self.using!r}")
        check_policy(self.on_redis_down, self.critical)
        if self.replicas is not None and check_count("replicas", self.replicas) and self.several:
            raise ValueError("replicas are for a lock on one server; this one has several")

    def _check_times(self) -> None:
        if self.timeout is not SETTING:
            check_seconds("timeout", self.timeout, none="a lock that never expires")
        endless = "a wait without end"
        check_seconds("blocking_timeout", self.blocking_timeout, zero=True, none=endless)
        check_seconds("min_hold", self.min_hold, zero=True)
        check_seconds("max_hold", self.max_hold, none="no end to its renewal")
        check_seconds("retry_after", self.retry_after, none="the time such locks are usually held")
        check_seconds("warn_after", self.warn_after, none="80 % of its lifetime")
        if self.blocking_timeout is not None and not self.blocking:
            raise ValueError("blocking_timeout needs blocking=True")
        if self.max_hold is not None and self.timeout is None:
            raise ValueError("max_hold needs a timeout: a lock without one never expires")
        if self.max_hold is not None and self.min_hold > self.max_hold:
            raise ValueError("min_hold must not be longer than max_hold")

    def given(self) -> dict[str, Any]:
        """Those that are not left at their defaults, but for the name's."""
        left = [f for f in fields(self) if f.name not in ("key", "using")]
        return {f.name: getattr(self, f.name) for f in left if getattr(self, f.name) != f.default}

    def refuse(self, kind: str, *names: str) -> None:
        """Options that mean nothing for what is decorated.

        Raises:
            TypeError: one of ``names`` was given.
        """
        for name in names:
            if name in self.given():
                raise TypeError(f"{name} means nothing for {kind}")

    @property
    def alias(self) -> str:
        """The cache; it is looked up at each call, where the settings are known."""
        return self.using or _CONF.USING

    # -- the locks ---------------------------------------------------------------------------

    def lock(self, name: str, use: Defaults, on_lost: OnLost) -> Lock:
        """A lock of that name, for ``use``.

        Raises:
            ImproperlyConfigured: there is no such cache, or it cannot lock.
        """
        return lock_cache(self.alias).lock(name, **self._of_lock(use, on_lost))

    def alock(self, name: str, use: Defaults, on_lost: OnLost) -> AsyncLock:
        """As ``lock``, for asyncio."""
        return lock_cache(self.alias).alock(name, **self._of_lock(use, on_lost))

    def _of_lock(self, use: Defaults, on_lost: OnLost) -> dict[str, Any]:
        options: dict[str, Any] = {
            "blocking": self.blocking,
            "blocking_timeout": self.blocking_timeout,
            "min_hold": self.min_hold,
            "max_hold": self.max_hold,
            "on_redis_down": self.on_redis_down,
            "critical": self.critical,
            "replicas": self.replicas,
            "on_lost": on_lost,
            "label": self.label or use.label,
            "group": self.group or (use.group and as_group(use.group)),
            "warn_after": self.warn_after,
            # Each entry has a handle of its own, which threads of its call may ask, too.
            "thread_local": False,
        }
        if self.several:
            options["using"] = self.several
        if self.timeout is not SETTING:
            options["timeout"] = self.timeout
            # A lifetime of one's own is renewed too: what runs longer must not run twice.
            options["renew"] = self.timeout is not None
        return options


def _check_code(what: str, value: Any, lowest: int, highest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise ValueError(f"{what} must be a whole number from {lowest} to {highest}, not {value!r}")
