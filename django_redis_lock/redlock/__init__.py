"""One lock over several independent servers."""

from .lock import AsyncRedlock as AsyncRedlock
from .lock import Redlock as Redlock
