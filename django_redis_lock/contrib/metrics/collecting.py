"""Counts the events of this process, and writes the figures to Redis. Counting takes a short
critical section for each event, and memory for a limited number of groups."""

from __future__ import annotations

import atexit
import logging
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import repeat
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError, ResponseError

from ... import events
from ...clock import time
from ...conf import Conf
from ...events import MAX_CACHED_LENGTH, Subject, group_of
from ...keeper import Job, finish, keeper
from ...protocol import Call, printable, script
from ...protocol.keys import FIGURES
from ...threads import Mutex, after_fork, get_logger
from ...transport import Server, is_outage
from ...transport import pack as pack_call
from ...transport.address import own_settings
from . import figures as at
from .figures import OTHER, PERIODS, add, average, new, pack

if TYPE_CHECKING:
    from ...cache import RedisCache
    from ...protocol import Reply

logger = get_logger("django_redis_lock.metrics")

#: The most groups between two writes; further groups count as OTHER.
MAX_GROUPS = 100
#: The most frequent events and reads that wait to be counted. Counting many in a row takes
#: a third of the time, because it finds its data in the processor's cache.
MAX_WAITING = 256
#: Seconds between two writes.
INTERVAL = 5.0
#: Seconds until the next attempt after Redis did not answer, and after it rejected a write.
AWAY, REFUSED = 15.0, 300.0
#: The most groups of a bucket in Redis; further groups count as OTHER.
MAX_GROUPS_OF_A_BUCKET = 200
#: Seconds to wait for each server when the process ends.
FLUSH_TIMEOUT = 0.5

# A hash holds the figures of one period, in buckets of equal width. A field is the bucket's number
# (the server's Unix time divided by the width), a space, and whose figures they are; its value is
# whole numbers with spaces between them; of two with an ``m`` before them the larger is kept, of
# others the sum. The field that is only a bucket's number counts the names in it, and the field
# ``now`` has the number of the last one written to.

#: Add to the present bucket of each hash; drop the buckets that are too old.
#:
#: KEYS  the hashes
#: ARGV  how many names a bucket may have, at most; the end of the name under which the rest is
#:       kept; of each hash the seconds of a bucket and how many are kept; then names and figures in
#:       turn. A name is a site, a line feed, and a group.
#: returns 1
#: atomic because other processes add to the same figures.
ADD_FIGURES = script("""
local function sum(one, other)
  local numbers = {}
  for number in string.gmatch(one, '%S+') do numbers[#numbers + 1] = number end
  local at = 0
  for number in string.gmatch(other, '%S+') do
    at = at + 1
    local before = numbers[at]
    if not before or before == '0' then
      numbers[at] = number
    elseif string.sub(number, 1, 1) == 'm' then
      if tonumber(string.sub(number, 2)) > tonumber(string.match(before, '%d+')) then
        numbers[at] = number
      end
    elseif number ~= '0' then
      numbers[at] = string.format('%.0f', tonumber(string.match(before, '%d+')) + tonumber(number))
    end
  end
  return table.concat(numbers, ' ')
end

local seconds = tonumber(redis.call('TIME')[1])
local most, rest = tonumber(ARGV[1]), ARGV[2]
for k, key in ipairs(KEYS) do
  local width, kept = tonumber(ARGV[1 + 2 * k]), tonumber(ARGV[2 + 2 * k])
  local number = math.floor(seconds / width)
  local bucket = string.format('%.0f', number)
  if redis.call('HGET', key, 'now') ~= bucket then
    for _, field in ipairs(redis.call('HKEYS', key)) do
      local old = tonumber(string.match(field, '^%d+') or bucket)
      if old <= number - kept then redis.call('HDEL', key, field) end
    end
    redis.call('HSET', key, 'now', bucket)
  end
  for i = 3 + 2 * #KEYS, #ARGV, 2 do
    local name, added = ARGV[i], ARGV[i + 1]
    local field = bucket .. ' ' .. name
    local before = redis.call('HGET', key, field)
    if not before then
      if tonumber(redis.call('HGET', key, bucket) or 0) < most then
        redis.call('HINCRBY', key, bucket, 1)
      else
        field = bucket .. ' ' .. string.match(name, '^[^\\n]*\\n') .. rest
        before = redis.call('HGET', key, field)
      end
    end
    redis.call('HSET', key, field, before and sum(before, added) or added)
  end
  redis.call('EXPIRE', key, string.format('%.0f', width * (kept + 1)))
end
return 1
""")

#: Whose figures they are: server, site and group.
Owner = tuple[Server, str, str]
#: What was counted for whom.
Figures = dict[Owner, list[int]]


