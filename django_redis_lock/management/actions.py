"""``manage.py locks``: ``list``, ``show``, ``release`` and ``reset``, and ``stats``: how locks and
computations behaved in the last hour or day. ``diagnosis`` has ``doctor``."""

from __future__ import annotations

import getpass
import json
import math
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from django.core.management.base import BaseCommand
from redis.exceptions import RedisError

from ..cache import lock_cache
from ..extension import part
from ..ops.facts import facts, is_in_trouble
from ..ops.held_locks import (
    UNAVAILABLE,
    HeldLock,
    HeldLocks,
    held_locks,
    look_closely,
    number_of_waiters,
    release_many,
)
from ..ops.inventory import FLIGHT, LOCK, MAX_ENTRIES, Inspection, LockInfo, Outcome
from ..protocol import Owner
from . import (
    COMPACT,
    Column,
    Exit,
    Options,
    Style,
    as_json,
    clip,
    clock_time,
    counted,
    duration,
    fields,
    fits,
    note,
    one_line,
    table,
    usage_error,
    width_of,
)

if TYPE_CHECKING:
    from ..contrib.metrics import Distribution, Summary


#: The terminal's upper left corner.
HOME = "\x1b[H"
#: One long name must not make each line of a file, or a mail, as long.
WIDTH_IN_PIPE = 120
#: Of a name, with ``--wide``.
MAX_NAME = 2000
#: From few to many.
BARS = "▁▂▃▄▅▆▇█"
NO_HEARTBEAT = "none yet: acquired less than half a second ago, or its process died so soon"
#: The events that users know by another name.
EVENTS = {"reset": "released by force"}
KINDS = {"lock": (LOCK,), "computation": (FLIGHT,), "all": (LOCK, FLIGHT)}


def list_locks(command: BaseCommand, options: Options) -> int:
    if options["watch"] is None:
        return _list(command, options, screen=False)
    terminal = width_of(command.stdout) is not None and not options["json"]
    if terminal:
        command.stdout.write("\x1b[2J", ending="")
    try:
        while True:
            _list(command, options, screen=terminal)
            time.sleep(options["watch"])
    except KeyboardInterrupt:
        if terminal:
            command.stdout.write("")  # So that the shell's prompt is not behind "^C".
        return 0


def _list(command: BaseCommand, options: Options, screen: bool) -> int:
    result = find_all(options)
    if options["json"]:
        # With --watch each takes one line.
        indent = 2 if options["watch"] is None else None
        text = json.dumps(_document(result), indent=indent)
    elif screen:
        text = _redrawn([*lines(result, command, options), *failures(result)], options)
    else:
        text = "\n".join(lines(result, command, options))
    if text:
        command.stdout.write(text)
        command.stdout.flush()
    if not screen:
        for sentence in failures(result):
            command.stderr.write(sentence)
    if result.failures:
        return Exit.UNAVAILABLE
    return verdict(result.found, here=bool(result.local)) if options["exit_code"] else 0


def verdict(locks: list[HeldLock], *, here: bool) -> int:
    """``here``: a lock is held on this host, without Redis."""
    if any(is_in_trouble(held.lock) for held in locks):
        return Exit.TROUBLE
    return Exit.HELD if locks or here else 0


def failures(result: HeldLocks) -> list[str]:
    """Each error once; also the locks held on this host without Redis."""
    found: dict[str, list[str]] = {}
    for failure in result.failures:
        found.setdefault(failure.error, []).append(failure.alias)
    failed = [
        f"The {'caches' if len(aliases) > 1 else 'cache'} {', '.join(aliases)} could not be read: "
        f"{error}"
        for error, aliases in found.items()
    ]
    return failed + [f"{one_line(name)} is held on this host: {who}" for name, who in result.local]


def find_all(options: Options) -> HeldLocks:
    asked = {"kinds": KINDS[options["kind"]], "search": options["search"]}
    result = held_locks(options["aliases"], limit=options["limit"], **asked)
    oldest = options["older_than"]
    result.found = [h for h in result.found if oldest is None or (h.lock.held_for or 0.0) > oldest]
    return result


