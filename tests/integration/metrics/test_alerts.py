"""The alerts that docs/dashboards ships, judged by Prometheus itself on series as exporters make
them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

DASHBOARDS = Path(__file__).parents[3] / "docs" / "dashboards"
RULES = DASHBOARDS / "alerts.yml"

pytestmark = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed; on Debian, the package prometheus has it",
)


#: Counters that a group has from its first use on, and their labels.
COUNTED = [
    *((name, 'group="export"') for name in ("lost", "crashed", "rejected", "timeouts")),
    ("acquired", 'group="export",contended="false"'),
    ("acquired", 'group="export",contended="true"'),
]


def firing(tmp_path: Path, minute: int, series: dict[str, str], rules: Path = RULES) -> set[str]:
    """The alerts that fire at ``minute``, with one sample of the ``series`` a minute."""
    names = re.findall(r"alert\W+(\w+)", rules.read_text())
    found: set[str] = set()
    for name in names:
        # Without expected alerts, promtool fails exactly if there are some.
        test = {
            "interval": "1m",
            "input_series": [{"series": s, "values": values} for s, values in series.items()],
            "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}],
        }
        file = tmp_path / "test.yml"
        file.write_text(json.dumps({"rule_files": [str(rules)], "tests": [test]}))
        ended = subprocess.run(
            ["promtool", "test", "rules", str(file)], check=False, capture_output=True, text=True
        )
        said = ended.stdout + ended.stderr
        assert ended.returncode == 0 or f"alertname: {name}, time: {minute}m" in said, said
        found |= {name} if ended.returncode else set()
    return found


@pytest.mark.parametrize(
    ("metric", "labels", "alert"),
    [
        ("lost", 'group="export"', "LockLost"),
        ("crashed", 'group="export"', "HolderCrashed"),
        ("outages", 'server="redis:6379/0"', "RedisDoesNotAnswer"),
        ("fallbacks", 'group="export",how="local"', "LocksWithoutRedis"),
    ],
)
def test_the_first_event_fires_once(tmp_path: Path, metric: str, labels: str, alert: str) -> None:
    """Also if it is the first that Prometheus hears of the group, from one process of several."""
    series = f'django_redis_lock_{metric}_total{{{labels},instance="%s"}}'
    for first in ("_x5 1x60", "0x5 1x60"):
        of = {series % "web-1": first, series % "web-2": "3x60"}
        assert firing(tmp_path, 7, of) == {alert}
        assert firing(tmp_path, 30, of) == set()


@pytest.mark.parametrize(
    ("metric", "alert"), [("timeouts", "LockTimeouts"), ("refreshes_failed", "RefreshesFail")]
)
def test_a_series_that_begins_with_many_events_fires(
    tmp_path: Path, metric: str, alert: str
) -> None:
    series = f'django_redis_lock_{metric}_total{{group="export"}}'
    assert firing(tmp_path, 7, {series: "_x5 9x60"}) == {alert}
    assert firing(tmp_path, 7, {series: "_x5 1x60"}) == set()


@pytest.mark.parametrize("refused", ["rejected", "timeouts"])
def test_a_lock_that_nobody_gets_fires(tmp_path: Path, refused: str) -> None:
    """A holder that died with a lifetime of hours: the site answers 409, in silence."""
    series = dict.fromkeys(
        (f"django_redis_lock_{name}_total{{{labels}}}" for name, labels in COUNTED), "0x60"
    )
    refusals = f'django_redis_lock_{refused}_total{{group="export"}}'
    assert "LockStuck" in firing(tmp_path, 40, series | {refusals: "0x5 0+1x50"})
    taken = 'django_redis_lock_acquired_total{group="export",contended="false"}'
    both = series | {refusals: "0x5 0+1x50", taken: "0+1x60"}
    assert "LockStuck" not in firing(tmp_path, 40, both)


def test_a_silent_holder_fires(tmp_path: Path) -> None:
    gauge = 'django_redis_lock_silent_locks{group="export",instance="%s"}'
    both = {gauge % "web-1": "0x5 1x20", gauge % "web-2": "0x5 1x20"}
    assert firing(tmp_path, 10, both) == {"HolderSilent"}
    assert firing(tmp_path, 4, both) == set()


def test_nothing_fires_while_nothing_happens(tmp_path: Path) -> None:
    counters: list[Any] = ["lost", "crashed", "timeouts", "refreshes_failed", "rejected"]
    series = {f'django_redis_lock_{name}_total{{group="export"}}': "0x60" for name in counters}
    series['django_redis_lock_fallbacks_total{group="export",how="run"}'] = "0x60"
    series['django_redis_lock_outages_total{server="redis:6379/0"}'] = "0x60"
    assert firing(tmp_path, 30, series) == set()


def test_the_dashboard_too_shows_the_first_event(tmp_path: Path) -> None:
    """Each query for how many there were, as an alert for more than none."""
    panels = json.loads((DASHBOARDS / "grafana.json").read_text())["panels"]
    queries = [t["expr"] for panel in panels for t in panel["targets"] if "increase" in t["expr"]]
    rules = tmp_path / "panels.yml"
    for expression in queries:
        query = expression.replace("$__rate_interval", "10m").replace("$group", ".*")
        alert = {"alert": "Shown", "expr": f"({query}) > 0"}
        rules.write_text(json.dumps({"groups": [{"name": "panels", "rules": [alert]}]}))
        [metric] = set(re.findall(r"django_redis_lock_\w+", query))
        series = f'{metric}{{group="export",server="redis:6379/0",how="local"}}'
        for first in ("_x5 1x60", "0x5 1x60"):
            assert firing(tmp_path, 7, {series: first}, rules) == {"Shown"}, query
            assert firing(tmp_path, 30, {series: first}, rules) == set(), query
    assert len(queries) == 7
