"""A planted credential is refused where a recipe or a job file would keep it, and is in no file, card, fact or message."""

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from typer.testing import CliRunner

from meshpar.checkpoints import CheckpointManager
from meshpar.checkpoints.storage.place import place
from meshpar.core.errors import CheckpointError, LaunchError, RecipeError
from meshpar.launchers.agent import failures
from meshpar.launchers.cli import app
from meshpar.launchers.commands import publishing
from meshpar.launchers.jobs import worker
from meshpar.launchers.recipes.loading import load_recipe, resolve
from meshpar.launchers.recipes.recipe import Recipe
from meshpar.launchers.recipes.yamlfile import parse_document
from meshpar.launchers.targets import launching
from meshpar.process.secrets import redact, redacted, secret_words, secrets_in
from meshpar.training import TrackedRun, Trackers, send_to_trackers
from tests.checkpoints.test_commit import linear
from tests.support.patience import patient, until

SECRET = "S3CRETPW"
URI = f"postgresql://alice:{SECRET}@db/mlflow"
RECIPE = """\
name: small
device: cpu
mesh: dp_replicate=2
model: {dim: 16, layers: 1, heads: 2, hidden: 32, max_positions: 32}
data: {source: stdlib, sequence_length: 32, micro_batch: 2}
training: {steps: 3, tensorboard: false}
"""


def launch_job(*arguments: Any, **options: Any) -> str:
    """Launch on two nodes of one rank each."""
    return launching.launch_job(launching.LaunchRequest(*arguments, nodes=2, gpus_per_node=0, nproc=1, **options))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where everything is written, and searched at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["meshpar", "launch", "..."])
    Path("job.yaml").write_text(RECIPE)
    yield tmp_path
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    "field",
    [
        f"trackers={{mlflow: {{uri: '{URI}'}}}}",
        f"trackers.wandb.api_key={SECRET}",
        f"trackers.mine.board.Board.token={SECRET}",
        f"trackers={{mine.Board: {{servers: [{{name: x, apiKey: {SECRET}}}]}}}}",
        f"evaluations={{mine.Asks: {{headers: {{Authorization: 'Bearer', password: {SECRET}}}}}}}",
        f"evaluations.mine.url='https://host/x?sig={SECRET}'",
        f"optimizer={{class: mine.Own, service_credentials: {SECRET}}}",
        f"data={{dataset: {{class: mine.Rows, dsn: '{URI}'}}}}",
        f"data.paths=['https://me:{SECRET}@host/text']",
        f"training.objective_options.key={SECRET}",
        f"output=s3://key:{SECRET}@bucket/run",
        f"notes={{secret: {SECRET}}}",
    ],
)
def test_a_recipe_with_a_credential_is_refused_and_it_is_not_repeated(folder: Path, field: str) -> None:
    message = r"looks like a credential.* come from the environment, such as MLFLOW"
    with pytest.raises(RecipeError, match=message) as raised:
        load_recipe("job.yaml", [field])
    assert SECRET not in str(raised.value)
    done = CliRunner().invoke(app, ["check", "job.yaml", field])
    assert done.exit_code and "looks like a credential" in done.output and SECRET not in done.output
    for target in ("slurm", "kubernetes", "skypilot"):
        with pytest.raises((RecipeError, LaunchError), match="looks like a credential"):
            launch_job(target, "job.yaml", [field])
    assert not Path("runs").exists()


def test_other_uses_of_such_names_are_no_credentials() -> None:
    more = "trackers: {mlflow: {uri: 'http://host:5000', experiment: tokens}}\noutput: s3://bucket/keys/secret-run\n"
    recipe = resolve(parse_document(RECIPE + more, "job.yaml"))
    assert redacted(recipe.plain()) == recipe.plain()
    kept: dict[str, Any] = {
        "eos_token": "<|im_end|>", "pad_token_id": 0, "num_key_value_heads": 4, "key": "question", "max_tokens": 5,
        "tokenizer": "/data/tokenizer1", "text_key": "text", "git": "https://host/project@v1", "token": None,
    }  # fmt: skip
    assert redacted(kept) == kept


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://alice:Top/%s@db/x failed", "postgresql://***@db/x failed"),
        ("postgresql://alice:a?%s@db", "postgresql://***@db"),
        ("'redis://:a#b@%s@db'", "'redis://***@db'"),
        ("https://host/x?apikey=%s&n=1", "https://host/x?apikey=***&n=1"),
        ("https://host/x?accessToken=%s", "https://host/x?accessToken=***"),
        ("https://host/x?a=1&accesstoken=%s#top", "https://host/x?a=1&accesstoken=***#top"),
        ("https://host/x#access_token=%s", "https://host/x#access_token=***"),
        ("https://host/x?X-Amz-Signature=%s", "https://host/x?X-Amz-Signature=***"),
    ],
)
def test_urls_as_people_write_them_are_redacted(text: str, shown: str) -> None:
    assert redact(text % SECRET) == redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "https://host/project@v1",
        "docker://host:5000/image@sha256:12ab",
        "http://host:5000/x?max_tokens=5&monkey=2",
        "a@b.c",
    ],
)
def test_other_urls_are_kept(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "password: 12345678",
        "x: {password: {value: abc}}",
        "passwords: [abc]",
        "password: !!binary YWJj",
        "url: !!binary cmVkaXM6Ly9hOmJAYw==",
        "headers: {Authorization: Bearer abc}",
        "bearer: abc",
        "wandb_key: abcdefgh",
        "hub_tokens: {a: abc}",
        "env: [WANDB_API_KEY=abc]",
        "args: [--wandb-key, abcdefgh]",
        "run: train --password abc now",
        "connection: DefaultEndpointsProtocol=https;AccountName=x;AccountKey=abc==;EndpointSuffix=y",
        "dsn: host=db user=alice password=abc dbname=x",
        "dsn: host=db password='a b'",
        'body: \'{"api_key": "abc"}\'',
        "headers: ['X-Api-Key: abc']",
        "env: [{name: API_PASSWORD, value: 5}]",
    ],
)
def test_a_value_under_a_secrets_name_is_a_credential_wherever_it_is(text: str) -> None:
    data = yaml.safe_load(text)
    assert list(secrets_in(data)), text
    shown = redacted(data)
    assert not list(secrets_in(shown)) and redacted(shown) == shown and "***" in str(shown), shown
    assert not {"abc", "abcdefgh"} & set(re.findall(r"\w+", str(shown)))


