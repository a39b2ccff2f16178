"""The uses of ``locked()`` that this process knows, for checks, the admin and figures."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from ..conf import Conf
from ..events import as_group

__all__ = ["Declaration", "declarations", "declare"]


@dataclass(frozen=True)
class Declaration:
    """One use of ``locked()``.

    Attributes:
        target: the dotted name of what is decorated.
        template: the lock's name as it was written, with ``{fields}`` still to be filled in; the
            dotted name if none was given; None if a callable makes the name.
        given_using: the cache alias that was given; None: the setting USING holds.
        options: the other options that were given, by their names.
    """

    target: str
    template: str | None
    given_using: str | None
    options: Mapping[str, Any]

    @property
    def using(self) -> str:
        """The cache alias."""
        return self.given_using or Conf().USING

    @property
    def name(self) -> str:
        """What stands for all its locks together: one of a limited number of names."""
        return self.target if self.template is None else self.template

    @property
    def group(self) -> str:
        """Under which its locks are counted in metrics."""
        return self.options.get("group") or as_group(self.name)


#: Each declaration lives as long as the function that keeps to it, so a module that is imported
#: anew leaves none of its old ones behind.
_declared: weakref.WeakKeyDictionary[Callable[..., Any], Declaration]
_declared = weakref.WeakKeyDictionary()


def declare(
    function: Callable[..., Any],
    target: str,
    template: str | None,
    using: str | None,
    options: Mapping[str, Any],
) -> Declaration:
    """Note that ``function`` runs under such a lock."""
    declaration = Declaration(target, template, using, MappingProxyType(dict(options)))
    _declared[function] = declaration
    return declaration


def declarations() -> tuple[Declaration, ...]:
    """All uses of ``locked()`` as a decorator in the modules imported so far, ordered by the name
    of what they decorate. (What ``method_decorator`` decorates is known from its first call on.)"""
    found = [d for f, d in list(_declared.items()) if f is not None]
    return tuple(sorted(found, key=lambda d: (d.target, d.name)))
