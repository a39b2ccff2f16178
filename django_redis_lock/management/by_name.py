"""``manage.py locks show NAME``, ``release NAME`` and ``reset PATTERN``: one lock in detail, and
forced release."""

from __future__ import annotations

import getpass
import json
import math
import socket
import sys
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..cache import lock_cache
from ..ops.facts import is_in_trouble
from ..ops.held_locks import HeldLock, held_locks, look_closely, release_many
from ..ops.inventory import FLIGHT, LOCK, MAX_ENTRIES, Inspection, LockInfo, Outcome
from ..protocol import Owner
from . import Exit, Options, as_json, clock_time, duration, fields, note, one_line, usage_error
from .listing import KINDS, cuts, failures, find_all, lines, told, verdict

NO_HEARTBEAT = "none yet: acquired less than half a second ago, or its process died so soon"
#: The events that users know by another name.
EVENTS = {"reset": "released by force"}


class Found(NamedTuple):
    """``holding`` is None if the lock is free, or held on this host by ``local``."""

    alias: str
    key: bytes
    kind: str
    holding: HeldLock | None
    inspection: Inspection
    local: Owner | None = None


def find(options: Options) -> Found:
    """The lock named ``options["name"]`` in the cache in which it is held; if it is free, in the
    first cache. It may be held in several, if ``--using`` does not choose one."""
    aliases, kinds = options["aliases"], KINDS[options["kind"]]
    name = options["name"] = _name_in_cache(options["name"], aliases)
    if not name:
        raise usage_error("a lock's name must not be empty")
    result = held_locks(aliases, kinds=kinds, search=name)
    # Also the key that the name has in each cache: no index has a lock taken by plain redis-py.
    # Of a lock with places, one of them.
    listed = [held for held in result.found if name in (held.name, held.lock.name)]
    first = {(h.alias, h.lock.lock_key, h.lock.kind): h.lock.key for h in listed}
    places = {(alias, key, kind): None for (alias, _, kind), key in first.items()}
    if LOCK in kinds:
        places |= dict.fromkeys((alias, _key(alias, name), LOCK) for alias in aliases)
    looked: list[Found] = []
    failure: Exception | None = None
    for place in places:
        try:
            looked.append(_look(*place))
        except RedisError as error:
            failure = error
    # Caches that share a server all find the same lock.
    held = {_acquisitions(found): found for found in looked if found.holding}
    if held:
        return _the_one(name, list(held.values()))
    if LOCK in kinds and (local := dict(result.local).get(name)):
        return Found(*next(iter(places)), None, Inspection(None, (), ()), local)
    if failure is not None:
        raise failure  # It may be held there.
    if not looked:
        for failed in result.failures:  # It may be computed there.
            raise RedisError(failed.error)
        raise usage_error(f"no computation of {name} is in progress")
    return next((found for found in looked if found.inspection.other), looked[0])


def _the_one(name: str, held: list[Found]) -> Found:
    aliases = list(dict.fromkeys(found.alias for found in held))
    if len(aliases) > 1:
        caches = ", ".join(aliases)
        raise usage_error(f"{name} is held in several caches ({caches}); say which with --using")
    if len({found.kind for found in held}) > 1:
        raise usage_error(f"{name} is a lock and a computation; say which with --kind")
    # It may also be the whole key of a lock of no cache, which comes last.
    return min(held, key=lambda found: found.holding is None or found.holding.foreign)


def _acquisitions(found: Found) -> frozenset[tuple[bytes, str]]:
    """What is the same wherever the same lock is found, and whenever."""
    return frozenset((h.key, h.owner.id) for h in found.inspection.holders)


def _look(alias: str, key: bytes, kind: str) -> Found:
    holding, inspection = look_closely(alias, key, kind)
    if holding is not None and not holding.foreign:
        alias = holding.alias  # As in the list.
    return Found(alias, key, kind, holding, inspection)


def _key(alias: str, name: str) -> bytes:
    return lock_cache(alias)._lock_key(name)


def _name_in_cache(name: str, aliases: Iterable[str]) -> str:
    """``name`` without the prefix of one of these caches: log lines show whole keys."""
    for prefix in (_key(alias, "").decode() for alias in aliases):
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


def show_lock(command: BaseCommand, options: Options) -> int:
    found = find(options)
    if options["json"]:
        text = json.dumps(_document(options["name"], found), indent=2)
    else:
        text = "\n".join(_lines(command, options["name"], found))
    command.stdout.write(text)
    if not options["exit_code"]:
        return 0
    return verdict([found.holding] if found.holding else [], here=found.local is not None)


