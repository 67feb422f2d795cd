"""Damage and attacks: whatever byte differs is found, named with its tensor, and nothing that a file says is run."""

import io
import json
import os
import pickle
import re
import subprocess
import zipfile
import zlib
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from meshpar.checkpoints import (
    CheckpointManager,
    DistributedCheckpoint,
    Safetensors,
    export_safetensors,
    import_safetensors,
    list_steps,
    read_manifest,
    verify_files,
    verify_step,
)
from meshpar.checkpoints.format.manifest import MANIFEST_NAME
from meshpar.checkpoints.steps.importing import config_beside
from meshpar.checkpoints.storage.place import Place, entries, place
from meshpar.core.errors import CheckpointError
from meshpar.testing import on_ranks
from tests.checkpoints.test_commit import Job, linear, saved, stepped
from tests.support.patience import patient
from tests.support.tiers import daily

on_both = pytest.mark.parametrize("home", ["disk", "store"], indirect=True)


@pytest.fixture
def home(request, tmp_path) -> Place:
    """Where steps are: on a disk, or, where a test asks for it, in a store."""
    return place(request.getfixturevalue("bucket")) if getattr(request, "param", "disk") == "store" else tmp_path


@pytest.fixture
def step(home, monkeypatch) -> Place:
    """A small step: random state would be most of it."""
    monkeypatch.setattr("meshpar.checkpoints.steps.saving.random_state", lambda *_: {})
    job = linear(1)
    return CheckpointManager(home / "run").save(1, job, stepped(job))


def files_of(folder: Place, pattern: str = "*") -> list[Place]:
    """The files that a step's manifest names, which are in a folder of their own in a store, and the manifest."""
    inside = read_manifest(folder).files_in(folder)
    return [entry for entry in entries(inside, pattern) if entry.is_file()] + [folder / MANIFEST_NAME] * (
        inside != folder and pattern == "*"
    )


def read(path: Place) -> bytes:
    file = place(path).reader()
    return file.bytes(0, file.size)


def write(path: Place, data: bytes | bytearray) -> None:
    path.write_bytes(data) if isinstance(path, Path) else path.write_durably(bytes(data))


def verify(folder: Place) -> None:
    verify_files(folder, read_manifest(folder), "full")


def parts_of(folder: Place, file: str) -> list[tuple[str, int]]:
    """Return tensor and position of each part of a file, in the file's order."""
    tensors = read_manifest(folder).tensors.items()
    parts = [(name, chunk[3]) for name, entry in tensors for chunk in entry["chunks"] if chunk[2] == file]
    return sorted(parts, key=lambda part: part[1])


def owner_of(folder: Place, file: str, position: int) -> str | None:
    for name, entry in read_manifest(folder).tensors.items():
        for _, _, where, start, length in entry["chunks"]:
            if where == file and start <= position < start + length:
                return name
    return None


@pytest.mark.timeout(900)
@pytest.mark.parametrize("home", ["disk", pytest.param("store", marks=pytest.mark.long)], indirect=True)
@pytest.mark.parametrize("stride", daily([1, 13], 13, ids=lambda stride: f"1 of {stride}"))
def test_a_flipped_bit_at_any_byte_of_any_file_is_found_and_named_with_its_tensor(step, stride):
    verify(step)
    looked, manifest = 0, read_manifest(step)
    for file in files_of(step):
        data, wrong = read(file), bytearray(read(file))
        owners = (
            [owner_of(step, file.name, position) for position in range(len(data))]
            if file.suffix == ".distcp"
            else [None] * len(data)
        )
        for position in range(0, len(data), stride):
            wrong[position] ^= 1 << position % 8
            write(file, wrong)
            with pytest.raises(CheckpointError) as raised:
                verify_files(step, read_manifest(step) if file.name == MANIFEST_NAME else manifest, "full", [file.name])
            assert file.name in str(raised.value) and (owners[position] or "") in str(raised.value), (
                file.name,
                position,
            )
            wrong[position] = data[position]
            looked += 1
        write(file, data)
        if file.suffix == ".distcp":
            table = 4 * len(parts_of(step, file.name))
            assert None not in owners[:-table], "every byte before the checksums belongs to a tensor"
    verify(step)
    sizes = [file.size() for file in files_of(step)]
    assert looked == sum(len(range(0, size, stride)) for size in sizes) and sum(sizes) > 5000


