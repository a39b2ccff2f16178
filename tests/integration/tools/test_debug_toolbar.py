"""The panel "Locks", in the real django-debug-toolbar."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import GivenServer, RedisServer
from tests.support.python import python

ROOT = Path(__file__).parents[3]

pytest.importorskip("debug_toolbar", reason="the package django-debug-toolbar is not installed")
panels = pytest.importorskip("django_redis_lock.debug_toolbar", reason="as above")


@pytest.fixture(scope="module")
def recorded(redis_server: RedisServer | GivenServer) -> Any:
    """What the panel recorded of each request in ``toolbar_site``."""
    code = "from tests.integration.tools.toolbar_site import main; main()"
    ended = python("-c", code, REDIS_URL=redis_server.url, PYTHONPATH=ROOT)
    return json.loads(ended.stdout)


def names_and_results(rows: Any) -> list[tuple[str, str]]:
    return [(row["name"], row["what"]) for row in rows]


def test_a_free_lock(recorded: Any) -> None:
    [row] = recorded["free"]["locks"]
    assert (row["name"], row["label"], row["what"]) == ("free", "an import", "acquired")
    assert row["waited"] > 0
    assert row["held"] > 0
    assert "holder" not in row


@pytest.mark.parametrize("view", [0, 1], ids=["view", "async view"])
def test_a_lock_that_is_taken(recorded: Any, view: int) -> None:
    rows = recorded["refused"][view]["locks"]
    assert names_and_results(rows) == [("taken", "rejected"), ("taken", "timed_out")]
    for row in rows:
        assert row["holder"].endswith("thread MainThread (nightly)")
        assert "held" not in row
    assert "waited" not in rows[0]
    assert rows[1]["waited"] >= 10


def test_a_wait_names_the_holder_that_was_in_the_way(recorded: Any) -> None:
    [row] = recorded["waited"]["locks"]
    assert row["what"] == "acquired"
    assert row["holder"].endswith("(brief)")
    assert row["waited"] > row["held"] > 0


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"what": "acquired", "fence": 7, "holder_fence": 5, "holder": "another"}, True),
        ({"what": "acquired", "fence": 7, "holder_fence": 7, "holder": "itself"}, False),
        ({"what": "acquired", "fence": 7, "holder_fence": 0, "holder": "itself, perhaps"}, False),
        ({"what": "timed_out", "holder_fence": 0, "holder": "unnamed"}, True),
    ],
)
def test_a_request_is_not_named_as_its_own_holder(
    row: dict[str, Any], named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to "who holds it" may come when the request itself does."""
    panel = panels.LocksPanel(None, None)
    panel._locks = [row]
    stats: dict[str, Any] = {}
    monkeypatch.setattr(panel, "record_stats", stats.update)
    panel.generate_stats(None, None)
    assert ("holder" in stats["locks"][0]) == named


def test_a_lost_lock(recorded: Any) -> None:
    [row] = recorded["lost"]["locks"]
    assert row["what"] == "lost"
    assert row["held"] > 0


def test_two_requests_for_one_value_do_not_mix(recorded: Any) -> None:
    leader, follower = recorded["leader and follower"]
    assert names_and_results(leader["computations"]) == [("report", "computed")]
    assert names_and_results(follower["computations"]) == [("report", "shared")]
    for one in (leader, follower):
        assert one["reads"] == {"hit": 0, "stale": 0, "miss": 1}
        [row] = one["computations"]
        assert row["duration"] > 0
        assert not row["stale"]


def test_two_tasks_do_not_mix(recorded: Any) -> None:
    for name, found in zip(("one", "two"), recorded["two tasks"], strict=True):
        assert names_and_results(found["locks"]) == [(name, "acquired")]
        assert names_and_results(found["computations"]) == [(f"value of {name}", "computed")]


def test_a_hit(recorded: Any) -> None:
    found = recorded["hit"]
    assert found == {
        "locks": [],
        "computations": [],
        "reads": {"hit": 1, "stale": 0, "miss": 0},
    }


@pytest.mark.parametrize(
    ("request_of", "what"), [("stale", "computed"), ("stale, in the background", "computing")]
)
def test_a_refresh(recorded: Any, request_of: str, what: str) -> None:
    found = recorded[request_of]
    assert found["reads"] == {"hit": 0, "stale": 1, "miss": 0}
    [row] = found["computations"]
    assert (row["name"], row["what"], row["stale"]) == ("old", what, True)


def test_only_a_panel_that_is_on_listens(recorded: Any) -> None:
    outside, on, off = recorded["listeners"]
    assert on == [number + 1 for number in outside]
    assert off == outside


def test_the_panel_is_shown_by_the_toolbar(recorded: Any) -> None:
    page, panel = recorded["shown"]
    assert "1 lock, 1 computation" in page
    assert "&lt;shown&gt;" in panel
    assert "leader: computed a missing value" in panel


def test_the_panel_obeys_a_strict_policy(recorded: Any) -> None:
    _, panel = recorded["shown"]
    assert "style" not in panel
    assert "script" not in panel
