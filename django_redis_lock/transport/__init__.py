"""How a script reaches a server: connections, retries, discovery of primaries. Knows redis-py.

What tasks and pools use is imported when it is used.
"""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .address import Client as Client
from .address import RawConnection as RawConnection
from .circuit_breaker import Breaker as Breaker
from .circuit_breaker import CircuitOpen as CircuitOpen
from .plain import is_observed as is_observed
from .plain import is_plain as is_plain
from .refusals import NotReady as NotReady
from .refusals import is_outage as is_outage
from .refusals import is_refusal as is_refusal
from .refusals import may_have_run as may_have_run
from .refusals import note_sent as note_sent
from .server import Answer as Answer
from .server import Server as Server
from .server import encoded as encoded
from .server import exchange as exchange
from .server import exchange_with as exchange_with
from .server import is_cluster as is_cluster
from .server import pack as pack
from .server import pack_words as pack_words
from .server import run as run
from .server import run_all as run_all
from .server import server_of as server_of

if TYPE_CHECKING:
    from .aio_client import asyncio_client as asyncio_client
    from .aio_connection import in_background as in_background

__getattr__ = on_first_use(
    __name__,
    {"transport.aio_client": "asyncio_client", "transport.aio_connection": "in_background"},
)
