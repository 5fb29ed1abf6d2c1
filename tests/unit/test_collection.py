"""What the collection of the tests, which each process of `make test` repeats, may cost."""

from __future__ import annotations


def test_nothing_that_takes_seconds_is_imported_to_collect_tests(
    collected_late: frozenset[str],
) -> None:
    """By the modules that this process has collected: in `make test` all of them."""
    assert not collected_late
