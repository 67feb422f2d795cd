"""Rendered batch scripts on a real SLURM: two nodes, two ranks each. Skipped, with the reason, where it cannot run."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshpar.launchers.agent.terms import NO_USE
from meshpar.launchers.cli import app
from tests.support.hosts import Hosts, Unavailable
from tests.support.patience import until
from tests.support.slurm_lab import Slurm
from tests.support.warm import write_command

STEPS = 60
RECIPE = """\
name: job
mesh: dp_replicate=2,dp_shard=2
device: cpu
model: {dim: 32, layers: 2, heads: 2, hidden: 64, max_positions: 64, dropout: 0.0}
data: {source: files, paths: [text.md], cache: cache, sequence_length: 64, micro_batch: 2, accumulate: 2}
optimizer: {lr: 1e-3, eps: 1e-4}
training: {steps: 60, log_every: 1, tensorboard: false}
checkpoint: {every: 5}
"""
pytestmark = pytest.mark.timeout(900)
MESHPAR = [sys.executable, "-m", "meshpar.launchers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("jobs")
    docs = sorted(Path(__file__).parents[2].glob("docs/*.md"))
    (made / "text.md").write_text("\n\n".join(path.read_text() for path in docs))
    (made / "job.yaml").write_text(RECIPE)
    write_command(made / "meshpar")
    return made


@pytest.fixture(scope="module")
def slurm(folder: Path) -> Iterator[Slurm]:
    try:
        with Hosts(4) as hosts, Slurm(hosts, folder / "slurm") as cluster:
            yield cluster
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[float]:
    """The losses of one process on the same text."""
    alone = ["mesh=", "data.micro_batch=8", "output=alone"]
    subprocess.run([*MESHPAR, "train", "job.yaml", *alone, "--quiet"], cwd=folder, check=True, capture_output=True)
    return losses(folder, "alone")


def losses(folder: Path, output: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    found = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    return [found[step] for step in sorted(found)]


def submit(slurm: Slurm, folder: Path, output: str, *more: str) -> str:
    options = ["--nodes", "2", "--gpus-per-node", "0", "--nproc", "2", "-o", "cpus_per_task=2"]
    options += ["-o", f"meshpar={folder}/meshpar", *more]
    command = [*MESHPAR, "launch", "slurm", "job.yaml", f"output={output}", *options, "--submit"]
    done = subprocess.run(command, cwd=folder, env=slurm.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.search(r"Submitted batch job (\d+)", done.stdout)
    assert found, done.stdout
    return found[1]


def step_of(folder: Path, output: str) -> int:
    path = folder / output / "metrics.jsonl"
    return path.read_text().count("train/loss") if path.exists() else 0


def output_of(folder: Path, output: str) -> str:
    return "".join(path.read_text() for path in (folder / output / "launches").glob("*/slurm-*.out"))


def rank_processes(folder: Path, output: str) -> list[int]:
    """The ranks of a job: workers whose logs lie in its folder."""
    mark = os.fsencode(folder / output / "logs")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"meshpar.launchers.jobs.worker" in words and any(word.startswith(mark) for word in words):
            found.append(int(path.parent.name))
    return found


def assert_losses(folder: Path, output: str, expected: list[float]) -> None:
    got = losses(folder, output)
    assert len(got) == STEPS
    worst = max(abs(a - b) for a, b in zip(got, expected, strict=True))
    assert worst <= 1e-5, f"losses differ by {worst}"


def test_hybrid_sharding_on_two_nodes_trains_as_one_process_does(slurm, folder, expected) -> None:
    job = submit(slurm, folder, "whole", "--mesh", "auto")
    slurm.wait(job)
    assert_losses(folder, "whole", expected)
    ranks = json.loads((folder / "whole" / "launches" / "001" / "mesh.json").read_text())["ranks"]
    places = [(rank["node"], rank["dp_replicate"], rank["dp_shard"]) for rank in ranks]
    assert places == [(0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)]
    names = [path.name for path in (folder / "whole" / "logs" / f"{job}-0").glob("*.log")]
    assert sorted(names) == [f"rank-{n}.log" for n in range(4)]


def test_launched_jobs_are_listed_shown_and_cancelled(slurm, folder, monkeypatch) -> None:
    (folder / "sleep.py").write_text("import time\nprint('at work', flush=True)\ntime.sleep(600)\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])

    def jobs(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done.output

    def states() -> list[str]:
        return [line.split()[3] for line in jobs("jobs", "ls").splitlines()[1:]]

    sleep = ["launch", "slurm", "sleep.py", "--gpus-per-node", "0", "--nproc", "1", "-o", "cpus_per_task=1"]
    answer = jobs(*sleep, "--submit")
    jobs(*sleep)
    assert "Submitted batch job" in answer and jobs("jobs", "ls").splitlines()[2].endswith("not submitted")
    slurm.call("sbatch", "--hold", str(folder / "runs/sleep/launches/002/job.sbatch"))
    until(lambda: states() == ["RUNNING", "PENDING"])
    first = "runs/sleep/launches/001"
    until(lambda: "at work" in "".join(path.read_text() for path in (folder / first).glob("slurm-*.out")))
    printed = subprocess.check_output([*MESHPAR, "jobs", "logs", first], env=slurm.environment, text=True)
    assert printed.endswith("at work\n")
    output = jobs("jobs", "status", first)
    assert re.search(r"^runs/sleep/launches/001: slurm \d+, RUNNING\n", output) and " on n" in output
    jobs("jobs", "cancel", "runs/sleep")  # the newest launch
    assert states() == ["RUNNING", "CANCELLED"]
    jobs("jobs", "cancel", first)
    until(lambda: states() == ["CANCELLED", "CANCELLED"])
    assert "has not started" in jobs("jobs", "logs", "runs/sleep", code=1)


@pytest.fixture(scope="module")
def disturbed(slurm: Slurm, folder: Path) -> dict[str, str]:
    """Jobs that each met with something; they go on at the same time."""
    elastic = submit(slurm, folder, "elastic", "--elastic", "nodes", "-o", "rejoin_s=3", "-o", "partition=spare")
    until(lambda: step_of(folder, "elastic") >= 12)
    slurm.hosts.kill("n4")
    killed = submit(slurm, folder, "killed")
    until(lambda: step_of(folder, "killed") >= 12)
    os.kill(max(rank_processes(folder, "killed")), signal.SIGKILL)
    limited = submit(slurm, folder, "limited")
    until(lambda: step_of(folder, "limited") >= 7)
    slurm.call("scancel", "--batch", "--signal=USR1", limited)  # as SLURM does it at --signal=B:USR1@N
    return {"elastic": elastic, "killed": killed, "limited": limited}


def test_a_worker_killed_in_mid_run_is_requeued_and_ends_as_if_it_had_not_been(slurm, folder, disturbed, expected):
    done = slurm.wait(disturbed["killed"])
    assert done["Restarts"] == "1"
    errors = "".join(path.read_text() for path in (folder / "killed" / "logs").glob("*/rank-*.error.json"))
    # srun may end the step before the launcher tells it
    assert "was ended by SIGKILL" in output_of(folder, "killed") + errors
    assert "resuming after step" in output_of(folder, "killed")
    assert_losses(folder, "killed", expected)


def test_the_signal_before_the_time_limit_saves_requeues_and_resumes(slurm, folder, disturbed, expected) -> None:
    done = slurm.wait(disturbed["limited"])
    assert done["Restarts"] == "1"
    text = output_of(folder, "limited")
    step = int(re.findall(r"asked to stop \(SIGUSR1\) after step (\d+)", text)[0])
    assert f"resuming after step {step} from" in text
    assert_losses(folder, "limited", expected)


def test_a_lost_node_shrinks_an_elastic_job_which_ends(slurm, folder, disturbed, expected) -> None:
    slurm.wait(disturbed["elastic"])
    text = output_of(folder, "elastic")
    assert "2 of 4 ranks are left: mesh dp_replicate=1,dp_shard=2, a step of 4 x 2 a data rank" in text
    assert "instead of 2 x 2: 16 in all as before" in text
    assert_losses(folder, "elastic", expected)


@pytest.mark.long
def test_preflight_stops_a_job_before_it_trains(slurm: Slurm, folder: Path) -> None:
    job = submit(slurm, folder, "refused", "--preflight", "fail", "-o", "setup=export GLOO_SOCKET_IFNAME=eth7")
    done = slurm.wait(job, ("FAILED",))
    assert (done["ExitCode"], done["Restarts"]) == (f"{NO_USE}:0", "0")
    text = output_of(folder, "refused")
    assert "GLOO_SOCKET_IFNAME=eth7 names no interface\n    where: n1, which has eth0, lo" in text
    assert "another start would fail in the same way; the job is not requeued" in text
    assert step_of(folder, "refused") == 0 and not list((folder / "refused").glob("checkpoints/step-*"))


@pytest.mark.long
def test_a_script_trains_on_two_nodes_as_in_one_process(slurm: Slurm, folder: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "own_loop.py"
    alone = subprocess.check_output([sys.executable, script, "", "alone_script"], cwd=folder, text=True)
    options = ["--nodes", "2", "--gpus-per-node", "0", "--nproc", "1", "-o", "cpus_per_task=2", "--submit"]
    command = [*MESHPAR, "launch", "slurm", str(script), *options, "--", "tp=2", str(folder / "script")]
    done = subprocess.run(command, cwd=folder, env=slurm.environment, capture_output=True, text=True, check=True)
    slurm.wait(re.findall(r"Submitted batch job (\d+)", done.stdout)[0])
    output = "".join(path.read_text() for path in folder.glob("runs/own_loop/launches/*/slurm-*.out"))
    pattern = r"loss ([\d.]+), gradient norm"
    want, got = ([float(number) for number in re.findall(pattern, text)] for text in (alone, output))
    assert len(want) == 3 and want == pytest.approx(got, abs=2e-5), output


@pytest.mark.long
def test_the_second_task_of_an_array_goes_on_where_the_first_one_was_stopped(slurm, folder, expected) -> None:
    array = submit(slurm, folder, "array", "-o", "sbatch=--array=1-2%1")
    until(lambda: step_of(folder, "array") >= 7)
    slurm.call("scancel", "--batch", "--signal=USR1", f"{array}_1")
    for task in (2, 1):
        slurm.wait(f"{array}_{task}")
    assert re.search(r"resuming after step \d+ from", output_of(folder, "array"))
    assert_losses(folder, "array", expected)


@pytest.mark.long
def test_failures_are_counted_up_to_the_budget(slurm: Slurm, folder: Path, expected: list[float]) -> None:
    job = submit(slurm, folder, "budget", "-o", "max_requeues=1")
    for steps in (7, 30):
        until(lambda steps=steps: step_of(folder, "budget") >= steps and slurm.job(job)["JobState"] == "RUNNING")
        until(lambda: bool(rank_processes(folder, "budget")))
        os.kill(max(rank_processes(folder, "budget")), signal.SIGKILL)
        until(lambda: not rank_processes(folder, "budget"))
        if steps == 7:
            slurm.wait(job, ("RUNNING",))
    assert slurm.wait(job, ("FAILED",))["Restarts"] == "1"
    assert "after 1 requeues for failures; no more" in output_of(folder, "budget")
    slurm.wait(submit(slurm, folder, "budget", "-o", "max_requeues=1"))
    assert_losses(folder, "budget", expected)


@pytest.mark.long
def test_of_two_submissions_of_one_run_the_second_is_told_who_writes(slurm, folder, expected) -> None:
    first, second = (submit(slurm, folder, "twice", "-o", f"partition={partition}") for partition in ("lab", "spare"))
    until(lambda: bool(re.search(r"is written by|is being written", output_of(folder, "twice"))))
    slurm.call("scancel", second)
    slurm.wait(first)
    assert_losses(folder, "twice", expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("replicas", ["passes=[{HybridShard: {optimizer: replica}}]", "-o", "partition=spare"]),
        # each of two nodes, of which the second is lost
        ("replicas-wide", ["--nodes", "4", "--nproc", "1", "-o", "partition=lab,spare"]),
    ],
)
def test_a_replica_whose_node_is_lost_comes_back_on_a_node_that_is_given_back(slurm, folder, name, more) -> None:
    array = submit(slurm, folder, name, "training.steps=1200", "checkpoint.every=300", "--elastic", "replicas", *more)
    until(lambda: step_of(folder, name) >= 12)
    lost = slurm.call("scontrol", "show", "hostnames", slurm.job(f"{array}_1")["NodeList"]).split()[-1]
    slurm.hosts.kill(lost)
    until(lambda: "lost 1" in output_of(folder, name))
    slurm.call("scontrol", "update", f"NodeName={lost}", "State=DOWN", "Reason=lost")  # not when it misses the job
    slurm.start_node(lost)
    until(lambda: slurm.job(f"{array}_1")["JobState"] != "RUNNING")
    slurm.wait(f"{array}_1", ("RUNNING",))
    until(lambda: "joined 1" in output_of(folder, name))
    told_once(slurm, folder, name, array)
    records = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    assert [record["replicas"] for record in records if "replicas" in record][-2:] == [1, 2]


@pytest.mark.long
def test_replicas_go_on_from_a_checkpoint_where_the_node_of_their_lighthouse_is_lost(slurm, folder) -> None:
    options = ("training.steps=1200", "checkpoint.every=20", "--elastic", "replicas", "-o", "partition=spare")
    array = submit(slurm, folder, "lighthouse", *options)
    until(lambda: step_of(folder, "lighthouse") >= 42)
    lost = slurm.job(f"{array}_0")["BatchHost"]
    slurm.hosts.kill(lost)
    slurm.start_node(lost)
    until(lambda: "waits for the lighthouse" in output_of(folder, "lighthouse"))
    for task in (0, 1):
        slurm.wait(f"{array}_{task}", ("RUNNING", "COMPLETED"))
    told_once(slurm, folder, "lighthouse", array)
    assert "resuming after step" in output_of(folder, "lighthouse")


def told_once(slurm: Slurm, folder: Path, output: str, array: str) -> None:
    """Wait for an array of two replicas, which make 1200 steps."""
    for task in (0, 1):
        slurm.wait(f"{array}_{task}")
    records = [json.loads(line) for line in (folder / output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "train/loss" in record] == list(range(1, 1201))
    assert (folder / output / "checkpoints/latest").resolve().name.endswith("1200")


def test_nothing_is_left_running(slurm: Slurm, folder: Path, disturbed: dict[str, str]) -> None:
    for job in disturbed.values():
        slurm.wait(job)
    assert not [pid for output in ("whole", *disturbed) for pid in rank_processes(folder, output)]
