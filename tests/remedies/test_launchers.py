"""Rows of `launchers`: see `tests/remedies/rows.py`."""

import copy
import os
import socket
import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch.distributed as dist
from typer.testing import CliRunner

from meshpar import MeshSpec
from meshpar.core import registry
from meshpar.core.runtime import default_device_type
from meshpar.launchers.agent.meeting import free_port
from meshpar.launchers.agent.replicas import divide_replicas
from meshpar.launchers.cli import app
from meshpar.launchers.commands.train import division_of
from meshpar.launchers.doctor import devices, examine
from meshpar.launchers.doctor.checks import all_findings, placement_findings
from meshpar.launchers.doctor.examine import Folder, meet
from meshpar.launchers.jobs.build import dealing_problems
from meshpar.launchers.jobs.checks import check_job, machine_problems, replica_problems
from meshpar.launchers.jobs.datasets import filling_problem
from meshpar.launchers.recipes.yamlfile import parse_document
from meshpar.launchers.targets import launching
from meshpar.launchers.targets.job import Job, ask, make_target
from meshpar.launchers.targets.launching import cancel_job, show_logs
from tests.jobs.test_doctor import DOWN, ORDER, Nvml, healthy
from tests.launchers.test_recipe import SMALL, read
from tests.remedies.rows import Row, Tested, each, in_one_process


def recipe(*overrides, text=SMALL):
    """Read a recipe, which has no problem."""
    read(text, *overrides)
    return []


def file(path, text="text"):
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return path


def weights(**files):
    """Write a folder of a published model."""
    file("base/config.json", '{"model_type": "llama"}')
    for name, text in files.items():
        file(f"base/{name}.json", text)
    return "model={kind: huggingface, weights: base}"


def mix(*sources, **fields):
    more = "".join(f", {name}: {value}" for name, value in fields.items())
    return f"data={{mix: [{', '.join(f'{{{source}}}' for source in sources)}]{more}}}"


def target(name, *options):
    """Read a target's options, which have no problem."""
    make_target(name, registry.plugin(registry.LAUNCHERS, name), options)
    return []


def rendered(name, *options, gpus=0, **fields):
    """Render a job, which has no problem."""
    files_of(name, *options, gpus=gpus, **fields)
    return []


def files_of(name, *options, gpus=0, **fields):
    """Return the files of a job."""
    job = Job(
        run=Path("run").absolute(),
        folder=Path("run/launches/001").absolute(),
        name="job",
        script=("train.py",),
        nodes=2,
        ranks_per_node=2,
        gpus_per_node=gpus,
        command=(),
        **{"elastic": ""} | fields,
    )
    return make_target(name, registry.plugin(registry.LAUNCHERS, name), options).render(job)


def launch_job(*arguments, **options):
    return launching.launch_job(launching.LaunchRequest(*arguments, **options))


def launched(what, *arguments, target="slurm", **options):
    """Launch a job, which has no problem."""
    file("train.py", "import sys\nsys.exit(0)")
    launch_job(target, what, arguments, **{"nodes": 1, "gpus_per_node": 0, "nproc": 2} | options)
    return []


def engine(name, script):
    """Make a command of an engine, which is the only command that is found."""
    Path(file(f"bin/{name}", f"#!/bin/bash\n{script}\n")).chmod(0o755)
    return patch.dict(os.environ, {"PATH": f"{Path('bin').absolute()}"})


def without_an_engine():
    return patch.dict(os.environ, {"PATH": "/nowhere"})


def asked(*command, script=None, limit_s=30.0):
    """Ask an engine, which is installed if it has a script; return its answer."""
    with without_an_engine() if script is None else engine(command[0], script):
        return ask(command, limit_s)


def cancelled():
    """Cancel a job whose note is damaged."""
    launched("train.py")
    file("runs/train/launches/001/launch.json", "{")
    return cancel_job(Path("runs/train"))


def logs_of_a_job(*, engine_is_here):
    """Print a job's logs by its engine's command; return the lines that kubectl or a file of a rank has."""
    launched("train.py", target="kubernetes")
    logs = file("runs/train/logs/x/rank-0.log", "step 1")
    if engine_is_here:
        with without_an_engine():
            return show_logs(Path("runs/train"), follow=False)
    return Path(logs).read_text()


def checked(script, limit_s):
    """Launch a job after a check of its script, which has no problem."""
    with patch.object(launching, "CHECK_S", limit_s):
        return launched(file("slow.py", script), check="")


def submission():
    """Return the command that a launch prints for its submission."""
    printed = launch_job("slurm", file("train.py"), [], nodes=1, gpus_per_node=0, nproc=2).splitlines()[-1]
    return printed.removeprefix("submit it: ").split()


def examined(*changes):
    """Return what the doctor says of facts of two hosts with changes: (rank, path, value)."""
    facts = copy.deepcopy(healthy())
    for ranks, *path, last, value in changes:
        for fact in facts[ranks]:
            for part in path:
                fact = fact[part]
            fact[last] = value
    return [str(finding) for finding in all_findings(facts)]


