"""Published programs with loops of their own and meshpar's verbs in them equal themselves in one process.

Each program is pinned by its commit, and the files of its diff by their digests. It lies below ``MESHPAR_PROGRAMS``
(``OWNER/NAME``), or is downloaded; without either its test is skipped. Packages that it imports may lie there, too.
"""

import contextlib
import dataclasses
import functools
import gc
import importlib.machinery
import io
import json
import os
import pickle
import random
import re
import runpy
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from meshpar import MeshSpec
from meshpar.testing import RankFailure, launch, whole
from tests.integrations.programs.assets import WORDS, sentences
from tests.integrations.programs.ports import Port, read_table
from tests.nightly.strangers import vision_operators
from tests.support.trainers import data_ranks, prepare_process


def fetch(self: _MapDatasetFetcher, indices: list[int]) -> object:
    """Read samples whose augmentation depends on their index alone, not on the rank that reads them."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    samples = []
    for index in indices:
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        samples.append(self.dataset[index])
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    return self.collate_fn(samples)


def iterate(self: RandomSampler) -> Iterator[int]:
    """Shuffle in one process as DistributedSampler does on several."""
    sampler = DistributedSampler(self.data_source, 1, 0)
    sampler.set_epoch(int(os.environ["EPOCH"]))
    os.environ["EPOCH"] = str(sampler.epoch + 1)
    return iter(sampler)


@contextlib.contextmanager
def without_accelerator() -> Iterator[None]:
    """Let programs that ask for a GPU, a process group, child processes, a compiler or the internet do without."""
    parallel, tensor, load = nn.parallel.DistributedDataParallel, torch.tensor, DataLoader.__init__

    def on_host(*values: object, device: object = None, **options: object) -> torch.Tensor:
        return tensor(*values, device=None if device == "cuda" else device, **options)

    def compile_nothing(function: object = None, **_: object) -> object:
        return function if function is not None else lambda decorated: decorated

    def load_here(*values: object, num_workers: int = 0, persistent_workers: bool = False, **options: object) -> None:
        load(*values, **options)

    with (
        mock.patch.object(torch, "compile", compile_nothing),
        mock.patch.object(DataLoader, "__init__", load_here),
        mock.patch.object(torch.Tensor, "cuda", lambda self, **_: self),
        mock.patch.object(nn.Module, "cuda", lambda self: self),
        mock.patch.object(torch, "tensor", on_host),
        mock.patch.multiple(torch.cuda, set_device=mock.DEFAULT, synchronize=mock.DEFAULT),
        mock.patch.object(nn.parallel, "DistributedDataParallel", lambda module, **_: parallel(module)),
        mock.patch.object(torch.hub, "list", lambda _: []),
        # the group is the test's
        mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT),
    ):
        yield


def name_parameters(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Return what an optimizer trains, by the names of the innermost module that has all of it."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    modules = [value for value in gc.get_objects() if isinstance(value, nn.Module)]
    around = [module for module in modules if trained <= set(module.parameters())]
    innermost = min(around, key=lambda module: len(list(module.modules())))
    return {name: parameter for name, parameter in innermost.named_parameters() if parameter in trained}


def run(port: Port, arguments: list[str], folder: Path, result: Path, launched: bool, epoch: int) -> None:
    """Run a program in this rank; write its losses, what it printed of them, and its weights."""
    os.chdir(folder)
    os.environ |= {
        "EPOCH": str(epoch), "NANOCHAT_BASE_DIR": str(folder / "base"),
        # some programs store more than weights in what they load again
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    }  # fmt: skip
    sys.modules |= {name: types.ModuleType(name) for name in port.stubs}
    script = port.script
    sys.argv = [script, *arguments]
    sys.path[:0] = map(str, ((folder / script).parent, folder, folder / "src"))
    sys.path.append(os.environ.get("MESHPAR_PROGRAMS", ""))
    vision_operators.declared()
    if launched:
        prepare_process()
    torch.manual_seed(0)  # some programs take no seed
    losses: list[torch.Tensor] = []
    trained: dict[str, nn.Parameter] = {}
    backward, adamw, printed = torch.Tensor.backward, torch.optim.AdamW, io.StringIO()

    def note_loss(loss: torch.Tensor, *options: object, **named: object) -> None:
        losses.append(loss.detach().clone())
        backward(loss, *options, **named)

    register_optimizer_step_post_hook(lambda optimizer, *_: trained or trained.update(name_parameters(optimizer)))
    with (
        mock.patch.object(torch.Tensor, "backward", note_loss),
        mock.patch.object(_MapDatasetFetcher, "fetch", fetch),
        mock.patch.object(RandomSampler, "__iter__", iterate),
        mock.patch.object(adamw, "__init__", functools.partialmethod(adamw.__init__, eps=port.adamw_eps)),
        without_accelerator(),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(script, run_name="__main__")
    weights = {name: whole(parameter.detach()).clone() for name, parameter in trained.items()}
    of_all = torch.stack(losses)
    dist.all_reduce(of_all)
    if dist.get_rank() == 0:
        numbers = re.findall(r"(\d+: .*loss|Validation bpb:) ([\d.]+)", printed.getvalue())
        torch.save({"losses": of_all / dist.get_world_size(), "printed": numbers, "weights": weights}, result)


def run_on_ranks(port: Port, folder: Path, out: Path, mesh: str | None, resume: bool):
    """Run a program on the ranks of a mesh, without one as published in one process; return what it found."""
    text, count, continued = port.arguments, 1, port.resume
    if mesh is not None:
        text += " " + port.on_mesh.replace("MESHFILE", mesh.replace("=", "")).replace("MESH", mesh)
        count, continued = data_ranks(mesh), port.resume_on_mesh or port.resume
    text = f"{text} {continued if resume else ''}".replace("OUT", str(out)).replace("BATCH", str(port.batch // count))
    result, ranks = folder.parent / "result.pt", 1 if mesh is None else MeshSpec(mesh).size
    launched = mesh is not None or port.launched
    call = (port, text.split(), folder, result, launched, port.resumes_at if resume else 0)
    launch(__name__, "run", ranks, call, timeout_s=280, fresh="a program's modules")
    metrics = [file.read_text() for file in sorted(out.glob(port.metrics))] if port.metrics else []
    assert bool(metrics) == bool(port.metrics)
    found = torch.load(result)
    for name in port.without_effect:
        del found["weights"][name]
    return found | {"metrics": [float(number) for text in metrics for number in NUMBER.findall(text)]}


NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def compare(found, expected):
    """Compare losses and metrics to 1e-5, printed losses to their last digit, weights to 1e-4 of the largest."""
    torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-5, atol=1e-5)
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-5)
    assert [name for name, _ in found["printed"]] == [name for name, _ in expected["printed"]]
    for (name, number), (_, other) in zip(found["printed"], expected["printed"], strict=True):
        assert float(number) == pytest.approx(float(other), abs=1.1 * 10.0 ** -len(number.partition(".")[2])), name
    assert found["weights"].keys() == expected["weights"].keys()
    apart = {name: float((found["weights"][name] - other).abs().max()) for name, other in expected["weights"].items()}
    largest = {name: max(1.0, float(other.abs().max())) for name, other in expected["weights"].items()}
    assert {name: part for name, part in apart.items() if part > 1e-4 * largest[name]} == {}


def write_tokens(folder: Path) -> None:
    """Write nanoGPT's data."""
    draw, data = np.random.default_rng(0), folder / "data/tiny"
    data.mkdir(parents=True)
    for split in ("train", "val"):
        draw.integers(64, size=1000, dtype=np.uint16).tofile(data / f"{split}.bin")
    for mesh in ("", *NANOGPT.meshes):
        (folder / f"config/{mesh.replace('=', '')}.py").write_text(f"mesh = '{mesh}'\n")


