"""The settings of the test project, with an exporter switched on."""

from testproject.settings import *  # noqa: F403  # settings build on settings

DJANGO_REDIS_LOCK = {"EXPORTERS": ["prometheus"]}
