"""meshpar launch: what is rendered, that the engines' own schemas take it, and that its commands run as two hosts."""

import contextlib
import http.server
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final, get_type_hints

import pytest
import yaml
from typer.testing import CliRunner

from meshpar import LaunchError, MeshError, MeshSpec, PlanError, RecipeError
from meshpar.core import registry
from meshpar.launchers.cli import app
from meshpar.launchers.jobs import build
from meshpar.launchers.recipes.loading import load_recipe
from meshpar.launchers.targets import job as job_module
from meshpar.launchers.targets import launching
from meshpar.launchers.targets.job import dns_label, make_target
from meshpar.launchers.targets.slurm import Slurm
from tests.support.hosts import Hosts, Unavailable
from tests.support.warm import write_command

RECIPE = """\
name: My_Job
device: cpu
mesh: dp_replicate=2,dp_shard=1
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32, dropout: 0.0}
data: {source: files, paths: [text.md], cache: cache, sequence_length: 32, micro_batch: 2}
training: {steps: 3, log_every: 1, tensorboard: false}
"""


def launch_job(*arguments: Any, **options: Any) -> str:
    """Launch on two nodes of one rank each, or as the options say."""
    options = {"nodes": 2, "gpus_per_node": 0, "nproc": 1} | options
    return launching.launch_job(launching.LaunchRequest(*arguments, **options))


def meshpar(*words: object) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def write_commands(folder: Path, **scripts: str) -> str:
    """Write commands of an engine, and return a PATH that begins with them."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, script in scripts.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / "bin" / name).chmod(0o755)
    return f"{folder / 'bin'}:{os.environ['PATH']}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.yaml").write_text(RECIPE)
    (tmp_path / "text.md").write_text((Path(__file__).parents[2] / "README.md").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshpar", "launch", "..."])  # which the job's folder keeps
    return tmp_path


def render(target: str, *options: str, mesh: str | None = "auto", **more: Any) -> Path:
    launch_job(target, "job.yaml", [f"output=runs/{target}"], mesh=mesh, options=options, **more)
    return latest(Path("runs") / target)


def latest(run: Path) -> Path:
    """The folder of a run's newest launch."""
    return max((run / "launches").iterdir())


def test_a_batch_script_is_complete_and_legal_shell(folder: Path) -> None:
    made = render(
        "slurm", "time=1:00:00", "partition=gpu", "signal_s=120", "max_requeues=3", "setup=module load x", nproc=4
    )
    text = (made / "job.sbatch").read_text()
    assert subprocess.run(["bash", "-n", made / "job.sbatch"], check=False).returncode == 0
    for line in (
        "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --time=1:00:00", "#SBATCH --partition=gpu", "#SBATCH --exclusive",
        "#SBATCH --signal=B:USR1@120", "#SBATCH --requeue", "set -euo pipefail", "module load x",
        'hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")', "export MESHPAR_JOB_ID=$SLURM_JOB_ID MESHPAR_RUN_ID=$SLURM_JOB_ID-$restart",
    ):  # fmt: skip
        assert line in text.splitlines()
    assert '--node-rank="$SLURM_NODEID"' in text and "--nodes=2 --nproc=4" in text and "--kill-on-bad-exit=1" in text
    assert "sacct" not in text
    assert json.loads((made / "mesh.json").read_text())["axes"] == {"dp_replicate": 2, "dp_shard": 4}
    resolved = load_recipe(made / "recipe.resolved.yaml")
    assert (resolved.mesh, resolved.preflight) == ("dp_replicate=2,dp_shard=4", "warn")
    assert (made / "command.txt").read_text().startswith("meshpar ")


def test_a_gpu_job_asks_for_gpus(folder: Path) -> None:
    Path("job.yaml").write_text(RECIPE.replace("device: cpu\n", ""))
    launch_job("slurm", "job.yaml", ["output=runs/gpu"], gpus_per_node=8, nproc=None, mesh="auto,tp=2")
    text = (latest(Path("runs/gpu")) / "job.sbatch").read_text()
    assert "#SBATCH --gpus-per-node=8" in text and "--nproc=8" in text
    assert json.loads((latest(Path("runs/gpu")) / "mesh.json").read_text())["mesh"] == "dp_replicate=2,dp_shard=4,tp=2"


def test_mesh_auto_makes_hybrid_sharding_of_full(folder: Path) -> None:
    sharded = "mesh: dp_shard=2\npasses: [{FullyShard: {prefetch_forward: 1}}]"
    Path("job.yaml").write_text(RECIPE.replace("mesh: dp_replicate=2,dp_shard=1", sharded))
    resolved = load_recipe(render("slurm", nproc=2) / "recipe.resolved.yaml")
    assert resolved.passes == ({"HybridShard": {"prefetch_forward": 1}},)
    output = launch_job("slurm", "job.yaml", ["output=runs/again"], nproc=2, mesh="auto")
    assert "note: mesh auto: FullyShard became HybridShard" in output


def test_an_elastic_batch_script_outlives_a_node(folder: Path) -> None:
    text = (render("slurm", elastic="nodes") / "job.sbatch").read_text()
    for words in ("--nodes=1:2 --restarts=10 --rejoin-s=15", "--kill-on-bad-exit=0 --no-kill", "#SBATCH --no-kill"):
        assert words in text


def test_the_head_node_is_known_or_the_job_ends(folder: Path) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    variables["PATH"] = write_commands(folder, scontrol="exit 1", srun="touch started")
    script = render("slurm") / "job.sbatch"
    assert subprocess.run(["bash", script], env=os.environ | variables, check=False).returncode != 0
    assert not (folder / "started").exists()


