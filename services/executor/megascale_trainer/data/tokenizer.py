"""Tokenizers: from the bytes of documents to token ids and back to text.

The last token id of a document is the end-of-document token.

Two kinds: ``bytes`` needs no file and loses nothing; ``bpe`` is any tokenizer file: one of Hugging
Face tokenizers, a SentencePiece model, Mistral's tekken.json, or ranks as tiktoken has them. What a
file says of single calls (truncation, padding, dropout, what is put around a text) is left out of
it: a corpus has all tokens of its documents and nothing else.

The end of a document is what the tokenizer's own configuration calls it, or what a person names;
it is never found by its name. No text may spell it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megascale_job.corpus_record import TOKENIZER_SUFFIXES, recorded_end
from megascale_trainer.data.indexed import DataError, Tokens
from megascale_trainer.data.inputs import Document, Encoded, encode_windows, texts_of

BYTE_VALUES = 256
END_OF_DOCUMENT = "<|endoftext|>"  # of a tokenizer that is trained here, and of bytes for people
MIN_BPE_VOCABULARY = BYTE_VALUES + 1  # every byte and the end of a document
MAX_TOKENIZER_BYTES = 256 << 20  # the largest public files have some 30 MiB
_JSON_SUFFIX, _SENTENCEPIECE_SUFFIX, _RANKS_SUFFIX = TOKENIZER_SUFFIXES
# What tekken.json means where it lists no special tokens: Mistral's format defines these.
_TEKKEN_SPECIAL = {"<unk>": 0, "<s>": 1, "</s>": 2}
_PRIVATE = "\U0010fffd"  # the last code point of a private plane
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


class Tokenizer(Protocol):
    """What the data commands need of a tokenizer."""

    @property
    def kind(self) -> str:
        """``bytes`` or ``bpe``, as data.tokenizer.kind."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end of a document included."""

    @property
    def sha256(self) -> str:
        """Hex digest of the tokenizer file; empty without one."""

    @property
    def end(self) -> int | None:
        """The end-of-document token; None where nothing says which it is."""

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Token ids of each document, one-dimensional, the end-of-document token last."""

    def encode_stream(self, documents: Iterable[Document]) -> Iterator[tuple[Tokens, bool]]:
        """Pieces of the documents' token ids, and whether one is the last of its document."""

    def decode(self, tokens: Tokens) -> str:
        """Text of ``tokens``, for people: what is not text shows as a replacement character."""


class ByteTokenizer:
    """One token per byte; id 256 ends a document."""

    kind = "bytes"
    vocab_size = BYTE_VALUES + 1
    sha256 = ""
    end = BYTE_VALUES

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """uint16 [bytes + 1] each; see :class:`Tokenizer`."""
        return [
            np.append(np.frombuffer(document, np.uint8), np.uint16(BYTE_VALUES))
            for document in documents
        ]

    def encode_stream(self, documents: Iterable[Document]) -> Iterator[tuple[Tokens, bool]]:
        for document in documents:
            for block in document.blocks:
                yield np.frombuffer(block, np.uint8), False
            yield np.array([BYTE_VALUES], np.uint16), True

    def decode(self, tokens: Tokens) -> str:
        parts = [
            END_OF_DOCUMENT.encode() if token == BYTE_VALUES else bytes([token])
            for token in tokens.tolist()
        ]
        return b"".join(parts).decode("utf-8", "replace")