def lines(result: HeldLocks, command: BaseCommand, options: Options) -> list[str]:
    """The table and the sentence below it; empty if no cache answered."""
    if {failure.alias for failure in result.failures}.issuperset(options["aliases"]):
        return []
    if not result.found:
        return [_summary(result, options)]
    rows, width = list(map(told, result.found)), _width(command, options)
    columns = _columns(rows)
    if not fits(columns, rows, width):
        # Host and process are more important than the label.
        columns = _columns(rows, labelled=False)
    error = command.style.ERROR
    styles = [error if is_in_trouble(held.lock) else str for held in result.found]
    return [*_table(command, columns, rows, styles, width), "", _summary(result, options)]


def _width(command: BaseCommand, options: Options) -> int | None:
    return None if options["wide"] else width_of(command.stdout) or WIDTH_IN_PIPE


def _table(
    command: BaseCommand,
    columns: Sequence[Column],
    rows: Sequence[object],
    styles: Sequence[Style],
    width: int | None,
) -> list[str]:
    first, *lines = table(columns, rows, width)
    return [
        command.style.MIGRATE_HEADING(first),
        *(style(line) for style, line in zip(styles, lines, strict=True)),
    ]


def told(holding: HeldLock) -> dict[str, str]:
    """The facts of a lock as a table has them; ``note`` is what is most unusual."""
    lock, owner = holding.lock, holding.lock.owner
    holder = f"{owner.host}:{owner.pid}" if owner.host else f"? ({owner.id})"
    return {
        **facts(lock, COMPACT),
        "name": one_line(holding.name, limit=MAX_NAME),
        "cache": holding.alias,
        "holder": "released, min_hold not over" if lock.resting else one_line(holder),
        "held": "-" if lock.resting else duration(lock.held_for),
        "left": "-" if math.isinf(lock.ttl) else duration(lock.ttl),
        "waiters": "" if lock.waiters is None else str(lock.waiters or "-"),
        "note": note(lock),
    }


def _columns(rows: list[dict[str, str]], *, labelled: bool = True) -> list[Column]:
    def holder(of: dict[str, str]) -> str:
        label = f" ({of['label']})" if labelled and of["label"] and of["spot"] != "-" else ""
        return one_line(f"{of['holder']}{label}")

    columns = [
        Column("NAME", itemgetter("name"), shrinks=True),
        Column("HOLDER", holder, shrinks=True),
        Column("HELD", itemgetter("held"), right=True),
        Column("LEFT", itemgetter("left"), right=True),
        Column("WAITING", itemgetter("waiters"), right=True),
    ]
    if len({of["cache"] for of in rows}) > 1:
        columns.append(Column("CACHE", itemgetter("cache"), shrinks=True))
    if any(of["doing"] for of in rows):
        columns.append(Column("DOING", itemgetter("doing"), shrinks=True))
    if any(of["note"] for of in rows):
        columns.append(Column("NOTE", itemgetter("note")))
    return columns


def _summary(result: HeldLocks, options: Options) -> str:
    locks = [h for h in result.found if h.lock.kind == LOCK]
    waiting = number_of_waiters(locks)
    held, unlisted = len(locks), [cut for cut in result.truncations if cut.kind == LOCK]
    if options["older_than"] is None:
        held += sum(cut.total - cut.shown for cut in unlisted)
    least = "At least " if unlisted else ""
    parts = []
    if options["kind"] != "computation":
        none = _none(options, LOCK, "lock", "held") or "no lock is held"
        none += " except on this host" if result.local else ""
        parts.append(least + counted(held, "lock is held", "locks are held") if held else none)
        if waiting:
            parts.append(counted(waiting, "process waits", "processes wait"))
    if options["kind"] != "lock":
        computations = len(result.found) - len(locks)
        none = "" if computations else _none(options, FLIGHT, "computation", "in progress")
        several = "computations are in progress"
        parts.append(none or counted(computations, "computation is in progress", several))
    text = ", ".join(parts) + "."
    text = text[0].upper() + text[1:]
    if result.failures:
        text = f"In the caches that answered: {text[0].lower()}{text[1:]}"
    if result.in_memory:
        aliases = ", ".join(result.in_memory)
        text += (
            f" The locks of the cache {aliases} are in the memory of each process: they exclude "
            "only its own threads, and no other process can list them."
        )
    return " ".join([text, *cuts(result)])


