"""The whole demo, from the first check to the last process ended."""

from __future__ import annotations

import secrets
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from threading import Thread

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.urls import reverse

from testproject.demo.scenes import show_line, show_stampede
from testproject.demo.screen import Screen
from testproject.demo.site import Site
from testproject.demo.team import Team
from testproject.demo.which_redis import chosen_redis, keep_in_memory
from testproject.demo.work import work
from testproject.reports.sample_data import create_sample_data

__all__ = ["play", "play_without_redis"]

USER = "demo"
ASKERS = 9
WORKERS = 6


def play(command: BaseCommand, screen: Screen, *, scenes: bool, port: int | None) -> None:
    """Show the scenes, then serve the site at ``port`` until a signal comes; None: do not."""
    with ExitStack() as stack:
        # First, because whoever has to choose another port should learn it now.
        site = None if port is None else stack.enter_context(Site(port))
        embedded = stack.enter_context(chosen_redis())
        screen.say(
            f"An embedded Redis runs at {embedded.url}."
            if embedded
            else "The Redis is the one that REDIS_URL names."
        )
        _prepare(command)
        if scenes:
            screen.say(f"Starting {ASKERS} processes ...")
            with Team(ASKERS) as team:
                show_stampede(team, screen)
                show_line(team, screen)
        if site is not None:
            with Team(WORKERS) as team:
                team.start_all(work)
                _invite(site, "processes", screen)
                if embedded:
                    screen.say("Take one yourself, in another terminal:")
                    screen.copyable(
                        f"REDIS_URL={embedded.url} {_python()} manage.py nightly_report"
                    )
                _serve(site, screen)


def play_without_redis(command: BaseCommand, screen: Screen, port: int) -> None:
    """Serve the site at ``port`` with its locks in the memory of this process, whose threads take
    them."""
    with Site(port) as site:
        keep_in_memory()
        screen.say("No Redis is used: the locks are in the memory of this process.")
        _prepare(command)
        for _ in range(WORKERS):
            Thread(target=work, daemon=True).start()
        _invite(site, "threads", screen)
        _serve(site, screen)


def _prepare(command: BaseCommand) -> None:
    command.check()
    call_command("migrate", verbosity=0, interactive=False)
    create_sample_data()


def _invite(site: Site, workers: str, screen: Screen) -> None:
    locks = reverse("admin:django_redis_lock_heldlock_changelist")
    screen.heading("The site is up")
    screen.copyable(f"Site        {site.url}{reverse('home')}")
    screen.copyable(f"Held locks  {site.url}{locks}")
    screen.copyable(f"User        {USER}")
    screen.copyable(f"Password    {_new_password()}")
    screen.gap()
    screen.say(
        f"{WORKERS} {workers} take locks and queue for them, so there are always some to see."
    )


def _serve(site: Site, screen: Screen) -> None:
    site.load()
    screen.gap()
    screen.say("Ctrl-C stops everything.")
    site.serve_forever()


def _python() -> str:
    """This Python, as one would call it from here."""
    path = Path(sys.executable)
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _new_password() -> str:
    """Make the demo's administrator, and let this password alone be right from now on."""
    password = secrets.token_urlsafe(9)
    user, _ = get_user_model().objects.update_or_create(
        username=USER, defaults={"is_staff": True, "is_superuser": True, "is_active": True}
    )
    user.set_password(password)
    user.save()
    return password