class FileTokenizer(ABC):
    """A tokenizer that a file holds.

    Attributes:
        content: the file as it is.
        suffix: of the copy of it next to a corpus.
        split_pattern: by which tiktoken ranks divide text; empty for files that have their own.
    """

    kind = "bpe"
    suffix = _JSON_SUFFIX
    split_pattern = ""

    def __init__(self, content: bytes, source: str) -> None:
        self.content = content
        self._source = source
        self.sha256 = hashlib.sha256(content).hexdigest()
        self.vocab_size = 0
        self.end: int | None = None

    def end_with(self, given: str | int | None) -> None:
        """Take ``given``, a token or its id, as the end; None: what the file itself says.

        Raises:
            DataError: there is no such token, or text can spell it.
        """
        end = self._own_end() if given is None else self._id_of(given)
        if end is None:
            return
        for text in ("{}", "a{}b", " {} ", "\n{}\n"):
            spelled = text.format(self._name_of(end))
            if end in self._encode([spelled])[0].ids:
                raise DataError(
                    f"{self._source}: text can spell the token {self._name_of(end)!r} (id {end}), "
                    "so it cannot mark the end of a document; name another one with --end-token"
                )
        self.end = end
        self.vocab_size = max(self.vocab_size, end + 1)

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """int32 [tokens + 1] each, on all cores; see :class:`Tokenizer`."""
        texts = [document.decode("utf-8", "replace") for document in documents]
        end = self._required_end()
        return [np.append(found.ids, np.int32(end)) for found in self._encode(texts)]

    def encode_stream(self, documents: Iterable[Document]) -> Iterator[tuple[Tokens, bool]]:
        """int32 each, on all cores, in memory that no document's length changes."""
        end = self._required_end()
        for name, ids, last in encode_windows(self._encode, documents):
            if end in ids:
                raise DataError(
                    f"{name}: its text has the end-of-document token {self._name_of(end)!r} (id "
                    f"{end}); name another one with --end-token"
                )
            yield (np.append(ids, np.int32(end)) if last else ids), last

    def _required_end(self) -> int:
        if self.end is None:
            known = ", ".join(self._special_names())
            raise DataError(
                f"{self._source}: nothing says which token ends a document: put the tokenizer's "
                "own tokenizer_config.json beside it, or name the token to `megascale data "
                "tokenize` with --end-token" + (f" (its special tokens: {known})" if known else "")
            )
        return self.end

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> list[Encoded]:
        """The tokens of each text, without any that the text does not have."""

    @abstractmethod
    def decode(self, tokens: Tokens) -> str:
        """See :class:`Tokenizer`."""

    @abstractmethod
    def _own_end(self) -> int | None:
        """The end token by the file itself."""

    @abstractmethod
    def _id_of(self, given: str | int) -> int:
        """The id of a token, checked; raises DataError."""

    @abstractmethod
    def _name_of(self, token: int) -> str:
        """The text of a token, for messages and checks."""

    def _special_names(self) -> list[str]:
        """Up to eight special tokens, for messages."""
        return []

    def _unknown(self, given: str | int) -> DataError:
        return DataError(f"{self._source}: has no token {given!r} for the end of a document")