def measured(**answers):
    """Return what the doctor says of a device by what its management library answers."""
    known = {"nvmlInit": None, "nvmlDeviceGetHandleByUUID": "handle"}
    facts = healthy()
    with patch.dict(sys.modules, pynvml=Nvml(answers=known | answers)):
        facts[3]["device"]["health"] = devices.health("GPU-3")
    return [str(finding) for finding in devices.health_findings(facts)]


def linked(*links_up):
    """Return what the doctor says of devices with numbers of NVLinks."""
    facts = healthy()
    for fact, links in zip(facts, links_up, strict=True):
        fact["device"]["health"] = dict.fromkeys(
            ("uncorrected", "rows_pending", "rows_failed", "held_back", "width", "most_width"), 0
        ) | {"links_up": links}
    return [str(finding) for finding in devices.health_findings(facts)]


def computed(*rates):
    """Return what the doctor says of devices by their operations a second."""
    return [str(finding) for finding in devices.product_findings(healthy(), [(rate, "digest") for rate in rates])]


def met(rank, wait_s, *others, listens=True):
    """Let a rank meet rank 0, and others that have come; return the number of ranks that are there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    port = server.port if listens else free_port()
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": "3", **address}):
        meeting = meet(wait_s)
        for other in others:
            meeting._store.set(f"facts/{other}", '{"rank": 1, "ranks_per_node": 1, "host": "n2"}')
            meeting._store.set(f"facts/read/{other}", "")
        return (
            len(meeting.gather("facts", {"rank": 0, "ranks_per_node": 1, "host": "n1"}))
            if rank == 0
            else meeting._count
        )


def connected(*, opened):
    """Return what the doctor says of two hosts, of which the second has a port that is open or not."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listens = [{"listens": server.getsockname()}] * 4
        if not opened:
            server.close()
        seen = [{"unreached": examine._unreached(0, {"n1": 0, "n2": 2}, listens)}, *[{"unreached": []}] * 3]
        return [str(finding) for finding in examine._connection_findings(healthy(), seen)]


def saved_in(here, there=None, size=0):
    """Return what the doctor says of a folder for checkpoints that two hosts have at ``here`` and ``there``."""
    token = examine._leave_token(Path(here))
    looked = [examine._looked(Path(path), token) for path in (here, there or here)]
    seen = [looked[0], None, looked[1], None]
    return [
        str(finding)
        for finding in examine._folder_findings(healthy(), Folder(path=Path(here), bytes=size), token, seen)
    ]


def disks(**free):
    """Let folders have so many bytes free."""
    return patch("shutil.disk_usage", lambda path: SimpleNamespace(total=1 << 40, free=free[Path(path).name]))


def room_for(folder, keep):
    with disks(small=10 << 30, large=100 << 30):
        return saved_in(folder, size=keep * 4 << 30)


def of_job(*overrides):
    return check_job(read(SMALL, *overrides), 2)


def dealt(*overrides):
    mesh = MeshSpec("dp_replicate=2,dp_shard=2")
    return [text for _, text in dealing_problems(read(SMALL, "same_bits=true", *overrides), mesh)]


def of_replicas(*overrides):
    return replica_problems(read(SMALL, *overrides))


def drawn(*command):
    """Draw a mesh, which has no problem."""
    done = CliRunner().invoke(app, ["mesh", *command])
    return [] if done.exit_code == 0 else [f"{done.output}{done.exception}"]


def exported(*options):
    """Export a run that is not there; return whether that is all that is wrong."""
    done = CliRunner().invoke(app, ["export", "no-run", "out", *options])
    text = f"{done.output}{done.exception}"
    return NO_STEP if NO_STEP in text else text


NO_STEP = "no-run"
IS_DOWN = {"up": False, "loopback": False, "address": None}
EACH, SECOND = slice(None), slice(2, 4)
LINK = healthy()[0]["infiniband"]
DOWN_2 = [{**DOWN[0], "port": "mlx5_1/1"}]
IMAGE = "spec: {template: {spec: {containers: [{name: train, image: mine}]}}}"

