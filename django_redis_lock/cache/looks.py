"""The reads of ``get_or_set`` in this process that need a new connection.

When many threads ask at once for a value that is missing, each would open a connection only to
learn that. So who finds none at rest, and another thread that opens one to read the same key, waits
for the other's answer: if the value is missing, all of them meet where one asks who computes it,
and looks again. Otherwise everybody reads for himself: an answer to a question that was asked
before he came may be older than his own last write.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from weakref import WeakKeyDictionary

from ..forks import after_fork
from ..transport import Server

__all__ = ["PendingRead", "PendingReads", "looks_at"]

#: Seconds to wait for another's answer; who has none by then asks for himself.
PATIENCE = 0.25


class PendingRead:
    """A read that needs a connection.

    Attributes:
        answered: locked until there is an answer.
        missing: whether the answer was that there is no value.
    """

    __slots__ = ("answered", "missing")

    def __init__(self) -> None:
        self.answered = threading.Lock()
        self.answered.acquire()
        self.missing = False


class PendingReads:
    """The reads of one server that need a connection. A step of a dict is atomic, so it needs no
    mutex; of several reads of one key the last is known."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, PendingRead] = {}

    def wait_for(self, key: Hashable) -> bool:
        """Wait for the answer of whoever reads ``key`` now; whether there was no value."""
        look = self._under_way.get(key)
        if look is None or not look.answered.acquire(timeout=PATIENCE):
            return False
        look.answered.release()
        return look.missing

    def begin(self, key: Hashable) -> PendingRead:
        """``key`` is read now; what is returned is to be given to ``end``."""
        look = self._under_way[key] = PendingRead()
        return look

    def end(self, key: Hashable, look: PendingRead) -> None:
        """There is an answer, or none will come. If nothing was found, those who come now need not
        read either, until ``forget``: by then somebody has asked who computes the value."""
        if not look.missing:
            self.forget(key)
        look.answered.release()

    def forget(self, key: Hashable) -> None:
        self._under_way.pop(key, None)

    def clear(self) -> None:
        self._under_way.clear()


_looks: WeakKeyDictionary[Server, PendingReads] = WeakKeyDictionary()


def looks_at(server: Server) -> PendingReads:
    """The reads of ``server`` that need a connection."""
    return _looks.setdefault(server, PendingReads())


@after_fork
def _forget_readers() -> None:
    for looks in tuple(_looks.values()):
        looks.clear()  # Those who read are the parent's threads.
