"""The benchmarks run: all of them, briefly. How fast anything is, is no matter for a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.__main__ import MEASUREMENTS
from benchmarks.bench import Bench
from benchmarks.document import PUBLISHED, all_tables, document
from benchmarks.figures import best, jain, median_known, median_ratio, percentile
from benchmarks.results import OURS, Result, Target
from benchmarks.table import render, show, summary
from tests.lanes import some

ROOT = Path(__file__).parents[3]

GOOD, BAD, UNKNOWN = (Target.at_most("few", value, 2) for value in (1, 3, None))


#: So many runs at once, of some of the measurements each: they wait more than they compute.
RUNS = 2


def run(names: list[str], page: Path, plots: Path) -> str:
    """What a brief run of these measurements says."""
    command = [sys.executable, "-m", "benchmarks", "--quick"]
    command += ["--plots", str(plots), "--tables", str(page)]
    command += [word for name in names for word in ("--only", name)]
    # A server of the run's own, also where the tests were given one.
    surroundings = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=surroundings,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_every_measurement_gives_figures_of_ours(tmp_path: Path) -> None:
    published = (ROOT / "docs" / "benchmarks.md").read_bytes()
    measured = some(MEASUREMENTS, each=len(MEASUREMENTS))
    shares = [share for number in range(RUNS) if (share := measured[number::RUNS])]
    pages = [tmp_path / f"page{number}.md" for number in range(len(shares))]
    folders = [tmp_path / f"plots{number}" for number in range(len(shares))]
    with ThreadPoolExecutor(RUNS) as pool:
        said = list(pool.map(run, shares, pages, folders))
    for names, page, output in zip(shares, pages, said, strict=True):
        for name in names:
            assert f"\n({name}: " in output
        assert output.count(f"\n* {OURS}") >= len(names)
        assert "Targets: " in output
        text = page.read_text()
        assert [name for name in names if f'`make bench ARGS="--only {name}"`' not in text] == []
        assert text.count(f"\n| **{OURS}") >= len(names)
    assert (ROOT / "docs" / "benchmarks.md").read_bytes() == published
    if "No plots" not in said[0]:
        for folder in folders:
            drawn = {path.suffix for path in folder.iterdir()}
            # Of some measurements there are no pictures.
            assert drawn == {".svg"} or (len(measured) < len(MEASUREMENTS) and not drawn)


def test_without_a_choice_it_measures_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(bench: Bench) -> Result:
        return Result("Speed", ("cycles/s",), rows={OURS: (1.0,)})

    monkeypatch.setattr(benchmarks, "MEASUREMENTS", dict.fromkeys(MEASUREMENTS, measure))
    page, tables = tmp_path / "page.md", tmp_path / "tables.md"
    assert benchmarks.main(["--quick", "--page", str(page), "--tables", str(tables)]) == 0
    assert re.findall(r"^\((\w+): ", capsys.readouterr().out, re.MULTILINE) == list(MEASUREMENTS)
    assert page.read_text().count(f"\n| **{OURS}") == len(PUBLISHED)
    assert tables.read_text().count(f"\n| **{OURS}") == len(MEASUREMENTS)


def commands(page: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(r'^`make bench ARGS="--only (\w+)"`$', text, re.MULTILINE)


def test_the_page_has_six_tables_each_with_its_command() -> None:
    assert commands("docs/benchmarks.md") == list(PUBLISHED)
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert len(re.findall(r"^\|---(?:\|--:)+\|$", text, re.MULTILINE)) == len(PUBLISHED) == 6


def test_the_other_file_has_each_table_with_its_command() -> None:
    assert commands("benchmarks/results.md") == list(MEASUREMENTS)


def rows(page: str) -> list[list[str]]:
    lines = re.findall(r"^\|(.*)\|$", (ROOT / page).read_text(), re.MULTILINE)
    return [[cell.strip() for cell in line.split("|")] for line in lines if "---" not in line]


def test_the_page_says_nothing_else_than_the_file_of_all_tables() -> None:
    of_the_file = rows("benchmarks/results.md")
    assert not [
        shown
        for shown in rows("docs/benchmarks.md")
        if not any(set(shown) <= set(row) for row in of_the_file)
    ]


def test_the_page_has_of_each_measurement_the_table_that_is_chosen() -> None:
    titles = ("8 threads", "200 threads", "800 threads")
    results = {name: [Result(title, ("ratio",)) for title in titles] for name in MEASUREMENTS}
    assert re.findall(r"^\*\*(.*)\*\*$", document(results, {}), re.MULTILINE) == [
        *[titles[0]] * 5,
        titles[1],
    ]
    assert all_tables(results, {}).count("**200 threads**") == len(MEASUREMENTS)


def test_a_table_of_the_page_is_markdown() -> None:
    result = Result("Speed", ("cycles/s", "ratio"), note="A note.", targets=[BAD])
    result.rows = {"a peer": (1234.5, None), OURS: (0.5, "–")}
    text = document({"cycle": [result]}, {"machine": "small"})
    assert "| machine | small |" in text
    assert f"|  | cycles/s | ratio |\n|---|--:|--:|\n| a peer | 1,234 | – |\n| **{OURS}**" in text
    assert "A note." in text


def test_a_measurement_that_does_not_exist_is_refused() -> None:
    command = [sys.executable, "-m", "benchmarks", "--only", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "handover" in done.stderr


def test_figures() -> None:
    assert percentile([5, 1, 3, 2, 4], 50) == 3
    assert percentile(range(1, 101), 99) == 99
    assert percentile([7, 8], 0) == 7
    assert percentile([], 99) is None
    assert jain([3, 3, 3]) == 1
    assert jain([9, 0, 0]) == pytest.approx(1 / 3)
    assert median_known([3, None, 1, 2]) == 2
    assert median_known([None]) is None
    assert median_ratio([2, 30, 2], [1, 10, 2]) == 2
    assert best([3, None, 2]) == 2
    assert best([3, 2], highest=True) == 3
    assert best([]) is None


def test_targets_say_whether_they_are_met() -> None:
    assert (GOOD.met, BAD.met, UNKNOWN.met) == (True, False, None)
    assert Target.at_least("many", 3, 2).met
    assert not Target.at_least("many", 1, 2).met


def test_a_table_marks_ours_and_names_what_is_missed() -> None:
    result = Result("Speed", ("cycles/s", "ratio"), note="A note.", targets=[GOOD, BAD, UNKNOWN])
    result.rows = {"a peer": (1234.5, None), OURS: (0.5, "–")}
    lines = render(result).splitlines()
    assert any(line.startswith("  a peer") and "1,23" in line for line in lines)
    assert any(line.startswith(f"* {OURS}") and "0.500" in line for line in lines)
    assert "  MISSED: few (3, limit 2)" in lines
    assert summary([result]).splitlines()[0] == "Targets: 1 of 3 met"
    assert result.peers("cycles/s") == [1234.5]
    assert [show(number) for number in (1, 1.25, 12.34, 123.4, None)] == [
        "1",
        "1.250",
        "12.3",
        "123",
        "–",
    ]
