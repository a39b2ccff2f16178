"""The pages on monitoring: their examples work, and their tables are complete."""

from __future__ import annotations

import json
import logging
import logging.config
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.cache import cache
from django.dispatch import Signal
from django.test import RequestFactory
from prometheus_client import CollectorRegistry

import django_redis_lock
from django_redis_lock import events, signals
from django_redis_lock.contrib import metrics
from django_redis_lock.contrib.exporters import opentelemetry, prometheus
from django_redis_lock.contrib.exporters.listening import GAUGES
from tests.integration.metrics.test_exporters import Exported, live_a_little
from tests.processes import until

ROOT = Path(__file__).parents[3]
PAGES = ("monitoring", "signals_and_log", "exporters")
TEXT = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)


def section(heading: str) -> str:
    return TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of tables, but for their heads."""
    found = re.findall(r"^\|(.*)\|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in found]
    heads = {i for i, row in enumerate(cells) if set("".join(row)) <= {"-"}}
    return [row for i, row in enumerate(cells) if i not in heads and i + 1 not in heads]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_examples_in_python(
    client: Any, settings: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {"cache": cache, "import_prices": int}
    with cache.lock("invoice-17", group="invoice-{pk}"):
        pass
    metrics.flush()
    try:
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(code, names)
        lost = cache.lock("nightly", timeout=0.05)
        lost.acquire()
        said: list[str] = []
        until(lambda: said.append(capsys.readouterr().out) or "nightly was lost" in "".join(said))
    finally:
        signals.lock_lost.disconnect(names.get("page_somebody"))
    assert names["found"].acquisitions == 1
    assert names["chart"].startswith("<svg")
    response = names["metrics_view"](RequestFactory().get("/"))
    assert b"# HELP" in response.content


def test_the_example_of_logging() -> None:
    [code] = [c for c in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "LOGGING" in c]
    names: dict[str, Any] = {}
    exec(code, names)
    logging.config.DictConfigurator(names["LOGGING"])
    assert set(names["LOGGING"]["loggers"]) <= {"django_redis_lock", *loggers()}


def loggers() -> set[str]:
    folder = Path(django_redis_lock.__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    return {
        name for s in sources for name in re.findall(r'(?:getLogger|get_logger)\("([^"]+)"\)', s)
    }


def test_all_loggers_are_there() -> None:
    shown = [quoted(row[0])[0] for row in rows(section("The log"))]
    assert sorted(shown) == sorted(loggers())


def test_all_signals_are_there_with_their_arguments() -> None:
    shown = {quoted(row[0])[0]: row[2] for row in rows(section("Signals"))}
    assert set(shown) == {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    for kind, signal in signals._SIGNALS.items():
        [name] = [name for name in shown if getattr(signals, name) is signal]
        said = set(quoted(shown[name])) - {"False", "get_or_set_many"}
        hidden = {"subject"} | ({"error"} if kind is events.Computed else set())
        assert said == set(kind._fields) - hidden


def exported(column: int) -> dict[str, list[str]]:
    """The metrics in a column of the table of figures, with their labels or attributes."""
    assert "all metrics but those of outages have `group`" in section("Figures")
    cells = [quoted(row[column]) for row in rows(section("Figures"))]
    return {
        name: labels if "_lock_outage" in name or ".outage" in name else ["group", *labels]
        for name, *labels in filter(None, cells)
    }


def test_all_metrics_for_prometheus_are_there_with_their_labels() -> None:
    registry = CollectorRegistry()
    exporter = prometheus.Prometheus(registry)
    real = {}
    for _, collector in exporter._metrics:
        is_counter = collector._type == "counter"
        assert collector._type == ("counter" if is_counter else "histogram")
        real[collector._name + "_total" * is_counter] = list(collector._labelnames)
    assert exported(1) == real


@pytest.mark.parametrize("where", ["the rules", "the dashboard"])
def test_the_queries_ask_for_what_there_is(where: str) -> None:
    """Each query names a metric that exists, and only labels that it has."""
    labels = {name: set(of_it) for name, of_it in exported(1).items()}
    labels |= {f"django_redis_lock_{gauge.name}": {"group"} for gauge in GAUGES}
    asked = []
    for query in queries(where):
        names = [n.removesuffix("_bucket") for n in re.findall(r"django_redis_lock_\w+", query)]
        assert names, query
        said = re.findall(r"by \(([^)]*)\)", query) + re.findall(r"(\w+) *=~?\"", query)
        for name in names:
            assert set(re.findall(r"\w+", " ".join(said))) <= labels[name] | {"le"}, query
        asked += names
    assert len(set(asked)) >= {"the rules": 6, "the dashboard": 15}[where]


def queries(where: str) -> list[str]:
    if where == "the rules":
        rules = (ROOT / "docs" / "dashboards" / "alerts.yml").read_text()
        found = re.findall(r"expr: (?:>-\n)?(.*?)\n +(?:for|annotations):", rules, re.DOTALL)
        assert len(found) == rules.count("- alert:")
        return found
    dashboard = json.loads((ROOT / "docs" / "dashboards" / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_all_metrics_for_opentelemetry_are_there_with_their_attributes(client: Any) -> None:
    received = Exported()
    exporter = opentelemetry.start(received.tracers, received.meters)
    try:
        live_a_little(cache, client)
    finally:
        events.unsubscribe(exporter)
    shown = exported(2)
    for name, attributes in shown.items():
        points = received.points(name.removeprefix("django_redis_lock."))
        assert points, name
        assert {key for said, _ in points for key in said} == set(attributes), name
    assert len(shown) == len(exporter.instruments)