def run_batch(folder: Path, script: Path, code: int, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a batch script whose srun ends with ``code``; what it requeues is written to the file ``requeues``."""
    scontrol = 'if [ "$1" = show ]; then echo n1; else echo "$@" >> requeues; fi'
    variables = {"PATH": write_commands(folder, scontrol=scontrol, srun=f"exit {code}")}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", **more}
    return subprocess.run(["bash", script], env=os.environ | variables, check=False, capture_output=True, text=True)


def requeues(folder: Path) -> list[str]:
    log = folder / "requeues"
    return log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize(
    ("code", "ends", "requeued"), [(0, 0, []), (1, 0, ["requeue 7"]), (78, 78, []), (138, 0, ["requeue 7"])]
)
def test_a_batch_script_requeues_what_may_succeed(folder: Path, code: int, ends: int, requeued: list[str]) -> None:
    assert run_batch(folder, render("slurm") / "job.sbatch", code).returncode == ends
    assert requeues(folder) == requeued


def test_requeues_for_failures_have_a_budget_that_time_limits_do_not_use(folder: Path) -> None:
    script = render("slurm", "max_requeues=2") / "job.sbatch"
    ended = [
        run_batch(folder, script, code, SLURM_RESTART_COUNT=str(number)).returncode
        for number, code in enumerate([138, 1, 138, 138, 1, 138, 1])
    ]
    assert ended == [0, 0, 0, 0, 0, 0, 1] and len(requeues(folder)) == 6


def test_a_task_of_a_job_array_requeues_itself_alone(folder: Path) -> None:
    run_batch(folder, render("slurm") / "job.sbatch", 1, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="3")
    assert requeues(folder) == ["requeue 7_3"]


def test_replicas_are_an_array(folder: Path) -> None:
    script = render("slurm", "cpus_per_task=2", elastic="replicas") / "job.sbatch"
    text = script.read_text()
    assert {"#SBATCH --nodes=1", "#SBATCH --array=0-1", "#SBATCH --exclusive"} <= set(text.splitlines())
    assert '--node-rank="$SLURM_ARRAY_TASK_ID" --head="$MESHPAR_LOGS/head"' in text
    wide = (render("slurm", mesh="dp_replicate=2,dp_shard=3", nodes=6, elastic="replicas") / "job.sbatch").read_text()
    assert {"#SBATCH --nodes=3", "#SBATCH --array=0-1"} <= set(wide.splitlines())
    assert "an array of one task a replica of 3 nodes" in wide
    rank = '--node-rank="$((SLURM_ARRAY_TASK_ID * 3 + SLURM_NODEID))"'
    assert f'--nodes=6 --restarts=10 \\\n  {rank} --head="$MESHPAR_LOGS/head"' in wide
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "1"}
    assert run_batch(folder, script, 75, **task).returncode == 0 and requeues(folder) == ["requeue 7_1"]
    logs = folder / "runs/slurm/logs/7-replicas"
    logs.mkdir()
    (logs / "complete").touch()  # by the others
    assert run_batch(folder, script, 75, **task).returncode == 0 and len(requeues(folder)) == 1


def test_a_time_limit_leaves_time_before_the_signal(folder: Path) -> None:
    for limit in ("soon", "1h", "0-", "1:2:3:4", "1-2:3:4:5"):
        with pytest.raises(LaunchError, match=f"time={limit}: expected MINUTES"):
            make_target("slurm", Slurm, [f"time={limit}"])
    for limit in ("6", "5:59", "0:06:00", "0-0:06", "0-0:5:59", "360:00"):
        refused = limit != "360:00"
        with pytest.raises(LaunchError, match="it must be above 360 s") if refused else contextlib.nullcontext():
            make_target("slurm", Slurm, [f"time={limit}"])
    for limit in ("7", "6:01", "0:6:1", "0-1", "UNLIMITED", "0"):
        make_target("slurm", Slurm, [f"time={limit}"])
    done = run_batch(folder, render("slurm") / "job.sbatch", 1, SLURM_JOB_END_TIME=str(int(time.time()) + 300))
    assert done.returncode == 78 and "the time limit must be above 360 s" in done.stderr and not requeues(folder)


def test_numbers_of_targets_have_bounds() -> None:
    numbers = (
        ("slurm", "signal_s=0"), ("slurm", "signal_s=65536"), ("kubernetes", "port=0"), ("skypilot", "port=65536"),
    )  # fmt: skip
    for name, text in numbers:
        with pytest.raises(LaunchError, match=f"{text.partition('=')[0]} must be an integer from 1"):
            make_target(name, registry.plugin("meshpar.launchers", name), [text])


SCHEMAS = yaml.safe_load((Path(__file__).parent / "kubernetes_schemas.yaml").read_text())


def strict(schema: Any) -> Any:
    """The schema, which knows every field."""
    if isinstance(schema, dict):
        closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
        return {**{key: strict(value) for key, value in schema.items()}, **closed}
    return schema


def checked(path: Path) -> dict[str, Any]:
    """The documents of a job file by kind, each as its newest schema has it."""
    validation = pytest.importorskip("kubernetes_validate", reason="pip install 'meshpar[test]'")
    documents = {document["kind"]: document for document in yaml.safe_load_all(path.read_text())}
    for kind, document in documents.items():
        known = document
        if kind in SCHEMAS:
            jsonschema = importlib.import_module("jsonschema")
            jsonschema.validate(document["spec"], strict(SCHEMAS[kind]))
            known = {key: document[key] for key in ("metadata",)} | {"apiVersion": "v1", "kind": "ConfigMap"}
        if kind == "JobSet":
            (part,) = document["spec"]["replicatedJobs"]
            known = {**known, "apiVersion": "batch/v1", "kind": "Job", **part["template"]}
        validation.validate(known, validation.latest_version(), strict=True)
    return documents


def test_kubernetes_takes_the_files(folder: Path) -> None:
    made = render("kubernetes", "image=registry/me:1", "claim=runs", "namespace=team", "memory=8Gi", nproc=2)
    service, recipe, job = checked(made / "job.yaml").values()
    assert service["spec"]["clusterIP"] == "None" and job["spec"]["completionMode"] == "Indexed"
    assert recipe["data"]["recipe.yaml"] == (made / "recipe.resolved.yaml").read_text()
    assert {document["metadata"]["namespace"] for document in (service, recipe, job)} == {"team"}
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["Ignore", "FailJob"], "an eviction is no failure"
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert pod["containers"][0]["resources"]["limits"] == {"memory": "8Gi"}
    for wrong in (("completionMode", "completionMood"), ("clusterIP", "clusterIp")):
        (folder / "broken.yaml").write_text((made / "job.yaml").read_text().replace(*wrong))
        with pytest.raises(Exception, match=wrong[1]):
            checked(folder / "broken.yaml")


def test_a_pod_is_no_root_and_has_no_account_of_the_cluster(folder: Path) -> None:
    for options in ((), ("jobset=true",)):
        *_, job = checked(render("kubernetes", *options) / "job.yaml").values()
        spec = job["spec"]["replicatedJobs"][0]["template"]["spec"] if options else job["spec"]
        pod = spec["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False and pod["securityContext"] == {"runAsNonRoot": True}
    *_, job = checked(render("kubernetes", "root=true") / "job.yaml").values()
    assert "securityContext" not in job["spec"]["template"]["spec"]
    lines = (Path(__file__).parents[2] / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users and users[-1].isdecimal() and int(users[-1]) > 0, "a name could be root, for Kubernetes"


def test_a_jobset_restarts_all_pods_together(folder: Path) -> None:
    made = render("kubernetes", "jobset=true", "restarts=3", "kueue=team-a", nproc=2)
    _, jobset = checked(made / "job.yaml").values()
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"} and jobset["spec"]["suspend"] is True
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 3
    (part,) = jobset["spec"]["replicatedJobs"]
    job = part["template"]["spec"]
    assert (job["backoffLimit"], job["completions"]) == (0, 2)
    assert "suspend" not in job, "JobSet suspends its Jobs by itself"
    (train,) = job["template"]["spec"]["containers"]
    head = "--head=my-job-001-node-0-0.my-job-001:29400"
    assert head in train["command"][2], "the name that JobSet gives the first pod"
    assert "jobset-uid" in train["env"][0]["valueFrom"]["fieldRef"]["fieldPath"], "equal in all restarts"
    for wrong in (("FailJobSet", "FailAll"), ("replicas:", "replica:")):
        (folder / "broken.yaml").write_text((made / "job.yaml").read_text().replace(*wrong))
        with pytest.raises(Exception, match=wrong[1].rstrip(":")):
            checked(folder / "broken.yaml")


def test_queues_of_kueue_and_volcano(folder: Path) -> None:
    job = checked(render("kubernetes", "kueue=team-a") / "job.yaml")["Job"]
    assert job["spec"]["suspend"] is True and job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    documents = checked(render("kubernetes", "volcano=team-b") / "job.yaml")
    assert documents["PodGroup"]["spec"] == {"minMember": 2, "queue": "team-b"}
    template = documents["Job"]["spec"]["template"]
    group = documents["PodGroup"]["metadata"]["name"]
    assert template["metadata"]["annotations"] == {"scheduling.k8s.io/group-name": group}
    assert template["spec"]["schedulerName"] == "volcano"
    assert "PodGroup" in checked(render("kubernetes", "volcano=team-b", "jobset=true") / "job.yaml")


def test_kubeflow_takes_the_file(folder: Path) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install 'meshpar[test]'")
    text = (render("trainjob", "memory=8Gi", "kueue=team-a", nproc=2) / "job.yaml").read_text()
    written = yaml.safe_load(text)
    job = models.TrainerV1alpha1TrainJob.from_dict(written)
    assert job.spec.trainer.num_nodes == 2 and job.spec.trainer.num_proc_per_node == 2
    assert job.spec.runtime_ref.name == "torch-distributed" and job.spec.suspend
    assert written["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    read = job.to_dict()
    assert read["spec"] == written["spec"], "nothing that its models do not know"


def run_as_hosts(hosts: Hosts, folder: Path, command: list[str], variables: list[dict[str, str]]) -> None:
    """Run a pod's command on each host, with what the engine would set there."""
    path = f"{write_command(folder / 'meshpar').parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    started = [
        subprocess.Popen(
            hosts.command(name, ["env", f"PATH={path}", "OMP_NUM_THREADS=1", *(f"{key}={value}" for key, value in more.items()), *command]),
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for name, more in zip(hosts.names, variables)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=150)[0] for process in started]
    finally:
        for process in started:  # where one hangs, none is left
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs


