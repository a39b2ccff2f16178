"""Several servers behind one client, of which now one and now another has a key: a service of
sentinels, and a cluster, in which each key is on the primary that has its slot, and slots move.

The sentinels are asked at first, after errors, and once a second while locks are in use: see
docs/how_connections_work.md. Each new connection also checks that its server is a primary, because
a sentinel that does not know of the failover yet names the old one.

A cluster's map of slots is our own and not the client's: threads and tasks share it, and it is
discovered within a bounded time.
"""

from __future__ import annotations

import math
import threading
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import redis.asyncio.cluster
import redis.cluster
from redis.asyncio.connection import SSLConnection as AsyncSSLConnection
from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ...clock import real_time, time
from ...protocol import Reply
from ...protocol.keys import SLOTS, index_key, slot_of
from ...steps import Steps, adrive, drive
from ...threads import free_after_fork, get_logger
from ...transport import RawConnection, Server, exchange_with, note_sent, pack_words
from ...transport.address import Address, Database, Pool, Settings, common_settings, who
from ...transport.refusals import is_misdirected

logger = get_logger("django_redis_lock.topology")

DISCOVERY_TIMEOUT_SECONDS = 2.0
REPLY_TIMEOUT_SECONDS = 1.0
#: While there are errors.
MIN_DISCOVERY_INTERVAL_SECONDS = 0.1
#: To the next discovery after one that failed: at first, and at most.
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 16.0


class Topology(Server):
    """What a cluster and a service of sentinels have in common. The primaries are discovered at
    first and after errors, by one thread at a time, for which the others wait."""

    is_topology = True
    #: Seconds after which the primaries are discovered again without an error.
    STALE = math.inf
    FAILOVER_SECONDS = 10.0
    _node_class: type[Server]

    def __init__(self, common: Address) -> None:
        super().__init__(common)
        self._common = common
        self._nodes: dict[tuple[str, int], Server] = {}
        self._discovering = free_after_fork(threading.RLock())
        self._discovered_at = self._discover_at = -math.inf
        self._in_vain = 0  # Discoveries that failed in a row.
        self._trouble = True  # There was an error since the last discovery.
        self._cause = "no answer in time"

    @abstractmethod
    def _look(self, until: float) -> None:
        """Discover the primaries, until this monotonic time."""

    def must_connect(self) -> bool:
        return False  # Its connections are its nodes'.

    def locate(self, keys: Sequence[bytes], until: float | None = None) -> Server:
        if self.must_discover():
            usual = time.monotonic() + DISCOVERY_TIMEOUT_SECONDS
            self._discover_or_wait(usual if until is None else min(usual, until))
        found = self.seen_at(keys)
        if found is None:
            error = RedisConnectionError(f"Could not find a primary of {self}: {self._cause}")
            note_sent(error, False)
            raise error
        return found

    def must_discover(self) -> bool:
        return real_time.monotonic() >= self._discover_at

    def on_error(self, error: BaseException) -> None:
        super().on_error(error)
        if isinstance(error, (RedisConnectionError, RedisTimeoutError)) or self.refuses(error):
            self._trouble = True
            if not self._in_vain:
                soonest = self._discovered_at + MIN_DISCOVERY_INTERVAL_SECONDS
                self._discover_at = min(self._discover_at, soonest)

    def _discover_or_wait(self, until: float) -> None:
        try:
            # Without errors the other threads go on with what is known.
            left = max(0.0, until - time.monotonic())
            if not self._discovering.acquire(timeout=left if self._trouble else 0):
                return
            if self.must_discover():  # No other thread has just done it.
                self._discover(until)
        finally:
            try:  # Also if a signal handler raised just when it was acquired.
                self._discovering.release()
            except RuntimeError:
                pass  # Another thread has it.

    def _discover(self, until: float) -> None:
        try:
            self._look(until)
        except RedisError as error:
            self._cause = str(error)
            logger.warning("Could not read the address of %s: %s", self, error)
            pause = min(FIRST_RETRY_SECONDS * 2**self._in_vain, LAST_RETRY_SECONDS)
            self._in_vain += 1
            if not self._nodes:  # No server is known whose outage the callers would notice.
                self.breaker.failed(error, 0.0)
        else:
            self.answered()
            self._trouble, self._in_vain, pause = False, 0, self.STALE
            self._cause = "no primary has this slot"
        self._discovered_at = real_time.monotonic()
        self._discover_at = self._discovered_at + pause

    def nodes(self) -> Sequence[Server]:
        return [self, *self._nodes.values()]

    # -- its servers -------------------------------------------------------------------------

    def _node(self, host: str, port: int) -> Server:
        """The server at this address; the same one each time."""
        node = self._nodes.get((host, port))
        if node is None:
            at = {**self._common.connection_kwargs, "host": host, "port": port}
            made = self._node_class(self._common._replace(connection_kwargs=at))
            node = self._nodes.setdefault((host, port), made)
        return node

    def _keep_only(self, kept: Iterable[Server]) -> None:
        kept = set(kept)
        for where, node in self._nodes.copy().items():  # Other threads may add to it.
            if node in kept:
                continue
            self._nodes.pop(where, None)
            node.retired, node.MAX_IDLE_CONNECTIONS = True, 0
            node.close()
            node.breaker.replaced()


