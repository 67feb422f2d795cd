"""Rows of the exports of `checkpoints`: see `tests/remedies/rows.py`."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

import meshpar
from meshpar import FullyShard, PipelineParallel, Plan
from meshpar.checkpoints import CheckpointManager, Safetensors, export_gguf, export_safetensors
from meshpar.launchers.cli import app
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.testing import on_ranks
from meshpar.training import LoRA, add_adapters
from tests.checkpoints.test_commit import Job, linear
from tests.remedies.rows import Row, Tested, in_one_process, run_together

pytest.importorskip("transformers")
pytest.importorskip("gguf")

LLAMA = TransformerConfig(vocab_size=96, dim=64, layers=1, heads=4, hidden=96)
SMALL_GPT2 = GPT2Config(vocab_size=96, n_positions=32, n_embd=64, n_layer=1, n_head=4)
OWN = {"model_type": "own"}
HEAD = "lm_head.weight"


def llama(**sizes):
    return Transformer(replace(LLAMA, **sizes))


def plain(module, **changes):
    """Export a model without a plan, and return the folder, with changes to its config."""
    folder = Path("plain")
    if not folder.exists():
        with meshpar.distributed("cpu"):
            CheckpointManager("run").save(1, Plan("", []).apply(module))
        export_safetensors("run", folder)
    return folder, json.loads((folder / "config.json").read_text()) | changes


def gguf(module, kind="q8_0", *, spoil=None, **changes):
    """Export a model as GGUF; return the names of what was written."""
    folder, config = plain(module, **changes)
    if spoil is not None:
        spoiled(folder, *spoil)
    shutil.rmtree("gguf", ignore_errors=True)
    made = export_gguf(Safetensors(folder), "gguf", kind, config=config)
    return [path.name for path in made.iterdir()]


def spoiled(folder, name, value):
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] = value
    save_file(tensors, folder / "model.safetensors")


def as_it_was(module, **changes):
    """Export a model as plain safetensors; return whether all is there that llama.cpp's converter reads."""
    folder, config = plain(module, **changes)
    export_safetensors(Safetensors(folder), "hf", config=config)
    found, want = load_file("hf/model.safetensors"), load_file(folder / "model.safetensors")
    same = found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)
    return same and json.loads(Path("hf/config.json").read_text())["model_type"] == config["model_type"]


def quantized(how="fp8", *, config=OWN, high=(), dtype=None, **weights):
    """Export weights, quantised unless ``how`` is None; return the names of those that were quantised."""
    Path("given").mkdir(exist_ok=True)
    save_file({f"{name}.weight": value for name, value in weights.items()}, "given/model.safetensors")
    shutil.rmtree("hf", ignore_errors=True)
    export_safetensors(Safetensors("given"), "hf", dtype, config=config, quantize=how, high=high)
    stored = Safetensors("hf").dtypes()
    return [name for name in weights if stored.get(f"{name}.weight") != torch.float32]


def command(*options, source="run"):
    """Export by the command line; return its error, or nothing."""
    done = CliRunner().invoke(app, ["export", str(source), "hf", *options])
    return [] if done.exit_code == 0 else [f"{done.output}{done.stderr}"]


def exported(step=2, *, spoil=None, high=()):
    """Export one of two steps, of which the second is not finite, quantised."""
    with meshpar.distributed("cpu"):
        for number in (1, 2):
            module = nn.ModuleDict({"up": nn.Linear(8, 8, bias=False), "down": nn.Linear(8, 8, bias=False)})
            if number == 2:
                nn.init.constant_(module["up"].weight, torch.nan)
            CheckpointManager("run").save(number, Plan("", []).apply(module), replace=True)
    shutil.rmtree("hf", ignore_errors=True)
    export_safetensors(f"run/step-{step:08d}", "hf", config=OWN, quantize="fp8", high=high)
    return Safetensors("hf").dtypes()["down.weight"]


def conv1d(**options):
    """Export GPT-2, quantised or not."""
    with meshpar.distributed("cpu"):
        CheckpointManager("run").save(1, Plan("", []).apply(GPT2(SMALL_GPT2)), replace=True)
    return command(*(word for name, value in options.items() for word in (f"--{name}", value)))


def written(kind, **options):
    """Save a tensor, and export it."""
    module = nn.Module()
    module.register_buffer("odd", torch.ones(4).to(kind))
    CheckpointManager("run").save(1, Job(module), replace=True)
    shutil.rmtree("hf", ignore_errors=True)
    export_safetensors("run", "hf", **options)
    return load_file("hf/model.safetensors")["odd"]


