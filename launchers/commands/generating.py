"""``meshpar generate``: complete text with an exported model, by transformers."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, final

import torch

from meshpar.errors import MeshparError


def need_transformers() -> None:
    """Raise MeshparError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MeshparError("transformers is not installed; this command needs it: pip install 'meshpar[transformers]'")


@final
class Completer:
    """Complete text with a causal language model and its tokenizer, loaded by transformers alone.

    Attributes:
        model: the model, in evaluation mode.
        tokenizer: the tokenizer of the same folder.
    """

    def __init__(self, folder: Path) -> None:
        """Load a folder; raises MeshparError if it has no model with a tokenizer."""
        need_transformers()
        import transformers

        for name in ("config.json", "tokenizer.json"):
            if not (folder / name).is_file():
                raise MeshparError(f"{folder} has no {name}; expected a folder written by `meshpar export`")
        transformers.utils.logging.disable_progress_bar()
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    def complete(self, prompt: str, *, tokens: int = 64, temperature: float = 0.0) -> str:
        """Return the text after ``prompt``: at most ``tokens`` tokens, always the most likely ones if ``temperature`` is 0.

        An empty prompt begins a new text.
        """
        ids = self.tokenizer(prompt, return_tensors="pt")
        if not prompt or not ids["input_ids"].shape[1]:
            start = self.tokenizer.eos_token_id if self.tokenizer.bos_token_id is None else self.tokenizer.bos_token_id
            if start is None:
                raise MeshparError("the prompt is empty, and the tokenizer has no token that begins a text; give a prompt")
            ids = {"input_ids": torch.tensor([[start]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
        choice: dict[str, Any] = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
        with torch.no_grad():
            made = self.model.generate(**ids, max_new_tokens=tokens, pad_token_id=self.tokenizer.eos_token_id, **choice)
        return str(self.tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
