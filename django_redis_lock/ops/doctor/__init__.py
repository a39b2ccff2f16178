"""Checks whether Redis is set up as locks need it. Each probe examines one topic."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Any

from redis import ConnectionPool, Redis
from redis.exceptions import NoPermissionError, RedisError, ResponseError

from ...cache import lock_cache
from ...conf import Conf
from ...locking import Lock
from ...protocol import Call, lock_keys, script
from ...protocol.holder_scripts import CLOCK
from ...protocol.holders import fields_of
from ...protocol.keys import FIGURES, INDEX, events_key, flight_stream, process_key, wake_key
from ...transport import Server, run, server_of
from ...transport.address import own_settings
from ...transport.hints import explained
from ...transport.refusals import PASSING, refusal, refusal_in
from .acl import rules as rules


class Level(IntEnum):
    OK = 0
    NOTE = 1  # It may be intended.
    WARNING = 2  # Locks can be lost or late.
    ERROR = 3  # Locks do not work.


@dataclass(frozen=True)
class Finding:
    """``hint``: what to do about it; ``number``: of the system check with the same message;
    ``node``: the servers it is about. They may be empty."""

    topic: str
    level: Level
    text: str
    hint: str = ""
    number: str = ""
    node: str = ""


class Target:
    """A cache that can lock. Raises as ``examine``."""

    def __init__(self, alias: str) -> None:
        self.cache = lock_cache(alias)
        self.conf: Conf = self.cache.conf
        self.client: Any = self.cache._lock_client()
        self.server = server_of(self.client)
        self.is_cluster = self.server.is_cluster
        self.address = str(self.server)  # Without user and password.

    def nodes(self) -> dict[str, Any]:
        """A client of each server with locks, by address: one, or the primaries of a cluster, where
        redis-py's would try again and again."""
        if not self.is_cluster:
            return {self.address: self.client}
        return {str(node): _client(node) for node in self.server.primaries()}

    @property
    def database(self) -> int:
        return int(self.server.address.connection_kwargs.get("db") or 0)

    @property
    def user(self) -> str:
        settings = self.server.address.connection_kwargs
        return settings.get("username") or "default"


def _client(node: Server) -> Redis:
    connects, settings = node.address
    pool = ConnectionPool(connects, **own_settings(connects, settings, node.timeout))
    return Redis(connection_pool=pool)


def examine(alias: str, *, with_trial: bool = True) -> Iterator[Finding]:
    """Examine the cache ``alias`` and its servers.

    Raises:
        redis.exceptions.RedisError, OSError: a server cannot be reached.
        ImproperlyConfigured: the cache cannot lock.
    """
    target = Target(alias)
    if target.cache.in_memory:
        hint = "In production, use the BACKEND django_redis_lock.cache.RedisCache."
        text = "the locks are in the memory of each process, for its own threads only"
        yield Finding("server", Level.NOTE, f"there is none: {text}", hint, number="W105")
        return
    run(target.client, Call(CLOCK, (), ()))  # Raises if the server does not answer.
    yield from _servers(target)
    for probe in (access, trial) if with_trial else (access,):
        try:
            yield from probe(target)
        except RedisError as error:
            yield _failed(probe.__name__, error)


def _servers(target: Target) -> Iterator[Finding]:
    """Each finding once, with its servers."""
    found: dict[Finding, list[str]] = {}
    nodes = target.nodes()
    for address, client in nodes.items():
        try:
            for finding in server(target, client):
                found.setdefault(finding, []).append(address)
        except RedisError as error:
            found.setdefault(_failed("server", error), []).append(address)
    for finding, addresses in found.items():
        everywhere = len(addresses) == len(nodes)
        yield finding if everywhere else replace(finding, node=", ".join(addresses))


def _failed(topic: str, error: Exception) -> Finding:
    return Finding(topic, Level.ERROR, f"this could not be examined: {error}")


