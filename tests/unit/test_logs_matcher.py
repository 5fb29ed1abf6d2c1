"""The matcher of log lines: the vocabulary's rules, the stream, the gate, and what bounds them."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from megascale_common.node.logs import catalogue
from megascale_common.node.logs.categories import DOMAINS, NEVER_EVICT, Kind
from megascale_common.node.logs.matcher import (
    LITERALS,
    MAX_FINDINGS,
    MAX_LINE_BYTES,
    MAX_SAMPLE_CHARS,
    Matcher,
    gate_word,
    kind_of,
)
from megascale_common.node.logs.signatures import SIGNATURES
from megascale_common.node.logs.templates import Templates

OFF_BUS = b"NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus\n"
STEP = b"[rank3]: 2026-11-23 07:00:00,123 INFO step 17 loss 2.345 tokens/s 123456 lr 3.0e-4\n"


def found(data: bytes, size: int = 1 << 16) -> list[tuple[str, int]]:
    matcher = Matcher()
    for start in range(0, len(data), size):
        matcher.feed(data[start : start + size])
    matcher.close()
    return [(one.fingerprint, one.count) for one in matcher.take()]


def test_no_signature_evicts_for_what_also_follows_from_faults_elsewhere() -> None:
    for signature in SIGNATURES:
        if signature.kind.action == "evict_restart":
            assert signature.kind.category not in NEVER_EVICT
            assert signature.kind.domain in {"node", "config"}
    with pytest.raises(ValueError, match=r"action: collective_timeout never evicts"):
        Kind("x", "collective_timeout", "secondary", "evict_restart")
    with pytest.raises(ValueError, match=r"category: 'gpu_sad' is not in the vocabulary"):
        Kind("x", "gpu_sad", "root", "alert")


def test_names_are_unique_and_every_category_has_a_signature() -> None:
    names = [signature.kind.name for signature in SIGNATURES]
    assert len(set(names)) == len(names)
    numbered = {f"NVRM: Xid (PCI:0000:01:00): {number}, x" for number in range(1, 200)}
    kinds = {kind.category for line in numbered if (kind := catalogue.xid(line))}
    kinds |= {signature.kind.category for signature in SIGNATURES}
    assert set(DOMAINS) - kinds == set()


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 16])
def test_pieces_of_a_stream_give_what_the_whole_gives(size: int) -> None:
    data = STEP * 50 + OFF_BUS + STEP + b"Got async event : port error\r\n" + OFF_BUS + b"Killed"
    assert found(data, size) == [("xid-79", 2), ("rdma-port", 1), ("sigkill", 1)]


def test_every_literal_comes_through_the_gate() -> None:
    # Without the gate, the line itself is compared: both ways agree for every literal.
    for literal in LITERALS:
        assert gate_word(literal) in re.sub(r"\d", "", literal)
        line = f"x {literal} y"
        assert bool(found(line.encode())) == (kind_of(line) is not None), literal


def test_a_line_without_end_is_cut_and_the_next_one_is_seen() -> None:
    matcher = Matcher()
    matcher.feed(b"x" * 1000)  # a first piece without line end
    tracemalloc.start()
    for _ in range(50):
        matcher.feed(b"fatal error " * 87_381)  # 50 MB
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    matcher.feed(b"\n" + OFF_BUS)
    assert [one.fingerprint for one in matcher.take()][-1] == "xid-79"
    assert peak < 8 << 20  # one piece of 1 MB, and copies of it


def test_a_long_line_inside_one_piece_is_cut_too() -> None:
    long = b"y" * (1 << 20)
    data = b"RuntimeError: a\n" + long + b" CUDA out of memory\n" + OFF_BUS
    assert [name for name, _ in found(data, 1 << 22)] == [
        "unknown-fatal: RuntimeError: a",
        "xid-79",
    ]
    head = b"CUDA out of memory " + b"z" * MAX_LINE_BYTES + b"\n"
    matcher = Matcher()
    matcher.feed(head)
    assert len(matcher.take()[0].sample) == MAX_SAMPLE_CHARS


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert found(b"\xff\xfe\x00" + OFF_BUS + b"\xc3(\xff") == [("xid-79", 1)]


def test_findings_and_templates_are_bounded() -> None:
    matcher = Matcher()
    for index in range(20_000):
        word = "".join(chr(ord("a") + (index // 26**place) % 26) for place in range(4))
        matcher.feed(f"{word}Error: {word} {word[::-1]} broke\n".encode())
    findings = matcher.take()
    assert len(findings) <= MAX_FINDINGS
    assert sum(one.count for one in findings) + matcher.dropped == 20_000
    assert matcher.take() == []


def test_unknown_lines_that_differ_in_variables_share_a_template() -> None:
    templates = Templates()
    first = templates.of("ValueError: step 17 of /data/a.bin is broken at 0x7f00")
    assert templates.of("ValueError: step 18 of /data/b.bin is broken at 0x8f00") == first
    assert templates.of("[rank3]: ValueError: step 9 of /c is broken at 0x1") == first
    assert templates.of("TypeError: wrong") != first


def test_the_catalogue_agrees_with_the_text_of_nvlink_errors() -> None:
    line = "NVRM: Xid (PCI:0018:01:00): {}, RLW_RXPIPE {} XC0 i0 Link 13 (0x0409a0c2)"
    fatal, harmless = (
        catalogue.xid(line.format(145, "Fatal")),
        catalogue.xid(line.format(145, "Nonfatal")),
    )
    assert fatal is not None and fatal.action == "evict_restart"
    assert harmless is not None and harmless.action == "alert"
    switch = "nvidia-nvswitch0: SXid (PCI:0000:84:00.0): 20034, {}, Link 30 LTSSM Fault Up"
    assert [catalogue.sxid(switch.format(one)).action for one in ("Fatal", "Non-fatal")] == [  # type: ignore[union-attr]
        "evict_restart", "alert",
    ]  # fmt: skip


def test_words_of_ordinary_lines_do_not_pass_the_gate() -> None:
    ordinary = STEP.decode() + "train valid epoch samples learning rate worker gradients"
    words = set(re.findall("[a-z]+", ordinary.lower()))
    gates = {gate_word(literal) for literal in LITERALS}
    long = {gate for gate in gates if len(gate) > 3}
    assert {gate for gate in long if any(gate in word for word in words)} == set()
    assert words & (gates - long) == set()  # a short word counts only if it is the whole word


def test_lines_that_differ_in_digits_alone_are_looked_at_again_when_one_is_troubled() -> None:
    steps = b"".join(b"step %d loss %d.%d\n" % (n, n % 7, n) for n in range(500))
    bad = b"step 501 loss nan\n"
    assert found(steps + bad + steps + bad) == [("nan", 2)]
    assert found(steps) == []


def test_a_number_that_an_agent_repeats_is_the_kernel_s() -> None:
    told = kind_of("XidCriticalError: Xid=48 on Device=GPU-0a1b2c")
    assert told is not None and (told.category, told.action) == (
        "gpu_ecc_uncorrectable", "evict_restart",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("failed: cudaErrorEccUncorrectable", "gpu_ecc_uncorrectable"),
        ("error: CUDA_ERROR_NOT_INITIALIZED", "gpu_init_failed"),
        ("call failed with cudaErrorMisalignedAddress", "cuda_illegal_access"),
        ("error: cudaErrorMadeUp", "unknown"),
    ],
)
def test_names_of_the_enumeration_of_cuda_errors_are_known(line: str, category: str) -> None:
    kind = kind_of(line)
    assert kind is not None and kind.category == category


def test_a_vocabulary_does_not_count_in_lines_of_information() -> None:
    told = "nccl all_reduce timed out after 600 s"
    kind = kind_of(told)
    assert kind is not None and kind.category == "collective_timeout"
    assert kind_of(f"[INFO] {told}") is None


def test_a_setting_that_says_info_makes_no_line_information() -> None:
    hint = b"RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
    ((name, count),) = found(hint + b"\n")
    assert name.startswith("unknown-fatal") and count == 1
    assert found(b"2026-01-01 INFO: RuntimeError was caught\n") == []
