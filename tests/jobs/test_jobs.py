"""The five jobs' recipes in short form, on small data of a user's own; docs/jobs.md has the long ones."""

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from meshpar import PlanError
from meshpar.launchers.commands.train import train_recipe
from meshpar.launchers.export import export_run
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.training.text import standard_library_root

transformers = pytest.importorskip("transformers")

WORDS = [
    "Return", "Close", "Open", "Read", "Write", "Send", "the", "a", "this", "file", "socket", "name", "value",
    "queue", "lock",
]  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jobs")
    root = standard_library_root()
    (folder / "text.txt").write_text("\n\n".join((root / name).read_text() for name in ("queue.py", "shlex.py")))
    lines = []
    for number in range(120):
        verb, noun = WORDS[number % 6], WORDS[9 + number % 6]
        source = textwrap.dedent(
            f"def {verb.lower()}_{noun}(self, x{number}):\n    return self.{noun}.{verb.lower()}(x{number})"
        )
        kind = ["plain", "odd", "rare"][0 if number % 4 else 1 + number % 3 % 2]
        lines.append(json.dumps({"code": source, "doc": f"{verb} the {noun}.", "kind": kind}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    return folder


def train(home: Path, name: str, *overrides: str, ranks: int = 2, **options: Any) -> Recipe:
    """Train a recipe that comes with meshpar, by name, and return it as it ran."""
    given = [f"output={home / name}", f"data.cache={home / 'cache'}"]
    given += ["training.tensorboard=false", "training.log_every=1", *overrides]
    assert train_recipe(name, given, nproc=ranks, quiet=True, **options) == 0
    return load_recipe(name, given)


def text(home: Path) -> list[str]:
    source = ["data.source=files", f"data.paths=[{home / 'text.txt'}]", "data.tokenizer=bytes"]
    return [*source, "data.sequence_length=32", "data.micro_batch=2"]


def rows(home: Path, *fields: str) -> list[str]:
    return ["data.source=jsonl", f"data.paths=[{home / 'rows.jsonl'}]", "data.tokenizer=bytes", *fields]


def records(recipe: Recipe) -> list[dict[str, float]]:
    return [json.loads(line) for line in (recipe.folder / "metrics.jsonl").read_text().splitlines()]


def values(recipe: Recipe, name: str) -> list[float]:
    return [record[name] for record in records(recipe) if record.get(name) is not None]


@pytest.mark.long  # the quickstart does the same with another model
def test_gpt2_is_trained_gone_on_with_and_exported(home: Path) -> None:
    more = [*text(home), "model.n_layer=2", "model.n_embd=32", "schedule.steps=6", "training.validate_every=3"]
    train(home, "gpt2_small", *more, "training.steps=3", "mesh=''", "passes=[]", "data.micro_batch=4", ranks=1)
    recipe = train(home, "gpt2_small", *more, "training.steps=6")
    losses = values(recipe, "train/loss")
    assert len(losses) == 6 and losses[-1] < losses[0]
    export = export_run(recipe.folder, home / "gpt2-export", best="val/loss")
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert list((recipe.folder / "checkpoints").glob("step-00000003"))


@pytest.mark.long
def test_t5_summarises_and_its_best_step_is_exported(home: Path) -> None:
    small = ["model.config.vocab_size=320", "model.config.d_model=32", "model.config.d_kv=8", "model.config.d_ff=48"]
    more = rows(home, "data.field=code", "data.target_field=doc", "data.target_length=40", "data.micro_batch=4")
    more += ["training.epochs=3", "data.validation_fraction=0.2", "optimizer.lr=1e-2", "model.config.num_layers=2"]
    recipe = train(home, "t5_summarisation", *small, *more)
    losses = values(recipe, "val/loss")
    assert len(losses) == 3 and min(losses) < losses[0]
    steps = [int(record["step"]) for record in records(recipe) if "val/loss" in record]
    best = steps[losses.index(min(losses))]
    export = export_run(recipe.folder, home / "t5-export", best="val/loss")
    newest = export_run(recipe.folder / "checkpoints" / f"step-{best:08d}", home / "t5-same")
    assert (export / "model.safetensors").read_bytes() == (newest / "model.safetensors").read_bytes()
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(export).eval()
    assert model.shared.weight is model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    made = model.generate(**tokenizer("def open_file(self): pass", return_tensors="pt"), max_new_tokens=8)
    assert made.shape[0] == 1 and int(made[0, 0]) == model.config.decoder_start_token_id


def test_bert_goes_on_in_mid_epoch_on_another_mesh_as_if_it_had_not_stopped(home: Path) -> None:
    more = rows(home, "data.field=code", "data.label_field=kind", "data.micro_batch=2", "data.validation_fraction=0.2")
    more += [f"model.config.{name}_prob=0" for name in ("hidden_dropout", "attention_probs_dropout")]
    more += ["model.config.hidden_size=32", "training.epochs=null", "training.validate_every=4"]
    more += ["schedule.steps=8", "schedule.step_every=3", "optimizer.eps=1e-3"]
    alone = ["mesh=''", "passes=[]", "data.micro_batch=4"]
    steps = ["training.steps=8", f"output={home / 'bert-whole'}"]
    whole = train(home, "bert_classification", *more, *alone, *steps, ranks=1)
    train(home, "bert_classification", *more, *alone, "training.steps=4", ranks=1)
    recipe = train(home, "bert_classification", *more, "training.steps=8")
    assert recipe.mesh == "dp_replicate=2" and recipe.data.accumulate == 2
    assert values(recipe, "train/loss") == pytest.approx(values(whole, "train/loss"), rel=1e-4)
    assert values(recipe, "val/accuracy")[-1] == pytest.approx(values(whole, "val/accuracy")[-1])
    rates = values(recipe, "lr")
    assert rates[1] == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-3 * 0.3**2)  # StepLR
    export = export_run(recipe.folder, home / "bert-export", best="+val/accuracy")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(export)
    assert model.config.id2label == {0: "odd", 1: "plain", 2: "rare"}


def test_a_student_learns_from_a_frozen_teacher_both_sharded(home: Path) -> None:
    data = text(home)
    config = "model.config={model_type: qwen3_moe, vocab_size: 320, hidden_size: 32, num_hidden_layers: 1, "
    config += "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 16, moe_intermediate_size: 16, intermediate_size: 32, num_experts: 4, "
    config += "num_experts_per_tok: 2, max_position_embeddings: 64, tie_word_embeddings: true}"
    few = ["training.steps=3", "training.validate_every=3"]
    teacher = train(home, "qwen3_moe_teacher", *data, config, *few, "mesh=''", ranks=1)
    folder = export_run(teacher.folder, teacher.folder / "export")
    student = [*data, config, *(f"teacher.model.{key}={folder}" for key in ("config", "weights"))]
    missing = [override.replace(str(folder), str(home / "nowhere")) for override in student]
    message = r"teacher\.model\.weights: .*nowhere does not exist; train and export the teacher first"
    with pytest.raises(PlanError, match=message):
        train_recipe("qwen3_moe_distillation", missing, nproc=2, quiet=True)
    steps = ["training.steps=4", "training.log_every=1", "training.validate_every=2", "checkpoint.every=2"]
    recipe = train(home, "qwen3_moe_distillation", *student, *steps)
    assert [next(iter(pass_)) for pass_ in recipe.passes] == ["FullyShard"] and recipe.teacher is not None
    assert len(values(recipe, "val/kl")) == 2
    parts = zip(*(values(recipe, f"val/{name}") for name in ("loss", "cross_entropy", "kl")))
    for loss, cross_entropy, kl in parts:
        assert loss == pytest.approx(0.3 * cross_entropy + 0.7 * 4.0 * kl, rel=1e-5)
    assert values(recipe, "train/loss")[-1] < values(recipe, "train/loss")[0]
    exported = transformers.AutoModelForCausalLM.from_pretrained(export_run(recipe.folder, home / "student"))
    assert type(exported).__name__ == "Qwen3MoeForCausalLM"


def test_two_nodes_from_one_command(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    more = [*text(home), "model.dim=32", "model.layers=2", "model.hidden=48"]
    more += ["training.steps=3", "training.validate_every=3"]
    recipe = train(home, "hybrid_two_nodes", *more, "data.micro_batch=1", nodes=2)
    assert re.search(r"parameters on dp_replicate=2,dp_shard=2 \(cpu\), HybridShard", capfd.readouterr().err)
    whole = ["mesh=''", "passes=[]", "data.micro_batch=4", f"output={home / 'hybrid-alone'}"]
    alone = train(home, "hybrid_two_nodes", *more, *whole, ranks=1)
    assert values(recipe, "train/loss") == pytest.approx(values(alone, "train/loss"), rel=1e-5)
    assert values(recipe, "val/loss") == pytest.approx(values(alone, "val/loss"), rel=1e-5)
