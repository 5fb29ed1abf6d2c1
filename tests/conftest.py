"""Settings of all tests: which of them run in parallel, and hypothesis' profile."""

from __future__ import annotations

import atexit
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import is_hypothesis_test, settings
from tests.harness import properties
from tests.harness.ranks import RankPool, rank_pool

properties.register_profiles()

# What tests import and collect is kept: collections would search it again and again, which takes a
# tenth of the time until the first test.
gc.disable()

# Tests that start many processes run one after the other in lanes, so that a small machine is not
# asked to run too many clusters at once; all other files run beside them, one at a time. Each lane
# is run by one process of pytest-xdist, and all take about the same time.
LANES = {
    "clusters": (
        "chaos/test_control_plane_loss.py",
        "chaos/test_demo.py",
        "chaos/test_last_checkpoint.py",
        "integration/test_bad_inputs.py",
        "integration/test_by_hand.py",
        "integration/test_library.py",
        "integration/test_cli.py",
        "integration/test_cli_nodes.py",
    ),
    "recoveries": (
        "chaos/test_hang.py",
        "chaos/test_kubernetes_jobs.py",
        "chaos/test_high_availability.py",
        "chaos/test_two_builds.py",
        "chaos/test_nothing_left.py",
        "chaos/test_recovery.py",
        "chaos/test_replicas.py",
        "integration/test_job_on_s3.py",
        "integration/test_node_start.py",
        "integration/test_platform_follow.py",
        "integration/test_up.py",
    ),
    "more clusters": (
        "chaos/test_job_surroundings.py",
        "chaos/test_log_root.py",
        "chaos/test_orders.py",
        "chaos/test_plan.py",
        "chaos/test_straggler.py",
        "chaos/test_live_causes.py",
        "chaos/test_suspend.py",
        "chaos/test_unknown_culprit.py",
        "chaos/test_waits.py",
        "integration/test_dashboard.py",
        "integration/test_doors.py",
        "integration/test_export_and_import.py",
        "integration/test_first_hour.py",
        "integration/test_grpcurl.py",
        "integration/test_jobs_that_cannot_run.py",
        "integration/test_mutual_tls.py",
        "integration/test_load_from_another_job.py",
    ),
    "agents": (
        "integration/test_agent.py",
        "integration/test_agent_diagnosis.py",
        "integration/test_benchmarks.py",
        "integration/test_fuzz.py",
        "integration/test_group_of_agents.py",
        "integration/test_profile.py",
    ),
    "ranks": (
        "integration/test_data_parallel_overlap.py",
        "integration/test_fp8_gather.py",
        "integration/test_context_parallel.py",
        "integration/test_expert_exchange.py",
        "integration/test_fp8_training.py",
        "integration/test_lamb_training.py",
        "integration/test_peer_messages.py",
        "integration/test_rehearsal.py",
        "integration/test_resharded_resume.py",
        "integration/test_restore_sources.py",
        "integration/test_stalled_peer.py",
        "integration/test_tensor_overlap.py",
        "integration/test_trainer_equality.py",
        "integration/test_trainer_step.py",
    ),
}
_LANE_OF = {name: lane for lane, names in LANES.items() for name in names}

# Folders whose tests have a mark and a make verb of the same name.
MARKED_FOLDERS = ("export", "gpu", "system")
# The mark of all tests of a module.
_OF_MODULE = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.(\w+)", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """`make test-slow` tries properties with more examples."""
    if config.getoption("markexpr") == "slow":
        settings.load_profile(properties.LONG)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Have `make test-slow` run the properties as well."""
    if config.getoption("markexpr") == "slow":
        for item in items:
            if isinstance(item, pytest.Function) and is_hypothesis_test(item.obj):
                item.add_marker("slow")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out folders and modules whose mark the options exclude: they are not even imported.

    Each process of pytest-xdist would import them: transformers alone takes seconds.
    """
    excluded = _excluded(config)
    if collection_path.is_dir():
        folder = collection_path.name if collection_path.parent == Path(__file__).parent else ""
        return True if folder in excluded.intersection(MARKED_FOLDERS) else None
    if excluded and collection_path.match("test_*.py"):
        mark = _OF_MODULE.search(collection_path.read_text())
        return True if mark and mark[1] in excluded else None
    return None


def _excluded(config: pytest.Config) -> frozenset[str]:
    """The marks none of which a test may have, if the options say nothing else."""
    terms = config.getoption("markexpr").split(" and ")
    return frozenset(
        term.removeprefix("not ") for term in terms if all(each[:4] == "not " for each in terms)
    )


# They take as long to import as torch, and few tests need them. Every process of pytest-xdist
# imports all test modules, so these tests import them when they run.
LATE = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.tensor", "transformers")
_COLLECTED = pytest.StashKey[frozenset[str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported (torch, for one) out of every later garbage collection."""
    session.config.stash[_COLLECTED] = frozenset(LATE) & sys.modules.keys()
    gc.enable()
    gc.freeze()  # with the little garbage that there is: to find it takes half a second
    # Given back to the collection at exit: Triton complains of what that does not find.
    atexit.register(gc.unfreeze)


@pytest.fixture
def collected_late(pytestconfig: pytest.Config) -> frozenset[str]:
    """Which modules of LATE the collection of this process has imported."""
    return pytestconfig.stash[_COLLECTED]


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks on the CPU for all tests of this process: torch is imported for them once."""
    with rank_pool() as ready:
        yield ready


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Give each lane, and each further file, to one process as a whole."""
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0].removeprefix("tests/")
            return _LANE_OF.get(file, file)

    return Lanes(config, log)
