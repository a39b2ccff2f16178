"""The whole demo, from the first check to the last process ended."""

from __future__ import annotations

import secrets
from contextlib import ExitStack

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import BaseCommand
from django.urls import reverse

from testproject.demo.scenes import show_line, show_stampede
from testproject.demo.screen import Screen
from testproject.demo.site import Site
from testproject.demo.team import Team
from testproject.demo.which_redis import chosen_redis
from testproject.demo.work import work
from testproject.embedded_redis import EmbeddedRedis
from testproject.reports.sample_data import create_sample_data

__all__ = ["play"]

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
        command.check()
        call_command("migrate", verbosity=0, interactive=False)
        create_sample_data()
        if scenes:
            screen.say(f"Starting {ASKERS} processes ...")
            with Team(ASKERS) as team:
                show_stampede(team, screen)
                show_line(team, screen)
        if site is not None:
            with Team(WORKERS) as team:
                team.start_all(work)
                _invite(site, embedded, screen)
                site.serve()


def _invite(site: Site, embedded: EmbeddedRedis | None, screen: Screen) -> None:
    locks = reverse("admin:django_redis_lock_heldlock_changelist")
    screen.heading("The site is up")
    screen.say(f"  Site          {site.url}{reverse('home')}")
    screen.say(f"  Held locks    {site.url}{locks}")
    screen.say(f"  User          {USER}")
    screen.say(f"  Password      {_new_password()}")
    screen.say(
        f"\n{WORKERS} processes take locks and queue for them, so there is always one to see."
    )
    if embedded:
        screen.say("Take one yourself, in another terminal:")
        screen.say(f"  REDIS_URL={embedded.url} python manage.py nightly_report")
    screen.say("Ctrl-C stops everything.")


def _new_password() -> str:
    """Make the demo's administrator, and let this password alone be right from now on."""
    password = secrets.token_urlsafe(9)
    user, _ = get_user_model().objects.update_or_create(
        username=USER, defaults={"is_staff": True, "is_superuser": True, "is_active": True}
    )
    user.set_password(password)
    user.save()
    return password
