"""The setting CACHES in memory for as long as an override lasts, also if it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from django.conf import settings
from django.core.signals import setting_changed

Configs = dict[str, dict[str, Any]]

_MISSING: Any = object()


class CachesInMemory:
    """A context manager. Unlike ``override_settings`` it may end before the changes of the setting
    that began within it, as pytest's fixtures do.

    Args:
        replaced: makes the setting in memory of the project's.
        after: called after each change, with the caches of the new setting.
    """

    #: Those that are entered; the last one follows changes.
    _entered: ClassVar[list[CachesInMemory]] = []

    def __init__(self, replaced: Callable[[Configs], Configs], after: Callable[[], None]) -> None:
        self._replaced, self._after = replaced, after
        #: What has the setting, and what it was there.
        self._before: list[tuple[Any, object]] = []
        self._made: list[Configs] = []

    def __enter__(self) -> None:
        self._entered.append(self)
        setting_changed.connect(self._changed, weak=False)
        self._replace()

    def __exit__(self, *exc_info: object) -> None:
        setting_changed.disconnect(self._changed)
        self._entered.remove(self)
        while self._before:
            holder, value = self._before.pop()
            if value is _MISSING:
                del holder.CACHES
            else:
                holder.CACHES = value
        self._announce(enter=False)

    def _changed(self, *, setting: str, **kwargs: object) -> None:
        is_own = any(settings.CACHES is made for made in self._made)
        if setting == "CACHES" and not is_own and self is self._entered[-1]:
            self._replace()

    def _replace(self) -> None:
        holder = settings._wrapped
        self._before.append((holder, vars(holder).get("CACHES", _MISSING)))
        made = self._replaced(settings.CACHES)
        self._made.append(made)
        holder.CACHES = made
        self._announce(enter=True)
        self._after()

    def _announce(self, *, enter: bool) -> None:
        vars(settings).pop("CACHES", None)  # As each change of ``_wrapped`` does.
        setting_changed.send(type(self), setting="CACHES", value=settings.CACHES, enter=enter)
