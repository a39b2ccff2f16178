"""The one interface between the core and everything that is optional.

* **Parts**: whole subjects that not each site uses. The core imports none of them; it calls
  ``part`` when an option, a setting or a kind of server needs one, and only then is it loaded.
* **Names on first use**: a package's ``__init__`` offers names of parts without loading them.

Nothing else is imported after start-up. What is loaded here, no fork can break: see ``_imported``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

from .threads import no_fork

#: The optional parts: where each is, and what needs it.
PARTS: Mapping[str, tuple[str, str]] = {
    "actions": ("management.actions", "manage.py locks"),
    "admin": ("ops.admin.pages", "The admin"),
    "asyncio": ("cache.async_methods", "An asynchronous method of a cache"),
    "celery_tasks": ("contrib.unique_tasks.celery", "unique_task() of a task of Celery"),
    "checks": ("ops.checks", "manage.py check"),
    "diagnosis": ("management.diagnosis", "manage.py locks doctor"),
    "django_tasks": ("contrib.unique_tasks.django", "unique_task() of a task of Django"),
    "exporters": ("contrib.exporters", "The setting EXPORTERS"),
    "fallback": ("contrib.fallback", 'ON_REDIS_DOWN "local" or "run"'),
    "instant_loss": ("contrib.instant_loss", "To learn of a loss at once"),
    "held_locks": ("ops.held_locks", "The gauges of held locks"),
    "inventory": ("ops.inventory", "A list of held locks"),
    "limit": ("contrib.limit", "A lock with limit=N"),
    "menu": ("ops.admin.menu", "The admin's menu"),
    "metrics": ("contrib.metrics", "The setting METRICS"),
    "other_backends": ("contrib.other_backends", "A cache that cannot lock"),
    "opentelemetry": ("contrib.exporters.opentelemetry", "The exporter for OpenTelemetry"),
    "pages": ("contrib.pages", "cached_page()"),
    "process_tree": ("contrib.process_tree", 'on_lost="terminate", run_locked --shell'),
    "prometheus": ("contrib.exporters.prometheus", "The exporter for Prometheus"),
    "redlock": ("contrib.redlock", "Redlock, using=[…]"),
    "sentry": ("contrib.exporters.sentry", "The exporter for Sentry"),
    "several_names": ("contrib.several_names", "A lock with several names"),
    "topology": ("contrib.topology", "A cluster, or a service of sentinels"),
}
#: Kinds of servers: the attribute by which a client's pool is recognized, and the class in the part
#: ``topology``. Any other attribute of a cluster's client makes it connect.
TOPOLOGIES = (("nodes_manager", "Cluster"), ("service_name", "SentinelService"))

PACKAGE = __name__.rpartition(".")[0]


class PartMissing(ImportError):
    """An option needs a part of this package that was not installed with it."""


@cache
def part(name: str) -> Any:
    """The module of the optional part ``name``, loaded at the first call.

    Raises:
        PartMissing: the part was removed from the installation.
    """
    if name not in PARTS:
        raise PartMissing(f"The part {name!r} of {PACKAGE} is not installed")
    path, needed_for = PARTS[name]
    return _imported(path, needed_for)


def _imported(path: str, needed_for: str) -> object:
    """What one thread has begun to import, with all that is imported by it, the child of another
    could never import: no other thread forks meanwhile."""
    wanted = f"{PACKAGE}.{path}"
    try:
        with no_fork():
            return import_module(wanted)
    except ModuleNotFoundError as error:
        if f"{error.name}.".startswith(f"{PACKAGE}."):
            raise PartMissing(f"{needed_for} needs {error.name}, which is not installed") from None
        raise


def on_first_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for the module ``package``: each name is imported when it is used.

    Args:
        package: its ``__name__``.
        modules: by the module, within this package, the names in it, with spaces between them.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def getattr_of_module(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(_imported(module_of[name], f"{package}.{name}"), name)
        setattr(import_module(package), name, value)  # The next use costs nothing.
        return value

    return getattr_of_module


#: How many costly failures in a row open a circuit breaker (0: none), and for how many seconds at a
#: time. Django's settings say others.
breaker_limits: Callable[[], tuple[int, float]] = lambda: (2, 2.0)  # noqa: E731  # replaced
