"""An export is measured, pushed with its card, and made beside a running job."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from typer.testing import CliRunner

import meshpar
from meshpar.checkpoints import CheckpointManager, Safetensors
from meshpar.checkpoints.steps.lease import Lease
from meshpar.checkpoints.steps.steps import PIN_FILE, Steps
from meshpar.core.errors import CheckpointError
from meshpar.launchers.cli import app
from meshpar.launchers.commands.publishing import watch
from meshpar.launchers.export import export_run
from meshpar.models import Transformer, TransformerConfig
from meshpar.process.leftovers import host_name
from meshpar.training.tokenizer import byte_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with three steps; the second is the best."""
    root = tmp_path_factory.mktemp("job") / "run"
    with meshpar.distributed("cpu"):
        par = meshpar.Plan("", []).apply(
            Transformer(TransformerConfig(vocab_size=257, dim=128, layers=1, heads=4, hidden=128))
        )
        for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
            with torch.no_grad():
                par.module.get_parameter("layers.0.mlp.up.weight").add_(step)
            extra = {"step": step, "tokens": 1000 * step, "data": {"epoch": 0, "samples": 8 * step, "data": "abc/256"}}
            CheckpointManager(root / "checkpoints").save(step, par, extra=extra, metrics={"val/loss": loss})
    byte_tokenizer().save(root / "tokenizer")
    (root / "recipe.yaml").write_text("name: tiny\nmodel: {kind: transformer}\ntraining: {steps: 6}\n")
    (root / "text.txt").write_text("Plans are checked before anything runs. " * 40)
    return root


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.mark.parametrize("how", ["int4", "q4_0"])
def test_the_loss_and_the_logits_are_measured_before_and_after(run, tmp_path, how):
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("gguf")
    done = export(run, tmp_path / "q", "--quantize", how, "--measure", run / "text.txt")
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("held-out loss"))
    words = line.replace(",", "").split()
    before, after, tokens, worst = float(words[2]), float(words[4]), int(words[8]), float(words[15])
    import transformers

    export_run(run, tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    ids = torch.tensor([list((run / "text.txt").read_bytes())[:1536]]).view(3, 512)
    with torch.no_grad():
        want = sum(float(model(row[None], labels=row[None]).loss) for row in ids) / 3
    assert tokens == ids.numel() and abs(before - want) < 1e-3
    assert 1e-3 < worst < 2 and abs(after - before) < 0.2
    assert {path.name for path in tmp_path.iterdir()} == {"q", "plain"}, "the plain export beside it is deleted"


class Hub(BaseHTTPRequestHandler):
    """The calls of the Hugging Face Hub that an upload makes."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, self.headers.get("Authorization")))
        if self.server.refuses and self.path.endswith(self.server.refuses):
            self.answer({"error": "storage quota exceeded"}, 403)
        elif self.path == "/api/repos/create":
            self.server.created = json.loads(body)
            self.answer({"url": f"{self.server.url}/me/tiny", "id": "me/tiny"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = ["lfs" if name.endswith(".safetensors") else "regular" for name in names]
            self.answer({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in zip(names, modes)]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = [
                {**file_, "actions": {"upload": {"href": f"{self.server.url}/lfs/{file_['oid']}", "header": {}}}}
                for file_ in objects
            ]
            self.answer({"transfer": "basic", "objects": actions})
        else:
            self.server.commit = [json.loads(line) for line in body.splitlines()]
            self.answer({"commitUrl": f"{self.server.url}/me/tiny/commit/1234", "commitOid": "1234", "success": True})

    def do_PUT(self):
        self.server.large[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.answer({})

    def do_GET(self):
        self.answer({"error": "not found"}, 404)

    def answer(self, data, code=200):
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def hub(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url, server.large, server.seen, server.refuses, server.commit = (
        f"http://127.0.0.1:{server.server_port}", {}, [], "", None,
    )  # fmt: skip
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "secret-of-a-test")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_push_uploads_every_byte_and_a_card_that_says_where_it_comes_from(run, tmp_path, hub):
    done = export(run, tmp_path / "hf", "--best", "val/loss", "--push", "me/tiny")
    assert done.exit_code == 0, done.output
    assert f"pushed to {hub.url}/me/tiny/commit/1234" in done.stdout and "secret-of-a-test" not in done.output
    assert hub.created["name"] == "tiny"
    assert hub.created["organization"] == "me"
    assert "private" in (hub.created.get("visibility"), *hub.created)
    assert {key for _, key in hub.seen} == {"Bearer secret-of-a-test"}
    arrived = {
        entry["value"]["path"]: base64.b64decode(entry["value"]["content"])
        for entry in hub.commit
        if entry["key"] == "file"
    }
    arrived |= {
        entry["value"]["path"]: hub.large[entry["value"]["oid"]] for entry in hub.commit if entry["key"] == "lfsFile"
    }
    assert arrived == {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}
    card = arrived["README.md"].decode()
    for text in (
        "# me/tiny",
        "Step 4, saved",
        "| Metric val/loss | 1 |",
        "| Position: tokens | 4000 |",
        "| Position: data.samples | 32 |",
    ):
        assert text in card, text
    assert "name: tiny" in card
    assert f"| Version of torch | {torch.__version__} |" in card
    assert "| Mesh | dp_shard=1 (1 ranks, cpu) |" in card
    assert hashlib.sha256(arrived["model.safetensors"]).hexdigest() in card


def test_a_push_that_is_refused_keeps_the_export_and_says_why(run, tmp_path, hub):
    hub.refuses = "/commit/main"
    done = export(run, tmp_path / "hf", "--push", "me/tiny")
    assert done.exit_code == 1
    assert "storage quota exceeded" in done.stderr
    assert "the export is complete: push it again" in done.stderr
    assert hub.commit is None and Safetensors(tmp_path / "hf").shapes() and "secret-of-a-test" not in done.output
    hub.refuses, hf = "", pytest.importorskip("huggingface_hub.cli.hf")
    hf.app(["upload", "me/tiny", str(tmp_path / "hf")], standalone_mode=False)
    assert hub.commit is not None


def test_a_dry_run_names_what_it_would_push_and_calls_nobody(run, tmp_path, hub):
    done = export(run, tmp_path / "hf", "--push", "me/tiny", "--dry-run")
    assert done.exit_code == 0 and "would push to me/tiny:" in done.stdout and not hub.seen
    for path in (tmp_path / "hf").iterdir():
        assert f"  {path.name}  {path.stat().st_size:,} bytes" in done.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--quantize", "int8", "--measure", "absent.txt"), "--measure: expected a file of text, got absent.txt"),
        (("--push", "tiny"), "--push: expected owner/name, got 'tiny'"),
        (("--push", "me/ti ny"), "--push: expected owner/name, got 'me/ti ny'"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_written(run, tmp_path, options, message):
    done = export(run, tmp_path / "hf", *options)
    assert done.exit_code == 1 and message in done.stderr and not any(tmp_path.iterdir()), done.output


def test_a_watch_exports_each_new_best_and_holds_it_against_retention(run, tmp_path):
    """A job saves, keeping one step, while its steps are exported."""
    root, seen = tmp_path / "checkpoints", []
    shutil.copytree(run / "checkpoints", tmp_path / "saved", symlinks=True)
    root.mkdir()
    lease, steps = Lease(root), Steps(root)
    lease.take()
    waiting = [2, 4, 6]

    def save_next():
        if waiting:
            name = f"step-{waiting.pop(0):08d}"
            (tmp_path / "saved" / name).rename(root / name)
        else:
            lease.release()

    def export_one(folder):
        seen.append(int(folder.name[5:]))
        save_next()
        if seen[-1] == 2:
            raise CheckpointError("full disk")
        assert seen[-1] not in steps.retain(1), "the step that is exported was deleted"
        assert (folder / "meshpar.json").exists()
        if seen[-1] == 4:
            save_next()  # 6 is no better, and the job ends

    save_next()
    (root / "step-00000002" / PIN_FILE).write_text(json.dumps({"host": host_name(), "process": 1 << 22, "id": "0"}))
    watch(root, export_one, best="val/loss", poll_s=0.01)
    assert seen == [2, 4] and not steps.pinned()
    watch(root, lambda folder: seen.append(folder.name), every=3, poll_s=0.01)
    assert seen[2:] == ["step-00000006"]


def test_the_watch_command_names_each_export_after_its_step(run, tmp_path):
    done = export(run, tmp_path / "all", "--watch", "--every", "2", "--quantize", "int8")
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == [f"step-{step:08d}" for step in (2, 4, 6)]
    assert all(
        Safetensors(path).dtypes()["model.layers.0.mlp.up_proj.weight"] == torch.int8
        for path in (tmp_path / "all").iterdir()
    )
