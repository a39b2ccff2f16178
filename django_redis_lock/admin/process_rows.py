"""The page "Locks by process", every text ready."""

from __future__ import annotations

from typing import Any

from django.template.loader import render_to_string
from django.utils.translation import gettext as _

from ..held_locks import HeldLock, held_locks
from ..inventory import LOCK
from .listing import failure_rows
from .processes import Chain, Process, by_process, waits_of
from .rows import UrlOf, clock, ref_of
from .wording import duration, short_place, shown

__all__ = ["processes_data"]

TEMPLATE = "admin/django_redis_lock/heldlock/process_list.html"


def processes_data(url_of: UrlOf) -> dict[str, Any]:
    """All that changes while somebody looks at the page."""
    held = held_locks(kinds=(LOCK,))
    processes = by_process(held.found, waits_of(held.found))
    context = {
        "processes": [_process(process, url_of) for process in processes],
        "blocked": any(process.is_blocked for process in processes),
    }
    return {
        "processes": "" if held.failures and not processes else render_to_string(TEMPLATE, context),
        "failures": failure_rows(held.failures),
        "as_of": _("as of %(time)s") % {"time": clock()},
    }


def _process(process: Process, url_of: UrlOf) -> dict[str, Any]:
    return {
        "name": f"{shown(process.host)}:{process.pid}",
        "is_blocked": process.is_blocked,
        "holds": [_lock(holding, url_of) for holding in process.holds],
        "waits": [_chain(chain, url_of) for chain in process.waits],
    }


def _lock(holding: HeldLock, url_of: UrlOf) -> dict[str, str]:
    held = holding.lock.held_for
    return {
        "name": shown(holding.name),
        "url": url_of(ref_of(holding)),
        "text": "" if held is None else _("for %(duration)s") % {"duration": duration(held)},
        "held_by": _("held by %(holder)s") % {"holder": short_place(holding.lock.owner)},
    }


def _chain(chain: Chain, url_of: UrlOf) -> dict[str, Any]:
    waited = chain.wait.waited
    return {
        "locks": [_lock(holding, url_of) for holding in chain.locks],
        "is_cycle": chain.is_cycle,
        "text": "" if waited is None else _("for %(duration)s") % {"duration": duration(waited)},
    }
