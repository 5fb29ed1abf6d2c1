"""docs/limits.md has every bound of the code, with its reason."""

from __future__ import annotations

import pytest
from docs import bound_reasons, generate_limits, pages

pytestmark = pytest.mark.check


def test_the_page_is_fresh() -> None:
    page = generate_limits.PAGE.read_text(encoding="utf-8")
    assert page == pages.merged(page, generate_limits.text()), "run `make docs`"


def test_bounds_are_read_with_value_and_comment() -> None:
    found = {bound.key: bound for bound in generate_limits.bounds()}
    links = found["megascale_driver:MAX_LINKS"]
    assert links.value == 32_768 and "55 KiB" in links.comment
    assert found["megascale_driver:MAX_ROOTS"].comment.startswith("of a job")
    assert len(found) > 150


def test_a_bound_without_a_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(bound_reasons.REASONS, "megascale_driver:MAX_PAGE")
    monkeypatch.setitem(bound_reasons.REASONS, "megascale_driver:MAX_X", "nothing")
    with pytest.raises(ValueError, match=r"megascale_driver:MAX_PAGE.*megascale_driver:MAX_X"):
        generate_limits.text()