@pytest.mark.parametrize(
    "words",
    [
        ["--header", "Authorization: Bearer abc1"],
        ["--wandb-key", "abcdefgh"],
        ["x --wandb-key abcdefgh"],
        ["X-Api-Key: abc"],
    ],
)
def test_words_of_a_command_with_a_credential_are_found(words: list[str]) -> None:
    (text,) = secret_words(words)
    assert "abc" not in text


@pytest.mark.parametrize(
    "text",
    [
        "spec: {volumes: [{secret: {secretName: tracker, defaultMode: 256}}], imagePullSecrets: [{name: registry}]}",
        "env: [{name: TOKEN, valueFrom: {secretKeyRef: {name: tracker, key: password}}}]",
        "run: export WANDB_API_KEY=$KEY; train --api-key ${KEY}",
        "automountServiceAccountToken: false",
        "{password: null, api_key: '', secrets: [], token: 'true'}",
        "{tokenizer: /data/t1, max_tokens: 512, token_ids: [1, 2], key_value_heads: 4, pad_token: 0, tokens: 4096}",
        "{text_key: text, key: question, service_tokens: 500, keys: [a, b], special_tokens: {eos_token: </s>}}",
        "{args: [--max-tokens, '512', --tokenizer, gpt2, --text-key, text], prompt: 'What is the password? token: x'}",
        "{lora: 'key=value', query: 'tokens=100000', password_file: /run/secrets/p, note: 'the secret: be kind to all'}",
    ],
)
def test_names_and_places_of_credentials_are_none(text: str) -> None:
    data = yaml.safe_load(text)
    assert not list(secrets_in(data)) and redacted(data) == data
    assert not secret_words(["token=true", "--max-tokens", "512", "--tokenizer", "gpt2", "model.key_value_heads=4"])