class BpeTokenizer(FileTokenizer):
    """The JSON text of a Hugging Face tokenizers file.

    Raises:
        DataError: the library is not installed, or the text is not such a file.
    """

    def __init__(self, json_text: str, source: str) -> None:
        super().__init__(json_text.encode(), source)
        library = _tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_str(json_text)
            self._encoder = library.Tokenizer.from_str(_for_corpora(json_text))
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{source}: not a Hugging Face tokenizers file: {error}") from error
        # A document that spells a special token must not be able to forge one.
        self._encoder.encode_special_tokens = True
        # Ids may have gaps, so the vocabulary is as large as the largest id asks.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {number: token.content for number, token in added.items() if token.special}

    @property
    def json_text(self) -> str:
        """The file's text."""
        return self.content.decode()

    @classmethod
    def load(cls, path: str | Path) -> BpeTokenizer:
        """The tokenizer in the file at ``path``; raises DataError if it cannot be read or used."""
        found = load_tokenizer(path)
        if not isinstance(found, cls):
            raise DataError(f"{path}: not a Hugging Face tokenizers file")
        return found

    @classmethod
    def train(cls, documents: Iterable[Document], vocab_size: int) -> BpeTokenizer:
        """Learn a byte-level BPE of at most ``vocab_size`` tokens from ``documents``.

        Raises:
            DataError: ``vocab_size`` has no room for the bytes, or the library is not installed.
        """
        library = _tokenizers()
        if vocab_size < MIN_BPE_VOCABULARY:
            raise DataError(
                f"a byte-level BPE needs a vocabulary of at least {MIN_BPE_VOCABULARY}, "
                f"not {vocab_size}"
            )
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts_of(documents), trainer)
        trained = cls(tokenizer.to_str(pretty=False), "trained tokenizer")
        trained.end_with(END_OF_DOCUMENT)
        return trained

    def _encode(self, texts: Sequence[str]) -> list[Encoded]:
        found = self._encoder.encode_batch(list(texts), add_special_tokens=False)
        return [Encoded.of(encoding.ids, encoding.offsets) for encoding in found]

    def decode(self, tokens: Tokens) -> str:
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))

    def _own_end(self) -> int | None:
        """A file names no roles; where it has one special token, that has the only one."""
        return next(iter(self._special)) if len(self._special) == 1 else None

    def _id_of(self, given: str | int) -> int:
        found = given if isinstance(given, int) else self._tokenizer.token_to_id(given)
        if found is None or self._tokenizer.id_to_token(found) is None:
            raise self._unknown(given)
        return int(found)

    def _name_of(self, token: int) -> str:
        return str(self._tokenizer.id_to_token(token))

    def _special_names(self) -> list[str]:
        return list(self._special.values())[:8]


class SentencePieceTokenizer(FileTokenizer):
    """A SentencePiece model. Raises DataError as :class:`BpeTokenizer` does."""

    suffix = _SENTENCEPIECE_SUFFIX

    def __init__(self, content: bytes, source: str) -> None:
        super().__init__(content, source)
        library = _imported("sentencepiece", "a SentencePiece model")
        try:
            self._model = library.SentencePieceProcessor(model_proto=content)
        except Exception as error:  # the library raises RuntimeError
            raise DataError(f"{source}: not a SentencePiece model: {error}") from error
        self.vocab_size = int(self._model.vocab_size())

    def _encode(self, texts: Sequence[str]) -> list[Encoded]:
        given = {"add_bos": False, "add_eos": False, "enable_sampling": False}
        found = self._model.encode(
            list(texts), return_type="offset_mapping", num_threads=os.cpu_count() or 1, **given
        )
        return [Encoded.of(each["ids"], each["offsets"]) for each in found]

    def decode(self, tokens: Tokens) -> str:
        return str(self._model.decode(tokens.tolist()))

    def _own_end(self) -> int | None:
        end = int(self._model.eos_id())
        return end if end >= 0 else None

    def _id_of(self, given: str | int) -> int:
        found = given if isinstance(given, int) else int(self._model.piece_to_id(given))
        known = 0 <= found < self._model.vocab_size()
        if not known or (isinstance(given, str) and self._model.id_to_piece(found) != given):
            raise self._unknown(given)
        return found

    def _name_of(self, token: int) -> str:
        return str(self._model.id_to_piece(token))


