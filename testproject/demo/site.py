"""The site, served by the demo itself.

``runserver`` would do, were it not that it looks at its port last and ends the process at once when
it is taken, with all that the demo has to tidy up.
"""

from __future__ import annotations

from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.management.base import CommandError
from django.core.servers.basehttp import ThreadedWSGIServer, WSGIRequestHandler
from django.core.wsgi import get_wsgi_application

__all__ = ["HOST", "Site"]

HOST = "127.0.0.1"


class QuietHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass  # Not every request; errors are logged by Django.


class Site(ThreadedWSGIServer):
    """The site at a port of this machine, which is taken from the start; port 0 is any free one.

    Raises:
        CommandError: the port cannot be had.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        try:
            super().__init__((HOST, port), QuietHandler)
        except (OSError, OverflowError) as error:
            raise CommandError(
                f"Port {port} of {HOST} cannot be used: {error}. Choose another: "
                "make demo PORT=8001, or manage.py demo --port 8001."
            ) from error

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_address[1]}"

    def load(self) -> None:
        """Import what answers. What a signal raises while Python collects garbage is lost, so this
        comes before anybody is told how to stop the site."""
        self.set_app(StaticFilesHandler(get_wsgi_application()))