def ask(server: Server, until: float, *command: bytes) -> Reply:
    """The answer of ``server`` to a command that can be repeated. Raises an outage if there is none
    ``until`` then (monotonic), or within a second."""
    left = min(REPLY_TIMEOUT_SECONDS, max(0.05, until - time.monotonic()))
    return exchange_with(server, pack_words(*command), until=time.monotonic() + left)


# -- services of sentinels -------------------------------------------------------------------------


class Primary(Server):
    """A server that is used only while it is a primary."""

    discovered = True

    def connect(self, timeout: float | None = None, **changes: object) -> RawConnection:
        connection = super().connect(timeout, **changes)
        try:
            drive(meet_primary(connection, str(self)))
        except BaseException:
            connection.disconnect()  # Not only when the error, which refers to it, is collected.
            raise
        return connection

    def for_tasks(self, settings: Settings) -> None:
        settings["redis_connect_func"] = _on_connect


async def _on_connect(connection: Any) -> None:
    await connection.on_connect()
    await adrive(meet_primary(connection, f"{connection.host}:{connection.port}"))


def meet_primary(connection: Any, where: str) -> Steps[None]:
    """Check on a new connection that its server, at ``where``, is a primary."""
    try:
        yield connection.send_command("ROLE")
        role = yield connection.read_response()
    except NoPermissionError:
        return  # This user may not call ROLE. A replica refuses writes, at least.
    if _text(role[0]) != "master":
        raise RedisConnectionError(f"{where} is a replica, but the sentinels call it the primary")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


class SentinelService(Topology):
    """Of redis-py's ``SentinelConnectionPool``, for threads or for asyncio."""

    STALE = 1.0
    _node_class = Primary

    def __init__(self, pool: Any) -> None:
        super().__init__(_without_address(pool))
        manager = pool.sentinel_manager
        self._name: str = pool.service_name
        self._forced_host: str | None = getattr(manager, "_force_master_ip", None)
        self._sentinels = [Server(sentinel.connection_pool) for sentinel in manager.sentinels]
        for sentinel in self._sentinels:
            sentinel.breaker.silent = True  # One of them is enough.
        self._primary: Server | None = None
        self.breaker.server = str(self)

    def __str__(self) -> str:
        return f"the sentinels' service {self._name!r}"

    @classmethod
    def identity(cls, pool: Any) -> Database:
        sentinels = (s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels)
        where = frozenset((s.get("host"), s.get("port")) for s in sentinels)
        connection_class, settings = _without_address(pool)
        return (connection_class, where, pool.service_name, *who(settings))

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        return self._primary

    def refuses(self, error: BaseException) -> bool:
        return is_misdirected(error) and isinstance(error, ResponseError)

    def _look(self, until: float) -> None:
        """Ask one sentinel. After errors, or if it names another server than the known primary, ask
        all of them: the one with the latest configuration epoch is right."""
        found: list[tuple[int, str, int]] = []
        errors = []
        for sentinel in list(self._sentinels):
            try:
                found.append(self._as_seen_by(sentinel, until))
            except RedisError as error:
                errors.append(str(error))
                # Ask the others first the next time.
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
                continue
            if not self._trouble and self._nodes.get(found[0][1:]) is self._primary is not None:
                return
        if not found:
            raise RedisConnectionError("; ".join(dict.fromkeys(errors)) or "there are no sentinels")
        _, host, port = max(found)
        self._primary = self._node(host, port)
        self._keep_only([self._primary])

    def _as_seen_by(self, sentinel: Server, until: float) -> tuple[int, str, int]:
        """The configuration epoch, and the primary's host and port."""
        said = ask(sentinel, until, b"SENTINEL", b"MASTER", self._name.encode())
        if not isinstance(said, dict):
            said = dict(zip(said[::2], said[1::2], strict=True))
        facts = {_text(name): _text(value) for name, value in said.items()}
        return int(facts["config-epoch"]), self._forced_host or facts["ip"], int(facts["port"])


# -- clusters ------------------------------------------------------------------------------------

#: A server's refusals: it does not have the slot, or not yet. ClusterDownError is MASTERDOWN too.
REFUSALS = (MovedError, AskError, TryAgainError, ClusterDownError)
#: redis-py 5 knows these errors by their names only where it reads with these parsers; later
#: versions always do.
PARSER: Any = getattr(redis.cluster, "ClusterParser", None)
ASYNC_PARSER: Any = getattr(redis.asyncio.cluster, "ClusterParser", None)


class Node(Server):
    """One server of a cluster."""

    discovered = True

    def for_tasks(self, settings: Settings) -> None:
        if ASYNC_PARSER is not None:
            settings["parser_class"] = ASYNC_PARSER


