"""Reading the figures that all processes have written to a server."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from ..protocol import FIGURES, Call
from ..transport import run
from .figures import PERIODS, new, unpack
from .scripts import READ_FIGURES
from .writing import name_of

__all__ = ["read"]

#: Seconds to wait for the answer.
PATIENCE = 5.0


def read(client: Any, site: str, period: str) -> dict[str, list[list[int]]]:
    """Of each group of a site its figures in each bucket, the oldest first.

    Args:
        client: a redis-py client.
        site: the KEY_PREFIX of the caches.
        period: "hour" or "day".

    Raises:
        ValueError: there is no such period.
        redis.exceptions.RedisError: Redis could not be asked.
    """
    if period not in PERIODS:
        allowed = " or ".join(map(repr, PERIODS))
        raise ValueError(f"period must be {allowed}, not {period!r}")
    width, kept = PERIODS[period]
    answer = run(client, Call(READ_FIGURES, (FIGURES[period],), ()), patience=PATIENCE).value
    seconds, found = int(answer[0]), [_bytes(part) for part in answer[1]]
    oldest = seconds // width - kept + 1
    wanted = name_of(site, "")
    groups: defaultdict[str, list[list[int]]] = defaultdict(lambda: [new() for _ in range(kept)])
    for field, figures in zip(found[::2], found[1::2], strict=True):
        number, _, name = field.partition(b" ")
        if name.startswith(wanted) and 0 <= (at := int(number) - oldest) < kept:
            group = name[len(wanted) :].decode(errors="replace")
            groups[group][at] = unpack(figures)
    return dict(groups)


def _bytes(value: Any) -> bytes:
    """A reply's string, also from a client that decodes its replies."""
    return value if isinstance(value, bytes) else str(value).encode()