def cuts(result: HeldLocks) -> list[str]:
    return [
        f"Only {cut.shown} of at least {cut.total} {cut.kind}s of the cache {cut.alias} are listed."
        for cut in result.truncations
    ]


def _none(options: Options, kind: str, name: str, state: str) -> str:
    """Says that none matches although some are held; empty if nothing is filtered or held."""
    if not options["search"] and options["older_than"] is None and not options.get("name"):
        return ""
    every = held_locks(options["aliases"], limit=options["limit"], kinds=(kind,))
    number = len(every.found) + sum(cut.total - cut.shown for cut in every.truncations)
    verb = "is" if number == 1 else "are"
    return f"no {name} matches ({number} {verb} {state})" if number else ""


def _document(result: HeldLocks) -> dict[str, object]:
    return {
        "at": time.time(),
        "locks": [as_json(h) for h in result.found],
        "cut": [cut._asdict() for cut in result.truncations],
        "failures": [{"alias": f.alias, "error": f.error} for f in result.failures],
        "local": [{"name": name, "holder": str(owner)} for name, owner in result.local],
        "in_memory": result.in_memory,
    }


def _redrawn(shown: list[str], options: Options) -> str:
    """Over the previous output, without flicker, cut off at the screen's end."""
    width, height = shutil.get_terminal_size()
    below = f"Every {options['watch']:g} s, at {time.strftime('%H:%M:%S')}. Ctrl-C ends it."
    room = max(1, height - 3)
    if len(shown) > room:
        shown = [*shown[: room - 1], f"… and {len(shown) - room + 1} more lines"]
    return HOME + "".join(f"{line}\x1b[K\n" for line in [*shown, "", clip(below, width)]) + "\x1b[J"


# -- one lock -------------------------------------------------------------------------------------


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
    for alias, key, kind in places:
        try:
            holding, inspection = look_closely(alias, key, kind)
        except RedisError as error:
            failure = error
            continue
        # As in the list.
        found_in = alias if holding is None or holding.foreign else holding.alias
        looked.append(Found(found_in, key, kind, holding, inspection))
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
        text = json.dumps(_one_document(options["name"], found), indent=2)
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


def _one_document(name: str, found: Found) -> dict[str, object]:
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


# -- figures -------------------------------------------------------------------------------------


def show_figures(command: BaseCommand, options: Options) -> int:
    period = options["period"]
    found, failures = _read(options["aliases"], period)
    if options["json"]:
        caches = {alias: [_as_json(s) for s in figures] for alias, figures in found.items()}
        document = {"at": time.time(), "period": period, "caches": caches, "failures": failures}
        command.stdout.write(json.dumps(document, indent=2))
    else:
        for number, (alias, figures) in enumerate(found.items()):
            if len(found) > 1:
                command.stdout.write(("\n" if number else "") + command.style.MIGRATE_LABEL(alias))
            for line in _figures(command, figures, period, _width(command, options)):
                command.stdout.write(line)
        for alias, error in failures.items():
            command.stderr.write(f"The cache {alias} could not be read: {error}")
    return Exit.UNAVAILABLE if failures else 0


def _read(aliases: Sequence[str], period: str) -> tuple[dict[str, list[Summary]], dict[str, str]]:
    """The figures of each site, under its first cache, and the errors of caches that failed."""
    figures = part("metrics")
    found: dict[str, list[Summary]] = {}
    failures: dict[str, str] = {}
    sites = set()
    for alias in aliases:
        try:
            site = figures.site_of(alias)
            if site not in sites:
                sites.add(site)
                found[alias] = figures.summaries(alias, period)
        except UNAVAILABLE as error:
            failures[alias] = one_line(str(error))
    return found, failures