def _lines(command: BaseCommand, name: str, found: Found) -> list[str]:
    style = command.style
    out = [style.MIGRATE_HEADING(one_line(name))]
    for title, text in _facts(found):
        out.append(f"  {title:<15}{text}")
    if found.holding is not None and is_in_trouble(found.holding.lock):
        out.append(f"  {'':<15}{style.ERROR(_advice(found.holding))}")
    if len(found.inspection.holders) > 1:
        out += ["", style.MIGRATE_LABEL("All holders")]
        for lock in sorted(found.inspection.holders, key=lambda held: held.place):
            out.append(f"  {lock.place:>3}  {_who(HeldLock(found.alias, name, lock))}")
    if found.inspection.waiters:
        out += ["", style.MIGRATE_LABEL("Waiting processes, in this order")]
        for number, waiter in enumerate(found.inspection.waiters, 1):
            where = f"{waiter.host}, process {waiter.pid}, thread {waiter.thread}"
            out.append(f"  {number:>3}  {one_line(where)}, for {duration(waiter.waited)}")
    if found.inspection.events:
        out += ["", style.MIGRATE_LABEL("Last events")]
        words = [EVENTS.get(event.what, event.what) for event in found.inspection.events]
        width = max(map(len, words))
        for event, what in zip(found.inspection.events, words, strict=True):
            owner = event.owner
            who = f"{owner.host}:{owner.pid}" if owner.host else f"? ({owner.id})"
            purpose = "; ".join(filter(None, (owner.label, owner.doing)))
            purpose = f" ({purpose})" if purpose else ""
            why = f": {event.note}" if event.note else ""
            said = one_line(f"{what:<{width}}  {who}{purpose}{why}", limit=300)
            out.append(f"  {clock_time(event.at)}  {said}")
    return out


def _free(found: Found) -> str:
    if found.local is not None:
        return f"held on this host, without Redis, by {found.local}; it ends with that process"
    if found.inspection.other == "string":
        return "taken, but not known as a lock: a cache value or another program's, delete it there"
    if other := found.inspection.other:
        return f"not a lock: the key has other data ({other}), so no caller can acquire it"
    if found.inspection.events or found.inspection.waiters:
        return "free"
    return "free; there are no recent events of this name: check the spelling"


def _facts(found: Found) -> list[tuple[str, str]]:
    key = f"{found.alias}, at the key {one_line(found.key.decode(errors='backslashreplace'))}"
    if found.holding is None:
        return [("state", _free(found)), ("cache", key)]
    lock, owner, of_it = found.holding.lock, found.holding.lock.owner, told(found.holding)
    state = "being computed" if lock.kind == FLIGHT else "held"
    state = "of a task in a queue, sent" if lock.queued else state
    none_yet = NO_HEARTBEAT if lock.unannounced else ""
    since = (
        "" if owner.since is None else f"{clock_time(owner.since)}, {duration(lock.held_for)} ago"
    )
    facts = {
        "state": "released, and taken until its min_hold has passed" if lock.resting else state,
        "by": of_it["place"] if owner.host else f"{of_it['place']}: {of_it['verdict']}",
        "for": of_it["label"],
        "doing": of_it["doing"],
        "since": since,
        "time left": _time_left(found.holding),
        "heartbeat": f"{of_it['seen']} ago" if of_it["seen"] else none_yet,
        "place": of_it["taken"] and f"{lock.place}; {of_it['taken']} are taken",
        "fencing token": "" if lock.fence is None else of_it["fence"],
        "cache": key,
    }
    if lock.resting:
        facts |= dict.fromkeys(("by", "for", "doing"), "")
    return [(title, text) for title, text in facts.items() if text]


def _time_left(holding: HeldLock) -> str:
    lock = holding.lock
    if math.isinf(lock.ttl):
        return "never expires"
    text = duration(lock.ttl)
    if lock.lifetime is not None and not math.isinf(lock.lifetime):
        text += f" of {duration(lock.lifetime)}"
    if lock.renews is not None:
        text += ", renewed while its holder lives" if lock.renews else ", not renewed"
    return text


def _advice(holding: HeldLock) -> str:
    if holding.lock.silent:
        return (
            f"Its process has crashed, is stopped or is cut off from Redis: {note(holding.lock)}."
        )
    return "It ends only when it is released. If its process has crashed: manage.py locks release."