ROWS = [
    Tested("a readable file; name a secret of the cluster instead, such as")
    .by("tests/launchers/test_secrets.py::test_a_patch_names_a_secret_of_the_cluster_instead")
    .helps("name a secret of the cluster", "valueFrom: {secretKeyRef: {name: tracker, key: password}}"),
    Tested("names a module to import (megatron_core); remove megatron_config")
    .by("tests/launchers/test_trust.py::test_no_config_of_transformers_brings_code")
    .helps("remove megatron_config", "del adapters['megatron_config']"),
    Tested("names weights that are no folder here, and nothing is downloaded: ")
    .by("tests/launchers/test_trust.py::test_generate_asks_no_other_host_for_the_weights_below_adapters")
    .helps("write their folder into base_model_name_or_path", "adapters['base_model_name_or_path'] = str(folder)"),
    Tested("aliases (*name) are not read; write the value out")
    .by("tests/launchers/test_trust.py::test_a_file_without_its_aliases_is_read")
    .helps("write the value out", "a: 1\\nb: 1"),
    Tested("no sample is held out for a validation; ")
    .by("tests/launchers/test_preview.py::test_a_recipe_without_validation_has_no_samples_of_it")
    .helps("set data.validation_fraction", "'data.validation_fraction=0.5'")
    .helps("leave out --validation", "preview('data.shuffle=true')"),
    Row("there is no validation data")
    .refuses(lambda: recipe("training.validate_every=2"))
    .helps(
        "set data.validation_fraction, data.validation_paths or",
        lambda: recipe("training.validate_every=2", "data.validation_fraction=0.1"),
        lambda: recipe("training.validate_every=2", f"data.validation_paths=[{file('v.txt')}]"),
        lambda: recipe("training.validate_every=2", "evaluations.samples.prompts=[once]"),
    ),
    Row("set the length of the training")
    .refuses(lambda: recipe("training.steps=null"))
    .helps(
        "set the length of the training: steps, epochs or both",
        each(recipe, "training.steps=5", "training={epochs: 1}", "training={steps: 5, epochs: 1}"),
    ),
    Row("set either warmup_steps or warmup_ratio")
    .refuses(lambda: recipe("schedule={warmup_steps: 2, warmup_ratio: 0.1}"))
    .helps("set either warmup_steps or", each(recipe, "schedule={warmup_steps: 2}", "schedule={warmup_ratio: 0.1}")),
    Row("a mixture ends with the epochs of its sources")
    .refuses(lambda: recipe(mix("source: stdlib"), "training={epochs: 2}"))
    .helps(
        "set training.steps, and epochs in data.mix",
        lambda: recipe(mix("source: stdlib, epochs: 2"), "training={steps: 5}"),
    ),
    Row("a mixture with a source that repeats without end has no epoch")
    .refuses(lambda: recipe(mix("source: stdlib"), "checkpoint.every=epoch"))
    .helps("set a number of steps", lambda: recipe(mix("source: stdlib"), "checkpoint.every=5")),
    Row("set either decay or power, not both")
    .refuses(lambda: recipe("averages.ema={decay: 0.9, power: 1}"))
    .helps("set either decay or power", each(recipe, "averages.ema={decay: 0.9}", "averages.ema={power: 1}")),
    Row("averages are of whole models, and a run with lora")
    .refuses(lambda: recipe(weights(), "data.tokenizer=bytes", "lora={rank: 4}", "averages.ema={decay: 0.9}"))
    .helps("drop averages", lambda: recipe(weights(), "data.tokenizer=bytes", "lora={rank: 4}"))
    .helps("lora", lambda: recipe(weights(), "data.tokenizer=bytes", "averages.ema={decay: 0.9}")),
    Row("stdlib needs no paths")
    .refuses(lambda: recipe("data={source: stdlib, paths: [a.txt]}"))
    .helps("for files of your own write source: files", lambda: recipe("data={source: files, paths: [a.txt]}")),
    Row("a dataset of your own reads its files itself")
    .refuses(lambda: recipe("data={dataset: {class: here.Lines}, paths: [a.txt]}"))
    .helps("pass them as keywords of the class", lambda: recipe("data={dataset: {class: here.Lines, paths: [a.txt]}}")),
    Row("set either validation_paths or validation_fraction")
    .refuses(lambda: recipe("data={validation_fraction: 0.1, validation_paths: [v.txt]}"))
    .helps(
        "set either validation_paths or",
        each(recipe, "data={validation_fraction: 0.1}", "data={validation_paths: [v.txt]}"),
    ),
    Row("two sources share a name in {}")
    .refuses(lambda: recipe(mix("name: a, source: stdlib", "name: a, source: stdlib")))
    .helps("give each its own name", lambda: recipe(mix("name: a, source: stdlib", "name: b, source: stdlib"))),
    Row("is part of a metric's")
    .refuses(lambda: recipe(mix("name: a/b, source: stdlib")))
    .helps("use letters, digits, - and _", lambda: recipe(mix("name: a-B_2, source: stdlib"))),
    Row("the conversations have several templates")
    .refuses(
        lambda: recipe(
            mix(*(f"source: chat, paths: [stdlib], template: {name}" for name in ("chatml", "llama3")), tokenizer="bpe")
        )
    )
    .helps(
        "set one template for all",
        lambda: recipe(mix(*["source: chat, paths: [stdlib], template: chatml"] * 2, tokenizer="bpe")),
    ),
    Row("tokenizer {} has no chat template")
    .refuses(lambda: recipe("data={source: chat, paths: [stdlib]}"))
    .helps(
        "write template: chatml or llama3",
        each(
            recipe,
            "data={source: chat, paths: [stdlib], template: chatml}",
            "data={source: chat, paths: [stdlib], template: llama3}",
        ),
    )
    .helps("a file", lambda: recipe(f"data={{source: chat, paths: [stdlib], template: {file('own.jinja')}}}")),
    Row("best_fit keeps documents whole, and documents: joined makes one text")
    .refuses(lambda: recipe("data={packing: best_fit, documents: joined}"))
    .helps("use one of the two", each(recipe, "data={packing: best_fit}", "data={documents: joined}")),
    Row("the input is tokens already")
    .refuses(lambda: recipe("data={source: tokens, paths: [a.bin], tokenizer: bpe}"))
    .helps("remove data.tokenizer", lambda: recipe("data={source: tokens, paths: [a.bin]}"))
    .helps(
        "name the folder of their tokenizer", lambda: recipe("data={source: tokens, paths: [a.bin], tokenizer: base}")
    ),
    Row("missing: {} has no tokenizer.json")
    .refuses(lambda: recipe(weights()))
    .helps("name the folder of the tokenizer", lambda: recipe(weights(), "data.tokenizer=other"))
    .helps(
        "write bytes or bpe",
        lambda: recipe(weights(), "data.tokenizer=bytes"),
        lambda: recipe(weights(), "data.tokenizer=bpe"),
    ),
    Row("tokenizer bytes ends a document with its own token")
    .refuses(lambda: recipe("data.eos=x"))
    .helps("remove data.eos", lambda: recipe())
    .helps("use another tokenizer", lambda: recipe("data.eos=x", "data.tokenizer=bpe")),
    Row("needs a teacher")
    .refuses(lambda: recipe("training.objective=distillation"))
    .helps(
        "set teacher.model and its weights",
        lambda: recipe(
            "training.objective=distillation", "teacher.model={dim: 32, layers: 2, heads: 2, weights: teacher}"
        ),
    ),
    Row("this is a key of transformers' Trainer or of accelerate")
    .refuses(lambda: recipe(text=f"{SMALL}learning_rate: 1e-3\n"))
    .helps("write the recipe's keys, which docs/migrate.md", lambda: recipe("optimizer.lr=1e-3")),
    Row("{} must be one of {}, got {}; for a class of your own")
    .refuses(lambda: recipe("model={kind: mamba}"))
    .helps("for a class of your own write class", lambda: recipe("model={class: package.module.Name}")),
    Row("{} appears twice (first in line {})", result={"seed": 1})
    .refuses(lambda: parse_document("seed: 1\nseed: 2\n", "two.yaml"))
    .helps("keep one", lambda: parse_document("seed: 1\n", "one.yaml").data),
    Row("sbatch: {} in {}; close the quotes")
    .refuses(lambda: target("slurm", "sbatch=--comment='a b"))
    .helps("close the quotes", lambda: target("slurm", "sbatch=--comment='a b'")),
    Row("sbatch: {} is not a long option")
    .refuses(lambda: target("slurm", "sbatch=-x n7"))
    .helps(
        "write --NAME or --NAME=VALUE, such as --mem=0",
        lambda: target("slurm", "sbatch=--exclude=n7", "sbatch=--mem=0", "sbatch=--contiguous"),
    ),
    Row("sbatch: --{} is an option of its own")
    .refuses(lambda: target("slurm", "sbatch=--partition=gpu"))
    .helps("write -o {}={}", lambda: target("slurm", "partition=gpu")),
    Row("sbatch: meshpar writes --{}, which its batch script depends on")
    .refuses(lambda: target("slurm", "sbatch=--nodes=2 --mem=0"))
    .helps("leave it out", lambda: target("slurm", "sbatch=--mem=0")),
    Row("sbatch: the tasks of --array={} would train in one folder")
    .refuses(lambda: target("slurm", "sbatch=--array=1-4"))
    .helps("write --array={}%1", lambda: target("slurm", "sbatch=--array=1-4%1")),
    Row("and SLURM's signal may come {} s earlier")
    .refuses(lambda: target("slurm", "time=5", "signal_s=300"))
    .helps("raise time", lambda: target("slurm", "time=7", "signal_s=300"))
    .helps("lower signal_s", lambda: target("slurm", "time=5", "signal_s=120")),
    Row("skypilot requires the name of the GPUs")
    .refuses(lambda: rendered("skypilot", gpus=8))
    .helps("add -o accelerators=H100", lambda: rendered("skypilot", "accelerators=H100", gpus=8))
    .helps("another name", lambda: rendered("skypilot", "accelerators=A100-80GB", gpus=8)),
    Row("accelerators={} and --gpus-per-node {} are two numbers")
    .refuses(lambda: rendered("skypilot", "accelerators=H100:4", gpus=8))
    .helps("write -o accelerators={}", lambda: rendered("skypilot", "accelerators=H100", gpus=8))
    .helps("--gpus-per-node {}", lambda: rendered("skypilot", "accelerators=H100:4", gpus=4)),
    Row("kueue and volcano: each starts the job by itself")
    .refuses(lambda: target("kubernetes", "kueue=a", "volcano=b"))
    .helps("give one of them", lambda: target("kubernetes", "kueue=a"), lambda: target("kubernetes", "volcano=b")),
    Row("{} is given twice; give it once")
    .refuses(lambda: target("slurm", "partition=a", "partition=b"))
    .helps("give it once", lambda: target("slurm", "partition=b")),
    Row("; for an option of sbatch's own write")
    .refuses(lambda: target("slurm", "mem=0"))
    .helps("for an option of sbatch's own write -o sbatch=", lambda: target("slurm", "sbatch=--mem=0")),
    Row("; for other fields of the job file write")
    .refuses(lambda: target("skypilot", "workdir=."))
    .helps(
        "for other fields of the job file write -o patch=FILE",
        lambda: rendered("skypilot", f"patch={file('more.yaml', 'workdir: .')}"),
    ),
    Row("the number of ranks per node is 0")
    .refuses(lambda: launched("train.py", nproc=None))
    .helps("pass --gpus-per-node", lambda: launched("train.py", nproc=None, gpus_per_node=8))
    .helps("for CPUs --gpus-per-node 0 --nproc", lambda: launched("train.py", nproc=2, gpus_per_node=0)),
    Row("--check is for scripts, and {} is a recipe")
    .refuses(lambda: launched(file("r.yaml", SMALL), check="--dry-run"))
    .helps("leave it out", lambda: launched("r.yaml")),
    Row("pass --mesh auto, or a --mesh of {} x {} ranks")
    .refuses(lambda: launched(file("r.yaml", SMALL), nproc=4))
    .helps("pass --mesh auto", lambda: launched("r.yaml", nproc=4, mesh="auto"))
    .helps("a --mesh of {} x {} ranks", lambda: launched("r.yaml", nproc=4, mesh="dp_shard=4"))
    .helps("other --nodes and --nproc", lambda: launched("r.yaml", nproc=2)),
    Row("{} is for recipes, and {} is a {}; leave it out")
    .refuses(lambda: launched("train.py", mesh="auto"))
    .helps("leave it out", lambda: launched("train.py")),
    Row("the check {} ended with exit code {}")
    .refuses(lambda: launched(file("bad.py", "import sys\nsys.exit(3)"), check=""))
    .helps("correct the script or its arguments", lambda: launched(file("bad.py", "pass"), check="")),
    Row("the recipe has device: {} and the job has no GPUs")
    .refuses(lambda: launched(file("r.yaml", SMALL), "device=cuda"))
    .helps("pass --gpus-per-node", lambda: launched("r.yaml", "device=cuda", nproc=None, gpus_per_node=2)),
    Row("set the same value on every node")
    .refuses(lambda: examined((SECOND, "settings", "NCCL_DEBUG", "INFO")))
    .helps("set the same value on every node", lambda: examined((EACH, "settings", "NCCL_DEBUG", "INFO")))
    .helps("unset it on all", lambda: examined()),
    Row("use nodes of one kind")
    .refuses(lambda: examined((SECOND, "device", "kind", "H200")))
    .helps("use nodes of one kind", lambda: examined((EACH, "device", "kind", "H200"))),
    Row("let every host show the same devices")
    .refuses(lambda: examined((SECOND, "visible", "CUDA_VISIBLE_DEVICES", "7")))
    .helps("let every host show the same", lambda: examined((EACH, "visible", "CUDA_VISIBLE_DEVICES", "0,1"))),
    Row("set it to one of these")
    .refuses(lambda: examined((EACH, "settings", "GLOO_SOCKET_IFNAME", "ib9")))
    .helps("set it to one of these", lambda: examined((EACH, "settings", "GLOO_SOCKET_IFNAME", "eth0"))),
    Row("set it to one that does: {}")
    .refuses(lambda: examined((EACH, "settings", "NCCL_SOCKET_IFNAME", "lo")))
    .helps("set it to one that does", lambda: examined((EACH, "settings", "NCCL_SOCKET_IFNAME", "eth0"))),
    Row("bring it up, or choose another of {}")
    .refuses(lambda: examined((EACH, "interfaces", "ib0", IS_DOWN), (EACH, "settings", "NCCL_SOCKET_IFNAME", "ib0")))
    .helps(
        "bring it up",
        lambda: examined(
            (EACH, "interfaces", "ib0", IS_DOWN | {"up": True, "address": "10.1.0.1"}),
            (EACH, "settings", "NCCL_SOCKET_IFNAME", "ib0"),
        ),
    )
    .helps(
        "choose another of {}",
        lambda: examined((EACH, "interfaces", "ib0", IS_DOWN), (EACH, "settings", "NCCL_SOCKET_IFNAME", "eth0")),
    ),
    Row("add it to DNS or /etc/hosts")
    .refuses(lambda: examined((SECOND, "address", None)))
    .helps("add it to DNS or /etc/hosts", lambda: examined((SECOND, "address", "10.0.0.1")))
    .helps(
        "set GLOO_SOCKET_IFNAME",
        lambda: examined((SECOND, "address", None), (EACH, "settings", "GLOO_SOCKET_IFNAME", "eth0")),
    ),
    Row("remove the name's 127.x entry from /etc/hosts")
    .refuses(lambda: examined((SECOND, "address", "127.0.1.1")))
    .helps(
        "set GLOO_SOCKET_IFNAME to the interface of",
        lambda: examined((SECOND, "address", "127.0.1.1"), (EACH, "settings", "GLOO_SOCKET_IFNAME", "eth0")),
    )
    .helps("remove the name's 127.x entry", lambda: examined((SECOND, "address", "10.0.0.1"))),
    Row("use nodes with the same links")
    .refuses(lambda: examined((SECOND, "infiniband", [])))
    .helps("use nodes with the same links", lambda: examined((EACH, "infiniband", []))),
    Row("run chrony or ntpd")
    .refuses(lambda: examined((SECOND, "clock", 1009.0)))
    .helps("run chrony or ntpd", lambda: examined((SECOND, "clock", 1000.1))),
    Row("set it unlimited: ulimit -l unlimited")
    .refuses(lambda: examined((SECOND, "locked_memory", 65536)))
    .helps("set it unlimited: ulimit -l unlimited", lambda: examined((SECOND, "locked_memory", -1)))
    .helps("LimitMEMLOCK of slurmd's unit", lambda: examined((SECOND, "locked_memory", 2**64 - 1))),
    Row("raise it: ulimit -n {}")
    .refuses(lambda: examined((SECOND, "open_files", 256)))
    .helps("raise it: ulimit -n {}", lambda: examined((SECOND, "open_files", 65536))),
    Row("enlarge it (docker --shm-size=16g")
    .refuses(lambda: examined((SECOND, "shm", {"total": 2**34, "free": 2**20})))
    .helps("delete files there", lambda: examined((SECOND, "shm", {"total": 2**34, "free": 2**34}))),
    Row("check cables and subnet manager (ibstat)")
    .refuses(lambda: examined((EACH, "infiniband", [*LINK, *DOWN_2])))
    .helps(
        "check cables and subnet manager",
        lambda: examined((EACH, "infiniband", [*LINK, {**LINK[0], "port": "mlx5_1/1"}])),
    )
    .helps(
        "exclude the ports with NCCL_IB_HCA",
        lambda: examined((EACH, "infiniband", [*LINK, *DOWN_2]), (EACH, "settings", "NCCL_IB_HCA", "^mlx5_1")),
        lambda: examined((EACH, "infiniband", [*LINK, *DOWN_2]), (EACH, "settings", "NCCL_IB_HCA", "^=mlx5_1:1")),
        lambda: examined((EACH, "infiniband", [*LINK, *DOWN_2]), (EACH, "settings", "NCCL_IB_HCA", "=mlx5_0")),
        lambda: examined((EACH, "infiniband", [*LINK, *DOWN_2]), (EACH, "settings", "NCCL_IB_HCA", "mlx5_0:1,mlx5_2")),
    ),
    Row("reset the devices")
    .refuses(lambda: measured(nvmlDeviceGetRemappedRows=(1, 1, 1, 0)))
    .helps("reset the devices", lambda: measured(nvmlDeviceGetRemappedRows=(1, 1, 0, 0))),
    Row("check cooling and power of the host")
    .refuses(lambda: measured(nvmlDeviceGetCurrentClocksThrottleReasons=0x40))
    .helps("check cooling and power of the host", lambda: measured(nvmlDeviceGetCurrentClocksThrottleReasons=0)),
    Row("check the links (nvidia-smi nvlink -s)")
    .refuses(lambda: linked(18, 18, 17, 18))
    .helps("check the links", lambda: linked(18, 18, 18, 18)),
    Row("check clocks, temperature and other processes there")
    .refuses(lambda: computed(7e14, 7e14, 5e14, 7e14))
    .helps("check clocks, temperature and other processes", lambda: computed(7e14, 7e14, 6.9e14, 7e14)),
    Row("rank 0 does not answer at {}:{} within {} s", result=3)
    .refuses(lambda: met(1, 0.2, listens=False))
    .helps("check that its node runs, that its name resolves", lambda: met(1, 30.0)),
    Row("ranks did not connect within {} s: {}", result=3)
    .refuses(lambda: met(0, 0.2, 1))
    .helps("check that their nodes run, read their logs", lambda: met(0, 30.0, 1, 2)),
    Row("open all ports between the nodes")
    .refuses(lambda: connected(opened=False))
    .helps("open all ports between the nodes", lambda: connected(opened=True)),
    Row("mount it there, correct its owner and mode")
    .refuses(lambda: saved_in("here", file("a-file")))
    .helps("choose another output", lambda: saved_in("there")),
    Row("put the output on a file system that all nodes mount")
    .refuses(lambda: saved_in("here", "elsewhere"))
    .helps("put the output on a file system", lambda: saved_in("here", "here")),
    Row("keep fewer checkpoints (checkpoint.keep)")
    .refuses(lambda: room_for("small", keep=5))
    .helps("keep fewer checkpoints (checkpoint.keep), free some space", lambda: room_for("small", keep=2))
    .helps("choose another output", lambda: room_for("large", keep=5)),
    Row("patch {} sets {} to {}, and meshpar writes {}", result=True)
    .refuses(lambda: rendered("kubernetes", f"patch={file('p.yaml', IMAGE)}"))
    .helps("use an option (-o)", lambda: "image: mine" in files_of("kubernetes", "image=mine")["job.yaml"])
    .helps(
        "edit the job file",
        lambda: "image: mine" in files_of("kubernetes")["job.yaml"].replace("image: meshpar:latest", "image: mine"),
    ),
    Tested("the patched {} is not valid")
    .by("tests/jobs/test_launch.py::test_a_patch_adds_to_a_kubernetes_job_and_changes_nothing")
    .helps("correct the patch", "ttlSecondsAfterFinished: 3"),
    Row("sbatch: --elastic=replicas makes an array of its own")
    .refuses(lambda: rendered("slurm", "sbatch=--array=0-3%1 --mem=0", elastic="replicas"))
    .helps("leave --array out", lambda: rendered("slurm", "sbatch=--mem=0", elastic="replicas")),
    Row("use the commands of its engine", result="cancelled 7")
    .refuses(cancelled)
    .helps("use the commands of its engine", lambda: asked("scancel", "7", script="echo cancelled $1")),
    Row("{} is not installed here; on a machine that has it, run: {}", result="jobs of --me")
    .refuses(lambda: asked("squeue", "--me"))
    .helps("on a machine that has it, run: {}", lambda: asked("squeue", "--me", script="echo jobs of $1")),
    Row("{} did not answer within {} s", result="jobs of --me")
    .refuses(lambda: asked("squeue", "--me", script="exec /bin/sleep 60", limit_s=0.2))
    .helps("check that its server runs, then repeat: {}", lambda: asked("squeue", "--me", script="echo jobs of $1")),
    Row("{} is not installed here; read the ranks' logs in {}", result="step 1")
    .refuses(lambda: logs_of_a_job(engine_is_here=True))
    .helps("read the ranks' logs in {}", lambda: logs_of_a_job(engine_is_here=False)),
    Row("submit it: {}", result="job 7 of job.sbatch")
    .refuses(lambda: launch_job("slurm", file("train.py"), [], nodes=1, gpus_per_node=0, nproc=2))
    .helps("submit it: {}", lambda: asked(*submission(), script="echo job 7 of ${1##*/}")),
    Row("the check {} did not end within {} s")
    .refuses(lambda: checked("import time; time.sleep(60)", 0.2))
    .helps("give it less to do", lambda: checked("pass", 60))
    .helps("leave out --check", lambda: launched("train.py")),
    Row("make {} and the axes inside it at most {} together")
    .refuses(lambda: placement_findings(MeshSpec("tp=4"), ORDER))
    .helps("make {} and the axes inside it", lambda: placement_findings(MeshSpec("dp_shard=2,tp=2"), ORDER)),
    Row("--elastic=replicas: the mesh {} has one replica", result=2)
    .refuses(lambda: divide_replicas(MeshSpec("dp_shard=2"), 2, 0))
    .helps("write dp_replicate=2 or more", lambda: divide_replicas(MeshSpec("dp_replicate=2,dp_shard=2"), 2, 0).count),
    Row("--elastic=replicas: {} replicas on {} nodes", result=[2, 2])
    .refuses(lambda: divide_replicas(MeshSpec("dp_replicate=3"), 2, 0))
    .helps(
        "use a multiple or a divisor of {}",
        lambda: [
            divide_replicas(MeshSpec("dp_replicate=2"), 4, 0).count,
            divide_replicas(MeshSpec("dp_replicate=4"), 2, 0).count // 2,
        ],
    )
    .helps("other --nodes", lambda: [divide_replicas(MeshSpec("dp_replicate=2"), nodes, 0).count for nodes in (1, 2)]),
    Row("sums gradients over replicas, but not the counts of")
    .refuses(lambda: of_replicas("training.balance_rate=0.1"))
    .helps(
        "set balance_rate and balance_loss to 0",
        lambda: of_replicas("training.balance_rate=0", "training.balance_loss=0"),
    ),
    Row("sends weights and optimizer to a replica that joins")
    .refuses(lambda: of_replicas("averages.ema.decay=0.9"))
    .helps("remove averages", lambda: of_replicas()),
    Row("--elastic=replicas sums gradients of replicas as they come")
    .refuses(lambda: of_replicas("same_bits=true"))
    .helps("set same_bits: false", lambda: of_replicas("same_bits=false")),
    Row("same_bits deals {} micro-batches to {} data ranks")
    .refuses(lambda: dealt("data.accumulate=2"))
    .helps("use {}={}", lambda: dealt("data.accumulate=4")),
    Row("--elastic=replicas writes no profile")
    .refuses(lambda: of_replicas("profile=true"))
    .helps("set profile: false", lambda: of_replicas("profile=false")),
    Row("--elastic=replicas reads data in the training process")
    .refuses(lambda: of_replicas("data.workers=2"))
    .helps("set data.workers: 0", lambda: of_replicas("data.workers=0")),
    Row("a prompt is empty, and has no token")
    .refuses(lambda: of_job("evaluations.samples.prompts=['']"))
    .helps("give each prompt a text", lambda: of_job("evaluations.samples.prompts=[once]")),
    Row("use a data.sequence_length that is a multiple of {}")
    .refuses(lambda: check_job(read(SMALL, "mesh='dp_shard=1,cp=4'", "data.sequence_length=30"), 4))
    .helps(
        "use a data.sequence_length that",
        lambda: check_job(read(SMALL, "mesh='dp_shard=1,cp=4'", "data.sequence_length=32"), 4),
    ),
    Row("set data.validation_fraction or data.validation_paths")
    .refuses(lambda: of_job("checkpoint.best=val/loss"))
    .helps(
        "set data.validation_fraction or data.validation_paths",
        lambda: of_job("checkpoint.best=val/loss", "data.validation_fraction=0.1"),
        lambda: of_job("checkpoint.best=val/loss", f"data.validation_paths=[{file('v.txt')}]"),
    ),
    Row("raise it, or set profile: off")
    .refuses(lambda: of_job("profile=true"))
    .helps("raise it", lambda: of_job("profile=true", "training.steps=50"))
    .helps("set profile: off", lambda: of_job("profile=off")),
    Row("{} is not available on this machine, which has {}")
    .refuses(lambda: machine_problems(read(SMALL, "device=xpu"), 2))
    .helps("write device: {}", lambda: machine_problems(read(SMALL, f"device={default_device_type()}"), 1))
    .helps("auto", lambda: machine_problems(read(SMALL, "device=auto"), 1)),
    Row("the data has {} different tokens and the model's vocab_size is {}")
    .refuses(lambda: of_job("model.vocab_size=100"))
    .helps("raise it", lambda: of_job("model.vocab_size=257")),
    Row("data.sequence_length is {} and the model has {} positions")
    .refuses(lambda: of_job("model.max_positions=64"))
    .helps("lower it", lambda: of_job("model.max_positions=64", "data.sequence_length=64"))
    .helps("raise the number of positions", lambda: of_job("model.max_positions=256")),
    Row("a micro-batch has {} samples{}, and the training data has only {}", result="")
    .refuses(lambda: [filling_problem(read(SMALL), 4)])
    .helps("lower data.micro_batch", lambda: filling_problem(read(SMALL, "data.micro_batch=4"), 4))
    .helps("give more data", lambda: filling_problem(read(SMALL), 8)),
    Row("--elastic=replicas and --nodes MIN:MAX are two kinds", result=2)
    .refuses(lambda: division_of(read(SMALL), {"nodes": "1:2"}))
    .helps("give --nodes a number", lambda: division_of(read(SMALL, "mesh='dp_replicate=2'"), {"nodes": "1"}).count),
    Row("--measure compares a quantised export with the step's own weights", result=NO_STEP)
    .refuses(lambda: exported("--measure", "v.txt"))
    .helps("pass --quantize FORMAT as well", lambda: exported("--measure", "v.txt", "--quantize", "int8")),
    Row("--measure compares a quantised export with the step's trained weights", result=NO_STEP)
    .refuses(lambda: exported("--measure", "v.txt", "--quantize", "int8", "--weights", "ema"))
    .helps("drop --measure", lambda: exported("--quantize", "int8", "--weights", "ema"))
    .helps("--weights", lambda: exported("--measure", "v.txt", "--quantize", "int8")),
    Row("--dry-run lists what --push would upload", result=NO_STEP)
    .refuses(lambda: exported("--dry-run"))
    .helps("pass --push OWNER/NAME as well", lambda: exported("--dry-run", "--push", "us/model")),
    Row("mesh {} has an axis of size -1")
    .refuses(lambda: drawn("dp_shard=-1"))
    .helps("give every size to draw it", lambda: drawn("dp_shard=2")),
    Row("{} ranks do not divide evenly among {} nodes")
    .refuses(lambda: drawn("dp_shard=6", "--nodes", "4"))
    .helps(
        "change the mesh or --nodes",
        lambda: drawn("dp_shard=8", "--nodes", "4"),
        lambda: drawn("dp_shard=6", "--nodes", "3"),
    ),
]


test_the_printed_remedy_helps = in_one_process(ROWS)
