"""Trackers: what is sent to them, and what becomes of one that is slow, down, full or gone."""

import json
import logging
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from meshpar.core import registry
from meshpar.core.errors import MeshparError
from meshpar.training import TrackedRun, Trackers, send_to_trackers, trackers
from meshpar.training.send_to_trackers import commit_of
from tests.support.patience import patient, until

HERE = "tests.training.test_trackers"


class Board:
    """A stranger's tracker: keeps what it gets, and fails or hangs while it is told to."""

    got: ClassVar[list[dict[str, float]]] = []
    runs: ClassVar[list[TrackedRun]] = []
    fails: ClassVar[threading.Event] = threading.Event()
    hangs: ClassVar[threading.Event] = threading.Event()
    closed: ClassVar[list[str]] = []
    refused: ClassVar[set[int]] = set()
    error: ClassVar[BaseException] = ConnectionError("the service is down")

    def __init__(self, run: TrackedRun, *, project: str = "") -> None:
        self.runs.append(run)

    def send(self, records: Sequence[dict[str, float]]) -> None:
        while self.hangs.is_set():
            time.sleep(0.01)
        if self.fails.is_set():
            raise self.error
        if any(record["step"] in self.refused for record in records):
            raise ValueError("a name of more than 250 characters")
        self.got.extend(records)

    def close(self, ended: str) -> None:
        self.closed.append(ended)
        while self.hangs.is_set():
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    Board.got, Board.runs, Board.closed, Board.refused = [], [], [], set()
    Board.error = ConnectionError("the service is down")
    Board.fails.clear()
    Board.hangs.clear()
    monkeypatch.setattr(send_to_trackers, "_RETRY_S", 0.02)
    monkeypatch.setattr(send_to_trackers, "_PAUSE_S", 0.02)
    yield
    Board.hangs.clear()
    Board.fails.clear()


def steps() -> list[int]:
    return [int(record["step"]) for record in Board.got if "step" in record]


def report(board: Trackers, *numbers: int) -> None:
    for step in numbers:
        board.report({"step": step, "train/loss": 1.0 / step})


def test_a_tracker_gets_every_record_and_the_facts_of_the_run(tmp_path: Path) -> None:
    board = Trackers(tmp_path / "mine", {f"{HERE}.Board": {"project": "lm"}}, facts={"recipe": {"seed": 1}}, code=".")
    board.report({"step": 1, "train/loss": 2.0, "bad": float("nan")})
    report(board, 2, 3)
    board.close()
    assert steps() == [1, 2, 3]
    assert Board.closed == ["complete"]
    assert Board.got[0].items() >= {"train/loss": 2.0}.items() and "bad" not in Board.got[0]
    assert time.time() - Board.got[0]["time"] < 600
    assert Board.runs[0].name == "mine"
    assert Board.runs[0].facts == {"recipe": {"seed": 1}, "commit": commit_of(Path("."))}


def test_the_commit_of_a_folder_runs_nothing_that_its_settings_of_git_name(tmp_path: Path) -> None:
    hook, owned = tmp_path / "hook", tmp_path / "owned"
    hook.write_text(f"#!/bin/sh\ntouch {owned}\n")
    hook.chmod(0o755)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").touch()
    for words in (["add", "file"], ["commit", "-qm", "A"], ["config", "core.fsmonitor", str(hook)]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / ".gitattributes").write_text("* filter=evil\n")
    subprocess.run([*git, "config", "filter.evil.clean", str(hook)], check=True)
    (tmp_path / "file").write_text("changed")
    assert len(commit_of(tmp_path) or "") == 40 and not owned.exists()
    assert commit_of(tmp_path / "absent") is None


def test_a_tracker_that_is_down_gets_the_rest_later_and_there_is_one_warning(tmp_path, caplog) -> None:
    Board.fails.set()
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    report(board, *range(1, 6))
    until(lambda: len(Board.runs) > 2)  # it is tried again and again
    Board.fails.clear()
    until(lambda: steps() == [1, 2, 3, 4, 5])
    report(board, 6)
    board.close()
    assert steps() == [1, 2, 3, 4, 5, 6]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "the service is down; training continues" in warning


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_a_tracker_that_is_replaced_is_closed_and_each_outage_is_told_once(tmp_path, caplog) -> None:
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    for outage in (1, 2):
        Board.fails.set()
        before = len(Board.runs)
        report(board, outage)
        until(lambda before=before: len(Board.runs) > before + 2)
        Board.fails.clear()
        until(lambda outage=outage: outage in steps())
    board.close("failed")
    assert Board.closed == ["stopped"] * (len(Board.runs) - 1) + ["failed"]
    assert len(warnings_of(caplog)) == 2


