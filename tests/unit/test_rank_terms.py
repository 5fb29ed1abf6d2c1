"""What a rank registers with has the same names and types in both processes and on the wire."""

from __future__ import annotations

import msgspec

from megascale_common.node import messages
from megascale_common.node.messages import RankTerms, Register


def test_each_value_is_a_field_of_the_message() -> None:
    fields = {field.name: field for field in msgspec.structs.fields(Register)}
    defaults = RankTerms("a", 1, 0, 1, "", "", 2)
    for name, kind in messages.RANK_KINDS.items():
        assert fields[name].type is kind, name
        if not fields[name].required:  # older workers leave it out
            assert fields[name].default == getattr(defaults, name), name


def test_numbers_go_out_as_the_message_has_them() -> None:
    terms = RankTerms("a", 1, 0, 1, "", "", 2, max_write_mib_per_s=5)
    sent = messages.rank_values(terms)
    assert type(sent["max_write_mib_per_s"]) is float and RankTerms(**sent) == terms