class Words:
    """The part of tiktoken's Encoding that nanochat uses: a word is a token."""

    n_vocab = 64

    def encode_single_token(self, text: str) -> int:
        return self.n_vocab - 1 if text == "<|bos|>" else WORDS.index(text)

    def encode_ordinary_batch(self, texts: list[str], num_threads: int) -> list[list[int]]:
        return [list(map(self.encode_single_token, text.split())) for text in texts]


def write_documents(folder: Path) -> None:
    """Write nanochat's data and tokenizer; each rank packs documents of its own, so each fills a row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    base, draw = folder / "base", torch.Generator().manual_seed(0)
    for name in ("tokenizer", "base_data_climbmix"):
        (base / name).mkdir(parents=True)
    for number in range(2):
        words = torch.randint(len(WORDS), (8, 16), generator=draw).tolist()
        table = pa.table({"text": [" ".join(WORDS[word] for word in row) for row in words]})
        pq.write_table(table, base / f"base_data_climbmix/shard_{number:05}.parquet", row_group_size=2)
    (base / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(Words()))
    torch.save(torch.full((Words.n_vocab,), 4), base / "tokenizer/token_bytes.pt")


def write_images(folder: Path, count: int, size: int = 32) -> None:
    """Write images that differ, in two classes."""
    from PIL import Image

    draw = torch.Generator().manual_seed(0)
    for number in range(count):
        pixels = torch.randint(0, 256, (size, size, 3), generator=draw, dtype=torch.uint8)
        pixels[..., number % 2] //= 2
        file = folder / f"class{number % 2}/{number:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.numpy()).save(file)


def write_classes(folder: Path) -> None:
    """Write images to train and to validate."""
    write_images(folder / "images/train", 40)
    write_images(folder / "images/validation", 20)


def write_captions(folder: Path) -> None:
    """Write open_clip's data, and the sizes of a small model."""
    write_images(folder / "images", 80)
    files = sorted(folder.glob("images/*/*.png"), key=lambda file: file.name)
    lines = [f"{file}\t{text}\n" for file, text in zip(files, sentences(len(files), 3), strict=True)]
    for name, part in (("train", lines), ("val", lines[:4])):
        (folder / f"{name}.csv").write_text("".join(["filepath\ttitle\n", *part]))
    tower = {"width": 32, "layers": 2}
    vision, text = (
        tower | {"image_size": 32, "patch_size": 8, "head_width": 16},
        tower | {"context_length": 16, "heads": 2},
    )
    sizes = {"embed_dim": 16, "vision_cfg": vision, "text_cfg": text | {"vocab_size": 49408}}
    (folder / "src/open_clip/model_configs/tiny.json").write_text(json.dumps(sizes))


