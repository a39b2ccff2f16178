"""A network between client and server that loses what it is told to lose."""

from __future__ import annotations

import math
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock.contrib import limit
from django_redis_lock.protocol import holder_scripts, lock_scripts
from django_redis_lock.protocol.script import Script
from tests.redis_server import RedisServer


class Rule:
    """What to do with the next requests that contain one of ``marks``."""

    def __init__(
        self, marks: tuple[bytes, ...], times: int, forward: bool, cut: bool = True
    ) -> None:
        self.marks = marks
        self.left = times
        self.forward = forward
        self.cut = cut
        self.applied = threading.Semaphore(0)

    def matches(self, data: bytes) -> bool:
        return self.left > 0 and any(mark in data for mark in self.marks)


class Proxy:
    """Passes on what comes for ``server``; a context manager."""

    def __init__(self, server: RedisServer) -> None:
        self._there = ("127.0.0.1", server.port)
        self._rules: list[Rule] = []
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = self._away = False
        #: Seconds without traffic after which a connection is forgotten.
        self.forgets_after = math.inf
        #: Connections made before this moment are forgotten.
        self._forgotten_until = -math.inf
        self._flows = threading.Event()
        self._flows.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        with server.client() as client:
            modules = (limit, lock_scripts, holder_scripts)
            for script in (each for module in modules for each in vars(module).values()):
                if isinstance(script, Script):
                    # Else the first reply to be lost would be the news that it is not known.
                    client.script_load(script.source)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed = True
        self._flows.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # A close would not wake the accept.
        self._listening.close()
        self.cut()

    def client(self, **options: Any) -> redis.Redis:
        """A client that goes through here; it tries nothing twice by itself."""
        return redis.Redis(port=self.port, retry=Retry(NoBackoff(), 0), **options)

    def lose_reply(self, script: Script, times: int = 1) -> Rule:
        """Carry the next requests for ``script`` to the server, then cut their connections."""
        return self._add(Rule((script.sha.encode(), script.source.encode()), times, True))

    def lose_reply_to(self, command: bytes, times: int = 1) -> Rule:
        """As ``lose_reply``, of a ``command``."""
        return self._add(Rule((b"\r\n%b\r\n" % command,), times, True))

    def lose_request(self, script: Script, times: int = 1) -> Rule:
        """Cut the connections of the next requests for ``script``; the server never sees them."""
        return self._add(Rule((script.sha.encode(), script.source.encode()), times, False))

    def swallow(self, command: bytes, times: int = 1) -> Rule:
        """Lose the next requests for ``command``, and let nobody know."""
        return self._add(Rule((command,), times, forward=False, cut=False))

    @contextmanager
    def away(self) -> Iterator[None]:
        """Cut all connections, and let none come about."""
        self._away = True
        self.cut()
        yield
        self._away = False

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Hold back everything until later."""
        self._flows.clear()
        yield
        self._flows.set()

    def lead_to(self, server: RedisServer) -> None:
        """New connections lead to ``server`` from now on, as after a failover behind one name;
        those that there are stay where they are."""
        self._there = ("127.0.0.1", server.port)

    def forget(self) -> None:
        """Swallow what comes on the present connections from now on, and tell neither end, as if
        the address led elsewhere."""
        self._forgotten_until = time.monotonic()

    def cut(self) -> None:
        """Cut all connections."""
        for pair in tuple(self._pairs):
            self._close(pair)

    def _add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule

    def _accept(self) -> None:
        while not self._closed:
            try:
                here, _ = self._listening.accept()
            except OSError:
                return
            if self._away:
                here.close()
                continue
            try:
                pair = (here, socket.create_connection(self._there))
            except OSError:
                here.close()
                continue
            self._pairs.add(pair)
            threading.Thread(target=self._carry, args=pair, daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        losing: Rule | None = None
        began = used_at = time.monotonic()
        with suppress(OSError, ValueError):  # The latter from a socket closed meanwhile.
            while True:
                readable, _, _ = select.select((here, there), (), ())
                self._flows.wait()
                idle, used_at = time.monotonic() - used_at, time.monotonic()
                if idle > self.forgets_after or began < self._forgotten_until:
                    self._swallow(here)
                    break
                if there in readable:
                    data = there.recv(65536)
                    if not data or losing is not None:
                        break
                    here.sendall(data)
                if here in readable:
                    data = here.recv(65536)
                    if not data:
                        break
                    losing = next((rule for rule in self._rules if rule.matches(data)), None)
                    if losing is not None:
                        losing.left -= 1
                        if not losing.cut:
                            losing = None
                            continue
                        if not losing.forward:
                            break
                    there.sendall(data)
        self._close((here, there))
        if losing is not None:
            losing.applied.release()

    @staticmethod
    def _swallow(here: socket.socket) -> None:
        """Until the client closes the connection: no FIN and no RST of the server's reaches it."""
        while here.recv(65536):
            pass

    def _close(self, pair: tuple[socket.socket, socket.socket]) -> None:
        self._pairs.discard(pair)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
