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

__all__ = ["Topology"]

logger = get_logger("django_redis_lock.topology")

#: Seconds one look may take in all.
LOOK = 2.0
#: Seconds one server may take to answer it.
PATIENCE = 1.0
#: Seconds between two looks when something is wrong with the servers.
SOON = 0.1
#: Seconds to the next look after one that nobody answered: at first, and at most.
LATER, LATEST = 1.0, 16.0


class Topology(Server):
    """What a cluster and a service of sentinels have in common.

    Where the keys are is looked up at first and when something went wrong. One thread looks at a
    time, and the others wait for it.
    """

    #: Seconds after which to look again although nothing went wrong.
    STALE = math.inf
    HEALS = 10.0

    def __init__(self, common: Address) -> None:
        super().__init__(common)
        self._common = common
        self._nodes: dict[tuple[str, int], Server] = {}
        self._looking = free_after_fork(threading.Lock())
        self._looked_at = self._look_at = -math.inf
        self._in_vain = 0  # Looks that nobody answered, in a row.
        self._trouble = True  # Since the last look something has gone wrong.

    @abstractmethod
    def _look(self, until: float) -> None:
        """Find out where the keys are, until this monotonic time.

        Raises:
            redis.exceptions.RedisError, OSError: nobody says.
        """

    def must_connect(self) -> bool:
        return False  # Its connections are its nodes'.

    def at(self, keys: Sequence[bytes], patience: float | None = None) -> Server:
        if self.must_look():
            self._look_or_wait(LOOK if patience is None else patience)
        found = self.seen_at(keys)
        if found is None:
            error = RedisConnectionError(f"Nobody says where to find keys of {self}")
            note_sent(error, False)
            raise error
        return found

    def must_look(self) -> bool:
        return time.monotonic() >= self._look_at

    def heard(self, error: BaseException) -> None:
        if isinstance(error, (RedisConnectionError, RedisTimeoutError)) or self.refuses(error):
            self._trouble = True
            if not self._in_vain:
                self._look_at = min(self._look_at, self._looked_at + SOON)

    def _look_or_wait(self, patience: float) -> None:
        until = time.monotonic() + patience
        # Where nothing is wrong, the others go on meanwhile.
        if not self._looking.acquire(timeout=patience if self._trouble else 0):
            return
        try:
            if not self.must_look():
                return  # Another has just done it.
            try:
                self._look(until)
            except (RedisError, OSError) as error:
                logger.warning("Could not read the address of %s: %s", self, error)
                pause = min(LATER * 2**self._in_vain, LATEST)
                self._in_vain += 1
            else:
                self._trouble, self._in_vain, pause = False, 0, self.STALE
            self._looked_at = time.monotonic()
            self._look_at = self._looked_at + pause
        finally:
            self._looking.release()

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
        """Forget the servers that have gone."""
        gone = set(self._nodes.values()).difference(kept)
        self._nodes = {where: node for where, node in self._nodes.items() if node not in gone}
        for node in gone:
            node.close()


def ask(server: Server, until: float, *command: Any) -> Any:
    """The answer of ``server`` to a command that can be repeated.

    Raises:
        redis.exceptions.RedisError, OSError: there is none until then (monotonic seconds), or
            within a second.
    """
    patience = min(PATIENCE, max(0.05, until - time.monotonic()))
    connection = server.borrow(patience)
    try:
        connection.send_command(*command)
        if not connection.can_read(patience):
            raise RedisTimeoutError(f"no answer within {patience:.2f} s")
        answer = connection.read_response()
    except BaseException:
        connection.disconnect()
        raise
    server.answered()
    server.rest(connection)
    return answer
