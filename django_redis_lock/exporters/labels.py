"""A limited number of label values, whatever the locks are named."""

from __future__ import annotations

from ..metrics import OTHER

__all__ = ["Labels"]


class Labels:
    """The groups that are told apart: the first so many, and ``other`` for the rest.

    Args:
        most: how many.
    """

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._known: set[str] = set()

    def __call__(self, group: str) -> str:
        if group not in self._known:
            if len(self._known) >= self._most:
                return OTHER
            self._known.add(group)
        return group
