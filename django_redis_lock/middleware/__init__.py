"""For every request: caches whole pages, and notes what a request or a task is doing, for the
descriptions of the holders of locks."""

from .pages import CachedPageMiddleware as CachedPageMiddleware
from .requests import RequestActivity as RequestActivity
from .requests import note_request as note_request
from .tasks import note_tasks as note_tasks