def _figures(
    command: BaseCommand, figures: Sequence[Summary], period: str, width: int | None
) -> list[str]:
    style = command.style
    locks = [s for s in figures if s.attempts or s.lost or s.crashed or s.fallbacks]
    computed = [s for s in figures if s.computations.count or s.saved or s.reads]
    out = []
    if locks:
        styles = [style.ERROR if s.lost or s.crashed or s.fallbacks else str for s in locks]
        columns = _that_fit(_lock_columns(locks, width), locks, width)
        out += [*_table(command, columns, locks, styles, width), ""]
    if computed:
        styles = [style.WARNING if s.failed or s.without_redis else str for s in computed]
        columns = _that_fit(_computation_columns(computed), computed, width)
        out += [*_table(command, columns, computed, styles, width), ""]
    if not out:
        return [f"Nothing happened in the last {period}."]
    return [*out, f"In the last {period}, in all processes."]


def _that_fit(columns: list[Column], shown: Sequence[Summary], width: int | None) -> list[Column]:
    """Without those that have no figures, if there is no room for all."""
    if fits(columns, shown, width):
        return columns
    return [column for column in columns if any(column.text(of) != "-" for of in shown)]


def _lock_columns(shown: Sequence[Summary], width: int | None) -> list[Column]:
    columns = [
        Column("LOCKS", _name, shrinks=True),
        Column("ACQUIRED", lambda s: str(s.acquisitions), right=True),
        Column("WAITED", lambda s: _share(s.contended, s.acquisitions), right=True),
        Column("AVG", lambda s: _time(s.average_wait), right=True),
        Column("P95", lambda s: _time(s.p95_wait), right=True),
        Column("HOLD", lambda s: _time(s.holds.average), right=True),
        _numbers("REJECTED", lambda s: s.rejected),
        _numbers("TIMEOUT", lambda s: s.timeouts),
        _numbers("LOST", lambda s: s.lost),
    ]
    if any(s.crashed for s in shown):
        columns.append(_numbers("CRASHED", lambda s: s.crashed))
    if any(s.fallbacks for s in shown):
        columns.append(_numbers("NO REDIS", lambda s: s.fallbacks))
    if width is None or width >= 100:  # Else the other columns need the room.
        columns.append(Column("OVER TIME", lambda s: _bars(s.acquisitions_over_time)))
    return columns


def _computation_columns(shown: Sequence[Summary]) -> list[Column]:
    columns = [
        Column("COMPUTATIONS", _name, shrinks=True),
        _numbers("READS", lambda s: s.reads),
        Column("HITS", lambda s: _share(s.hits + s.stale_hits, s.reads), right=True),
        Column("COMPUTED", lambda s: str(s.computed), right=True),
        Column("AVG", lambda s: _time(s.computations.average), right=True),
        Column("P95", lambda s: _time(s.computations.p95), right=True),
        _numbers("SAVED", lambda s: s.saved),
        _numbers("STALE", lambda s: s.stale),
        _numbers("FAILED", lambda s: s.failed + s.refreshes_failed),
    ]
    if any(s.without_redis for s in shown):
        columns.append(_numbers("NO REDIS", lambda s: s.without_redis))
    return columns


def _numbers(title: str, number: Callable[[Summary], int]) -> Column:
    return Column(title, lambda s: str(number(s) or "-"), right=True)


def _name(of: Summary) -> str:
    return one_line(of.group or "")


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if part and whole else "-"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else COMPACT.measured(seconds)


def _bars(numbers: Sequence[int]) -> str:
    most = max(numbers, default=0)
    if not most:
        return ""
    return "".join(
        BARS[-(-number * (len(BARS) - 1) // most)] if number else " " for number in numbers
    )


def _as_json(of: Summary) -> dict[str, object]:
    figures = asdict(of)
    for name in ("waits", "holds", "computations"):
        figures[name] = _distribution(getattr(of, name))
    return {**figures, **fields(of, "acquisitions attempts reads hit_ratio")}


def _distribution(of: Distribution) -> dict[str, object]:
    return {
        **fields(of, "count seconds average"),
        **{f"p{percent}": of.quantile(percent / 100) for percent in (50, 95, 99)},
        "bounds": part("metrics").BOUNDS,
        "counts": of.counts,
    }
