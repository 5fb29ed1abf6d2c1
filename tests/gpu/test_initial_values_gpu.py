"""Initial values drawn by a GPU: the host's, but for the last place, and any part of the whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megascale_trainer.model.initial_values import normal, normal_on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("start", [0, 1, 2**33 + 5])
def test_a_gpu_draws_what_the_host_draws(start: int) -> None:
    count = 3_000_001
    ours = normal_on(DEVICE, "layers.0.q.weight", 7, start, start + count)
    theirs = normal("layers.0.q.weight", 7, start, start + count)
    np.testing.assert_allclose(ours.cpu().numpy(), theirs, rtol=2e-6, atol=2e-6)


def test_a_part_is_cut_from_the_whole_to_the_bit() -> None:
    whole = normal_on(DEVICE, "a", 1, 0, 2_000_003)
    for start, stop in ((0, 7), (13, 1_000_000), (999_999, 2_000_003)):
        assert torch.equal(normal_on(DEVICE, "a", 1, start, stop), whole[start:stop])