@pytest.mark.parametrize("damage", [b"\xff", b'"x', b"[]"], ids=["no-text", "quote", "list"])
def test_the_message_about_a_damaged_manifest_is_short_and_names_the_remedy(step, damage):
    manifest = step / MANIFEST_NAME
    text = manifest.read_bytes()
    manifest.write_bytes(damage if damage == b"[]" else text[:60] + damage + text[60:])
    with pytest.raises(CheckpointError) as raised:
        read_manifest(step)
    message = str(raised.value)
    assert message.startswith(f"{manifest} cannot be read: expected 'meshpar-checkpoint' as JSON, got ")
    assert message.endswith("; restore another step, with restore(step=...) or restore(fallback=True)")
    assert len(message) < len(str(manifest)) + 350 < len(text)


def test_the_message_about_a_damaged_index_is_short(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(b'{"weight_map": {"a": "' + b"x" * 5000 + b'\xff"}}')
    with pytest.raises(CheckpointError) as raised:
        Safetensors(tmp_path)
    assert len(str(raised.value)) < len(str(index)) + 300


@on_both
def test_truncation_deletion_swapping_and_growth_are_found(step):
    files = files_of(step, "*.distcp")
    assert len(files) == 2
    for file in (*files, files[0].with_name(".metadata")):
        data = read(file)
        for cut in (0, 1, len(data) // 2, len(data) - 1):
            write(file, data[:cut])
            with pytest.raises(CheckpointError, match=rf"{file.name}: expected {len(data)} bytes, found {cut}"):
                verify(step)
        write(file, data + b"\0")
        with pytest.raises(CheckpointError, match=rf"{file.name}: expected {len(data)} bytes, found {len(data) + 1}"):
            verify(step)
        file.unlink()
        with pytest.raises(CheckpointError, match=rf"{file.name}: No such file"):
            verify(step)
        write(file, data)
    texts = list(map(read, files))
    write(files[0], texts[1])
    write(files[1], texts[0])
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp"):
        verify(step)
    (step / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="never committed"):
        verify(step)


@on_both
def test_swapped_files_of_one_size_are_found(home):
    module = nn.Module()
    for name in "ab":
        module.register_buffer(name, torch.full((4, 4), float(ord(name))))
    folder = CheckpointManager(home, threads=2).save(1, Job(module))
    chunks = {name: read_manifest(folder).tensors[f"model.{name}"]["chunks"][0] for name in "ab"}
    inside = read_manifest(folder).files_in(folder)
    texts = {name: read(inside / chunk[2])[chunk[3] : chunk[3] + chunk[4]] for name, chunk in chunks.items()}
    for name, other in ("ab", "ba"):
        _, _, file, start, length = chunks[name]
        data = read(inside / file)
        write(inside / file, data[:start] + texts[other] + data[start + length :])
    with pytest.raises(CheckpointError, match=r"model\.a.* is damaged: expected the CRC-32 \w+ of the manifest"):
        CheckpointManager(home).restore(Job(module), verify="size")
    assert module.a[0, 0] == ord("a"), "refused before anything changed"
    CheckpointManager(home).restore(Job(module), verify="none")
    assert module.a[0, 0] == ord("b"), "nothing is checked"
    message = r"(?s)model\.a at \(0, 0\).*model\.b at \(0, 0\)|model\.b at \(0, 0\).*model\.a at \(0, 0\)"
    with pytest.raises(CheckpointError, match=message):
        verify(folder)
    with pytest.raises(CheckpointError, match=r"model\.a"):
        export_safetensors(folder, home / "hf", verify="full")


@on_both
def test_a_file_of_another_step_is_found_by_its_checksums_though_they_fit_it(home):
    module = nn.Module()
    module.register_buffer("a", torch.zeros(4, 4))
    manager = CheckpointManager(home, threads=1)
    other = manager.save(1, Job(module))
    module.a += 1
    folder = manager.save(2, Job(module))
    (name,) = [name for name in read_manifest(folder).files if name.endswith(".distcp")]
    insides = [read_manifest(step).files_in(step) for step in (folder, other)]
    write(insides[0] / name, read(insides[1] / name))
    match = rf"{name}: (the part of '[^']+' at byte \d+ is damaged: )?the checksums at the end of the file: expected"
    for level in ("size", "full"):
        with pytest.raises(CheckpointError, match=match):
            CheckpointManager(home).restore(Job(module), step=2, verify=level)


@on_both
def test_a_step_of_the_formats_first_version_is_read_and_its_damage_is_named(home):
    """There, the manifest has the checksum of each part, and no file has a table."""
    folder = CheckpointManager(home, threads=1).save(1, linear(1))
    data = json.loads(read(folder / MANIFEST_NAME))
    inside = read_manifest(folder).files_in(folder)
    for name, file in data["files"].items():
        if (count := len(parts_of(folder, name))) == 0:
            continue
        text = read(inside / name)
        sums = array("I", text[-4 * count :])
        write(inside / name, text[: -4 * count])
        for (tensor, position), checksum in zip(parts_of(folder, name), sums, strict=True):
            (chunk,) = [chunk for chunk in data["tensors"][tensor]["chunks"] if chunk[2:4] == [name, position]]
            chunk.append(checksum)
        del file["sums"]
        file |= {"size": len(text) - 4 * count, "crc32": zlib.crc32(text[: -4 * count])}
    entries = {**data, "version": 1}
    del entries["crc32"]
    text = "{\n" + "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in entries.items())
    write(folder / MANIFEST_NAME, f'{text}"crc32": "{zlib.crc32(text.encode()):08x}"\n}}\n'.encode())
    verify(folder)
    job = linear(2)
    CheckpointManager(home).restore(job)
    assert all(torch.equal(value, linear(1).module.state_dict()[key]) for key, value in job.module.state_dict().items())
    _, _, name, start, *_ = read_manifest(folder).tensors["model.weight"]["chunks"][0]
    whole = read(inside / name)
    write(inside / name, whole[: start + 100] + bytes([whole[start + 100] ^ 1]) + whole[start + 101 :])
    with pytest.raises(CheckpointError, match=rf"{name}: model\.weight at .*expected the CRC-32"):
        verify(folder)


def holes(metadata) -> list:
    """Each a change to DCP's metadata after which it does not describe the checkpoint any more."""

    def chunk_gone():
        metadata.state_dict_metadata["model.weight"].chunks.clear()

    def tensor_gone():
        del metadata.state_dict_metadata["model.weight"]

    def place_gone():
        del metadata.storage_data[next(key for key in metadata.storage_data if key.fqn == "model.weight")]

    def place_moved():
        places = {key.fqn: value for key, value in metadata.storage_data.items()}
        places["model.weight"].offset = places["model.bias"].offset

    return [chunk_gone, tensor_gone, place_gone, place_moved]


@on_both
@pytest.mark.parametrize("number", range(4))
def test_a_hole_in_the_metadata_is_found_even_where_its_checksum_fits(step, number):
    path = read_manifest(step).files_in(step) / ".metadata"
    metadata = pickle.loads(read(path))
    holes(metadata)[number]()
    write(path, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        verify(step)
    manifest = read_manifest(step)
    files = {**manifest.files, ".metadata": {"size": path.size(), "crc32": __import__("zlib").crc32(read(path))}}
    with pytest.raises(CheckpointError, match=r"model\.weight"):
        verify_files(
            step,
            type(manifest)(**{**{name: getattr(manifest, name) for name in manifest.__slots__}, "files": files}),
            "full",
        )


@on_both
def test_a_damaged_step_is_refused_and_the_one_before_taken_only_when_asked(home, caplog):
    manager = saved(home, 1, 2, 3)
    for number in (2, 3):
        write(files_of(home / f"step-{number:08d}", "*.distcp")[0], b"")
    with pytest.raises(CheckpointError, match="step-00000003 is damaged"):
        manager.restore(linear())
    job = linear()
    found = manager.restore(job, fallback=True)
    assert found.step == 1 and len(found.passed_over) == 2 and "step-00000003 is damaged" in caplog.text
    assert torch.equal(job.module.weight, linear(1).module.weight)
    files_of(home / "step-00000001", "*.distcp")[0].unlink()
    with pytest.raises(CheckpointError, match=r"every step in .* is damaged"):
        manager.restore(linear(), fallback=True)


def flip(folder: Place, name: str) -> None:
    """Change one bit of a tensor's values."""
    source = DistributedCheckpoint(folder)
    box = source.box(name, source.tensors[name].chunks[0])
    data = bytearray(read(box.file.path))
    data[box.position + 1] ^= 1
    write(box.file.path, bytes(data))


@on_both
def test_a_flipped_bit_is_found_by_default_and_the_step_before_taken_when_asked(home):
    manager = saved(home, 1, 2)
    flip(home / "step-00000002", "model.weight")
    message = r"__0_\d\.distcp is damaged: model\.weight, bytes \d+ to \d+: expected the CRC-32"
    with pytest.raises(CheckpointError, match=message):
        manager.restore(linear())
    job = linear()
    found = manager.restore(job, fallback=True)
    assert found.step == 1 and "model.weight" in found.passed_over[0]
    assert torch.equal(job.module.weight, linear(1).module.weight)
    assert torch.equal(job.module.bias, linear(1).module.bias)
    manager.restore(job, verify="none")


@on_both
def test_the_files_of_another_step_are_found_by_default(home):
    manager = saved(home, 1, 2)
    for one, other in zip(*(files_of(home / f"step-{number:08d}", "*.distcp") for number in (1, 2))):
        write(other, read(one))
    job = linear()
    with pytest.raises(CheckpointError, match="it is of another step, or changed"):
        manager.restore(job)
    assert torch.equal(job.module.weight, linear().module.weight)


def test_a_foreign_checkpoint_without_sums_is_read_and_one_with_sums_is_checked(tmp_path):
    for name, summed in (("with", True), ("without", False)):
        torch.serialization.set_crc32_options(summed)
        try:
            dcp.save({"a": torch.arange(4.0)}, checkpoint_id=tmp_path / name, no_dist=True)
        finally:
            torch.serialization.set_crc32_options(True)
        out = torch.zeros(4)
        DistributedCheckpoint(tmp_path / name).read("a", (), out)
        assert out.tolist() == [0, 1, 2, 3]
        flip(tmp_path / name, "a")
    DistributedCheckpoint(tmp_path / "without").read("a", (), out)
    with pytest.raises(CheckpointError, match="is damaged: a, bytes"):
        DistributedCheckpoint(tmp_path / "with").read("a", (), out)


@on_both
def test_damage_inside_an_archive_is_found_before_anything_is_changed(home):
    folder = CheckpointManager(home).save(1, linear(1))
    _, _, name, start, length = read_manifest(folder).tensors["model.weight"]["chunks"][0]
    file = read_manifest(folder).files_in(folder) / name
    data, at = read(file), start + length - 22
    write(file, data[:at] + b"\0" * 4 + data[at + 4 :])
    job = linear(2)
    before = {key: value.clone() for key, value in job.module.state_dict().items()}
    with pytest.raises(CheckpointError, match=rf"{name}: the part of 'model\.weight'.* is damaged"):
        CheckpointManager(home).restore(job)
    assert all(torch.equal(before[key], value) for key, value in job.module.state_dict().items())


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_code_is_refused_and_not_run(tmp_path):
    folder = CheckpointManager(tmp_path / "run").save(1, linear())
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match=r"it refers to posix\.system, which no checkpoint needs"):
        DistributedCheckpoint(folder)
    with pytest.raises(CheckpointError):
        CheckpointManager(tmp_path / "run").restore(linear(), verify="none")
    with pytest.raises(CheckpointError):
        export_safetensors(tmp_path / "run", tmp_path / "hf", verify="none")
    assert not (tmp_path / "owned").exists()


def test_a_tensors_own_pickle_that_would_run_code_is_refused_and_not_run(tmp_path):
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    archive = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO((tmp_path / "__0_0.distcp").read_bytes())) as good,
        zipfile.ZipFile(archive, "w") as bad,
    ):
        for name in good.namelist():
            bad.writestr(
                name, pickle.dumps(Attack(tmp_path / "owned")) if name.endswith("data.pkl") else good.read(name)
            )
    (tmp_path / "__0_0.distcp").write_bytes(archive.getvalue())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).length = len(archive.getvalue())
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'a'.* is damaged: .*it refers to posix\.system"):
        DistributedCheckpoint(tmp_path).read("a", (), torch.empty(4))
    assert not (tmp_path / "owned").exists()


