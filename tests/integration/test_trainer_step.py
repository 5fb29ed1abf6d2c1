"""One process: the trainer against a float64 model, its skipping, snapshots and determinism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.harness.reference_model import ReferenceModel
from tests.harness.training import CPU, EXPERTS, micro_batches, pieces_of, sample, tiny_job
from tests.harness.varlen import use_slow_varlen

from megascale_common.node.status_page import StatusPageWriter, read_status_page
from megascale_job.config import JobConfig
from megascale_job.loading import from_accepted
from megascale_trainer.optimizer.step_control import learning_rate
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.trainer import StepRecord, Trainer

MODELS: dict[str, dict[str, Any]] = {
    "parallel gelu layernorm bias rope": {},
    "parallel swiglu rmsnorm": {
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "ffn_size": 100,
        "kv_heads": 2,
    },
    "serial gelu learned window": {
        "block": "serial",
        "positions": "learned",
        "window": 7,
        "norm_bias": False,
    },
    "serial swiglu rmsnorm bias": {
        "block": "serial",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "kv_heads": 1,
    },
    "qwen: norms of heads, biases of q, k and v, wide heads, llama3's frequencies": {
        "block": "serial",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "bias": False,
        "attention_bias": True,
        "qk_norm": True,
        "head_dim": 10,
        "kv_heads": 2,
        "rope_scaling": {"kind": "llama3", "factor": 4, "original_sequence_length": 16},
    },
    "tied embeddings": {"tie_embeddings": True},
    "tied embeddings, loss in chunks": {"tie_embeddings": True},
    "experts: softmax, normalised, no shared ones": {
        **EXPERTS,
        "experts": {"count": 6, "top_k": 2, "ffn_size": 24},
    },
    "experts: sigmoid in groups, scaled, shared, a bias, first layer dense": {
        **EXPERTS,
        "norm": "rmsnorm",
        "experts": {
            **EXPERTS["experts"],
            "top_k": 3,
            "score": "sigmoid",
            "scale": 2.5,
            "groups": 4,
            "groups_kept": 2,
        },
    },
    "experts: weights as they are": {
        **EXPERTS,
        "experts": {"count": 4, "top_k": 3, "ffn_size": 24, "normalise": False},
    },
    "olmoe: q and k normalised over all heads, experts": {
        **EXPERTS,
        "norm": "rmsnorm",
        "kv_heads": 2,
        "attention_bias": True,
        "qk_norm": True,
        "qk_norm_over": "projection",
        "experts": {"count": 6, "top_k": 3, "ffn_size": 24, "normalise": False},
    },
    "parallel, q and k normalised over all heads": {
        "qk_norm": True,
        "qk_norm_over": "projection",
        "head_dim": 10,
    },
    "yarn: low frequencies divided, rotated heads multiplied": {
        "block": "serial",
        "mlp": "swiglu",
        "norm": "rmsnorm",
        "rope_theta": 50,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 4,
            "original_sequence_length": 16,
            "beta_fast": 2,
        },
    },
    "yarn with a factor of its own, before norms of heads": {
        "qk_norm": True,
        "head_dim": 10,
        "rope_theta": 50,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 4,
            "original_sequence_length": 64,
            "beta_fast": 6,
            "beta_slow": 0.5,
            "attention_factor": 1.5,
        },
    },
    "parallel, norms of heads, all frequencies divided": {
        "qk_norm": True,
        "rope_scaling": {"kind": "linear", "factor": 2},
    },
}


def _trainer(config: JobConfig, status: StatusPageWriter | None = None) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(config, 0, single_process_groups(), CPU, status)


def _started(config: JobConfig) -> Trainer:
    trainer = _trainer(config)
    trainer.initialise()
    return trainer


def _run(trainer: Trainer, first: int, last: int) -> list[StepRecord]:
    steps = range(first, last)
    return [trainer.train_step(micro_batches(trainer.config, step, 0)).read() for step in steps]


@pytest.mark.parametrize("document_attention", [True, False])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_attention_by_documents_trains_as_under_a_matrix(
    document_attention: bool, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA a kernel takes documents; here a stand-in, in layers with and without a window."""
    job = tiny_job(
        model={"layers": 2, "layer_windows": [7, 0], "kv_heads": 2},
        parallelism={"recompute": recompute},
        training={"global_batch_size": 4, "micro_batch_size": 2},
        data={"document_attention": document_attention},
    )

    def losses() -> list[float]:
        trainer = _started(from_accepted(job))
        trained = [record.loss for record in _run(trainer, 0, 3)]
        return [*trained, trainer.evaluate([micro_batches(trainer.config, 3, 0)])]

    expected = losses()
    calls = use_slow_varlen(monkeypatch)
    assert losses() == pytest.approx(expected, abs=1e-5)
    layers, micro_batches_run = (2 if document_attention else 1), 2 * 4
    again = layers * 2 * 3 if recompute == "selective" else 0
    assert len(calls) == layers * micro_batches_run + again


