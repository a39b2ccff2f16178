"""Figures of locks and computations: each process counts, Redis adds up.

``summary()`` and ``summaries()`` read the figures of all processes for the last hour or day.
Counting needs no extra round trip: the keeper writes new figures every few seconds, and at its end
the process writes the rest, if Redis answers at once. A write that fails is repeated with the
figures since. (If only its reply was lost, these figures count twice.) See ``docs/monitoring.md``.
"""

from __future__ import annotations

import atexit
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from redis.exceptions import RedisError, ResponseError

from .. import events
from ..cache import lock_cache
from ..clock import time
from ..events import group_of
from ..keeper import Job, finish, keeper
from ..protocol import FIGURES, Call, as_bytes, printable, script
from ..threads import get_logger
from ..transport import Server, is_outage, own_settings, run, server_of
from ..transport import pack as pack_call
from .collecting import Collector, Figures
from .figures import (
    BOUNDS,
    EXPORTED_BOUNDS,
    OTHER,
    PERIODS,
    Distribution,
    Summary,
    add,
    histogram_svg,
    new,
    pack,
    sparkline_svg,
    unpack,
)

__all__ = [
    "BOUNDS",
    "EXPORTED_BOUNDS",
    "OTHER",
    "PERIODS",
    "Distribution",
    "Summary",
    "flush",
    "group_of",
    "histogram_svg",
    "site_of",
    "sparkline_svg",
    "start",
    "summaries",
    "summary",
]

logger = get_logger("django_redis_lock.metrics")

#: Seconds between two writes.
INTERVAL = 5.0
#: Seconds until the next attempt after Redis did not answer, and after it rejected a write.
AWAY, REFUSED = 15.0, 300.0
#: The most groups of a bucket; further groups count as OTHER.
MAX_GROUPS = 200
#: Seconds to wait for the figures of all processes.
REPLY_TIMEOUT = 5.0
#: Seconds to wait for each server when the process ends.
FLUSH_TIMEOUT = 0.5

# A hash holds the figures of one period, in buckets of equal width. A field is the bucket's number
# (the server's Unix time divided by the width), a space, and whose figures they are; its value is
# whole numbers with spaces between them; of two with an ``m`` before them the larger is kept, of
# others the sum. The field that is only a bucket's number counts the names in
# it, and the field ``now`` has the number of the last one written to.

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

#: What one hash holds.
#:
#: KEYS  the hash
#: returns {server time in seconds, its fields and values}
#: atomic so that the time tells which of its buckets are too old.
READ_FIGURES = script("""
return {tonumber(redis.call('TIME')[1]), redis.call('HGETALL', KEYS[1])}
""")


class Writing(Job):
    """Writes the figures of one server, until there are none."""

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

    def answered(self, value: Any, sent_at: float) -> None:
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


class Metrics(Collector):
    """The figures of this process, and the jobs that write them."""

    def __init__(self) -> None:
        super().__init__()
        atexit.register(self.flush, last=True)

    def _reset(self) -> None:
        super()._reset()
        self._jobs: dict[Server, Writing] = {}

    def _begun(self, server: Server) -> None:
        job = self._jobs.get(server)
        if job is None:
            job = self._jobs[server] = Writing(self, server, time.monotonic() + INTERVAL)
        keeper().add(job)

    def take_for(self, job: Writing) -> Figures:
        with self.mutex:  # As ``_begun`` is called.
            figures = self.take(job.server)
            if not figures and self._jobs.get(job.server) is job:
                del self._jobs[job.server]
            return figures

    def forget(self, is_gone: Callable[[Server], bool]) -> None:
        """Drop the figures of servers that are there no more."""
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
            except (RedisError, OSError) as error:
                logger.info("Could not write figures: %s", error)
                if not last:
                    self.put_back(figures)


def call_to_add(figures: Figures) -> Call:
    sizes = [number for period in PERIODS.values() for number in period]
    added = [
        part
        for (_server, site, group), counted in figures.items()
        for part in (_name_of(site, group), pack(counted))
    ]
    keys = tuple(FIGURES[period] for period in PERIODS)
    return Call(ADD_FIGURES, keys, (MAX_GROUPS, OTHER, *sizes, *added))