class Writing(Job):
    def __init__(self, metrics: Metrics, server: Server, due: float) -> None:
        super().__init__(server, due)
        self._metrics = metrics
        self._sent: Figures = {}

    def call(self, now: float) -> Call | None:
        self._sent = self._metrics.take_for(self)
        if not self._sent:
            keeper().discard(self)
            return None
        return call_to_add(self._sent)

    def replied(self, value: Reply, sent_at: float) -> None:
        self._sent = {}
        self.due = sent_at + INTERVAL

    def failed(self, error: Exception, now: float) -> None:
        self._metrics.put_back(self._sent)
        self._sent = {}
        passes = is_outage(error) or self.server.refuses(error)  # A failover, a slot that moved.
        refused = isinstance(error, ResponseError) and not passes
        self.due = now + (REFUSED if refused else AWAY)
        level = logging.WARNING if refused else logging.INFO
        logger.log(
            level, "Could not write the figures; they are kept for the next attempt: %s", error
        )


class Metrics:
    """A listener that counts, and has the keeper write the figures. May be called in any thread,
    and in signal handlers."""

    def __init__(self) -> None:
        self._reset()
        after_fork(self._reset)
        atexit.register(self.flush, last=True)

    def _reset(self) -> None:
        # A signal handler may count while it interrupts the counting.
        self.mutex = Mutex()
        #: Frequent events and reads that wait to be counted, and how many may wait.
        self._waiting: deque[object] = deque()
        self._reads: deque[tuple[object, str, str, str]] = deque()
        self._enough = 1
        self._figures: Figures = {}
        #: The last taken figures of groups with held locks, for ``usual_hold``.
        self._holders: Figures = {}
        self._jobs: dict[Server, Writing] = {}

    def count(self, event: Any) -> None:
        kind = type(event)
        # An error would keep what its frames had.
        if kind in _FREQUENT or (kind is events.Computed and event.error is None):
            self._waiting.append(event)
            is_long = len(event.subject.name) > MAX_CACHED_LENGTH
            if is_long or len(self._waiting) >= self._enough:
                self._count_waiting()
                self._enough = MAX_WAITING
        elif kind in _COUNTS:
            with self.mutex:
                self._count(event)

    def count_read(self, cache: RedisCache, key: str, group: str, result: str, values: int) -> None:
        read = (cache, str(key), group, result)  # Django allows any key, such as a list.
        if values == 1:
            self._reads.append(read)
        else:
            self._reads.extend(repeat(read, values))
        if len(read[1]) > MAX_CACHED_LENGTH or len(self._reads) >= self._enough:
            self._count_waiting()
            self._enough = MAX_WAITING

    def _count_waiting(self) -> None:
        with self.mutex:
            while self._waiting:
                self._count(self._waiting.popleft())
            reads = []
            with suppress(IndexError):  # None are left; a signal handler may have taken some.
                while True:
                    reads.append(self._reads.popleft())
            by_group: Counter[tuple[object, str, str]] = Counter()
            for (cache, key, group, result), values in Counter(reads).items():
                by_group[cache, group or group_of(key), result] += values
            for (cache, group, result), values in by_group.items():
                self._count(events.Read(cache, "", group, result, values, 0.0, 0.0))

    def _count(self, event: Any) -> None:
        try:
            _, group, _, server, site, cache = event.subject
            if server is None:
                return
            owner = (server, site, group)
            figures = self._figures.get(owner)
            if figures is None:
                conf: Conf = Conf() if cache is None else cache.conf
                if not conf.METRICS:
                    return
                figures = self._begin(owner)
            _COUNTS[type(event)](figures, event)
        except Exception:  # Reads are counted outside of ``emit``.
            events.log_failure(self.count, event)

    def _begin(self, owner: Owner) -> list[int]:
        """New figures for ``owner``; for OTHER if there are too many groups."""
        server = owner[0]
        job = self._jobs.get(server)  # ``forget`` may remove it at any time.
        if job is None:
            job = self._jobs[server] = Writing(self, server, time.monotonic() + INTERVAL)
        keeper().add(job)
        if len(self._figures) >= MAX_GROUPS:
            owner = (*owner[:2], OTHER)
        return self._figures.setdefault(owner, new())

    def take(self, server: Server) -> Figures:
        with self.mutex:
            self._count_waiting()
            self._enough = 1  # Count the next event at once: its server may have no job yet.
            mine = [owner for owner in self._figures if owner[0] is server]
            taken = {owner: self._figures.pop(owner) for owner in mine}
            self._holders.update(
                (o, f) for o, f in taken.items() if any(f[at.HOLDS : at.COMPUTING])
            )
            while len(self._holders) > MAX_GROUPS:
                del self._holders[next(iter(self._holders))]
            return taken

    def usual_hold(self, subject: Subject) -> float | None:
        """None if this process held no lock of that group lately."""
        owner = (subject.server, subject.site, subject.group)
        with self.mutex:
            self._count_waiting()
            counted = (self._figures.get(owner), self._holders.get(owner))
            averages = [average(figures, at.HOLDS) for figures in counted if figures]
        return next((known for known in averages if known is not None), None)

    def put_back(self, taken: Figures) -> None:
        with self.mutex:
            self._enough = 1
            for owner, figures in taken.items():
                add(self._figures.get(owner) or self._begin(owner), figures)

    def servers(self) -> set[Server]:
        with self.mutex:
            self._count_waiting()
            return {owner[0] for owner in self._figures}

    def take_for(self, job: Writing) -> Figures:
        with self.mutex:  # As in ``_begin``.
            figures = self.take(job.server)
            if not figures and self._jobs.get(job.server) is job:
                del self._jobs[job.server]
            return figures

    def forget(self, is_gone: Callable[[Server], bool]) -> None:
        for server in filter(is_gone, self.servers().union(self._jobs)):
            self.take(server)
            self._jobs.pop(server, None)

    def flush(self, *, last: bool = False) -> None:
        """Write the figures now, in this thread. Raises nothing; keeps figures that cannot be
        written, unless this is the ``last`` time."""
        if last:  # The keeper may still find that a holder has crashed.
            finish()
        for server in self.servers():
            figures = self.take(server)
            try:
                if figures:
                    _write(server, call_to_add(figures))
            except RedisError as error:
                logger.info("Could not write figures: %s", error)
                if not last:
                    self.put_back(figures)


