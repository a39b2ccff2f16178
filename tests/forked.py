"""What the processes of ``tests.processes`` are forked from does: import, and set Django up."""

from __future__ import annotations

import gc

import django

django.setup()
gc.freeze()
