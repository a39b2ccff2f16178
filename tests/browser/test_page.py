"""The page "Held locks" in Chromium: that it lives, and that one can work with it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.cache import caches

from django_redis_lock.contrib import metrics
from django_redis_lock.ops import held_locks
from django_redis_lock.protocol.keys import lock_keys
from tests.browser.conftest import PAGE, Open
from tests.browser.site import POLICY
from tests.holding import silence
from tests.redis_server import RedisServer
from tests.support.admin import hold, named, queued

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
expect = playwright.expect


def row(page: Any, name: str) -> Any:
    return page.locator("#result_list tbody tr").filter(has=page.get_by_role("link", name=name))


def test_these_pages_are_served_with_the_strict_policy(open_page: Open) -> None:
    answer = open_page().goto(PAGE)
    assert answer.headers["content-security-policy"] == POLICY


# -- it lives ----------------------------------------------------------------------------------


@pytest.mark.sample(0)
def test_times_run_on_between_two_refreshes(
    open_page: Open, refresh_every: Any, client: redis.Redis
) -> None:
    refresh_every(3600)
    named(hold("a", timeout=60), client)
    page = open_page()
    left, bar = page.locator("[data-down]").first, page.locator("progress").first
    # The bar first: both may move between the two looks.
    width, before = bar.evaluate("bar => bar.value"), left.inner_text()
    assert re.fullmatch(r"5\d s", before)
    expect(left).not_to_have_text(before)
    assert int(left.inner_text().split()[0]) < int(before.split()[0])
    assert bar.evaluate("bar => bar.value") < width


@pytest.mark.sample(0)
def test_durations_are_said_as_by_the_server(
    open_page: Open, refresh_every: Any, client: redis.Redis
) -> None:
    refresh_every(3600)
    shown = {}
    for seconds in (90, 7000, 100_000):
        hold(str(seconds), timeout=seconds)
        shown[str(seconds)] = {90: "1 min", 7000: "1 h 56 min", 100_000: "1 d 3 h"}[seconds]
    page = open_page()
    page.evaluate("() => new Promise(done => setTimeout(done, 1100))")  # One tick.
    for name, words in shown.items():
        expect(row(page, name).locator("[data-down]")).to_contain_text(words)


def test_a_lock_released_by_another_process_disappears_and_a_new_one_appears(
    open_page: Open, client: redis.Redis
) -> None:
    first = named(hold("first"), client)
    hold("second")
    page = open_page()
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    first.release()
    expect(row(page, "first")).to_have_count(0)
    hold("third", label="of another <b>process</b>")
    expect(row(page, "third")).to_have_count(1)
    expect(row(page, "third")).to_contain_text("of another <b>process</b>")
    expect(row(page, "second")).to_have_count(1)
    expect(page.locator(".paginator")).to_contain_text("2 locks")


def test_names_cannot_inject_anything_by_way_of_the_script(open_page: Open) -> None:
    page = open_page()
    evil = "<img src=x onerror=\"document.title='broken'\">"
    hold(evil, label=evil)
    expect(page.get_by_role("link", name=evil)).to_be_visible()
    expect(page.locator("#result_list img")).to_have_count(0)


def refreshed(page: Any) -> None:
    """Wait for two refreshes: the first may have been under way before."""
    for _ in range(2):
        with page.expect_response(lambda response: "live=" in response.url):
            pass


def test_scroll_focus_and_selection_survive_a_refresh(open_page: Open, client: redis.Redis) -> None:
    locks = [hold(f"lock-{number:02}") for number in range(40)]
    for lock in locks:
        named(lock, client)
    page = open_page(f"{PAGE}?o=lock", viewport={"width": 1280, "height": 500})
    box = page.get_by_role("checkbox", name="Select lock-20", exact=True)
    box.check()
    box.focus()
    box.scroll_into_view_if_needed()
    page.evaluate("() => getSelection().selectAllChildren(document.activeElement.closest('tr'))")
    assert page.evaluate("() => scrollY") > 0
    # What one looks at stays where it is, although rows above may take another line, or one less.
    seen_at = box.bounding_box()["y"]
    for number in range(30, 40):
        locks[number].release()
    expect(page.locator("#result_list tbody tr")).to_have_count(30)
    refreshed(page)
    expect(box).to_be_checked()
    expect(box).to_be_focused()
    assert box.bounding_box()["y"] == pytest.approx(seen_at, abs=1)
    assert "lock-20" in page.evaluate("() => getSelection().toString()")


@pytest.mark.sample(0)
def test_a_new_holder_is_shown_and_not_selected_any_more(
    open_page: Open, client: redis.Redis
) -> None:
    lock = named(hold("a", label="the first"), client)
    page = open_page()
    expect(row(page, "a")).to_contain_text("the first")
    page.get_by_role("checkbox", name="Select a", exact=True).check()
    lock.release()
    hold("a", label="another")
    expect(row(page, "a")).to_contain_text("another")
    expect(row(page, "a")).to_have_count(1)
    expect(page.get_by_role("checkbox", name="Select a", exact=True)).not_to_be_checked()


@pytest.mark.sample(0)
def test_the_focus_stays_nearby_when_its_row_goes(open_page: Open, client: redis.Redis) -> None:
    locks = [named(hold(name), client) for name in "abc"]
    page = open_page(f"{PAGE}?o=lock")
    page.get_by_role("link", name="b", exact=True).focus()
    locks[1].release()
    expect(row(page, "b")).to_have_count(0)
    assert page.evaluate("() => document.activeElement.closest('tr').innerText").split()[1] == "c"


@pytest.mark.sample(0)
@pytest.mark.parametrize("every", [0, None, 10**9])
def test_a_page_that_does_not_refresh_itself(
    open_page: Open, refresh_every: Any, client: redis.Redis, every: int | None
) -> None:
    refresh_every(every)
    named(hold("a", timeout=60), client)
    page = open_page()
    page.wait_for_load_state("networkidle")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    left = page.locator("[data-down]").first
    expect(left).not_to_have_text(left.inner_text())  # The times run on.
    assert asked == []
    assert page.locator("[data-pause]").is_visible() is bool(every)


@pytest.mark.sample(0)
def test_it_can_be_paused(open_page: Open, client: redis.Redis) -> None:
    lock = named(hold("a"), client)
    page = open_page()
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    expect(pause).to_have_attribute("aria-pressed", "true")
    page.wait_for_load_state("networkidle")
    lock.release()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    held = row(page, "a").inner_text()
    page.wait_for_timeout(1500)  # Several refreshes, and a tick.
    assert asked == []
    assert row(page, "a").inner_text() == held
    pause.click()
    expect(row(page, "a")).to_have_count(0)


@pytest.mark.sample(0)
def test_a_session_that_has_ended(open_page: Open, client: redis.Redis) -> None:
    named(hold("a"), client)
    page = open_page(trouble=False)
    page.context.clear_cookies()
    expect(page.get_by_role("status")).to_contain_text("you are not logged in")


@pytest.mark.sample(0)
def test_redis_that_is_away(open_page: Open, client: redis.Redis, monkeypatch: Any) -> None:
    page = open_page()
    hold("a")
    expect(row(page, "a")).to_be_visible()

    def away(*args: Any) -> Any:
        raise redis.ConnectionError("<b>away</b>")

    with monkeypatch.context() as patch:
        patch.setattr(held_locks, "list_held", away)
        note = page.locator(".errornote")
        expect(note).to_contain_text("“default” cannot be read")
        expect(note).to_contain_text("<b>away</b>")
        expect(page.get_by_text("No lock is held")).to_be_hidden()
    expect(row(page, "a")).to_be_visible()
    expect(page.locator(".errornote")).to_have_count(0)


def test_redis_goes_and_comes_back(
    open_page: Open, own_server: RedisServer, settings: Any, tmp_path: Path
) -> None:
    """What is known of the outage, and what is held without Redis, appears and goes by itself."""
    options = {"LOCK_ON_REDIS_DOWN": "local", "LOCK_LOCAL_LOCK_FOLDER": str(tmp_path)}
    backend = "django_redis_lock.cache.RedisCache"
    settings.CACHES = {
        "default": {"BACKEND": backend, "LOCATION": own_server.url, "OPTIONS": options}
    }
    page = open_page()
    here = page.locator(".held-here")
    expect(here).to_be_hidden()
    own_server.stop()
    with caches["default"].lock("nightly", label="report"):
        expect(page.locator(".errornote")).to_contain_text("has not answered this process for")
        expect(page.locator(".errornote")).to_contain_text("locks taken without it: 1.")
        expect(here).to_contain_text("Held on this host")
        expect(here.get_by_role("listitem")).to_contain_text(["nightly"])
        # Nothing is listed, so there is nothing to release, on a phone either.
        page.set_viewport_size({"width": 390, "height": 800})
        expect(page.get_by_role("button", name="Release the selected").first).to_be_hidden()
        own_server.start()
        expect(page.locator(".errornote")).to_have_count(0)
        expect(here).to_be_hidden()


# -- one can work with it ----------------------------------------------------------------------


def test_an_operator_who_was_paged(open_page: Open, client: redis.Redis) -> None:
    """Finds the holder, judges whether it is alive, releases it and sees the next one start."""
    lock = named(hold("nightly-report", label="Nightly report", timeout=300), client)
    hold("something-else")
    owner = lock_keys(lock.keys.lock).owner
    client.hset(owner, mapping={"host": "batch-3", "pid": 4711, "thread": "main"})
    silence(client, lock.keys.lock, 200)
    with queued("nightly-report"):
        page = open_page()
        expect(row(page, "nightly-report")).to_contain_text("batch-3:4711")
        expect(row(page, "nightly-report")).to_contain_text("silent for 3 min")
        page.get_by_role("link", name="nightly-report").click()
        expect(
            page.get_by_text("has crashed, is stopped, or is cut off from Redis")
        ).to_be_visible()
        expect(page.locator(".waiting li")).to_contain_text("thread the next one")
        page.get_by_role("button", name="Release").click()
        expect(page.get_by_text("batch-3, process 4711")).to_be_visible()
        expect(page.get_by_text("The waiting process gets it at once.")).to_be_visible()
        assert lock.owned()
        page.get_by_role("button", name="Release").click()
        expect(page.get_by_text("“nightly-report” is released.")).to_be_visible()
        expect(page.locator(".facts")).to_contain_text("thread the next one")
        expect(page.locator(".facts")).to_contain_text("alive")
        expect(page.locator(".waiting li")).to_have_count(0)
        latest = page.locator("[data-each=events]")
        expect(latest).to_contain_text("released by force")
        expect(latest).to_contain_text("operator")
        expect(row(page, "something-else")).to_have_count(0)
    assert LogEntry.objects.count() == 1


@pytest.mark.sample(0)
def test_a_selection_is_released(open_page: Open, client: redis.Redis) -> None:
    locks = {name: named(hold(name), client) for name in "abc"}
    page = open_page(f"{PAGE}?o=lock")
    for name in "ac":
        page.get_by_role("checkbox", name=f"Select {name}", exact=True).check()
    page.get_by_role("button", name="Release the selected").first.click()
    expect(page.locator(".to-release > li")).to_have_count(2)
    page.get_by_role("button", name="Release").click()
    expect(page.locator(".messagelist li")).to_have_count(2)
    assert page.url.endswith(f"{PAGE}?o=lock")
    assert [name for name, lock in locks.items() if lock.owned()] == ["b"]


@pytest.mark.sample(0)
def test_all_can_be_selected(open_page: Open, client: redis.Redis) -> None:
    for name in "abc":
        named(hold(name), client)
    page = open_page()
    every = page.get_by_role("checkbox", name="Select all")
    every.check()
    assert page.locator(".action-select:checked").count() == 3
    page.get_by_role("checkbox", name="Select b", exact=True).uncheck()
    assert every.evaluate("box => box.indeterminate")


def press_until(page: Any, reached: Callable[[], bool]) -> None:
    for _ in range(60):
        page.keyboard.press("Tab")
        if reached():
            return
    raise AssertionError("the keyboard does not lead there")


@pytest.mark.sample(0)
def test_keyboard_only(open_page: Open, client: redis.Redis) -> None:
    lock = named(hold("a"), client)
    named(hold("b"), client)
    page = open_page(f"{PAGE}?o=lock")

    def on(text: str) -> Callable[[], bool]:
        script = "e => e.ariaLabel || e.innerText || e.value"
        active = page.locator("*:focus")
        return lambda: active.count() > 0 and active.evaluate(script).strip().startswith(text)

    press_until(page, on("Pause"))
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_have_attribute("aria-pressed", "true")
    page.keyboard.press("Enter")
    press_until(page, on("Select a"))
    assert page.evaluate("() => document.activeElement.ariaLabel") == "Select all"
    press_until(page, lambda: page.evaluate("() => document.activeElement.ariaLabel") == "Select a")
    refreshed(page)
    page.keyboard.press("Space")
    press_until(page, on("Release the selected"))
    page.keyboard.press("Enter")
    expect(page.get_by_role("link", name="No, take me back")).to_be_visible()
    press_until(page, on("Release"))
    page.keyboard.press("Enter")
    expect(page.get_by_text("“a” is released.")).to_be_visible()
    assert not lock.locked()


# -- without JavaScript ------------------------------------------------------------------------


@pytest.mark.sample(0)
def test_without_javascript(open_page: Open, client: redis.Redis) -> None:
    lock = named(hold("nightly-report", label="Nightly report", timeout=600), client)
    page = open_page(java_script_enabled=False)
    expect(row(page, "nightly-report")).to_contain_text("9 min")
    expect(page.get_by_role("button", name="Pause")).to_be_hidden()
    other = hold("later")
    page.get_by_role("link", name="Reload").click()
    expect(page.get_by_role("link", name="later")).to_be_visible()
    other.release()
    page.get_by_label("Search").fill("NIGHTLY")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(page.locator("#result_list tbody tr")).to_have_count(1)
    page.get_by_role("link", name="nightly-report").click()
    expect(page.get_by_text("Its process is alive.")).to_be_visible()
    page.get_by_role("button", name="Release").click()
    page.get_by_role("button", name="Release").click()
    expect(page.get_by_text("This lock is free.")).to_be_visible()
    assert not lock.locked()


# -- who may only look -------------------------------------------------------------------------


@pytest.mark.sample(0)
def test_who_may_only_look(open_page: Open, client: redis.Redis) -> None:
    user = User.objects.create_user("viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_heldlock"))
    lock = named(hold("a"), client)
    page = open_page(user=user)
    expect(row(page, "a")).to_be_visible()
    assert page.get_by_role("checkbox").count() == 0
    lock.release()
    hold("b")
    expect(row(page, "b")).to_be_visible()
    assert page.get_by_role("checkbox").count() == 0
    page.get_by_role("link", name="b", exact=True).click()
    expect(page.get_by_text("Who holds it")).to_be_visible()
    assert page.get_by_role("button", name="Release").count() == 0


# -- scale -------------------------------------------------------------------------------------


@pytest.mark.sample(0)
def test_five_hundred_locks(open_page: Open, client: redis.Redis) -> None:
    locks = [hold(f"lock-{number:03}", timeout=300) for number in range(500)]
    page = open_page(f"{PAGE}?o=lock&p=3")
    assert page.locator("#result_list tbody tr").count() == 100
    expect(page.locator(".summary")).to_contain_text("500 held")
    page.get_by_role("link", name="lock-250").scroll_into_view_if_needed()
    for lock in locks[260:]:
        lock.release()
    expect(page.locator("#result_list tbody tr")).to_have_count(60)
    expect(page.get_by_role("link", name="lock-250")).to_be_in_viewport()


# -- one can read it ---------------------------------------------------------------------------

ROWS = """() => [...document.querySelectorAll('#result_list tbody tr')].map(row => ({
  text: row.innerText, height: row.getBoundingClientRect().height,
}))"""


@pytest.mark.sample(0)
def test_rows_are_one_line_high_and_the_table_fits(open_page: Open, client: redis.Redis) -> None:
    """A label takes no second line: what is cut of it is in its title."""
    label = "The report of all branches, for the accountants, with what was sold in each"
    named(hold("nightly-report", label=label, timeout=300), client)
    silence(client, named(hold("import-42", label="Import", timeout=300), client).keys.lock, 236)
    hold("endless", timeout=None, label=label)
    page = open_page(viewport={"width": 1280, "height": 800})
    expect(row(page, "import-42")).to_contain_text("silent for 3 min")
    assert [row for row in page.evaluate(ROWS) if row["height"] > 36] == []
    assert (
        page.evaluate(
            "() => { const e = document.querySelector('.held-locks'); "
            "return e.scrollWidth - e.clientWidth; }"
        )
        <= 0
    )
    assert row(page, "nightly-report").locator(".label").get_attribute("title") == label
    label_of_filter, filter = page.locator("label[for=filter-kind]"), page.locator("#filter-kind")
    assert abs(label_of_filter.bounding_box()["y"] - filter.bounding_box()["y"]) < 12


# -- in other languages ------------------------------------------------------------------------


@pytest.mark.sample(0)
@pytest.mark.parametrize(
    ("language", "left", "none"),
    [
        ("de", r"1 d 3 h", "Zurzeit wird keine Sperre gehalten."),
        ("zh-hans", r"1 天 3 小时", "当前没有被持有的锁。"),
    ],
)
def test_the_script_speaks_the_pages_language(
    open_page: Open, client: redis.Redis, settings: Any, language: str, left: str, none: str
) -> None:
    settings.LANGUAGE_CODE = language
    page = open_page()
    expect(page.get_by_text(none)).to_be_visible()
    lock = hold("a", timeout=100_000)
    expect(row(page, "a")).to_contain_text(left)
    lock.release()
    expect(page.get_by_text(none)).to_be_visible()


# -- many locks, and what to do with one ---------------------------------------------------------


@pytest.mark.sample(0)
def test_a_narrow_window_shows_25_rows_until_all_are_wanted(
    open_page: Open, client: redis.Redis
) -> None:
    for number in range(30):
        hold(f"job-{number:02}")
    page = open_page(viewport={"width": 390, "height": 800})
    rows = page.locator("#result_list tbody tr:visible")
    expect(rows).to_have_count(25)
    page.get_by_label("Select all").check()
    expect(page.locator("tbody .action-select:checked")).to_have_count(25)
    page.get_by_label("Show all rows of this page").check()
    expect(rows).to_have_count(30)
    hold("job-30")
    expect(rows).to_have_count(31)  # Also after a refresh.
    page.set_viewport_size({"width": 1280, "height": 800})
    expect(page.get_by_label("Show all rows of this page")).to_be_hidden()
    expect(rows).to_have_count(31)


@pytest.mark.sample(0)
@pytest.mark.parametrize("path", ["change", "release"])
def test_the_command_that_stops_a_holder_is_copied(
    open_page: Open, client: redis.Redis, path: str
) -> None:
    lock = named(hold("report", timeout=60), client)
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("link", name="report", exact=True).click()
    if path == "release":
        page.get_by_role("button", name="Release").click()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("() => navigator.clipboard.readText()")
    assert copied == f"kill -TERM {lock.local.hold.process.pid}"


@pytest.mark.sample(0)
def test_new_events_appear(open_page: Open, client: redis.Redis) -> None:
    named(hold("report", timeout=60), client)
    page = open_page(f"{PAGE}events/")
    expect(page.get_by_text("Nothing went wrong in the last day.")).to_be_visible()
    assert caches["default"].lock("report").reset()
    expect(page.get_by_role("link", name="report", exact=True)).to_be_visible()
    expect(page.get_by_text("Nothing went wrong in the last day.")).to_be_hidden()


#: The texts of a page in which a later character of the same line stands to the left of an earlier
#: one, although all their letters are read from left to right.
BACKWARDS = """() => {
  const wrong = [], range = document.createRange();
  const page = document.querySelector(".held-page");
  const texts = document.createTreeWalker(page, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (!/[a-z]/i.test(text.data) || !text.parentElement.checkVisibility()) continue;
    let last = null;
    for (let i = 0; i < text.length; i++) {
      range.setStart(text, i);
      range.setEnd(text, i + 1);
      const [box] = range.getClientRects();
      if (!box || !box.width) continue;
      if (last && Math.abs(box.y - last.y) < 4 && box.x < last.x) {
        wrong.push(text.data.trim());
        break;
      }
      last = box;
    }
  }
  return wrong;
}"""


@pytest.mark.sample(0)
@pytest.mark.parametrize("language", ["ar", "he"])
def test_from_right_to_left_texts_and_names_keep_their_order(
    open_page: Open, client: redis.Redis, settings: Any, language: str
) -> None:
    """What is not translated is English; names, hosts and durations often are Latin."""
    settings.LANGUAGE_CODE = language
    page = open_page()
    expect(page.locator("html")).to_have_attribute("dir", "rtl")
    assert not page.evaluate(BACKWARDS)  # Nothing is held.
    named(hold(":a.b-17:", label="(a) b:", timeout=60), client)
    named(hold("gone.", label="(gone)", timeout=60), client).reset()
    caches["default"].get_or_set("values:", lambda: 1, 60)
    metrics.flush()
    with queued(":a.b-17:"):
        for path in ("", "events/", "processes/"):
            page.goto(f"{PAGE}{path}")
            assert not page.evaluate(BACKWARDS)
        page.goto(PAGE)
        page.get_by_role("link", name=":a.b-17:").click()
        page.wait_for_url("**/change/")
        assert not page.evaluate(BACKWARDS)
        page.locator(".release button").click()
        expect(page.locator(".to-release")).to_be_visible()
        assert not page.evaluate(BACKWARDS)
