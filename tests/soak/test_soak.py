"""The soak runs' checker finds what it is there to find; and a brief run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import until

from .checker import QUEUED, UNCONFIRMED, check
from .history import Event, History, read_histories
from .runner import PROGRESS, Run
from .stacks import Watch, read_stacks


def event(kind: str, at: float, process: str = "a", **values: Any) -> Event:
    return Event(kind, at, process, values)


def held(
    fence: int,
    since: float,
    until: float,
    process: str = "a",
    lock: str = "x",
    asked: float | None = None,
    limit: int = 0,
) -> Event:
    asked = since if asked is None else asked
    values = {"limit": limit} if limit else {}
    return event("held", until, process, lock=lock, fence=fence, since=since, asked=asked, **values)


def lost(since: float, at: float) -> Event:
    return event("lost", at, lock="x", fence=1, since=since)


def released(asked: float, at: float, lock: str = "x") -> Event:
    return event("released", at, "thief", lock=lock, asked=asked)


def gave_up(asked: float, at: float) -> Event:
    return event("gave-up", at, lock="x", asked=asked)


def wrote(fence: int, number: int, lock: str = "x") -> Event:
    return event("wrote", 0.0, lock=lock, fence=fence, number=number)


def computed(
    value: str, began: float, until: float, kind: str = "computed", took: float | None = None
) -> Event:
    took = began if took is None else took
    return event(kind, until, value, key="k", asked=took, took=took, began=began, id=value)


def frozen(worker: str, began: float, until: float) -> Event:
    return event("frozen", until, worker=worker, began=began)


def written(value: str, began: float, until: float) -> Event:
    return event("written", until, key="k", began=began, id=value)


def read(value: str, began: float) -> Event:
    return event("read", began + 0.1, key="k", began=began, id=value)


def ran(run: str, began: float, until: float, request: str = "r", *, held: bool = True) -> Event:
    return event("ran", until, request=request, id=run, began=began, held=held)


def begins(run: str, at: float) -> Event:
    return event("began", at, request="r", id=run)


def answered(run: str, at: float, *, kept: bool = True, kind: str = "answered") -> Event:
    return event(kind, at, request="r", id=run, asked=0.0, kept=kept)


def replayed(run: str, at: float, asked: float = 0.0) -> Event:
    return event("replayed", at, request="r", id=run, asked=asked)


def message(run: str, sent: float, popped: float, asked: float | None = None) -> list[Event]:
    asked = sent if asked is None else asked
    values = {"queue": "start x", "id": run}
    return [event("queued", sent, asked=asked, **values), event("popped", popped, **values)]


def worked(run: str, began: float, until: float, queue: str = "done x") -> Event:
    return event("worked", until, queue=queue, id=run, began=began)


def skipped(run: str, asked: float, started: float | None, queue: str = "start x") -> list[Event]:
    skip = event("skipped", asked + 1, queue=queue, id=run, asked=asked)
    starts = [] if started is None else [event("started", started, queue=queue, id=run)]
    return [skip, *starts]


@pytest.mark.parametrize(
    ("history", "finding"),
    [
        pytest.param([held(1, 0, 2), held(2, 1, 3, "b")], "S1: x was held by a", id="overlap"),
        pytest.param(
            [held(1, 0, 9), held(2, 1, 2, "b"), held(3, 3, 4, "c")],
            "S1: x was held by a (fence 1) until 9.000000 and by c",
            id="overlap with an earlier one than the last",
        ),
        pytest.param(
            [held(1, 0, 0), held(1, 5, 5), held(2, 3, 3, "b")], "S1: x", id="held at two moments"
        ),
        pytest.param(
            [held(2, 0, 1), held(1, 2, 3, "b")], "S4: x had fence 2", id="fence goes back"
        ),
        pytest.param([held(2, 0, 1), held(2, 2, 3, "b")], "S4: x had fence 2", id="fence again"),
        pytest.param(
            [held(5, 0, 1), held(6, 2, 3, "b"), held(4, 4, 5, "c")],
            "S4: x had fence 6",
            id="fence goes back to before",
        ),
        pytest.param(
            [held(1, 0, 1), held(2, 40, 41, "b"), event("fault", 8, what="", began=2)],
            "L2: x had no holder",
            id="forgotten long after a fault",
        ),
        pytest.param([held(1, 0, 1), held(2, 30, 31, "b")], "L2: x had no holder", id="forgotten"),
        pytest.param(
            [held(n, 0.1 * n, 2, process, limit=2) for n, process in enumerate("abc")],
            "S7: x with a limit of 2 was held by 3",
            id="over its limit",
        ),
        pytest.param([lost(0, 1), released(0.5, 0.6)], "S2: a lost x", id="stolen"),
        pytest.param([gave_up(0, 2.9)], "L5: a waited 2.900 s", id="gave up early"),
        pytest.param([gave_up(0, 60)], "L5: a waited 60.000 s", id="gave up late"),
        pytest.param([wrote(1, 1), wrote(2, 1)], "went from 1 to 1", id="lost count"),
        pytest.param([computed("v", 0, 2), computed("w", 1, 3)], "C1: k", id="computed twice"),
        pytest.param(
            [written("x", 0, 1), computed("v", 3, 9, took=2), computed("w", 4, 9)],
            "C1: k",
            id="computed twice, after a write that was before both",
        ),
        pytest.param(
            [frozen("v", 0, 1), frozen("x", 1, 9), computed("v", 2, 9), computed("w", 3, 9)],
            "C1: k",
            id="computed twice, and another was frozen, or at another time",
        ),
        pytest.param(
            [frozen("v", 1, 8), computed("v", 0, 9), computed("w", 2, 4), computed("x", 3, 5)],
            "C1: k was computed as w",
            id="computed twice beside a frozen one",
        ),
        pytest.param(
            [computed("v", 0, 3, "alone"), written("w", 1, 2), read("v", 4)],
            "C2: k",
            id="computed without Redis, and yet stored",
        ),
        pytest.param(
            [
                event("writing", 1, key="k", id="x"),
                *(computed(v, 1 + UNCONFIRMED, 90) for v in "vw"),
            ],
            "C1: k",
            id="computed twice, long after a write that was never confirmed",
        ),
        pytest.param(
            [computed("v", 0, 3), written("w", 1, 2), read("v", 4)], "C2: k", id="write overwritten"
        ),
        pytest.param(
            [written("v", 0, 1), written("w", 2, 3), read("v", 4)], "C2: k", id="write forgotten"
        ),
        pytest.param([ran("a", 0, 2), ran("b", 1, 3)], "I1: r ran as a and as b", id="ran twice"),
        pytest.param(
            [ran("a", 0, 9), ran("b", 1, 2, held=False), ran("c", 3, 4)],
            "I1: r ran as a and as c",
            id="ran twice beside one that had lost its lock",
        ),
        pytest.param(
            [begins("a", 0), ran("a", 0, 1), answered("a", 2), begins("b", 3)],
            "I2: r was answered by a and ran again as b",
            id="ran again after its answer",
        ),
        pytest.param([replayed("a", 3)], "I3: r was answered by a", id="answered without a run"),
        pytest.param(
            [ran("a", 0, 4), replayed("a", 3)], "I3: r was answered by a", id="answered before"
        ),
        pytest.param(
            [ran("a", 0, 1, "of another"), replayed("a", 3)],
            "I3: r was answered by a",
            id="answered for another user",
        ),
        pytest.param(
            [ran("a", 0, 1), ran("b", 2, 3), answered("b", 4), replayed("a", 6, asked=5)],
            "I4: r was answered by b and later by a",
            id="two answers",
        ),
        pytest.param(
            [*message("a", 0, 2), *message("b", 1, 3)],
            "U1: start x was queued as a and as b",
            id="queued twice",
        ),
        pytest.param(
            [*message("a", 0, 3.5), *message("b", 1, 2), *message("c", 2.5, 3)],
            "U1: start x was queued as a and as c",
            id="queued twice, beside a longer one",
        ),
        pytest.param(
            [worked("a", 0, 2), worked("b", 1, 3)], "U1: done x was run as a", id="two runs"
        ),
        pytest.param(skipped("a", 2, 1), "U2: start x was skipped for a", id="a lost change"),
    ],
)
def test_a_wrong_history_is_found(history: list[Event], finding: str) -> None:
    found = check(history)
    assert any(violation.startswith(finding) or finding in violation for violation in found), found


@pytest.mark.parametrize(
    "history",
    [
        [held(1, 0, 1), held(2, 1, 3, "b"), held(1, 0, 9, lock="y")],
        [held(1, 0, 1), held(2, 15, 16, "b"), held(1, 0, 1, lock="y")],
        [held(1, 0, 1), held(2, 40, 41, "b"), event("fault", 38, what="", began=8)],
        [lost(0, 1), released(2, 3), released(0, 1, lock="y")],
        [lost(0, 2.5), released(0.5, 0.6)],  # It was over by itself.
        [
            held(n, at, at + 2, process, limit=2)
            for n, at, process in ((1, 0, "a"), (2, 1, "b"), (3, 2, "c"))
        ],
        # With a limit the first of two may be the last to notice that it holds a place.
        [held(2, 1, 2, "b", asked=0, limit=2), held(1, 1.5, 2, asked=0, limit=2)],
        [gave_up(0, 2.99), gave_up(0, 5)],
        [wrote(1, 1), wrote(2, 2), wrote(1, 1, lock="y")],
        [computed("v", 0, 2), written("", 1, 1.5), computed("w", 1.6, 3), read("w", 4)],
        [frozen("v", 1, 8), computed("v", 0, 9), computed("w", 8, 9)],
        [computed("v", 0, 9), computed("w", 8, 9, "alone")],
        # The write ended the first one's flight before its process learned that it leads.
        [computed("v", 3, 9, took=1), written("x", 1.5, 2), computed("w", 4, 9)],
        # A write that was never confirmed has ended the first computation.
        [event("writing", 1, key="k", id="x"), computed("v", 0, 9), computed("w", 8, 9)],
        [written("v", 0, 2), written("w", 1, 3), read("v", 4)],
        # The read had begun before the write was confirmed.
        [computed("v", 0, 3), written("w", 1, 4), read("v", 3.5)],
        [ran("a", 0, 2), ran("b", 1, 3, "of another"), ran("c", 2, 3), replayed("a", 3)],
        [ran("a", 0, 2, held=False), ran("b", 1, 3)],
        [begins("a", 0), answered("a", 2, kept=False), begins("b", 3)],
        [begins("a", 3), answered("b", 2, kind="refused")],
        [ran("a", 0, 1), ran("b", 2, 3), answered("b", 4), replayed("a", 6, asked=3)],
        [ran("a", 0, 1), answered("b", 4, kept=False), replayed("a", 6, asked=5)],
        [*message("a", 0, 2), *message("b", 2, 3)],
        # Its name had ended, or was about to: it had waited to be sent.
        [*message("a", 0, 20), *message("b", QUEUED, 6)],
        [*message("a", 3, 6, asked=-1), *message("b", 4, 5)],
        [worked("a", 0, 2), worked("b", 1, 3, "done y"), worked("c", 2, 3)],
        skipped("a", 2, 3),
        skipped("a", 2, None),
        skipped("a", 2, 1, "done x"),
    ],
)
def test_a_right_history_is_not(history: list[Event]) -> None:
    assert check(history) == []


def test_eviction_of_locks_excuses_two_holders_but_no_fence() -> None:
    assert check([held(1, 0, 2), held(2, 1, 3, "b")], exclusive=False) == []
    assert check([held(2, 0, 1), held(1, 2, 3, "b")], exclusive=False)
    # The first holder was slow to notice that it was one.
    slow = held(1, 1, 3, "b", asked=-1)
    assert check([held(2, 0, 2), slow], exclusive=False) == []
    assert check([held(0, -3, -2), held(2, -2, 2), slow], exclusive=False)


def test_a_killed_process_leaves_its_history(tmp_path) -> None:
    history = History(tmp_path, "killed")
    history.write("held", lock="x", fence=1, since=1.0)
    with (tmp_path / "killed.history").open("a") as file:
        file.write('{"kind": "he')
    (found,) = read_histories(tmp_path)
    assert (found.kind, found.process, found.values["fence"]) == ("held", "killed", 1)


WAITING = """
import asyncio, sys, threading
from pathlib import Path
from tests.soak.history import History
from tests.soak.stacks import on_demand

