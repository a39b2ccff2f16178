"""The refresh of a stale value. Loaded when it is used."""

from __future__ import annotations

from functools import partial

from redis.exceptions import RedisError

from ..clock import time
from ..events import RefreshFailed, Shared
from ..steps import Steps
from ..threads import Repeated, get_logger
from .flight import Leader, SingleFlight
from .in_process import Overtaken
from .runners import ProducerFailed
from .scripts import Found, Leads

logger = get_logger("django_redis_lock.flights")
_not_asked = Repeated(logger, "Could not refresh %s: %s")
_too_many = Repeated(logger, "Too many refreshes in the background: %s is not refreshed now")
_failed = Repeated(logger, "The refresh of %s failed; the stale value is served")


class Refreshing(SingleFlight):
    """Computes the stale value at ``key`` again."""

    def refresh(self, old: object, wait: float | None) -> Steps[object]:
        """Compute a stale value again; if another caller is doing so, return the old one.

        Args:
            old: the value.
            wait: compute in the background, and return the old value if that takes more seconds;
                None: compute here.
        """
        leader, producer = self.leader([self._key]), self._producer
        if wait is not None and not self._runner.has_room():  # Before Redis is asked.
            _too_many.warn(leader)
            return old
        try:
            [reply] = yield from leader.query()
        except RedisError as error:
            _not_asked.warn(leader, error)
            return old
        match reply:
            case Found(value):
                return producer.decode(value)
            case Leads(before):
                leader.begin({self._key: before})
            case _:
                producer.emit(self._server, Shared, True, 1)
                return old
        refreshing = self._refresh_or_return_old(leader, old)
        if wait is None:
            return (yield from refreshing)
        ended, results = self._runner.new_event(), []

        def in_background() -> Steps[None]:
            try:
                results.append((yield from refreshing))
            finally:
                ended.set()

        if not (yield self._runner.run_in_background(in_background(), leader, *leader.renewals)):
            _too_many.warn(leader)
            yield from leader.fail()
        elif wait:
            yield self._runner.wait_for_event(ended, time.monotonic() + wait)
        return results[0] if results and wait else old

    def _refresh_or_return_old(self, leader: Leader, old: object) -> Steps[object]:
        try:
            return (yield from self._compute(leader))[self._key]
        except Overtaken:
            return old
        except ProducerFailed as failed:
            if not isinstance(failed.error, Exception):
                raise
            _failed.warn(leader, exc_info=failed.error)
            emit = self._producer.emit
            self._told.append(partial(emit, self._server, RefreshFailed, failed.error))
            return old
        finally:
            self._tell()
