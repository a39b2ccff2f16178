"""The examples of docs/admin.md work as they stand there, and what it shows is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import redis
from django.contrib.auth.models import Group
from django.core.cache import cache
from django.core.management import BaseCommand, CommandError, call_command

from django_redis_lock import locked
from tests.holding import hurry, silence
from tests.processes import until

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "admin.md").read_text()


@pytest.mark.django_db
def test_the_permissions() -> None:
    exec(example("Permission"), {})
    operators = Group.objects.get(name="operators")
    assert operators.permissions.count() == 2


def example(word: str) -> str:
    (found,) = (code for code in re.findall(r"```python\n(.*?)```", TEXT, re.S) if word in code)
    return str(found)


def test_the_pictures() -> None:
    shown = re.findall(r"\]\((images/.*?)\)", TEXT)
    assert len(shown) == len(set(shown)) == 26
    for name in shown:
        assert (DOCS / name).read_bytes().startswith(b"\x89PNG")
    on_all_pages = " ".join(page.read_text() for page in DOCS.glob("*.md"))
    assert {path.name for path in (DOCS / "images").glob("admin-*")} == set(
        re.findall(r"\]\(images/(admin-.*?)\)", on_all_pages)
    )


STUCK = (Path(__file__).parents[3] / "docs" / "stuck.md").read_text()
FENCED = re.findall(r"^```(\w*)\n(.*?)^```$", STUCK, re.DOTALL | re.MULTILINE)
SHOWN = [text for language, text in FENCED if not language]


def block(beginning: str) -> str:
    return next(text for text in SHOWN if text.startswith(beginning))


def printed(*words: str) -> str:
    out = StringIO()
    call_command("locks", *words, stdout=out, no_color=True)
    return out.getvalue()


def facts(text: str) -> list[str]:
    """The names of the facts that ``locks show`` prints."""
    return re.findall(r"^  (\w+(?: \w+)*)  +\S", text, re.MULTILINE)


@pytest.fixture
def silent(client: redis.Redis) -> Iterator[None]:
    """A holder that has not been heard of for a while, and one that waits for its lock."""
    lock = cache.lock("nightly-report", label="Nightly report")
    lock.acquire()
    hurry()
    until(lambda: client.hexists(lock.keys.owner, "seen"))
    silence(client, lock.keys.lock, 24)
    yield
    lock.reset()


def test_the_list(silent: None) -> None:
    found = printed("list")
    assert found.splitlines()[0].split() == block("NAME").splitlines()[0].split()
    assert re.search(r"silent for \d+s\n\n1 lock is held", found)


def test_a_silent_holder(silent: None) -> None:
    shown = next(text for text in SHOWN if "silent for 24s." in text)
    found = printed("show", "nightly-report")
    assert facts(found) == facts(shown)
    assert shown.splitlines()[-1].partition("silent")[0] in found


def test_a_release(silent: None) -> None:
    shown = block("import is held by").splitlines()
    found = StringIO()
    call_command("locks", "release", "nightly-report", "--yes", stdout=found, no_color=True)
    assert found.getvalue().splitlines()[-1] == shown[-1].replace("import", "nightly-report")
    unanswered = pytest.raises(CommandError, match="no terminal to ask for confirmation: add --yes")
    with cache.lock("import"), unanswered as refusal:
        call_command("locks", "release", "import", stdout=found)
    assert refusal.value.returncode == 2


def test_a_name_that_was_never_used(client: redis.Redis) -> None:
    assert printed("show", "imort") == block("imort")


def test_the_doctor(client: redis.Redis) -> None:
    topics = r"^  (?:ok|warning|error) +(\w+) "
    out = StringIO()
    with suppress(CommandError):  # Uses of locked() in other tests may be mistakes.
        call_command("locks", "doctor", stdout=out, no_color=True)
    found = re.findall(topics, out.getvalue(), re.MULTILINE)
    shown = re.findall(topics, block("default  redis-1"), re.MULTILINE)
    assert [topic for topic in found if topic != "settings"] == shown


def test_the_message_that_names_the_holder(client: redis.Redis) -> None:
    @locked("nightly-report")
    class Command(BaseCommand):
        def handle(self, *args: Any, **options: Any) -> None: ...

    with cache.lock("nightly-report"), pytest.raises(CommandError) as caught:
        call_command(Command())
    said = f"CommandError: {caught.value}".replace("another caller", "web-2")
    assert said.startswith(block("CommandError: nightly").partition("web-2")[0])
    assert said.endswith(block("CommandError: nightly").partition(". More")[2].strip())
