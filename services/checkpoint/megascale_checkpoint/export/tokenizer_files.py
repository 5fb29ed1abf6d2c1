"""The tokenizer files and the end token of an exported model.

Without them a model never ends a text. The tokenizer is the one that the job has named
(trainer.data.tokenizer). The ids of special tokens come from the configuration next to its file.
The bytes tokenizer has no file, so one is made.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale_checkpoint.checksums import is_count, load_json_object
from megascale_common.service.errors import DamagedError
from megascale_job.corpus_record import recorded_end

TOKENIZER = "tokenizer"  # of the small state: the fields of trainer.data.tokenizer
MAX_TOKENIZER_BYTES = 256 << 20  # of the file; one of 256,000 tokens has some 35 MB
FILE, CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"
_SPECIAL_MAP = "special_tokens_map.json"
_ROLES = ("bos", "eos", "pad")
BYTES, END_OF_BYTES = 256, "<|endoftext|>"
MOST_OF_BYTES = 512  # a larger vocabulary belongs to a tokenizer that the job has not named


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """Files for an export, by name, and ids of tokens.

    Attributes:
        ids: of bos, eos and pad as in config.json: a number, or a list of several ends.
        problem: why there is no tokenizer or no end; "" if there are both.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    ids: Mapping[str, int | list[int] | None] = field(default_factory=dict)
    problem: str = ""

    def id_fields(self) -> dict[str, int | list[int] | None]:
        """The fields of config.json and generation_config.json; null for unknown ids."""
        return {f"{role}_token_id": self.ids.get(role) for role in _ROLES}


def tokenizer_files(given: Any, vocab_size: int) -> TokenizerFiles:
    """The files of the tokenizer that a job has named; ``given`` is its fields, or None.

    For an imported model the fields include ``ids``, which apply where the files name no id.
    """
    if not isinstance(given, dict):
        return TokenizerFiles(problem="the checkpoint does not say which tokenizer the job had")
    path, ids = given.get("path"), given.get("ids")
    known = ids if isinstance(ids, dict) else {}
    kept = {role: known[role] for role in _ROLES if _is_id(known.get(role), vocab_size)}
    if isinstance(path, str) and path:
        found = _of_file(Path(path), given.get("sha256"), vocab_size)
        return replace(found, ids={**kept, **found.ids})
    if kept:
        return TokenizerFiles(ids=kept, problem="the imported model had no tokenizer.json")
    if given.get("kind") == "bytes" and BYTES < vocab_size <= MOST_OF_BYTES:
        return _of_bytes()
    problem = f"the job named no tokenizer for its vocabulary of {vocab_size}"
    return TokenizerFiles(problem=problem)


def of_folder(folder: Path, vocab_size: int) -> dict[str, Any]:
    """The fields that a checkpoint stores about the tokenizer of an imported model.

    Raises:
        DamagedError: one of its files is not JSON.
    """
    ids, path = token_ids(folder, vocab_size), folder.absolute() / FILE
    if not path.is_file():
        return {"ids": ids}
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"kind": "bpe", "path": str(path), "sha256": sha256, "ids": ids}


def token_ids(folder: Path, vocab_size: int) -> dict[str, int | list[int] | None]:
    """The ids of special tokens in a model's folder; the first file wins, as in transformers.

    Raises:
        DamagedError: a file is not JSON.
    """
    found: dict[str, int | list[int] | None] = {}
    for values in (_beside(folder, GENERATION), _beside(folder, "config.json")):
        for role in _ROLES:
            value = values.get(f"{role}_token_id")
            if role not in found and _is_id(value, vocab_size):
                found[role] = value
    return found