def server(target: Target, client: Any) -> Iterator[Finding]:
    try:
        info: Mapping[str, Any] = client.info()
    except NoPermissionError:
        text = f'unknown: the user "{target.user}" may not run INFO'
        yield Finding("server", Level.NOTE, text, "Allow +info to check version and eviction.")
        return
    yield _identity(target, info)
    if "maxmemory_policy" in info:
        yield _eviction(info)


def _identity(target: Target, info: Mapping[str, Any]) -> Finding:
    name, version = _name_and_version(info)
    mode = info.get("redis_mode") or info.get("server_mode") or "standalone"
    role = {"master": "primary", "slave": "replica"}.get(info.get("role", ""), info.get("role"))
    text = f"{name} {version}, {mode}, {role}"
    # Valkey reports the Redis version that it is compatible with.
    numbers = re.findall(r"\d+", str(info.get("redis_version", version)))
    if tuple(map(int, numbers)) < (6, 2):
        hint = "Locks need Redis 6.2 or later, or Valkey."
        return Finding("server", Level.ERROR, text, hint, number="E101")
    if info.get("role") == "slave":
        text = f"{text}: a replica cannot take locks"
        hint = "Put the address of the primary first in LOCATION, or use SentinelClient."
        return Finding("server", Level.ERROR, text, hint, number="E102")
    if info.get("cluster_enabled") and not target.is_cluster:
        text = f"{text}: a single node of a cluster has only some of the locks"
        hint = 'Set CLIENT_CLASS to "django_redis_lock.clients.ClusterClient".'
        return Finding("server", Level.ERROR, text, hint, number="E103")
    return Finding("server", Level.OK, text)


def _name_and_version(info: Mapping[str, object]) -> tuple[str, str]:
    for name, field in (("Valkey", "valkey_version"), ("Dragonfly", "dragonfly_version")):
        if info.get(field):
            return name, str(info.get(field))
    return "Redis", str(info.get("redis_version", "of an unknown version"))


def _eviction(info: Mapping[str, Any]) -> Finding:
    """Locks are keys with a lifetime, which every policy but noeviction can evict."""
    policy, limit = info["maxmemory_policy"], int(info.get("maxmemory", 0))
    if policy == "noeviction":
        return Finding("eviction", Level.OK, "noeviction: locks are never evicted")
    if not limit:
        text = f"{policy}, but no maxmemory is set: nothing is evicted"
        return Finding("eviction", Level.OK, text)
    evicted = int(info.get("evicted_keys", 0))
    so_far = f"; {evicted} keys have been evicted so far" if evicted else ""
    return Finding(
        "eviction",
        Level.WARNING,
        f"{policy}: when memory runs out (maxmemory is {limit / 2**20:.0f} MB), locks can be "
        f"evicted like any other key{so_far}",
        "Keep locks on a server with maxmemory-policy noeviction: add a cache alias for it, "
        'and name it in the setting USING: DJANGO_REDIS_LOCK = {"USING": "locks"}.',
        number="W101",
    )


#: The commands of the scripts, as the doctor tries them; ``@1`` and so on stand for keys.
TRIED = (
    *("SET @1 trial PX 5000", "GET @1", "MGET @1", "EXISTS @1", "STRLEN @1", "GETRANGE @1 0 0"),
    *("PTTL @1", "PERSIST @1", "PEXPIRE @1 5000", "RPUSH @2 trial", "LINDEX @2 0", "LLEN @2"),
    *("ZADD @3 1 trial", "ZCOUNT @3 -inf +inf", "ZREM @3 trial", "ZREMRANGEBYSCORE @3 1 1"),
    *("HSET @4 trial 1", "HGET @4 trial", "HGETALL @4", "HLEN @4", "XADD @5 * trial 1", "ZCARD @3"),
    *("ZRANGE @3 0 0", "ZRANGEBYSCORE @3 -inf +inf", "ZREVRANGEBYSCORE @3 +inf -inf", "TIME"),
    *("TYPE @1", "DEL @1", "ZSCORE @3 trial", "DEL @2 @3 @4 @5"),
)
#: Those that locks do not need, only ``get_or_set`` and the lists of held locks.
NOT_FOR_LOCKS = {
    *("strlen", "getrange", "xadd", "hlen", "zcard", "zrange", "zrevrangebyscore", "type"),
}
#: The same for the index of held locks, for the figures, and for the channel of a process.
TRIED_IN_INDEX = ("ZADD @1 1 doctor", "ZREM @1 doctor")
TRIED_IN_FIGURES = (
    *("HSET @1 trial 1", "HKEYS @1", "HINCRBY @1 trial 1", "EXPIRE @1 90000", "HDEL @1 trial"),
)
TRIED_IN_CHANNEL = ("PUBLISH @1 -",)

