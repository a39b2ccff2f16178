"""Checks whether Redis is set up as locks need it. Each probe examines one topic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redis.exceptions import RedisError

from ..protocol import CLOCK, Call
from ..transport import run
from .probes import Finding, Level, Target, access, server, trial

__all__ = ["Finding", "Level", "Target", "examine"]

IN_MEMORY = "there is none: the locks are in the memory of each process, for its own threads only"


def examine(alias: str, *, with_trial: bool = True) -> Iterator[Finding]:
    """Examine the cache ``alias`` and its servers.

    Args:
        with_trial: whether to acquire a lock.

    Raises:
        redis.exceptions.RedisError, OSError: a server cannot be reached.
        ImproperlyConfigured: the cache cannot lock.
    """
    target = Target(alias)
    if target.cache.in_memory:
        hint = "In production, use the BACKEND django_redis_lock.cache.RedisCache."
        yield Finding("server", Level.NOTE, IN_MEMORY, hint, number="W105")
        return
    run(target.client, Call(CLOCK, (), ()))  # Raises if the server does not answer.
    yield from _servers(target)
    for probe in (access, trial) if with_trial else (access,):
        try:
            yield from probe(target)
        except (RedisError, OSError) as error:
            yield _failed(probe.__name__, error)


def _servers(target: Target) -> Iterator[Finding]:
    """The findings of all servers, each once with its servers."""
    found: dict[Finding, list[str]] = {}
    nodes = target.nodes()
    for address, client in nodes.items():
        try:
            for finding in server(target, client):
                found.setdefault(finding, []).append(address)
        except (RedisError, OSError) as error:
            found.setdefault(_failed("server", error), []).append(address)
    for finding, addresses in found.items():
        everywhere = len(addresses) == len(nodes)
        yield finding if everywhere else replace(finding, node=", ".join(addresses))


def _failed(topic: str, error: Exception) -> Finding:
    return Finding(topic, Level.ERROR, f"this could not be examined: {error}")
