"""A signature as docs/how-to/add-a-log-signature.md adds one, and the tables that are refused."""

from __future__ import annotations

import json

import pytest
from tests.harness.snippets import block

from megascale_common.node.logs import matcher, signatures

PAGE = "docs/how-to/add-a-log-signature.md"
TABLE = block(PAGE, "[acme-nic-halted]").code


def test_the_example_gives_its_line_and_its_excerpt_the_kind_that_it_names() -> None:
    (added,) = signatures.read(TABLE)
    excerpt = json.loads(block(PAGE, '"acme-nic-1"').code)
    assert excerpt["log"] == block(PAGE, "card 3 is halted\n").code.strip()
    for line in (excerpt["log"], "acmenic 0000:3b:00.0: port 1 is halted"):
        assert matcher.matches(added, line, line.lower()), line
    for line in (
        "acmenic 0000:3b:00.0: link is up",
        "othernic 0000:3b:00.0: firmware watchdog expired",
        "acmenic 0000:3b:00.0: firmware watchdog expired in self-test",
    ):
        assert not matcher.matches(added, line, line.lower()), line
    kind = added.kind
    labels = {"category": kind.category, "role": kind.role, "action": kind.action}
    assert labels == {name: excerpt[name] for name in labels}
    assert kind.kernel and not kind.weak and not added.wide
    assert matcher.kind_of(excerpt["log"]) != kind, "the page's example is nobody's real card"


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("rdma_device_fatal", "nic_sad", "category: 'nic_sad' is not in the vocabulary"),
        ("rdma_device_fatal", "host_oom", "action: host_oom never evicts; use restart or stop"),
        ("kernel =", "kernal =", "unknown field `kernal`"),
        ('"root"', '"rot"', "Invalid enum value 'rot'"),
        (r"\S+", "(", "unterminated subpattern"),
        ('"acmenic"]', '""]', "none that is empty"),
        ('role = "root"\n', "", "missing required field `role`"),
    ],
)
def test_a_bad_table_is_refused_by_its_name(right: str, wrong: str, problem: str) -> None:
    assert right in TABLE
    with pytest.raises(ValueError, match="signature acme-nic-halted: ") as refused:
        signatures.read(TABLE.replace(right, wrong))
    assert problem in str(refused.value)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="acme-nic-halted"):
        signatures.read(TABLE + TABLE)
