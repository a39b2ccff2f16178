"""Words that names and prose must not use; ``docs/architecture.md`` has the glossary.

A name is the field's standard term. In prose the subject is what acts, and the verb is the API's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.sources import nodes, tree

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "django_redis_lock"

#: Names of modules, classes, functions, attributes and constants that have a better one.
REPLACED = """
    Handle Kept Telling Granted Came Turn Farewell Departure Abandoned Aboard Speaker Several
    ThreadCrew TaskCrew Landing Depart Follow Await Looks Terms Campaign Elected VotedHold StandIn
    Guard LockedOrElse Ending Cut ServerAway CHANGED_HANDS lock_stood_in stood_in
    tell told heard unlisten board outlasting run_or_end canvassing given_up settle endures
    owed urgency
    ROOM MOST LONGEST SHORTEST LOOK PATIENCE GRACE FRESH PAUSE GLANCE TURN AHEAD SOON LATER
    words wording refs tables showing diagnosis crews
"""
NAMES = frozenset(REPLACED.split())
#: Parts of constants that do not say what they limit: LONGEST_PAUSE is MAX_PAUSE_SECONDS.
PARTS = frozenset(("ROOM", "MOST", "LONGEST", "SHORTEST", "LOOK", "GLANCE"))

#: Private words that are no names at all, of locals and arguments neither. ``place`` is one of the
#: N places of a lock with ``limit``.
PRIVATE = {"found", "place", "at", "ask", "asked", "said", "given", "came", "gone", "kept"}
PRIVATE |= {"words", "about"}
#: Where a place is always one of the N.
OF_PLACES = ("protocol/", "locking/", "contrib/several_names/")
#: The files that have none of them: the path of a lock, and what carries its calls.
CLEAN = (
    *("extension.py", "keeper/", "transport/", "locking/waiting/"),
    *("protocol/lock_scripts.py", "protocol/acquisition.py"),
    *("locking/hold.py", "locking/operations.py"),
)
#: What the other files still have. An entry may only go.
PRIVATE_ALLOWED: dict[str, str] = {
    "cache/lock_factory.py": "found given",
    "conf.py": "found given",
    "contention.py": "words",
    "contrib/exporters/__init__.py": "about found",
    "contrib/exporters/opentelemetry.py": "found said",
    "contrib/exporters/sentry.py": "about said",
    "contrib/fallback/file_lock.py": "found said words",
    "contrib/instant_loss.py": "ask",
    "contrib/locmem/memory/__init__.py": "at came given words",
    "contrib/locmem/memory/commands.py": "at found given kept words",
    "contrib/locmem/memory/lua.py": "at found kept",
    "contrib/locmem/memory/lua_library.py": "at found",
    "contrib/pages/visit.py": "at found words",
    "contrib/process_tree.py": "found",
    "contrib/redlock/__init__.py": "ask came place",
    "contrib/redlock/base.py": "asked given place",
    "contrib/redlock/votes.py": "place words",
    "contrib/several_names/__init__.py": "asked found",
    "contrib/several_names/members.py": "asked came",
    "contrib/testing/__init__.py": "came found given kept place",
    "contrib/topology/__init__.py": "ask asked at found kept said",
    "contrib/topology/client.py": "found given place",
    "decorators/__init__.py": "given",
    "decorators/cached.py": "given",
    "decorators/on_lost.py": "about words",
    "decorators/options.py": "given",
    "decorators/section.py": "about given words",
    "decorators/transactions.py": "about",
    "events.py": "found",
    "locking/local_state.py": "kept",
    "locking/records.py": "at",
    "management/by_name.py": "found place said words",
    "management/commands/locks.py": "about found words",
    "management/commands/run_locked.py": "at words",
    "management/job.py": "words",
    "management/listing.py": "asked found",
    "middleware/__init__.py": "given",
    "ops/admin/listing.py": "asked found said",
    "ops/admin/pages.py": "found said",
    "ops/admin/releasing.py": "found said",
    "ops/admin/rows.py": "at place said",
    "ops/admin/sections.py": "found said",
    "ops/checks/settings.py": "found",
    "ops/doctor/__init__.py": "found words",
    "ops/held_locks.py": "ask asked found place",
    "ops/inventory/__init__.py": "found kept place",
    "ops/inventory/listing.py": "found place",
    "protocol/keys.py": "found",
    "protocol/owner.py": "found",
    "signals.py": "about",
    "singleflight/runners.py": "words",
    "templatetags/redis_lock.py": "words",
    "threads.py": "about found",
}

#: Words that make a riddle of a sentence.
RIDDLES = (
    "whoever|nobody|beside|of its own|of their own|of one's own|meanwhile|anew|in vain|at rest"
    "|for ever|mended"
)
PROSE = re.compile(rf"\b({RIDDLES})\b", re.IGNORECASE)

#: What is still to be removed: for each file the words that it may have.
ALLOWED: dict[str, set[str]] = {
    "django_redis_lock/contrib/locmem/memory/lua.py": {"of its own"},
}

#: The name of a test.
TEST = re.compile(r"^ *(?:async )?def (test_\w+)", re.MULTILINE)

PACKAGE = sorted(FOLDER.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _path(path: Path) -> str:
    return str(path.relative_to(ROOT))


def defined(path: Path) -> Iterator[str]:
    """The names that a module defines, and its own."""
    yield path.stem
    for node in nodes(tree(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in (each for one in targets for each in ast.walk(one)):
                if isinstance(target, ast.Attribute):
                    yield target.attr
                elif isinstance(target, ast.Name) and target.id.isupper():
                    yield target.id


def bound(path: Path) -> set[str]:
    """All names that a module binds: also locals and arguments."""
    names = set()
    for node in nodes(tree(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name.lstrip("_") for name in names}


def private_words(path: Path) -> set[str]:
    name = path.relative_to(FOLDER).as_posix()
    return (bound(path) & PRIVATE) - ({"place"} if name.startswith(OF_PLACES) else set())


def _riddles_in(text: str) -> set[str]:
    return {match[0].lower() for match in PROSE.finditer(text)}


def _beyond(allowed: dict[str, set[str]], found: dict[Path, set[str]]) -> dict[str, set[str]]:
    """What each file has and may not have."""
    wrong = {_path(path): words - allowed.get(_path(path), set()) for path, words in found.items()}
    return {path: words for path, words in wrong.items() if words}


def is_forbidden(name: str) -> bool:
    name = name.lstrip("_")
    return name in NAMES or (name.isupper() and not PARTS.isdisjoint(name.split("_")))


def test_names_are_standard_terms() -> None:
    assert not _beyond(
        ALLOWED, {p: set(filter(is_forbidden, defined(p))) for p in PACKAGE if p.stem != "__init__"}
    )


def test_prose_is_plain() -> None:
    texts = {path: path.read_text().splitlines() for path in (*PACKAGE, *PAGES)}
    plain = {path: " ".join(line.strip(" #") for line in lines) for path, lines in texts.items()}
    assert not _beyond(ALLOWED, {path: _riddles_in(text) for path, text in plain.items()})


def test_test_names_are_plain() -> None:
    names = {path: [path.stem, *TEST.findall(path.read_text())] for path in TESTS}
    said = {
        path: " ".join(n.replace("_", " ") + "." for n in each if n.startswith("test_"))
        for path, each in names.items()
    }
    assert not _beyond(ALLOWED, {path: _riddles_in(text) for path, text in said.items()})


def test_the_allow_list_names_only_files_that_exist() -> None:
    assert all((ROOT / path).exists() for path in ALLOWED)


def test_names_are_no_private_words() -> None:
    used = {path.relative_to(FOLDER).as_posix(): private_words(path) for path in PACKAGE}
    allowed = {name: set(PRIVATE_ALLOWED.get(name, "").split()) for name in used}
    wrong = {name: words - allowed[name] for name, words in used.items()}
    assert not {name: words for name, words in wrong.items() if words}, "use a standard term"
    unused = {name: words - used[name] for name, words in allowed.items()}
    unused = {name: words for name, words in unused.items() if words}
    assert not unused, "take these out of PRIVATE_ALLOWED"


def test_the_path_of_a_lock_has_no_private_words() -> None:
    assert not {name: words for name, words in PRIVATE_ALLOWED.items() if name.startswith(CLEAN)}