class Cluster(Topology):
    """Of redis-py's ``RedisCluster``, for threads or for asyncio."""

    is_cluster = True
    _node_class = Node

    def __init__(self, client: Any) -> None:
        super().__init__(_common(client))
        manager = client.nodes_manager
        #: Maps the addresses that nodes name.
        self._remap: Any = getattr(manager, "address_remap", None) or tuple
        self._first = [(node.host, int(node.port)) for node in [*manager.startup_nodes.values()]]
        self._known: list[Server] = []
        #: Those that did not answer when they were last asked, perhaps on an old connection.
        self._silent: set[Server] = set()
        #: By slot.
        self._owners: list[Server | None] = [None] * SLOTS
        # Fallback locks of all processes have this in their names, wherever they begin to ask.
        self.breaker.server = "a cluster"

    def __str__(self) -> str:
        return f"the cluster of {self._first[0][0]}:{self._first[0][1]}"

    @classmethod
    def identity(cls, pool: Any) -> Database:
        connection_class, settings = _common(pool)
        return (connection_class, frozenset(pool.nodes_manager.startup_nodes), *who(settings))

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        return self._owners[slot_of(keys[0]) if keys else 0]

    def in_one_call(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        slot = slot_of(keys[0])
        return [key for key in keys if slot_of(key) == slot]

    def index_of(self, index: bytes, key: bytes) -> bytes:
        return index_key(index, slot_of(key))

    def primaries(self) -> dict[Server, list[int]]:
        """All servers that have slots, with their slots."""
        self._discover_at = -math.inf  # Slots may have moved without a refusal.
        self.locate(())
        found: dict[Server, list[int]] = {}
        for slot, owner in enumerate(self._owners):
            if owner is not None:
                found.setdefault(owner, []).append(slot)
        return found

    def is_moving_slots(self) -> bool:
        said = [ask(node, math.inf, b"CLUSTER", b"NODES") for node in self.primaries()]
        return any(mark in nodes for nodes in said for mark in (b"->-", b"-<-"))

    def refuses(self, error: BaseException) -> bool:
        return isinstance(error, REFUSALS)

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, AskError):  # redis-py's text has only the numbers.
            error.args = (f"slot {error.slot_id} is moved to {error.host}:{error.port}",)
        if isinstance(error, MovedError):
            self._owners[error.slot_id] = self.sent_to(error)
        super().on_error(error)

    def sent_to(self, error: AskError) -> Server:
        return self._node(*self._remap((error.host, int(error.port))))

    def _look(self, until: float) -> None:
        errors: list[str] = []
        nodes = self._known or [self._node(*where) for where in self._first]
        for node in nodes:
            if errors and time.monotonic() >= until:
                break  # The next search begins with those that were not asked.
            try:
                ranges = ask(node, until, b"CLUSTER", b"SLOTS")
            except RedisError as error:
                errors.append(str(error))
                self._silent.add(node)
                self._known = [*(each for each in self._known or nodes if each is not node), node]
                continue
            self._silent.discard(node)
            if ranges:
                self._take_in(node, ranges)
                return
        else:
            # All nodes may have new addresses: begin again with those of the settings.
            self._known = []
        raise RedisConnectionError("; ".join(errors) or "no node has any slots")

    def _take_in(self, asked: Server, ranges: Reply) -> None:
        owners: list[Server | None] = [None] * SLOTS
        known = {}
        for first, last, *nodes in ranges:
            servers = [self._named(asked, node) for node in nodes]
            owners[first : last + 1] = servers[:1] * (last + 1 - first)
            known.update(dict.fromkeys(servers))
        self._owners = owners
        # Replicas too: they can say which primary replaced one that failed. First those that
        # answer, and another than now: a primary that is cut off from the others names itself.
        self._silent &= known.keys()
        away = {node for node in known if node.breaker.failing} | self._silent
        self._known = sorted(known, key=lambda node: (node in away, node is asked))
        self._keep_only(known)

    def _named(self, asked: Server, node: Reply) -> Server:
        # The node that was asked may not know its own address.
        host = _text(node[0] or "") or asked.address.connection_kwargs["host"]
        return self._node(*self._remap((host, int(node[1]))))


def _common(client: Any) -> Address:
    settings = client.nodes_manager.connection_kwargs
    named = settings.get("connection_class", Connection)
    tls = settings.get("ssl") or issubclass(named, (SSLConnection, AsyncSSLConnection))
    common = _without_address(Address(SSLConnection if tls else Connection, settings))
    if PARSER is not None:
        common.connection_kwargs["parser_class"] = PARSER
    return common


def _without_address(pool: Pool) -> Address:
    """What the connections to each of several servers have in common, wherever these are."""
    tls = issubclass(pool.connection_class, (SSLConnection, AsyncSSLConnection))
    settings = common_settings(pool)
    for name in ("host", "port", "path"):
        settings.pop(name, None)
    return Address(SSLConnection if tls else Connection, settings)
