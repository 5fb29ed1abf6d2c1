"""Job specifications that must be refused, each with its field and a word of its remedy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REMOVED = object()  # a field that a case leaves out
LONG = "x" * 5000


def good_job(name: str, corpus: Path | str = "corpus", steps: int = 2) -> dict[str, Any]:
    """A job of one rank, as a mapping; ``corpus`` is a prefix."""
    return {
        "name": name,
        "trainer": {
            "model": {
                "layers": 2,
                "hidden_size": 32,
                "heads": 2,
                "vocab_size": 257,
                "sequence_length": 32,
            },
            "training": {"steps": steps, "global_batch_size": 4, "precision": "fp32"},
            "data": {"sources": [{"prefix": str(corpus)}]},
        },
    }


def changed(job: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``job`` with the fields of ``changes`` set, by dotted path from the job's root."""
    values: dict[str, Any] = copy.deepcopy(dict(job))
    for path, value in changes.items():
        *sections, name = path.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        if value is REMOVED:
            del place[name]
        else:
            place[name] = value
    return values


@dataclass(frozen=True, slots=True)
class BadJob:
    """A change that makes the good job one that is refused.

    Attributes:
        case: the test's name.
        changes: fields to set, by dotted path.
        field: the field that must be reported, from the job file's root.
        problem: words of the problem.
        remedy: words of the remedy.
    """

    case: str
    changes: Mapping[str, Any] = field(hash=False)
    field: str
    problem: str
    remedy: str


def _one(case: str, path: str, value: Any, problem: str, remedy: str) -> BadJob:
    return BadJob(case, {path: value}, path, problem, remedy)


MODEL, PARALLELISM, TRAINING = "trainer.model", "trainer.parallelism", "trainer.training"
OPTIMIZER, SCHEDULE, DATA = "trainer.optimizer", "trainer.schedule", "trainer.data"
SOURCES, EVALUATION = "trainer.data.sources", "trainer.evaluation"
WHOLE, NUMBER, RANGE = "expected a whole number", "expected a number", "out of range"
AS_4, MAPPING, AT_LEAST_1 = "write it as 4", "expected a mapping", "at least 1"

