"""Connections that were idle.

A firewall, a load balancer or a network address translation forgets a connection without traffic,
often after some minutes, and tells neither end. What is sent on it later is not answered, although
the server is up. So the silence of such a connection says nothing about the server.
"""

from __future__ import annotations

import socket
from typing import Any

from redis.exceptions import RedisError, ResponseError

#: Seconds for which an idle connection is used without a check.
TRUSTED_SECONDS = 1.0
#: Seconds that an idle connection has to answer; then it is replaced.
PROBE_SECONDS = 0.5

#: Names of TCP options, and seconds: without traffic the system asks the other end after
#: so many, so often; and after these, data that were not acknowledged end the connection.
_KEEPALIVE = (("TCP_KEEPIDLE", 20), ("TCP_KEEPALIVE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
_USER_TIMEOUT_MS = 35_000

#: For ``socket_keepalive_options``, if the settings have none.
KEEPALIVE_OPTIONS = {
    getattr(socket, name): value for name, value in _KEEPALIVE if hasattr(socket, name)
}
if hasattr(socket, "TCP_USER_TIMEOUT"):
    KEEPALIVE_OPTIONS[socket.TCP_USER_TIMEOUT] = _USER_TIMEOUT_MS


def still_answers(connection: Any, seconds: float) -> bool:
    """Whether the server answers on ``connection``, ours or redis-py's, within so many seconds."""
    try:
        if connection.can_read(0):  # Nothing but its end.
            return False
        connection.send_command("PING")
        if not connection.can_read(seconds):
            return False
        connection.read_response()
    except ResponseError:
        pass  # This user may not, or the server is busy: it answers.
    except (RedisError, OSError):
        return False
    return True
