"""Checks whether Redis is set up as locks need it. Each probe examines one topic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from redis.exceptions import RedisError

from ..protocol import CLOCK, Call
from ..transport import run
from .acl import access
from .probes import eviction, server, trial
from .target import Finding, Level, Node, NodeProbe, Target

__all__ = ["Finding", "Level", "Target", "examine"]

IN_MEMORY = "there is none: the locks are in the memory of each process, for its own threads only"


def examine(alias: str, *, with_trial: bool = True) -> Iterator[Finding]:
    """What is found at the servers of the cache ``alias``.

    Args:
        with_trial: whether to acquire a lock, too.

    Raises:
        redis.exceptions.RedisError, OSError: a server cannot be reached.
        ImproperlyConfigured: the cache cannot lock.
    """
    target = Target(alias)
    if target.cache.in_memory:
        hint = "In production, use the BACKEND django_redis_lock.cache.RedisCache."
        yield Finding("server", Level.NOTE, IN_MEMORY, hint, number="W105")
        return
    run(target.client, Call(CLOCK, (), ()))  # The one request that every ACL allows.
    for node_probe in (server, eviction):
        yield from _at_each_node(target, node_probe)
    for probe in (access, trial) if with_trial else (access,):
        try:
            yield from probe(target)
        except (RedisError, OSError) as error:
            yield _failed(probe.__name__, error)


def _at_each_node(target: Target, probe: NodeProbe) -> Iterator[Finding]:
    """What several servers have in common is said once."""
    found: dict[Finding, list[str]] = {}
    for node in target.nodes:
        for finding in _probed(target, node, probe):
            found.setdefault(finding, []).append(node.address)
    for finding, addresses in found.items():
        everywhere = len(addresses) == len(target.nodes)
        yield finding if everywhere else replace(finding, node=", ".join(addresses))


def _probed(target: Target, node: Node, probe: NodeProbe) -> list[Finding]:
    try:
        return list(probe(target, node))
    except (RedisError, OSError) as error:
        return [_failed(probe.__name__, error)]


def _failed(topic: str, error: Exception) -> Finding:
    return Finding(topic, Level.ERROR, f"this could not be examined: {error}")
