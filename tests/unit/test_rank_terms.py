"""What a rank registers with has the same names and types in both processes and on the wire."""

from __future__ import annotations

from typing import NotRequired, get_origin, get_type_hints

from megascale_common.node import rank_terms
from megascale_common.node.messages import Register
from megascale_common.node.rank_terms import RankTerms


def test_each_value_is_a_field_of_the_message() -> None:
    hints = get_type_hints(Register, include_extras=True)
    for name, kind in rank_terms.KINDS.items():
        optional = get_origin(hints[name]) is NotRequired
        assert (hints[name].__args__[0] if optional else hints[name]) is kind, name
        assert optional == (name in rank_terms.DEFAULTS), f"{name}: older workers leave it out"


def test_numbers_go_out_as_the_message_has_them() -> None:
    terms = RankTerms("a", 1, 0, 1, "", "", 2, max_write_mib_per_s=5)
    sent = rank_terms.of(terms)
    assert type(sent["max_write_mib_per_s"]) is float and RankTerms(**sent) == terms