@pytest.mark.timeout(400)
def test_the_commands_run_as_two_hosts(folder: Path) -> None:
    made = {target: render(target) for target in ("kubernetes", "trainjob")}
    try:
        with Hosts(2, aliases={f"my-job-001-{node}.my-job-001": f"n{node + 1}" for node in range(2)}) as hosts:
            _, config, job = yaml.safe_load_all((made["kubernetes"] / "job.yaml").read_text())
            mounted = folder / "mounted"  # as the kubelet mounts the ConfigMap at /job
            mounted.mkdir()
            (mounted / "recipe.yaml").write_text(config["data"]["recipe.yaml"])
            homeless = ["env", "--unset=HOME", "--unset=USER"]
            command = job["spec"]["template"]["spec"]["containers"][0]["command"]
            command = [*homeless, *(word.replace("/job/", f"{mounted}/") for word in command)]
            run_as_hosts(hosts, folder, command, [{"JOB_COMPLETION_INDEX": str(node)} for node in range(2)])

            trainer = yaml.safe_load((made["trainjob"] / "job.yaml").read_text())["spec"]["trainer"]
            common = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "n1", "PET_MASTER_PORT": "29402"}
            command = [*homeless, *trainer["command"], *trainer["args"]]
            run_as_hosts(hosts, folder, command, [{**common, "PET_NODE_RANK": str(n)} for n in range(2)])
    except Unavailable as reason:
        pytest.skip(str(reason))
    for target, at in made.items():
        lines = [json.loads(line) for line in (at.parent.parent / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines if "train/loss" in line] == [1, 2, 3], target


def test_skypilots_command_says_where_a_node_is(folder: Path) -> None:
    task = yaml.safe_load((render("skypilot", "port=29401") / "job.yaml").read_text())
    assert task["num_nodes"] == 2 and "accelerators" not in task["resources"]
    variables = {"SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8", "SKYPILOT_NODE_RANK": "1"}
    variables["PATH"] = write_commands(folder, meshpar='echo "$@"; cat "${@: -1}"')
    printed = subprocess.check_output(["bash", "-c", task["run"]], env=os.environ | variables, text=True)
    said, _, recipe = printed.partition("\n")
    assert said.startswith("run --nodes=2 --nproc=1 --node-rank=1 --head=10.0.0.7:29401 ")
    assert recipe == (latest(folder / "runs" / "skypilot") / "recipe.resolved.yaml").read_text()


def test_skypilots_gpus_are_counted_once(folder: Path) -> None:
    fields, gpus = ["output=runs/gpus", "device=auto"], {"gpus_per_node": 8, "nproc": None, "mesh": "auto"}
    for written in ("H100", "H100:8"):
        launch_job("skypilot", "job.yaml", fields, options=[f"accelerators={written}"], **gpus)
        task = yaml.safe_load((latest(Path("runs/gpus")) / "job.yaml").read_text())
        assert task["resources"]["accelerators"] == "H100:8"


def test_problems_are_found_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(PlanError, match="the recipe has device: cpu and the job has 8 GPUs"):
        launch_job("slurm", "job.yaml", ["output=runs/x"], nodes=1, gpus_per_node=8, nproc=None, mesh="dp_shard=8")
    with pytest.raises(LaunchError, match="--elastic requires the target slurm"):
        render("kubernetes", elastic="nodes")
    for wanted, more, match in (
        ("node", {}, "expected nodes or replicas"),
        ("replicas", {"mesh": "dp_shard=2"}, "has one replica"),
        ("replicas", {"mesh": "dp_replicate=3,dp_shard=2", "nodes": 2, "nproc": 3}, "3 replicas on 2 nodes"),
    ):
        with pytest.raises((LaunchError, MeshError), match=match):
            launch_job("slurm", "job.yaml", [], **{"nodes": 1, "nproc": 2, "elastic": wanted, **more})
    with pytest.raises(LaunchError, match="--elastic=replicas is for recipes"):
        launch_job("slurm", __file__, [], elastic="replicas")
    with pytest.raises(MeshError, match="needs 2 ranks, got 4"):
        render("slurm", mesh=None, nproc=2)
    with pytest.raises(LaunchError, match="ranks per node is 0"):
        launch_job("slurm", "job.yaml", [], nproc=None)
    with pytest.raises(LaunchError, match="skypilot requires the name of the GPUs"):
        launch_job("skypilot", "job.yaml", ["device=auto"], gpus_per_node=8, nproc=None, mesh="auto")
    assert not Path("runs").exists()


def test_each_launch_has_a_folder_of_its_own(folder: Path) -> None:
    first = render("slurm")
    (first / "job.sbatch").write_text("edited")
    second = render("slurm", "time=1:00:00")
    assert (first.name, second.name) == ("001", "002") and (first / "job.sbatch").read_text() == "edited"
    assert f"work=({folder}/runs/slurm/launches/002/recipe.resolved.yaml)" in (second / "job.sbatch").read_text()


def test_a_script_is_run_here_before_its_job_is_rendered(folder: Path) -> None:
    launch_script = partial(launch_job, "slurm", "train.py", ["--lr", "3"], nproc=2)
    expected = "['--lr', '3', '--dry-run', 'a b']"
    (folder / "train.py").write_text(f"import sys; sys.exit(0 if sys.argv[1:] == {expected} else 3)")
    output = launch_script()
    assert output.startswith("train: 4 ranks on 2 x 2\n")
    assert "note: the script is not checked here; --check ARGUMENTS" in output
    assert "not checked" not in launch_script(check="--dry-run 'a b'")
    launches = len(list(Path("runs/train/launches").iterdir()))
    with pytest.raises(LaunchError, match=r"check train.py --lr 3 --wet ended with exit code 3; correct the script"):
        launch_script(check="--wet")
    assert len(list(Path("runs/train/launches").iterdir())) == launches == 2


def test_a_script_is_launched_with_its_arguments(folder: Path) -> None:
    (folder / "train.py").write_text("")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0", "JOB_COMPLETION_INDEX": "0"}
    variables |= {"SKYPILOT_TASK_ID": "t", "SKYPILOT_NODE_IPS": "n1"}
    variables["PATH"] = write_commands(folder, meshpar='printf "%s|" "$@"', srun='exec "${@:2}"', scontrol="echo n1")
    for what, module, message in (
        ("train.py", False, "train.py|--lr|3 '4|"),
        ("jobs.train", True, "-m|jobs.train|--lr|3 '4|"),
    ):
        for target in ("slurm", "kubernetes", "trainjob", "skypilot"):
            options = [f"meshpar={folder / 'bin' / 'meshpar'}"] if target == "slurm" else []
            launch_job(target, what, ["--lr", "3 '4"], nproc=2, options=options, module=module)
            made = latest(Path("runs/train"))
            *_, job = yaml.safe_load_all((made / "job.yaml").read_text()) if target != "slurm" else [None]
            command = {
                "slurm": lambda _, made=made: ["bash", made / "job.sbatch"],
                "kubernetes": lambda job: job["spec"]["template"]["spec"]["containers"][0]["command"],
                "trainjob": lambda job: [*job["spec"]["trainer"]["command"], *job["spec"]["trainer"]["args"]],
                "skypilot": lambda job: ["bash", "-c", job["run"]],
            }[target](job)
            printed = subprocess.check_output(command, env=os.environ | variables, text=True)
            assert printed.startswith("run|") and printed.endswith(message), (target, printed)
            assert not (made / "mesh.json").exists(), "a script makes its own mesh"
    for script, options, refused in (
        ("train.py", {"mesh": "auto"}, "--mesh is for recipes"),
        ("train.py", {"preflight": "fail"}, "--preflight is for recipes"),
        ("absent.py", {}, r"there is no file absent\.py"),
    ):
        with pytest.raises(LaunchError, match=refused):
            launch_job("slurm", script, [], **options)


def test_further_options_of_sbatch_are_passed_on_and_those_that_meshpar_writes_are_not(folder: Path) -> None:
    script = render("slurm", "sbatch=--mem=0 --exclude=n7", "sbatch=--array=0-9%1") / "job.sbatch"
    lines = script.read_text().splitlines()
    assert {"#SBATCH --mem=0", "#SBATCH --exclude=n7", "#SBATCH --array=0-9%1"} <= set(lines)
    messages = {
        "-x n7": "'-x' is not a long option", "--mem 0": "'0' is not a long option", "--time=5:00": "write -o time=5:00",
        "--nodes=3": "meshpar writes --nodes", "--array=0-9": "would train in one folder; write --array=0-9%1",
        "--array=1,2%2": "write --array=1,2%1 to", '--comment="a': "No closing quotation in '--comment=\"a'; close the quotes",
    }  # fmt: skip
    for given, expected in messages.items():
        with pytest.raises(LaunchError, match=re.escape(expected)):
            make_target("slurm", Slurm, [f"sbatch={given}"])


def test_a_patch_adds_to_a_kubernetes_job_and_changes_nothing(folder: Path) -> None:
    """The page's patch has what admins ask for."""
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text()
    (patch,) = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "tolerations" in block]
    Path("patch.yaml").write_text(f"{patch}---\nkind: Service\nmetadata: {{labels: {{team: me}}}}\n")
    documents = checked(render("kubernetes", "patch=patch.yaml") / "job.yaml")
    plain = list(yaml.safe_load_all((render("kubernetes") / "job.yaml").read_text()))[2]
    assert documents["Service"]["metadata"]["labels"] == {"team": "me"}
    assert documents["Job"]["spec"]["ttlSecondsAfterFinished"] == 86400
    pod, before = documents["Job"]["spec"]["template"]["spec"], plain["spec"]["template"]["spec"]
    (train,), (as_before,) = pod["containers"], before["containers"]
    assert {
        "nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets", "serviceAccountName",
    } <= pod.keys() - before.keys()  # fmt: skip
    assert train["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "rdma/hca" in train["resources"]["limits"]
    assert train["command"] == [word.replace("002", "001") for word in as_before["command"]] and train["envFrom"]
    assert [variable["name"] for variable in train["env"]] == ["MESHPAR_JOB_ID", "NCCL_DEBUG"]
    messages = {
        "spec: {completions: 3}": "sets Job.spec.completions to 3, and meshpar writes 2",
        "spec: {template: {spec: {containers: [{name: train, command: [sh]}]}}}": "containers.train.command to ['sh'], and meshpar writes",
        "kind: Secret": "is a patch of a Secret; expected one of Service, ConfigMap, Job",
        "- a": "is not a mapping", "a: [": "cannot read patch",
    }  # fmt: skip
    if importlib.util.find_spec("kubernetes_validate") is not None:
        messages["spec: {ttlSeconds: 3}"] = (
            "the patched Job is not valid: spec: Additional properties are not allowed ('ttlSeconds'"
        )
    for text, expected in messages.items():
        Path("patch.yaml").write_text(text)
        with pytest.raises(LaunchError, match=re.escape(expected)):
            render("kubernetes", "patch=patch.yaml")
    Path("patch.yaml").write_text("spec: {replicatedJobs: [{name: node, template: {spec: {ttlSeconds: 3}}}]}")
    with pytest.raises(LaunchError, match="the patched JobSet is not valid"):
        render("kubernetes", "jobset=true", "patch=patch.yaml")
    Path("patch.yaml").write_text("spec: {ttlSecondsAfterFinished: 3}")
    assert checked(render("kubernetes", "patch=patch.yaml") / "job.yaml")["Job"]["spec"]["ttlSecondsAfterFinished"] == 3


def test_files_of_the_cluster_are_checked_there_and_the_launch_says_so(folder: Path) -> None:
    there = ["data.paths=[/cluster/text]", "model.weights=/cluster/weights", "output=runs/x"]
    output = launch_job("kubernetes", "job.yaml", there, mesh="auto")
    assert "note: data.paths: /cluster/text is not on this machine; the job checks it when it starts" in output
    assert "note: model.weights: /cluster/weights is not on this machine; the job checks it when it starts" in output
    with pytest.raises(RecipeError, match="weights: /cluster/weights does not exist"):
        launch_job("slurm", "job.yaml", there, mesh="auto")
    with pytest.raises(PlanError, match=r"tp"):
        launch_job("kubernetes", "job.yaml", there, nodes=1, nproc=3, mesh="tp=3")
    model = ["model={kind: huggingface, config: /cluster/llama}", "passes=[HybridShard]"]
    output = launch_job("kubernetes", "job.yaml", [*there[::2], *model], mesh="auto")
    assert "note: the plan is checked when the job starts" in output


def test_a_job_whose_checkpoints_would_be_lost_with_its_pods_says_so(folder: Path) -> None:
    def notes(*arguments: str, options: tuple[str, ...] = ()) -> str:
        return launch_job("kubernetes", "job.yaml", arguments, mesh="auto", options=options)

    assert "note: without -o claim=NAME, /workspace is a folder that each pod has for itself" in notes()
    assert "claim" not in notes(options=("claim=runs",))
    assert "claim" not in notes("output=/volume/run")


def test_two_runs_have_folders_of_their_own_in_a_bucket(folder: Path) -> None:
    mounts = []
    elsewhere = folder.with_name(f"{folder.name}-2")
    for output in ("runs/a", "runs/b", elsewhere / "a", elsewhere / "b"):
        launch_job("skypilot", "job.yaml", [f"output={output}"], mesh="auto", options=["bucket=s3://b"])
        mounts.append(yaml.safe_load((latest(Path(output)) / "job.yaml").read_text())["file_mounts"])
    places = {f"~/sky_workdir/runs/{name}": f"s3://b/runs/{name}" for name in "ab"} | {
        f"{elsewhere}/{name}": f"s3://b{elsewhere}/{name}" for name in "ab"
    }
    assert mounts == [{place: {"source": source, "mode": "MOUNT"}} for place, source in places.items()]


def test_options_of_a_target_are_checked_all_at_once() -> None:
    with pytest.raises(LaunchError) as caught:
        make_target("slurm", Slurm, ["partitoin=gpu", "signal_s=soon", "qos=high"])
    assert "'partitoin=gpu': slurm has no such option, written as KEY=VALUE; nearest: partition" in str(caught.value)
    assert "'signal_s=soon': expected an integer" in str(caught.value)
    assert "qos" not in str(caught.value)


def test_options_given_twice_are_joined_or_refused() -> None:
    made = make_target("slurm", Slurm, ["setup=module load cuda", "setup=conda activate train"])
    assert made.setup == "module load cuda\nconda activate train"
    with pytest.raises(LaunchError, match="30,000 options of slurm; expected at most 500"):
        make_target("slurm", Slurm, ["grown=1"] * 30_000)


HARD = "a: [b\n#SBATCH --nodes=9 'c\"\\"


@pytest.mark.parametrize("target", ["slurm", "kubernetes", "trainjob", "skypilot"])
def test_no_text_changes_the_structure_of_a_job_file(folder: Path, monkeypatch: Any, target: str) -> None:
    """A line break is refused where a job file has one line, and text is quoted elsewhere."""
    cls = registry.plugin("meshpar.launchers", target)
    for name, hint in get_type_hints(cls).items():
        if hint is str:
            with pytest.raises(LaunchError, match="expected one line without control characters"):
                make_target(target, cls, [f"{name}={HARD}"])
    with pytest.raises(LaunchError, match=r"the run's name is 'a\\nb'"):
        launch_job(target, "job.yaml", ['name="a\\nb"'], mesh="auto")
    monkeypatch.setattr(sys, "argv", ["meshpar", "launch", HARD])
    hard = HARD.replace("\n", " ")
    options = {
        "slurm": [f"setup=echo '{HARD}'"], "skypilot": [f"setup={HARD}", f"bucket={hard}"], "trainjob": [f"image={hard}", f"workdir={hard}"],
        "kubernetes": [f"image={hard}", f"claim={hard}", f"workdir={hard}"],
    }[target]  # fmt: skip
    made = render(target, *options)
    command = (made / "command.txt").read_text()
    words = subprocess.check_output(["bash", "-c", f"printf '%s|' {command}"], text=True)
    assert words == f"meshpar|launch|{HARD}|"
    if target == "slurm":
        text = (made / "job.sbatch").read_text()
        assert "--nodes=9" not in text.partition("set -eo pipefail")[0].replace(command.strip(), "")
        return
    documents = list(yaml.safe_load_all((made / "job.yaml").read_text()))
    assert any(hard in text for text in _texts(documents))


def _texts(node: Any) -> list[str]:
    if isinstance(node, dict):
        return [text for key, value in node.items() for text in (str(key), *_texts(value))]
    return [text for inner in node for text in _texts(inner)] if isinstance(node, list) else [str(node)]


def test_setup_runs_as_scripts_of_conda_expect(folder: Path) -> None:
    """They read variables that are not set; a command that fails ends the job still."""
    script = render("slurm", 'setup=echo "[$NOT_SET]"') / "job.sbatch"
    environment = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n" and "SLURM_JOB_NODELIST: unbound variable" in done.stderr
    failing = render("slurm", "setup=false") / "job.sbatch"
    done = subprocess.run(["bash", failing], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("path", "word"),
    [("/my env/meshpar", "/my env/meshpar"), ("~/$E/meshpar", "/home/me/env/meshpar"), ('/"`\\x', '/"`\\x')],
)
def test_the_command_on_the_nodes_is_one_word(folder: Path, path: str, word: str) -> None:
    lines = (render("slurm", f"meshpar={path}") / "job.sbatch").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("export MESHPAR=")]
    command, variables = ["bash", "-c", f'{line}; printf %s "$MESHPAR"'], {"HOME": "/home/me", "E": "env"}
    assert subprocess.check_output(command, env=variables, text=True) == word