def test_a_tracker_that_cannot_be_closed_is_left(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(send_to_trackers, "_CLOSE_S", 0.05)
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    until(lambda: Board.runs)
    Board.fails.set()
    report(board, 1)
    until(lambda: len(Board.runs) > 1)
    Board.fails.clear()
    until(lambda: steps() == [1])
    board.close()


def test_a_record_that_is_refused_is_set_aside_by_name_and_others_arrive(tmp_path, caplog) -> None:
    Board.refused = {3, 4}
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    report(board, *range(1, 9))
    until(lambda: 8 in steps())
    board.close()
    assert sorted(steps()) == [1, 2, 5, 6, 7, 8], "each once"
    aside = (tmp_path / "trackers" / f"{HERE}.Board.refused.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in aside] == [3, 4]
    assert [text.partition(", {")[0] for text in warnings_of(caplog) if "refuses" in text] == [
        f"tracker {HERE}.Board refuses one record"
    ] * 2


def test_no_record_is_set_aside_while_the_service_is_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_to_trackers, "_LONGEST_S", 0.02)
    Board.fails.set()
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    report(board, 1, 2, 3)
    until(lambda: len(Board.runs) > 12)
    Board.fails.clear()
    until(lambda: steps() == [1, 2, 3])
    board.close()
    assert not list((tmp_path / "trackers").glob("*.refused.jsonl"))


def test_a_tracker_that_raises_system_exit_is_told_and_made_again(tmp_path, caplog) -> None:
    Board.error = SystemExit(3)
    Board.fails.set()
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    report(board, 1)
    until(lambda: len(Board.runs) > 1)
    Board.fails.clear()
    until(lambda: steps() == [1])
    board.close()
    (warning,) = warnings_of(caplog)
    assert "SystemExit: 3; training continues" in warning


def test_a_marker_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, renamed = list[int](), list[bool]()
    flush, rename = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (flushed.append(os.fstat(file).st_ino), flush(file))[1])
    monkeypatch.setattr(
        Path, "replace", lambda self, to: (renamed.append(self.stat().st_ino in flushed), rename(self, to))[1]
    )
    Trackers(tmp_path, {f"{HERE}.Board": {}}).close()
    assert renamed and all(renamed)


def test_a_tracker_that_hangs_slows_no_step_and_the_next_start_sends_the_rest(tmp_path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 0.1)
    board = Trackers(tmp_path, {f"{HERE}.Board": {}})
    report(board, 1)
    until(lambda: steps() == [1])
    Board.hangs.set()
    start = time.perf_counter()
    report(board, *range(2, 202))
    assert time.perf_counter() - start < patient(2)
    board.close()
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "it does not answer" in warning
    Board.fails.set()  # the thread that is left fails
    Board.hangs.clear()
    until(lambda: not any(thread.name.startswith("meshpar-tracker") for thread in threading.enumerate()))
    Board.fails.clear()
    Board.got.clear()
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 30.0)
    # the run was set back to step 150, of which the tracker knows the first
    again = Trackers(tmp_path, {f"{HERE}.Board": {}}, step=150)
    report(again, 151)
    again.close()
    assert steps() == [*range(2, 151), 151]
    assert len({run.id for run in Board.runs}) == 1


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = Trackers(tmp_path, {})
    report(board, 1)
    full, whole = os.open("/dev/full", os.O_WRONLY), os.dup(board._lines._file.fileno())
    os.dup2(full, board._lines._file.fileno())
    report(board, 2, 3)
    os.dup2(whole, board._lines._file.fileno())
    report(board, 4)
    board.close()
    os.close(full)
    os.close(whole)
    lines = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [1, 2, 3, 4]
    (warning,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert "No space left on device" in warning


def test_lines_that_are_lost_at_the_end_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for lost in (False, True):
        folder = tmp_path / str(lost)
        board = Trackers(folder, {})
        full, whole = os.open("/dev/full", os.O_WRONLY), os.dup(board._lines._file.fileno())
        os.dup2(full, board._lines._file.fileno())
        report(board, 1, 2)
        if not lost:
            os.dup2(whole, board._lines._file.fileno())
        board.close()
        os.close(full)
        os.close(whole)
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == (0 if lost else 2)
    assert "its last 2 records are lost" in warnings_of(caplog)[-1]


@pytest.mark.parametrize("ended", ["complete", "stopped", "failed"])
def test_each_tracker_shows_how_a_run_ended(tmp_path: Path, ended: str) -> None:
    """The clients stand in for services; TensorBoard has a text."""
    calls = list[object]()

    class Client:
        def __getattr__(self, name: str) -> object:
            return lambda *given, **named: calls.append((name, *given, *named.values()))

    for kind, fields in ((trackers.WandB, "_run"), (trackers.Trackio, "_run"), (trackers.MLflow, "_client")):
        made = object.__new__(kind)
        made._id = "7"
        setattr(made, fields, Client())
        made.close(ended)
    code, status = {"complete": (0, "FINISHED"), "stopped": (143, "KILLED"), "failed": (1, "FAILED")}[ended]
    failed = [("log", {"failed": 1.0})] if ended == "failed" else []
    assert calls == [("finish", code), *failed, ("finish",), ("set_terminated", "7", status)]
    board = Trackers(tmp_path, {"tensorboard": {}})
    report(board, 1)
    board.close(ended)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (text,) = events.Tensors("run/text_summary")
    assert (text.step, text.tensor_proto.string_val[0].decode()) == (1, ended)


def test_tensorboard_has_every_scalar_once(tmp_path: Path) -> None:
    board = Trackers(tmp_path, {"tensorboard": {}})
    report(board, 1, 2)
    board.close()
    again = Trackers(tmp_path, {"tensorboard": {}}, step=1)
    again.report({"step": 2, "train/loss": 1.5})
    again.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 1.5)]


