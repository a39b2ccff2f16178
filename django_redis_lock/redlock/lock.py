"""One lock over several independent servers, for threads. See ``aio`` for asyncio."""

from __future__ import annotations

import time
from typing import Any

from ..locking import Lock, ThreadWaiter
from ..protocol import AcquireRequest, Acquisition, Call
from ..transport import Answer, drive
from .base import Ask, Queue, Quorum, Step
from .fan_out import ask

__all__ = ["Redlock"]


class Redlock(Lock, Quorum):
    """A lock held on most of several servers that know nothing of each other; with the methods of
    ``Lock``, and the arguments of ``Quorum``::

        servers = [redis.Redis(host) for host in ("lock1", "lock2", "lock3")]
        with Redlock(servers, "import", timeout=30, renew=True, blocking_timeout=10) as lock:
            import_prices(fence=lock.fence)

    A minority of servers that are away or hang costs a call ``server_timeout`` at most, and
    nothing once that is known. ``TooFewServers`` says that no majority can be reached, which is
    not the same as taken. As a timeline, with three servers and ``timeout=30``:

    ====  =======================================================================================
    0 s   A acquires on all three; B waits, in the queue of the first.
    5 s   The first server dies. B waits on at the second; A holds two of three.
    9 s   A releases, and B has the second and the third.
    12 s  The second server dies: B holds one of three, and loses the lock 30 s after the last
          renewal at which two had confirmed it. It is told shortly before that.
    ====  =======================================================================================

    Raises:
        TooFewServers: from every method that asks the servers.
    """

    def _acquire(self, request: AcquireRequest, wait: float | None) -> Acquisition | None:
        granted: Acquisition | None = drive(self._elect(request, wait), self._do)
        return granted

    def reset(self) -> bool:
        return bool(drive(self._reset(), self._do))

    def _do(self, step: Step) -> Any:
        if isinstance(step, Ask):
            return ask(self.servers, step.calls, step.patience)
        if isinstance(step, Queue):
            return ThreadWaiter(self.redis[step.place], step.request).wait()
        return time.sleep(step.seconds)

    def _run(self, call: Call) -> Answer:
        sent_at = time.monotonic()
        answers = ask(self.servers, self._calls(call), self.server_timeout)
        return Answer(self._merge(call, answers, sent_at), sent_twice=False)
