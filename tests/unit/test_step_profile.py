"""The split of a profiler's trace: every millisecond has one kind, and overlap is found."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.step_profile import COMPUTATION, KINDS, kind_of, read_events, split
from hypothesis import given
from hypothesis import strategies as st

GEMM, NCCL = (
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",
)
ATTENTION = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"
NAMES = {"gemm": GEMM, "attention": ATTENTION, "other": "elementwise_kernel", "communication": NCCL}


def event(
    name: str, start_us: float, duration_us: float, stream: int = 7, category: str = "kernel"
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start_us,
        "dur": duration_us,
        "args": {"stream": stream},
    }


def test_a_step_is_split_into_exclusive_and_busy_time() -> None:
    found = split(
        [
            event(GEMM, 1000, 400),
            event(
                NCCL, 1300, 300, stream=20
            ),  # 100 beside the GEMM, 100 beside nothing, 100 beside attention
            event(ATTENTION, 1500, 200),
            event("Memcpy DtoH (Device -> Pinned)", 1900, 100, category="gpu_memcpy"),
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9000},
        ],
        steps=1,
    )
    assert found["step_ms"] == pytest.approx(1.0)
    assert found["exclusive_ms"] == pytest.approx(
        {
            "gemm": 0.4,
            "attention": 0.2,
            "other": 0.0,
            "communication": 0.1,
            "copies": 0.1,
            "idle": 0.2,
        }
    )
    assert found["busy_ms"]["communication"] == pytest.approx(0.3)
    assert found["communication_hidden_ms"] == pytest.approx(0.2)
    assert found["largest"][0] == {"kind": "gemm", "kernel": GEMM, "ms": pytest.approx(0.4)}


def test_times_are_per_step() -> None:
    assert split([event(GEMM, 0, 500), event(GEMM, 1500, 500)], steps=2)["exclusive_ms"][
        "idle"
    ] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("name", "category", "stream", "kind"),
    [
        (GEMM, "kernel", 7, "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "kernel", 7, "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "kernel", 7, "gemm"),
        (ATTENTION, "kernel", 7, "attention"),
        (
            "void pytorch_flash::flash_bwd_dq_dk_dv_kernel<cutlass::bfloat16_t>",
            "kernel",
            7,
            "attention",
        ),
        (
            "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3",
            "kernel",
            7,
            "attention",
        ),
        (
            "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>",
            "kernel",
            7,
            "attention",
        ),
        ("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16>", "kernel", 7, "attention"),
        (NCCL, "kernel", 7, "communication"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "kernel", 7, "communication"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**)", "kernel", 9, "communication"),
        ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 7, "communication"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 9, "communication"),
        ("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 7, "copies"),
        ("Memset (Device)", "gpu_memset", 9, "copies"),
        ("_layer_norm_backward", "kernel", 7, "other"),
    ],
)
def test_what_an_event_is(name: str, category: str, stream: int, kind: str) -> None:
    assert kind_of(event(name, 0, 1, stream, category), computing={7}) == kind


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(NAMES)),
            st.integers(0, 1000),
            st.integers(0, 300),
            st.integers(7, 9),
        ),
        min_size=1,
        max_size=25,
    )
)
def test_the_split_agrees_with_a_count_of_microseconds(
    kernels: list[tuple[str, int, int, int]],
) -> None:
    found = split(
        [event(NAMES[kind], start, length, stream) for kind, start, length, stream in kernels],
        steps=1,
    )
    first, last = min(k[1] for k in kernels), max(k[1] + k[2] for k in kernels)
    exclusive, busy, hidden = dict.fromkeys((*KINDS, "idle"), 0), dict.fromkeys(KINDS, 0), 0
    for instant in range(first, last):
        active = {kind for kind, start, length, _ in kernels if start <= instant < start + length}
        exclusive[next((kind for kind in KINDS if kind in active), "idle")] += 1
        hidden += "communication" in active and bool(active & set(COMPUTATION))
        for kind in active:
            busy[kind] += 1
    assert found["step_ms"] == pytest.approx((last - first) / 1e3)
    assert found["exclusive_ms"] == pytest.approx(
        {kind: count / 1e3 for kind, count in exclusive.items()}
    )
    assert found["busy_ms"] == pytest.approx({kind: count / 1e3 for kind, count in busy.items()})
    assert found["communication_hidden_ms"] == pytest.approx(hidden / 1e3)


def test_a_trace_without_a_device_has_no_split(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}]
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert read_events(path) == events
    assert split(events, steps=2) == {}