def _name_of(site: str, group: str) -> bytes:
    """As in the fields of the hashes."""
    return b"%b\n%b" % (printable(site, 250).encode(), group.encode())


def _write(server: Server, call: Call) -> None:
    """On a separate connection, without retries or the circuit breaker."""
    connection_class, settings = server.at(call.keys, FLUSH_TIMEOUT).address
    connection = connection_class(**own_settings(connection_class, settings, FLUSH_TIMEOUT))
    try:
        connection.connect()
        connection.send_packed_command([pack_call(call, known=False)])
        connection.read_response()
    finally:
        connection.disconnect()


# -- reading ---------------------------------------------------------------------------------------


def summary(using: str = "default", group: str | None = None, period: str = "hour") -> Summary:
    """The figures of one group, or of all groups together.

    Args:
        using: the alias of a cache. The figures are those of all caches on its server with the same
            KEY_PREFIX.
        group: the argument ``group``, the template of ``locked()`` or ``cached()``, or
            ``group_of(name)``. The figures of an unknown group are zeros.
        period: "hour" (the last 60 to 65 minutes) or "day" (24 to 25 hours).

    Raises:
        ValueError: there is no such period.
        ImproperlyConfigured: the cache cannot lock.
        redis.exceptions.RedisError: the request failed.
    """
    buckets = _buckets(using, period)
    empty = [new() for _ in range(PERIODS[period].kept)]
    if group is not None:
        return Summary.of(group, period, buckets.get(group, empty))
    for figures in buckets.values():
        for total, more in zip(empty, figures, strict=True):
            add(total, more)
    return Summary.of(None, period, empty)


def summaries(using: str = "default", period: str = "hour") -> list[Summary]:
    """A summary of each group with any figures, the busiest first. Arguments and errors as for
    ``summary``."""
    found = [Summary.of(group, period, b) for group, b in _buckets(using, period).items()]
    return sorted(found, key=lambda summary: (-summary.events, summary.group or ""))


def site_of(using: str) -> tuple[Any, str]:
    """The database and KEY_PREFIX of a cache: caches in which they are the same share their
    figures. Raises as ``summary``."""
    cache = lock_cache(using)
    return server_of(cache._lock_client()).database, str(cache.key_prefix)


def _buckets(using: str, period: str) -> dict[str, list[list[int]]]:
    cache = lock_cache(using)
    return read(cache._lock_client(), str(cache.key_prefix), period)


def read(client: Any, site: str, period: str) -> dict[str, list[list[int]]]:
    """The figures of each group of a site in each bucket, oldest first. Raises as ``summary``."""
    if period not in PERIODS:
        allowed = " or ".join(map(repr, PERIODS))
        raise ValueError(f"period must be {allowed}, not {period!r}")
    width, kept = PERIODS[period]
    answer = run(client, Call(READ_FIGURES, (FIGURES[period],), ()), patience=REPLY_TIMEOUT).value
    seconds, found = int(answer[0]), [as_bytes(part) for part in answer[1]]
    oldest = seconds // width - kept + 1
    wanted = _name_of(site, "")
    groups: defaultdict[str, list[list[int]]] = defaultdict(lambda: [new() for _ in range(kept)])
    for field, figures in zip(found[::2], found[1::2], strict=True):
        number, _, name = field.partition(b" ")
        if name.startswith(wanted) and 0 <= (at := int(number) - oldest) < kept:
            group = name[len(wanted) :].decode(errors="replace")
            groups[group][at] = unpack(figures)
    return dict(groups)


# -- those of this process ------------------------------------------------------------------------


_metrics = Metrics()
forget = _metrics.forget


def start() -> None:
    events.subscribe(_metrics)
    events.count_read = _metrics.count_read
    events.usual_hold = _metrics.usual_hold


def flush() -> None:
    """Write the figures to Redis now, instead of within the next five seconds."""
    _metrics.flush()
