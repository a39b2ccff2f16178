"""The one interface between the core and everything that is optional.

* **Parts**: packages that the core does not need. It imports none of them; it calls ``part``
  when an option, a setting or a kind of server needs one, and only then is it loaded.
* **Names on first use**: a package's ``__init__`` offers names without importing their modules.
* **Hooks**: what counts and traces plugs itself in here; the core calls a hook that is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

#: The optional parts: where each is, and what needs it.
PARTS: Mapping[str, tuple[str, str]] = {
    "admin": ("admin.pages", "The admin's pages"),
    "checks": ("checks", "manage.py check"),
    "fallback": ("fallback", 'ON_REDIS_DOWN "local" or "run"'),
    "inventory": ("inventory", "A list of held locks"),
    "limit": ("protocol.place_scripts", "limit=N"),
    "locmem": ("cache.locmem", "LocMemCache"),
    "metrics": ("metrics", "METRICS"),
    "exporters": ("exporters", "EXPORTERS"),
    "pages": ("middleware.pages", "cached_page()"),
    "redlock": ("redlock", "Redlock, using=[…]"),
    "several_names": ("locking.multi_lock", "A lock with several names"),
    "topology": ("transport.discovery", "A cluster, or a service of sentinels"),
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
    path, needed_for = PARTS[name]
    try:
        return import_module(f"{PACKAGE}.{path}")
    except ModuleNotFoundError as error:
        if not f"{PACKAGE}.{path}.".startswith(f"{error.name}."):
            raise
        raise PartMissing(f"{needed_for}: needs {error.name}, which is not installed") from None


def on_first_use(package: str, **modules: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for the ``__init__`` of ``package``: each name is imported when it is used.

    Args:
        package: its ``__name__``.
        modules: names in a module of the package, with spaces between them.
    """
    module_of = {name: module for module, names in modules.items() for name in names.split()}

    def getattr_of_package(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f".{module_of[name]}", package), name)
        setattr(import_module(package), name, value)  # The next use costs nothing.
        return value

    return getattr_of_package
