"""Mutation testing of the package's Python: ``make mutations-python``.

Each mutant is the package with one line changed: a comparison, a condition, a statement left out, a
number. The mutants are drawn by a seed from the modules that keep locks and values right, the same
of lines that have not changed. One of the tests that run the line must fail twice with it, and pass
without it. A run of the whole suite under coverage says which these are, and how long they take.
They are tests of behaviour: of public calls on real servers, in real threads, tasks and processes;
of tests/unit, only tables over pure functions.

    make mutations-python ARGS="--list"
    make mutations-python ARGS="--seed 7 --most 30 -j 2"
    make mutations-python ARGS="--module locking.waiting --module keeper"
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.model.mutations import EXIT, HANGS, PACKAGE, ROOT, Block, Mutant, Outcome, Workshop

#: Percent of the mutants that must be caught.
THRESHOLD = 85

#: What is changed: the modules and packages that keep locks and values right.
MODULES = (
    "cache", "decorators", "history", "keeper", "locking", "pools", "singleflight", "transport",
    "contrib.fallback", "contrib.idempotency", "contrib.instant_loss", "contrib.other_backends",
    "contrib.pages", "contrib.redlock", "contrib.several_names", "contrib.topology",
    "contrib.unique_tasks",
)  # fmt: skip
#: Of the tests that run a line, so many seconds' worth judge a change of it.
SECONDS_OF_TESTS = 240.0


#: Mutants that change nothing anybody could notice: (module, mutated line) -> why. Of a statement
#: left out: "statement => pass".
EQUIVALENT: dict[tuple[str, str], str] = {
    (
        "contrib.fallback",
        'held = HolderInfo(HeldReply(b"", -2, (), 0, 0))',
    ): "a lifetime below 0 has no end",
    (
        "contrib.fallback",
        'held = HolderInfo(HeldReply(b"", -1, (), 1, 0))',
    ): "there are no fields with a time that the server's would be compared with",
    (
        "contrib.fallback.file_lock",
        "os.truncate(self._file.fileno(), 1)",
    ): "that byte is overwritten, or another length follows",
    (
        "contrib.fallback.file_lock",
        "text = os.pread(file, 10001, 0)",
    ): "a longer text is incomplete even so",
    ("keeper", "if job in self._jobs or job.worker is not None:"): "a discarded job is not done",
    ("contrib.redlock", "attempt = secrets.token_hex(9).encode()"): "any unique one will do",
    (
        "locking.base",
        'attempt = b"" if chosen is None else secrets.token_hex(9).encode()',
    ): "any unique one will do",
    ("contrib.redlock", "default=1,"): "a fence is at least 1 in any case",
    ("pools", "self.connect() => pass"): "for older versions of redis-py",
    ("keeper", "self.wakes_at = max(earliest, resumes_at) => pass"): "it looks each second",
    (
        "contrib.redlock.votes",
        "return min(replies, key=lambda reply: int(reply[0]) - (bounded(reply[1], MAX_FENCE) "
        "or 1))",
    ): "a microsecond",
    (
        "contrib.redlock.votes",
        "return next((reply for reply in replies if b'\"reset\"' in as_bytes(reply)), replies[1])",
    ): "at least two have answered, and of two causes the other is told",
    (
        "contrib.topology.client",
        "client = client or self.get_client(write=True)",
    ): "one client reads and writes",
    (
        "singleflight.flight",
        "began, requests_before = time.monotonic(), -2",
    ): "any number below 0 says that there is none yet",
    (
        "transport.server",
        "self.generation = 1  #: How often they were renewed.",
    ): "each connection has the number of its server",
    ("transport.aio_connection", "self._unread = 1"): "a reply is large a byte earlier",
    ("transport.server", "self.generation += 2"): "it is only compared with itself",
    (
        "cache.connections",
        "if tokens or (type(tokens) is not list or any(tokens)):",
    ): "nothing is done about what has no token, only more slowly",
    (
        "cache.connections",
        "redis = client.get_client(write=False)",
    ): "it is called where one server reads and writes",
    (
        "cache.values",
        "if len(_logged_at) >= MAX_LOGGED_GROUPS:",
    ): "one group fewer is remembered",
    (
        "contrib.several_names",
        'return next((hold.reason for hold in self._holds if hold.lost or hold.reason), "")',
    ): "the loss of one gives each of them a reason",
    (
        "contrib.several_names",
        "lost = next((hold for hold in self._holds if hold.reason), self._holds[1])",
    ): "of those that are over at once, it names another",
    (
        "cache.connections",
        "return sum(map(int, run_all(self.client, calls))) if calls else 1",
    ): "django-redis sends nothing for no keys",
    (
        "contrib.several_names",
        "if in_one_place and len(calls) >= 1:",
    ): "one call gets the same reply from both scripts",
    (
        "contrib.several_names",
        "return Call(_for_each(calls[1].script), keys, (len(calls), *args))",
    ): "all are of one script",
    (
        "decorators.transactions",
        "return [c for c in connections.all(initialized_only=False) if _is_open(c)]",
    ): "a connection that is not there is not open",
    (
        "locking.lock",
        'return drive(self._change_steps("reacquire", self._lifetime or 2.0, True))',
    ): "without a lifetime there is an error",
    (
        "locking.aio",
        'return await adrive(self._change_steps("reacquire", self._lifetime or 2.0, True))',
    ): "without a lifetime there is an error",
    (
        "history",
        "if (bounded(last_fence, MAX_FENCE) or 1) < fence or lost_at >= began:",
    ): "a fence is a time in microseconds",
    (
        "contrib.idempotency",
        'return int(getattr(response, "status_code", 201))',
    ): "of a result, only whether it is a server's error counts",
    (
        "contrib.several_names",
        "behind = [each for each in held if each.keys.lock >= member.keys.lock]",
    ): "what it waits for is not held",
    (
        "decorators.section",
        "pause = FIRST_PAUSE_SECONDS * 2.0 ** min(self.attempts - 1, 11)",
    ): "a pause is a second at most",
    ("decorators.section", 'if kwargs.get("verbosity", 2):'): "it is as true as 1",
    (
        "decorators.section",
        'if command is None or not kwargs.get("verbosity", 2):',
    ): "it is as true as 1",
    (
        "locking.waiting",
        "self.due = now + WATCH_INTERVAL_SECONDS / 5",
    ): "the keeper only looks a little earlier",
    (
        "locking.waiting",
        "self.due = min(self.due, max(ours) + self._warns_after)",
    ): "it looks two seconds later in any case",
    (
        "locking.aio",
        "self.connection = await aconnect(client, self.request.keys, timeout=6.0)",
    ): "connecting may take a second longer",
    (
        "transport.aio_connection",
        "self._unread = 1  # Bytes of the next reply.",
    ): "the first reply is large if it is a byte smaller",
    (
        "transport.aio_connection",
        "self.missing = replies or 2",
    ): "of a call without a list it is not counted",
    ("transport.aio_connection", "return bool(poll.poll(1))"): "a millisecond",
    ("transport.server", "if len(_packed_keys) > MAX_CACHED:"): "one more is kept",
    (
        "contrib.topology",
        "self._in_vain = 1  # Discoveries that failed in a row.",
    ): "the second discovery is a second later",
    (
        "transport.aio_connection",
        "reply = await self._connection.read_response(disconnect_on_error=True)",
    ): "after such an error it is closed in any case",
    (
        "transport.address",
        'own["command_packer"] = PythonRespSerializer(6001, partial(_encode, own.get("encoding")))',
    ): "the commands are shorter",
    (
        "singleflight.runners",
        "super().__init__(error) => pass",
    ): "an exception has its arguments from the moment it is made",
    (
        "transport.circuit_breaker",
        "if cost <= 0.9 * min(COSTLY_SECONDS, timeout):",
    ): "no call takes exactly so long",
    (
        "history",
        "at = bounded(at_us, MAX_UNIX_TIME * 1000001.0)",
    ): "no event is that far in the future",
    ("history", "self.replied(2, now)"): "it is as true as 1",
    ("contrib.redlock.votes", "if self.due < last:"): "no two of these times are equal",
    ("keeper", "self._pause = min(self._pause * 2, 61.0)"): "a second",
    ("cache.values", "began, stale = time.monotonic(), int(chosen.stale * 1001)"): "a thousandth",
    ("singleflight.flight", "left = (max(int(pttl), 0) + 2) / 1000"): "a millisecond",
    (
        "singleflight.runners",
        'pause = b"%d" % max(2, math.ceil((until - time.monotonic()) * 1000))',
    ): "a millisecond",
    (
        "contrib.fallback.file_lock",
        "file.close() => pass",
    ): "of a name that is removed; the collector closes it, or the next acquisition",
    (
        "locking.waiting",
        "if request.chosen or grant.place > request.limit:  # ACQUIRE does not find it there.",
    ): "what nobody holds is released once more",
}

EQUIVALENT |= {
    ("pools", line): "none and one both mean one request"
    for line in ("self._packed = 1", "packed, self._packed = self._packed, 1")
}

SWAPPED = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.And: "or",
    ast.Or: "and",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
}
OF_TIMES = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
OF_A_CLOCK = re.compile(r"\bnow\b|monotonic\(\)|awake\(\)")
#: What is only told to people, and only what type checkers read.
UNTOUCHED = ("logger", "lost_logger", "held_logger", "TYPE_CHECKING", "cast", "TypeVar")


# -- what is changed -------------------------------------------------------------------------------

#: Where a line changes, and into what: line and columns from 0, the new text, and the kind.
Edit = tuple[int, int, int, str, str]


def modules(root: Path = ROOT) -> dict[str, Path]:
    """The modules to change, by their names within the package."""
    named = {
        ".".join(path.relative_to(root / PACKAGE).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }
    places = tuple(f"{name}." for name in MODULES)
    return {name: path for name, path in named.items() if f"{name}.".startswith(places)}


def mutants(module: str, path: Path) -> list[Mutant]:
    """All there are of a module."""
    lines = path.read_text().splitlines()
    block = Block(module, path, range(len(lines)), frozenset())
    found: dict[tuple[int, str], Mutant] = {}
    for number, begin, end, text, kind in _edits(ast.parse(path.read_text()), lines):
        before = lines[number]
        after = before[:begin] + text + before[end:]
        found.setdefault((number, after), Mutant(block, number, kind, before, after))
    return list(found.values())


def changes_nothing(mutant: Mutant) -> bool:
    return any((mutant.block.name, text) in EQUIVALENT for text in texts_of(mutant))


def texts_of(mutant: Mutant) -> tuple[str, str]:
    """How ``EQUIVALENT`` may name it."""
    before, after = mutant.before.strip(), mutant.after.strip()
    return after, f"{before} => {after}"


def _edits(tree: ast.Module, lines: list[str]) -> Iterator[Edit]:
    """What can be changed within functions."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                for node in _nodes(statement):
                    if getattr(node, "end_lineno", None) == getattr(node, "lineno", -1):
                        yield from _edits_of(node, lines)


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All within ``node`` but annotations, texts for people, and functions, which come by
    themselves."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, (ast.Constant, ast.Call)):
        said = ast.unparse(node.value).partition("(")[0].partition(".")[0]
        if isinstance(node.value, ast.Constant) or said in UNTOUCHED:
            return
    if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr)):
        return  # A text, nearly always.
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # Of zip; both are as long, if there is no mistake.
    if isinstance(node, ast.Compare) and ast.unparse(node.left) == "sys.version_info":
        return  # It decides for other versions of Python.
    match node:
        case ast.If(test=ast.Compare(ast.Attribute(attr="version_info"), [ast.GtE()], [newer])):
            runs = sys.version_info >= ast.literal_eval(newer)
            for statement in node.body if runs else node.orelse:
                yield from _nodes(statement)
            return
    yield node
    for name, field in ast.iter_fields(node):
        if name not in ("annotation", "returns"):
            for child in field if isinstance(field, list) else (field,):
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _edits_of(node: Any, lines: list[str]) -> Iterator[Edit]:
    """How ``node``, which is on one line, can be changed."""
    number = node.lineno - 1

    def edit(begin: int, end: int, text: str, kind: str) -> Edit:
        return number, begin, end, text, kind

    def between(left: Any, right: Any, operator: ast.AST, kind: str) -> Iterator[Edit]:
        gap = lines[number][left.end_col_offset : right.col_offset]
        if isinstance(operator, OF_TIMES) and OF_A_CLOCK.search(ast.unparse(node)):
            return  # No two readings of a clock are equal.
        if type(operator) in SWAPPED and (word := gap.strip(" ()")):
            begin = left.end_col_offset + gap.index(word)
            yield edit(begin, begin + len(word), SWAPPED[type(operator)], kind)

    match node:
        case ast.Compare():
            for left, operator, right in zip(
                (node.left, *node.comparators), node.ops, node.comparators, strict=False
            ):
                yield from between(left, right, operator, "comparison")
        case ast.BoolOp():
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from between(left, right, node.op, "logic")
        case ast.BinOp() if not isinstance(node.left, ast.Constant | ast.JoinedStr):
            yield from between(node.left, node.right, node.op, "arithmetic")
        case ast.UnaryOp(op=ast.Not()):
            yield edit(node.col_offset, node.col_offset + len("not "), "", "not")
        case ast.Call(func=ast.Name(id="min" | "max" as name)):
            other = "max" if name == "min" else "min"
            yield edit(node.func.col_offset, node.func.end_col_offset, other, "bound")
        case ast.Constant(value=bool()):
            yield edit(node.col_offset, node.end_col_offset, str(not node.value), "constant")
        case ast.Constant(value=int() | float()):
            changed = str(node.value + 1)
            yield edit(node.col_offset, node.end_col_offset, changed, "constant")
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Assign(targets=[ast.Attribute()]):
            yield edit(node.col_offset, node.end_col_offset, "pass", "drop")
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if test.lineno == test.end_lineno and not isinstance(
                test, (ast.NamedExpr, ast.UnaryOp)
            ):
                text = lines[test.lineno - 1][test.col_offset : test.end_col_offset]
                begin, end = test.col_offset, test.end_col_offset
                yield test.lineno - 1, begin, end, f"(not ({text}))", "condition"


