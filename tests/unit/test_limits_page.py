"""docs/limits.md has every bound of the code, with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from docs import generate_limits, pages

PAGE = generate_limits.PAGE.read_text(encoding="utf-8")


def test_the_page_is_fresh() -> None:
    assert pages.merged(PAGE, generate_limits.text()) == PAGE, "run `make docs`"


def test_bounds_are_read_with_value_and_comment() -> None:
    found = {(bound.package, bound.name): bound for bound in generate_limits.bounds()}
    links = found["megascale_driver", "MAX_LINKS"]
    assert links.value == 32_768 and "55 KiB" in links.comment
    assert found["megascale_driver", "MAX_ROOTS"].comment.startswith("per job")
    assert len(found) > 150


def test_a_bound_without_a_reason_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without = tmp_path / "limits.md"
    without.write_text(
        "\n".join(line for line in PAGE.splitlines() if "| `MAX_PAGE` |" not in line)
    )
    monkeypatch.setattr(generate_limits, "PAGE", without)
    with pytest.raises(ValueError, match=r"megascale_driver/.*: MAX_PAGE needs a comment"):
        generate_limits.text()


def test_a_constant_that_moved_keeps_its_reason() -> None:
    elsewhere = generate_limits.reasons_on(PAGE)
    assert elsewhere["megascale_driver", "MAX_PAGE"].startswith("entries of one answer")
