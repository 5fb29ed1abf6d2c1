"""Export to torch.distributed.checkpoint: a folder that its stock loader reads into any layout.

The state dict is {"model": {name: float32}, "optimizer": {state: {name: float32}}, "step": int64},
with the logical names of the parameter table. The format is based on pickle (its ``.metadata``, and
the envelope of each tensor, which loads with weights_only), which is written here and never read.

In the checkpoint service only this module and the export to Megatron import torch.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from megascale_checkpoint.export.output import Report, new_folder
from megascale_checkpoint.export.stored import ParameterReader
from megascale_common.service.errors import DataLossError
from megascale_job.sizes.checkpoint_layout import MASTER

MODEL, OPTIMIZER, STEP = "model", "optimizer", "step"


class _OneByOne(DefaultSavePlanner):
    """Plans with tensors that have a shape but no values, and reads each when it is written."""

    def __init__(self, stored: ParameterReader, progress: Report) -> None:
        super().__init__()
        self._stored = stored
        self._progress = progress
        self._done = 0
        self._total = stored.size_bytes(stored.states)

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The tensor of a planned item."""
        path = self.mappings[index.fqn]
        if path == (STEP,):
            return torch.tensor(self._stored.manifest.step)
        state, name = (MASTER, path[1]) if path[0] == MODEL else path[1:]
        values = torch.from_numpy(self._stored.read(str(name), str(state)))
        self._done += values.nbytes
        self._progress(self._done, self._total)
        return values


def export_dcp(stored: ParameterReader, to: Path, progress: Report) -> int:
    """Write parameters and optimizer states, float32, into folder ``to``; return their bytes.

    Raises:
        ExistsError: ``to`` is taken.
        DamagedError: a file of the checkpoint is missing, cut short or changed.
        DataLossError: torch has not written every tensor.
        OSError: a file cannot be read or written.
    """
    with new_folder(to) as folder:
        # One thread: with several, torch publishes the metadata even if one of them has failed.
        writer = FileSystemWriter(folder, thread_count=1, sync_files=True)
        planner = _OneByOne(stored, progress)
        try:
            metadata = _save(_shapes(stored), writer, planner)
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error
        written = set(metadata.storage_data or ())
        missing = [
            name
            for name in metadata.state_dict_metadata
            if not any(index.fqn == name for index in written)
        ]
        if missing:
            raise DataLossError(f"{to}: torch has not written {missing[0]}")
    return stored.size_bytes(stored.states)


def _save(shapes: dict[str, Any], writer: FileSystemWriter, planner: _OneByOne) -> Metadata:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        metadata: Metadata = save(shapes, storage_writer=writer, planner=planner, no_dist=True)
        return metadata


def _shapes(stored: ParameterReader) -> dict[str, Any]:
    def empty(state: str) -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(shape, dtype=torch.float32, device="meta")
            for name, shape in stored.shapes_of(state).items()
        }

    others = [state for state in stored.states if state != MASTER]
    return {
        MODEL: empty(MASTER),
        OPTIMIZER: {state: empty(state) for state in others},
        STEP: torch.empty((), dtype=torch.int64, device="meta"),
    }
