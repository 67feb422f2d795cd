"""The stream of a live job's weights has the names, order and bytes of its export."""

import json
import statistics
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import meshpar
from meshpar.checkpoints import CheckpointManager, Digest, export_safetensors
from meshpar.checkpoints.export.moving import SortedOwners, stream_group
from meshpar.testing import on_ranks
from tests.support.models_for_parity import gpt2, huggingface, huggingface_gpt2, transformer
from tests.support.tiers import daily

MODELS = {
    "transformer": transformer,
    "tied": lambda: transformer(tied=True),
    "gpt2": gpt2,
    "llama": lambda: huggingface("Llama"),
    "their gpt2": huggingface_gpt2,
    "qwen3_moe": lambda: huggingface(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1
    ),
}
FSDP, TP = meshpar.FullyShard(), meshpar.TensorParallel()
MESHES = {
    "dp_shard=2": [FSDP], "tp=2": [TP], "dp_shard=2,tp=2": [TP, FSDP],
    "dp_replicate=2,dp_shard=2": [meshpar.HybridShard()],
    "dp_replicate=2,dp_shard=2 world": [meshpar.HybridShard(optimizer="world")],
    "dp_shard=2,ep=2": [meshpar.ExpertParallel(), FSDP], "dp_shard=2,cp=2": [meshpar.ContextParallel(), FSDP],
    "dp_shard=2 whole": [meshpar.FullyShard(whole=("model.norm", "lm_head"))], "pp=2": [meshpar.PipelineParallel()],
    "pp=2,dp_shard=2": [meshpar.PipelineParallel(), FSDP],
    "pp=2,dp_replicate=2": [meshpar.PipelineParallel(), meshpar.Replicate()],
    "pp=2,tp=2": [meshpar.PipelineParallel(), TP],
}  # fmt: skip


def planned(name, mesh, dtype=torch.float32):
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    return meshpar.Plan(mesh.partition(" ")[0], MESHES[mesh]).apply(model)


def exported(par, **options):
    """What a checkpoint of the same state exports: order and bytes of every tensor."""
    root = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(root)
    CheckpointManager(Path(root[0]) / "steps").save(1, par)
    if dist.get_rank() > 0:
        return None
    return read(export_safetensors(Path(root[0]) / "steps", Path(root[0]) / "out", **options) / "model.safetensors")


def read(path):
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[8 + size + begin : 8 + size + end])
        for name, entry in sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        for begin, end in [entry["data_offsets"]]
    }


DTYPES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.int64: "I64",
    torch.int32: "I32",
}  # fmt: skip


def described(tensor):
    return DTYPES[tensor.dtype], tuple(tensor.shape), bytes(tensor.flatten().view(torch.uint8).tolist())


def streamed(par, **options):
    stream = par.published(**options)
    metadata, found = stream.metadata(), dict(stream)
    assert [(tensor.name, tensor.dtype, tensor.shape) for tensor in metadata] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()
    ]
    to = options.get("to", 0)
    assert all(tensor.is_meta == (dist.get_rank() != to) for tensor in found.values())
    return found if dist.get_rank() == to else None


def same(par, expected, **options):
    found = streamed(par, **options)
    if expected is not None:
        assert list(found) == list(expected)
        for name, tensor in found.items():
            assert described(tensor) == expected[name], name


OTHERS = "dp_replicate=2,dp_shard=2", "dp_replicate=2,dp_shard=2 world", "dp_shard=2,ep=2", "dp_shard=2,cp=2"
STREAMED = [
    (2, "dp_shard=2", tuple(MODELS)),
    (2, "tp=2", tuple(MODELS)),
    (2, "dp_shard=2 whole", ("llama",)),
    *((4, "dp_shard=2,tp=2", (name,)) for name in MODELS),
    *((4, mesh, ("qwen3_moe",)) for mesh in OTHERS),
]
BY_DAY = STREAMED[0], STREAMED[2], (4, "dp_shard=2,tp=2", ("gpt2",)), (4, "dp_shard=2,ep=2", ("qwen3_moe",))


