"""Probes of each server: what it is, and whether it can evict locks."""

from __future__ import annotations

from collections.abc import Iterator

from .target import Finding, Level, Node, Target

#: The oldest Redis that is supported.
OLDEST_VERSION = (6, 2)


def server(target: Target, node: Node) -> Iterator[Finding]:
    info = node.info
    if info is None:
        yield Finding(
            "server",
            Level.NOTE,
            f'unknown: the user "{target.user}" may not run INFO',
            "Allow +info to check version and eviction.",
        )
        return
    name, version = _name_and_version(node)
    mode = node.get("redis_mode") or node.get("server_mode") or "standalone"
    role = {"master": "primary", "slave": "replica"}.get(node.get("role"), node.get("role"))
    text = f"{name} {version}, {mode}, {role}"
    # Valkey says for old clients which Redis it is like.
    if _numbers(str(info.get("redis_version", version))) < OLDEST_VERSION:
        wanted = ".".join(map(str, OLDEST_VERSION))
        hint = f"Locks need Redis {wanted} or later, or Valkey."
        yield Finding("server", Level.ERROR, text, hint, number="E101")
    elif node.get("role") == "slave":
        yield Finding(
            "server",
            Level.ERROR,
            f"{text}: a replica cannot take locks",
            "Put the address of the primary first in LOCATION, or use SentinelClient.",
            number="E102",
        )
    elif node.get("cluster_enabled") and not target.is_cluster:
        yield Finding(
            "server",
            Level.ERROR,
            f"{text}: a single node of a cluster has only some of the locks",
            'Set CLIENT_CLASS to "django_redis_lock.clients.ClusterClient".',
            number="E103",
        )
    else:
        yield Finding("server", Level.OK, text)


def _name_and_version(node: Node) -> tuple[str, str]:
    for name, field in (("Valkey", "valkey_version"), ("Dragonfly", "dragonfly_version")):
        if node.get(field):
            return name, str(node.get(field))
    return "Redis", str(node.get("redis_version", "of an unknown version"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def eviction(target: Target, node: Node) -> Iterator[Finding]:
    """A lock is a key with an end, and evicting takes such keys first of all, or any key."""
    policy = node.get("maxmemory_policy")
    if policy is None:
        return
    limit, evicted = int(node.get("maxmemory", 0)), int(node.get("evicted_keys", 0))
    if policy == "noeviction":
        yield Finding("eviction", Level.OK, "noeviction: locks are never evicted")
    elif not limit:
        text = f"{policy}, but no maxmemory is set: nothing is evicted"
        yield Finding("eviction", Level.OK, text)
    else:
        so_far = f"; {evicted} keys have been evicted so far" if evicted else ""
        yield Finding(
            "eviction",
            Level.WARNING,
            f"{policy}: when memory runs out (maxmemory is {_bytes(limit)}), locks can be evicted "
            f"like any other key{so_far}",
            "Keep locks on a server with maxmemory-policy noeviction: add a cache alias for it, "
            'and name it in the setting USING: DJANGO_REDIS_LOCK = {"USING": "locks"}.',
            number="W101",
        )


def _bytes(number: int) -> str:
    size = float(number)
    for unit in ("bytes", "kB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GB"
