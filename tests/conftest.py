"""Settings of all tests: a property takes as long as the machine needs, and a failing example can be repeated."""

from __future__ import annotations

from hypothesis import settings

# A deadline per example would make tests fail on a busy machine and say nothing about the code.
settings.register_profile("megascale", deadline=None, print_blob=True)
settings.load_profile("megascale")
