"""Which locks are held in a database, and their forced release."""

from .database import KEYS_PER_SCRIPT as KEYS_PER_SCRIPT
from .database import delete_matching as delete_matching
from .database import empty as empty
from .forced_release import Outcome as Outcome
from .forced_release import release as release
from .listing import FLIGHT as FLIGHT
from .listing import LOCK as LOCK
from .listing import MAX_DESCRIBED as MAX_DESCRIBED
from .listing import MAX_ENTRIES as MAX_ENTRIES
from .listing import Inspection as Inspection
from .listing import Inventory as Inventory
from .listing import LockInfo as LockInfo
from .listing import WaiterInfo as WaiterInfo
from .listing import inspect as inspect
from .listing import list_held as list_held