def call_to_add(figures: Figures) -> Call:
    sizes = [number for period in PERIODS.values() for number in period]
    added = [
        part
        for (_server, site, group), counted in figures.items()
        for part in (name_of(site, group), pack(counted))
    ]
    keys = tuple(FIGURES[period] for period in PERIODS)
    return Call(ADD_FIGURES, keys, (MAX_GROUPS_OF_A_BUCKET, OTHER, *sizes, *added))


def name_of(site: str, group: str) -> bytes:
    """As in the fields of the hashes."""
    return b"%b\n%b" % (printable(site, 250).encode(), group.encode())


def _write(server: Server, call: Call) -> None:
    """On a separate connection, without retries or the circuit breaker."""
    connection_class, settings = server.locate(call.keys, time.monotonic() + FLUSH_TIMEOUT).address
    connection = connection_class(**own_settings(connection_class, settings, FLUSH_TIMEOUT))
    try:
        connection.connect()
        connection.send_packed_command([pack_call(call, known=False)])
        connection.read_response()
    finally:
        connection.disconnect()


def observe(figures: list[int], distribution: int, seconds: float) -> None:
    microseconds = int(seconds * 1e6)
    figures[distribution] += microseconds
    figures[distribution + 1] = max(figures[distribution + 1], microseconds)
    figures[distribution + 2 + bisect_left(at.BOUNDS, seconds)] += 1


def _one_more(figure: int) -> Callable[[list[int], object], None]:
    def count(figures: list[int], event: object) -> None:
        figures[figure] += 1

    return count


def _acquired(figures: list[int], event: events.Acquired) -> None:
    if event.contended:
        figures[at.CONTENDED] += 1
    observe(figures, at.WAITS, event.waited)


def _released(figures: list[int], event: events.Released) -> None:
    observe(figures, at.HOLDS, event.held)


def _lost(figures: list[int], event: events.Lost) -> None:
    figures[at.LOST] += 1
    observe(figures, at.HOLDS, event.held)


def _computed(figures: list[int], event: events.Computed) -> None:
    if event.error is None:
        figures[at.COMPUTED] += event.values
        if event.without_redis:
            figures[at.WITHOUT_REDIS] += event.values
    else:
        figures[at.FAILED] += 1
    observe(figures, at.COMPUTING, event.seconds)


def _shared(figures: list[int], event: events.Shared) -> None:
    figures[at.STALE if event.stale else at.SHARED] += event.values


def _read(figures: list[int], event: events.Read) -> None:
    figures[_READS[event.result]] += event.values


_READS = {"hit": at.HITS, "stale": at.STALE_HITS, "miss": at.MISSES}

#: Events so frequent that they are counted in batches.
_FREQUENT = frozenset({events.Acquired, events.Released})

_COUNTS: dict[type, Callable[[list[int], Any], None]] = {
    events.Acquired: _acquired,
    events.Rejected: _one_more(at.REJECTED),
    events.TimedOut: _one_more(at.TIMED_OUT),
    events.Released: _released,
    events.Lost: _lost,
    events.Crashed: _one_more(at.CRASHED),
    events.FellBack: _one_more(at.FALLBACKS),
    events.Computed: _computed,
    events.Shared: _shared,
    events.Read: _read,
    events.RefreshFailed: _one_more(at.REFRESH_FAILED),
}
