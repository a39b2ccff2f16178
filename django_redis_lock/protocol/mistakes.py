"""What to write instead of an option that is not there. Loaded when one is refused."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

#: By our name of an option, its names in other packages.
ELSEWHERE = {
    "timeout": "expire expires expiry expiration ttl lease lease_time lease_seconds ex lifetime "
    "auto_release_time lock_timeout cache_timeout",
    "blocking_timeout": "wait wait_timeout acquire_timeout max_wait waiting_timeout",
    "renew": "auto_renewal auto_renew auto_extend keep_alive renewal",
    "wait": "blocking_timeout wait_timeout lock_timeout",
    "limit": "capacity concurrency max_holders max_locks places",
    "key": "name lock_name lock_key",
    "label": "description",
    "stale": "stale_ttl grace swr stale_while_revalidate",
    "using": "cache alias cache_alias",
    "on_lost": "lost_callback",
}


def unknown_option(call: str, name: str, known: Iterable[str]) -> TypeError:
    """The error about the option ``name`` of ``call``, which has those that are ``known``."""
    names = list(known)
    meant = [ours for ours, others in ELSEWHERE.items() if name in others.split() and ours in names]
    if not meant:
        meant = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    unit = ", in seconds" if meant[:1] in (["timeout"], ["blocking_timeout"], ["wait"]) else ""
    hint = f"write {meant[0]}={unit}; " if meant else ""
    return TypeError(f"{call} has no option {name!r}; {hint}it has {', '.join(names)}")