@pytest.mark.parametrize(("ranks", "mesh", "names"), daily(STREAMED, *BY_DAY))
@on_ranks("ranks")
def test_every_mesh_streams_what_it_exports(ranks, mesh, names):
    for name in names:
        par = planned(name, mesh)
        for dtype in (None, torch.bfloat16):
            expected = exported(par, dtype=dtype)
            same(par, expected, dtype=dtype)
            same(par, expected, dtype=dtype, bucket=3000)  # tensors in several buckets


def quantisable():
    return huggingface("Llama", hidden_size=128, head_dim=32, intermediate_size=128, num_hidden_layers=1)


@on_ranks(2)
def test_quantised_weights_stream_as_they_export() -> None:
    for mesh, dtype in (("dp_shard=2", torch.float32), ("tp=2", torch.bfloat16)):
        torch.manual_seed(0)
        par = meshpar.Plan(mesh, MESHES[mesh]).apply(quantisable().to(dtype))
        for quantize in ("fp8", "int4"):
            expected = exported(par, quantize=quantize)
            same(par, expected, quantize=quantize)
            same(par, expected, quantize=quantize, bucket="64KiB")


@on_ranks(2)
def test_averages_stream_as_they_export() -> None:
    par = planned("transformer", "dp_shard=2")
    average = par.averaged(0.5, dtype=torch.float64)
    for _ in range(2):
        average.update()
        with torch.no_grad():
            for parameter in par.module.parameters():
                parameter.mul_(1.5)
    with average.swapped():
        expected = exported(par)
    same(par, expected, averaged=average)
    changed = streamed(par)
    assert dist.get_rank() or described(next(iter(changed.values()))) != next(iter(expected.values()))


@on_ranks(2)
def test_merged_adapters_stream_as_peft_merges_them() -> None:
    pytest.importorskip("peft")
    from meshpar.training import LoRA, add_adapters

    for name, mesh in (
        ("llama", "dp_shard=2"), ("llama", "tp=2"), ("their gpt2", "dp_shard=2"), ("qwen3_moe", "dp_shard=2"),
    ):  # fmt: skip
        torch.manual_seed(0)
        packed = dict(parameters=("experts.gate_up_proj",)) if name == "qwen3_moe" else {}
        model = MODELS[name]()
        layout = add_adapters(
            model, LoRA(rank=4, targets=("c_attn",) if "gpt2" in name else ("q_proj", "v_proj"), **packed)
        )
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_B" in key:
                    parameter.normal_()
        want = {}
        for key, module in model.named_modules():
            if (
                hasattr(module, "base_layer")
                and hasattr(module, "get_delta_weight")
                and hasattr(module.base_layer, "weight")
            ):
                base = key.replace(".base_layer", "") + ".weight"
                want[base] = module.base_layer.weight.detach() + module.get_delta_weight("default").detach()
        par = meshpar.Plan(mesh, MESHES[mesh]).apply(model, layout)
        found, adapters = streamed(par, bucket=5000), streamed(par, adapters="only")
        if dist.get_rank() == 0:
            assert want and not [key for key in found if "lora" in key or "base_layer" in key]
            for key, value in want.items():
                torch.testing.assert_close(found[key], value)
            assert all(key.startswith("base_model.model.") and key.endswith(".weight") for key in adapters)


@on_ranks(2)
def test_a_stream_of_two_versions_is_an_error_and_the_next_one_is_whole() -> None:
    par = planned("transformer", "dp_shard=2")
    stream = par.published(to=1)
    with pytest.raises(meshpar.MeshparError, match="a mixture of versions"):
        for number, _ in enumerate(stream):
            if number == 0:
                with torch.no_grad():
                    next(par.module.parameters()).mul_(2)
    assert len(list(stream)) == len(stream.metadata()) and stream.version == 2
    with pytest.raises(meshpar.CheckpointError, match="expected a rank from 0 to 1"):
        par.published(to=2)
    with pytest.raises(meshpar.CheckpointError, match="layers with adapters"):
        par.published(adapters="only")


STAGES = [("pp=2", name) for name in MODELS] + [
    ("pp=2,dp_shard=2", "tied"), ("pp=2,dp_replicate=2", "llama"), ("pp=2,tp=2", "llama"), ("pp=2,dp_shard=2", "llama"),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "name"), daily(STAGES, ("pp=2", "tied")))