folder = Path(sys.argv[1])
on_demand(folder, "waiting")

async def wait_for_nothing():
    on_demand(folder, "waiting", asyncio.get_running_loop())
    History(folder, "waiting").write("began")
    await asyncio.Event().wait()

threading.Thread(target=threading.Event().wait, name="idle", daemon=True).start()
asyncio.run(wait_for_nothing())
"""


def test_a_process_without_progress_says_what_it_waits_for(tmp_path) -> None:
    """Its threads, and its tasks."""
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2]) as waiting:
        try:
            until(lambda: read_histories(tmp_path))
            with Watch(tmp_path, ["held"], lambda: [waiting.pid], stuck=0.2):
                until(lambda: "wait_for_nothing" in read_stacks(tmp_path))
        finally:
            waiting.kill()
    assert "-- waiting\n" in read_stacks(tmp_path)
    assert "threading.py" in read_stacks(tmp_path)


ENDING = """
import asyncio, sys
from pathlib import Path
from tests.soak.stacks import on_demand

on_demand(Path(sys.argv[1]), "ending", asyncio.new_event_loop() if sys.argv[2] == "loop" else None)
ends_slowly = [object() for _ in range(1_000_000)]
print(flush=True)
"""


@pytest.mark.parametrize("kind", ["threads", "loop"])
def test_a_process_that_ends_may_be_told_to(tmp_path, kind: str) -> None:
    """The signal once killed a process whose interpreter had taken its handler away."""
    command = [sys.executable, "-c", ENDING, str(tmp_path), kind]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE) as ending:
        assert ending.stdout is not None
        ending.stdout.readline()
        while ending.poll() is None:
            ending.send_signal(signal.SIGUSR1)
    assert ending.returncode == 0


@pytest.mark.sample(0)
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["plain", "cache", "idempotent", "unique"])
def test_a_brief_run(workload: str) -> None:
    run = Run(workload, seconds=7, seed=1, count=3)
    assert run.violations() == []
    assert run.summary["fault"]
    assert run.summary[PROGRESS.get(workload, "held")] > 50
