"""Rows of `launchers`: what starts, trains, exports and generates; see `tests/remedies/rows.py`."""

import importlib.machinery
import io
import json
import os
import shutil
import socket
import sys
import tempfile
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stderr
from functools import cache
from pathlib import Path
from threading import Barrier
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from meshpar import ActivationCheckpoint, Plan, distributed
from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.steps.steps import Steps
from meshpar.checkpoints.storage.place import place
from meshpar.launchers import export_adapters
from meshpar.launchers.agent import failures, meeting
from meshpar.launchers.agent.check_in import check_in_nodes, reach_head
from meshpar.launchers.agent.meeting import free_port
from meshpar.launchers.agent.terms import adopt_srun
from meshpar.launchers.cli import app
from meshpar.launchers.commands.generating import _ids
from meshpar.launchers.commands.launch import run_work as run
from meshpar.launchers.commands.train import division_of, find_batch_size, launch
from meshpar.launchers.export import chosen_step, merge_adapters
from meshpar.launchers.jobs import build
from meshpar.launchers.jobs.checks import check_job
from meshpar.models import Transformer, TransformerConfig
from meshpar.training.lora import LoRA
from meshpar.training.tokenizer import byte_tokenizer
from meshpar.training.tokens import write_tokens
from tests.checkpoints.test_export_whole import base_model
from tests.launchers.test_recipe import SMALL, read
from tests.remedies.rows import Row, Tested, in_one_process
from tests.remedies.test_launchers import file, launched, mix

TEXT = "a line of some text\n" * 100
TRAIN = """\
name: job
mesh: ''
passes: []
device: cpu
preflight: 'off'
model: {dim: 32, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.txt], sequence_length: 32, micro_batch: 2, cache: cache}
training: {steps: 2, log_every: 1, tensorboard: false, validate_every: null}
"""


@cache
def home():
    """Return the folder of what several rows use; it is removed at the end."""
    return tempfile.TemporaryDirectory(prefix="meshpar-")


def address():
    return f"127.0.0.1:{free_port()}"


def joined(head, *nodes, run_ids=("a",)):
    """Check nodes in at the same time, for each start; return the starts."""
    everyone = Barrier(len(nodes) * len(run_ids))

    def come(node, run_id):
        with check_in_nodes(head, node, len(nodes), run_id, 30.0) as start:
            everyone.wait(30.0)
            return start

    with ThreadPoolExecutor(everyone.parties) as pool:
        return sorted({*pool.map(come, nodes * len(run_ids), [name for name in run_ids for _ in nodes])})


def joined_twice():
    """Check two nodes in with one number."""
    with ExitStack() as nodes:
        head = address()
        return [nodes.enter_context(check_in_nodes(head, 0, 1, "a", 30.0)) for _ in range(2)]


def taken(do):
    """Do something with a port that is in use."""
    with socket.create_server(("", 0)) as server:
        return do(server.getsockname()[1])


def ports(number, do):
    """Do something where one port can be chosen."""
    with patch.object(meeting, "_FREE_PORTS", range(number, number + 1)):
        return do()


