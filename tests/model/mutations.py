"""Mutation testing of the Lua scripts: ``make mutations``.

Each mutant is the package with one line of one script changed: a comparison swapped, a condition
negated, a command, a key or a lifetime left out. The mutants are generated from the scripts as they
are. The tests that matter for a script must fail with each of them; a mutant that passes is a fault
that no test would find. Nothing in the checkout is changed: each process works on a copy of it.

    make mutations ARGS="--list"                       the mutants, without running them
    make mutations ARGS="--script ACQUIRE --script _TRY -j 2"
    make mutations ARGS="--most 0"                     all mutants instead of a sample
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.processes import STARTUP

__all__ = ["EQUIVALENT", "Block", "Mutant", "blocks", "files_for", "mutants"]

ROOT = Path(__file__).parents[2]
PACKAGE = "django_redis_lock"
#: Percent of the mutants that must be caught.
THRESHOLD = 95
#: Not needed to run the tests of the scripts.
NOT_COPIED = (".git", ".venv*", ".tox", "build", "*.egg-info", ".*_cache")

#: A test that hangs, as ``faulthandler_timeout`` says, ends the run.
HANGS = ("-o", "faulthandler_exit_on_timeout=true") if pytest.version_tuple >= (9,) else ()

#: How it is told that the tests ended without naming one.
EXIT = "exit code"

#: Which tests matter for which scripts (as patterns of their names), the quick ones first. They are
#: found by file name, wherever in ``tests`` they are.
TESTS = {
    (
        "ACQUIRE",
        "LEAVE",
        "TAKE_GRANT",
        "RELEASE",
        "RESET",
        "RENEW",
        "EXTEND",
        "WATCH",
        "HELD",
        "CLOCK",
    ): (
        "test_lock_scripts.py",
        "test_script_model.py",
        "test_companions.py",
        "test_out_of_memory.py",
        "test_lock_model.py",
        "test_lock.py",
        "test_lock_redis_py.py",
        "test_lock_waiting.py",
        "test_lost_replies.py",
    ),
    ("PLACE_*", "HOLDERS"): (
        "test_limit.py",
        "test_limit_model.py",
        "test_companions.py",
        "test_out_of_memory.py",
        "test_lost_replies.py",
    ),
    ("VOTE",): (
        "test_lock_scripts.py",
        "test_redlock_decisions.py",
        "test_redlock.py",
        "test_redlock_faults.py",
    ),
    (
        "*FLIGHT",
        "STORE*",
        "STREAMS",
        "READ",
        "TAKE_OVER",
        "WRITE",
        "DELETE",
        "EXPIRE_AT",
        "LET_GO",
        "END_SEEN",
        "FLIGHT_TOKEN",
    ): (
        "test_flight_scripts.py",
        "test_lifetime_by_value.py",
        "test_writes_end_flights.py",
        "test_error_ttl.py",
        "test_get_or_set.py",
        "test_stale.py",
    ),
    ("MARK_STALE",): ("test_flight_scripts.py", "test_mark_stale.py"),
    ("LIST*", "DESCRIBE*", "RESET", "WAITING", "LATEST", "RECORD_EVENT"): (
        "test_inventory_scripts.py",
        "test_inventory.py",
        "test_logging.py",
    ),
    ("CLEAR", "DELETE_UNHELD", "EXISTING", "SCAN"): (
        "test_clear_scripts.py",
        "test_clear.py",
        "test_clear_prefix.py",
    ),
    ("MARK",): ("test_lock_scripts.py", "test_failover_sentinel.py"),
    ("TRY", "GRANT_OF"): ("test_doctor.py",),
    ("HEARTBEAT*",): ("test_inventory_scripts.py", "test_heartbeat.py"),
    ("*_FIGURES",): ("test_inventory_scripts.py", "test_figures.py", "test_metrics.py"),
}
#: For scripts that are in none of the above.
OTHER_TESTS = ("test_lock_scripts.py", "test_cache.py", "test_get_or_set.py", "test_inventory.py")

#: Mutants that change nothing anybody could notice: (script, mutated line) -> why.
EQUIVALENT: dict[tuple[str, str], str] = {
    ("_DESCRIBE", "if left <= 0 then"): "a lock with 0 ms left is gone",
    (
        "_PASS_ON",
        "redis.call('LPUSH', KEYS[2], successor .. ':' .. fence .. suffix)",
    ): "the list is empty",
    ("ACQUIRE_FIRST", "-- if fence then return fence end"): "it is done once more",
    (
        "PLACE_ACQUIRE_FIRST",
        "-- if fence then return number == 1 and fence or {number, fence, fence} end",
    ): "it is done once more",
    (
        "RELEASE_FIRST",
        "-- if plain and hand_over(ARGV[2], ARGV[3]) then return 1 end",
    ): "pass_on does the same, only more slowly",
    ("_NOTE", "if now() % 64 == 0 then return end"): "it only prunes more often",
    ("_NOTE", "if not (now() % 64 ~= 0) then return end"): "it only prunes more often",
    ("_NOTE", "-- if now() % 64 ~= 0 then return end"): "it only prunes more often",
    (
        "_NOTE",
        "for _, key in ipairs(redis.call("
        "'ZRANGEBYSCORE', KEYS[5], '-inf', at, 'LIMIT', 0, 128)) do",
    ): "a lock is looked at a millisecond earlier",
    (
        "_SET_LOCK",
        "-- if redis.call('EXISTS', KEYS[2], KEYS[4]) == 0 then return nil end  -- Nearly always.",
    ): "there is nothing to tell and nothing to delete, only more slowly",
    (
        "_REGISTER",
        "local dead = redis.pcall('ZREMRANGEBYSCORE', KEYS[3], '-inf', at)",
    ): "a waiter is dead a millisecond earlier",
    ("RENEW", "if left > 0 and wanted * 0.99 > left then"): "a lock with 0 ms left is gone",
    ("RENEW", "if left >= 0 and wanted * 0.99 >= left then"): "it is renewed a millisecond earlier",
    ("_SEEN", "if left == -2 then return '', '1' end"): "without a digest nobody looks at it",
    (
        "RENEW_FLIGHT",
        "local over = redis.pcall('ZRANGEBYSCORE', KEYS[3], '-inf', at, 'LIMIT', 0, 64)",
    ): "a flight is over a millisecond earlier",
    (
        "CLEAR",
        "if left == 0 then left = 1 elseif left <= 0 then left = 0 end  -- RESTORE's 0 is forever.",
    ): "0 has become 1 before",
    (
        "TAKE_FLIGHT",
        "if left <= 0 or left > tonumber(ARGV[3]) then return {2, value} end",
    ): "a value with 0 ms left is gone",
    (
        "MARK_STALE",
        "if left == -1 or left >= tonumber(ARGV[1]) then"
        " redis.call('PEXPIRE', KEYS[1], ARGV[1]) end",
    ): "it has that lifetime",
    (
        "EXPIRE_AT",
        "if ARGV[2] * unit < now() then let_go(KEYS[2], 3) end",
    ): "the time has passed a microsecond later",
    (
        "_TRY",
        "if waiter ~= 'x' then redis.pcall('ZREM', KEYS[3], waiter) end",
    ): "'' is no member",
}


class Block(NamedTuple):
    """Lua text in the package: a script, or functions that scripts share.

    Attributes:
        scripts: the scripts it is part of; its own name if it is one.
    """

    name: str
    path: Path
    lines: range
    scripts: frozenset[str]


class Mutant(NamedTuple):
    """One changed line of a block; ``number`` is the line's in the file, from 0."""

    block: Block
    number: int
    kind: str
    before: str
    after: str

    def __str__(self) -> str:
        return (
            f"{self.block.name:16} {self.kind:11} {self.before.strip()}  =>  {self.after.strip()}"
        )

    @property
    def reason(self) -> str | None:
        """Why nobody could notice the change, if so."""
        return EQUIVALENT.get((self.block.name, self.after.strip()))


