"""For every request: caches whole pages, and notes what a request or a task is doing, for the
descriptions of the holders of locks."""

from .activity import RequestActivity as RequestActivity
from .activity import doing as doing
from .activity import note_request as note_request
from .activity import note_tasks as note_tasks
from .activity import request_of as request_of
from .pages import CachedPageMiddleware as CachedPageMiddleware