def test_the_environment_gives_the_uri_that_a_recipe_may_not_have(folder, monkeypatch) -> None:
    with pytest.raises(RecipeError, match="set the variable on the machines of the job, and remove the value here"):
        load_recipe("job.yaml", [f"trackers={{mlflow: {{uri: '{URI}'}}}}"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", URI)
    assert load_recipe("job.yaml", ["trackers={}"]).trackers == {}
    mlflow = pytest.importorskip("mlflow")
    assert mlflow.MlflowClient(tracking_uri=None).tracking_uri == URI, "as meshpar's tracker makes it without uri"


@pytest.mark.parametrize(
    ("target", "options", "patch"),
    [
        ("slurm", [f"setup=export WANDB_API_KEY={SECRET}"], ""),
        ("slurm", [f"sbatch=--export=ALL,X={URI}"], ""),
        ("skypilot", [], f"envs: {{WANDB_API_KEY: {SECRET}}}"),
        ("kubernetes", ["patch=patch.yaml"], "spec: {template: {spec: {containers: [{name: train, env: "
         f"[{{name: MLFLOW_TRACKING_PASSWORD, value: {SECRET}}}]}}]}}}}}}"),
    ],
)  # fmt: skip
def test_a_job_file_with_a_credential_is_refused(folder: Path, target: str, options: list[str], patch: str) -> None:
    Path("patch.yaml").write_text(patch)
    if patch and not options:
        options = ["patch=patch.yaml"]
    with pytest.raises(LaunchError, match="looks like a credential") as raised:
        launch_job(target, "job.yaml", [], options=options)
    assert SECRET not in str(raised.value) and not Path("runs").exists()
    Path("patch.yaml").unlink()


def test_a_patch_names_a_secret_of_the_cluster_instead(folder: Path) -> None:
    shown = f"value: {SECRET}"
    patch = "spec: {template: {spec: {containers: [{name: train, env: [{name: API_TOKEN, %s}]}]}}}"
    Path("patch.yaml").write_text(patch % shown)
    with pytest.raises(LaunchError, match="a readable file; name a secret of the cluster instead, such as"):
        launch_job("kubernetes", "job.yaml", [], options=["patch=patch.yaml"])
    Path("patch.yaml").write_text(patch % "valueFrom: {secretKeyRef: {name: tracker, key: password}}")
    launch_job("kubernetes", "job.yaml", [], options=["patch=patch.yaml"])
    (made,) = Path("runs").rglob("job.yaml")
    assert "key: password" in made.read_text()


def test_a_scripts_arguments_with_a_credential_are_refused(folder: Path) -> None:
    Path("train.py").write_text("")
    for arguments in ([f"--api-key={SECRET}"], ["--password", SECRET], [f"--db={URI}"]):
        with pytest.raises(LaunchError, match="looks like a credential") as raised:
            launch_job("slurm", "train.py", arguments)
        assert SECRET not in str(raised.value)
    made = launch_job("slurm", "train.py", ["--max-tokens=512", "--lr", "3e-4"])
    assert "--max-tokens=512" in made + next(Path("runs").rglob("job.sbatch")).read_text()


class Board:
    """A tracker that repeats its address in its errors, as MLflow does."""

    runs: ClassVar[list[TrackedRun]] = []

    def __init__(self, run: TrackedRun, *, uri: str) -> None:
        self.uri = uri
        self.runs.append(run)

    def send(self, records: object) -> None:
        raise ConnectionError(f"API request to {self.uri} failed with exception")

    def close(self) -> None:
        """Nothing is open."""


def test_facts_and_the_warnings_of_trackers_have_no_credential(folder, monkeypatch, caplog) -> None:
    monkeypatch.setattr(send_to_trackers, "_PAUSE_S", 0.02)
    Board.runs.clear()
    facts = {"recipe": {"trackers": {"mlflow": {"uri": URI}}, "token": SECRET}}
    with caplog.at_level(logging.WARNING):
        board = Trackers(folder / "run", {f"{__name__}.Board": {"uri": URI}}, facts=facts)
        board.report({"step": 1, "loss": 2.0})
        until(lambda: "API request" in caplog.text, 20)
        monkeypatch.setattr(send_to_trackers, "PATIENCE_S", patient(1.0))
        board.close()
    assert SECRET not in caplog.text and "API request to postgresql://***@db/mlflow failed" in caplog.text
    shown = {"trackers": {"mlflow": {"uri": "postgresql://***@db/mlflow"}}, "token": "***"}
    assert Board.runs[0].facts["recipe"] == shown


def test_the_card_of_a_run_whose_recipe_is_older_than_this_rule_has_no_credential(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "run/checkpoints") as manager:
        manager.save(1, linear())
    trackers = f"trackers: {{mlflow: {{uri: '{URI}'}}, x: {{token: {SECRET}}}}}\n"
    (tmp_path / "run/recipe.yaml").write_text(RECIPE + trackers)
    (tmp_path / "export").mkdir()
    card = "\n".join(publishing._card(tmp_path / "run/checkpoints/step-00000001", tmp_path / "export", "small"))
    assert SECRET not in card and "uri: postgresql://***@db/mlflow" in card and "layers: 1" in card


def test_a_resolved_recipe_and_error_files_have_no_credential(folder: Path) -> None:
    data = resolve(parse_document(RECIPE, "job.yaml")).plain()
    made = Recipe.model_validate_json(json.dumps({**data, "trackers": {"mlflow": {"uri": URI}}}))
    assert SECRET not in made.to_yaml() and "postgresql://***@db/mlflow" in made.to_yaml()
    failures.record(folder, 0, ConnectionError(f"cannot reach {URI}"))
    assert "***@db" in failures.error_file(folder, 0).read_text()


def test_the_log_of_a_rank_that_fails_has_no_credential(folder, monkeypatch, capfd) -> None:
    def fails(task: object) -> int:
        raise ConnectionError(f"cannot reach {URI}")

    monkeypatch.setattr(worker, "run_recipe", fails)
    for name in ("redirect", "note_os_exit", "end_with_parent"):
        monkeypatch.setattr(worker, name, lambda *_: None)
    task: Any = SimpleNamespace(kind="recipe", logs=folder, terminal=False, launcher=0)
    assert worker._run(task, 1) == 1
    shown = capfd.readouterr().err
    assert SECRET not in shown and "ConnectionError: cannot reach postgresql://***@db/mlflow" in shown


def test_urls_of_storage_are_refused_by_the_same_rule() -> None:
    for url in (f"s3://me:{SECRET}@bucket/run", f"s3://bucket/run?token={SECRET}", f"https://me:{SECRET}@host/run"):
        with pytest.raises(CheckpointError, match=r"from the environment|not supported") as raised:
            place(url)
        assert SECRET not in str(raised.value)
