"""Rooms import only what they may: downward, without cycles, and nothing beyond their list."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from docs import generate_rooms, imports, pages

pytestmark = pytest.mark.check

MODULES = imports.modules()
# What rooms may import beyond the standard library, themselves included. The longest name counts.
# import-linter's contracts forbid by name; these lists hold for what nobody thought of.
PURE = ("megascale_job", "megascale_job.sizes", "megascale_common.node", "msgspec")
ALLOWED: dict[str, tuple[str, ...]] = {
    "megascale_job": PURE,
    "megascale_job.wire": (*PURE, "megascale.v1", "google.protobuf"),
    "megascale_job.yaml_text": ("yaml",),
    "megascale_job.sizes": PURE,
    "megascale_common.node": PURE,
    "megascale_job.sizes.read_plan": ("numpy", *PURE),
    "megascale_kernels": ("megascale_kernels", "torch", "triton"),
    "megascale_client": (
        *("megascale_client", "megascale_job", "megascale_job.wire", "megascale.v1"),
        *("grpc", "grpc_status", "google", "yaml", "xxhash"),
    ),
    "megascale_cli": (
        *("megascale_cli", "megascale_client", "megascale_job", "megascale_job.wire"),
        *("megascale_planner", "megascale.v1", "google.protobuf"),
        *("typer", "rich", "yaml", "numpy", "matplotlib"),
    ),
    "megascale_dashboard": (
        *("megascale_dashboard", "megascale_client", "megascale.v1", "google.protobuf"),
        *("starlette", "uvicorn", "typer", "rich"),
    ),
    "megascale_driver.analysis": ("megascale_driver.analysis", *PURE),
    "megascale_driver.analysis.spans": (
        *("megascale_driver.analysis.spans", "megascale_driver.analysis.hot_experts"),
        "megascale_driver.analysis.progress.NamedGroups",
        *("numpy", *PURE),
    ),
    "megascale_driver.placement": (
        *("megascale_driver.placement", "megascale_planner.placement_cost"),
        *PURE,
    ),
    "megascale_planner": ("megascale_planner", "numpy", "megascale_job"),
    # A driver without numpy places jobs.
    "megascale_planner.placement_cost": ("megascale_job",),
    "megascale_planner.network": ("megascale_planner.network", "numpy", "megascale_job"),
    "megascale_driver.core": (
        *("megascale_driver.core", "megascale_driver.analysis", "megascale_driver.placement"),
        "megascale_planner.placement_cost",
        *PURE,
    ),
    "megascale_checkpoint.export": (
        *("megascale_checkpoint", "megascale_common.service.errors", *PURE),
        *("numpy", "xxhash", "typer", "rich", "yaml"),
    ),
    **dict.fromkeys(
        ("megascale_checkpoint.export.dcp", "megascale_checkpoint.export.megatron"),
        (
            *("megascale_checkpoint", "megascale_common.service.errors", *PURE),
            *("numpy", "torch"),
        ),
    ),
    **dict.fromkeys(
        (
            "megascale_checkpoint.export.architectures",
            "megascale_checkpoint.export.foreign_config",
        ),
        ("megascale_checkpoint.export", "megascale_common.service.errors", *PURE),
    ),
    "megascale_trainer": ("megascale_trainer", "megascale_kernels", "torch", "numpy", *PURE),
    "megascale_trainer.data": (
        *("megascale_trainer", "megascale_kernels", "torch", "numpy", "tokenizers"),
        *("sentencepiece", "tiktoken", "pyarrow"),
        *PURE,
    ),
    "megascale_trainer.telemetry.trackers": (
        *("megascale_trainer", "torch", "tensorboard", "wandb", "mlflow"),
        *PURE,
    ),
    "megascale_trainer.launch": ("megascale_trainer", "torch", *PURE),
    "megascale_trainer.commands": ("megascale_trainer", "typer", "rich", *PURE),
}
# The package, and the front end that loads PyYAML.
YAML = {"megascale_job", "megascale_job.job_file", "megascale_job.yaml_text"}
FORBIDDEN = ("megascale_job.wire",)  # to all but itself and what is not listed


@functools.cache
def graph() -> imports.Graph:
    """Every module and what it imports."""
    return imports.imports()


def within(name: str, rooms: tuple[str, ...]) -> bool:
    """Whether a module is one of the rooms or lies in one."""
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


def test_the_picture_is_fresh() -> None:
    assert pages.run(generate_rooms.PAGE, generate_rooms.text, ["--check"]) == 0


@pytest.mark.parametrize("package", ["", *imports.packages(MODULES)])
def test_rooms_do_not_import_each_other_in_a_circle(package: str) -> None:
    found = imports.cycles(imports.children(package, graph()))
    assert found == []


def test_no_arrow_runs_from_a_lower_room_to_a_higher_one() -> None:
    assert imports.upward(graph()) == []
    # import-linter's contracts are read here: an arrow against them is found.
    assert imports.upward({"megascale_job.config": {"megascale_common.etcd.client"}})
    assert imports.upward({"megascale.v1": {"megascale_cli.app"}})


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_nothing_beyond_its_list(room: str) -> None:
    inner = tuple(name for name in ALLOWED if name.startswith(f"{room}."))
    own = [name for name in MODULES if within(name, (room,)) and not within(name, inner)]
    assert own
    for name in own:
        for target in imports.imported(MODULES[name]):
            if target.partition(".")[0] in sys.stdlib_module_names:
                continue
            assert within(target, ALLOWED[room]), f"{name} imports {target}"
            listed = room in FORBIDDEN or "megascale_job.wire" in ALLOWED[room]
            assert listed or not within(target, FORBIDDEN), f"{name} imports {target}"


def test_every_pure_module_stands_under_the_contract_of_pure_modules() -> None:
    contracts = imports.project()["tool"]["importlinter"]["contracts"]
    (pure,) = (each for each in contracts if each["name"].startswith("The pure contracts"))
    names = {name for name in MODULES if within(name, PURE) and not within(name, FORBIDDEN)}
    listed = tuple(pure["source_modules"])
    assert {name for name in names if not within(name, listed)} == YAML


def test_what_only_a_type_checker_imports_does_not_count(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "import typing\nif typing.TYPE_CHECKING:\n    import a\nelse:\n    import b\n"
        "def late():\n    from c import d\n"
    )
    assert imports.imported(module) == {"typing", "b", "c.d"}


def test_cycles_and_arrows_that_follow_from_others_are_found() -> None:
    graph = {"a": {"b", "c"}, "b": {"c"}, "c": set()}
    assert imports.cycles(graph) == []
    assert imports.reduced(graph) == {"a": {"b"}, "b": {"c"}, "c": set()}
    assert imports.cycles(graph | {"c": {"a"}}) == [{"a", "b", "c"}]
    modules = {"p.a.x": {"p.b.y", "q"}, "p.b.y": {"p.a.z"}, "p.a.z": set(), "q": set()}
    assert imports.children("p", modules) == {"a": {"b"}, "b": {"a"}}
    assert imports.children("", modules) == {"p": {"q"}, "q": set()}
