"""What a worker's log says about attention: the backend of each mask that its layers have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_kernels import attention as backends
from megascale_kernels import cudnn_graph, flash_attention_4
from megascale_trainer.model.context import attention_backends

CPU = torch.device("cpu")


def _config(
    *, documents: bool = False, head: int = 64, precision: str = "bf16", **model: Any
) -> JobConfig:
    shape = {"layers": 2, "hidden_size": 2 * head, "heads": 2, "vocab_size": 64}
    return from_accepted(
        {
            "name": "attention",
            "model": {**shape, "sequence_length": 32, **model},
            "training": {"steps": 1, "global_batch_size": 1, "precision": precision},
            "data": {"document_attention": documents},
        }
    )


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper with both packages, but for the device."""
    monkeypatch.setattr(flash_attention_4, "package", object)
    monkeypatch.setattr(cudnn_graph, "frontend", object)

    def obstacle(query: torch.Tensor, capability: tuple[int, int] = (8, 0)) -> str | None:
        return None if query.dtype == torch.bfloat16 else "it needs 16-bit floats"

    monkeypatch.setattr(backends, "_device_obstacle", obstacle)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_config(), "flash_attn_4 (causal)"),
        (_config(documents=True), "flash_attn_4 (documents)"),
        (_config(window=8), "flash_attn_4 (window 8)"),
        (_config(window=8, head=40), "cudnn_graph (window 8)"),
        (_config(head=256), "torch (causal)"),
        (
            _config(layer_windows=[0, 8], documents=True),
            "flash_attn_4 (documents), flash_attn_4 (documents, window 8)",
        ),
        (_config(precision="fp32"), "torch (causal)"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_it_names_the_backend_of_each_mask(config: JobConfig, expected: str) -> None:
    assert attention_backends(config, CPU) == expected


def test_without_the_packages_it_is_torchs_choice() -> None:
    assert attention_backends(_config(window=8), CPU) == "torch (window 8)"