def step_of_srun(**more):
    """Adopt a task of a SLURM step, some of whose variables are missing."""
    with patch.dict(os.environ, {"SLURM_PROCID": "0", "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "2", **more}):
        return adopt_srun()


def started(job, *starts):
    """Start a scheduler's job as often as it has starts; return whether it makes a step."""
    Path("logs").mkdir(exist_ok=True)
    with patch.dict(os.environ, {"MESHPAR_JOB_ID": job}):
        for start in starts:
            failures.note_start(Path("logs") / f"{job}-{start}")
        failures.made_step(Path("logs") / f"{job}-{starts[-1]}")
        return not failures.in_vain(Path("logs") / job)


def failed_of_memory():
    Path("logs").mkdir()
    failures.record(Path("logs"), 0, torch.OutOfMemoryError("CUDA out of memory"))
    return [str(failures.first_error(Path("logs"), {0: 1}))]


WIDE = ("model={dim: 32, layers: 2, heads: 2, hidden: 256, dropout: 0.0}", "data.sequence_length=256")


SHARDS, RECOMPUTED, SHORTER = "mesh=dp_shard=8", "passes=[ActivationCheckpoint, FullyShard]", "data.sequence_length=128"


@cache
def peak(size=1, override="device=cpu"):
    """Return the bytes of a rank: what its plan describes, and what a forward keeps for the backward."""
    recipe = read(SMALL, *WIDE, override, f"data.micro_batch={size}")
    plan, kept = build.plan_of(recipe), {}
    described = plan.describe(build.build_shape(recipe), world_size=plan.mesh.size).total_bytes
    recomputation = [part for part in plan.passes if isinstance(part, ActivationCheckpoint)]

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with distributed("cpu"), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        par = Plan("", recomputation).apply(build.build_shape(recipe)).materialize(seed=0)
        par.module(torch.zeros(size, recipe.data.sequence_length, dtype=torch.int64))
    return described + sum(kept.values())


def found_batch(limit, override="device=cpu", whole=1):
    """Return the largest micro-batch that fits in so many bytes, by the memory of each try."""

    def run_one(recipe):
        used = peak(recipe.data.micro_batch, override)
        file(recipe.folder / "metrics.jsonl", json.dumps({"step": 1, "memory_gib": used / 2**30}) + "\n")
        return 0

    return find_batch_size(read(SMALL, *WIDE, override, f"data.micro_batch={whole}"), run_one, limit).data.micro_batch


def command(*words):
    """Return what a command prints."""
    done = CliRunner().invoke(app, [*map(str, words)])
    if done.exit_code:
        raise RuntimeError(f"{done.output}{done.exception}")
    return done.stdout


def trained(*overrides):
    """Train in this process; return the newest step."""
    if not Path("text.txt").exists():
        file("text.txt", TEXT)
    recipe = read(TRAIN, *overrides, trust=True)
    assert launch(recipe, 1, quiet=True) == 0
    return newest(recipe.folder)


def newest(folder):
    return Steps(place(folder) / "checkpoints").committed()[-1]


def training_output(*overrides):
    """Train; return what the run says."""
    with redirect_stderr(io.StringIO()) as said:
        trained(*overrides)
    return said.getvalue().splitlines()


@cache
def plain():
    """Return the folder of a run with one step, of all weights."""
    root = Path(home().name) / "plain"
    config = TransformerConfig(vocab_size=257, dim=32, layers=1, heads=2, hidden=32, max_positions=64)
    with distributed("cpu"), CheckpointManager(root / "checkpoints") as manager:
        par = Plan("", []).apply(Transformer(config))
        manager.save(1, par, extra={"step": 1}, metrics={"val/loss": 1.0})
    byte_tokenizer().save(root / "tokenizer")
    (root / "recipe.yaml").write_text("name: tiny\nmodel: {kind: transformer}\ntraining: {steps: 1}\n")
    return root


@cache
def base():
    """Return the folder of a model of transformers."""
    return base_model(Path(home().name) / "base")


def lora_of(weights):
    return f"model={{kind: huggingface, weights: {weights}}}", "lora={rank: 2, targets: [q_proj]}"


@cache
def adapted():
    """Return the folder of a run that trained adapters."""
    root = Path(home().name) / "adapted"
    trained(*lora_of(base()), f"output={root}", "training.steps=1")
    return root


@cache
def exported_adapters():
    folder = Path(home().name) / "alone"
    command("export", adapted(), folder, "--adapters")
    return folder


@cache
def exported_model():
    """Return the folder of an export, which has config.json and tokenizer.json."""
    folder = Path(home().name) / "exported"
    command("export", plain(), folder)
    return folder


def without_tokenizer():
    shutil.copytree(plain(), "tokens", dirs_exist_ok=True, ignore=shutil.ignore_patterns("tokenizer"))
    return "tokens"


def of_chat():
    """Return a folder with the tokenizer of a chat model."""
    shutil.copytree(exported_model(), "of-chat", dirs_exist_ok=True)
    file("of-chat/chat_template.jinja", "{% for each in messages %}<{{ each.content }}>{% endfor %}")
    return "of-chat"


def exported(run_folder, *options):
    """Export a run; return the names of the files."""
    shutil.rmtree("out", ignore_errors=True)
    command("export", run_folder, "out", *options)
    return {path.name for path in Path("out").iterdir()}


def answered(folder, *options):
    """Complete "ab"; return the beginning of the answer."""
    return command("generate", folder, "ab", "--tokens", "2", *options)[:2]


def exported_and_answered(run_folder, *options, ask=()):
    exported(run_folder, *options)
    return answered("out", *ask)


def with_vllm(folder, engine):
    """Complete "ab" where vLLM is installed."""
    vllm = types.ModuleType("vllm")
    vllm.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    with patch.dict(sys.modules, vllm=vllm):
        return answered(folder, "--engine", engine)


def prompted(prompt):
    """Return the tokens of a prompt, of a tokenizer that has no token for the begin or the end of a text."""

    def tokenizer(text, return_tensors):
        ids = torch.tensor([[*text.encode()]], dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    tokenizer.bos_token_id = tokenizer.eos_token_id = None
    return _ids(tokenizer, prompt, chat=False)["input_ids"].tolist()


def published(folder, kind="llama", config=True):
    """Write a published model."""
    Path(folder).mkdir(exist_ok=True)
    if kind == "llama":
        shutil.copytree(exported_model(), folder, dirs_exist_ok=True)
    else:
        save_file({"a": torch.ones(3)}, f"{folder}/model.safetensors")
        file(f"{folder}/config.json", json.dumps({"model_type": kind}))
    if not config:
        Path(folder, "config.json").unlink()
    return folder


def imported(folder, *options, to="imported"):
    """Import a published model; return the step."""
    shutil.rmtree(to, ignore_errors=True)
    command("import", folder, f"{to}/checkpoints", *options)
    return newest(to)


def replicas(**options):
    """Run a recipe of two replicas, which end with 0."""
    path = file("replicas.yaml", TRAIN.replace("mesh: ''\npasses: []", "mesh: dp_replicate=2,dp_shard=1"))
    file("text.txt", TEXT)
    with patch("meshpar.launchers.commands.train.launch_replicas", return_value=0):
        return run(path, [], options, elastic="replicas")


def on_nodes(mesh, nodes):
    return division_of(read(SMALL, f"mesh='{mesh}'", "device=cpu"), {"nodes": str(nodes)}).count


class Numbers:
    """Samples without a vocabulary."""

    def __init__(self, sequence_length: int) -> None:
        self.length = sequence_length

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((self.length,), index), "labels": torch.full((self.length,), index)}


OWN = f"data={{dataset: {{class: {__name__}.Numbers}}, sequence_length: 32, micro_batch: 2}}"


def rows_of(vocabulary, *overrides):
    """Return the rows of the embedding of a recipe's model."""
    model = {} if vocabulary is None else {"vocab_size": vocabulary}
    shape = build.build_shape(read(TRAIN, OWN, *(f"model.{key}={value}" for key, value in model.items()), trust=True))
    return next(shape.parameters()).shape[0]


def tokens():
    """Write a file of tokens."""
    byte_tokenizer().save(Path("of-tokens"))
    write_tokens("t.bin", [[*TEXT.encode(), 256]], vocab_size=257, eos_id=256)
    return "source: tokens, paths: [t.bin], sequence_length: 32, micro_batch: 2"


def tokens_of(count):
    """Return a mixture of two files of tokens, of which the second has so many."""
    tokens()
    write_tokens("short.bin", [[*TEXT.encode()[: count - 1], 256]], vocab_size=257, eos_id=256)
    parts = "{source: tokens, paths: [t.bin]}, {source: tokens, paths: [short.bin]}"
    return f"mix: [{parts}], sequence_length: 32, micro_batch: 2"


def sources(*mixed, steps=2, **texts):
    """Train on a mixture of files; return the newest step."""
    for name, text in texts.items():
        file(f"{name}.txt", text)
    shutil.rmtree("runs", ignore_errors=True)
    given = [f"source: files, paths: [{name}.txt]{more}" for name, more in mixed]
    return trained(mix(*given, sequence_length=32, micro_batch=2, cache="cache"), f"training.steps={steps}")


def anew(*overrides):
    """Train a run from its beginning; return the newest step."""
    shutil.rmtree("runs", ignore_errors=True)
    return trained(*overrides)


def changed(*, restored):
    """Change the text of a run, restore it or not, and continue."""
    file("text.txt", TEXT)
    anew()
    file("text.txt", TEXT + "more\n")
    if restored:
        file("text.txt", TEXT)
    return trained("training.steps=3")


def model_of_a_run():
    """Return an export of the recipe's model."""
    trained("output=source")
    shutil.rmtree("hf", ignore_errors=True)
    command("export", "source", "hf")
    return "hf"


def begun(step, *overrides, to="runs/job"):
    """Import the recipe's model and train from there; return the newest step."""
    shutil.rmtree("runs", ignore_errors=True)
    imported(model_of_a_run(), "--step", step, to=to)
    return trained(*overrides)


def lora_from(folder):
    """Train adapters in a folder with a model alone, or on the weights of a folder."""
    if folder is None:
        imported(base(), "--model", "transformers", to="runs/job")
        return trained(*lora_of(base()), "data.tokenizer=bytes")
    command("export", "runs/job", folder)
    return trained(*lora_of(folder), "data.tokenizer=bytes", "output=other")


def config(fields):
    """Build the model of a config of transformers, which has no problem."""
    sizes = "model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 32, num_attention_heads: 2"
    build.build_shape(read(SMALL, f"model={{kind: huggingface, config: {{{sizes}{fields}}}}}"))
    return []


CLASSES = "data={source: jsonl, paths: [rows.jsonl], label_field: label, tokenizer: bytes}"
BERT = (
    "model={kind: huggingface, config: {model_type: bert, vocab_size: 257, hidden_size: 32, intermediate_size: 32, "
    "num_hidden_layers: 1, num_attention_heads: 2}}"
)


def classified(*overrides):
    file("rows.jsonl", '{"text": "a", "label": "x"}\n' * 40)
    recipe = read(SMALL, "training.objective=sequence_classification", CLASSES, *overrides)
    return check_job(recipe, 2)


def written_to(mode, output="closed/run"):
    """Check a job whose output is below a folder of such a mode, as a user who is not root."""
    Path("closed").mkdir(exist_ok=True)
    Path("closed").chmod(mode)
    with patch("os.access", lambda path, wanted: bool(Path(path).stat().st_mode & 0o200)):
        return check_job(read(SMALL, f"output={output}"), 2)


def recipe_file():
    file("text.txt", TEXT)
    return file("job.yaml", TRAIN)


def measured(run_folder, *options):
    """Export a quantised model; return the first words of its measurement."""
    text = file("held-out.txt", TEXT)
    shutil.rmtree("out", ignore_errors=True)
    printed = command("export", run_folder, "out", "--quantize", "int8", "--measure", text, *options)
    return next(line for line in printed.splitlines() if line.startswith("held-out"))[:13]


def adapters_on(folder):
    """Merge adapters with weights; return whether all weights are there."""
    settings = LoRA(rank=2, targets=("q_proj",))
    shapes = merge_adapters(chosen_step(adapted(), None), settings, place(folder)).shapes()
    return "model.layers.0.self_attn.q_proj.weight" in shapes


ROWS = [
    Row("cannot listen at {}", result=["a"])
    .refuses(lambda: taken(lambda port: joined(f"127.0.0.1:{port}", 0)))
    .helps("give --head a name of this host", lambda: joined(address(), 0)),
    Row("node 0 does not answer at {} within {} s", result=["a"])
    .refuses(lambda: reach_head(address(), 1, 0.1))
    .helps("check that node 0 runs, its host name and its port", lambda: joined(address(), 1, 0)),
    Row("node rank {} is already used by {}", result=["a", "b", "c"])
    .refuses(joined_twice)
    .helps(
        "give each node its own --node-rank",
        lambda: [*joined(address(), 0, 1), *joined(address(), 0, run_ids=("b", "c"))],
    ),
    Tested("another process came as {}")
    .by("tests/jobs/test_meeting.py::test_a_second_process_with_the_number_of_a_node_takes_its_place")
    .helps("give each node its own --node-rank, and start it once", "None not in again.gather()"),
    Row("this is a task of a SLURM step, but {} is missing", result="")
    .refuses(step_of_srun)
    .helps("with torchrun", lambda: step_of_srun(RANK="0", WORLD_SIZE="2")),
    Row("all ports from {} to {} are in use", result=30_303)
    .refuses(lambda: taken(lambda port: ports(port, free_port)))
    .helps("free one of them", lambda: ports(30_303, free_port)),
    Row("so it is not started again", result=True)
    .refuses(lambda: started("7", 0, 1, 2))
    .helps("correct the first error in their logs, then submit", lambda: started("8", 0)),
    Row("memory is full; use a smaller data.micro_batch", result=[True, True])
    .refuses(failed_of_memory)
    .helps(
        "use a smaller data.micro_batch with more data.accumulate",
        lambda: [peak(1) < peak(2) and found_batch(peak(1), whole=2) == 1, peak(1, RECOMPUTED) < peak(1)],
    )
    .helps("more shards; meshpar plan RECIPE lists", lambda: [peak(1, SHARDS) < peak(1), True]),
    Row("not even a micro-batch of 1 fits", result=[1, 1])
    .refuses(lambda: found_batch(peak(1) - 1))
    .helps(
        "shard more (mesh), recompute (ActivationCheckpoint)",
        lambda: [found_batch(peak(1) - 1, SHARDS), found_batch(peak(1) - 1, RECOMPUTED)],
    )
    .helps("shorten the sequence", lambda: [found_batch(peak(1) - 1, SHORTER), 1]),
    Row("--top-p and --seed are for sampling", result="ab")
    .refuses(lambda: answered(exported_model(), "--seed", "1"))
    .helps("also pass --temperature", lambda: answered(exported_model(), "--seed", "1", "--temperature", "0.8")),
    Row("as transformers saves it: correct --config", result=0)
    .refuses(lambda: imported(published("hf", config=False), "--config", "hf"))
    .helps("correct --config", lambda: imported(published("hf", config=False), "--config", published("other"))),
    Row("{} has no config.json that names a model_type", result=0)
    .refuses(lambda: imported(published("hf", config=False)))
    .helps("pass --config FOLDER", lambda: imported(published("hf", config=False), "--config", published("other"))),
    Row("{} has a model of type {}; ours are", result=0)
    .refuses(lambda: imported(published("hf", "falcon")))
    .helps("pass --model transformers", lambda: imported(published("hf", "falcon"), "--model", "transformers")),
    Row("--every chooses steps of --watch", result={"step-00000001"})
    .refuses(lambda: exported(plain(), "--every", "1"))
    .helps(
        "pass --watch, and either --every or --best",
        lambda: {*exported(plain(), "--watch", "--every", "1"), *exported(plain(), "--watch", "--best", "val/loss")},
    ),
    Tested("--watch, --push and --measure work on a disk; export without them")
    .by("tests/jobs/test_object_store.py::test_a_recipe_trains_resumes_and_exports_from_urls_alone_as_on_a_disk")
    .helps("export without them", 'export_run(run, f"{bucket}/hf")'),
    Row("{} has no tokenizer; a run on token ids has none", result="ab")
    .refuses(lambda: exported_and_answered(without_tokenizer()))
    .helps("export it with --config DIR", lambda: exported_and_answered("tokens", "--config", exported_model())),
    Row("{} has no config.json; for adapters and GGUF files", result=["ab", "ab"])
    .refuses(lambda: with_vllm(exported_adapters(), "vllm"))
    .helps(
        "for adapters and GGUF files use --engine transformers",
        lambda: [
            with_vllm(exported_adapters(), "transformers"),
            exported_and_answered(adapted(), "--quantize", "q8_0", ask=("--engine", "transformers")),
        ],
    ),
    Row("the tokenizer has no chat template", result=True)
    .refuses(lambda: answered(exported_model(), "--chat"))
    .helps("leave out --chat", lambda: answered(exported_model()) == "ab")
    .helps(
        "export with the tokenizer of a chat model",
        lambda: bool(exported_and_answered(plain(), "--config", of_chat(), ask=("--chat",))),
    ),
    Row("the prompt is empty, and the tokenizer has no token", result=[[97]])
    .refuses(lambda: prompted(""))
    .helps("give a prompt", lambda: prompted("a")),
    Tested("this is already one of {} ranks that torchrun or srun started")
    .by("tests/jobs/test_run.py::test_options_that_start_ranks_are_refused_in_a_rank")
    .helps(
        "leave {} out; to start ranks from one process on each node",
        '"--nproc", "2", "--nodes", "1", "--node-rank", "0", "--head", head, "job.py"',
    ),
    Tested("--search trains a whole model on packed text with AdamW")
    .by("tests/forecasting/test_planned.py::test_a_recipe_that_no_search_is_for_is_forecast_without")
    .helps("forecast this recipe's plans one by one, without --search", "plan_command(tmp_path, *own)\n"),
    Tested("--search, --elastic and --trust are for recipes")
    .by("tests/integrations/test_preview.py::test_what_a_preview_cannot_do_is_refused")
    .helps("drop them", "plan(script).exit_code == 0")
    .helps("drop --script", 'app, ["plan"]'),
    Tested("give a recipe, a shape's name, or --script train.py")
    .by("tests/integrations/test_preview.py::test_what_a_preview_cannot_do_is_refused")
    .helps("give a recipe, a shape's name", 'app, ["plan"]')
    .helps("--script train.py", "plan(script).exit_code == 0"),
    Tested("is no file; pass the script that you train with")
    .by("tests/integrations/test_preview.py::test_a_script_that_puts_no_model_on_a_mesh_is_told_so")
    .helps("pass the script that you train with: --script train.py", "seen(written(tmp_path, LOOP), node=2)"),
    Tested("and put no model on a mesh")
    .by("tests/integrations/test_preview.py::test_a_script_that_puts_no_model_on_a_mesh_is_told_so")
    .helps("pass the arguments with which the script trains after --", 'seen(script, "train", node=2)'),
    Tested("the script defines the model's classes")
    .by("tests/integrations/test_preview.py::test_what_a_preview_cannot_do_is_refused")
    .helps("move them to a module that it imports", "Sequential as Own"),
    Tested("no setting fits {} x {}; nearest: ")
    .by("tests/forecasting/test_planned.py::test_where_no_setting_fits_more_nodes_do")
    .helps("use more nodes", '"--search", "--nodes", "4"'),
    Row("there is no file {}; give the path of a script")
    .refuses(lambda: launched("absent.py"))
    .helps(
        "give the path of a script, -m MODULE",
        lambda: launched("train.py"),
        lambda: launched("http.server", module=True),
    )
    .helps("a recipe", lambda: launched(file("r.yaml", SMALL))),
    Row("--elastic=replicas does not support {}", result=0)
    .refuses(lambda: replicas(run_id="x", rejoin_s=3))
    .helps("leave out such options", replicas),
    Row("the mesh {} has {} ranks, which {} nodes cannot share evenly", result=[3, 2])
    .refuses(lambda: on_nodes("dp_replicate=2,dp_shard=1", 3))
    .helps(
        "change the mesh or --nodes",
        lambda: [on_nodes("dp_replicate=3,dp_shard=1", 3), on_nodes("dp_replicate=2,dp_shard=1", 2)],
    ),
    Tested("the export is complete: push it again")
    .by("tests/jobs/test_publish.py::test_a_push_that_is_refused_keeps_the_export_and_says_why")
    .helps("push it again with `hf upload {} {}`", '["upload", "me/tiny", str(tmp_path / "hf")]'),
    Row("--measure needs a tokenizer to read the text", result="held-out loss")
    .refuses(lambda: measured(without_tokenizer()))
    .helps("pass --config DIR, a folder with config.json", lambda: measured("tokens", "--config", exported_model())),
    Row("the weights have no {}, to which an adapter belongs", result=True)
    .refuses(lambda: adapters_on(published("other", "falcon")))
    .helps("give the folder of the adapted weights", lambda: adapters_on(base())),
    Row("{} has no adapters; export it with `meshpar export`", result=True)
    .refuses(lambda: export_adapters(chosen_step(plain(), None), place("alone"), LoRA(), place(base())))
    .helps("export it with `meshpar export`", lambda: "model.safetensors" in exported(plain())),
    Row("a run that trained adapters (lora) has no averages", result=True)
    .refuses(lambda: exported(adapted(), "--weights", "ema"))
    .helps("drop --weights {}", lambda: "model.safetensors" in exported(adapted())),
    Row("merged adapters keep the names of the weights below them", result=True)
    .refuses(lambda: exported(adapted(), "--layout", "own"))
    .helps("drop --layout", lambda: "model.safetensors" in exported(adapted())),
    Row("--dtype {} does not fit --quantize {}", result=1)
    .refuses(lambda: exported(plain(), "--dtype", "bfloat16", "--quantize", "q8_0"))
    .helps("drop --dtype", lambda: len(exported(plain(), "--quantize", "q8_0"))),
    Row("--adapters: {} is not a run that trained adapters", result=True)
    .refuses(lambda: exported(plain(), "--adapters"))
    .helps("drop --adapters", lambda: "model.safetensors" in exported(plain())),
    Row("adapters are written as saved", result=True)
    .refuses(lambda: exported(adapted(), "--adapters", "--dtype", "bfloat16"))
    .helps(
        "drop --dtype, --quantize, --layout and --config",
        lambda: "adapter_model.safetensors" in exported(adapted(), "--adapters"),
    )
    .helps("drop --adapters", lambda: "model.safetensors" in exported(adapted(), "--dtype", "bfloat16")),
    Row("model: {} predicts the next token")
    .refuses(classified)
    .helps("for the objective {} write kind: huggingface", lambda: classified(BERT)),
    Row("the run has no tokenizer; name one with data.tokenizer", result=2)
    .refuses(lambda: anew(f"data={{{tokens()}}}", "evaluations.samples.prompts=[once]", "training.validate_every=2"))
    .helps(
        "name one with data.tokenizer",
        lambda: anew(
            f"data={{{tokens()}, tokenizer: of-tokens}}",
            "evaluations.samples.prompts=[once]",
            "training.validate_every=2",
        ),
    ),
    Tested("train and export the teacher first")
    .by("tests/jobs/test_jobs.py::test_a_student_learns_from_a_frozen_teacher_both_sharded")
    .helps("train and export the teacher first", 'folder = export_run(teacher.folder, teacher.folder / "export")'),
    Row("{} is not writable")
    .refuses(lambda: written_to(0o500))
    .helps("correct its mode", lambda: written_to(0o700))
    .helps("choose another folder", lambda: written_to(0o500, output="open/run")),
    Row("{} has no vocab_size, and the model takes its vocabulary from the data", result=64)
    .refuses(lambda: rows_of(None))
    .helps("write model.vocab_size", lambda: rows_of(64)),
    Row("{}: {} has no sample", result=2)
    .refuses(lambda: anew(f"data={{{tokens_of(1)}}}"))
    .helps("give it more text", lambda: anew(f"data={{{tokens_of(400)}}}")),
    Row("the epochs of the sources in data.mix give {} steps", result=40)
    .refuses(lambda: sources(("text", ", epochs: 1"), steps=40, text=TEXT))
    .helps("lower it", lambda: sources(("text", ", epochs: 1"), steps=20) + 20)
    .helps("raise their epochs", lambda: sources(("text", ", epochs: 2"), steps=40)),
    Row("checkpoint.resume is never, but {} holds step {}", result=[2, 2])
    .refuses(lambda: anew() and trained("checkpoint.resume=never"))
    .helps(
        "choose another output, delete it",
        lambda: [
            trained("checkpoint.resume=never", "output=other"),
            shutil.rmtree("runs/job/checkpoints") or trained("checkpoint.resume=never"),
        ],
    )
    .helps("set resume: auto", lambda: [anew(), trained("checkpoint.resume=auto", "training.steps=3") - 1]),
    Row("{}: the checkpoint {} was saved with other data", result=3)
    .refuses(lambda: changed(restored=False))
    .helps("restore the files and settings that changed", lambda: changed(restored=True)),
    Tested("to keep it, set data.micro_batch={} data.accumulate={}")
    .by("tests/jobs/test_main_job.py::test_a_resume_with_other_data_or_another_batch_says_so")
    .helps("to keep it, set data.micro_batch={} data.accumulate={}", '"data.micro_batch=2", "data.accumulate=4"'),
    Row("{} contains a model without adapters", result=2)
    .refuses(lambda: lora_from(None))
    .helps("export it (`meshpar export`) and set model.weights", lambda: lora_from("hf")),
    Row("{} contains only a model, so the run would begin at step 0", result=2)
    .refuses(lambda: begun(7))
    .helps("import it as step 0", lambda: begun(0))
    .helps("into another folder and set checkpoint.resume", lambda: begun(7, "checkpoint.resume=other", to="other")),
    Row("checkpoint.resume: {} holds no committed step", result=[2, 3, 4])
    .refuses(lambda: anew("checkpoint.resume=.", "output=runs/elsewhere"))
    .helps(
        "give a step's folder or a run's folder",
        lambda: [
            trained("output=first"),
            trained("checkpoint.resume=first", "training.steps=3", "output=runs/a"),
            trained("checkpoint.resume=first/checkpoints/step-00000002", "training.steps=4", "output=runs/b"),
        ],
    ),
    Row("are done already, after step {}", result=3)
    .refuses(lambda: anew() and training_output())
    .helps("raise training.{} to continue", lambda: trained("training.steps=3")),
    Row("config: transformers has no such field of {}")
    .refuses(lambda: config(", num_layerz: 3"))
    .helps("correct its name", lambda: config(", num_hidden_layers: 3"))
    .helps("leave it out", lambda: config("")),
    Tested("the script has no handler for it")
    .by("tests/jobs/test_run.py::test_a_script_that_does_not_listen_is_no_job_that_stopped_in_time")
    .helps("set one by signal.signal(signal.SIGUSR1, ...)", "signal.signal(signal.SIGUSR1, save)"),
]


test_the_printed_remedy_helps = in_one_process(ROWS)