def test_a_tracker_that_is_not_there_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MeshparError, match=r"no plugin .wandbb. in meshpar\.trackers"):
        Trackers(tmp_path, {"wandbb": {}})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MeshparError, match="pip install 'meshpar\\[wandb\\]'"):
        Trackers(tmp_path, {"wandb": {}})
    assert set(registry.names("meshpar.trackers")) >= {"tensorboard", "wandb", "trackio", "mlflow"}


def test_wandb_offline_has_records_config_and_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 120.0)
    for last in (2, 3):
        board = Trackers(
            tmp_path, {"wandb": {"project": "lm", "mode": "offline"}}, step=last - 2, facts={"recipe": {"seed": 7}}
        )
        report(board, last - 1, last)
        board.close()
    files = sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    (id_,) = {path.stem.removeprefix("run-") for path in files}
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text())["id"] == id_
    written = b"".join(path.read_bytes() for path in files)
    assert b"train/loss" in written and b"recipe" in written


def test_wandb_without_a_key_warns_once_and_keeps_the_records(tmp_path, monkeypatch, caplog) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    board = Trackers(tmp_path, {"wandb": {"project": "lm", "mode": "online"}})
    report(board, 1)
    board.close()
    (warning,) = (text for record in caplog.records if "tracker" in (text := record.getMessage()))
    assert "W&B has no API key" in warning
    assert json.loads((tmp_path / "trackers" / "wandb.json").read_text())["sent"] == 0


def test_trackio_has_records_config_and_one_run(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which is read at the import
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 120.0)
    for last in (2, 3):
        board = Trackers(tmp_path, {"trackio": {"project": "lm"}}, step=last - 2, facts={"recipe": {"seed": 7}})
        report(board, last - 1, last)
        board.close()
    (run,) = trackio.Api().runs("lm")
    assert run.config["recipe"] == {"seed": 7} and run.name.startswith(f"{tmp_path.name}-")

    def logged() -> list[tuple[int, dict[str, float]]]:
        with sqlite3.connect(tmp_path / "trackio" / "lm.db") as store:
            return [(step, json.loads(values)) for step, values in store.execute("SELECT step, metrics FROM metrics")]

    assert logged() == [(step, {"train/loss": 1.0 / step}) for step in (1, 2, 2, 3)]
    monkeypatch.setattr(trackers, "_ROOM", shutil.disk_usage(tmp_path).total)
    board = Trackers(tmp_path, {"trackio": {"project": "lm"}}, step=3)
    report(board, 4)
    until(lambda: any("are free for the tracker" in record.getMessage() for record in caplog.records))
    monkeypatch.setattr(trackers, "_ROOM", 0)
    board.close()
    assert [step for step, _ in logged()] == [1, 2, 2, 3, 4]


@pytest.mark.nightly
def test_mlflows_server_gets_later_what_came_while_it_was_down(tmp_path, monkeypatch, caplog) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("flask")  # mlflow-skinny has no server
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 120.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{tmp_path}/db", "--artifacts-destination", str(tmp_path / "kept")]

    def serve() -> subprocess.Popen[bytes]:
        with (tmp_path / "server.log").open("ab") as log:
            return subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, start_new_session=True)

    def history() -> list[int]:
        try:
            found = client.search_runs([client.get_experiment_by_name("lm").experiment_id])
            return [metric.step for metric in client.get_metric_history(found[0].info.run_id, "train/loss")]
        except Exception:
            return []

    server = serve()
    try:
        client = mlflow.MlflowClient(tracking_uri=f"http://127.0.0.1:{port}")
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, 60)
        options = {"uri": f"http://127.0.0.1:{port}", "experiment": "lm"}
        board = Trackers(tmp_path / "run", {"mlflow": options}, facts={"recipe": {"seed": 7}})
        report(board, 1, 2)
        until(lambda: history() == [1, 2], 60)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
        report(board, 3, 4)
        until(lambda: any("tracker mlflow" in record.getMessage() for record in caplog.records), 60)
        server = serve()
        until(lambda: history() == [1, 2, 3, 4], 60)
        board.close()
        assert len([record for record in caplog.records if "tracker mlflow" in record.getMessage()]) == 1
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_mlflow_has_metrics_parameters_and_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setattr(send_to_trackers, "PATIENCE_S", 120.0)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    for last in (2, 3):
        board = Trackers(
            tmp_path / "run",
            {"mlflow": {"uri": uri, "experiment": "lm"}},
            step=last - 2,
            facts={"recipe": {"seed": 7}, "commit": "abc"},
        )
        report(board, last - 1, last)
        board.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("lm").experiment_id])
    assert run.data.params["recipe.seed"] == "7"
    assert run.data.tags["mlflow.source.git.commit"] == "abc"
    assert run.info.status == "FINISHED"
    assert [metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 2, 3]
