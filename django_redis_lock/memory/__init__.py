"""A server in this process's memory, for those who have no Redis: the same scripts, no socket."""

from .database import Database as Database
from .database import client_of as client_of
from .database import databases as databases
