"""Tokenizers: bytes, a trained BPE, or a folder's; each is saved as a folder that transformers' AutoTokenizer loads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, final

from meshpar.core.errors import RecipeError, brief
from meshpar.process.imports import expanded, need
from meshpar.process.leftovers import write_durably

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

T = TypeVar("T")

Piece = tuple["Sequence[int] | np.ndarray", bool, "np.ndarray | None"]
"""Ids of a document, whether they end it, and which of them count as labels; None: all."""

END_OF_TEXT = "<|endoftext|>"
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json")
_FILES = ("tokenizer.json", *_SETTINGS, "added_tokens.json", "chat_template.jinja")


@final
class TextTokenizer:
    """A fast tokenizer with its end-of-text token ``eos`` and the other files of its folder."""

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        *,
        eos: str = END_OF_TEXT,
        folder: Path | None = None,
        plain: bool = False,
        template: str | None = None,
    ) -> None:
        """``plain``: ids are the bytes of the text; ``template``: is saved with it; None: the folder's."""
        eos_id = fast.token_to_id(eos)
        if eos_id is None:
            problem = f"the tokenizer has no token {eos!r} to end a document with; set data.eos to one of its tokens"
            raise RecipeError(problem)
        self.fast, self.eos = fast, eos
        self.eos_id: int = eos_id
        self.vocab_size: int = max(fast.get_vocab(with_added_tokens=True).values()) + 1
        self._folder, self._bytes, self._template = folder, plain, template

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``, without special tokens."""
        return self.fast.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of every text, on all cores."""
        return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_ahead(self, batches: Iterable[Sequence[str]]) -> Iterator[list[np.ndarray]]:
        """Yield the ids of the texts of each batch, uint32; the next batch is tokenized meanwhile, on all cores."""
        numpy = need("numpy")

        def encoded(texts: Sequence[str]) -> list[np.ndarray]:
            if self._bytes and not any(self.eos in text for text in texts):
                return [numpy.frombuffer(text.encode(), dtype=numpy.uint8).astype(numpy.uint32) for text in texts]
            # What the library made is freed here: one batch of it at a time, and not beside its threads, which would
            # wait for memory.
            encodings = self.fast.encode_batch_fast(list(texts), add_special_tokens=False)
            return [numpy.array(encoding.ids, dtype=numpy.uint32) for encoding in encodings]

        with ThreadPoolExecutor(1) as pool:
            ahead: Future[list[np.ndarray]] | None = None
            for batch in batches:
                before, ahead = ahead, pool.submit(encoded, batch)
                if before is not None:
                    yield before.result()
            if ahead is not None:
                yield ahead.result()

    def encode_with_places(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids (N,) of each text, and the characters (N, 2) where each begins and ends."""
        numpy = need("numpy")
        encodings = self.fast.encode_batch(list(texts), add_special_tokens=False)
        return [(numpy.array(encoding.ids), numpy.array(encoding.offsets).reshape(-1, 2)) for encoding in encodings]

    def chat_template(self) -> str | None:
        """Return the chat template of the tokenizer's folder; None where it has none."""
        if self._template is not None or self._folder is None:
            return self._template
        if (file := self._folder / "chat_template.jinja").is_file():
            return file.read_text(encoding="utf-8")
        named = _setting(self._folder, "chat_template")
        if not isinstance(named, list):
            return named
        return next((template["template"] for template in named if template["name"] == "default"), None)

    def variables(self) -> dict[str, str]:
        """Return the tokens that chat templates know by name."""
        if (folder := self._folder) is None:
            return {"eos_token": self.eos}
        tokens = {kind: _read_token(folder, kind) for kind in ("bos_token", "pad_token", "unk_token")}
        return {kind: token for kind, token in tokens.items() if token is not None} | {"eos_token": self.eos}

    @cached_property
    def splits_between_words(self) -> bool:
        """True where the ids of a text are those of its lines and words, as for a BPE without tokens of spaces."""
        parts = ("def f(x):\n", "return [x]\n", "The", " end,", "   ", " 12.")
        added = self.fast.get_added_tokens_decoder().values()
        if any(token.lstrip or token.rstrip or any(map(str.isspace, token.content)) for token in added):
            return False
        return [id_ for part in parts for id_ in self.encode(part)] == self.encode("".join(parts))

    def encode_inputs(self, texts: Sequence[str], *, begin: bool) -> list[list[int]]:
        """Return the ids of whole texts with the special tokens; without any, ``eos`` before or after it."""
        if self.fast.num_special_tokens_to_add(False):
            return [encoding.ids for encoding in self.fast.encode_batch_fast(list(texts), add_special_tokens=True)]
        return [[self.eos_id, *ids] if begin else [*ids, self.eos_id] for ids in self.encode_batch(texts)]

    @property
    def pad_id(self) -> int:
        """The id that fills the shorter rows of a batch; ``eos_id`` if the tokenizer has no padding token."""
        number = None if self._folder is None else self.fast.token_to_id(_read_token(self._folder, "pad_token") or "")
        return self.eos_id if number is None else number

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of ``ids``, without special tokens unless ``special``."""
        return self.fast.decode(list(ids), skip_special_tokens=not special)

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the ids of a text."""
        return hashlib.sha256(f"{self.fast.to_str()}\0{self.eos}".encode()).hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` (for a tokenizer from a folder: copies)."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        if self._folder is not None:
            for name in _FILES:
                if (self._folder / name).is_file() and self._folder.resolve() != folder.resolve():
                    write_durably(folder / name, (self._folder / name).read_bytes())
        else:
            write_durably(folder / "tokenizer.json", self.fast.to_str(pretty=True))
        if _read_token(folder, "eos_token") != self.eos:
            file = folder / "tokenizer_config.json"
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
            config |= json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            write_durably(file, json.dumps(config | {"eos_token": self.eos}, indent=2) + "\n")
        if self._template is not None:
            write_durably(folder / "chat_template.jinja", self._template)
        return folder


def byte_tokenizer(template: str | None = None) -> TextTokenizer:
    """Return a tokenizer whose ids 0 to 255 are the bytes of UTF-8 and whose id 256 is the end of a text."""
    library = need("tokenizers")
    # the printable letter of each byte (GPT-2's bytes_to_unicode, src/encoder.py)
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    vocabulary = {chr(byte if byte in plain else next(spare)): byte for byte in range(256)}
    fast = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=[]))
    fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = library.decoders.ByteLevel()
    fast.add_special_tokens([END_OF_TEXT])
    return TextTokenizer(fast, plain=True, template=template)


def train_bpe(documents: Iterable[str], vocab_size: int, special: Sequence[str] = ()) -> TextTokenizer:
    """Train a byte-level BPE like GPT-2's; the same documents in the same order give the same tokenizer."""
    library = need("tokenizers")
    if vocab_size < 257:
        problem = f"a byte-level BPE needs a vocab_size of at least 257 (256 bytes and {END_OF_TEXT}), got {vocab_size}"
        raise RecipeError(problem)
    fast = library.Tokenizer(library.models.BPE())
    fast.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *special],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    fast.train_from_iterator(batch_items(documents, 256), trainer=trainer)
    if fast.get_vocab_size() < vocab_size:
        raise RecipeError(
            f"the text gives a vocabulary of {fast.get_vocab_size()}; expected {vocab_size}: lower vocab_size or give "
            "more text"
        )
    return TextTokenizer(fast)


def load_tokenizer(folder: str | Path, *, eos: str | None = None, template: str | None = None) -> TextTokenizer:
    """Load a saved or Hugging Face tokenizer folder; ``eos`` and ``template`` None: the folder's own."""
    library = need("tokenizers")
    folder = expanded(Path(folder))
    if not (folder / "tokenizer.json").is_file():
        raise RecipeError(
            f"there is no tokenizer.json in {folder}; save a fast tokenizer there with transformers' save_pretrained, "
            "or with meshpar"
        )
    try:
        fast = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
        fast.no_truncation()  # what a tokenizer was saved with would cut or fill every text
        fast.no_padding()
        eos = eos or _read_token(folder, "eos_token")
    except Exception as error:  # tokenizers raises no other
        problem = f"{folder / 'tokenizer.json'}, or tokenizer_config.json beside it, cannot be read: {brief(error)}"
        raise RecipeError(problem) from error
    if eos is None:
        problem = f"tokenizer_config.json in {folder} has no eos_token; set data.eos to the token that ends a document"
        raise RecipeError(problem)
    return TextTokenizer(fast, eos=eos, folder=folder, template=template)


def _read_token(folder: Path, kind: str) -> str | None:
    token = _setting(folder, kind)
    return token["content"] if isinstance(token, dict) else None if token is None else str(token)


def _setting(folder: Path, name: str) -> Any:  # noqa: ANN401 - of JSON
    files = (folder / file for file in _SETTINGS)
    read = (json.loads(file.read_text(encoding="utf-8")) for file in files if file.is_file())
    return next((settings[name] for settings in read if settings.get(name) is not None), None)


def batch_items(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of ``size``; the last may be shorter. Python 3.12 has it in itertools."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch
