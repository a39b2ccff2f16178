"""The documentation site: ``make docs`` builds it from the Markdown beside this file."""

import django
from django.conf import settings

import django_redis_lock

# The reference is made from docstrings; to import the modules, Django needs these settings.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django_redis_lock",
    ],
)
django.setup()

project = "django_redis_lock"
author = "The django_redis_lock contributors"
project_copyright = author
version = release = django_redis_lock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The links between the pages are those that GitHub follows too.
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

highlight_language = "none"
html_theme = "furo"
html_title = "django-redis-lock"
html_static_path = ["static"]
html_css_files = ["tables.css"]
