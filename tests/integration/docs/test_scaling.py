"""What a cycle of a lock costs: the figures in ``docs/scaling.md``, counted by Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_redis_lock import Lock, Redlock
from tests.redis_server import RedisServer

CYCLES = 50
#: How often to count, if the keeper wrote something each time, or a server was late.
ATTEMPTS = 100
#: Calls, bytes to Redis and bytes from it, for each cycle.
CALLS, SENT, RECEIVED = 2, 710, 60


def cost(server: RedisServer, work: Callable[[], Any]) -> tuple[float, float, float]:
    """Scripts called, bytes sent and bytes received in each of CYCLES cycles."""
    with server.client() as client:
        work()  # Connects, and teaches the server the scripts.
        client.info()
        first = client.info()
        asking = client.info()
        work()
        last = client.info()
        taken = []
        for name in ("total_net_input_bytes", "total_net_output_bytes"):
            taken.append(last[name] - asking[name] - (asking[name] - first[name]))
        client.config_resetstat()
        work()
        calls = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        return calls / CYCLES, taken[0] / CYCLES, taken[1] / CYCLES


def expect_the_figures(server: RedisServer, work: Callable[[], Any]) -> None:
    """That a cycle costs no more, when nothing else happens in the process."""
    counted = []
    for _ in range(ATTEMPTS):
        counted.append(cost(server, work))
        calls, sent, received = counted[-1]
        if calls == CALLS and sent < SENT and received < RECEIVED:
            return
    raise AssertionError(f"calls, bytes sent and received: {counted}")


def cycles(lock: Any) -> None:
    for _ in range(CYCLES):
        assert lock.acquire()
        lock.release()


def test_one_server(own_server: RedisServer) -> None:
    lock = Lock(own_server.client(), ":lock:1:import", timeout=30)
    expect_the_figures(own_server, lambda: cycles(lock))


def test_each_of_several_servers(own_server: RedisServer) -> None:
    others = [RedisServer() for _ in range(2)]
    try:
        for server in others:
            server.start()
        clients = [server.client() for server in (own_server, *others)]
        lock = Redlock(clients, ":lock:1:import", timeout=30)
        expect_the_figures(own_server, lambda: cycles(lock))
    finally:
        for server in others:
            server.close()
