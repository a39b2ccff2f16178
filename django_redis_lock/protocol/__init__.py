"""The data in Redis: keys, scripts, and the meaning of their replies. No input or output."""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .acquisition import LAST_TRY_SECONDS as LAST_TRY_SECONDS
from .acquisition import MAX_GRANT_AGE_SECONDS as MAX_GRANT_AGE_SECONDS
from .acquisition import WATCH_INTERVAL_SECONDS as WATCH_INTERVAL_SECONDS
from .acquisition import AcquireRequest as AcquireRequest
from .acquisition import Acquisition as Acquisition
from .acquisition import Clock as Clock
from .acquisition import Grant as Grant
from .acquisition import PendingLifetime as PendingLifetime
from .acquisition import named_token as named_token
from .acquisition import new_token as new_token
from .acquisition import parse_acquire as parse_acquire
from .acquisition import parse_grant as parse_grant
from .acquisition import release_call as release_call
from .acquisition import waiter_id as waiter_id
from .keys import FIGURES as FIGURES
from .keys import FLIGHTS as FLIGHTS
from .keys import INDEX as INDEX
from .keys import NEWS as NEWS
from .keys import RESERVED as RESERVED
from .keys import SLOTS as SLOTS
from .keys import LockKeys as LockKeys
from .keys import events_key as events_key
from .keys import flight_key as flight_key
from .keys import flight_leader as flight_leader
from .keys import flight_stream as flight_stream
from .keys import flights_pattern as flights_pattern
from .keys import index_key as index_key
from .keys import is_lock as is_lock
from .keys import is_of_a_database as is_of_a_database
from .keys import is_reserved as is_reserved
from .keys import key_of_companion as key_of_companion
from .keys import keys_at as keys_at
from .keys import lock_keys as lock_keys
from .keys import printable as printable
from .keys import process_key as process_key
from .keys import quorum_fence_key as quorum_fence_key
from .keys import refuse_reserved as refuse_reserved
from .keys import slot_of as slot_of
from .keys import slot_tag as slot_tag
from .keys import wake_key as wake_key
from .lock_scripts import EXTEND as EXTEND
from .lock_scripts import LEAVE as LEAVE
from .lock_scripts import RELEASE as RELEASE
from .lock_scripts import RENEW as RENEW
from .owner import DEFAULT_RETRY_SECONDS as DEFAULT_RETRY_SECONDS
from .owner import HEARTBEAT_EVERY as HEARTBEAT_EVERY
from .owner import HELD as HELD
from .owner import MAX_FENCE as MAX_FENCE
from .owner import MAX_PID as MAX_PID
from .owner import MAX_UNIX_TIME as MAX_UNIX_TIME
from .owner import SILENT_AFTER as SILENT_AFTER
from .owner import HolderInfo as HolderInfo
from .owner import Owner as Owner
from .owner import activity as activity
from .owner import as_bytes as as_bytes
from .owner import bounded as bounded
from .owner import described as described
from .owner import encodable as encodable
from .owner import fields_of as fields_of
from .owner import fingerprint as fingerprint
from .owner import hostname as hostname
from .owner import process_id as process_id
from .owner import seconds_to_retry as seconds_to_retry
from .script import Call as Call
from .script import Script as Script
from .script import script as script
from .script import shared as shared
from .validation import MAX_LIMIT as MAX_LIMIT
from .validation import ON_REDIS_DOWN as ON_REDIS_DOWN
from .validation import check_bool as check_bool
from .validation import check_count as check_count
from .validation import check_limit as check_limit
from .validation import check_name as check_name
from .validation import check_name_in_cache as check_name_in_cache
from .validation import check_names as check_names
from .validation import check_policy as check_policy
from .validation import check_seconds as check_seconds
from .validation import check_share as check_share
from .validation import check_token as check_token
from .validation import check_wait as check_wait
from .validation import longest_hold as longest_hold
from .validation import milliseconds as milliseconds

if TYPE_CHECKING:
    from .holder_scripts import CLOCK as CLOCK
    from .holder_scripts import HEARTBEAT as HEARTBEAT
    from .holder_scripts import HEARTBEATS as HEARTBEATS
    from .holder_scripts import RECORD_EVENT as RECORD_EVENT
    from .holder_scripts import reset_call as reset_call

__getattr__ = on_first_use(
    __name__, {"protocol.holder_scripts": "CLOCK HEARTBEAT HEARTBEATS RECORD_EVENT reset_call"}
)
