"""The names for scripts and notebooks: ``from megascale_trainer import Trainer, load_config``.

They are loaded at first use: a job's processes import this package before torch, and some of them
never import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megascale_job.job_file import load_config
    from megascale_trainer.library import Trainer

__all__ = ["Trainer", "load_config"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from megascale_trainer.library import Trainer

        return Trainer
    if name == "load_config":
        from megascale_job.job_file import load_config

        return load_config
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