def test_a_plain_object_in_a_foreign_checkpoint_is_not_unpickled(tmp_path):
    dcp.save({"a": torch.ones(4), "notes": Attack(tmp_path / "owned")}, checkpoint_id=tmp_path, no_dist=True)
    assert list(DistributedCheckpoint(tmp_path).shapes()) == ["a"]
    assert not (tmp_path / "owned").exists()


def reseal(folder: Place, **changes) -> None:
    """Write a manifest whose checksum fits, as somebody does who means to deceive."""
    write(folder / MANIFEST_NAME, replace(read_manifest(folder), **changes).to_json().encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", "1"), ("files", []), ("files", {"x": {"size": "1", "crc32": 0}}), ("tensors", {"x": 1}), ("metrics", {"loss": "low"}),
     ("tensors", {"x": {"dtype": "float32", "shape": [1], "chunks": [[0]]}}), ("optimizer", []), ("mesh", {"tp": None}), ("tied", [1])],
)  # fmt: skip
def test_a_manifest_with_other_types_is_refused_in_one_line_by_the_entry(tmp_path, field, value):
    manager = CheckpointManager(tmp_path, best="loss")
    folders = [manager.save(number, linear(number), metrics={"loss": 1.0}) for number in (1, 2)]
    reseal(folders[1], **{field: value})
    with pytest.raises(CheckpointError, match=rf"cannot be read: .*values of other types in {field}") as raised:
        manager.restore(linear())
    assert "other types" in list_steps(tmp_path)
    assert manager.restore(linear(), fallback=True).step == 1 and "Traceback" not in str(raised.value)


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_safetensors_header_or_index_nested_too_deep_is_refused(tmp_path, file):
    text = b'{"weight_map": ' + b"[" * 100_000
    (tmp_path / file).write_bytes(text if file.endswith("json") else len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match=r"is not a (complete safetensors file|safetensors index)"):
        Safetensors(tmp_path)