NANOGPT = Port(
    heading="nanoGPT",
    source=("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291"),
    prepare=write_tokens,
    script="train.py",
    arguments="--device=cpu --compile=False --dtype=float32 --dataset=tiny --n_layer=2 --n_head=2 --n_embd=32 "
    "--block_size=16 --batch_size=8 --gradient_accumulation_steps=2 --eval_iters=2 --eval_interval=5 --warmup_iters=2 "
    "--lr_decay_iters=10 --learning_rate=0.01 --max_iters=9 --out_dir=OUT",
    on_mesh="config/MESHFILE.py",
    resume="--init_from=resume --max_iters=7",
    meshes=("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2"),
)
OPEN_CLIP = Port(
    heading="open_clip",
    source=("mlfoundations/open_clip", "30573618fc375b12f094ef64cb3a1391cf611c45"),
    packages=("torchvision", "webdataset", "pandas", "ftfy"),
    prepare=write_captions,
    script="src/open_clip_train/main.py",
    arguments="--model tiny --device cpu --precision fp32 --workers 0 --train-data train.csv --val-data val.csv --name run "
    "--logs OUT --batch-size BATCH --epochs 1 --warmup 2 --lr 0.01 --eps 0.001 --grad-clip-norm 1 "
    "--aug-cfg scale=(1.0,1.0) ratio=(1.0,1.0)",
    on_mesh="--mesh=MESH",
    resume="--resume latest --epochs 2 --accum-freq 2",
    resumes_at=1,
    metrics="run/checkpoints/results.jsonl",
    meshes=("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2"),
)
TIMM = Port(
    heading="timm",
    source=("huggingface/pytorch-image-models", "aa4b5850c1543fa488abf260f18390eda46cf85d"),
    packages=("torchvision",),
    prepare=write_classes,
    script="train.py",
    arguments="--data-dir images --num-classes 2 --model vit_tiny_patch16_224 --img-size 32 --device cpu --workers 1 "
    "--model-kwargs img_size=32 patch_size=8 embed_dim=32 depth=2 num_heads=2 --no-prefetcher --no-aug --opt adamw "
    "--opt-eps 0.001 --lr 0.01 --epochs 1 --warmup-epochs 0 --clip-grad 1 --batch-size BATCH --output OUT --experiment run",
    batch=4,
    on_mesh="--mesh=MESH",
    resume="--resume OUT/run/last.pth.tar --epochs 2 --grad-accum-steps 2",
    resume_on_mesh="--resume OUT/run/steps --epochs 2 --grad-accum-steps 2",
    resumes_at=1,
    metrics="run/summary.csv",
    meshes=("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2"),
)
DINO = Port(
    heading="DINO",
    source=("facebookresearch/dino", "7c446df5b9f45747937fb0d72314eb9f7b66930a"),
    packages=("torchvision",),
    prepare=write_classes,
    script="main_dino.py",
    launched=True,
    arguments="--data_path images/train --arch vit_tiny --patch_size 32 --out_dim 64 --use_fp16 false --drop_path_rate 0 "
    "--local_crops_number 2 --batch_size_per_gpu BATCH --epochs 1 --warmup_epochs 0 --optimizer sgd --lr 0.2 --momentum_teacher 0.9 "
    "--num_workers 0 --output_dir OUT",
    batch=4,
    on_mesh="--mesh=MESH",
    resume="--epochs 2",
    resumes_at=1,
    metrics="log.txt",
    meshes=("dp_shard=2", "dp_replicate=2", "tp=2", "dp_shard=2,tp=2"),
)
DINO_ADAMW = dataclasses.replace(
    DINO,
    variant="-AdamW",
    arguments=DINO.arguments.replace("--optimizer sgd --lr 0.2", "--optimizer adamw --lr 0.0064"),
    adamw_eps=1e-3,
    meshes=("dp_shard=2", "tp=2"),
)
NANOCHAT = Port(
    heading="nanochat",
    source=("karpathy/nanochat", "92d63d4e8bb4df75c3b71618f31ddde2378b2bcd"),
    stubs=("wandb", "rustbpe", "tiktoken"),
    prepare=write_documents,
    script="scripts/base_train.py",
    arguments="--device-type=cpu --depth=2 --aspect-ratio=16 --head-dim=16 --max-seq-len=16 --device-batch-size=BATCH "
    "--scalar-lr=0.01 --total-batch-size=128 --num-iterations=10 --warmup-steps=2 --eval-every=5 --eval-tokens=128 "
    "--core-metric-every=-1 --sample-every=-1 --save-every=5 --window-pattern=L --model-tag=OUT",
    batch=4,
    on_mesh="--mesh=MESH",
    resume="--resume-from-step=5",
    # a factor of a sum of which all is normed
    without_effect=("backout_lambda",),
    meshes=("dp_shard=2", "dp_replicate=2"),
    # the published loader continues by the number of ranks
    last_mesh="dp_shard=2",
)
PORTS = (NANOGPT, OPEN_CLIP, TIMM, DINO, NANOCHAT)


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Return a function that returns a changed program's folder, and what the published one found: at first, resumed."""
    checked_out: dict[tuple[str, str], tuple[Path, list[object]]] = {}

    def check_out(port):
        key = port.heading, port.variant
        if key not in checked_out:
            folders = [*sys.path, os.environ.get("MESHPAR_PROGRAMS", "")]
            for package in port.packages:
                if importlib.machinery.PathFinder.find_spec(package, folders) is None:
                    pytest.skip(
                        f"{port.heading} needs {package}; install the extra strangers-vision, or put it into MESHPAR_PROGRAMS"
                    )
            published, changed = (tmp_path_factory.mktemp(name) / name for name in ("published", "changed"))
            try:
                port.check_out(published)
                port.check_out(changed)
            except OSError as error:
                pytest.skip(f"{port.heading} cannot be had ({error}); MESHPAR_PROGRAMS names a folder that has it")
            port.change(changed)
            runs = [run_on_ranks(port, published, published.parent / "out", None, resume) for resume in (False, True)]
            assert len(runs[0]["losses"]) >= 10
            checked_out[key] = changed, runs
        return checked_out[key]

    return check_out


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("port", "mesh", "later_mesh"), [
    pytest.param(port, mesh, later_mesh, id=f"{port.heading}{port.variant}-{mesh}")
    for port in (*PORTS, DINO_ADAMW)
    for mesh, later_mesh in zip(port.meshes, [*port.meshes[1:], port.last_mesh], strict=True)
])  # fmt: skip
def test_a_program_equals_itself_in_one_process_and_resumes_on_another_mesh(port, mesh, later_mesh, programs, tmp_path):
    changed, expected = programs(port)
    compare(run_on_ranks(port, changed, tmp_path / "out", mesh, False), expected[0])
    compare(run_on_ranks(port, changed, tmp_path / "out", later_mesh, True), expected[1])


@pytest.mark.nightly
def test_nanochat_on_tp_is_refused_by_name(programs, tmp_path):
    changed, _ = programs(NANOCHAT)
    with pytest.raises(RankFailure, match="TensorParallel has nothing to do: the layout has no table"):
        run_on_ranks(NANOCHAT, changed, tmp_path / "out", "tp=2", False)


def test_the_page_states_what_the_diffs_are():
    """Each program's commit, lines and meshes; at most 25 lines."""
    table = read_table()
    assert table.keys() == {port.heading for port in PORTS}
    for port in PORTS:
        row = table[port.heading]
        assert port.source[1].startswith(row["commit"].strip("`"))
        assert port.lines_changed() == int(row["lines changed"]) <= 25
        assert re.findall(r"`([^`]+)`", row["meshes"]) == list(port.meshes)