class RanksTokenizer(FileTokenizer):
    """Ranks as tiktoken has them, or tekken.json. Raises DataError as :class:`BpeTokenizer` does.

    Args:
        ranks: of the bytes of each token.
        first: id of the token of rank 0.
        special: ids of tokens that no text has.
    """

    def __init__(
        self,
        content: bytes,
        source: str,
        ranks: dict[bytes, int],
        split_pattern: str,
        first: int,
        special: dict[str, int],
    ) -> None:
        super().__init__(content, source)
        library = _imported("tiktoken", "a file of tiktoken ranks")
        try:
            self._encoding = library.Encoding(
                source, pat_str=split_pattern, mergeable_ranks=ranks, special_tokens={}
            )
        except Exception as error:  # the library raises ValueError and bare Exception
            raise DataError(f"{source}: not a file of tiktoken ranks: {error}") from error
        self._first = first
        self._special = special
        self._texts = range(first, first + 1 + max(ranks.values(), default=-1))
        self.vocab_size = max(self._texts.stop, 1 + max(special.values(), default=-1))

    @classmethod
    def of_ranks(cls, content: bytes, source: str, split_pattern: str) -> RanksTokenizer:
        """Read a .tiktoken file, which has neither a pattern nor special tokens."""
        if not split_pattern:
            raise DataError(
                f"{source}: a file of tiktoken ranks does not say how text is divided: give its "
                "regular expression with --split-pattern"
            )
        try:
            pairs = (line.split() for line in content.splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except (ValueError, binascii.Error) as error:
            raise DataError(f"{source}: not a file of tiktoken ranks: {error}") from error
        found = cls(content, source, ranks, split_pattern, 0, {})
        found.suffix = _RANKS_SUFFIX
        found.split_pattern = split_pattern
        return found

    @classmethod
    def of_tekken(cls, content: bytes, source: str, values: dict[str, Any]) -> RanksTokenizer:
        """Read a tekken.json; its special tokens have the first ids."""
        try:
            config = values["config"]
            first = int(config["default_num_special_tokens"])
            kept = int(config["default_vocab_size"]) - first
            ranks = {
                base64.b64decode(entry["token_bytes"], validate=True): int(entry["rank"])
                for entry in values["vocab"]
                if int(entry["rank"]) < kept
            }
            listed = values.get("special_tokens") or ()
            special = {str(entry["token_str"]): int(entry["rank"]) for entry in listed}
            pattern = str(config["pattern"])
        except (KeyError, TypeError, ValueError, binascii.Error) as error:
            raise DataError(f"{source}: not a tekken.json: {error!r}") from error
        return cls(content, source, ranks, pattern, first, special or _TEKKEN_SPECIAL)

    def _encode(self, texts: Sequence[str]) -> list[Encoded]:
        found = []
        for text, ids in zip(texts, self._encoding.encode_ordinary_batch(list(texts)), strict=True):
            _, starts = self._encoding.decode_with_offsets(ids)
            ends = [*starts[1:], len(text)]
            numbers = np.array(ids, np.int64) + self._first
            found.append(Encoded.of(numbers, list(zip(starts, ends, strict=True))))
        return found

    def decode(self, tokens: Tokens) -> str:
        names = {number: name for name, number in self._special.items()}
        parts = [
            self._encoding.decode_single_token_bytes(token - self._first)
            if token in self._texts
            else names.get(token, END_OF_DOCUMENT if token == self.end else "\ufffd").encode()
            for token in tokens.tolist()
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def _own_end(self) -> int | None:
        """What the format of tekken.json defines; ranks alone have no end."""
        return self._special.get("</s>")

    def _id_of(self, given: str | int) -> int:
        found = given if isinstance(given, int) else self._special.get(given)
        if found is None or found < 0:
            raise self._unknown(given)
        if found in self._texts:
            raise DataError(
                f"{self._source}: text can spell the token of id {found}, so it cannot mark the "
                f"end of a document; name a special token, or an id from {self._texts.stop} on"
            )
        return found

    def _name_of(self, token: int) -> str:
        return next((n for n, number in self._special.items() if number == token), f"id {token}")

    def _special_names(self) -> list[str]:
        return list(self._special)[:8]


def load_tokenizer(path: str | Path, end_token: str = "", split_pattern: str = "") -> FileTokenizer:
    """The tokenizer in the file at ``path``, by its content.

    Args:
        end_token: what ends a document: a token, or its id. Empty: what is configured beside the
            file, or in it.
        split_pattern: of a file of tiktoken ranks.

    Raises:
        DataError: it cannot be read, is of no known format, or needs a library that is missing.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TOKENIZER_BYTES + 1)
    except OSError as error:
        raise DataError(f"{path}: cannot be read as a tokenizer file: {error}") from error
    if len(content) > MAX_TOKENIZER_BYTES:
        raise DataError(f"{path}: is larger than {MAX_TOKENIZER_BYTES} bytes: no tokenizer file")
    recorded = recorded_end(path, hashlib.sha256(content).hexdigest())
    if recorded is not None:
        split_pattern = split_pattern or recorded[1]
    found = _of_content(content, str(path), split_pattern)
    given: str | int | None = int(end_token) if end_token.isdecimal() else end_token or None
    if given is None and recorded is not None:
        given = recorded[0]
    found.end_with(_configured_end(path.parent, found) if given is None else given)
    return found


def _of_content(content: bytes, source: str, split_pattern: str) -> FileTokenizer:
    if content.lstrip()[:1] == b"{":
        try:
            text = content.decode("utf-8")
            values = json.loads(text)
        except ValueError as error:
            raise DataError(f"{source}: cannot be read as a tokenizer file: {error}") from error
        if isinstance(values, dict) and isinstance(values.get("config"), dict):
            return RanksTokenizer.of_tekken(content, source, values)
        return BpeTokenizer(text, source)
    if _RANK_LINE.match(content):
        return RanksTokenizer.of_ranks(content, source, split_pattern)
    if source.endswith(".json"):
        raise DataError(f"{source}: not a Hugging Face tokenizers file: it is no JSON object")
    return SentencePieceTokenizer(content, source)


def _configured_end(folder: Path, tokenizer: FileTokenizer) -> str | int | None:
    """The end token by the configuration next to a tokenizer file."""
    for name, field in (
        ("tokenizer_config.json", "eos_token"),
        ("special_tokens_map.json", "eos_token"),
        ("config.json", "eos_token_id"),
        ("generation_config.json", "eos_token_id"),
    ):
        values = _json_object(folder / name)
        found = values.get(field)
        if isinstance(found, dict):  # an added token with its properties
            found = found.get("content")
        if isinstance(found, list):  # of several, the first is the document's
            found = found[0] if found else None
        if isinstance(found, str) and isinstance(tokenizer, RanksTokenizer):
            found = _added_id(values, found)
        if isinstance(found, (str, int)) and not isinstance(found, bool):
            return found
    return None


def _added_id(values: dict[str, Any], token: str) -> str | int:
    """The id of an added token, which files of ranks do not have."""
    for number, entry in values.get("added_tokens_decoder", {}).items():
        if isinstance(entry, dict) and entry.get("content") == token:
            return int(number)
    return token


def _json_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: cannot be read, and it may name the end of a document: {error}; correct it, "
            "or give --end-token"
        ) from error
    return values if isinstance(values, dict) else {}


def _for_corpora(json_text: str) -> str:
    """A tokenizers file without what its last user had set for single calls.

    A unigram model has its special tokens among its pieces, where text could spell them: there they
    get names that no text has. What is no such file stays: the library says what is wrong with it.
    """
    values = json.loads(json_text)
    model = values.get("model") if isinstance(values, dict) else None
    if not isinstance(model, dict):
        return json_text
    values |= {name: None for name in ("truncation", "padding", "post_processor") if name in values}
    if model.get("dropout") is not None:
        model["dropout"] = None
    pieces = model.get("vocab")
    if isinstance(pieces, list):
        added = values.get("added_tokens") or []
        special = {token["content"] for token in added if token["special"]}
        values["added_tokens"] = [token for token in added if not token["special"]]
        model["vocab"] = [
            [f"{_PRIVATE}{piece}{_PRIVATE}" if piece in special else piece, score]
            for piece, score in pieces
        ]
    return json.dumps(values, ensure_ascii=False)


def _tokenizers() -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise DataError(
            "the bpe tokenizer needs the `tokenizers` library: pip install 'megascale[executor]'"
        ) from error
    return tokenizers


def _imported(name: str, what: str) -> Any:
    try:
        return __import__(name)
    except ImportError as error:
        raise DataError(
            f"{what} needs the `{name}` library: pip install 'megascale[data]'"
        ) from error
