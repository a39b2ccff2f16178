"""The rights that this site's Redis user needs, as rules to paste; see "Rights" in the docs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

#: What taking, waiting for, renewing and releasing locks needs.
LOCKS = (
    "&django_redis_lock:process:* +publish +subscribe &__redis__:invalidate +client|id "
    "+client|tracking +ping +eval +evalsha +blpop +time +get +mget +set +del +exists +pttl "
    "+pexpire +persist +hset +hget +hgetall +rpush +lindex +llen +zadd +zrem +zremrangebyscore "
    "+zscore +zcount +zrangebyscore"
)
#: What else the docs describe, and the rights for it.
MORE = {
    "get_or_set": "+xadd +xread +multi +exec +strlen +getrange",
    "the admin, manage.py locks": "+hlen +zcard +zrange +zrevrangebyscore +type",
    "the figures": "+hkeys +hdel +hincrby +expire",
    "cache.clear(), delete_pattern()": "+zrange +flushdb +dump +restore +scan +unlink",
    "the other calls of the cache": (
        "+ttl +keys +incrby +expireat +pexpireat +sadd +scard +sdiff +sdiffstore +sinter "
        "+sinterstore +sismember +smembers +smismember +smove +spop +srandmember +srem +sscan "
        "+sunion +sunionstore +hexists +zincrby +zpopmax +zpopmin +zrevrange +zrank"
    ),
    "locks doctor": "+info",
}
CLUSTER, CLUSTER_CLEAR = "+cluster|slots +command +asking", "+cluster|nodes"
SENTINEL, REPLICAS, DATABASE = "+role", "+wait", "+select"
#: The keys that all caches of a database share.
SHARED = ("~django_redis_lock:*", "~{django_redis_lock:*")


def rules(targets: Sequence[Any], user: str) -> Iterator[tuple[str, str]]:
    """What each rule is for, and the rule, for the caches of one server. ACL SETUSER adds, so a
    rule begins with the removal of all keys, channels and commands."""
    locks = {prefix for each in targets for prefix in (each.cache._lock_key(""),)}
    values = {_of_all_versions(each.cache) for each in targets}
    hidden = not all(each.cache._has_plain_keys for each in targets)
    extra = [SENTINEL] if any(each.server.is_topology for each in targets) else []
    if cluster := any(each.is_cluster for each in targets):
        extra = [CLUSTER]
    if any(each.conf.REPLICAS for each in targets):
        extra.append(REPLICAS)
    if any(each.database for each in targets):
        extra.append(DATABASE)
    more = [*MORE.values(), *([CLUSTER_CLEAR] if cluster else [])]
    yield "locks only", _rule(user, _keys(locks, hidden), [LOCKS, *extra])
    every = _keys(locks | values, hidden)
    yield "everything that the docs describe", _rule(user, every, [LOCKS, *more, *extra])


def _of_all_versions(cache: Any) -> bytes:
    """What all keys of ``cache`` begin with, as ``incr_version`` needs them; else those of its
    version."""
    one, other = (cache._encoded_key("", version) for version in (None, "of another"))
    both = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return bytes(byte for byte, _ in both) or bytes(one)


def _rule(user: str, keys: Iterable[str], rights: Iterable[str]) -> str:
    each = [right for part in rights for right in part.split()]
    channels = [right for right in each if right.startswith("&")]
    commands = [right for right in each if not right.startswith("&")]
    parts = ("resetkeys", "resetchannels", "-@all", *keys, *channels, *commands)
    return " ".join(("ACL SETUSER", user, "on", *dict.fromkeys(parts)))


def _keys(prefixes: Iterable[bytes], hidden: bool) -> list[str]:
    """The patterns of keys that begin with one of ``prefixes``, and of their companions. Not of a
    prefix that begins with another one. ``hidden``: a KEY_FUNCTION makes any keys."""
    of_all = sorted(prefixes)
    shortest = [p for p in of_all if not any(p != q and p.startswith(q) for q in of_all)]
    if hidden or b"" in shortest:
        return ["~*"]
    patterns: list[str] = []
    for prefix in shortest:
        # A backslash for what is special in a pattern; a space would end the word.
        text = re.sub(r"[*?\[\]\\^]", r"\\\g<0>", prefix.decode(errors="replace"))
        text = re.sub(r"\s", "?", text)
        patterns += (f"~{text}*", f"~{{{text}*", f"~{{*}}|{text}*")
    return [*patterns, *SHARED]