#: Try commands, and return those that are rejected.
#:
#: KEYS  whatever the commands name as @1, @2 …
#: ARGV  the commands
#: returns name and error of each rejected command, in turn
TRY = script("""
local rejected = {}
for _, text in ipairs(ARGV) do
  local command = {}
  for word in string.gmatch(text, '%S+') do
    local key = string.match(word, '^@(%d+)$')
    command[#command + 1] = key and KEYS[tonumber(key)] or word
  end
  local answer = redis.pcall(unpack(command))
  if type(answer) == 'table' and answer.err then
    rejected[#rejected + 1] = string.lower(command[1])
    rejected[#rejected + 1] = answer.err
  end
end
return rejected
""")


def access(target: Target) -> Iterator[Finding]:
    key = target.cache._lock_key(f"doctor-{secrets.token_hex(4)}")
    keys = (*lock_keys(key).own, flight_stream(key, b"trial"))
    try:
        rejected = fields_of(run(target.client, Call(TRY, keys, TRIED)).value)
    except NoPermissionError as error:
        yield _rejected(target, f"locks are not possible: {error}")
        return
    except ResponseError as error:  # A service may forbid scripts with another error.
        if refusal(error):
            yield _refused(str(error))
            return
        yield Finding("rights", Level.ERROR, f"scripts are rejected: {error}", number="E104")
        return
    reason = next(iter(rejected.values()), "").strip()
    if refusal_in(reason):
        yield _refused(reason)
        return
    waits = [name for name in ("blpop", "xread") if not _may_wait(target, name, key)]
    index = "" if target.is_cluster else _error_at(target, INDEX, TRIED_IN_INDEX)
    figures = _error_at(target, FIGURES["day"], TRIED_IN_FIGURES) if target.conf.METRICS else ""
    if rejected and rejected.keys() <= NOT_FOR_LOCKS:
        text = f"locks work, but get_or_set and the list need {', '.join(rejected)} ({reason})"
        yield replace(_rejected(target, text, rejected), level=Level.WARNING, number="W107")
    elif rejected:
        yield _rejected(target, f"not allowed: {', '.join(rejected)} ({reason})", rejected)
    elif index:
        yield _rejected(target, f"the list of held locks cannot be written: {index}")
    elif waits:
        text = f'the user "{target.user}" may not run {" and ".join(waits)}, so waiters poll'
        hint = f"ACL SETUSER {target.user} +{' +'.join(waits)}"
        yield Finding("rights", Level.WARNING, text, hint, number="W103")
    elif figures:
        text = f"the figures cannot be written: {figures}"
        yield Finding("rights", Level.NOTE, text, _rule_hint(target))
    elif silent := _channel_error(target):
        text = f"a holder learns of a forced release at its next renewal, not at once: {silent}"
        yield Finding("rights", Level.NOTE, text, _rule_hint(target))
    else:
        text = f'the user "{target.user}" has all rights that locks and get_or_set need'
        yield Finding("rights", Level.OK, text)


def _refused(reason: str) -> Finding:
    text = f"the server rejects writes, locks among them: {reason}"
    hint = f"{PASSING[refusal_in(reason)]}.".capitalize()
    return Finding("rights", Level.ERROR, text, hint, number="W102")


