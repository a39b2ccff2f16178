"""Large requests in parts. A slow network may need longer for one than a reply may take, so its
progress must be seen: each part restarts the time-out."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator

from .refusals import suppress

#: Bytes that are sent at once. The system holds back no more before it sends them: otherwise it
#: takes megabytes in no time, and what then passes would count as the server's silence.
PART_BYTES = 65_536


def in_parts(request: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The ``request``, whose own parts may be large, in parts of which none is."""
    for part in request:
        if len(part) <= PART_BYTES:
            yield part
            continue
        for begin in range(0, len(part), PART_BYTES):
            yield memoryview(part)[begin : begin + PART_BYTES]


def show_progress(sock: socket.socket) -> None:
    """Make ``sock`` writable only while the system holds back less than a part."""
    with suppress(AttributeError, OSError):  # The system has no such option, or this is no TCP.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PART_BYTES)
