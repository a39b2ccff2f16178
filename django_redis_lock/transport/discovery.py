"""Several servers behind one client, of which now one and now another has a key."""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..forks import free_after_fork
from ..notices import get_logger
from .address import Address, note_sent
from .server import Server

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
