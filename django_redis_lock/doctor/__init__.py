"""Checks whether Redis is set up as locks need it. Each probe examines one topic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from redis.exceptions import RedisError

from ..protocol import CLOCK, Call
from ..transport import run
from .acl import access
from .findings import Finding, Level, NodeProbe, Probe
from .locks import held, stuck, timeouts, trial
from .servers import NODE_PROBES, SETTINGS_PROBES
from .target import Target

__all__ = ["ALL", "SETTINGS", "Finding", "Level", "Target", "examine"]

#: Probes of the servers, and of the cache as a whole.
Probes = tuple[Sequence[NodeProbe], Sequence[Probe]]
ALL: Probes = (NODE_PROBES, (access, trial, timeouts, stuck, held))
#: Only what the settings of the cache and of its server say.
SETTINGS: Probes = (SETTINGS_PROBES, (access, timeouts))

IN_MEMORY = "there is none: the locks are in the memory of each process, for its own threads only"


def examine(alias: str, probes: Probes = ALL) -> Iterator[Finding]:
    """What there is to say of the cache ``alias``; the servers first.

    Raises:
        redis.exceptions.RedisError, OSError: a server cannot be reached.
        ImproperlyConfigured: the cache cannot lock.
    """
    of_nodes, of_all = probes
    patient = Target(alias)
    if patient.cache.in_memory:
        yield Finding("server", Level.NOTE, IN_MEMORY)
        return
    run(patient.client, Call(CLOCK, (), ()))  # The one question that every rule allows.
    for probe in of_nodes:
        yield from _everywhere(patient, probe)
    for look in of_all:
        try:
            yield from look(patient)
        except (RedisError, OSError) as error:
            yield Finding(look.__name__, Level.ERROR, f"this could not be examined: {error}")


def _everywhere(patient: Target, probe: NodeProbe) -> Iterator[Finding]:
    """What several servers have in common is said once."""
    found: dict[Finding, list[str]] = {}
    for node in patient.nodes:
        try:
            answers = list(probe(patient, node))
        except (RedisError, OSError) as error:
            text = f"this could not be examined: {error}"
            answers = [Finding(probe.__name__.replace("_", " "), Level.ERROR, text)]
        for finding in answers:
            found.setdefault(finding, []).append(node.address)
    topics = list(dict.fromkeys(finding.topic for finding in found))
    for finding, nodes in sorted(found.items(), key=lambda item: topics.index(item[0].topic)):
        all_of_them = len(nodes) == len(patient.nodes)
        yield finding if all_of_them else replace(finding, node=", ".join(nodes))
