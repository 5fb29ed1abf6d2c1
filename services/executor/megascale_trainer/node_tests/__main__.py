"""One node test in a process of its own: prints its measurements as one JSON object.

    python -m megascale_trainer.node_tests gemm --device cuda --devices 0,1 --seconds 10

Exit status: 0 passed, 1 a result is wrong (JSON is still printed), 2 usage or environment.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict

from megascale_common.node.process import arm_parent_death

TESTS = ("gemm", "memory_bandwidth", "bitwise", "host_copy", "device_copy", "all_to_all")


def main() -> int:
    """Run the test that the arguments name."""
    arm_parent_death()
    parser = argparse.ArgumentParser(prog="python -m megascale_trainer.node_tests")
    parser.add_argument("test", choices=TESTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--devices", default="0", help="indices, such as 0,1")
    parser.add_argument("--seconds", type=float, default=5.0, help="time budget for all devices")
    options = parser.parse_args()
    # cuBLAS reads it when it starts; the bitwise test needs the same result each time.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only after arming: the import of torch takes seconds, during which the agent may die.
    import torch

    from megascale_trainer.node_tests import all_to_all, compute, copies

    tests = {
        "gemm": compute.gemm,
        "memory_bandwidth": compute.memory_bandwidth,
        "bitwise": compute.bitwise,
        "host_copy": copies.host_copy,
        "device_copy": copies.device_copy,
        "all_to_all": all_to_all.all_to_all,
    }
    devices = [int(index) for index in options.devices.split(",")]
    try:
        found = tests[options.test](options.device, devices, options.seconds)
    except (RuntimeError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    tools: dict[str, str] = {"torch": str(torch.__version__)}
    if options.device == "cuda":
        tools["cuda"] = str(torch.version.cuda)
        tools["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    answer = {"test": options.test, "tools": tools, "measured": [asdict(each) for each in found]}
    print(json.dumps(answer))
    return 1 if any(each.wrong for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
