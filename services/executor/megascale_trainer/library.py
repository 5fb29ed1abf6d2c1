"""The trainer as a library, for scripts and notebooks: one process, no loader, no cluster.

    from megascale_trainer import Trainer, load_config

    trainer = Trainer(load_config("job.yaml"))
    for record in trainer.steps(10):
        print(record.step, record.loss)
    print(trainer.generate("The ", 40))

A step is the one that a job of one rank takes, with the same samples and numbers. Checkpoints are
read, whatever layout wrote them, and never written: a job does that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale_job.config import JobConfig, ParallelismConfig
from megascale_job.corpus_record import CorpusRecord, data_file_problems
from megascale_job.restore import RestorePlan, RestoreSource
from megascale_job.visible import counted
from megascale_trainer import trainer as core
from megascale_trainer.batch import MicroBatch
from megascale_trainer.data.indexed import DataError
from megascale_trainer.data.packing import SampleStream, sample_numbers
from megascale_trainer.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megascale_trainer.launch.host_services import HostServices, new_token
from megascale_trainer.parallel.groups import single_process_groups
from megascale_trainer.save.daemon_link import START_TIMEOUT_S, DaemonLink, RankRegistration
from megascale_trainer.save.restore import restore
from megascale_trainer.trainer import StepRecord


class Trainer(core.Trainer):
    """A job on one device, at its initial values. Its parallelism is left out: it has one rank.

    Args:
        device: such as "cpu" or "cuda:1"; "" takes the first GPU where there is one.

    Attributes:
        restored: whether :meth:`restore` has found a checkpoint.
        passed_over: what is wrong with newer checkpoints that it has not taken.

    Raises:
        ValueError: the job asks for what is not built; names the field.
    """

    def __init__(self, config: JobConfig, device: str = "") -> None:
        recompute = config.parallelism.recompute
        alone = replace(config, parallelism=ParallelismConfig(recompute=recompute))
        place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        if place.type == "cuda":
            torch.cuda.set_device(place)
        super().__init__(alone, 0, single_process_groups(), place)
        self.initialise()
        self._samples: SampleStream | None = None
        self.restored = False
        self.passed_over: tuple[str, ...] = ()

    def steps(self, count: int) -> Iterator[StepRecord]:
        """Take ``count`` steps on the job's data, from where the trainer stands.

        Raises:
            CorpusError: the data cannot be used; names the field.
        """
        for _ in range(count):
            yield self.train_step(self.batches(self.step)).read()

    def batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of the step after ``step``, on the device."""
        if self._samples is None:
            self._samples = SampleStream.open(self.config)
        training, made = self.config.training, []
        first = step * training.global_batch_size
        micro_batches, size = self.config.micro_batches, training.micro_batch_size
        for numbers in sample_numbers(first, micro_batches, size, 1, 0):
            rows = [self._samples.sample(int(number)) for number in numbers]
            arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
            made.append(MicroBatch.from_numpy(arrays).to(self._device))
        return made

    def restore(self) -> int:
        """Load the newest complete checkpoint of the job; returns its step, 0 where there is none.

        One that is damaged is passed over, which ``passed_over`` says afterwards. Nothing is
        written: a job that runs meanwhile is not disturbed.

        Raises:
            ServiceFailed: the checkpoints cannot be read; the message has the reason.
            RestoreRefused: a file is damaged.
        """
        with tempfile.TemporaryDirectory(prefix="megascale-") as folder:
            services = HostServices(self.config, Path(folder), 0)
            try:
                services.start_daemon(new_token())
                opened = services.open_attempt(read_only=True)
                plan = RestorePlan.from_mapping(opened.restore)
                self.passed_over = tuple(opened.refused)
                if plan.source is not RestoreSource.NONE:
                    self._load(plan, str(services.checkpoint_socket))
            finally:
                services.stop()
        return self.step

    def _load(self, plan: RestorePlan, socket: str) -> None:
        registration = RankRegistration(
            job=self.config.name,
            attempt=1,
            rank=0,
            world_size=1,
            uri="",
            committer_endpoint="",
            slots=2,
            sizes={"tp": 1, "cp": 1, "dp": 1, "pp": 1, "vpp": 1},
        )
        link = DaemonLink(
            socket,
            registration,
            self.state.shard_layout(),
            self._device,
            collective_timeout_s=START_TIMEOUT_S,
        ).connect()
        try:
            found = restore(link, plan, self.state, self._device)
        finally:
            link.close()
        skipped = int(found.small_state.get("skipped_updates", 0)) if found.plan.step else 0
        self.finish_load(
            found.plan.step, skipped_updates=skipped, weights_only=found.plan.step == 0
        )
        self.passed_over += found.passed_over
        self.restored = True

    def generate(self, prompt: str, tokens: int, temperature: float = 0.0, seed: int = 0) -> str:
        """``prompt`` and up to ``tokens`` more tokens, as text; ends with the document.

        At ``temperature`` 0 the most probable token follows, else one that is drawn. A plain loop
        that computes the whole sequence for each token: to look at what was learnt.

        Raises:
            ValueError: the model has no ids for some of the tokenizer's tokens.
            DataError: the tokenizer cannot be read.
        """
        tokenizer, known = _tokenizer(self.config), self.config.model.vocab_size
        if tokenizer.vocab_size > known:
            raise ValueError(
                f"trainer.data.tokenizer: it has {counted(tokenizer.vocab_size, 'token')}, "
                "the model "
                f"{known}: give the tokenizer that the corpus was made with"
            )
        (encoded,) = tokenizer.encode([prompt.encode()])
        *ids, end = encoded.tolist()
        random = torch.Generator(self._device).manual_seed(seed)
        for _ in range(tokens):
            logits = self._next(ids or [end])[: tokenizer.vocab_size]
            following = _chosen(logits, temperature, random)
            if following == end:
                break
            ids.append(following)
        return tokenizer.decode(np.array(ids, np.int64))

    def _next(self, ids: list[int]) -> torch.Tensor:
        """[V] float32: the logits of the token after ``ids``."""
        length = self.config.model.sequence_length
        seen = ids[-length:]
        row: dict[str, np.ndarray[Any, Any]] = {
            "tokens": np.zeros((1, length), np.int64),
            "targets": np.zeros((1, length), np.int64),
            "loss_weight": np.zeros((1, length), np.float32),
            "position": np.arange(length, dtype=np.int64)[None],
            "document_start": np.zeros((1, length), np.int32),
        }
        # What follows the sequence does not count: attention is causal.
        row["tokens"][0, : len(seen)] = seen
        return self.logits(MicroBatch.from_numpy(row).to(self._device))[0, len(seen) - 1].float()


def _chosen(logits: torch.Tensor, temperature: float, random: torch.Generator) -> int:
    if temperature <= 0:
        return int(logits.argmax())
    shares = torch.softmax(logits / temperature, dim=0)
    return int(torch.multinomial(shares, 1, generator=random))


def _tokenizer(config: JobConfig) -> Tokenizer:
    for problem in data_file_problems(config):
        raise DataError(str(problem))
    given = config.data.tokenizer
    if given.kind == "bytes":
        return ByteTokenizer()
    tokenizer = load_tokenizer(given.path)
    if tokenizer.end is None:  # it is not next to its corpus, which has its end
        records = [CorpusRecord.load(source.prefix) for source in config.data.sources]
        ends = [record.end_token_id for record in records if record is not None]
        tokenizer.end_with(ends[0] if ends else None)
    return tokenizer