# -- where the scripts are -------------------------------------------------------------------------


def blocks(root: Path = ROOT) -> list[Block]:
    """All Lua in the package: strings in what is assigned to a name at a module's top level."""
    texts: dict[str, tuple[Path, range]] = {}
    lua: dict[str, str] = {}
    scripts: set[str] = set()
    modules = {path: _assigned(path) for path in sorted((root / PACKAGE).rglob("*.py"))}
    bodies = {name: value for assigned in modules.values() for name, value in assigned.items()}
    for path, assigned in modules.items():
        for name, value in assigned.items():
            made_by = getattr(value.func, "id", "") if isinstance(value, ast.Call) else ""
            if made_by not in ("script", "shared") and not name.endswith("_FIRST"):
                continue
            given = value.args[0] if isinstance(value, ast.Call) else value
            body = given.id if isinstance(given, ast.Name) else ""
            written = bodies.get(body, given)
            text = next((e for e in ast.walk(written) if isinstance(e, ast.Constant)), None)
            if text is None:
                continue
            lua[name] = text.value
            if made_by == "script":
                scripts.add(name)
            if body in assigned or not body:  # Else the block is that of the body's module.
                # What stands before a line break that the text begins with is Python.
                first = text.lineno - (not text.value.startswith("\n"))
                texts[name] = path, range(first, text.end_lineno or text.lineno)
    defined = defaultdict[str, set[str]](set)  # A function of the same name for locks with places.
    for name, text in lua.items():
        for function in re.findall(r"local function (\w+)", text):
            defined[function].add(name)
    parts = {
        name: set[str]().union(*(defined[f] for f in re.findall(r"(\w+)\(", text) if f in defined))
        for name, text in lua.items()
    }
    for script in scripts & {name.removesuffix("_FIRST") for name in lua}:
        parts[script] |= {f"{script}_FIRST"} & lua.keys()
    return [
        Block(name, path, lines, frozenset(each for each in scripts if name in _all(each, parts)))
        for name, (path, lines) in texts.items()
    ]


