"""The data in Redis: keys, scripts, and the meaning of their replies. No input or output."""

from typing import TYPE_CHECKING

from ..extension import on_first_use
from .acquisition import LAST_TRY_SECONDS as LAST_TRY_SECONDS
from .acquisition import MAX_GRANT_AGE_SECONDS as MAX_GRANT_AGE_SECONDS
from .acquisition import WATCH_INTERVAL_SECONDS as WATCH_INTERVAL_SECONDS
from .acquisition import AcquireRequest as AcquireRequest
from .acquisition import Acquisition as Acquisition
from .acquisition import Clock as Clock
from .acquisition import Extended as Extended
from .acquisition import Grant as Grant
from .acquisition import PendingLifetime as PendingLifetime
from .acquisition import Refused as Refused
from .acquisition import Taken as Taken
from .acquisition import UnreadReply as UnreadReply
from .acquisition import Vanished as Vanished
from .acquisition import parse_acquire as parse_acquire
from .acquisition import parse_grant as parse_grant
from .acquisition import parse_renew as parse_renew
from .acquisition import release_call as release_call
from .acquisition import renew_call as renew_call
from .identity import activity as activity
from .identity import as_bytes as as_bytes
from .identity import encodable as encodable
from .identity import fingerprint as fingerprint
from .identity import hostname as hostname
from .identity import named_token as named_token
from .identity import new_token as new_token
from .identity import process_id as process_id
from .identity import waiter_id as waiter_id
from .keys import LockKeys as LockKeys
from .keys import lock_keys as lock_keys
from .keys import printable as printable
from .lock_scripts import EXTEND as EXTEND
from .script import Call as Call
from .script import Reply as Reply
from .script import Script as Script
from .script import script as script
from .script import shared as shared
from .validation import milliseconds as milliseconds

if TYPE_CHECKING:
    from .owner import Owner as Owner

__getattr__ = on_first_use(__name__, {"protocol.owner": "Owner"})
