"""What the doctor says of one thing it has looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum

from .target import Node, Target

__all__ = ["Finding", "Level", "NodeProbe", "Probe"]


class Level(IntEnum):
    """How bad it is.

    ``NOTE`` is what one should know, and may well be meant; with a ``WARNING`` locks can be lost or
    late; with an ``ERROR`` they do not work.
    """

    OK = 0
    NOTE = 1
    WARNING = 2
    ERROR = 3


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        topic: what was looked at, in a word or two.
        text: what it is like, in a sentence.
        hint: what to do, where something should be done.
        number: of the system check that says the same, if there is one.
        node: which of several servers it is about; empty for all.
    """

    topic: str
    level: Level
    text: str
    hint: str = ""
    number: str = ""
    node: str = ""


#: Looks at one of a cache's servers.
NodeProbe = Callable[[Target, Node], Iterator[Finding]]
#: Looks at a cache as a whole.
Probe = Callable[[Target], Iterator[Finding]]