def chosen(all_of_them: Iterable[Mutant], seed: int, most: int) -> list[Mutant]:
    """``most`` of them (0: all), at most one of a line. What is drawn does not depend on the other
    lines."""

    def drawn(m: Mutant) -> tuple[bytes, int]:
        text = f"{seed} {m.block.name} {m.before.strip()} {m.after.strip()}"
        return hashlib.sha1(text.encode()).digest(), m.number

    of_line = {(m.block.name, m.number): m for m in sorted(all_of_them, key=drawn, reverse=True)}
    return sorted(of_line.values(), key=drawn)[: most or None]


# -- what must catch it ----------------------------------------------------------------------------


class Measured:
    """Which tests run a line, from one run of them all under coverage."""

    def __init__(self, folder: Path) -> None:
        """What an earlier run has written into ``folder`` is used again."""
        from coverage import CoverageData  # noqa: PLC0415  # only drawing needs it

        coverage, seconds = folder / "coverage", folder / "seconds.json"
        if not seconds.exists():
            folder.mkdir(parents=True, exist_ok=True)
            options = "--all -q -n auto --dist worksteal --cov --cov-context=test --cov-report="
            command = [*options.split(), "-p", "tests.model.measuring", f"--seconds={seconds}"]
            command += ("-m", "not uncovered")
            environment = os.environ | {"COVERAGE_FILE": str(coverage)}
            command = [sys.executable, "-m", "pytest", *command]
            subprocess.run(command, check=False, cwd=ROOT, env=environment)
        self._seconds: dict[str, float] = json.loads(seconds.read_text())
        self._data = CoverageData(str(coverage))
        self._data.read()
        self._lock = threading.Lock()

    def tests_of(self, path: Path, number: int) -> list[str]:
        """The tests that run a line (from 1) or, if none does, the next one above that some run:
        the quickest cell of each table first, then the second of each, and so on."""
        with self._lock:
            of_lines = self._data.contexts_by_lineno(str(path))
        found: set[str] = set()
        while number and not found:
            found = {re.sub(r"\|\w+$", "", test) for test in of_lines.get(number, ())} - {""}
            number -= 1
        cells: Counter[str] = Counter()
        ranked = []
        for seconds, test in sorted((self._seconds.get(test, 0.0), test) for test in found):
            cells[table := test.partition("[")[0]] += 1
            ranked.append((cells[table], seconds, test))
        left, chosen = SECONDS_OF_TESTS, []
        for _, seconds, test in sorted(ranked):
            if left > 0:
                left -= seconds
                chosen.append(test)
        return chosen