WRONG_TYPES = (
    _one("text for a size", f"{MODEL}.layers", "two", WHOLE, AS_4),
    _one("fraction for a size", f"{MODEL}.layers", 1.5, WHOLE, AS_4),
    _one("truth for a size", f"{MODEL}.layers", True, WHOLE, AS_4),
    _one("list for a size", f"{MODEL}.hidden_size", [32], WHOLE, AS_4),
    _one("mapping for a size", f"{MODEL}.heads", {"a": 1}, WHOLE, AS_4),
    _one("text for a number of experts", f"{MODEL}.experts.count", "many", WHOLE, AS_4),
    _one("number for experts", f"{MODEL}.experts", 8, MAPPING, "count"),
    _one("text for a number", f"{OPTIMIZER}.learning_rate", "fast", NUMBER, "3e-4"),
    _one("truth for a number", f"{OPTIMIZER}.beta1", True, NUMBER, "0.5"),
    _one("text for truth", f"{MODEL}.bias", "on", "true or false", "without quotes"),
    _one("number for truth", f"{MODEL}.norm_bias", 1, "true or false", "without quotes"),
    _one("number for text", "owner", 7, "expected text", "quotes"),
    _one("list for text", "tenant", ["a"], "expected text", "quotes"),
    _one("text for a list", SOURCES, "corpus", "expected a list", "[a, b]"),
    _one("number for a list", f"{PARALLELISM}.stage_layers", 2, "expected a list", "[a, b]"),
    _one("list for a mapping", "labels", ["a"], MAPPING, "{a: b}"),
    _one("text for a section", "checkpoint", "folder", MAPPING, "uri"),
    _one("number for a section", MODEL, 3, MAPPING, "layers"),
    _one("text for an option", f"{OPTIMIZER}.options.a", "b", NUMBER, "0.5"),
    _one("misspelt choice", f"{MODEL}.block", "paralel", "not one of", "did you mean 'parallel'"),
    _one("number for a choice", f"{MODEL}.mlp", 3, "not one of", "gelu"),
    _one("unbuilt choice", f"{TRAINING}.precision", "fp16", "not one of", "bf16"),
    _one("name of the wire", f"{TRAINING}.precision", "PRECISION_BF16", "not one", "mean 'bf16'"),
    _one("sums", f"{TRAINING}.fp8.fast_accumulation", "backward", "not one of", "forward"),
    _one("format for a gather", f"{TRAINING}.fp8.parameter_gather", "e4m3", "not one of", "fp8"),
    BadJob("text for a source", {SOURCES: ["corpus"]}, f"{SOURCES}[0]", MAPPING, "prefix"),
    BadJob(
        "text in a list of sizes",
        {f"{PARALLELISM}.stage_layers": ["one"]},
        f"{PARALLELISM}.stage_layers[0]",
        WHOLE,
        AS_4,
    ),
)
RANGES_OF_THE_FILE = (
    _one("beyond 32 bits", f"{MODEL}.layers", 2**31, RANGE, "give"),
    _one("beyond 64 bits", f"{TRAINING}.steps", 2**70, RANGE, "give"),
    _one("infinite rate", f"{OPTIMIZER}.learning_rate", float("inf"), "not finite", "number"),
    _one("no number", f"{MODEL}.rope_theta", float("nan"), "not finite", "number"),
)
UNKNOWN = (
    _one("misspelt field", f"{MODEL}.layerz", 2, "unknown field", "did you mean 'layers'"),
    _one("misspelt field of experts", f"{MODEL}.experts.counts", 8, "unknown field", "'count'"),
    _one("misspelt section", "trainer.modle", {}, "unknown field", "did you mean 'model'"),
    _one("misspelt root", "checkpoints", {}, "unknown field", "did you mean 'checkpoint'"),
    _one("field of another section", f"{TRAINING}.learning_rate", 1, "unknown field", "known"),
    _one("field nobody has", "recovery.xyz", 1, "unknown field", "known here: max_restarts"),
    _one("field beside the sections", "optimizer", {}, "unknown field", "known here: name"),
    BadJob(
        "misspelt field in a list",
        {SOURCES: [{"prefix": "corpus", "wait": 1}]},
        f"{SOURCES}[0].wait",
        "unknown field",
        "did you mean 'weight'",
    ),
)
MISSING = (
    BadJob("no size", {f"{MODEL}.layers": REMOVED}, f"{MODEL}.layers", "missing", "set it"),
    BadJob("no steps", {f"{TRAINING}.steps": REMOVED}, f"{TRAINING}.steps", "missing", "set it"),
    BadJob("no name", {"name": REMOVED}, "name", "missing", "set it"),
    BadJob("no trainer", {"trainer": REMOVED}, f"{MODEL}.layers", "missing", "set it"),
    BadJob("empty name", {"name": ""}, "name", "missing", "set it"),
    BadJob("no prefix", {SOURCES: [{"weight": 1}]}, f"{SOURCES}[0].prefix", "missing", "set it"),
)
NAMES = tuple(
    BadJob(case, {"name": name}, "name", "DNS-1123", "a-z, 0-9")
    for case, name in {
        "capitals": "MyJob",
        "a space": "my job",
        "an accent": "naïve",
        "chinese": "数据",
        "an emoji": "🚀",
        "a slash": "a/b",
        "a parent folder": "../../etc",
        "a dot": "a.b",
        "an underscore": "a_b",
        "a hyphen first": "-a",
        "a hyphen last": "a-",
        "64 characters": "a" * 64,
        "a line break": "a\nb",
        "a bracket of markup": "[red]a[/red]",
        "an option": "--help",
    }.items()
)
RANGES = (
    _one("zero size", f"{MODEL}.layers", 0, "missing or 0", AT_LEAST_1),
    _one("negative size", f"{MODEL}.vocab_size", -1, "not positive", AT_LEAST_1),
    _one("too large size", f"{MODEL}.layers", 5000, RANGE, "at most 4096"),
    _one("no multiple of heads", f"{MODEL}.hidden_size", 33, "not a multiple", "use 32"),
    _one("heads by kv heads", f"{MODEL}.kv_heads", 3, "not a multiple", "divisor"),
    _one("negative kv heads", f"{MODEL}.kv_heads", -1, "negative", "positive"),
    _one("negative width", f"{MODEL}.ffn_size", -4, "negative", "positive"),
    _one("no sequence", f"{MODEL}.sequence_length", 0, "missing or 0", AT_LEAST_1),
    _one("negative window", f"{MODEL}.window", -1, "negative", "0 for none"),
    _one("one window of two", f"{MODEL}.layer_windows", [8], "1 window for 2", "per layer"),
    _one("epsilon of zero", f"{MODEL}.norm_epsilon", 0, RANGE, "between 0 and 1"),
    _one("negative deviation", f"{MODEL}.initializer_std", -1, RANGE, "between 0 and 1"),
    _one("base of one", f"{MODEL}.rope_theta", 1, RANGE, "above 1"),
    _one("heads of odd width", f"{MODEL}.head_dim", 7, "odd", "even"),
    _one("negative head width", f"{MODEL}.head_dim", -8, "negative", "positive"),
    _one(
        "biases of a third of a matrix", f"{MODEL}.attention_bias", True, "parallel block", "bias"
    ),
    _one(
        "what a missing norm covers",
        f"{MODEL}.qk_norm_over",
        "projection",
        "does not normalise",
        "qk_norm: true",
    ),
    BadJob(
        "unknown cover of a norm",
        {f"{MODEL}.qk_norm": True, f"{MODEL}.qk_norm_over": "layers"},
        f"{MODEL}.qk_norm_over",
        "layers",
        "projection",
    ),
    BadJob(
        "scaling below one",
        {f"{MODEL}.rope_scaling": {"kind": "linear", "factor": 0.5}},
        f"{MODEL}.rope_scaling.factor",
        RANGE,
        "1 or more",
    ),
    BadJob(
        "low frequencies above high ones",
        {f"{MODEL}.rope_scaling": {"kind": "llama3", "factor": 8, "low_frequency_factor": 5}},
        f"{MODEL}.rope_scaling.high_frequency_factor",
        "not above",
        "such as 4 and 1",
    ),
    BadJob(
        "more choices than experts",
        {f"{MODEL}.experts": {"count": 4, "top_k": 5}, f"{MODEL}.block": "serial"},
        f"{MODEL}.experts.top_k",
        "above the 4 experts",
        "at most 4",
    ),
    BadJob(
        "unknown score",
        {f"{MODEL}.experts": {"count": 4, "score": "tanh"}},
        f"{MODEL}.experts.score",
        "tanh",
        "softmax",
    ),
    BadJob(
        "unknown scaling",
        {f"{MODEL}.rope_scaling": {"kind": "longrope"}},
        f"{MODEL}.rope_scaling.kind",
        "longrope",
        "yarn",
    ),
    BadJob(
        "turns of yarn that are the wrong way round",
        {f"{MODEL}.rope_scaling": {"kind": "yarn", "factor": 8, "beta_fast": 1, "beta_slow": 32}},
        f"{MODEL}.rope_scaling.beta_fast",
        "1 is not above beta_slow = 32",
        "such as 32 and 1",
    ),
    BadJob(
        "a negative factor of yarn",
        {f"{MODEL}.rope_scaling": {"kind": "yarn", "factor": 8, "attention_factor": -1}},
        f"{MODEL}.rope_scaling.attention_factor",
        RANGE,
        "up to 1000",
    ),
    BadJob(
        "no turns of yarn",
        {f"{MODEL}.rope_scaling": {"kind": "yarn", "factor": 8, "beta_slow": 0}},
        f"{MODEL}.rope_scaling.beta_slow",
        RANGE,
        "number of turns",
    ),
    BadJob(
        "yarn from sequences that are too short",
        {f"{MODEL}.rope_scaling": {"kind": "yarn", "factor": 8, "original_sequence_length": 6}},
        f"{MODEL}.rope_scaling.original_sequence_length",
        "no pair turns as often as beta_slow = 1 in 6 tokens",
        "first trained on",
    ),
    BadJob(
        "yarn where all frequencies are high",
        {
            f"{MODEL}.rope_theta": 2,
            f"{MODEL}.rope_scaling": {"kind": "yarn", "factor": 8, "beta_fast": 600},
        },
        f"{MODEL}.rope_scaling.original_sequence_length",
        "every pair turns as often as beta_fast = 600 in 8,192 tokens",
        "first trained on",
    ),
    BadJob(
        "yarn without a first length",
        {f"{MODEL}.rope_scaling": {"kind": "yarn", "original_sequence_length": -1}},
        f"{MODEL}.rope_scaling.original_sequence_length",
        RANGE,
        "first trained on",
    ),
    BadJob("odd head size", {f"{MODEL}.hidden_size": 30}, f"{MODEL}.heads", "odd", "even"),
    _one("no steps at all", f"{TRAINING}.steps", 0, "missing or 0", AT_LEAST_1),
    _one("batch of zero", f"{TRAINING}.global_batch_size", 0, "missing or 0", AT_LEAST_1),
    _one("micro-batch of zero", f"{TRAINING}.micro_batch_size", 0, "not positive", AT_LEAST_1),
    _one("bucket of zero", f"{TRAINING}.bucket_mib", 0, "not positive", AT_LEAST_1),
    _one("no rate", f"{OPTIMIZER}.learning_rate", 0, RANGE, "lr"),
    _one("beta of one", f"{OPTIMIZER}.beta1", 1, RANGE, "beta"),
    _one("negative beta", f"{OPTIMIZER}.beta2", -0.1, RANGE, "beta"),
    _one("optimizer's epsilon", f"{OPTIMIZER}.epsilon", 0, RANGE, "positive"),
    _one("negative decay", f"{OPTIMIZER}.weight_decay", -1, RANGE, "0 to 10"),
    _one("negative clip", f"{OPTIMIZER}.clip_norm", -1, RANGE, "0 (off)"),
    _one("negative skip", f"{OPTIMIZER}.skip_norm", -1, RANGE, "0 (off)"),
    _one("optimizer's name", f"{OPTIMIZER}.name", "My SGD", "DNS-1123", "registers"),
    _one("options of AdamW", f"{OPTIMIZER}.options", {"a": 1}, "no options", "optimizer.name"),
    _one("warm-up too long", f"{SCHEDULE}.warmup_steps", 9, "outside", "within"),
    _one("ratio above one", f"{SCHEDULE}.min_ratio", 2, RANGE, "0 to 1"),
    _one("negative z-loss", "trainer.loss.z_loss", -1, RANGE, "0 (off)"),
    _one("negative chunk", "trainer.loss.chunk_rows", -1, RANGE, "0 (whole)"),
    BadJob(
        "chunk without a token of each sequence",
        {f"{TRAINING}.micro_batch_size": 2, "trainer.loss.chunk_rows": 1},
        "trainer.loss.chunk_rows",
        "micro_batch_size * tp = 2",
        "use 2 or more",
    ),
    _one("evaluates nothing", f"{EVALUATION}.batches", 0, "not positive", AT_LEAST_1),
    _one("negative interval", f"{EVALUATION}.interval_steps", -1, "negative", "0 (off)"),
    _one("slots of one", "checkpoint.slots", 1, RANGE, "2 to 8"),
    _one("negative restarts", "recovery.max_restarts", -1, "negative", "0 or more"),
    _one("negative spares", "recovery.spare_nodes", -1, "negative", "0 or more"),
    _one("timeout of zero", "recovery.collective_timeout_s", 0, RANGE, "1 second"),
    _one("timeout of years", "recovery.collective_timeout_s", 1e9, RANGE, "86400"),
    _one("too many labels", "labels", {f"k{n}": "v" for n in range(65)}, "65", "at most 64"),
    _one("long label", "labels", {"k": LONG}, "too long", "at most 1024"),
    _one("tenant with a space", "tenant", "My Team", "DNS-1123", "a-z"),
)
LAYOUTS = (
    _one("tp over heads", f"{PARALLELISM}.tp", 4, "not a multiple", "divides"),
    _one("tp of three", f"{PARALLELISM}.tp", 3, "not a multiple", "divides"),
    BadJob(
        "tp over a norm of all heads",
        {
            f"{MODEL}.qk_norm": True,
            f"{MODEL}.qk_norm_over": "projection",
            f"{PARALLELISM}.tp": 2,
        },
        f"{PARALLELISM}.tp",
        "over all heads",
        "use 1, and more of pp, dp or ep",
    ),
    _one("no replica", f"{PARALLELISM}.dp", 0, "not positive", AT_LEAST_1),
    _one("more stages than layers", f"{PARALLELISM}.pp", 3, "too few", "fewer stages"),
    _one("nothing to interleave", f"{PARALLELISM}.virtual_stages", 2, "interleave", "use 1"),
    _one("context parallelism", f"{PARALLELISM}.cp", 3, "equal part", "use a cp that divides"),
    _one("parallelism without experts", f"{PARALLELISM}.ep", 2, "no experts", "use 1"),
    BadJob(
        "parallelism over experts",
        {
            f"{MODEL}.experts": {"count": 6},
            f"{MODEL}.block": "serial",
            f"{MODEL}.mlp": "swiglu",
            f"{PARALLELISM}.ep": 4,
            f"{PARALLELISM}.dp": 4,
        },
        f"{PARALLELISM}.ep",
        "not a multiple of ep",
        "divisor of 2",
    ),
    _one("layers that do not add up", f"{PARALLELISM}.stage_layers", [3], "adds up", "add up"),
    _one("layers of other stages", f"{PARALLELISM}.stage_layers", [1, 1], "entries", "per virtual"),
    BadJob("too many ranks", {f"{PARALLELISM}.dp": 2**18}, PARALLELISM, "ranks", "fewer ranks"),
    BadJob(
        "batch over replicas",
        {f"{PARALLELISM}.dp": 3},
        f"{TRAINING}.global_batch_size",
        "not a multiple",
        "use 6",
    ),
    BadJob(
        "micro-batches over stages",
        {
            f"{MODEL}.layers": 4,
            f"{PARALLELISM}.pp": 2,
            f"{PARALLELISM}.virtual_stages": 2,
            f"{TRAINING}.global_batch_size": 3,
        },
        f"{TRAINING}.global_batch_size",
        "interleaving",
        "use 4",
    ),
)
PLACES = (
    _one("no corpus", SOURCES, [], "no source", "tokenize"),
    BadJob("empty prefix", {SOURCES: [{"prefix": ""}]}, f"{SOURCES}[0].prefix", "missing", "set"),
    BadJob(
        "long prefix", {SOURCES: [{"prefix": LONG}]}, f"{SOURCES}[0].prefix", "too long", "at most"
    ),
    BadJob(
        "weight of zero",
        {SOURCES: [{"prefix": "corpus", "weight": 0}]},
        f"{SOURCES}[0].weight",
        "not positive",
        "above 0",
    ),
    BadJob(
        "no tokenizer file",
        {f"{DATA}.tokenizer.kind": "bpe"},
        f"{DATA}.tokenizer.path",
        "missing",
        "tokenizer file",
    ),
    _one("no digest", f"{DATA}.tokenizer.sha256", "abc", "SHA-256", "64"),
    BadJob(
        "held-out corpus",
        {f"{EVALUATION}.interval_steps": 1},
        f"{EVALUATION}.sources",
        "no source",
        "held-out",
    ),
    BadJob(
        "no folder for checkpoints",
        {"checkpoint.interval_steps": 1},
        "checkpoint.uri",
        "empty",
        "give a folder",
    ),
    _one("S3 without a bucket", "checkpoint.uri", "s3:///x", "no bucket", "s3://bucket/prefix"),
    _one("HDFS without a host", "checkpoint.uri", "hdfs:///x", "no host", "hdfs://host:port"),
    _one("a web address", "checkpoint.uri", "https://a.example/x", "not a storage", "file://"),
    _one("a long folder", "checkpoint.uri", LONG, "too long", "at most"),
    BadJob(
        "load without a folder", {"checkpoint.load_uri": "/x"}, "checkpoint.uri", "empty", "folder"
    ),
    BadJob(
        "load from itself",
        {"checkpoint.uri": "/x", "checkpoint.load_uri": "/x/"},
        "checkpoint.load_uri",
        "itself",
        "another",
    ),
)
GROUPS = (
    WRONG_TYPES, RANGES_OF_THE_FILE, UNKNOWN, MISSING, NAMES, RANGES, LAYOUTS, PLACES,
)  # fmt: skip
SHORT = 1  # of each group, where a case costs more than `plan` does


def _name(bad: BadJob) -> str:
    return bad.case.replace(" ", "-")


each_bad_job = pytest.mark.parametrize("bad", [bad for group in GROUPS for bad in group], ids=_name)
# All cases in `make test-slow`, a few of each group in `make test`.
each_kind_of_bad_job = pytest.mark.parametrize(
    "bad",
    [
        pytest.param(bad, marks=() if number < SHORT else pytest.mark.slow, id=_name(bad))
        for group in GROUPS
        for number, bad in enumerate(group)
    ],
)
