"""A server in this process's memory, for those who have no Redis: the same scripts, no socket."""

from .connection import AsyncMemoryConnection, MemoryConnection, client_of
from .database import Database, Session, databases

__all__ = [
    "AsyncMemoryConnection",
    "Database",
    "MemoryConnection",
    "Session",
    "client_of",
    "databases",
]
