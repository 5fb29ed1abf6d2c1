"""The user's entry point: ``torchrun --nproc-per-node N -m megascale_trainer job.yaml``.

It trains by hand, without a driver and an agent (:mod:`megascale_trainer.launch`). On a cluster the
agent starts :mod:`megascale_trainer.process` instead; both run the same worker.
"""

from __future__ import annotations

from megascale_trainer.launch.command import main

if __name__ == "__main__":
    raise SystemExit(main())