def _rejected(target: Target, text: str, missing: Collection[str] = ()) -> Finding:
    hint = _rule_hint(target)
    if missing:
        hint = f"ACL SETUSER {target.user} +{' +'.join(missing)}"
    return Finding("rights", Level.ERROR, text, hint, number="E104")


def _rule_hint(target: Target) -> str:
    return f"manage.py locks doctor --acl {target.user} prints the rule that this needs."


def _may_wait(target: Target, command: str, key: bytes) -> bool:
    words: dict[str, tuple[object, ...]] = {
        "blpop": ("BLPOP", wake_key(key, b"trial"), 0.05),
        "xread": ("XREAD", "BLOCK", 1, "STREAMS", flight_stream(key, b"trial"), "0"),
    }
    try:
        target.client.execute_command(*words[command])
    except RedisError as error:  # Other probes report any other.
        return not isinstance(error, NoPermissionError)
    return True


def _channel_error(target: Target) -> str:
    """Why a process cannot be told of a forced release; empty if it can."""
    channel = process_key("doctor")
    if error := _error_at(target, channel, TRIED_IN_CHANNEL):
        return error
    connection = target.server.locate((channel,)).connect(protocol=2)
    try:
        connection.send_command("SUBSCRIBE", channel)
        connection.read_response()
    except RedisError as error:
        return f"SUBSCRIBE is not allowed ({error})"
    finally:
        connection.disconnect()
    return ""


def _error_at(target: Target, key: bytes, commands: Collection[str]) -> str:
    """Why ``commands`` on ``key`` are not possible; empty if they are."""
    try:
        answers = fields_of(run(target.client, Call(TRY, (key,), tuple(commands))).value)
    except ResponseError as error:
        return str(error)
    return next((f"{name} is not allowed ({why})" for name, why in answers.items()), "")


#: Seconds in which the trial must acquire the lock and pass it on.
TRIAL_TIMEOUT = 5.0


class TrialLock(Lock):
    def _server(self) -> None:
        """No server, so that no figures count it."""


def trial(target: Target) -> Iterator[Finding]:
    conf = target.conf
    make = partial(
        TrialLock,
        target.client,
        target.cache._lock_name(f"doctor-{secrets.token_hex(4)}", None),
        conf.TIMEOUT,
        renew=True,
        label="locks doctor",
        replicas=conf.REPLICAS,
        grant_timeout=conf.GRANT_TIMEOUT,
        blocking_timeout=TRIAL_TIMEOUT,
    )
    lock = make()
    try:
        with ThreadPoolExecutor(1, "doctor") as threads:
            lock.acquire(blocking=False)  # No other has this name.
            waiter = threads.submit(_acquire_and_release, make())
            _until_registered(lock, waiter)
            lock.release()
            was_passed_on = waiter.result()
    except RedisError as error:
        yield Finding("trial", Level.ERROR, f"a lock could not be acquired: {explained(error)}")
        return
    finally:
        keys = (*lock.keys.own, events_key(lock.keys.lock))  # They would stay for a day.
        with suppress(RedisError):
            clean_up = tuple(f"DEL @{number + 1}" for number in range(len(keys)))
            run(target.client, Call(TRY, keys, clean_up))
    if was_passed_on:
        yield Finding("trial", Level.OK, "a lock was acquired, passed to a waiter and released")
    else:
        yield Finding("trial", Level.ERROR, "a released lock did not reach the waiter")


def _acquire_and_release(lock: Lock) -> bool:
    acquired = lock.acquire()
    if acquired:
        lock.release()
    return acquired


def _until_registered(lock: Lock, waiter: Future[bool]) -> None:
    deadline = time.monotonic() + TRIAL_TIMEOUT
    while not waiter.done() and time.monotonic() < deadline:
        if int(lock.redis.zcount(lock.keys.waiters, "-inf", "+inf")):
            return
        time.sleep(0.002)
