from __future__ import annotations

import logging

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _

from . import events
from .conf import Conf
from .extension import PartMissing, part
from .middleware import note_tasks

logger = logging.getLogger("django_redis_lock.metrics")

#: Of the system checks: ``manage.py check --tag redis_lock``.
CHECKS_TAG = "redis_lock"


class RedisLockConfig(AppConfig):
    name = "django_redis_lock"
    verbose_name = _("Redis locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        register(check, CHECKS_TAG)
        register(check_deployment, CHECKS_TAG, deploy=True)
        events.subscribe_later(_start_metrics)
        if _exports():
            part("exporters").start_configured()
        note_tasks()


def check(**kwargs: object) -> list[CheckMessage]:
    """The system checks, which are loaded by the commands that run them."""
    messages: list[CheckMessage] = part("checks").run(deploy=False)
    return messages


def check_deployment(**kwargs: object) -> list[CheckMessage]:
    messages: list[CheckMessage] = part("checks").run(deploy=True)
    return messages


def _start_metrics() -> events.Listener:
    try:
        listener: events.Listener = part("metrics").start()
    except PartMissing as error:
        logger.warning("Nothing is counted: %s", error)
        return _ignore
    return listener


def _ignore(event: object) -> None:
    """Counts nothing."""


def _exports() -> bool:
    try:
        return bool(Conf().EXPORTERS)
    except ImproperlyConfigured:
        return True  # It logs what is wrong.