def occupied(target="hf", *, clear=False):
    """Export where a folder has files."""
    CheckpointManager("run").save(1, linear(), replace=True)
    Path("hf").mkdir(exist_ok=True)
    Path("hf/mine").write_text("work")
    if clear:
        shutil.rmtree(target)
    export_safetensors("run", target)
    return sorted(path.name for path in Path(target).iterdir())


def streamed(change):
    """Stream a model's weights, and change them; return what the next stream yields."""
    with meshpar.distributed("cpu"):
        par = Plan("", []).apply(nn.Linear(2, 2))
        change(par, lambda: nn.init.ones_(par.module.bias))
        return dict(par.published())["bias"]


def while_streamed(par, write):
    for _ in par.published():
        write()


def after_the_stream(par, write):
    list(par.published())
    write()


def with_adapters(seed=0):
    torch.manual_seed(seed)
    model = llama(layers=2)
    layout = add_adapters(model, LoRA(rank=2, targets=("up",)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model, layout


def adapted(mesh="", seed=0):
    """Apply a plan to a model with adapters."""
    passes = {"": [], "pp=2": [PipelineParallel()], "dp_shard=2": [FullyShard()]}
    return Plan(mesh, passes[mesh]).apply(*with_adapters(seed))


def merged(par=None):
    """Return an adapted weight with its adapters: of a stream, or as peft has it."""
    if par is None:
        layer = with_adapters()[0].layers[1].mlp.up
        return layer.base_layer.weight + layer.get_delta_weight("default")
    streams = [dict(par.published(to=rank)) for rank in range(dist.get_world_size())]
    return streams[dist.get_rank()]["model.layers.1.mlp.up_proj.weight"]


def saved_and_restored(mesh, other):
    """Save adapters, and restore them on another mesh."""
    CheckpointManager("run").save(1, adapted(mesh), replace=True)
    par = adapted(other, seed=1)
    CheckpointManager("run").restore(par)
    return par


def written_from_a_stream():
    with meshpar.distributed("cpu"):
        save_file({name: tensor.clone() for name, tensor in saved_and_restored("", "").published()}, "hf.safetensors")
    return load_file("hf.safetensors")["model.layers.1.mlp.up_proj.weight"]


def adapters_exported():
    with meshpar.distributed("cpu"):
        CheckpointManager("run").save(1, adapted())
    export_safetensors("run", "hf")


ROWS = [
    Tested("already exists and is not empty")
    .by("tests/checkpoints/test_export.py::test_an_existing_folder_is_kept_unless_told_otherwise")
    .helps("replace it (--overwrite, in Python overwrite=True)", "overwrite=True"),
    Row("already exists and is not empty; delete it", result=["model.safetensors", "model.safetensors"])
    .refuses(occupied)
    .helps(
        "delete it, choose another folder",
        lambda: [
            name
            for names in (occupied(clear=True), occupied("other"))
            for name in names
            if name == "mine" or "safetensors" in name
        ],
    ),
    Tested("an export cannot replace {}; choose a folder inside it")
    .by("tests/checkpoints/test_export.py::test_the_folder_one_stands_in_is_replaced_and_a_link_is_followed")
    .helps("choose a folder inside it", 'export_safetensors(runs / "qwen3", tmp_path / "link", overwrite=True)'),
    Tested("choose a folder beside it")
    .by("tests/checkpoints/test_identity.py::test_an_export_does_not_replace_what_it_reads")
    .helps("choose a folder beside it", 'export_safetensors(run / "checkpoints", run / "hf", overwrite=True)'),
    Tested("another export to {} is running")
    .by("tests/checkpoints/test_export.py::test_a_second_export_to_one_target_is_told_who_writes_it")
    .helps("wait for it", 'other.communicate(b"\\n")')
    .helps("end it", "other.kill()"),
    Row("has adapters ({}, ...), and a step does not have the scale", result=merged)
    .refuses(adapters_exported)
    .helps("write the tensors that par.published() yields", written_from_a_stream),
    # GGUF
    Row("for others, export plain safetensors and run llama.cpp's convert_hf_to_gguf.py", result=True)
    .refuses(lambda: gguf(llama(), model_type="falcon"))
    .helps("for others, export plain safetensors and run", lambda: as_it_was(llama(), model_type="falcon")),
    Row("{}: blocks of {} do not divide the rows of {} weights", result=["model-f16.gguf"])
    .refuses(lambda: gguf(llama(hidden=72)))
    .helps("choose f16", lambda: gguf(llama(hidden=72), "f16")),
    Row("{} has values that float16 cannot hold", result=1e6)
    .refuses(lambda: gguf(llama(), spoil=(HEAD, 1e6)))
    .helps("export it by transformers' formats, such as fp8", lambda: fp8_of_the_same()),
    # Quantised weights
    Row("{}.weight has values that are infinite, NaN or too large for a scale", result=torch.float8_e4m3fn)
    .refuses(exported)
    .helps("export an earlier step", lambda: exported(1))
    .helps("keep this weight high", lambda: exported(high=["up"])),
    Row("{} weights do not divide into blocks of {} x {}", result=[["down"], ["down"]])
    .refuses(lambda: quantized("int4", up=torch.ones(8, 100), down=torch.ones(8, 128)))
    .helps(
        "keep them high (--keep-high, in Python high=[...])",
        lambda: [
            quantized("int4", high=["up"], up=torch.ones(8, 100), down=torch.ones(8, 128)),
            quantized("fp8-block", high=["up"], up=torch.ones(100, 128), down=torch.ones(128, 128)),
        ],
    )
    .helps(
        "choose a format with one scale a row (fp8, int8)",
        lambda: [quantized("fp8", down=torch.ones(8, 100)), quantized("int8", down=torch.ones(8, 100))],
    ),
    Row("a quantised model needs a config.json", result=["up"])
    .refuses(lambda: quantized(config=None, up=torch.ones(8, 8)))
    .helps("pass one (--config DIR)", lambda: quantized(config=OWN, up=torch.ones(8, 8))),
    Row("transformers' Conv1D, which compressed-tensors does not load")
    .refuses(lambda: conv1d(quantize="fp8"))
    .helps("export it plain", lambda: conv1d(), lambda: load_failures("hf"))
    .helps("as GGUF (--quantize q8_0)", lambda: cleared("hf"), lambda: conv1d(quantize="q8_0")),
    Row("dtype is {}; expected a floating-point dtype of 16 bits or more", result=["up"])
    .refuses(lambda: quantized(None, dtype=torch.float8_e4m3fn, up=torch.ones(8, 8)))
    .helps("quantize them (--quantize fp8, in Python quantize", lambda: quantized("fp8", up=torch.ones(8, 8))),
    Row("high names weights that are not quantised", result=["down"])
    .refuses(lambda: quantized(None, high=["up"], up=torch.ones(8, 8), down=torch.ones(8, 8)))
    .helps("pass quantize as well", lambda: quantized("fp8", high=["up"], up=torch.ones(8, 8), down=torch.ones(8, 8))),
    Row("export with dtype=torch.bfloat16 (--dtype bfloat16)", result=torch.ones(4, dtype=torch.bfloat16))
    .refuses(lambda: written(torch.float8_e4m3fnuz))
    .helps("export with dtype=torch.bfloat16", lambda: written(torch.float8_e4m3fnuz, dtype=torch.bfloat16)),
    Row("convert it in the module, such as to torch.complex64", result=torch.ones(4, dtype=torch.complex64))
    .refuses(lambda: written(torch.complex128))
    .helps("convert it in the module, such as to torch.complex64", lambda: written(torch.complex64)),
    # Streams
    Row("{} tensors were changed while they were streamed", result=torch.ones(2))
    .refuses(lambda: streamed(while_streamed))
    .helps("drop it, and change weights after the stream has ended", lambda: streamed(after_the_stream)),
    Row("the module has adapters, and pp divides its layers", result=merged, ranks=2)
    .refuses(lambda: adapted("pp=2").published())
    .helps("save a step and restore it on a mesh without pp", lambda: merged(saved_and_restored("pp=2", "dp_shard=2")))
    .helps("train adapters on a mesh without pp", lambda: merged(adapted("dp_shard=2"))),
]


def fp8_of_the_same():
    folder, config = plain(llama())
    export_safetensors(Safetensors(folder), "hf", config=config, quantize="fp8")
    return float(load_file("hf/model.safetensors")[HEAD][0, 0])


def cleared(folder):
    shutil.rmtree(folder)
    return []


def load_failures(folder):
    import transformers

    _, problems = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    return [problem for found in problems.values() for problem in found]


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks(tmp_path):
    run_together(ROWS, 2, tmp_path)
