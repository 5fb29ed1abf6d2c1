"""How many examples properties are tried with: some in ``make test``, many in ``make test-slow``.

tests/conftest.py chooses the profile, and has ``make test-slow`` run the properties as well.
"""

from __future__ import annotations

from hypothesis import settings

SHORT, LONG = "megascale", "megascale at length"
_USUAL = 100  # the examples that `examples` is a share of


def register_profiles() -> None:
    """Choose the short one. New examples are drawn in each run, so the short ones add up."""
    # A deadline per example would make tests fail on a busy machine without a defect in the code.
    for name, number in ((SHORT, 25), (LONG, 250)):
        settings.register_profile(name, max_examples=number, deadline=None, print_blob=True)
    settings.load_profile(SHORT)


def examples(number: int) -> settings:
    """For a property that needs more or fewer than the usual 100, of which the profile is a share.

    Used as a decorator.
    """
    return settings(max_examples=max(8, number * settings.default.max_examples // _USUAL))
