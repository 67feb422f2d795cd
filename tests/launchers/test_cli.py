"""The command line: quick help, one clear message for an error, and looking without running."""

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

import meshpar
from meshpar import CheckpointError, LaunchError, MeshparError
from meshpar.forecasting.hardware import Hardware
from meshpar.launchers.agent import terms
from meshpar.launchers.agent.failures import Failure, first_error, record_kills
from meshpar.launchers.cli import app
from meshpar.launchers.commands.generating import Completer
from meshpar.launchers.commands.inspecting import ranks_of
from meshpar.launchers.export import bytes_of
from meshpar.models import TransformerConfig
from meshpar.process.waiting import exit_code_of
from meshpar.training.tokenizer import byte_tokenizer
from tests.support.patience import patient

RECIPE = """\
name: small
mesh: dp_shard=2
model: {dim: 32, layers: 2, heads: 2, hidden: 48}
training: {steps: 5}
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return str(path)


def test_help_is_quick_and_does_not_load_torch() -> None:
    script = (
        "import sys, time; start = time.perf_counter(); sys.argv = ['meshpar', '--help']\n"
        "from meshpar.launchers.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'pydantic', 'yaml'} & set(sys.modules), sorted(sys.modules)\n"
    )
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        seconds.append(time.perf_counter() - start)
        assert done.returncode == 0, done.stderr
    for command in ("train", "export", "describe", "check", "quickstart", "generate", "plugins"):
        assert command in done.stdout
    assert min(seconds) < patient(2), "quick also on a busy machine; that nothing large was loaded is asserted inside"


def test_an_error_is_one_message_on_stderr_and_its_exit_code(recipe: str) -> None:
    done = invoke("check", recipe, "training.stps=3")
    assert done.exit_code == 78
    assert done.stdout == ""
    assert done.stderr == (
        "meshpar: 1 problem in this recipe\n  override 'training.stps=3': training.stps: unknown key; nearest: steps\n"
    )


def test_debug_shows_the_traceback(recipe: str) -> None:
    done = invoke("check", recipe, "training.stps=3", "--debug")
    assert done.exit_code == 78
    assert "Traceback" in done.stderr
    assert "load_recipe" in done.stderr


def test_check_lists_all_problems_of_a_plan(recipe: str) -> None:
    done = invoke("check", recipe, "mesh=dp_shard=2,tp=3", "passes=[FullyShard]", "--world-size", "6")
    assert done.exit_code == 78
    assert "axis 'tp' (size 3) is claimed by no pass" in done.stderr
    assert invoke("check", recipe).stdout.endswith("fits 2 ranks: dp_shard=2 [FullyShard]\n")


@pytest.mark.nightly
def test_describe_of_70b_on_512_ranks_is_right_to_the_byte() -> None:
    start = time.perf_counter()
    done = invoke("describe", "llama-70b", "--mesh", "dp_replicate=8,dp_shard=8,tp=8")
    assert time.perf_counter() - start < patient(30)
    assert done.exit_code == 0, done.output
    c = TransformerConfig.preset("llama-70b")
    kv, split = c.kv_groups * c.channels, 64  # tp x dp_shard; norms are split over dp_shard alone
    matrices = 2 * c.vocab_size * c.dim + c.layers * (2 * c.dim * c.dim + 2 * c.dim * kv + 3 * c.dim * c.hidden)
    norms = (2 * c.layers + 1) * c.dim
    bytes_ = 4 * (matrices // split + norms // 8)
    assert f"{matrices + norms:,} parameters" in done.stdout
    assert f"{bytes_ / 2**30:,.2f} GiB of parameters" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "float32" in line]
    counts = [
        int(row[-1].replace(",", "")) if row[-1] != "each" else c.layers * int(row[-2].replace(",", "")) for row in rows
    ]
    assert sum(counts) == bytes_
    assert math.isclose(bytes_, 4.41e9, rel_tol=0.01)


def test_describe_takes_recipes_and_names_shapes_it_does_not_know(recipe: str) -> None:
    assert "Transformer under dp_shard=4" in invoke("describe", recipe, "mesh=dp_shard=4").stdout
    assert "124,439,808 parameters" in invoke("describe", "gpt2", "--mesh", "dp_shard=4").stdout
    # its data lies elsewhere
    assert "Transformer under dp_replicate=2,dp_shard=4,tp=8" in invoke("describe", "hsdp_tp").stdout
    assert "shapes: tiny, 124m" in invoke("describe", "llama-80b").stderr


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_a_device_that_is_not_there_is_told_before_a_rank_starts(recipe: str) -> None:
    done = invoke("train", recipe, "device=cuda")
    assert done.exit_code == 78
    assert "device: cuda is not available on this machine, which has cpu" in done.stderr


def test_plugins_are_listed_with_their_packages() -> None:
    listed = invoke("plugins").stdout
    assert "meshpar.passes.data.shard_and_reduce:FullyShard  (meshpar)" in listed
    assert "meshpar.objectives" in listed


def test_export_names_what_is_missing(tmp_path: Path) -> None:
    done = invoke("export", str(tmp_path), str(tmp_path / "out"))
    assert done.exit_code == 1
    assert str(tmp_path) in done.stderr
    assert "\n" not in done.stderr.strip()


def test_sizes_are_read_with_their_units() -> None:
    assert [bytes_of(text) for text in ("5GB", "2GiB", "500 mb", "1000", "1.5K")] == [
        5 * 10**9, 2 << 30, 5 * 10**8, 1000, 1500,
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="the size is '5 apples'"):
        bytes_of("5 apples")


def test_a_stopped_run_ends_with_128_and_the_signal() -> None:
    reasons = (None, "SIGTERM", "SIGINT", "SIGHUP", "another rank was asked to stop")
    assert [exit_code_of(reason) for reason in reasons] == [0, 143, 130, 129, 143]


def write_error(folder: Path, rank: int, kind: str, message: str, seconds: float) -> None:
    failure = Failure(
        rank=rank, host=socket.gethostname(), kind=kind, message=message, trace=f"Traceback of {rank}", seconds=seconds
    )
    (folder / f"rank-{rank}.error.json").write_text(json.dumps(asdict(failure)))


def test_the_error_that_came_first_is_the_one_shown(tmp_path: Path) -> None:
    write_error(tmp_path, 0, "RuntimeError", "Connection closed by peer", 100.9)
    write_error(tmp_path, 1, "CheckpointError", "the disk is full", 100.2)
    error = first_error(tmp_path, {0: 1, 1: 1})
    assert type(error) is CheckpointError
    assert str(error) == "the disk is full"


def test_an_error_that_is_not_ours_comes_with_rank_and_traceback(tmp_path: Path) -> None:
    write_error(tmp_path, 3, "ZeroDivisionError", "division by zero", 1.0)
    error = first_error(tmp_path, {3: 1})
    assert type(error) is LaunchError
    assert str(error) == "rank 3 failed with ZeroDivisionError: division by zero\nTraceback of 3"


def test_a_killed_rank_is_the_cause_of_what_the_others_say(tmp_path: Path) -> None:
    write_error(tmp_path, 0, "RuntimeError", "Connection closed by peer", 1.0)
    record_kills(tmp_path, {0: 1, 1: -signal.SIGKILL})
    assert "rank 1 was ended by SIGKILL; a person" in str(first_error(tmp_path, {0: 1, 1: -signal.SIGKILL}))


SRUN = {
    "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1234",
    "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}  # fmt: skip


def adopted(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in (*names, *SRUN):
        monkeypatch.setenv(name, "")  # so that what adopt() sets goes away again
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    terms.adopt_srun()
    return {name: os.environ[name] for name in names if name in os.environ}


def test_a_task_of_srun_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adopted(monkeypatch, SRUN) == {
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03", "MASTER_PORT": "21234",
    }  # fmt: skip


def test_srun_of_one_task_leaves_the_ranks_to_meshpar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert adopted(monkeypatch, SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_an_incomplete_srun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match="SLURM_STEP_NODELIST"):
        adopted(monkeypatch, {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NODELIST"})


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-3]", "n1"),
        ("n[01-03,07],m1", "n01"),
        ("rack2-n[7,9]", "rack2-n7"),
        ("n[1-2]-ib", "n1-ib"),
        ("rack[1-2]n[03-4,9],m", "rack1n03"),
    ],
)
def test_the_first_host_of_a_node_list(text: str, host: str) -> None:
    assert terms.first_node(text) == host


def test_an_unreadable_node_list_is_refused() -> None:
    with pytest.raises(MeshparError, match="cannot read SLURM node list"):
        terms.first_node("n[x")


@pytest.mark.parametrize(
    ("mesh", "search", "ranks"),
    [
        ("dp_shard=2", False, 2),
        ("dp_shard=8,tp=2", False, 16),
        ("dp_shard=-1,tp=2", False, 8),
        ("auto", False, 8),
        ("dp_shard=2", True, 8),
    ],
)
def test_a_recipes_mesh_says_for_how_many_ranks_it_is_planned(mesh: str, search: bool, ranks: int) -> None:
    assert ranks_of(mesh, Hardware.load("h100"), search=search) == ranks


def test_the_version_and_a_shells_completion() -> None:
    assert CliRunner().invoke(app, ["--version"]).output == f"meshpar {meshpar.__version__}\n"
    asked = {"_MESHPAR_COMPLETE": "complete_bash", "COMP_WORDS": "meshpar tr", "COMP_CWORD": "1"}
    assert CliRunner().invoke(app, [], env=asked, prog_name="meshpar").output.split() == ["train"]


def test_the_page_of_keys_is_current() -> None:
    page = Path(__file__).parents[2] / "docs" / "recipe_keys.md"
    # write it again: meshpar check --keys > docs/recipe_keys.md
    assert page.read_text() == invoke("check", "--keys").output
    lines = page.read_text().splitlines()
    (nonfinite,) = (line for line in lines if line.startswith("| `nonfinite`"))
    # a line of a meaning may have a colon
    assert nonfinite.endswith("no checkpoint contains the weights of such a step. |")
    steps = lines[lines.index("## schedule") :][5]
    assert steps.startswith("| `steps` | an integer or null |  |"), "the section's default, not that of its dataclass"


def test_generate_stops_samples_by_seed_and_chats(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=257,
        eos_token_id=256, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save(tmp_path)

    def said(*options: str, prompt: str = "ab") -> str:
        done = invoke("generate", str(tmp_path), prompt, "--tokens", "24", *options)
        assert done.exit_code == 0, done.output
        return done.stdout

    whole = said()
    stop = whole[4]
    assert said("--stop", stop) == f"ab{whole[2 : whole.index(stop, 2)]}\n"
    drawn = ["--temperature", "1.5", "--top-p", "0.9"]
    assert said(*drawn, "--seed", "3") == said(*drawn, "--seed", "3") != said(*drawn, "--seed", "4")
    assert said(prompt="").endswith("\n")
    assert "--engine must be transformers or vllm, got 'x'" in invoke(
        "generate", str(tmp_path), "ab", "--engine", "x"
    ).stderr.replace("\n", "")
    if importlib.util.find_spec("vllm") is None:
        assert (
            "vLLM is not installed; --engine vllm needs it"
            in invoke("generate", str(tmp_path), "ab", "--engine", "vllm").stderr
        )
    (tmp_path / "chat_template.jinja").write_text("{% for each in messages %}<{{ each.content }}>{% endfor %}")
    # the template around the prompt; the answer alone is printed
    assert said("--chat") == said(prompt="<ab>").removeprefix("<ab>")


@pytest.mark.parametrize(("bos", "eos", "start"), [(5, 7, 5), (None, 7, 7)])
def test_an_empty_prompt_begins_a_text(bos: int | None, eos: int, start: int) -> None:
    def tokenizer(text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 0), "attention_mask": torch.zeros(1, 0)}  # as transformers does for no text

    tokenizer.bos_token_id, tokenizer.eos_token_id = bos, eos  # type: ignore[attr-defined]
    tokenizer.decode = lambda ids, skip_special_tokens: str(ids.tolist())  # type: ignore[attr-defined]
    completer = Completer.__new__(Completer)
    completer.tokenizer = tokenizer
    completer.model = SimpleNamespace(generate=lambda input_ids, **_: torch.cat([input_ids, input_ids + 1], 1))
    assert completer.complete("") == str([start + 1])
    tokenizer.bos_token_id = tokenizer.eos_token_id = None  # type: ignore[attr-defined]
    with pytest.raises(MeshparError, match="the prompt is empty"):
        completer.complete("")