def _assigned(path: Path) -> dict[str, ast.expr]:
    """What a module with Lua assigns to names at its top level."""
    source = path.read_text()
    if "redis.call" not in source and "redis.pcall" not in source:
        return {}
    return {
        node.targets[0].id: node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _all(script: str, parts: dict[str, set[str]]) -> set[str]:
    """A script, what it is made of, and what that is made of."""
    found, left = set[str](), {script}
    while left:
        found.add(name := left.pop())
        left |= parts.get(name, set()) - found
    return found


# -- what is changed -------------------------------------------------------------------------------


def _each(pattern: str, *replacements: str) -> Callable[[str], Iterator[str]]:
    """Replace each match on its own, with each of the replacements."""

    def change(line: str) -> Iterator[str]:
        for match in re.finditer(pattern, line):
            for replacement in replacements:
                yield line[: match.start()] + match.expand(replacement) + line[match.end() :]

    return change


def _swapped(pattern: str, **pairs: str) -> Callable[[str], Iterator[str]]:
    """Replace each match by its counterpart."""

    def change(line: str) -> Iterator[str]:
        for match in re.finditer(pattern, line):
            counterpart = pairs[match["it"]]
            yield line[: match.start("it")] + counterpart + line[match.end("it") :]

    return change


def _without_a_key(line: str) -> Iterator[str]:
    """A command on several keys leaves one of them out."""
    for command in re.finditer(r"'(DEL|EXISTS)'((?:, KEYS\[\d\]){2,})", line):
        for key in re.finditer(r", KEYS\[\d\]", command[2]):
            start = command.start(2) + key.start()
            yield line[:start] + line[start + len(key[0]) :]


def _negated(line: str) -> Iterator[str]:
    match = re.match(r"^(\s*(?:else)?if )(.+)( then\b.*)$", line)
    if match and match[2].count("(") == match[2].count(")"):
        yield f"{match[1]}not ({match[2]}){match[3]}"


def _dropped(line: str) -> Iterator[str]:
    """A command, an assignment to a name that exists, or a whole check."""
    code = line.strip()
    complete = code.count("(") == code.count(")") and code.count("{") == code.count("}")
    is_statement = re.match(r"(redis\.p?call|[a-z_]+)\(.*\)$", code)
    is_check = re.match(r"(if|elseif) .* then .* end$", code)
    is_assignment = re.match(r"[a-z_]+(\[[^]]*\])?(, [a-z_]+)* = ", code)
    if complete and (is_statement or is_check or is_assignment):
        yield line[: len(line) - len(line.lstrip())] + "-- " + code


KINDS: dict[str, Callable[[str], Iterator[str]]] = {
    "drop": _dropped,
    "comparison": _swapped(
        r"(?<![<>=~])(?P<it>==|~=|<=|>=|<|>)(?!=)",
        **{"==": "~=", "~=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">"},
    ),
    "condition": _negated,
    "logic": _swapped(r"\b(?P<it>and|or)\b", **{"and": "or", "or": "and"}),
    "not": _each(r"\bnot (?!\()", ""),
    "key": _without_a_key,
    "lifetime": _each(r", 'PX', [^,)]+(\[\d\])?|, 'KEEPTTL'", ""),
    "number": _each(r"(?<![\w.%\[])\d{4,}(?!\w)", "1"),
    "answer": _swapped(
        r"return \{?(?P<it>-?\d)\b",
        **{"0": "1", "1": "0", "2": "1", "3": "1", "-1": "1", "-2": "1"},
    ),
    "arithmetic": _swapped(
        r"(?<= )(?P<it>[-+*/]|math\.max|math\.min)(?=[ (])",
        **{"+": "-", "-": "+", "*": "/", "/": "*", "math.max": "math.min", "math.min": "math.max"},
    ),
    "bound": _each(r"'\(' \.\. ", ""),
    "literal": _swapped(
        r"(?P<it>''|'0'|'1'|'\+inf'|'RPUSH'|'REV'|'!')",
        **{
            "''": "'x'",
            "'0'": "'1'",
            "'1'": "'0'",
            "'+inf'": "'-inf'",
            "'RPUSH'": "'LPUSH'",
            "'REV'": "'NX'",
            "'!'": "'?'",
        },
    ),
}


def mutants(block: Block, most: int = 0) -> list[Mutant]:
    """The mutants of a block; at most ``most`` of them (0: all), spread over lines and kinds."""
    source = block.path.read_text().splitlines()
    found: dict[tuple[int, str], Mutant] = {}
    for number in block.lines:
        line = source[number]
        code, dashes, comment = line.partition("  --")
        if not code.strip() or code.lstrip().startswith(("--", "#")):
            continue
        for kind, change in KINDS.items():
            for changed in change(code):
                after = changed + dashes + comment
                found.setdefault((number, after), Mutant(block, number, kind, line, after))
    return _sample(list(found.values()), most)


def _sample(all_of_them: list[Mutant], most: int) -> list[Mutant]:
    """Always the same for the same text: those of lines and kinds that come seldom first."""
    if not most or len(all_of_them) <= most:
        return all_of_them
    left = sorted(all_of_them, key=lambda m: hashlib.sha1(f"{m.before}{m.after}".encode()).digest())
    seen: Counter[object] = Counter()
    chosen = []
    while len(chosen) < most:
        next_one = min(left, key=lambda m: (seen[m.number], seen[m.kind]))
        left.remove(next_one)
        seen.update((next_one.number, next_one.kind))
        chosen.append(next_one)
    return sorted(chosen, key=lambda m: m.number)


# -- what must catch it ----------------------------------------------------------------------------


def files_for(block: Block, root: Path = ROOT) -> list[str]:
    """The test files that matter for a block, as paths from ``root``, the quick ones first."""
    chosen = [
        files
        for patterns, files in TESTS.items()
        if any(fnmatchcase(script, pattern) for script in block.scripts for pattern in patterns)
    ]
    names = dict.fromkeys(name for files in chosen or [OTHER_TESTS] for name in files)
    found = (next((root / "tests").rglob(name), None) for name in names)
    return [str(path.relative_to(root)) for path in found if path is not None]


class Outcome(NamedTuple):
    """What the tests said. ``caught_by``: a test, ``time-out`` or empty."""

    mutant: Mutant
    caught_by: str
    seconds: float


class Workshop:
    """Copies of the tree, one for each thread, to run tests in."""

    #: Options of pytest: all cells of the tables.
    lane: tuple[str, ...] = ("--all",)

    def __init__(self, folder: Path, timeout: float, tests: Sequence[str] = ()) -> None:
        self._folder, self._timeout, self._tests = folder, timeout, tests
        self._own = threading.local()
        self._interrupted = False

    def run_unchanged(self, files: Iterable[str]) -> str:
        """The first test that fails without any mutant; empty if none does."""
        return self._run(self._copy(), list(files), self._timeout * 3)

    def files_for(self, some: Iterable[Block]) -> list[str]:
        """The test files to run for some blocks."""
        return list(self._tests or dict.fromkeys(file for each in some for file in files_for(each)))

    def tests_for(self, mutant: Mutant) -> list[str]:
        return self.files_for([mutant.block])

    def run(self, mutant: Mutant) -> Outcome:
        began = time.monotonic()
        copy = self._copy()
        path = copy / mutant.block.path.relative_to(ROOT)
        original = path.read_text()
        lines = original.splitlines(keepends=True)
        lines[mutant.number] = mutant.after + "\n"
        path.write_text("".join(lines))
        try:
            caught_by = self._run(copy, self.tests_for(mutant), self._timeout)
        finally:
            path.write_text(original)
        return Outcome(mutant, caught_by, time.monotonic() - began)

    def _copy(self) -> Path:
        if not hasattr(self._own, "copy"):
            copy = self._folder / f"copy-{threading.get_ident()}"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
            self._own.copy = copy
        return self._own.copy

    def _run(self, copy: Path, files: list[str], timeout: float) -> str:
        command = [sys.executable, "-m", "pytest", *self.lane, "-x", "-q", "-p", "no:cacheprovider"]
        command += HANGS
        places = f"{copy}{os.pathsep}{STARTUP}"
        tests = subprocess.Popen(
            [*command, "--tb=no", *files],
            cwd=copy,
            env={
                **os.environ,
                "PYTHONPATH": places,
                "TESTING_MUTANTS": "1",
                "COLUMNS": "1000",  # pytest cuts the names of tests otherwise.
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            said, _ = tests.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return "time-out"
        finally:
            _end(tests)
        if tests.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return ""
        if failed := re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE):
            return failed[1]
        if missing := re.search(r"^ERROR: (?:not found|found no).*", said, re.MULTILINE):
            raise ValueError(missing[0])
        return f"{EXIT} {tests.returncode}: {said[-200:]}"


def _end(tests: subprocess.Popen[str]) -> None:
    """End the tests, and the servers and processes they have started."""
    if tests.poll() is not None:
        return
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(tests.pid).children(recursive=True)
        tests.send_signal(signal.SIGINT)  # They end their servers and remove their folders.
        with suppress(subprocess.TimeoutExpired):
            tests.communicate(timeout=15)
        for process in [*started, psutil.Process(tests.pid) if tests.poll() is None else None]:
            if process is not None:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
    tests.wait()


# -- the table -------------------------------------------------------------------------------------


def main(argv: list[str]) -> int:
    options = _options(argv)
    wanted = [
        block
        for block in blocks()
        if not options.script or any(fnmatchcase(block.name, each) for each in options.script)
    ]
    chosen = [mutant for block in wanted for mutant in mutants(block, options.most)]
    known = {(m.block.name, m.after.strip()) for block in blocks() for m in mutants(block)}
    for name, line in EQUIVALENT.keys() - known:
        print(f"No such mutant any more: {name}: {line}")
    if options.list:
        for mutant in chosen:
            print(f"{mutant}{'  (equivalent)' if mutant.reason else ''}")
        print(f"{len(chosen)} mutants of {len(wanted)} scripts and parts of scripts")
        return 0
    tried = [mutant for mutant in chosen if not mutant.reason]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        workshop = Workshop(Path(folder), options.timeout, options.tests)
        failed = workshop.run_unchanged(workshop.files_for(wanted))
        if failed:
            print(f"Without any mutant the tests fail: {failed}")
            return 2
        outcomes = []
        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                for outcome in pool.map(workshop.run, tried):
                    outcomes.append(outcome)
                    said = f"caught {outcome.caught_by}" if outcome.caught_by else "SURVIVED"
                    print(f"{outcome.seconds:4.0f} s  {outcome.mutant}\n        {said}", flush=True)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
    return _report(outcomes, options.threshold, len(chosen) - len(tried))


def _options(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--script", action="append", help="a script, or a pattern; may be repeated")
    parser.add_argument("--tests", nargs="+", default=(), help="run these test files instead")
    parser.add_argument("--most", type=int, default=10, help="mutants of each script; 0 for all")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for each mutant")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="percent to be caught")
    return parser.parse_args(argv)


def _report(outcomes: list[Outcome], threshold: float, equivalent: int) -> int:
    scores: dict[str, list[bool]] = defaultdict(list)
    for outcome in outcomes:
        scores[outcome.mutant.block.name].append(bool(outcome.caught_by))
    print(f"\n{'script':18} {'mutants':>8} {'caught':>7}")
    for name, caught in scores.items():
        print(f"{name:18} {len(caught):8} {sum(caught):7}")
    survivors = [outcome for outcome in outcomes if not outcome.caught_by]
    for outcome in survivors:
        print(f"SURVIVED {outcome.mutant}")
    score = 100 * (1 - len(survivors) / max(1, len(outcomes)))
    total = f"{len(outcomes)} mutants, {len(outcomes) - len(survivors)} caught"
    print(f"{total}: {score:.1f} %; {equivalent} more are equivalent")
    return int(score < threshold)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
