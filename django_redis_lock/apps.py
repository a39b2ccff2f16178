from __future__ import annotations

import logging
from contextlib import suppress

from django.apps import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Info, register
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string
from django.utils.translation import gettext_lazy as _

from .activity import note_tasks
from .cache import RedisCache
from .conf import Conf
from .extension import PartMissing, part

logger = logging.getLogger("django_redis_lock.metrics")

#: Of the system checks: ``manage.py check --tag redis_lock``.
CHECKS_TAG = "redis_lock"

#: The OPTIONS of a cache that name what django-redis imports at its first use; those it has.
NAMED = {
    "CLIENT_CLASS": "django_redis.client.DefaultClient",
    "COMPRESSOR": "django_redis.compressors.identity.IdentityCompressor",
    "SERIALIZER": "django_redis.serializers.pickle.PickleSerializer",
}


class RedisLockConfig(AppConfig):
    name = "django_redis_lock"
    verbose_name = _("Redis locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """What each site can reach is loaded here, before a server forks its workers: ``cache`` has
        imported nearly all of it."""
        register(check, CHECKS_TAG)
        register(check_deployment, CHECKS_TAG, deploy=True)
        _load_caches()
        _start_metrics()
        if _exports():
            part("exporters").start_configured()
        note_tasks()


def check(**kwargs: object) -> list[CheckMessage]:
    """The system checks, which are loaded by the commands that run them."""
    return _checked(deploy=False)


def check_deployment(**kwargs: object) -> list[CheckMessage]:
    return _checked(deploy=True)


def _checked(deploy: bool) -> list[CheckMessage]:
    try:
        messages: list[CheckMessage] = part("checks").run(deploy=deploy)
    except PartMissing as missing:
        return [Info(f"{missing}.")]
    return messages


def _load_caches() -> None:
    """What cannot be imported raises at the cache's first use."""
    for of_cache in settings.CACHES.values():
        with suppress(Exception):
            if issubclass(import_string(of_cache["BACKEND"]), RedisCache):
                options = of_cache.get("OPTIONS") or {}
                for option, usual in NAMED.items():
                    import_string(options.get(option, usual))
                if "SENTINELS" in options:  # The class of a cluster's client has it.
                    part("topology")


def _start_metrics() -> None:
    try:
        part("metrics").start()
    except PartMissing as error:
        logger.warning("Nothing is counted: %s", error)


def _exports() -> bool:
    try:
        return bool(Conf().EXPORTERS)
    except ImproperlyConfigured:
        return True  # It logs what is wrong.
