"""Several servers behind one client, of which now one and now another has a key; and the primary
of a Sentinel service.

The sentinels are asked at first, after errors, and once a second while locks are in use: after a
manual failover (``SENTINEL FAILOVER``) the old primary goes on for about ten seconds, grants locks
and then loses them. Each new connection also checks that its server is a primary, because a
sentinel that does not know of the failover yet names the old one.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ReadOnlyError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..forks import free_after_fork
from ..notices import get_logger
from .address import Address, RawConnection, note_sent, without_address
from .server import Server, topologies

logger = get_logger("django_redis_lock.topology")

#: Seconds that one discovery may take.
DISCOVERY_TIMEOUT_SECONDS = 2.0
#: Seconds to wait for the reply of one server.
REPLY_TIMEOUT_SECONDS = 1.0
#: Seconds between two discoveries while there are errors.
MIN_DISCOVERY_INTERVAL_SECONDS = 0.1
#: Seconds to the next discovery after one that failed: at first, and at most.
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 1.0, 16.0


class Topology(Server):
    """What a cluster and a service of sentinels have in common.

    The primaries are discovered at first and after errors. One thread does it at a time, and the
    others wait for it.
    """

    #: Seconds after which the primaries are discovered again without an error.
    STALE = math.inf
    FAILOVER_SECONDS = 10.0

    def __init__(self, common: Address) -> None:
        super().__init__(common)
        self._common = common
        self._nodes: dict[tuple[str, int], Server] = {}
        self._discovering = free_after_fork(threading.Lock())
        self._discovered_at = self._discover_at = -math.inf
        self._in_vain = 0  # Discoveries that failed in a row.
        self._trouble = True  # There was an error since the last discovery.

    @abstractmethod
    def _look(self, until: float) -> None:
        """Discover the primaries, until this monotonic time.

        Raises:
            redis.exceptions.RedisError, OSError: no server says.
        """

    def must_connect(self) -> bool:
        return False  # Its connections are its nodes'.

    def at(self, keys: Sequence[bytes], patience: float | None = None) -> Server:
        if self.must_discover():
            self._discover_or_wait(DISCOVERY_TIMEOUT_SECONDS if patience is None else patience)
        found = self.seen_at(keys)
        if found is None:
            error = RedisConnectionError(f"No server says where to find keys of {self}")
            note_sent(error, False)
            raise error
        return found

    def must_discover(self) -> bool:
        return time.monotonic() >= self._discover_at

    def on_error(self, error: BaseException) -> None:
        if isinstance(error, (RedisConnectionError, RedisTimeoutError)) or self.refuses(error):
            self._trouble = True
            if not self._in_vain:
                self._discover_at = min(
                    self._discover_at, self._discovered_at + MIN_DISCOVERY_INTERVAL_SECONDS
                )

    def _discover_or_wait(self, patience: float) -> None:
        until = time.monotonic() + patience
        # Without errors the other threads go on with what is known.
        if not self._discovering.acquire(timeout=patience if self._trouble else 0):
            return
        try:
            if not self.must_discover():
                return  # Another thread has just done it.
            try:
                self._look(until)
            except (RedisError, OSError) as error:
                logger.warning("Could not read the address of %s: %s", self, error)
                pause = min(FIRST_RETRY_SECONDS * 2**self._in_vain, LAST_RETRY_SECONDS)
                self._in_vain += 1
            else:
                self._trouble, self._in_vain, pause = False, 0, self.STALE
            self._discovered_at = time.monotonic()
            self._discover_at = self._discovered_at + pause
        finally:
            self._discovering.release()

    def nodes(self) -> Sequence[Server]:
        return [self, *self._nodes.values()]

    # -- its servers -------------------------------------------------------------------------

    def _node(self, host: str, port: int) -> Server:
        """The server at this address; the same one each time."""
        node = self._nodes.get((host, port))
        if node is None:
            made = self._make_node(Address(self._common.connection_class, self._at(host, port)))
            node = self._nodes.setdefault((host, port), made)
        return node

    def _at(self, host: str, port: int) -> dict[str, Any]:
        return {**self._common.connection_kwargs, "host": host, "port": port}

    def _make_node(self, address: Address) -> Server:
        return Server(address)

    def _keep_only(self, kept: Iterable[Server]) -> None:
        """Forget the servers that are no longer part of it."""
        gone = set(self._nodes.values()).difference(kept)
        self._nodes = {where: node for where, node in self._nodes.items() if node not in gone}
        for node in gone:
            node.retired, node.MAX_IDLE_CONNECTIONS = True, 0
            node.close()


def ask(server: Server, until: float, *command: Any) -> Any:
    """The answer of ``server`` to a command that can be repeated.

    Raises:
        redis.exceptions.RedisError, OSError: there is none until then (monotonic seconds), or
            within a second.
    """
    patience = min(REPLY_TIMEOUT_SECONDS, max(0.05, until - time.monotonic()))
    connection = server.checkout(patience)
    try:
        connection.send_command(*command)
        if not connection.can_read(patience):
            raise RedisTimeoutError(f"no answer within {patience:.2f} s")
        answer = connection.read_response()
    except BaseException:
        connection.disconnect()
        raise
    server.answered()
    server.checkin(connection)
    return answer


class SentinelService(Topology):
    """One service of a group of sentinels.

    Args:
        pool: redis-py's ``SentinelConnectionPool``, for threads or for asyncio.
    """

    STALE = 1.0

    def __init__(self, pool: Any) -> None:
        super().__init__(without_address(pool))
        manager = pool.sentinel_manager
        self._name: str = pool.service_name
        self._forced_host: str | None = getattr(manager, "_force_master_ip", None)
        self._sentinels = [Server(sentinel.connection_pool) for sentinel in manager.sentinels]
        self._primary: Server | None = None

    def __str__(self) -> str:
        return f"the sentinels' service {self._name!r}"

    @classmethod
    def identity(cls, pool: Any) -> tuple[Any, ...]:
        sentinels = (s.connection_pool.connection_kwargs for s in pool.sentinel_manager.sentinels)
        where = frozenset((s.get("host"), s.get("port")) for s in sentinels)
        connection_class, settings = without_address(pool)
        who = [settings.get(name) for name in ("db", "username", "password")]
        provider = id(settings.get("credential_provider"))
        return (connection_class, where, pool.service_name, *who, provider)

    def seen_at(self, keys: Sequence[bytes]) -> Server | None:
        return self._primary

    def refuses(self, error: BaseException) -> bool:
        return isinstance(error, ReadOnlyError) or "READONLY" in str(error)

    def _make_node(self, address: Address) -> Server:
        return Primary(address)

    def _look(self, until: float) -> None:
        """Ask one sentinel. After errors, or if it names another server than the known primary, ask
        all of them: the one with the latest configuration epoch is right."""
        found: list[tuple[int, str, int]] = []
        errors = []
        for sentinel in list(self._sentinels):
            try:
                found.append(self._as_seen_by(sentinel, until))
            except (RedisError, OSError) as error:
                errors.append(str(error))
                # Ask the others first the next time.
                self._sentinels.remove(sentinel)
                self._sentinels.append(sentinel)
                continue
            if not self._trouble and self._nodes.get(found[0][1:]) is self._primary is not None:
                return
        if not found:
            raise RedisConnectionError("; ".join(errors) or "there are no sentinels")
        _, host, port = max(found)
        self._primary = self._node(host, port)
        self._keep_only([self._primary])

    def _as_seen_by(self, sentinel: Server, until: float) -> tuple[int, str, int]:
        """The configuration epoch, and the primary's host and port."""
        said = ask(sentinel, until, "SENTINEL", "MASTER", self._name)
        if not isinstance(said, dict):
            said = dict(zip(said[::2], said[1::2], strict=True))
        facts = {_text(name): _text(value) for name, value in said.items()}
        return int(facts["config-epoch"]), self._forced_host or facts["ip"], int(facts["port"])


topologies.append((lambda pool: hasattr(pool, "service_name"), SentinelService))


class Primary(Server):
    """A server that is used only while it is a primary."""

    def connect(self, timeout: float | None = None, **changes: Any) -> RawConnection:
        connection = super().connect(timeout, **changes)
        try:
            connection.send_command("ROLE")
            expect_primary(connection.read_response())
        except NoPermissionError:
            pass  # This user may not call ROLE. A replica refuses writes, at least.
        except BaseException:
            connection.disconnect()
            raise
        return connection


def expect_primary(role: Any) -> None:
    """Raises:
    redis.exceptions.ConnectionError: the answer to ROLE is not a primary's."""
    if _text(role[0]) != "master":
        raise RedisConnectionError("The server is a replica; the sentinels have not settled yet")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
