"""How a script reaches a server: connections, retries, discovery of primaries. Knows redis-py.

What tasks and pools use is imported when it is used.
"""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .address import PROBE_SECONDS as PROBE_SECONDS
from .address import RawConnection as RawConnection
from .address import has_socket as has_socket
from .address import is_cluster as is_cluster
from .address import may_have_run as may_have_run
from .address import note_sent as note_sent
from .address import own_settings as own_settings
from .address import shut as shut
from .address import still_answers as still_answers
from .circuit_breaker import Breaker as Breaker
from .circuit_breaker import CircuitOpen as CircuitOpen
from .execute import Answer as Answer
from .execute import admitted as admitted
from .execute import exchange as exchange
from .execute import is_observed as is_observed
from .execute import pack as pack
from .execute import pack_words as pack_words
from .execute import read_value as read_value
from .execute import receive as receive
from .execute import run as run
from .execute import run_all as run_all
from .execute import run_at as run_at
from .execute import send as send
from .refusals import OUTAGE as OUTAGE
from .refusals import PASSING as PASSING
from .refusals import NotReady as NotReady
from .refusals import explained as explained
from .refusals import is_busy as is_busy
from .refusals import is_misdirected as is_misdirected
from .refusals import is_outage as is_outage
from .refusals import is_pool_exhausted as is_pool_exhausted
from .refusals import is_refusal as is_refusal
from .refusals import refusal as refusal
from .refusals import refusal_in as refusal_in
from .registry import check_for_tasks as check_for_tasks
from .registry import encoded as encoded
from .registry import server_of as server_of
from .registry import standing_in as standing_in
from .server import Server as Server
from .server import readable as readable

if TYPE_CHECKING:
    from .aio_client import aconnect as aconnect
    from .aio_client import aexchange as aexchange
    from .aio_client import aread_value as aread_value
    from .aio_client import arun as arun
    from .aio_client import arun_all as arun_all
    from .aio_client import asyncio_client as asyncio_client
    from .aio_client import cancellable as cancellable
    from .aio_connection import AsyncRawConnection as AsyncRawConnection
    from .aio_connection import in_background as in_background
    from .aio_connection import wait_awake as wait_awake
    from .guarded_connection import guard as guard
    from .over_a_loop import spare_of_a_loop as spare_of_a_loop
    from .pool import follow_address as follow_address

__getattr__ = on_first_use(
    __name__,
    {
        "transport.aio_client": "aconnect aexchange aread_value arun arun_all asyncio_client "
        "cancellable",
        "transport.aio_connection": "AsyncRawConnection in_background wait_awake",
        "transport.guarded_connection": "guard",
        "transport.over_a_loop": "spare_of_a_loop",
        "transport.pool": "follow_address",
    },
)
