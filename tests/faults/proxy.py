"""A network between client and server that loses what it is told to lose."""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from django_redis_lock.contrib import limit
from django_redis_lock.protocol import holder_scripts, lock_scripts
from django_redis_lock.protocol.script import Script
from tests.redis_server import RedisServer


class HeldBack:
    """The next requests that contain one of ``marks`` are kept here, and reach the server when they
    are delivered, whatever their client has done since."""

    def __init__(self, marks: tuple[bytes, ...], times: int) -> None:
        self.marks, self.left = marks, times
        #: Released with each that is kept.
        self.kept = threading.Semaphore(0)
        #: How each client has ended its connection: by RST, or else FIN.
        self.resets: list[bool] = []
        self._requests: list[tuple[socket.socket, socket.socket, bytes]] = []

    def take(self, here: socket.socket, there: socket.socket, data: bytes) -> bool:
        """Whether ``data`` is one of them; returns when its client has ended the connection."""
        if self.left <= 0 or not any(mark in data for mark in self.marks):
            return False
        self.left -= 1
        self._requests.append((here, there, data))
        self.kept.release()
        try:
            while here.recv(65536):
                pass
            self.resets.append(False)
        except ConnectionResetError:
            self.resets.append(True)
        here.close()
        return True

    def deliver(self) -> list[bytes]:
        """What the server answers to each, when it has carried all of them out; a client that still
        waits gets it."""
        requests, self._requests = self._requests, []
        replies = []
        for here, there, data in requests:
            there.sendall(data)
            replies.append(there.recv(65536))
            with suppress(OSError):
                here.sendall(replies[-1])
            there.close()
        return replies


class Rule:
    """What to do with the next requests that contain one of ``marks``."""

    def __init__(
        self,
        marks: tuple[bytes, ...],
        times: int,
        forward: bool,
        cut: bool = True,
        reset: bool = False,
        delay: float = 0.0,
        freezes: bool = False,
        reply: bytes = b"",
    ) -> None:
        self.marks = marks
        self.left = times
        self.forward = forward
        self.cut = cut
        #: Whether the client gets RST in place of FIN.
        self.reset = reset
        #: Seconds by which the reply is delayed; then nothing is cut.
        self.delay = delay
        #: Whether everything is held back after the reply; then nothing is cut.
        self.freezes = freezes
        #: In which reply, on that connection.
        self.reply = reply
        self.applied = threading.Semaphore(0)

    def matches(self, data: bytes) -> bool:
        return self.left > 0 and any(mark in data for mark in self.marks)


