"""What a lock does while Redis is down."""

from .file_lock import held_locally as held_locally
from .locks import ON_REDIS_DOWN as ON_REDIS_DOWN
from .locks import AsyncFallbackLock as AsyncFallbackLock
from .locks import AsyncFallbackRedlock as AsyncFallbackRedlock
from .locks import FallbackLock as FallbackLock
from .locks import FallbackRedlock as FallbackRedlock