@on_ranks("mesh")
def test_stages_stream_what_they_export(mesh: str, name: str) -> None:
    par = planned(name, mesh)
    expected = exported(par, dtype=torch.bfloat16)
    for bucket in (3000, "256MiB"):  # tensors in several buckets, all in one
        same(par, expected, dtype=torch.bfloat16, bucket=bucket)
    assert len(list(par.published(to=dist.get_world_size() - 1))) == len(par.published().metadata())


def status_bytes(field):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@on_ranks(2)
def test_a_stream_takes_a_bucket_and_the_largest_tensor() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16)))
    par = meshpar.Plan("dp_shard=2", [FSDP]).apply(model)
    stream = par.published(bucket="8MiB")
    taken = list[int]()
    for _ in range(4):  # the first one opens connections
        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")
        before = status_bytes("VmRSS")
        for _name, tensor in stream:
            del tensor  # or the loop holds it while the next one is made
        taken.append(status_bytes("VmHWM") - before)
    middle = statistics.median(taken[1:])  # what another thread holds a moment longer adds to one of them
    assert middle <= (8 + 4 + 1) << 20, taken


@on_ranks(2)
def test_a_receiver_proves_by_the_digest_that_it_has_a_version_whole() -> None:
    par = planned("transformer", "dp_shard=2")
    stream, digest = par.published(digested=True), Digest()
    assert (stream.version, stream.digest) == (0, "")
    for name, tensor in stream:
        if not tensor.is_meta:
            digest.add(name, tensor)
    said = [digest.hexdigest()]
    dist.broadcast_object_list(said)
    assert stream.version == 1 and stream.digest == said[0]
    with torch.no_grad():
        next(par.module.parameters()).mul_(2)
    list(stream)
    assert stream.version == 2 and stream.digest != said[0]


def test_a_tile_looks_at_the_parts_that_it_meets_of_8192():
    boxes = [(((rank, rank + 1), (column, column + 64)), [rank]) for rank in range(8192) for column in (0, 64)]
    along = SortedOwners(boxes[::-1])
    for spans in (((5, 9), (0, 128)), ((0, 1), (3, 5)), ((8190, 8192), (0, 1))):
        begin, end = spans[0]
        near = along.near(spans)
        meet = [box for box, _ in boxes if box[0][0] < end and begin < box[0][1]]
        assert sorted(box for box, _ in near) == meet and len(near) == 2 * (end - begin)


@on_ranks(2)
def test_a_stream_from_a_device_has_a_group_of_its_own_and_one_call_a_bucket() -> None:
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshpar.checkpoints.export.moving.runtime.hosts", stream_group)
        batch = dist.batch_isend_irecv
        patch.setattr(dist, "batch_isend_irecv", lambda given: calls.append(given[0].group) or batch(given))
        par = planned("transformer", "dp_shard=2")
        same(par, exported(par), bucket=3000)
    assert len(calls) > 3 and {group.group_desc for group in calls} == {"published"}
    assert stream_group() is stream_group() is not dist.group.WORLD


@on_ranks(2)
def test_ranks_send_no_more_than_two_buckets_ahead_of_a_slow_receiver() -> None:
    begun, sends, waits = dist.distributed_c10d._get_default_store(), [], []

    def begin(calls):
        begun.add(f"buckets begun by rank {dist.get_rank()}", 1)
        if dist.get_rank() == 0:
            return batch(calls)
        sends.extend(batch(calls))
        return []  # as on a device, where no host waits for a send

    batch = dist.batch_isend_irecv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", begin)
        for _name, tensor in planned("transformer", "dp_shard=2").published(bucket=3000):
            if not tensor.is_meta and len(waits) < 8:
                time.sleep(0.05)
                waits.append([begun.add(f"buckets begun by rank {rank}", 0) for rank in (0, 1)])
    assert all(sender <= receiver for receiver, sender in waits), waits
    assert len(waits if dist.get_rank() == 0 else sends) >= 8
    for work in sends:
        work.wait()
