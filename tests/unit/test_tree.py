"""The house keeps its order: one list of rooms, docstrings, sizes, and what rooms import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.conftest import LANES

pytestmark = pytest.mark.check

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_MODULE_LINES = 800  # one subject, one file: meaning cuts a file, not its length
MAX_FUNCTION_LINES = 70
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
MODULES = [
    path
    for package in PACKAGES
    for path in sorted((REPOSITORY / package).rglob("*.py"))
    if "_pb2" not in path.name and path.stat().st_size
]

_IMPORT = """
import importlib, importlib.abc, sys
blocked = ()
class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in blocked):
            raise ImportError(f"{{name}} is not for this room")
sys.meta_path.insert(0, Block())
for blocked, modules in {stages!r}:
    for module in modules:
        importlib.import_module(module)
"""


def _import(*stages: tuple[Sequence[str], Sequence[str]]) -> None:
    """Import modules in a process of its own, each stage without the modules named first."""
    result = subprocess.run(
        [sys.executable, "-c", _IMPORT.format(stages=stages)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_lists_of_rooms_agree() -> None:
    # One folder may hold two packages: services/executor has the agent's and the trainer's.
    parents = list(dict.fromkeys(str(Path(package).parent) for package in PACKAGES))
    assert PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"] == parents
    assert PROJECT["tool"]["mypy"]["mypy_path"].split(":") == parents
    assert PROJECT["tool"]["ruff"]["src"] == parents
    roots = [Path(package).name for package in PACKAGES if package != "proto/megascale"]
    assert sorted(PROJECT["tool"]["importlinter"]["root_packages"]) == sorted(
        [*roots, "megascale.v1"]
    )


def test_every_room_is_typed() -> None:
    for package in PACKAGES:
        folder = REPOSITORY / package / ("v1" if package == "proto/megascale" else "")
        assert (folder / "py.typed").exists(), folder


def test_modules_are_small_and_say_what_they_are_for() -> None:
    assert len(MODULES) > 500
    assert [problem for path in MODULES for problem in _problems(path)] == []


def _problems(path: Path) -> Iterator[str]:
    text, name = path.read_text(), path.relative_to(REPOSITORY)
    tree = ast.parse(text)
    if not ast.get_docstring(tree):
        yield f"{name}: no module docstring"
    if (lines := len(text.splitlines())) > MAX_MODULE_LINES:
        yield f"{name}: {lines} lines"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            # From the body on: the parameters of a command declare its options, with their help.
            if node.end_lineno - node.body[0].lineno >= MAX_FUNCTION_LINES:
                yield f"{name}: {node.name} is too long"


@pytest.mark.parametrize(
    "path",
    [path for path in MODULES if "saved_tensors" in path.read_text()],
    ids=lambda path: str(path.relative_to(REPOSITORY)),
)
def test_a_backward_reads_its_saved_tensors_once(path: Path) -> None:
    """Where activations are recomputed, torch gives them once and refuses a second time."""
    for function in ast.walk(ast.parse(path.read_text())):
        if isinstance(function, ast.FunctionDef):
            found = [
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr == "saved_tensors"
            ]
            assert len(found) <= 1, f"{function.name}: once, into a variable"


def test_modules_of_tests_have_names_of_their_own() -> None:
    """pytest imports them by their last name alone, and collects none if two share it."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", ["common", "executor"])
def test_package_inits_are_empty(name: str) -> None:
    for path in (REPOSITORY / "services" / name).rglob("__init__.py"):
        if path.parent.name == "megascale_trainer":
            continue  # loads what it exports when that is used: the next test
        assert path.read_text() == "", (
            f"{path} must stay empty: import-linter does not follow parent packages"
        )


def test_the_trainers_package_imports_nothing_before_it_is_asked() -> None:
    tree = ast.parse((REPOSITORY / "services/executor/megascale_trainer/__init__.py").read_text())
    names = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert names == {"__future__", "typing"}
    assert not any(isinstance(node, ast.Import) for node in tree.body)


@pytest.mark.parametrize(
    ("module", "blocked"),
    [
        # It arms its parent-death signal before the seconds that the import of torch takes.
        ("megascale_trainer.process.__main__", ["torch", "triton", "numpy"]),
        ("megascale_trainer.__main__", ["torch", "triton", "numpy", "yaml", "grpc", "structlog"]),
        ("megascale_trainer.data.loader", ["grpc", "google", "structlog", "uvloop", "torch"]),
        ("megascale_executor.agent.__main__", ["torch", "triton", "grpc"]),
        ("megascale_driver.__main__", ["torch", "triton", "numpy"]),
        (
            "megascale_cli.plan_scale, megascale_cli.sim, megascale_planner.__main__",
            ["torch", "triton", "grpc", "google", "structlog"],
        ),
        ("megascale_checkpoint.__main__", ["torch", "triton"]),
        (
            "megascale_cli.__main__",
            ["torch", "numpy", "megascale_driver", "megascale_executor", "megascale_common"],
        ),
        ("megascale_client", ["torch", "megascale_common"]),
        ("megascale_job.config", ["grpc", "google", "structlog", "torch", "numpy"]),
    ],
)
def test_rooms_import_without_what_is_not_theirs(module: str, blocked: list[str]) -> None:
    _import((blocked, module.split(", ")))