def _of_file(path: Path, sha256: Any, vocab_size: int) -> TokenizerFiles:
    try:
        data = _read(path)
    except OSError as error:
        return TokenizerFiles(problem=f"the job's tokenizer cannot be read here: {error}")
    digest = hashlib.sha256(data).hexdigest()
    # The file may have changed since the job ran; another tokenizer would give wrong ids.
    if sha256 and digest != sha256:
        return TokenizerFiles(problem=f"{path} is not the tokenizer that the job had")
    try:
        values = load_json_object(data[:MAX_TOKENIZER_BYTES], str(path))
        ids = token_ids(path.parent, vocab_size)
        beside = {name: _beside(path.parent, name) for name in (CONFIG, _SPECIAL_MAP)}
    except DamagedError as error:
        return TokenizerFiles(problem=f"not a Hugging Face tokenizers file: {error}")
    # Only a tokenizer is copied: a foreign checkpoint could name any file of this machine.
    if not isinstance(values.get("model"), dict) or "added_tokens" not in values:
        return TokenizerFiles(ids=ids, problem=f"{path} is not a Hugging Face tokenizers file")
    numbers = _numbers(values)
    for role in _ROLES:
        name = next((n for n in (_name(each, role) for each in beside.values()) if n), "")
        if role not in ids and _is_id(numbers.get(name), vocab_size):
            ids[role] = numbers[name]
    special = [name for name, each in _added(values).items() if each.get("special")]
    if "eos" not in ids and len(special) == 1 and _is_id(numbers.get(special[0]), vocab_size):
        ids["eos"] = numbers[special[0]]  # the file names no roles, but there is only one token
    # The model was trained with the end token of its corpus, as set by --end-token of
    # `data tokenize`, so that one takes precedence.
    recorded = recorded_end(path, digest)
    if recorded is not None and _is_id(recorded[0], vocab_size):
        ids["eos"] = recorded[0]
        for each in beside.values():
            if "eos_token" in each:
                each["eos_token"] = _text_of(recorded[0], numbers)
    files = {name: json.dumps(each, indent=2).encode() for name, each in beside.items() if each}
    if CONFIG not in files:
        files[CONFIG] = _configuration(_text_of(ids.get("eos"), numbers))
    problem = "" if "eos" in ids else f"no file next to {path} names the end of a text"
    return TokenizerFiles({FILE: data, **files}, ids, problem)


def _of_bytes() -> TokenizerFiles:
    """Tokenizer files in which token n is byte n, in byte-level spelling, followed by the end."""
    end = {
        "id": BYTES,
        "content": END_OF_BYTES,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    values: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {**_spelled_bytes(), END_OF_BYTES: BYTES},
            "merges": [],
        },
    }
    data = json.dumps(values, ensure_ascii=False).encode()
    files = {FILE: data, CONFIG: _configuration(END_OF_BYTES)}
    return TokenizerFiles(files, {"eos": BYTES})


def _spelled_bytes() -> dict[str, int]:
    """The character for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTES) if byte not in shown]
    spelled = {chr(byte): byte for byte in shown}
    spelled |= {chr(BYTES + number): byte for number, byte in enumerate(others)}
    return dict(sorted(spelled.items(), key=lambda item: item[1]))


def _configuration(end: str) -> bytes:
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    return json.dumps({**values, "eos_token": end} if end else values, indent=2).encode()


def _beside(folder: Path, name: str) -> dict[str, Any]:
    """A JSON file in the folder; empty if there is none. Raises DamagedError."""
    try:
        data = _read(folder / name)
    except OSError:
        return {}
    return load_json_object(data, str(folder / name))


def _read(path: Path) -> bytes:
    """The file, or more than MAX_TOKENIZER_BYTES of a larger one."""
    with path.open("rb") as file:
        # Not always the most, because read() allocates its whole argument.
        size_bytes = os.fstat(file.fileno()).st_size
        return file.read(min(size_bytes, MAX_TOKENIZER_BYTES) + 1)


def _added(values: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = values.get("added_tokens")
    entries = tokens if isinstance(tokens, list) else []
    return {
        each["content"]: each
        for each in entries
        if isinstance(each, dict) and isinstance(each.get("content"), str)
    }


def _numbers(values: Mapping[str, Any]) -> dict[str, int]:
    """The ids of a tokenizers file, by token."""
    vocab = values["model"].get("vocab")
    if isinstance(vocab, list):  # of a unigram model: pieces with their scores
        vocab = {each[0]: n for n, each in enumerate(vocab) if isinstance(each, list) and each}
    known = vocab if isinstance(vocab, dict) else {}
    added = {name: each.get("id") for name, each in _added(values).items()}
    return {name: number for name, number in {**known, **added}.items() if is_count(number)}


def _name(values: Mapping[str, Any], role: str) -> str:
    found = values.get(f"{role}_token")
    content = found.get("content") if isinstance(found, dict) else found
    return content if isinstance(content, str) else ""


def _text_of(number: int | list[int] | None, numbers: Mapping[str, int]) -> str:
    first = number[0] if isinstance(number, list) else number
    return next((name for name, each in numbers.items() if each == first), "")


def _is_id(value: Any, vocab_size: int) -> bool:
    several = value if isinstance(value, list) and value else [value]
    return all(is_count(each) and each < vocab_size for each in several)
