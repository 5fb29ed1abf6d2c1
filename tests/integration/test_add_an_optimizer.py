"""An optimizer from outside: that of docs/how-to/add-an-optimizer.md, installed and trained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.harness.checkpoint_files import stored_plan, write_images
from tests.harness.training import step, tiny_job

from megascale_checkpoint.restore import stored_checkpoint as restore
from megascale_job.loading import from_accepted
from megascale_job.sizes.checkpoint_layout import layout_from_dict
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.trainer import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/add-an-optimizer.md"
MOMENTUM = {"name": "momentum", "learning_rate": 0.02, "options": {"momentum": 0.9}}
KEPT_STEP = 4


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for packages that is on the import path."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    return folder


def _install(site: Path, *, package: str, group: dict[str, str], modules: dict[str, str]) -> None:
    """What pip would leave of a package: its modules and its entry points."""
    information = site / f"{package}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in group.items()]
    (information / "entry_points.txt").write_text("\n".join(["[megascale.optimizers]", *lines, ""]))
    for name, text in modules.items():
        (site / f"{name}.py").write_text(text)


def _install_the_pages(site: Path) -> None:
    blocks = dict(re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
    group = tomllib.loads(blocks["toml"])["project"]["entry-points"]["megascale.optimizers"]
    _install(site, package="momentum", group=group, modules={"momentum_sgd": blocks["python"]})


def _trainer(optimizer: dict[str, Any], **sections: dict[str, Any]) -> Trainer:
    config = from_accepted(
        tiny_job(
            model={"layers": 2},
            training={"steps": 20, "global_batch_size": 8, "precision": "bf16"},
            optimizer=optimizer,
            **sections,
        )
    )
    trainer = Trainer(config, 0, single_process_groups(), torch.device("cpu"))
    trainer.initialise()
    return trainer


def test_it_trains_and_goes_on_from_its_checkpoint_bit_for_bit(site: Path, tmp_path: Path) -> None:
    _install_the_pages(site)
    trainer = _trainer(MOMENTUM)
    assert list(trainer.state.states()) == ["master", "momentum"]
    losses = [step(trainer, 0).read().loss for _ in range(KEPT_STEP)]
    # The daemon has no other source for the states than this message.
    layout = layout_from_dict(trainer.state.shard_layout().to_dict())
    image = torch.zeros(layout.slot_bytes, dtype=torch.uint8)
    trainer.state.state_copy_to(image)
    uri = write_images(
        tmp_path / "checkpoints", [layout], [bytearray(image.numpy().tobytes())], step=KEPT_STEP
    )
    losses += [step(trainer, 0).read().loss for _ in range(8)]
    assert sum(losses[-3:]) / 3 < sum(losses[:3]) / 3 - 0.05

    resumed, restored = _trainer(MOMENTUM), bytearray(layout.slot_bytes)
    restore.fill(stored_plan(uri, KEPT_STEP), 0, layout, memoryview(restored))
    resumed.state.load_from(torch.frombuffer(restored, dtype=torch.uint8))
    resumed.finish_load(KEPT_STEP)
    assert [step(resumed, 0).read().loss for _ in range(8)] == losses[KEPT_STEP:]
    for name, state in trainer.state.states().items():
        assert torch.equal(state, resumed.state.states()[name]), name
    assert trainer.state.states()["momentum"].any()


def test_a_step_with_a_nan_changes_nothing(site: Path) -> None:
    _install_the_pages(site)
    trainer = _trainer(MOMENTUM)
    step(trainer, 0)
    before = {name: state.clone() for name, state in trainer.state.states().items()}
    broken = _trainer(MOMENTUM, loss={"z_loss": float("nan")})
    broken.state.load_from(_image(trainer))
    broken.finish_load(1)
    assert step(broken, 0).read().skipped
    for name, state in broken.state.states().items():
        assert torch.equal(state, before[name]), name


def test_checkpoints_of_another_optimizer_are_refused_by_the_missing_state(
    site: Path, tmp_path: Path
) -> None:
    _install_the_pages(site)
    written, wanted = _trainer({}), _trainer(MOMENTUM).state.shard_layout()
    image = bytearray(_image(written).numpy().tobytes())
    uri = write_images(tmp_path / "checkpoints", [written.state.shard_layout()], [image], step=1)
    with pytest.raises(Exception, match=r"\(momentum\): nothing is stored"):
        restore.fill(stored_plan(uri, 1), 0, wanted, memoryview(bytearray(wanted.slot_bytes)))


def test_a_wrong_name_is_refused_with_field_and_remedy(site: Path) -> None:
    _install_the_pages(site)
    states = "class Three:\n    state_names = ('momentum', 'master')\n"
    _install(
        site,
        package="others",
        group={"absent": "no_such_module:X", "unordered": "unordered:Three", "twice": "a:A"},
        modules={"unordered": states},
    )
    _install(site, package="more", group={"twice": "b:B"}, modules={})
    problems = {
        "adafactor": r"optimizer.name: 'adafactor' is not installed on this node; "
        r"known here: absent, adamw, lamb, momentum, twice, unordered; install the package",
        "absent": "'absent' cannot be imported from no_such_module:X",
        "unordered": "'unordered' declares the states momentum, master: .* first of them 'master'",
        "twice": r"'twice' is registered more than once \(a:A, b:B\)",
    }
    for name, message in problems.items():
        with pytest.raises(ValueError, match=message):
            _trainer({"name": name})
    with pytest.raises(ValueError, match=r"optimizer\.options: .*nesterov.* are unknown"):
        _trainer({"name": "momentum", "options": {"nesterov": 1.0}})


def _image(trainer: Trainer) -> torch.Tensor:
    image = torch.zeros(trainer.state.shard_layout().slot_bytes, dtype=torch.uint8)
    trainer.state.state_copy_to(image)
    return image