def test_submission_without_the_engine_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(LaunchError, match="sky is not installed here"):
        render("skypilot", submit=True)


def test_the_command_tells_what_it_made(folder: Path) -> None:
    shape = ("--nodes", 2, "--gpus-per-node", 0, "--nproc", 2, "--mesh", "auto")
    done = meshpar("launch", "slurm", "job.yaml", *shape)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("My_Job: 4 ranks, dp_replicate=2,dp_shard=2 on 2 x 2\n")
    assert f"submit it: sbatch {folder}/runs/My_Job/launches/001/job.sbatch" in done.output


def test_names_that_kubernetes_takes() -> None:
    assert dns_label("My_Job v2.") == "my-job-v2"
    assert (dns_label("7b_run"), dns_label("...")) == ("job-7b-run", "job")
    assert len(dns_label("x" * 90)) == 50


@pytest.mark.parametrize(
    ("mesh", "ranks", "left"),
    [
        ("dp_replicate=2,dp_shard=4", 4, "dp_replicate=1,dp_shard=4"),
        ("dp_replicate=4,dp_shard=4,tp=2", 24, "dp_replicate=3,dp_shard=4,tp=2"),
        ("dp_replicate=2,dp_shard=4", 6, "dp_replicate=2,dp_shard=3"),
        ("dp_shard=8,tp=2", 6, "dp_shard=3,tp=2"),
    ],
)
def test_a_mesh_is_worked_out_anew_from_what_is_left(mesh: str, ranks: int, left: str) -> None:
    assert str(MeshSpec(mesh).shrunk(ranks)) == left