OURS = tuple(sorted(Path(package).name for package in PACKAGES if package != "proto/megascale"))
# The modules outside of the trainer and the kernels that write a format of torch.
TORCH = tuple(f"checkpoint/megascale_checkpoint/export/{name}.py" for name in ("dcp", "megatron"))
# What takes numpy (extras `observability` and `plan`); the driver's own processes are without.
NUMPY = (
    "driver/megascale_driver/analysis/spans/",
    "driver/megascale_driver/telemetry/",
)
WIRE = ("grpc", "google", "structlog", "uvloop", "prometheus_client")


@pytest.mark.parametrize(
    ("room", "ours", "others"),
    [
        # numpy only for the plan of a restore (import-linter's contract); of the driver, see NUMPY.
        ("megascale_job", ["megascale_job"], ["torch", "triton"]),
        (
            "megascale_planner",
            ["megascale_planner", "megascale_job"],
            ["torch", "triton", "asyncio", "grpc", "google", "structlog"],
        ),
        ("megascale_common", ["megascale_common", "megascale_job"], ["torch", "triton"]),
        ("megascale_client", ["megascale_client"], ["torch", "triton", "numpy", "structlog"]),
        (
            "megascale_cli",
            ["megascale_cli", "megascale_client", "megascale_job", "megascale_planner"],
            ["torch", "triton", "structlog"],
        ),
        (
            "megascale_dashboard",
            ["megascale_dashboard", "megascale_client"],
            ["torch", "triton", "numpy", "structlog"],
        ),
        (
            "megascale_driver",
            ["megascale_driver", "megascale_common", "megascale_job", "megascale_planner"],
            ["torch", "triton", "numpy"],
        ),
        (
            "megascale_executor",
            ["megascale_executor", "megascale_common", "megascale_job"],
            ["torch", "triton"],
        ),
        (
            "megascale_checkpoint",
            ["megascale_checkpoint", "megascale_common", "megascale_job"],
            ["torch", "triton"],
        ),
    ],
)
def test_every_module_of_a_room_imports_without_what_is_not_its(
    room: str, ours: list[str], others: list[str]
) -> None:
    apart = (*TORCH, *NUMPY) if "numpy" in others else TORCH
    _import((_blocked(ours, others), _modules(room, apart)))


def test_the_trainer_and_the_kernels_import_without_what_is_not_theirs() -> None:
    """In one process, as torch takes more than a second."""
    commands = "executor/megascale_trainer/commands/"
    kernels = ["megascale_kernels"]
    trainer = ["megascale_trainer", "megascale_common", "megascale_job"]
    wire = (*WIRE, "megascale.v1", "megascale_common.service", "megascale_common.etcd")
    files = ("xxhash", "safetensors")
    without = ("yaml", "typer", "rich")
    _import(
        (_blocked(kernels, (*wire, *files, *without)), _modules("megascale_kernels", ())),
        (
            _blocked([*kernels, *trainer], (*wire, *files, *without)),
            _modules("megascale_trainer", (commands,)),
        ),
        (_blocked([*kernels, *trainer], wire), _modules("megascale_trainer", ())),
    )


def _blocked(ours: Sequence[str], others: Sequence[str]) -> list[str]:
    return [*others, *(set(OURS) - set(ours))]


def _modules(room: str, apart: tuple[str, ...]) -> list[str]:
    """The names of a room's modules, but for those under these paths."""
    names = [
        ".".join(path.with_suffix("").parts[path.parts.index(room) :]).removesuffix(".__init__")
        for path in MODULES
        if room in path.parts and not path.as_posix().rpartition("services/")[2].startswith(apart)
    ]
    assert len(names) > 3
    return names


@pytest.mark.parametrize(
    ("lanes", "harness"),
    [
        (("clusters", "more clusters", "recoveries"), ("chaos_cluster", "local_cluster")),
        (("ranks", "agents"), ("agent_process", "ranks")),
    ],
)
def test_tests_that_start_many_processes_run_in_a_lane(
    lanes: tuple[str, ...], harness: tuple[str, ...]
) -> None:
    tests = REPOSITORY / "tests"
    starting = {
        str(path.relative_to(tests))
        for folder in ("chaos", "integration")
        for path in (tests / folder).glob("test_*.py")
        if any(f"from tests.harness.{name} import" in path.read_text() for name in harness)
    }
    listed = [name for lane in lanes for name in LANES[lane]]
    assert starting <= set(listed)
    assert all((tests / name).exists() for name in listed)
