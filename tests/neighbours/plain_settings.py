"""Settings for packages whose source distribution has tests, but no settings for them."""

import os

SECRET_KEY = "only for these tests"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_ratelimit",
    "waffle",
]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
DEFAULT_AUTO_FIELD = "django.db.models.AutoField"
ROOT_URLCONF = "waffle.urls"
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "waffle.middleware.WaffleMiddleware",
]
TEMPLATES = [{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}]
_MEMORY = {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}
_NO_SERVER = {
    "BACKEND": os.environ["NEIGHBOUR_BACKEND"],
    "LOCATION": "redis://127.0.0.1:1/0",
    "OPTIONS": {"IGNORE_EXCEPTIONS": True},
}
CACHES = {
    "default": _MEMORY,
    "other": _MEMORY,
    "connection-errors": _NO_SERVER,
    "connection-errors-redis": _NO_SERVER,
    "instant-expiration": {**_MEMORY, "TIMEOUT": 0},
}
WAFFLE_CACHE_PREFIX = "waffle:"
JINJA_INSTALLED = False
