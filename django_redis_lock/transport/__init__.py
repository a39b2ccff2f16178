"""How a script reaches a server: connections, retries, discovery of primaries. Knows redis-py."""

from .address import RawConnection, may_have_run, note_sent, own_settings
from .aio_execute import (
    AsyncRawConnection,
    aconnect,
    areceive,
    arun,
    arun_all,
    asend,
    cancellable,
    cut,
    wait_awake,
)
from .aio_pools import asyncio_client
from .circuit_breaker import Breaker, CircuitOpen, Outage, set_limits
from .cluster import Cluster
from .discovery import Topology
from .execute import (
    admitted,
    adrive,
    drive,
    pack,
    pack_words,
    receive,
    run,
    run_all,
    run_at,
    send,
)
from .retry import OUTAGE, Answer, ServerBusy, is_busy, is_outage, is_pool_exhausted
from .server import Server, is_cluster, server_of, standing_in

__all__ = [
    "OUTAGE",
    "Answer",
    "AsyncRawConnection",
    "Breaker",
    "CircuitOpen",
    "Cluster",
    "Outage",
    "RawConnection",
    "Server",
    "ServerBusy",
    "Topology",
    "aconnect",
    "admitted",
    "adrive",
    "areceive",
    "arun",
    "arun_all",
    "asend",
    "asyncio_client",
    "cancellable",
    "cut",
    "drive",
    "is_busy",
    "is_cluster",
    "is_outage",
    "is_pool_exhausted",
    "may_have_run",
    "note_sent",
    "own_settings",
    "pack",
    "pack_words",
    "receive",
    "run",
    "run_all",
    "run_at",
    "send",
    "server_of",
    "set_limits",
    "standing_in",
    "wait_awake",
]