def test_a_config_of_more_levels_than_a_hundred_is_refused(tmp_path):
    for levels in (100, 101, 900):
        (tmp_path / "config.json").write_text('{"a":' * (levels - 1) + "[]" + "}" * (levels - 1))
        if levels == 100:
            assert config_beside(tmp_path).keys() == {"a"}
            continue
        with pytest.raises(CheckpointError, match="lists and objects have more than 100 levels"):
            config_beside(tmp_path)


def test_a_manifest_nested_too_deep_is_one_damaged_step(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-00000002" / MANIFEST_NAME).write_text("[" * 200_000)
    lines = list_steps(tmp_path).splitlines()
    assert lines[1].startswith("1 ") and "damaged" in lines[2]


@pytest.mark.parametrize("name", ["/etc/passwd", "../step-00000001/__0_0.distcp"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(step, name):
    files = read_manifest(step).files
    reseal(step, files={**files, name: files[".metadata"]})
    with pytest.raises(CheckpointError, match=r"meshpar\.json names a file outside of its folder: got"):
        read_manifest(step)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", MANIFEST_NAME])
def test_a_link_in_the_place_of_a_file_is_refused(step, tmp_path, file):
    (step / file).rename(tmp_path / "elsewhere")
    (step / file).symlink_to(tmp_path / "elsewhere")
    for level in ("none", "size", "full"):
        message = rf"{re.escape(file)}.* link.*; copy the checkpoint with its files, such as by cp -L"
        with pytest.raises(CheckpointError, match=message):
            CheckpointManager(step.parent).restore(linear(), verify=level)
    subprocess.run(["cp", "-rL", step.parent, tmp_path / "copy"], check=True)
    assert "is whole" in verify_step(tmp_path / "copy")


@pytest.mark.parametrize("file", ["__0_0.distcp", MANIFEST_NAME])
def test_a_device_or_a_pipe_in_the_place_of_a_file_is_refused_unread(step, file):
    (step / file).unlink()
    os.mkfifo(step / file)
    with pytest.raises(CheckpointError, match=r"regular file|a link or a device"):
        verify_step(step)
    (step / file).unlink()
    (step / file).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="link"):
        verify_step(step)


@pytest.mark.parametrize("path", ["../elsewhere.distcp", "/etc/passwd", "..", "", "a/b.distcp"])
def test_a_path_out_of_the_folder_is_refused(tmp_path, path):
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = path
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside of the checkpoint's folder, which is not allowed"):
        DistributedCheckpoint(tmp_path)


def test_parts_that_overlap_are_found_among_many(tmp_path):
    dcp.save({"a": torch.ones(100, 4)}, checkpoint_id=tmp_path, no_dist=True)
    good = pickle.loads((tmp_path / ".metadata").read_bytes())
    index, place = next(iter(good.storage_data.items()))
    chunk = good.state_dict_metadata["a"].chunks[0]
    for starts, text in ((range(100), None), ([*range(99), 98], "some twice"), (range(99), "have 396 elements of 400")):
        good.state_dict_metadata["a"].chunks = [
            type(chunk)(torch.Size((start, 0)), torch.Size((1, 4))) for start in starts
        ]
        good.storage_data = {type(index)("a", torch.Size((start, 0))): place for start in starts}
        (tmp_path / ".metadata").write_bytes(pickle.dumps(good))
        if text is None:
            DistributedCheckpoint(tmp_path)
        else:
            with pytest.raises(CheckpointError, match=text):
                DistributedCheckpoint(tmp_path)


# Full disk


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 32 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def heavy(value: float) -> Job:
    module = nn.Module()
    for name in "abcdef":
        module.register_buffer(name, torch.full((800_000,), float(value)))
    return Job(module)


def plenty(monkeypatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1 << 40}))


@pytest.mark.parametrize("async_", [False, True])
@pytest.mark.parametrize("threads", [1, 4])
def test_a_disk_that_fills_up_while_writing_fails_the_save_and_leaves_the_last_step(
    small_disk, monkeypatch, threads, async_
):
    plenty(monkeypatch)
    manager = CheckpointManager(small_disk, threads=threads, async_=async_)
    manager.save(1, heavy(1))
    manager.wait()
    for _ in range(2):
        message = r"writing to .* failed: .*No space left on device; free some space there"
        with pytest.raises(CheckpointError, match=message):
            manager.save(2, heavy(2))
            manager.wait()
        assert manager.steps() == [1] and not manager.ignored()
    job = heavy(0)
    assert manager.restore(job, verify="full").step == 1 and job.module.a[5] == 1
    exported = export_safetensors(small_disk, small_disk.parent / "hf")
    message = r"importing to .*imported failed: .*No space left on device; free some space there"
    with pytest.raises(CheckpointError, match=message):
        import_safetensors(exported, small_disk / "imported")
    assert not any((small_disk / "imported").iterdir())
    message = r"exporting to .*small/hf failed: .*No space left on device; free some space there"
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(small_disk, small_disk / "hf")
    assert not [path for path in small_disk.iterdir() if "hf" in path.name]


@on_ranks(2)
def fill_on_two(root: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        plenty(patch)
        manager = CheckpointManager(root, timeout_s=patient(20))
        job = heavy(1)
        if dist.get_rank() == 0:  # rank 0 has little to write, and rank 1 what does not fit
            job = Job(nn.Linear(2, 2))
        # Rank 0's few bytes may come before or after rank 1 has filled the disk.
        with pytest.raises(
            CheckpointError,
            match=r"writing step 1 failed on [12] of 2 ranks:[\s\S]* rank 1: writing to .*No space left on device; free some space there",
        ):
            manager.save(1, job, rank_extra=None)
        dist.barrier()
        assert not manager.steps() and not manager.ignored()


def test_a_disk_full_on_one_rank_fails_all(small_disk):
    (small_disk / "filler").write_bytes(b"\0" * (22 << 20))
    fill_on_two(str(small_disk / "run"))
