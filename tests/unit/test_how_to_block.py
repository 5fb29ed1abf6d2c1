"""The block of docs/how-to/add-a-block.md trains with the changes of the page alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.test_how_to import HOW_TO, REPOSITORY, blocks, rows

PAGE = HOW_TO / "add-a-block.md"
PACKAGES = {
    "megascale_job": "services/common",
    "megascale_trainer": "services/executor",
}
# Of the tests that the page names, those of a serial model: on one rank, and on four.
CHECKS = (
    "tests/integration/test_trainer_step.py::test_trainer_follows_an_independent_model_in_float64"
    "[serial swiglu rmsnorm bias]",
    "tests/integration/test_trainer_equality.py::test_layout_trains_as_one_process"
    "[tp2dp2, full recompute, overlapped tp and dp-serial-3]",
    "tests/unit/test_memory.py::test_activations_of_a_layer[bf16-serial-none-tp2]",
    "tests/unit/test_memory.py::test_activations_of_a_layer[fp8-serial-selective-tp1]",
)
HIDDEN = 64
NAMES = f"""
from megascale_job.loading import from_accepted
from megascale_job.sizes.flops import flops_per_token
from megascale_job.sizes.parameter_table import parameter_table

model = dict(
    layers=1, hidden_size={HIDDEN}, heads=4, vocab_size=64, sequence_length=32, block="serial"
)
training = dict(steps=1, global_batch_size=1)
config = from_accepted(dict(name="tiny", model=model, training=training))
print(*sorted(p.name for p in parameter_table(config, 0).slices if "adapter" in p.name))
print(flops_per_token(config.model).exact)
"""


def changed(text: str, difference: str) -> str:
    """``text`` with each hunk of a page's difference applied, whose lines are in one place."""
    for hunk in difference.split("@@\n"):
        lines = [(line[:1], line[1:]) for line in hunk.splitlines()]
        old = "".join(f"{line}\n" for sign, line in lines if sign != "+")
        assert text.count(old) == 1, f"not in one place:\n{old}"
        text = text.replace(old, "".join(f"{line}\n" for sign, line in lines if sign != "-"))
    return text


def tree(folder: Path, page: Path) -> Path:
    """A copy of the packages and tests in ``folder``, with the files and changes of a page."""
    for package, parent in PACKAGES.items():
        shutil.copytree(REPOSITORY / parent / package, folder / parent / package)
    shutil.copytree(REPOSITORY / "tests", folder / "tests")
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    for name, code in blocks(page):
        package = name.partition("/")[0]
        path = folder / PACKAGES.get(package, "") / name
        path.write_text(changed(path.read_text(), code) if path.exists() else code)
    return folder


def run(folder: Path, *arguments: str) -> str:
    """What Python prints in a tree, in which the changed packages are found first."""
    first = [str(folder), *(str(folder / parent) for parent in PACKAGES.values())]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*first, *sys.path])}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def with_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tree(tmp_path_factory.mktemp("adapter"), PAGE)


@pytest.mark.check
def test_the_page_lists_its_files() -> None:
    listed = [cells[0].strip("`") for cells in rows(PAGE.read_text())]
    shown = [name for name, _ in blocks(PAGE)]
    assert sorted(listed) == sorted(name for name in shown if not name.startswith("tests/"))


@pytest.mark.slow
def test_the_tests_that_the_page_names_pass_with_its_block(with_adapter: Path) -> None:
    shown = run(with_adapter, "-m", "pytest", "-p", "no:cacheprovider", *CHECKS)
    assert f"{len(CHECKS)} passed" in shown


@pytest.mark.check
def test_names_and_flops_follow_from_the_declaration(with_adapter: Path) -> None:
    names, flops = run(with_adapter, "-c", NAMES).splitlines()
    assert {"layers.0.adapter_down.weight", "layers.0.adapter_up.weight"} < set(names.split())
    without = subprocess.check_output([sys.executable, "-c", NAMES], cwd=REPOSITORY, text=True)
    plain_names, plain_flops = without.split("\n")[:2]
    assert plain_names == ""
    assert float(flops) - float(plain_flops) == 6 * 2 * HIDDEN * (HIDDEN // 4)


@pytest.mark.check
def test_the_files_of_the_page_are_formatted(tmp_path: Path) -> None:
    for name, code in blocks(PAGE):
        if name.endswith("adapter.py"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code)
    configuration = str(REPOSITORY / "pyproject.toml")
    for command in (["check", "--ignore", "INP001,I001,I002"], ["format", "--check"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--config", configuration, "."],
            cwd=tmp_path, check=True,
        )  # fmt: skip
