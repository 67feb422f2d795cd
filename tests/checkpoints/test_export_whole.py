"""An export is whole: the tokenizer, chat template and end of turn of its run, and `meshpar generate` accepts it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshpar.launchers.cli import app
from meshpar.launchers.commands.train import launch
from meshpar.launchers.recipes.loading import load_recipe

transformers = pytest.importorskip("transformers")
GGUF = ("--quantize", "q8_0")
ASKED, ANSWER = "what is the name of the bird", "blue"


def base_model(folder: Path) -> Path:
    """A base model without a chat template, whose text ends with <|endoftext|> (0) and which knows <|im_end|> (2)."""
    import tokenizers

    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer, fast.decoder = (
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        tokenizers.decoders.ByteLevel(),
    )
    special, alphabet = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=288, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    fast.train_from_iterator([ASKED, "user assistant"] * 20, trainer=trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=special[0]).save_pretrained(folder)
    sizes = {
        "vocab_size": 288, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model("llama", **sizes, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": 0, "temperature": 0.7, "do_sample": True})
    )
    return folder


def said(folder: Path, *names: str) -> list[object]:
    """Return the ends of text in files of a folder."""
    return [json.loads((folder / name).read_text())["eos_token_id"] for name in names]


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs on conversations: of all weights (long enough to learn the answer and to stop), and of adapters."""
    home = tmp_path_factory.mktemp("chat")
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWER}]
    (home / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 64)
    (home / "job.yaml").write_text(
        f"device: cpu\nmodel: {{kind: huggingface, weights: {base_model(home / 'base')}}}\n"
        f"data: {{source: chat, paths: [{home / 'chat.jsonl'}], template: chatml, eos: <|im_end|>, sequence_length: "
        f"64, micro_batch: 4, cache: {home / 'cache'}}}\noptimizer: {{lr: 1e-2, weight_decay: 0.0}}\nschedule: "
        "{name: constant}\n"
        "training: {steps: 80, log_every: 50, tensorboard: false}\n"
    )
    for name, more in (("full", []), ("lora", ["lora={rank: 2}", "training.steps=2"])):
        assert launch(load_recipe(str(home / "job.yaml"), [f"output={home / name}", *more]), 1, quiet=True) == 0
    return home


@pytest.mark.parametrize(
    ("run", "options"), [("full", ()), ("lora", ()), ("lora", ("--adapters",)), ("lora", ("--config",)), ("full", GGUF)]
)
def test_an_export_has_the_template_and_the_end_of_turn_of_its_run(runs, tmp_path, run, options) -> None:
    given = (*options, runs / "base") if options == ("--config",) else options
    command("export", runs / run, tmp_path / "out", *given)
    if options != GGUF:
        files = ("generation_config.json",) if options == ("--adapters",) else ("config.json", "generation_config.json")
        assert said(tmp_path / "out", *files) == [[2, 0]] * len(files), "the base's end of text stays one, too"
        assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.7
    if options not in (("--config",), GGUF):  # that folder's tokenizer replaces the run's
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
        assert tokenizer.eos_token == "<|im_end|>" and "<|im_start|>" in tokenizer.chat_template
    asked = () if options == ("--config",) else ("--chat",)
    answer = command("generate", tmp_path / "out", *asked, "--tokens", 24, ASKED)
    assert run == "lora" or answer == f"{ANSWER}\n"
    if run == "full" and options != GGUF:
        net = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": ASKED}], add_generation_prompt=True, return_tensors="pt"
        )
        made = net.generate(ids["input_ids"], do_sample=False, max_new_tokens=24)[0, ids["input_ids"].shape[1] :]
        assert tokenizer.decode(made) == f"{ANSWER}<|im_end|>", "transformers alone stops where the turn ends"


def test_what_does_not_generate_is_named(runs: Path, tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 288, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }  # fmt: skip
    transformers.BertForSequenceClassification(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "x"])
    assert done.exit_code == 1
    assert "has no tokenizer; a run on token ids has none: export it with --config DIR" in done.stderr
    transformers.AutoTokenizer.from_pretrained(runs / "base").save_pretrained(tmp_path)
    done = CliRunner().invoke(app, ["generate", str(tmp_path), "x"])
    assert done.exit_code == 1
    assert "is not a language model, which generates text: it has no cls.predictions" in done.stderr