class Proxy:
    """Passes on what comes for ``server``; a context manager."""

    def __init__(self, server: RedisServer) -> None:
        self._there = ("127.0.0.1", server.port)
        self._rules: list[Rule] = []
        self._holding_back: list[HeldBack] = []
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = self._away = False
        self._greets: Callable[[socket.socket], object] | None = None
        #: What the server is to answer to all calls, but for those that introduce a client.
        self.refusal = b""
        #: The only command that is answered so; empty for all.
        self.refused_command = b""
        self._introduces_only = False
        #: A command at which a connection is closed.
        self.closes_at = b""
        #: How many calls were refused, or closed their connection.
        self.refused = 0
        #: Seconds for which a new connection carries nothing.
        self.accepts_after = 0.0
        #: Connections that were idle at this moment are forgotten, or on which a pop waited.
        self._idle_forgotten_at = self._waits_forgotten_at = -math.inf
        self._flows = threading.Event()
        self._flows.set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        with server.client() as client, client.pipeline(transaction=False) as pipe:
            modules = (limit, lock_scripts, holder_scripts)
            for script in (each for module in modules for each in vars(module).values()):
                if isinstance(script, Script):
                    # Else the first reply to be lost would be the news that it is not known.
                    pipe.execute_command("SCRIPT LOAD", script.source)
            pipe.execute()
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

    def hold_back(self, *scripts: Script, command: bytes = b"", times: int = 1) -> HeldBack:
        """Keep the next requests for one of ``scripts``, or with ``command``, for later."""
        marks = [mark for each in scripts for mark in (each.sha.encode(), each.source.encode())]
        held = HeldBack((*marks, *([command] if command else ())), times)
        self._holding_back.append(held)
        return held

    def swallow(self, command: bytes, times: int = 1) -> Rule:
        """Lose the next requests for ``command``, and let nobody know."""
        return self._add(Rule((command,), times, forward=False, cut=False))

    def reset_after_request(self, mark: bytes = b"", times: int = 1) -> Rule:
        """Carry the next requests with ``mark`` to the server, and reset their connections before
        its reply."""
        return self._add(Rule((mark,), times, forward=True, reset=True))

    def delay_reply(self, seconds: float, mark: bytes = b"", times: int = 1) -> Rule:
        """The replies to the next requests with ``mark`` come so much later."""
        return self._add(Rule((mark,), times, forward=True, cut=False, delay=seconds))

    def freeze_after_reply(self, mark: bytes, reply: bytes) -> Rule:
        """Hold back everything once one with ``reply`` was carried, after a request with ``mark``
        on the same connection."""
        return self._add(Rule((mark,), 1, forward=True, cut=False, freezes=True, reply=reply))

    @contextmanager
    def refusing(self, reply: bytes, command: bytes = b"") -> Iterator[None]:
        """Answer ``reply``, an error or (with its type) another reply, in place of the server, to
        all calls or to one ``command``. Nothing of that is carried to it."""
        self.refusal = reply if reply.startswith(b"*") else b"-%b\r\n" % reply
        self.refused_command = command
        yield
        self.refusal = self.refused_command = b""

    @contextmanager
    def closing_at(self, command: bytes) -> Iterator[None]:
        """Close each connection on which ``command`` comes, as a proxy does that has none."""
        self.closes_at = command
        yield
        self.closes_at = b""

    @contextmanager
    def unanswered(self) -> Iterator[None]:
        """Cut all connections; accept new ones, and leave them without an answer."""
        with self._greeting(self._swallow):
            yield
        self.cut()

    @contextmanager
    def no_handshake(self) -> Iterator[None]:
        """Cut all connections; reset new ones when their first request comes, which of a client
        with TLS is the first message of its handshake."""
        with self._greeting(_reset_at_first_request):
            yield

    @contextmanager
    def another_program(self) -> Iterator[None]:
        """Cut all connections; another program has the address, and answers new ones."""
        answer = b"HTTP/1.1 400 Bad Request\r\n\r\n"
        with self._greeting(lambda here: here.recv(65536) and here.sendall(answer)):
            yield

    @contextmanager
    def silent_after_introduction(self) -> Iterator[None]:
        """Answer introductions and PING, as a proxy does by itself, and swallow all other calls."""
        self._introduces_only = True
        yield
        self._introduces_only = False
        self.cut()

    @contextmanager
    def _greeting(self, greet: Callable[[socket.socket], object]) -> Iterator[None]:
        self._greets = greet
        self.cut()
        yield
        self._greets = None

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

    def forget(self, *, waits: bool = False) -> None:
        """Swallow what comes on the idle connections from now on, and tell neither end, as if the
        address led elsewhere. A call or an introduction under way ends: else its silence would be
        the server's. ``waits``: also on connections on which a pop waits."""
        self._idle_forgotten_at = time.monotonic()
        if waits:
            self._waits_forgotten_at = self._idle_forgotten_at

    def cut(self) -> None:
        """Cut all connections."""
        for pair in tuple(self._pairs):
            self._close(pair)

    def end_replies(self) -> None:
        """Clients hear of the end of their connections; what they still send is not refused."""
        for here, _ in tuple(self._pairs):
            here.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Cut all connections, with RST in place of FIN."""
        for pair in tuple(self._pairs):
            _reset_when_closed(pair[0])
            with suppress(OSError):
                pair[1].shutdown(socket.SHUT_RDWR)  # Its thread closes both.

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
            carry = self._carry if self._greets is None else partial(self._greet, self._greets)
            threading.Thread(target=carry, args=pair, daemon=True).start()

    def _greet(
        self,
        greet: Callable[[socket.socket], object],
        here: socket.socket,
        there: socket.socket,
    ) -> None:
        with suppress(OSError):
            greet(here)
        self._close((here, there))

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        losing: Rule | None = None
        freezing: Rule | None = None
        held_until = -math.inf
        requests = b""
        asked, idle_since = False, math.inf  # The latter since a reply to more than introductions.
        waits_since = math.inf
        time.sleep(self.accepts_after)
        with suppress(OSError, ValueError):  # The latter from a socket closed meanwhile.
            while True:
                readable, _, _ = select.select((here, there), (), ())
                self._flows.wait()
                is_forgotten = idle_since < self._idle_forgotten_at
                if is_forgotten or waits_since < self._waits_forgotten_at:
                    self._swallow(here)
                    break
                if there in readable:
                    data = there.recv(65536)
                    if not data or losing is not None:
                        break
                    time.sleep(max(0.0, held_until - time.monotonic()))
                    here.sendall(data)
                    waits_since = math.inf
                    idle_since = time.monotonic() if asked else math.inf
                    if freezing is not None and freezing.reply in data:
                        self._flows.clear()
                        freezing.applied.release()
                if here in readable:
                    data = here.recv(PART)
                    if not data:
                        break
                    names = commands_in(data) or [b"a part"]
                    asked = asked or not INTRODUCING.issuperset(names)
                    idle_since = math.inf
                    waits_since = math.inf if WAITING.isdisjoint(names) else time.monotonic()
                    if self.closes_at and self.closes_at in names:
                        self.refused += 1
                        break
                    if self.refusal:
                        requests += data
                        names = commands_in(requests)
                        if names is None:
                            continue
                        data, requests = requests, b""
                        is_refused = names[0] not in INTRODUCING
                        if self.refused_command:
                            is_refused = self.refused_command in names
                        if is_refused:
                            self.refused += 1
                            here.sendall(self.refusal * len(names))
                            continue
                    if self._introduces_only and not INTRODUCING.issuperset(
                        name for name in commands_in(data) or [b""] if name != b"PING"
                    ):
                        continue
                    if any(each.take(here, there, data) for each in self._holding_back):
                        self._pairs.discard((here, there))
                        return
                    rule = next((each for each in list(self._rules) if each.matches(data)), None)
                    if rule is not None:
                        rule.left -= 1
                        if not rule.left:
                            self._rules.remove(rule)
                        if rule.delay:
                            held_until = time.monotonic() + rule.delay
                            rule.applied.release()
                        elif rule.freezes:
                            freezing = rule
                        elif not rule.cut:
                            rule.applied.release()
                            continue
                        else:
                            losing = rule
                            if rule.reset:
                                _reset_when_closed(here)
                            if not rule.forward:
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
                if not _is_to_reset(end):
                    end.shutdown(socket.SHUT_RDWR)
            end.close()


#: Bytes of a request that are carried at once.
PART = 65_536
#: Commands whose reply may take long.
WAITING = frozenset((b"BLPOP", b"BLMPOP", b"XREAD", b"SUBSCRIBE"))
#: Commands with which clients introduce themselves; servers that refuse others answer to these.
INTRODUCING = frozenset((b"HELLO", b"AUTH", b"SELECT", b"CLIENT"))
_AT_ONCE = struct.pack("ii", 1, 0)


def _reset_when_closed(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)


def _reset_at_first_request(end: socket.socket) -> None:
    end.recv(65536)
    _reset_when_closed(end)


def _is_to_reset(end: socket.socket) -> bool:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_LINGER, len(_AT_ONCE)) == _AT_ONCE


def commands_in(requests: bytes) -> list[bytes] | None:
    """The names of the commands in ``requests``; None if the last is not complete."""
    names, start = [], 0
    try:
        while start < len(requests):
            end = requests.index(b"\r\n", start)
            words, start = int(requests[start + 1 : end]), end + 2
            for word in range(words):
                end = requests.index(b"\r\n", start)
                length = int(requests[start + 1 : end])
                start = end + 2 + length + 2
                if start > len(requests):
                    return None
                if not word:
                    names.append(requests[end + 2 : end + 2 + length].upper())
    except ValueError:
        return None
    return names
