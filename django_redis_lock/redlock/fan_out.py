"""Asking several servers at once without a thread for each: everything is sent before anything is
read. Only where a connection must be made, which would keep the others waiting, a thread does it.
"""

from __future__ import annotations

import queue
import select
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from ..protocol import Call
from ..transport import Server, admitted, note_sent, pack, send

__all__ = ["ask", "spared"]

#: The share of the time that one look at what has come may count for.
TURN = 0.1
#: Seconds between two looks at whether a connection has been made, while answers are waited for.
GLANCE = 0.005


def ask(servers: Sequence[Server], calls: Mapping[int, Call], patience: float) -> dict[int, Any]:
    """What ``calls`` return, by place; or the error there was instead.

    Args:
        servers: the servers, by place.
        calls: what to ask which of them, in this order.
        patience: seconds that all of it may take. If this process stands still meanwhile, that
            counts for little: answers may have come, and servers must not be taken to be away.
    """
    asking = _Asking(servers, calls)
    asking.answers.update(spared(servers, calls))
    try:
        for place in calls:
            if place not in asking.answers:
                asking.send(place)
        asking.finish(patience)
    finally:
        # A connection with a reply still to come is of no use.
        for link in asking.links.values():
            link.disconnect()
    for place, answer in asking.answers.items():
        if isinstance(answer, RedisTimeoutError):
            servers[place].breaker.failed(answer, patience, patience)
        elif not isinstance(answer, Exception):
            servers[place].answered()
    return asking.answers


def spared(servers: Sequence[Server], calls: Mapping[int, Call]) -> dict[int, Any]:
    """The servers that need not be waited for: they are a minority and known to be away. By place,
    with the error that says so. The keeper releases a lock there."""
    away: dict[int, Any] = {}
    held_back = [place for place in calls if servers[place].breaker.held_back]
    if 2 * len(held_back) >= len(servers):
        return away
    for place in held_back:
        try:
            admitted(servers[place].breaker, None)
        except RedisError as error:
            away[place] = error
    return away


class _Asking:
    def __init__(self, servers: Sequence[Server], calls: Mapping[int, Call]) -> None:
        self._servers = servers
        self._calls = calls
        self._connected: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._connecting: set[int] = set()
        self.links: dict[int, Any] = {}
        self.answers: dict[int, Any] = {}

    def send(self, place: int) -> None:
        """Send to a server on a connection that is there; else have one made."""
        server = self._servers[place]
        if server.breaker.failing:
            try:
                admitted(server.breaker, None, self._calls[place])
            except RedisError as error:
                self.answers[place] = error
                return
        while (link := server.rested()) is not None:
            try:
                send(link, self._calls[place])
            except (RedisError, OSError):
                link.disconnect()  # It had broken at rest; perhaps the next has not.
            else:
                self.links[place] = link
                return
        self._connecting.add(place)
        name = "django_redis_lock connect"
        threading.Thread(target=self._connect, args=(place,), name=name, daemon=True).start()

    def _connect(self, place: int) -> None:
        server = self._servers[place]
        try:
            # Also if it comes too late: the next call can use it then.
            server.rest(server.connect())
        except BaseException as error:
            self._connected.put((place, error))
        else:
            self._connected.put((place, None))

    def finish(self, patience: float) -> None:
        """Read what comes, and send on the connections that are made, until the time is up."""
        left, turn = patience, patience * TURN
        while self.links or self._connecting:
            began, pause = time.monotonic(), min(left, turn)
            self._use_new(pause)
            ready = [place for place, link in self.links.items() if self._can_read(link)]
            for place in ready or self._select(pause):
                self._read(place)
            if not left:
                break
            left = max(0.0, left - min(time.monotonic() - began, turn))
        for place in (*self.links, *self._connecting):
            self._failed(place, RedisTimeoutError("Redis did not answer in time"))
            if place in self._connecting:
                note_sent(self.answers[place], False)

    def _use_new(self, pause: float) -> None:
        """Send on a connection that was made; wait for one only if there is nothing to read."""
        if not self._connecting:
            return
        try:
            place, error = self._connected.get(timeout=pause if not self.links else 0.0)
        except queue.Empty:
            return
        self._connecting.discard(place)
        link = None if error is not None else self._servers[place].rested()
        if link is None:
            trouble = error if isinstance(error, Exception) else RedisError("no connection")
            note_sent(trouble, False)
            self.answers[place] = trouble
            return
        self.links[place] = link
        try:
            send(link, self._calls[place])
        except (RedisError, OSError) as broken:
            self._failed(place, broken)

    def _can_read(self, link: Any) -> bool:
        try:
            return bool(link.can_read(0))
        except (RedisError, OSError):
            return True  # Reading will say what is wrong.

    def _select(self, pause: float) -> list[int]:
        """Those links on which something comes within ``pause`` seconds, or sooner if there are
        connections to look at."""
        places = {link._sock: place for place, link in self.links.items()}
        if not places:
            return []
        pause = min(pause, GLANCE) if self._connecting else pause
        return [places[sock] for sock in select.select([*places], [], [], pause)[0]]

    def _read(self, place: int) -> None:
        link = self.links[place]
        try:
            self.answers[place] = link.read_response()
        except NoScriptError:
            link.send_packed_command([pack(self._calls[place], known=False)])
            return
        except ResponseError as error:
            self.answers[place] = error
        except (RedisError, OSError) as error:
            self._failed(place, error)
            return
        self._servers[place].rest(self.links.pop(place))

    def _failed(self, place: int, error: Exception) -> None:
        self.answers[place] = error
        link = self.links.pop(place, None)
        if link is not None:
            link.disconnect()