class PythonWorkshop(Workshop):
    """Runs the tests that run the line which is changed."""

    #: Of a test that is named, all cells run. Once a test may fail because of the machine's load.
    lane = ("--reruns=1",)

    def __init__(self, folder: Path, timeout: float, measured: Measured) -> None:
        super().__init__(folder, timeout)
        self._measured = measured
        #: The tests that are known to pass without a mutant, and to fail without one.
        self._pass: set[str] = set()
        self._red: set[str] = set()

    def run(self, mutant: Mutant) -> Outcome:
        while True:
            outcome = super().run(mutant)
            test = outcome.caught_by
            if not test or test in self._pass or test.startswith(EXIT):
                return outcome
            if not self.run_unchanged([test]):
                self._pass.add(test)
                return outcome
            self._red.add(test)

    def _run(self, copy: Path, files: list[str], timeout: float) -> str:
        failed = super()._run(
            copy, [*files, *map("--deselect={}".format, sorted(self._red))], timeout
        )
        # No test hangs: they may take longer without the mutant, too.
        return "" if failed == "time-out" and HANGS else failed

    def tests_for(self, mutant: Mutant) -> list[str]:
        return self._measured.tests_of(mutant.block.path, mutant.number + 1)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--list", action="store_true", help="show the mutants and run nothing")
    parser.add_argument("--module", action="append", help="only these, and what is in them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--most", type=int, default=120, help="mutants in all; 0 for each")
    parser.add_argument("-j", "--jobs", type=int, default=1, help="mutants at the same time")
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each mutant")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="percent to be caught")
    parser.add_argument(
        "--measured", type=Path, help="a folder for what tests run, to use it again"
    )
    options = parser.parse_args(argv)
    wanted = tuple(f"{name}." for name in options.module or ())
    found = [
        mutant
        for name, path in modules().items()
        if not wanted or f"{name}.".startswith(wanted)
        for mutant in mutants(name, path)
    ]
    known = {(m.block.name, text) for m in found for text in texts_of(m)}
    for name, line in EQUIVALENT.keys() - known if not wanted else ():
        print(f"No such mutant any more: {name}: {line}")
    drawn = chosen(found, options.seed, options.most)
    tried = [mutant for mutant in drawn if not changes_nothing(mutant)]
    if options.list:
        print(*tried, f"{len(tried)} of {len(found)} mutants", sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        measured = Measured(options.measured or Path(folder, "measured"))
        workshop = PythonWorkshop(Path(folder), options.timeout, measured)
        outcomes = []
        with ThreadPoolExecutor(options.jobs) as pool:
            for outcome in pool.map(workshop.run, tried):
                outcomes.append(outcome)
                said = f"caught {outcome.caught_by}" if outcome.caught_by else "SURVIVED"
                at = f"{outcome.mutant.block.name}:{outcome.mutant.number + 1}"
                print(
                    f"{outcome.seconds:4.0f} s  {at} {outcome.mutant}\n        {said}", flush=True
                )
    return _report(outcomes, options.threshold, len(drawn) - len(tried))


def _report(outcomes: list[Outcome], threshold: float, equivalent: int) -> int:
    tried: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    for outcome in outcomes:
        name = outcome.mutant.block.name.removeprefix("contrib.").partition(".")[0]
        tried[name] += 1
        caught[name] += bool(outcome.caught_by)
    print(f"\n{'package':18} {'mutants':>8} {'caught':>7}")
    for name, number in sorted(tried.items()):
        print(f"{name:18} {number:8} {caught[name]:7}")
    for outcome in outcomes:
        if not outcome.caught_by:
            print(
                f"SURVIVED {outcome.mutant.block.name}:{outcome.mutant.number + 1} {outcome.mutant}"
            )
    score = 100 * caught.total() / max(1, len(outcomes))
    total = f"{len(outcomes)} mutants, {caught.total()} caught"
    print(f"{total}: {score:.1f} %; {equivalent} more are equivalent")
    return int(score < threshold)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
