"""What is set before training so that sums are exact and, where a job asks for it, repeat."""

from __future__ import annotations

import os

import pytest
import torch
from tests.harness.training import tiny_job

from megascale_job.loading import from_accepted
from megascale_trainer.parallel.determinism import PINNED, pin_collectives
from megascale_trainer.trainer import set_determinism


def test_collectives_are_pinned_for_a_deterministic_job_alone() -> None:
    environment: dict[str, str] = {}
    assert set(pin_collectives(False, environment).values()) == {"NCCL's choice"}
    assert environment == {}
    assert pin_collectives(True, environment) == environment == PINNED


def test_a_choice_of_the_operator_stays_and_is_reported() -> None:
    environment = {"NCCL_ALGO": "Tree"}
    assert pin_collectives(True, environment) == {"NCCL_ALGO": "Tree", "NCCL_PROTO": "Simple"}
    assert pin_collectives(False, environment)["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_job_adds_parts_of_a_bf16_product_in_float32(deterministic: bool) -> None:
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = deterministic
    environment = dict(os.environ)
    try:
        config = from_accepted(tiny_job(training={"deterministic": deterministic}))
        set_determinism(config, torch.device("cpu"))
        allowed = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        assert allowed == (not deterministic)
        assert dict(os.environ) == environment
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
