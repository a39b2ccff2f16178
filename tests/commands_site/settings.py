from testproject.settings import *  # noqa: F403  # settings build on settings
from testproject.settings import INSTALLED_APPS

INSTALLED_APPS = [*INSTALLED_APPS, "tests.commands_site"]
