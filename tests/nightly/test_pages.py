"""Every command of every page runs, in the order of the page, in a folder with what the pages suppose."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.test_docs import PAGES, ROOT, blocks
from tests.support.patience import patient

NOT_HERE = {
    r"(\S*pip install|python3 -m venv|make|sudo|nice)\b": "packages, or a machine that does nothing else",
    r"(MESHPAR_STORE=\S+ |torchrun \S+ \d |)python (-m )?benchmarks\b|torchrun .* benchmarks/|MESHPAR_STORE=": "minutes; make "
    "test-all runs their short forms",
    r".*\b(s3|gs|az)://|.*AWS_": "a store; tests/jobs/test_object_store.py",
    r"meshpar jobs|srun |.* --submit": "a scheduler; tests/jobs/test_launch.py and test_slurm.py",
    r".* --head |.* --node-rank ": "several hosts; tests/jobs/test_train_options.py and test_replicas.py",
    r"meshpar run --elastic": "minutes of several replicas; tests/jobs/test_replicas.py",
    r"meshpar launch slurm gpt2": "a corpus for gpt2's vocabulary; tests/jobs/test_slurm.py",
    r"meshpar run gpt2": "minutes on eight ranks; tests/jobs/test_train_options.py",
    r"meshpar export .* --watch": "an export that waits for the end of a job; tests/jobs/test_publish.py",
    r"meshpar stacks": "a job that runs; tests/jobs/test_stacks.py",
    r".*weights_by_files|trackio |find runs|.*(/models/|chess\.yaml|weights\.py)": "a second program, or files of the reader's own",
    r"meshpar plan (qwen3|.* --search)": "minutes; tests/forecasting",
    r"\.venv/bin/meshpar quickstart": "tests/jobs/test_quickstart.py",
}
"""How commands begin that are not run, and why, or the test that runs them."""
SHORT = "training.steps=2 training.log_every=1 training.validate_steps=1 schedule.warmup_steps=0 schedule.steps=2 checkpoint.every=1"
JOB = """\
device: cpu
mesh: dp_replicate=-1
model: {dim: 32, layers: 2, heads: 4, hidden: 64, max_positions: 512, dropout: 0.0}
data: {source: files, paths: [README.md], tokenizer: bytes, sequence_length: 32, micro_batch: 2, validation_fraction: 0.2}
optimizer: {lr: 1e-3}
training: {steps: 30, log_every: 1, tensorboard: false, validate_every: 10, validate_steps: 1}
checkpoint: {every: 10, keep: null}
averages: {ema: {decay: 0.5}}
"""


def commands(path):
    """The commands of a page, those of one block together, and whether the page shows an error below one."""
    for code in blocks(path, "console", "bash", ""):
        if not re.search(r"(?m)^\$ ", code):  # a block of commands alone
            code = re.sub(r"(?m)^(?=(meshpar|python|pip|srun) )", "$ ", code)
        for part in re.split(r"(?m)^\$ ", code.replace("\\\n", " "))[1:]:
            line, *after = part.splitlines()
            while line.count('"') % 2:  # a text of several lines
                line += f"\n{after.pop(0)}"
            shown = next((later for later in after if later.strip()), "")
            yield line.split("  #")[0].strip(), shown.startswith("meshpar: ")


def is_run(command):
    return not any(re.match(pattern, command) for pattern in NOT_HERE)


RUN = [path for path in PAGES if any(is_run(command) for command, _ in commands(path))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with recipes, runs and the files of the guide under the names that pages use."""
    made = tmp_path_factory.mktemp("pages")
    (made / "docs").mkdir()
    for name in ("examples", "benchmarks", "README.md"):
        (made / name).symlink_to(ROOT / name)
    for file in (ROOT / "examples" / "guide").iterdir():
        if not (made / file.name).exists():
            (made / file.name).symlink_to(file)
    for name in ("job", "run", "recipe"):
        (made / f"{name}.yaml").write_text(JOB)
    bad = next(code for code in blocks(ROOT / "docs" / "check.md", "yaml") if code.startswith("name: bad"))
    (made / "bad.yaml").write_text(bad)
    for file in ("train.py", "my/trainer.py", "text/one.txt"):
        (made / file).parent.mkdir(exist_ok=True)
        (made / file).write_text("import torch\n" * 400)
    (made / "held_out.txt").write_text((ROOT / "README.md").read_text(encoding="utf-8"))
    (made / "chat.jsonl").write_text('{"prompt": "Sky?", "completion": "Blue."}\n' * 40)
    (made / "pairs.jsonl").write_text("".join(f'{{"article": "text {n}", "summary": "{n}"}}\n' for n in range(400)))
    for run in ("runs/name", "runs/NAME", "runs/quickstart", "runs/a", "runs/b", "run"):
        more = "training.steps=4 training.validate_every=1 checkpoint.every=1" if run == "run" else ""
        code, output = execute(made, f"meshpar train job.yaml --quiet output={run} {more}")
        assert code == 0, output
    return made


def execute(folder, command):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, timeout=patient(300), env=environment, check=False,
        executable="/bin/bash",
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


ADDED = {
    r"meshpar train (t5_|bert_)": f"{SHORT} training.epochs=null",
    r"meshpar train (?!job|run|recipe|from_trainer)": SHORT,
    r"meshpar describe job.yaml --elastic": "mesh=dp_replicate=2",
}
"""What is added to commands that begin so: the recipes that come with meshpar train whole in tests/jobs/test_jobs.py."""


def shortened(command):
    """A command as it is run here; pages show several exports to one name."""
    more = next((more for pattern, more in ADDED.items() if re.match(pattern, command)), "")
    return f"{'rm -rf out; ' if ' out ' in command else ''}{command} {more}".strip()


@pytest.mark.nightly
@pytest.mark.parametrize("path", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commands_of_a_page_run(path, folder):
    failed = []
    for command, is_error in commands(path):
        if is_run(command):
            code, output = execute(folder, shortened(command))
            if bool(code) != is_error:
                failed.append(f"$ {shortened(command)}\n{output[-1500:]}")
    assert not failed, "\n".join(failed)


def test_each_reason_not_to_run_a_command_is_of_a_command():
    every = [command for path in PAGES for command, _ in commands(path)]
    assert len(every) > 130
    assert [pattern for pattern in NOT_HERE if not any(re.match(pattern, command) for command in every)] == []