@pytest.mark.parametrize("name", MODELS)
def test_trainer_follows_an_independent_model_in_float64(name: str) -> None:
    job = tiny_job(model={**MODELS[name], "layers": 2}, training={"global_batch_size": 2})
    if "experts" in name:
        job["loss"] |= {"sequence_balance": 0.03, "global_balance": 0.02, "router_z_loss": 1e-3}
    if "in chunks" in name:
        job["loss"] |= {"chunk_rows": 10}  # of 32 tokens
    config = from_accepted(job)
    trainer = _started(config)
    whole = {key.split("|")[0]: value for key, value in pieces_of(trainer).items()}
    model = ReferenceModel(config, whole)
    decayed = [p for p in model.parameters.values() if p.dim() >= 2]
    others = [p for p in model.parameters.values() if p.dim() == 1]
    settings = config.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    for step in range(4):
        entropy, z_loss = model.loss([sample(config, 2 * step), sample(config, 2 * step + 1)])
        optimizer.zero_grad()
        torch.autograd.backward(sum(model.auxiliary, entropy + z_loss))
        norm = torch.nn.utils.clip_grad_norm_([*decayed, *others], settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        optimizer.step()
        model.move_routers()
        [record] = _run(trainer, step, step + 1)
        assert record.loss == pytest.approx(entropy.item(), abs=1e-5)
        assert record.z_loss == pytest.approx(z_loss.item(), rel=1e-5)
        balance, router_z = (term.item() for term in model.auxiliary)
        assert record.balance == pytest.approx(balance, rel=1e-5)
        assert record.router_z == pytest.approx(router_z, rel=1e-5)
        assert record.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        assert record.clip_factor == pytest.approx(
            min(1.0, settings.clip_norm / norm.item()), rel=1e-4
        )
        assert record.learning_rate == learning_rate(config, step)
        assert (record.step, record.consumed_samples) == (step + 1, 2 * step + 2)
        assert record.consumed_tokens == 32 * record.consumed_samples


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
def test_recomputation_changes_no_bit(recompute: str, block: str) -> None:
    plain = _run(_started(from_accepted(tiny_job(model={"block": block}))), 0, 3)
    again = _run(
        _started(
            from_accepted(tiny_job(model={"block": block}, parallelism={"recompute": recompute}))
        ),
        0,
        3,
    )
    assert again == plain


def test_same_seed_same_bits_and_another_seed_another_run() -> None:
    first, second = (_run(_started(from_accepted(tiny_job())), 0, 3) for _ in range(2))
    other = _run(_started(from_accepted(tiny_job(training={"seed": 7}))), 0, 3)
    assert first == second
    assert first[0].loss != other[0].loss


def test_a_restored_trainer_goes_on_bit_for_bit() -> None:
    config = from_accepted(tiny_job())
    uninterrupted = _started(config)
    expected = _run(uninterrupted, 0, 6)
    first = _started(config)
    assert _run(first, 0, 3) == expected[:3]
    slot = torch.full((first.state.shard_layout().slot_bytes,), 0xAB, dtype=torch.uint8)
    first.state.state_copy_to(slot)
    second = _trainer(config)
    second.state.load_from(slot)
    second.finish_load(3)
    assert second.step == 3
    assert _run(second, 3, 6) == expected[3:]
    for name, state in second.state.states().items():
        assert torch.equal(state, uninterrupted.state.states()[name]), name


def test_a_restore_ignores_what_no_piece_describes() -> None:
    config = from_accepted(tiny_job(model={"vocab_size": 299, "ffn_size": 101}))  # both are padded
    trainer = _started(config)
    _run(trainer, 0, 2)
    slot = torch.full((trainer.state.shard_layout().slot_bytes,), 0xAB, dtype=torch.uint8)
    expected = torch.zeros_like(slot)
    trainer.state.state_copy_to(expected)
    for piece in trainer.state.shard_layout().pieces:
        begin, end = piece.slot_offset_bytes, piece.slot_offset_bytes + piece.size_bytes
        slot[begin:end] = expected[begin:end]
    assert not torch.equal(slot, expected), "this job has padding"
    restored = _trainer(config)
    restored.state.load_from(slot)
    restored.finish_load(2)
    for name, state in restored.state.states().items():
        assert torch.equal(state, trainer.state.states()[name]), (
            "padding was never anything but zero"
        )
    assert _run(restored, 2, 4) == _run(trainer, 2, 4)


def test_a_broken_gradient_skips_the_update_and_training_goes_on() -> None:
    config = from_accepted(tiny_job())
    trainer = _started(config)
    _run(trainer, 0, 2)
    before = {name: state.clone() for name, state in trainer.state.states().items()}
    batches = micro_batches(config, 2, 0)
    batches[3].loss_weight[0, 5] = float("nan")
    broken = trainer.train_step(batches).read()
    assert broken.skipped and broken.skipped_because == "not_finite"
    assert np.isnan(broken.loss)
    assert np.isnan(broken.gradient_norm)
    for name, state in trainer.state.states().items():
        assert torch.equal(state, before[name]), name
    [after] = _run(trainer, 3, 4)
    assert not after.skipped
    assert np.isfinite(after.loss)
    assert not torch.equal(trainer.state.states()["master"], before["master"])


def test_a_batch_without_weight_is_skipped() -> None:
    trainer = _started(from_accepted(tiny_job()))
    batches = micro_batches(trainer.config, 0, 0)
    for batch in batches:
        batch.loss_weight.zero_()
    before = trainer.state.states()["master"].clone()
    record = trainer.train_step(batches).read()
    assert record.skipped and record.skipped_because == "no_targets"
    assert torch.equal(trainer.state.states()["master"], before)


def test_clipping_off() -> None:
    record = _run(_started(from_accepted(tiny_job(optimizer={"clip_norm": 0}))), 0, 1)[0]
    assert record.clip_factor == 1.0
    assert record.gradient_norm > 1.0


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_bias_correction_counts_the_updates_that_were_applied(optimizer: str) -> None:
    """After a skipped step a run makes the very update that it would have made before."""
    constant = {"schedule": {"warmup_steps": 0, "decay": "constant"}}
    job = from_accepted(tiny_job(optimizer={"name": optimizer}, **constant))
    plain, skipping, loaded = _started(job), _started(job), _started(job)
    empty = micro_batches(job, 5, 0)
    for batch in empty:
        batch.loss_weight.zero_()
    assert skipping.train_step(empty).read().skipped_because == "no_targets"
    loaded.finish_load(7, skipped_updates=7)  # as a checkpoint of that step says
    for trainer in (plain, skipping, loaded):
        for step in range(2):
            assert not trainer.train_step(micro_batches(job, step, 0)).read().skipped
    for name, state in plain.state.states().items():
        assert torch.equal(state, skipping.state.states()[name]), name
        assert torch.equal(state, loaded.state.states()[name]), name


def test_a_spike_of_the_gradient_norm_is_skipped_and_counted() -> None:
    """The norm that a step without the bound has lies between two bounds."""
    norm = _run(_started(from_accepted(tiny_job())), 0, 1)[0].gradient_norm
    spiked, allowed = (
        _started(from_accepted(tiny_job(optimizer={"skip_norm": norm * factor})))
        for factor in (0.999, 1.001)
    )
    before = spiked.state.states()["master"].clone()
    [record] = _run(spiked, 0, 1)
    assert record.skipped and record.skipped_because == "norm"
    assert record.gradient_norm == norm
    assert torch.equal(spiked.state.states()["master"], before)
    assert not _run(allowed, 0, 1)[0].skipped
    assert not torch.equal(allowed.state.states()["master"], before)


def test_bf16_learns_with_float32_master_and_gradients() -> None:
    config = from_accepted(tiny_job(training={"precision": "bf16"}))
    exact, rounded = (_run(_started(c), 0, 8) for c in (from_accepted(tiny_job()), config))
    for ours, theirs in zip(rounded, exact, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=0.05)
    assert rounded[-1].loss < rounded[0].loss - 0.2


def test_wrong_batches_and_slots_are_refused() -> None:
    trainer = _started(from_accepted(tiny_job()))
    batches = micro_batches(trainer.config, 0, 0)
    with pytest.raises(ValueError, match="takes 8 micro-batches, got 7"):
        trainer.train_step(batches[:7])
    with pytest.raises(ValueError, match=r"\[B, S\] = \(1, 32\), got \(2, 32\)"):
        wide = from_accepted(tiny_job(training={"micro_batch_size": 2, "global_batch_size": 16}))
        trainer.train_step(micro_batches(wide, 0, 0))
    with pytest.raises(ValueError, match="a slot of this rank is uint8"):
        trainer.state.load_from(torch.zeros(10, dtype=torch.uint8))


def test_the_status_page_names_the_micro_batch(tmp_path: Path) -> None:
    config = from_accepted(tiny_job())
    status = StatusPageWriter(tmp_path / "page", rank=0, attempt=1)
    trainer = _trainer(config, status)
    trainer.initialise()
    _run(trainer, 0, 1)
    page = read_status_page(tmp_path / "page")
    assert page is not None
    assert page.micro_batch == config.micro_batches - 1
    status.close()
