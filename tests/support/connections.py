"""A connection whose replies a test puts into it."""

from __future__ import annotations

from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError


class Connection:
    """Has the ``reply``, or raises it; without one it is silent."""

    def __init__(self, reply: Any = None, broken: bool = False) -> None:
        self.replies = [] if reply is None else [reply]
        self.broken, self.closed = broken, False
        self.sent: list[bytes] = []

    def send_packed_command(self, command: list[bytes]) -> None:
        if self.broken:
            raise RedisConnectionError("closed by the server")
        self.sent += command

    def can_read(self, timeout: float = 0) -> bool:
        return bool(self.replies)

    def read_response(self) -> Any:
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    def disconnect(self) -> None:
        self.closed = True
