from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RedisLockConfig(AppConfig):
    name = "django_redis_lock"
    verbose_name = _("Redis locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        # They need the apps to be there.
        from . import checks, exporters, metrics, middleware  # noqa: F401, PLC0415 - checks are registered

        metrics.start()
        exporters.start_configured()
        middleware.note_tasks()