def test_ranks_that_make_no_legal_mesh_are_refused(folder: Path) -> None:
    recipe = load_recipe("job.yaml", ["mesh=dp_shard=2,tp=2"])
    with pytest.raises(LaunchError, match=r"3 of the job's 4 ranks are left: .* tp=2 needs a multiple of 2"):
        build.fit_recipe(recipe, 3, 4)
    assert build.fit_recipe(recipe, 4, 4) is recipe
    smaller = build.fit_recipe(recipe, 2, 4)
    assert (smaller.mesh, smaller.data.accumulate) == ("dp_shard=1,tp=2", 2), "the same global batch"


@pytest.mark.parametrize(
    ("mesh", "micro_batch", "accumulate", "left", "now", "message"),
    [
        ("dp_shard=-1", 3, 1, 3, ("dp_shard=3", 2, 2), "2 x 2 a data rank instead of 1 x 3: 12 in all as before"),
        ("", 6, 2, 2, ("dp_shard=2", 6, 4), "48 in all as before"),
        ("dp_shard=4", 2, 1, 3, ("dp_shard=3", 1, 3), "9 in all instead of 8, which 3 ranks do not divide"),
        ("dp_replicate=2,dp_shard=-1", 4, 1, 3, ("dp_replicate=3,dp_shard=1", 1, 5), "15 in all instead of 16"),
        ("auto", 1, 1, 2, ("dp_replicate=1,dp_shard=2", 1, 2), "4 in all as before"),
    ],
)
def test_the_batch_of_an_elastic_job_is_kept_or_its_change_is_told(
    folder, monkeypatch, mesh, micro_batch, accumulate, left, now, message
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    batch = [f"data.micro_batch={micro_batch}", f"data.accumulate={accumulate}"]
    recipe = load_recipe("job.yaml", [f"mesh={mesh}", *batch])
    fitted = build.fit_recipe(recipe, left, 4)
    assert (fitted.mesh, fitted.data.micro_batch, fitted.data.accumulate) == now
    assert message in fitted.notes[-1]


def test_a_preflight_of_another_name_is_refused_before_anything_is_rendered(folder: Path) -> None:
    with pytest.raises(RecipeError, match="preflight"):
        render("slurm", preflight="sometimes")
    assert not (folder / "runs").exists()
    for wanted, message in (("off", "preflight: 'off'"), ("fail", "preflight: fail"), (None, "preflight: warn")):
        assert message in (render("slurm", preflight=wanted) / "recipe.resolved.yaml").read_text()


def test_the_launch_advises_its_own_options(folder: Path) -> None:
    output = meshpar("launch", "slurm", "--help").output
    assert "Options of slurm, as -o KEY=VALUE:" in output
    assert "signal_s: seconds before" in output
    assert "Options of skypilot" not in output


@pytest.mark.parametrize("container", ["pyxis", "apptainer"])
def test_the_tasks_of_a_batch_script_run_in_a_container(folder: Path, container: str) -> None:
    with pytest.raises(LaunchError, match="container=docker: expected pyxis or apptainer"):
        render("slurm", "image=x", "container=docker")
    made = render("slurm", "image=team/train:1", f"container={container}", "mounts=/data", "mounts=/scratch/a b:/tmp")
    variables = {"PATH": write_commands(folder, scontrol="echo n1", srun='printf "%s\\n" "$@"')}
    variables |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"}
    words = subprocess.check_output(["bash", made / "job.sbatch"], env=variables, text=True).splitlines()
    run, mounts = f"{folder}/runs/slurm", ["/data", "/scratch/a b:/tmp"]
    expected = {
        "pyxis": [
            "--container-image=team/train:1", f"--container-mounts={folder}:{folder},{run}:{run},/data:/data,/scratch/a b:/tmp",
            f"--container-workdir={folder}",
        ],
        "apptainer": ["apptainer", "exec", "--bind", ",".join([str(folder), run, *mounts]), "--pwd", str(folder), "team/train:1"],
    }[container]  # fmt: skip
    assert words[1 : words.index("bash")] == expected
    assert "export MESHPAR=meshpar" in (made / "job.sbatch").read_text(), "the image's"


def test_jobs_of_a_slurm_that_has_forgotten_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By sacct where there is accounting; else by what the job itself left."""
    made = [folder / render("slurm") for _ in range(4)]
    sacct, scancel = '[ -e accounting ] && printf "%s\\n" "7|TIMEOUT"', 'echo "$@" >> cancelled'
    squeue = f"echo '9|PENDING|{made[2]}/job.sbatch'"
    monkeypatch.setenv("PATH", write_commands(folder, squeue=squeue, sacct=sacct, scancel=scancel))
    for number, at in ((7, made[0]), (8, made[1])):
        (at / f"slurm-{number}.out").touch()
    (folder / "runs" / "slurm" / "logs" / "8-0").mkdir()
    (folder / "runs" / "slurm" / "logs" / "8-0" / "complete").touch()
    assert states("runs") == ["7 ended", "8 COMPLETED", "9 PENDING", "- not submitted"]
    (folder / "accounting").touch()
    assert states("runs")[:2] == ["7 TIMEOUT", "8 COMPLETED"]
    assert meshpar("jobs", "cancel", made[2]).output == "cancelled 9\n"
    assert (folder / "cancelled").read_text() == "9\n"
    refused = meshpar("jobs", "cancel", "runs/slurm")
    assert refused.exit_code == 1 and "runs/slurm/launches/004 cannot be cancelled: not submitted" in refused.output
    assert "has not started" in meshpar("jobs", "logs", "runs/slurm").output
    assert "no launches in elsewhere" in meshpar("jobs", "ls", "elsewhere").output
    write_commands(folder, squeue="exec sleep 60")
    monkeypatch.setattr("meshpar.launchers.targets.slurm.ask", lambda command: job_module.ask(command, limit_s=0.2))
    output = meshpar("jobs", "ls").output
    assert "note: squeue did not answer within 0 s" in output and "?" in output


def test_the_thousandth_launch_is_newer_than_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in ("998", "999", "1000"):
        folder = tmp_path / "runs/r/launches" / number
        folder.mkdir(parents=True)
        note = {"target": "skypilot", "options": [], "file": "job.yaml", "label": f"r-{number}"}
        (folder / "launch.json").write_text(json.dumps(note))
    monkeypatch.setattr("meshpar.launchers.targets.skypilot.ask", lambda command: "[]")
    output = meshpar("jobs", "ls").output
    assert re.findall(r"launches/(\d+)", output) == ["998", "999", "1000"]
    assert meshpar("jobs", "status", "runs/r").output.startswith("runs/r/launches/1000: ")


def states(root: str) -> list[str]:
    """Number and state of each launch, as `meshpar jobs ls` prints them."""
    lines = meshpar("jobs", "ls", root).output.splitlines()[1:]
    return [" ".join(line.split()[2:]) for line in lines]


@final
class ApiServer(http.server.BaseHTTPRequestHandler):
    """As much of Kubernetes's API as kubectl asks for: the kinds, named objects of a namespace, pods and their logs."""

    objects: ClassVar[dict[str, Any]] = {}
    deleted: ClassVar[list[str]] = []
    kinds: ClassVar[dict[str, list[tuple[str, str]]]] = {
        "v1": [("services", "Service"), ("configmaps", "ConfigMap"), ("pods", "Pod")],
        "batch/v1": [("jobs", "Job")],
        "jobset.x-k8s.io/v1alpha2": [("jobsets", "JobSet")],
    }

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        group = path.removeprefix("apis/").removeprefix("api/")
        if path == "api":
            self.answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            versions = [{"groupVersion": kind, "version": kind.partition("/")[2]} for kind in self.kinds if "/" in kind]
            groups = [
                {"name": version["groupVersion"].partition("/")[0], "versions": [version], "preferredVersion": version}
                for version in versions
            ]
            self.answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif group in self.kinds:
            listed = [
                {"name": plural, "kind": kind, "namespaced": True, "verbs": ["get", "list", "delete"]}
                for plural, kind in self.kinds[group]
            ]
            self.answer({"kind": "APIResourceList", "groupVersion": group, "resources": listed})
        elif path.endswith("/log"):
            self.answer(f"said in {path.split('/')[-2]}\n".encode())
        elif path.endswith("/pods"):
            selected = urllib.parse.parse_qs(self.path.partition("?")[2])["labelSelector"][0]
            pods = [resource for resource in self.objects.values() if resource["kind"] == "Pod"]
            labels = [[f"{key}={value}" for key, value in pod["metadata"]["labels"].items()] for pod in pods]
            chosen = [pod for pod, words in zip(pods, labels) if selected in words]
            self.answer({"kind": "PodList", "apiVersion": "v1", "items": chosen})
        else:
            absent = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            self.answer(self.objects.get(path, absent))

    def do_DELETE(self) -> None:
        self.deleted.append(self.path.partition("?")[0].strip("/"))
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})

    def answer(self, body: Any) -> None:
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(404 if isinstance(body, dict) and body.get("code") == 404 else 200)
        self.send_header("Content-Type", "text/plain" if isinstance(body, bytes) else "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize(("option", "plural", "label"), [
    ("jobset=false", "batch/v1/namespaces/team/jobs", "batch.kubernetes.io/job-name"),
    ("jobset=true", "jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets", "jobset.sigs.k8s.io/jobset-name"),
])  # fmt: skip
def test_jobs_of_kubernetes_by_the_real_kubectl(folder, monkeypatch, capfd, option, plural, label) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    monkeypatch.setattr(ApiServer, "objects", {})
    monkeypatch.setattr(ApiServer, "deleted", [])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ApiServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        user = {"clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
                "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}], "users": [{"name": "u"}], "current-context": "c"}  # fmt: skip
        (folder / "config").write_text(json.dumps(user))
        monkeypatch.setenv("KUBECONFIG", str(folder / "config"))
        monkeypatch.setenv("HOME", str(folder))  # kubectl keeps what it has discovered there
        first, second = (render("kubernetes", "namespace=team", option) for _ in range(2))
        documents = list(yaml.safe_load_all((first / "job.yaml").read_text()))
        assert states("runs") == ["my-job-001 not submitted", "my-job-002 not submitted"]
        running = {**documents[-1], "status": {"ready": 2, "replicatedJobsStatus": [{"name": "node", "ready": 1}]}}
        ApiServer.objects[f"apis/{plural}/my-job-001"] = running
        for name in ("p0", "p1"):
            metadata = {"name": name, "namespace": "team", "labels": {label: "my-job-001"}}
            pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": {"containers": [{"name": "train"}]}}
            ApiServer.objects[f"api/v1/namespaces/team/pods/{name}"] = pod
        assert states("runs") == ["my-job-001 Running", "my-job-002 not submitted"]
        running["status"] = {"conditions": [{"type": "Failed", "status": "True"}]}
        assert states("runs")[0] == "my-job-001 Failed"
        output = meshpar("jobs", "status", first).output
        assert "runs/kubernetes/launches/001: kubernetes my-job-001, Failed" in output
        assert "p0" in output and "p1" in output
        with pytest.raises(SystemExit) as left:
            app(["jobs", "logs", str(first)])
        printed = capfd.readouterr().out.splitlines()
        assert left.value.code == 0 and sorted(printed) == [f"[pod/p{node}/train] said in p{node}" for node in range(2)]
        assert meshpar("jobs", "cancel", second).exit_code == 1, "it was never submitted"
        assert ApiServer.deleted == []
        assert meshpar("jobs", "cancel", first).exit_code == 0
        assert f"apis/{plural}/my-job-001" in ApiServer.deleted
        assert "api/v1/namespaces/team/configmaps/my-job-001-recipe" in ApiServer.deleted
        server.shutdown()
    output = meshpar("jobs", "status", first)
    assert output.exit_code == 1 and "refused" in output.output
    monkeypatch.setenv("PATH", "/nowhere")
    output = meshpar("jobs", "status", first)
    assert "kubectl is not installed here; on a machine that has it, run: kubectl get" in output.output


def test_kubectl_is_what_hands_kubernetes_files_over() -> None:
    target = make_target("kubernetes", registry.plugin("meshpar.launchers", "kubernetes"), [])
    command = ["kubectl", "create", "-f", "job.yaml"]
    assert target.submit(Path("job.yaml")) == command, "which changes no object that exists"


def test_jobs_of_skypilot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options are those of skypilot 0.14; it has one name for all starts of a launch."""
    first = render("skypilot")
    render("skypilot")
    rows = ((9, "my-job-001", "RUNNING"), (4, "my-job-001", "FAILED"), (8, None, None))
    (folder / "rows").write_text(json.dumps([dict(zip(("job_id", "job_name", "status"), row)) for row in rows]))
    sky = 'echo "$@" >> said\n[ "$2" != queue ] || cat rows'
    monkeypatch.setenv("PATH", write_commands(folder, sky=sky))
    assert states("runs") == ["my-job-001 RUNNING", "my-job-002 not submitted"]
    for command in ("status", "logs", "cancel"):
        assert meshpar("jobs", command, first).exit_code == 0
    queue, name = "jobs queue --all --output=json", "--name=my-job-001"
    said = [queue, queue, "jobs queue", f"jobs logs --no-follow {name}", queue, f"jobs cancel --yes {name}"]
    assert (folder / "said").read_text().splitlines() == said