def _document(name: str, found: Found) -> dict[str, object]:
    held, holders = found.holding, found.inspection.holders
    return {
        "name": name,
        "held": held is not None or found.local is not None,
        "local": str(found.local) if found.local else None,
        "other_data": found.inspection.other or None,
        "cache": found.alias,
        "key": found.key.decode(errors="backslashreplace"),
        "lock": None if held is None else as_json(held),
        "holders": [{**fields(h, "place held_for fence"), "id": h.owner.id} for h in holders],
        "waiters": [fields(w, "host pid thread waited") for w in found.inspection.waiters],
        "events": [
            {**fields(e, "at what note"), **fields(e.owner, "id host pid thread label")}
            for e in found.inspection.events
        ],
    }


def release_lock(command: BaseCommand, options: Options) -> int:
    found = find(options)
    name = options["name"]
    held = _chosen(found, name, options["place"])
    if held is None:
        others = found.inspection.holders
        free = f"Place {options['place']} of {name} is free." if others else ""
        command.stdout.write(free or f"{name} is {_free(found)}.")
        return 0 if found.local is None else Exit.NOT_OWNER
    command.stdout.write(f"{one_line(name)} is held by {_who(held)}.")
    if not options["yes"] and not _agreed(command, held.lock):
        command.stdout.write("Nothing was released.")
        return 1
    [outcome] = release_many([held], _operator())
    command.stdout.write(_said(held, outcome))
    return Exit.NOT_OWNER if outcome is Outcome.NOT_OWNER else 0


def _chosen(found: Found, name: str, place: int | None) -> HeldLock | None:
    holders = found.inspection.holders
    if place is None and len(holders) > 1:
        places = ", ".join(str(number) for number in sorted(lock.place for lock in holders))
        raise usage_error(
            f"{name} has {len(holders)} holders, in the places {places}; say which with --place"
        )
    if place is None:
        return found.holding
    chosen = [lock.key for lock in holders if lock.place == place]
    return look_closely(found.alias, chosen[0])[0] if chosen else None


def _said(held: HeldLock, outcome: Outcome) -> str:
    name = one_line(held.name) + (f", place {held.lock.place}," if told(held)["taken"] else "")
    if outcome is Outcome.FREE:
        return f"{name} was free already."
    if outcome is Outcome.NOT_OWNER:
        return f"{name} has passed to another holder and was not released."
    waits = " The first waiter has it now." if held.lock.waiters else ""
    return f"{name} is released.{waits}"


def _agreed(command: BaseCommand, lock: LockInfo) -> bool:
    if not sys.stdin.isatty():
        raise usage_error("no terminal to ask for confirmation: add --yes to release it")
    if not lock.resting:
        command.stdout.write(
            "The holder is not stopped: until it learns that its lock is lost, it works at the "
            "same\ntime as the next holder."
        )
    command.stdout.write("Release it? [y/N] ", ending="")
    command.stdout.flush()
    try:
        return input().strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        command.stdout.write()
        return False


def reset_locks(command: BaseCommand, options: Options) -> int:
    """Without ``--yes``, only list them."""
    options.update(search="", limit=MAX_ENTRIES)
    result = find_all(options)
    pattern = options["name"]
    result.found = [
        h
        for h in result.found
        if any(fnmatchcase(name, pattern) for name in (h.name, h.lock.name))
        and (options["foreign"] or not h.foreign)
    ]
    for sentence in failures(result):
        command.stderr.write(sentence)
    code = Exit.UNAVAILABLE if result.failures else Exit.INCOMPLETE if result.truncations else 0
    if not options["yes"] or not result.found:
        for line in lines(result, command, options):
            command.stdout.write(line)
        if result.found:
            these = "it" if len(result.found) == 1 else f"these {len(result.found)}"
            command.stdout.write(f"Nothing was released. To release {these}, add --yes.")
        return code
    for held, outcome in zip(result.found, release_many(result.found, _operator()), strict=True):
        command.stdout.write(f"{_said(held, outcome)} It was held by {_who(held)}.")
        if outcome is Outcome.NOT_OWNER:
            code = code or Exit.NOT_OWNER
    for sentence in cuts(result):
        command.stderr.write(sentence)
    return code


def _who(held: HeldLock) -> str:
    of_it = told(held)
    if held.lock.resting:
        return "no caller: it was released, and its min_hold is not over"
    label = f" ({of_it['label']})" if of_it["label"] else ""
    return f"{of_it['holder']}{label}, for {of_it['held']}"


def _operator() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = "?"  # A user of a container may have no name.
    return f"{user}@{socket.gethostname()} (manage.py locks)"
