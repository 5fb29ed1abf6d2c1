"""Tokenizers: from the bytes of a document to token ids and back to text.

The last token id of a document is the end-of-document token.

Two kinds: ``bytes`` needs no file and loses nothing; ``bpe`` is a byte-level BPE in a Hugging Face
tokenizers file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megascale_trainer.data.errors import DataError
from megascale_trainer.data.indexed import Tokens

BYTE_VALUES = 256
END_OF_DOCUMENT = "<|endoftext|>"
MIN_BPE_VOCABULARY = BYTE_VALUES + 1  # every byte and the end of a document
# What well-known tokenizer files call the end of a document, in the order of preference.
_END_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")


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

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """Token ids of each document, one-dimensional, the end-of-document token last."""

    def decode(self, tokens: Tokens) -> str:
        """Text of ``tokens``, for people: what is not text shows as a replacement character."""


class ByteTokenizer:
    """One token per byte; id 256 ends a document."""

    kind = "bytes"
    vocab_size = BYTE_VALUES + 1
    sha256 = ""

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """uint16 [bytes + 1] each; see :class:`Tokenizer`."""
        return [
            np.append(np.frombuffer(document, np.uint8), np.uint16(BYTE_VALUES))
            for document in documents
        ]

    def decode(self, tokens: Tokens) -> str:
        """See :class:`Tokenizer`."""
        parts = [
            END_OF_DOCUMENT.encode() if token == BYTE_VALUES else bytes([token])
            for token in tokens.tolist()
        ]
        return b"".join(parts).decode("utf-8", "replace")


class BpeTokenizer:
    """A byte-level BPE, as the JSON text of a Hugging Face tokenizers file.

    Raises:
        DataError: the library is not installed, the text is not such a file, or it names no
            end-of-document token.
    """

    kind = "bpe"

    def __init__(self, json_text: str, source: str) -> None:
        library = _tokenizers()
        try:
            self._tokenizer = library.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(f"{source}: not a Hugging Face tokenizers file: {error}") from error
        # A document that spells a special token must not be able to forge one.
        self._tokenizer.encode_special_tokens = True
        ids = [self._tokenizer.token_to_id(name) for name in _END_NAMES]
        known = [number for number in ids if number is not None]
        if not known:
            raise DataError(
                f"{source}: names no end-of-document token; it needs one of {', '.join(_END_NAMES)}"
            )
        self._end = known[0]
        self.json_text = json_text
        self.sha256 = hashlib.sha256(json_text.encode()).hexdigest()
        # Ids may have gaps, so the vocabulary is as large as the largest id asks.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def load(cls, path: str | Path) -> BpeTokenizer:
        """The tokenizer in the file at ``path``; raises DataError if it cannot be read or used."""
        try:
            return cls(Path(path).read_bytes().decode("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as a tokenizer file: {error}") from error

    @classmethod
    def train(cls, documents: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
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
        tokenizer.train_from_iterator(
            (document.decode("utf-8", "replace") for document in documents), trainer
        )
        return cls(tokenizer.to_str(pretty=False), "trained tokenizer")

    def encode(self, documents: Sequence[bytes]) -> list[Tokens]:
        """int32 [tokens + 1] each, on all cores.

        Bytes that are not UTF-8 become replacement characters.

        See :class:`Tokenizer`.
        """
        texts = [document.decode("utf-8", "replace") for document in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array([*encoding.ids, self._end], np.int32) for encoding in encodings]

    def decode(self, tokens: Tokens) -> str:
        """See :class:`Tokenizer`."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=False))


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
