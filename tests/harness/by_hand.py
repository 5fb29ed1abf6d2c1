"""Runs by hand as child processes: torchrun, or the trainer alone, with their records."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

from tests.harness import program_start
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import MARK_VARIABLE, processes_marked
from tests.harness.paced import HELD_S, paced, python_path
from tests.harness.waiting import log_bytes, until

STEPS = 12
_STANDALONE = ("--standalone",)


def small_job(folder: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A job of some thousand parameters over a corpus in ``folder``; arguments update sections."""
    if not (folder / "corpus.idx").exists():
        write_corpus(folder / "corpus", random_documents(1, 100, 40, vocab_size=20))
    trainer: dict[str, Any] = {
        "model": {
            "layers": 2,
            "hidden_size": 32,
            "heads": 4,
            "vocab_size": 257,
            "sequence_length": 16,
        },
        "training": {"steps": STEPS, "global_batch_size": 8, "precision": "fp32"},
        "optimizer": {"learning_rate": 3e-3},
        "data": {"sources": [{"prefix": "corpus"}]},
    }
    root: dict[str, Any] = {
        "name": "hand",
        "checkpoint": {"uri": "checkpoints", "interval_steps": 4},
        "recovery": {"max_restarts": 0},
    }
    for name, values in sections.items():
        holder = root if name in ("checkpoint", "recovery") else trainer
        holder[name] = {**holder.get(name, {}), **values}
    return {**root, "trainer": trainer}


def write_job(folder: Path, job: dict[str, Any], name: str = "job.json") -> Path:
    """The job as a file; its relative paths start in ``folder``."""
    path = folder / name
    path.write_text(json.dumps(job))
    return path


def held(from_step: int, held_s: float = HELD_S) -> dict[str, Any]:
    """Section ``optimizer`` of a job whose steps wait from there on, each for ``held_s`` at most.

    They go on with :func:`tests.harness.paced.release`.
    """
    paused = paced(0.0, held_from_step=from_step, held_s=held_s)
    return {**paused, "learning_rate": 3e-3}


class HandRun:
    """A run in the background; its standard output is JSON lines.

    ``rendezvous``: torchrun's options where it is one of several, ``inside`` a command that runs
    another elsewhere, such as in a network of its own. ``executed``: its programs start as they do
    for users, and not by :mod:`tests.harness.program_start`.
    """

    def __init__(
        self,
        folder: Path,
        job: Path,
        ranks: int,
        *options: str,
        rendezvous: tuple[str, ...] = (),
        inside: tuple[str, ...] = (),
        executed: bool = False,
    ) -> None:
        self.folder, self.site = folder, folder / "site"
        self._mark = uuid.uuid4().hex
        self.output, self.errors = folder / f"{self._mark}.jsonl", folder / f"{self._mark}.err"
        alone = [sys.executable, "-m", "megascale_trainer"]
        several = [sys.executable, "-m", "torch.distributed.run", *(rendezvous or _STANDALONE)]
        several += ["--nproc-per-node", str(ranks), "-m", "megascale_trainer"]
        torchrun = ranks > 1 or rendezvous
        command = [
            *inside,
            *(several if torchrun else alone),
            str(job),
            "--json",
            "--device",
            "cpu",
        ]
        command += ["--run-folder", str(folder / "runs"), *options]
        with self.output.open("wb") as output, self.errors.open("wb") as errors:
            starts = subprocess.Popen if executed else program_start.start
            self.process: subprocess.Popen[bytes] = starts(
                command,
                env={
                    **os.environ,
                    "PYTHONPATH": python_path(self.site),
                    MARK_VARIABLE: self._mark,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        """What was printed of one kind so far."""
        lines = self.output.read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n") and line[0] == "{"]
        return [line for line in found if line["event"] == name]

    def losses(self) -> dict[int, float]:
        """The loss of each step that was printed."""
        return {record["step"]: record["loss"] for record in self.events("step")}

    def await_step(self, step: int) -> None:
        """Wait until ``step`` was printed."""
        until(
            lambda: step in self.losses() or self.process.poll() is not None,
            f"step {step}",
            self._moves,
            story=self.story,
        )
        assert step in self.losses(), self.story()

    def await_commit(self, step: int, folder: str = "checkpoints") -> None:
        """Wait until the checkpoint of ``step`` is complete."""
        until(
            lambda: self._committed(step, folder),
            f"a commit of {step}",
            self._moves,
            story=self.story,
        )

    def _committed(self, step: int, folder: str) -> bool:
        records = [
            json.loads(path.read_text())
            for path in (self.folder / folder / "commits").glob("0*.json")
        ]
        return any(record["kind"] == "COMMIT" and record["step"] == step for record in records)

    def end(self, signal_number: int = 0) -> int:
        """The exit status; with a signal, it is sent to the process that was started."""
        if signal_number:
            self.process.send_signal(signal_number)
        until(
            lambda: self.process.poll() is not None, "the run's end", self._moves, story=self.story
        )
        return int(self.process.returncode)

    def kill(self) -> None:
        """SIGKILL to the process that was started alone; all others end with it."""
        self.process.kill()
        self.process.wait()
        self.await_none()

    def await_none(self) -> None:
        """Until the last process of this run has ended."""
        until(lambda: not self.processes(), "no process is left", self.processes)

    def processes(self) -> list[int]:
        """Running processes of this run."""
        return processes_marked(self._mark)

    def story(self) -> str:
        """What it printed, and the ends of its logs."""
        logs = sorted((self.folder / "runs").glob("**/*.log"))
        texts = [f"--- {path}\n{path.read_text(errors='replace')[-2000:]}" for path in logs]
        return "\n".join([self.errors.read_text()[-4000:], *texts])

    def close(self) -> None:
        """End all that is left."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def _moves(self) -> object:
        return self.output.stat().st_size, self.errors.stat().st_size, log_bytes(self.folder)
