"""The commands of Redis that this package, and django-redis for a cache, send."""

from __future__ import annotations

import itertools
import math
import pickle
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from ....protocol.keys import INDEX, is_reserved

WRONG_TYPE = "WRONGTYPE Operation against a key holding the wrong kind of value"
#: Of a set in a pattern of keys: an escaped character, a range, or a character.
_MEMBER = rb"\\.|[^\]]-.|[^\]]"


class _SortedSet(dict[bytes, float]):
    def ordered(self) -> list[bytes]:
        return sorted(self, key=lambda member: (self[member], member))


def _whole(written: bytes) -> int:
    """A number of 64 bits, as Redis has them. Raises ValueError."""
    number = int(written)
    if number.bit_length() > 63:
        raise ValueError(written)
    return number


def _bound(written: bytes) -> tuple[float, int]:
    open_ended = written.startswith(b"(")
    return float(written[open_ended:]), int(open_ended)


class Commands:
    """Keys and values; each public method is a command, and is given the words as they were sent.
    A list is kept as a deque, a hash as a dict, a stream as a list of entries.

    Attributes:
        now: in microseconds.
        max_values: if there are more, those that were used least recently are dropped.
        cull_frequency: one in how many is dropped then; 0 for all but the last one used.
    """

    def __init__(self) -> None:
        self.now = 0
        self.max_values: float = math.inf
        self.cull_frequency = 3
        #: In the order in which they were used; no interrupt finds one taken out.
        self._values: OrderedDict[bytes, object] = OrderedDict()
        #: In milliseconds.
        self._ends: dict[bytes, float] = {}
        #: At most so many are values; counted only by ``_cull``.
        self._may_be_values = 0
        self._filled = False  # Whether something was added that a blocked client may wait for.
        self._entries = itertools.count(1)

    def _execute(self, words: Sequence[bytes]) -> object:
        name = _COMMANDS.get(words[0])
        if name is None:
            raise ResponseError(f"unknown command {words[0]!r}: a server in memory is no Redis")
        try:
            return getattr(self, name)(*words[1:])
        except (ValueError, OverflowError):
            raise ResponseError("value is not an integer or out of range") from None

    # -- keys --------------------------------------------------------------------------------

    def _value(self, key: bytes) -> object:
        end = self._ends.get(key)
        if end is not None and end <= self.now / 1000:
            self._drop(key)
        return self._values.get(key)

    def _drop(self, key: bytes) -> None:
        self._values.pop(key, None)
        self._ends.pop(key, None)

    def _put(self, key: bytes, value: object, end: float | None) -> None:
        before = self._values.get(key)
        self._may_be_values += type(value) is bytes and type(before) is not bytes
        self._values[key] = value
        self._values.move_to_end(key)
        self._set_end(key, end)

    def _set_end(self, key: bytes, end: float | None) -> None:
        if end is None:
            self._ends.pop(key, None)
        else:
            self._ends[key] = end

    def _of(self, kind: Callable[[], object], key: bytes) -> Any:
        """Or a new one of that kind, which is not kept."""
        value = self._value(key)
        if value is None:
            return kind()
        if type(value) is not kind:
            raise ResponseError(WRONG_TYPE)
        return value

    def _kept(self, kind: Callable[[], object], key: bytes) -> Any:
        """As ``_of``; a new one is kept."""
        value = self._of(kind, key)
        if not value:
            self._put(key, value, None)
        return value

    def _unless_empty(self, key: bytes, removed: int) -> int:
        if removed and not self._value(key):
            self._drop(key)
        return removed

    def _drop_expired(self) -> None:
        for key in list(self._ends):
            self._value(key)

    def _cull(self) -> None:
        """As Django's cache in local memory does. Locks are no values."""
        locks = self._of(_SortedSet, INDEX)
        values = [
            key
            for key, value in self._values.items()
            if type(value) is bytes and key not in locks and not is_reserved(key)
        ]
        if len(values) > self.max_values:
            frequency = self.cull_frequency
            dropped = len(values) // frequency if frequency else len(values) - 1
            self.delete(*values[:dropped])
            del values[:dropped]
        self._may_be_values = len(values)

    def keys(self, pattern: bytes = b"*") -> list[bytes]:
        wanted = _glob(pattern)
        return [key for key in list(self._values) if wanted.fullmatch(key) and self._has(key)]

    def _has(self, key: bytes) -> bool:
        return self._value(key) is not None

    def time(self) -> list[bytes]:
        return [b"%d" % (self.now // 10**6), b"%d" % (self.now % 10**6)]

    def delete(self, *keys: bytes) -> int:
        found = {key for key in keys if self._has(key)}
        for key in found:
            self._drop(key)
        return len(found)

    def exists(self, *keys: bytes) -> int:
        return sum(map(self._has, keys))

    def pttl(self, key: bytes) -> int:
        if not self._has(key):
            return -2
        end = self._ends.get(key)
        return -1 if end is None else max(0, math.ceil(end - self.now / 1000))

    def ttl(self, key: bytes) -> int:
        left = self.pttl(key)
        return left if left < 0 else (left + 500) // 1000

    def pexpire(self, key: bytes, milliseconds: bytes) -> int:
        return self.pexpireat(key, b"%f" % (self.now / 1000 + _whole(milliseconds)))

    def expire(self, key: bytes, seconds: bytes) -> int:
        return self.pexpire(key, b"%d" % (_whole(seconds) * 1000))

    def pexpireat(self, key: bytes, milliseconds: bytes) -> int:
        end = float(milliseconds)
        if end >= 2**63:
            raise ValueError(milliseconds)
        if not self._has(key):
            return 0
        self._set_end(key, end)
        return 1

    def expireat(self, key: bytes, seconds: bytes) -> int:
        return self.pexpireat(key, b"%d" % (int(seconds) * 1000))

    def persist(self, key: bytes) -> int:
        return int(self._has(key) and self._ends.pop(key, None) is not None)

    def dump(self, key: bytes) -> bytes | None:
        return pickle.dumps(self._value(key)) if self._has(key) else None

    def restore(self, key: bytes, left: bytes, dump: bytes, *_replace: bytes) -> bytes:
        end = self.now / 1000 + int(left) if int(left) else None
        self._put(key, pickle.loads(dump), end)
        return b"OK"

    def flushdb(self, *_mode: bytes) -> bytes:
        self._values.clear()
        self._ends.clear()
        return b"OK"

    def scan(self, _cursor: bytes, *options: bytes) -> list[object]:
        return [b"0", self.keys(options[1] if options else b"*")]

    def wait(self, number: bytes, _milliseconds: bytes) -> int:
        """As many as are asked for: no server outlives this process."""
        return int(number)

    # -- strings -----------------------------------------------------------------------------

    def get(self, key: bytes) -> bytes | None:
        if not self._has(key):
            return None
        found: bytes = self._of(bytes, key)
        self._values.move_to_end(key)
        return found

    def mget(self, *keys: bytes) -> list[bytes | None]:
        return [self.get(k) if isinstance(self._value(k), bytes) else None for k in keys]

    def set(self, key: bytes, value: bytes, *options: bytes) -> bytes | None:
        end = self._ends.get(key) if b"KEEPTTL" in options and self._has(key) else None
        for unit, milliseconds in ((b"PX", 1), (b"EX", 1000)):
            if unit in options:
                given = _whole(options[options.index(unit) + 1])
                end = self.now / 1000 + given * milliseconds
        if (b"NX" in options and self._has(key)) or (b"XX" in options and not self._has(key)):
            return None
        self._put(key, value, end)
        return b"OK"

    def incrby(self, key: bytes, amount: bytes) -> int:
        number = int(self.get(key) or 0) + int(amount)
        self._put(key, b"%d" % number, self._ends.get(key))
        return number

    def strlen(self, key: bytes) -> int:
        return len(self._of(bytes, key))

    def getrange(self, key: bytes, start: bytes, stop: bytes) -> bytes:
        value: bytes = self._of(bytes, key)
        return value[_slice(len(value), start, stop)]

    # -- lists -------------------------------------------------------------------------------

    def rpush(self, key: bytes, *elements: bytes) -> int:
        found = self._kept(deque, key)
        found.extend(elements)
        self._filled = True
        return len(found)

    def lpop(self, key: bytes) -> bytes | None:
        found = self._of(deque, key)
        element = found.popleft() if found else None
        self._unless_empty(key, element is not None)
        return element

    def llen(self, key: bytes) -> int:
        return len(self._of(deque, key))

    def lindex(self, key: bytes, at: bytes) -> bytes | None:
        found = list(self._of(deque, key))
        return found[int(at)] if -len(found) <= int(at) < len(found) else None

    def lrange(self, key: bytes, start: bytes, stop: bytes) -> list[bytes]:
        found = list(self._of(deque, key))
        return found[_slice(len(found), start, stop)]

    def _pop_first(self, *words: bytes) -> list[bytes] | None:
        """BLPOP."""
        for key in words[1:-1]:
            if (element := self.lpop(key)) is not None:
                return [key, element]
        return None

    # -- hashes ------------------------------------------------------------------------------

    def hset(self, key: bytes, *pairs: bytes) -> int:
        found = self._kept(dict, key)
        before = len(found)
        found.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(found) - before

    def hget(self, key: bytes, field: bytes) -> bytes | None:
        value: bytes | None = self._of(dict, key).get(field)
        return value

    def hgetall(self, key: bytes) -> list[bytes]:
        return [part for pair in self._of(dict, key).items() for part in pair]

    def hkeys(self, key: bytes) -> list[bytes]:
        return list(self._of(dict, key))

    def hlen(self, key: bytes) -> int:
        return len(self._of(dict, key))

    def hdel(self, key: bytes, *fields: bytes) -> int:
        found = self._of(dict, key)
        return self._unless_empty(key, sum(found.pop(f, None) is not None for f in fields))

    def hincrby(self, key: bytes, field: bytes, amount: bytes) -> int:
        number = int(self.hget(key, field) or 0) + int(amount)
        self.hset(key, field, b"%d" % number)
        return number

    # -- sorted sets -------------------------------------------------------------------------

    def zadd(self, key: bytes, *words: bytes) -> int:
        """Without options, or with GT and CH."""
        raises = words[0] == b"GT"
        pairs = words[2:] if raises else words
        given = dict(zip(pairs[1::2], map(float, pairs[::2]), strict=True))
        found = self._kept(_SortedSet, key)
        counted = [m for m in given if m not in found or (raises and given[m] > found[m])]
        found.update({m: given[m] for m in counted} if raises else given)
        return len(counted)

    def zrem(self, key: bytes, *members: bytes) -> int:
        found = self._of(_SortedSet, key)
        return self._unless_empty(key, sum(found.pop(m, None) is not None for m in members))

    def zremrangebyscore(self, key: bytes, low: bytes, high: bytes) -> int:
        return self.zrem(key, *self.zrangebyscore(key, low, high))

    def zcard(self, key: bytes) -> int:
        return len(self._of(_SortedSet, key))

    def zscore(self, key: bytes, member: bytes) -> bytes | None:
        score = self._of(_SortedSet, key).get(member)
        return None if score is None else b"%.17g" % score

    def zcount(self, key: bytes, low: bytes, high: bytes) -> int:
        return len(self.zrangebyscore(key, low, high))

    def zrange(self, key: bytes, start: bytes, stop: bytes, *options: bytes) -> list[bytes]:
        found = self._of(_SortedSet, key)
        members: list[bytes] = found.ordered()[:: -1 if b"REV" in options else 1]
        return _chosen(found, members[_slice(len(members), start, stop)], options)

    def zrangebyscore(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        found, above, below = self._of(_SortedSet, key), _bound(low), _bound(high)
        end = below[0], -below[1]
        members = [m for m in found.ordered() if above <= (found[m], 0) <= end]
        return _chosen(found, members, options)

    def zrevrangebyscore(self, key: bytes, high: bytes, low: bytes, *options: bytes) -> list[bytes]:
        found = self._of(_SortedSet, key)
        return _chosen(found, self.zrangebyscore(key, low, high)[::-1], options)

    # -- streams -----------------------------------------------------------------------------

    def xadd(self, key: bytes, entry: bytes, *fields: bytes) -> bytes:
        if entry == b"*":
            entry = b"%d-%d" % (self.now // 1000, next(self._entries))
        elif self._of(list, key):
            raise ResponseError(
                "ERR The ID specified in XADD is equal or smaller than the top item"
            )
        self._kept(list, key).append((entry, list(fields)))
        self._filled = True
        return entry

    def xrange(self, key: bytes, *_bounds: bytes) -> list[Any]:
        return [list(entry) for entry in self._of(list, key)]

    def xread(self, *words: bytes) -> list[object] | None:
        """Each after 0-1, as followers read them."""
        keys = words[words.index(b"STREAMS") + 1 :]
        keys = keys[: len(keys) // 2]
        found = [[key, [e for e in self.xrange(key) if e[0] != b"0-1"]] for key in keys]
        return [stream for stream in found if stream[1]] or None


def _slice(size: int, start: bytes, stop: bytes) -> slice:
    """From ``start`` to ``stop``, which is included; negative numbers count from the end."""
    first, last = int(start), int(stop)
    return slice(
        max(first + size, 0) if first < 0 else first, (last + size if last < 0 else last) + 1
    )


def _chosen(scores: _SortedSet, members: list[bytes], options: Sequence[bytes]) -> list[bytes]:
    """What LIMIT and WITHSCORES leave of the members, and add to them."""
    if b"LIMIT" in options:
        offset, count = map(int, options[options.index(b"LIMIT") + 1 :])
        members = members[offset : offset + count]
    if b"WITHSCORES" not in options:
        return members
    return [part for m in members for part in (m, b"%.17g" % scores[m])]


def _glob(pattern: bytes) -> re.Pattern[bytes]:
    parts = re.findall(rb"\\.|\[\^?(?:%s)*\]?|." % _MEMBER, pattern, re.DOTALL)
    wild = {b"*": b".*", b"?": b"."}
    return re.compile(b"".join(wild.get(part) or _literally(part) for part in parts), re.DOTALL)


def _literally(part: bytes) -> bytes:
    if not part.startswith(b"["):
        return re.escape(part[len(part) > 1 :])
    unlike = part.startswith(b"[^")
    found = re.findall(_MEMBER, part[1 + unlike :], re.DOTALL)
    ends = (sorted((each[-3:-2] or each[-1:], each[-1:])) for each in found)
    ranges = b"".join(b"[%b-%b]|" % (*map(re.escape, pair),) for pair in ends)
    # A set may be empty, which no character is in: ``(?!)``.
    return b"(?%b(?:%b(?!)))." % (b"!" if unlike else b"=", ranges)


#: Methods by the commands that they carry out; ``Database`` has those for scripts.
_COMMANDS = {
    name.upper().encode(): name
    for name in (*vars(Commands), "eval", "evalsha", "publish")
    if not name.startswith("_")
} | {b"DEL": "delete", b"UNLINK": "delete", b"FLUSHALL": "flushdb"}
