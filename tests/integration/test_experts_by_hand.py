"""Experts by hand: killed, and resumed with the experts split over more ranks, or over none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.harness.by_hand import STEPS, HandRun, held, small_job, write_job
from tests.harness.paced import release

from megascale_checkpoint.commit import manifest as manifests
from megascale_checkpoint.export.stored import ParameterReader

RANKS, KEPT_STEP, ATTEMPTS = 4, 4, ("attempt-000001", "attempt-000002")
MODEL = {
    "layers": 3,
    "block": "serial",
    "mlp": "swiglu",
    "experts": {
        "count": 8,
        "ffn_size": 24,
        "shared_ffn_size": 16,
        "dense_layers": 1,
        "bias_rate": 0.01,
    },
}
AUXILIARY = {"sequence_balance": 0.01, "router_z_loss": 0.001}
# A step that waits for the kill: as long as that may take.
LONG_S = 30.0
# As between layouts that train from the start (test_trainer_equality): sums in another order.
LOSS_TOLERANCE = 5e-6
Values = dict[tuple[str, str], NDArray[np.float32]]


@dataclass(frozen=True)
class Killed:
    """A run of ep 2 that was killed after the checkpoint of KEPT_STEP, and one that was not.

    ``folder`` is that of the killed run, ``losses`` and ``values`` are those of the whole one: the
    losses by step, and every stored state of the last step.
    """

    folder: Path
    killed_losses: dict[int, float]
    losses: dict[int, float]
    values: Values


def _job(folder: Path, ep: int, **more: Any) -> Path:
    sizes = {"dp": RANKS, "ep": ep}
    every_step = {"snapshot_interval_steps": 1, "interval_steps": KEPT_STEP}
    job = small_job(
        folder, model=MODEL, parallelism=sizes, loss=AUXILIARY, checkpoint=every_step, **more
    )
    return write_job(folder, job, f"ep{ep}.json")


def _stored(folder: Path, attempt: str, step: int) -> Values:
    path = folder / "checkpoints" / "attempts" / attempt / f"step-{step:09}" / manifests.NAME
    reader = ParameterReader(*manifests.load(str(path)))
    return {
        (name, state): reader.read(name, state) for name in reader.shapes for state in reader.states
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    whole_folder, folder = (tmp_path_factory.mktemp(name) for name in ("whole", "killed"))
    whole = HandRun(whole_folder, _job(whole_folder, 2), RANKS)
    try:
        assert whole.end() == 0, whole.story()
    finally:
        whole.close()
    run = HandRun(folder, _job(folder, 2, optimizer=held(7, LONG_S)), RANKS)
    try:
        run.await_step(6)
        run.await_commit(KEPT_STEP)
        run.kill()
    finally:
        run.close()
    release(run.site)
    values = _stored(whole_folder, ATTEMPTS[0], STEPS)
    yield Killed(folder, run.losses(), whole.losses(), values)


@pytest.fixture
def resumed(killed: Killed, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HandRun]:
    """The killed run, resumed in a copy of its folder with the ep that the test asks for."""
    folder = tmp_path / "resumed"
    shutil.copytree(killed.folder, folder, ignore=shutil.ignore_patterns("*.jsonl", "*.err"))
    run = HandRun(folder, _job(folder, request.param, optimizer=held(7)), RANKS)
    yield run
    run.close()


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("resumed", [2], indirect=True)
def test_in_the_same_layout_every_bit_is_that_of_a_run_without_a_kill(
    killed: Killed, resumed: HandRun
) -> None:
    assert resumed.end() == 0, resumed.story()
    assert resumed.events("attempt")[0]["restored_step"] == KEPT_STEP
    assert {**killed.killed_losses, **resumed.losses()} == killed.losses
    found = _stored(resumed.folder, ATTEMPTS[1], STEPS)
    assert found.keys() == killed.values.keys()
    for key, value in killed.values.items():
        assert np.array_equal(found[key], value), key


@pytest.mark.parametrize("resumed", [4, 1], indirect=True)
def test_with_experts_split_otherwise_the_same_samples_give_the_same_losses(
    killed: Killed, resumed: HandRun
) -> None:
    assert resumed.end() == 0, resumed.story()
    losses = resumed.losses()
    assert list(losses) == list(range(KEPT_STEP + 1, STEPS + 1))
    wanted = {step: killed.losses[step] for step in losses}
    assert losses == pytest.approx(wanted, abs=LOSS_TOLERANCE)
    assert abs(wanted[KEPT_STEP + 1] - wanted[STEPS]) > 100 * LOSS_TOLERANCE
    # Every token chose the same experts as in ep 2, in each step since.
    found = _stored(resumed.folder, ATTEMPTS[1], STEPS)
    for layer in (1, 2):
        for kind in ("bias", "load"):
            key = f"layers.{layer}.router.{kind}", "master"
            assert np.array_equal(found[key], killed.values[key]), key
            assert len(np.unique(found[key])) > 1, "the routers are of different loads"
