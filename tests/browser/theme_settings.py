"""The settings of the test site with another theme of the admin, which THEME names."""

import os
import runpy
from pathlib import Path

# Each time they are read: the tests change the address of Redis.
_base = runpy.run_path(str(Path(__file__).parents[2] / "testproject" / "settings.py"))
globals().update({name: value for name, value in _base.items() if name.isupper()})

INSTALLED_APPS = [os.environ["THEME"], *_base["INSTALLED_APPS"]]
