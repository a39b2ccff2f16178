"""The algorithm of ``get_or_set``: one caller computes a missing value, all others wait for it.

The first caller that finds no value leads a *flight*: it computes the value and stores it. The
other callers follow. The threads of one process (or the tasks of one event loop) wait in memory for
one of them, and that one waits with a blocking read of the flight's stream, which wakes the
followers of all processes at once. Then each process reads the value once, and each caller decodes
a separate copy.

A flight lives ``flight_timeout`` seconds, and the leader's keeper renews it during the computation.
If the leader dies, the flight expires, and one of the followers leads the next.

The algorithm is written once, as generators of steps. A step is what a method of a runner returns:
with ``ThreadRunner`` the result, with ``AsyncRunner`` an awaitable. This package does not import
Django.
"""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .flight import TOO_LATE as TOO_LATE
from .flight import CoordinationError as CoordinationError
from .flight import DeferredCall as DeferredCall
from .flight import Flight as Flight
from .flight import FlightRenewal as FlightRenewal
from .flight import Overtaken as Overtaken
from .flight import Postponed as Postponed
from .flight import Producer as Producer
from .flight import Runner as Runner
from .flight import Undecodable as Undecodable
from .flight import computing as computing
from .flight import encode_value as encode_value
from .flight import in_flight as in_flight
from .flight import innermost_flight as innermost_flight
from .flight import own_flights as own_flights
from .flight import read as read
from .runners import ThreadRunner as ThreadRunner
from .runners import use_background as use_background
from .scripts import DELETE as DELETE
from .scripts import END_FLIGHT as END_FLIGHT
from .scripts import END_SEEN as END_SEEN
from .scripts import EXPIRE_AT as EXPIRE_AT
from .scripts import LET_GO as LET_GO
from .scripts import MARK_STALE as MARK_STALE
from .scripts import WRITE as WRITE

if TYPE_CHECKING:
    from .tasks import AsyncRunner as AsyncRunner

__getattr__ = on_first_use(__name__, {"singleflight.tasks": "AsyncRunner"})
