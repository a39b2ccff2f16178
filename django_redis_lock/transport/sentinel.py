"""The primary of a Sentinel service.

The sentinels are asked at first, after errors, and once a second while locks are in use: after a
manual failover (``SENTINEL FAILOVER``) the old primary goes on for about ten seconds, grants locks
and then loses them. Each new connection also checks that its server is a primary, because a
sentinel that does not know of the failover yet names the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError, ReadOnlyError, RedisError

from .address import Address, RawConnection, without_address
from .discovery import Topology, ask
from .server import Server, topologies


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
