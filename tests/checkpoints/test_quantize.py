"""Quantised exports: their bytes against NumPy, and what transformers computes with them."""

import json
import shutil
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import meshpar
from meshpar.checkpoints import CheckpointManager, DistributedCheckpoint, Safetensors, export_gguf, export_safetensors
from meshpar.checkpoints.export.quantizing import SCHEMES
from meshpar.core.errors import CheckpointError
from meshpar.launchers.cli import app
from meshpar.models import GPT2, GPT2Config, Transformer, TransformerConfig
from meshpar.testing import on_ranks

SIZES = dict(vocab_size=96, dim=128, layers=2, heads=4, hidden=256)
MODELS = {
    "llama": lambda: Transformer(TransformerConfig(**SIZES)),
    "tied": lambda: Transformer(TransformerConfig(**SIZES, qk_norm=True, tied=True)),
    "experts": lambda: Transformer(TransformerConfig(**SIZES, qk_norm=True, experts=4, expert_hidden=128)),
    "gpt2": lambda: GPT2(GPT2Config(vocab_size=96, n_positions=32, n_embd=128, n_layer=1, n_head=4)),
}
PASSES = {"tied": ("dp_shard=1,tp=2", [meshpar.TensorParallel(), meshpar.FullyShard()])}


@on_ranks(2)
def save_all(root: str) -> None:
    for name in MODELS:
        mesh, passes = PASSES.get(name, ("dp_shard=2", [meshpar.FullyShard()]))
        with torch.device("meta"):
            model = MODELS[name]()
        par = meshpar.Plan(mesh, passes).apply(model).materialize(seed=3)
        CheckpointManager(Path(root) / name).save(1, par)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    save_all(str(root))
    for name in MODELS:
        export_safetensors(root / name, root / f"{name}-plain")
    return root


def raw(path):
    """The tensors of a safetensors file: name -> (dtype, array of bytes as stored); by the format's own text."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    kinds = {"F32": "<f4", "BF16": "<u2", "F16": "<f2", "F8_E4M3": "u1", "I8": "i1", "I32": "<i4", "I64": "<i8"}
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            values = np.frombuffer(data[8 + size + start : 8 + size + stop], kinds[entry["dtype"]]).reshape(
                entry["shape"]
            )
            found[name] = (entry["dtype"], values)
    return found


def wide(kind, values):
    return (values.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else values.astype(np.float32)


def bfloat16(values):
    """Round float32 to the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


CODES = np.arange(128)
FP8 = np.where(CODES >> 3, 2.0 ** ((CODES >> 3) - 7.0) * (1 + (CODES & 7) / 8), 2.0**-6 * (CODES & 7) / 8).astype(
    np.float32
)[:127]
"""What the codes 0 to 126 of float8_e4m3fn stand for (OCP 8-bit floating point, revision 1.0); the sign is bit 7."""


def to_fp8(values):
    size = np.minimum(np.abs(values), 448)
    above = np.searchsorted(FP8, size).clip(1, 126)
    below = above - 1
    down, up = size.astype(np.float64) - FP8[below], FP8[above] - size.astype(np.float64)
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    return (code | np.where(np.signbit(values), 128, 0)).astype(np.uint8)


BLOCKS = {"fp8": (1, None), "fp8-block": (128, 128), "int8": (1, None), "int4": (1, 128)}


def expected(how, weight, bits):
    """Return stored values, scales (of ``bits``) and dequantised values of a float32 weight, by NumPy alone."""
    rows, columns = weight.shape
    down, across = BLOCKS[how][0], BLOCKS[how][1] or columns
    blocks = weight.reshape(rows // down, down, columns // across, across)
    half = {"fp8": 448, "fp8-block": 448, "int8": 127.5, "int4": 7.5}[how]
    scales = np.abs(blocks).max((1, 3)) / np.float32(half)
    scales = scales if bits == 32 else bfloat16(scales)
    scaled = blocks / scales[:, None, :, None]
    if how.startswith("fp8"):
        stored = to_fp8(scaled)
        values = np.where(stored & 128, -1, 1) * FP8[stored & 127]
        # Half a step: of the 3-bit mantissa, or of the smallest code.
        bound = np.maximum(np.abs(blocks) * np.float32(2**-4), scales[:, None, :, None] * np.float32(2**-10))
    else:
        most = {"int8": 127, "int4": 7}[how]
        values = stored = np.rint(scaled).clip(-most - 1, most).astype(np.int32)
        # Half a step, and what a scale that was rounded down to 8 bits takes from the largest value.
        bound = scales[:, None, :, None] * np.float32(0.5 if bits == 32 else 0.5 + half / 256)
    back = values.astype(np.float32) * scales[:, None, :, None]
    assert (np.abs(back - blocks) <= bound * 1.0001).all()
    return stored.reshape(rows, columns), scales, back.reshape(rows, columns)


def unpacked(words, columns):
    """4-bit values, plus 8, eight in an int32, the first in the lowest bits."""
    nibbles = words.astype(np.uint32)[:, :, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15
    return nibbles.reshape(len(words), -1)[:, :columns].astype(np.int32) - 8


def check_bytes(plain, folder, how, dtype, high):
    """Compare every byte of a quantised export with the plain one's; return what its tensors stand for."""
    exact, found = raw(plain / "model.safetensors"), raw(folder / "model.safetensors")
    bits = 32 if dtype is None else 16
    values = {}
    for name, (kind, weight) in exact.items():
        module = name.removesuffix(".weight")
        if f"{module}.weight_scale" not in found:
            assert weight.ndim == 1 or any(part in name for part in high), f"{name} was not quantised"
            got = wide(*found.pop(name))
            np.testing.assert_array_equal(got, weight if bits == 32 else bfloat16(weight))
            values[name] = got
            continue
        assert not any(part in name for part in high), f"{name} was quantised"
        stored, scales, values[name] = expected(how, wide(kind, weight), bits)
        np.testing.assert_array_equal(wide(*found.pop(f"{module}.weight_scale")), scales, err_msg=name)
        if how == "int4":
            np.testing.assert_array_equal(found.pop(f"{module}.weight_shape")[1], weight.shape)
            np.testing.assert_array_equal(
                unpacked(found.pop(f"{module}.weight_packed")[1], weight.shape[1]), stored, err_msg=name
            )
        else:
            np.testing.assert_array_equal(found.pop(name)[1], stored, err_msg=name)
    assert not found
    return values


HIGH = {
    "llama": ("embed_tokens", "lm_head"),
    "tied": ("embed_tokens",),
    "experts": ("embed_tokens", "lm_head", "mlp.gate."),
}


@pytest.mark.parametrize("how", SCHEMES)
@pytest.mark.parametrize(("name", "dtype"), [("llama", None), ("tied", torch.bfloat16), ("experts", None)])
def test_every_byte_is_what_numpy_makes_of_the_plain_export(runs, tmp_path, name, how, dtype):
    written = []
    export_safetensors(
        runs / name, tmp_path / "q", dtype, quantize=how, progress=lambda *counts: written.append(counts)
    )
    assert written[-1][0] == written[-1][1]
    values = check_bytes(runs / f"{name}-plain", tmp_path / "q", how, dtype, HIGH[name])
    entry = json.loads((tmp_path / "q" / "config.json").read_text())
    assert entry["dtype"] == ("float32" if dtype is None else "bfloat16")
    assert set(entry["quantization_config"]["ignore"]) >= {"lm_head"}
    if name == "llama":
        transformers_agree(tmp_path / "q", runs / "llama-plain", values)


def reference(values, plain, folder):
    """transformers' model of the plain export's config with other values."""
    import safetensors.torch
    import transformers

    folder = Path(shutil.copytree(plain, folder / "reference"))
    tensors = {name: torch.from_numpy(value.copy()) for name, value in values.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def transformers_agree(folder, plain, values):
    """transformers computes the same with the quantised model, dequantised, and with what NumPy made of its bytes."""
    transformers = pytest.importorskip("transformers")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    theirs = quantization.QuantizationConfig.model_validate(config).model_dump(mode="json", exclude_none=True)
    preset = {"float-quantized": "FP8_DYNAMIC", "int-quantized": "W8A8", "pack-quantized": "W4A16"}[config["format"]]
    if "block_structure" in theirs["config_groups"]["group_0"]["weights"]:
        preset = "FP8_BLOCK"
    want = quantization.preset_name_to_scheme(preset, ["Linear"]).model_dump(mode="json", exclude_none=True)
    assert theirs["config_groups"]["group_0"] == want
    load = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.arange(24).reshape(2, 12)
    dequantised = load(folder, quantization_config=transformers.CompressedTensorsConfig(dequantize=True))
    served, problems = load(folder, output_loading_info=True)
    assert not any(problems.values()), problems
    with torch.no_grad():
        want = reference(values, plain, folder.parent)(ids).logits
        torch.testing.assert_close(dequantised(ids).logits, want, rtol=1e-5, atol=1e-5)
        got = served(ids).logits
    # Activations are rounded, too, by transformers: to 8 bits a token. int4 has none of that.
    assert (got - want).abs().max() <= (1e-5 if preset == "W4A16" else 0.08) * want.abs().max()
    with torch.no_grad():
        assert (load(plain)(ids).logits - want).abs().max() > 1e-3  # the comparison above sees quantised weights


class Counted:
    """One large weight that is made as it is read; counts what is read."""

    def __init__(self, rows, columns):
        self._shape, self.largest, self.total = (rows, columns), 0, 0

    def shapes(self):
        return {"up.weight": self._shape}

    def dtypes(self):
        return {"up.weight": torch.float32}

    def read(self, name, index, out):
        self.largest, self.total = max(self.largest, out.nbytes), self.total + out.nbytes
        out.copy_(torch.arange(index[0].start, index[0].stop)[:, None] + torch.arange(self._shape[1]) / 7)


@pytest.mark.parametrize("how", SCHEMES)
def test_a_weight_is_read_once_and_a_few_mebibytes_at_a_time(tmp_path, how):
    source = Counted(1536, 3200)
    export_safetensors(source, tmp_path / "q", config={"model_type": "x"}, quantize=how)
    assert source.total == 1536 * 3200 * 4 and source.largest <= 4 << 20
    whole = torch.empty(1536, 3200)
    source.read("", (slice(0, 1536), slice(0, 3200)), whole)
    stored, scales, _ = expected(how, whole.numpy(), 32)
    found = raw(tmp_path / "q" / "model.safetensors")
    np.testing.assert_array_equal(found["up.weight_scale"][1], scales)
    values = unpacked(found["up.weight_packed"][1], 3200) if how == "int4" else found["up.weight"][1]
    np.testing.assert_array_equal(values, stored)


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_command_keeps_chosen_modules_and_several_files(runs, tmp_path):
    options = (
        "--quantize", "fp8", "--keep-high", "model.layers.0.mlp.*", "--keep-high", "model.layers.*.self_attn.o_proj",
    )  # fmt: skip
    done = export(runs / "llama", tmp_path / "q", *options, "--max-shard-size", "40KB")
    assert done.exit_code == 0, done.output
    kinds = Safetensors(tmp_path / "q").dtypes()
    kept = {name for name, kind in kinds.items() if name.endswith("proj.weight") and kind == torch.float32}
    assert kept == {f"model.layers.0.mlp.{projection}_proj.weight" for projection in ("gate", "up", "down")} | {
        f"model.layers.{number}.self_attn.o_proj.weight" for number in (0, 1)
    }
    ignored = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {f"{module_name}.weight" for module_name in ignored} >= kept


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("llama", ("--quantize", "fp4"), "quantize is 'fp4'; expected one of fp8, fp8-block, int8, int4"),
        (
            "llama",
            ("--quantize", "fp8", "--keep-high", "layers.*.up"),
            "no weight of two dims belongs to a module 'layers.*.up'; nearest",
        ),
    ],
)
def test_the_command_says_what_cannot_be_quantised(runs, tmp_path, model, options, message):
    done = export(runs / model, tmp_path / "q", *options)
    assert done.exit_code == 1 and message in done.stderr and not any(tmp_path.iterdir()), done.stderr


@pytest.mark.parametrize(
    ("name", "weight", "how", "message"),
    [
        ("up", torch.ones(100, 128), "fp8-block", r"do not divide into blocks of 128 x 128"),
        ("up", torch.tensor([[1.0, float("nan")]]), "int8", "up.weight has values that are infinite, NaN"),
        ("lm_head", torch.ones(8, 128), "fp8", "no weight is left to quantise"),
    ],
)
def test_a_weight_that_does_not_fit_its_format_is_named(tmp_path, name, weight, how, message):
    import safetensors.torch

    safetensors.torch.save_file({f"{name}.weight": weight}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        export_safetensors(Safetensors(tmp_path), tmp_path / "q", config={"model_type": "x"}, quantize=how)
    assert not (tmp_path / "q").exists()


def test_a_quantised_export_checks_the_bytes_that_it_reads(runs, tmp_path):
    step = shutil.copytree(runs / "llama" / "latest", tmp_path / "step-00000001")
    source = DistributedCheckpoint(step)
    name, chunk = next(
        (name, tensor.chunks[0]) for name, tensor in source.tensors.items() if name.endswith("up.weight")
    )
    box = source.box(name, chunk)
    data = bytearray(box.file.path.read_bytes())
    data[box.position + 5] ^= 1
    box.file.path.write_bytes(data)
    for how in ("int8", "q8_0"):
        done = export(step, tmp_path / "q", "--quantize", how)
        assert done.exit_code == 1 and f"{name}, bytes" in done.stderr and not (tmp_path / "q").exists()
    assert export(step, tmp_path / "q", "--quantize", "int8", "--verify", "none").exit_code == 0


def gguf_blocks(kind, weight):
    """The bytes of a float32 weight and what they stand for, by NumPy alone (ggml-quants.c: quantize_row_*_ref)."""
    rows = weight.reshape(-1, 32)
    if kind == "f16":
        return weight.astype("<f2").view(np.uint8), weight.astype("<f2").astype(np.float32)
    if kind == "q8_0":
        scales = np.abs(rows).max(1, keepdims=True) / np.float32(127)
    else:
        scales = np.take_along_axis(rows, np.abs(rows).argmax(1, keepdims=True), 1) / np.float32(-8)
    scaled = rows * np.where(scales == 0, 0, 1 / np.where(scales == 0, 1, scales))
    half = scales.astype("<f2")
    if kind == "q8_0":
        codes = (np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))).astype(np.int8)
        values, stored = codes * half.astype(np.float32), codes.view(np.uint8)
    else:
        codes = np.trunc(scaled + np.float32(8.5)).clip(0, 15).astype(np.uint8)
        values, stored = (codes.astype(np.float32) - 8) * half.astype(np.float32), codes[:, :16] | codes[:, 16:] << 4
    # Half a step; a whole one at the end of the range that 4 bits do not reach; and the scale's rounding to float16.
    bound = np.abs(scales) * np.float32(0.5 if kind == "q8_0" else 1) + np.abs(rows) * 2.0**-10 + np.float32(2**-24)
    assert (np.abs(values - rows) <= bound * 1.001).all()
    return np.concatenate([half.view(np.uint8), stored], axis=1), values.reshape(weight.shape)


OURS = {"llama": "llama", "tied": "qwen3", "experts": "qwen3moe", "gpt2": "gpt2"}
FLOAT32 = ("norm.weight", "ln_", "bias", "wpe", "mlp.gate.")
FLOAT16 = ("embed_tokens", "lm_head", "wte")


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "f16") for name in OURS), ("llama", "q8_0"), ("llama", "q4_0"), ("experts", "q8_0"), ("gpt2", "q4_0")],
)
def test_a_gguf_file_is_what_numpy_makes_of_the_plain_export(runs, tmp_path, name, kind):
    gguf = pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    done = export(runs / name, tmp_path / "q", "--quantize", kind)
    assert done.exit_code == 0, done.output
    read = gguf.GGUFReader(tmp_path / "q" / f"model-{kind}.gguf")
    assert read.fields["general.architecture"].contents() == OURS[name]
    found = {tensor.name: np.array(tensor.data).reshape(-1).view(np.uint8) for tensor in read.tensors}
    exact = raw(runs / f"{name}-plain" / "model.safetensors")
    values, stored = {}, []
    for key, (_, weight) in exact.items():
        how = "f32" if any(part in key for part in FLOAT32) else "f16" if any(part in key for part in FLOAT16) else kind
        turned = np.ascontiguousarray(weight.T) if ".c_" in key and weight.ndim > 1 else weight
        data, back = (weight.view(np.uint8), weight) if how == "f32" else gguf_blocks(how, turned)
        values[key] = np.ascontiguousarray(back.T) if turned is not weight else back
        if name == "llama" and (".q_proj" in key or ".k_proj" in key):
            data = data.reshape(4, 2, 16, -1).swapaxes(
                1, 2
            )  # (heads, halves, pairs): pairs lie beside each other in llama.cpp
        stored.append(data.reshape(-1))
    # Each tensor by its bytes, experts one after another: names are the package's.
    assert sorted(map(len, found.values())) == sorted(map(len, joined(exact, stored)))
    assert Counter(array.tobytes() for array in found.values()) == Counter(
        array.tobytes() for array in joined(exact, stored)
    )
    ids = torch.arange(24).reshape(2, 12)
    config = transformers.AutoConfig.from_pretrained(
        runs / f"{name}-plain"
    )  # transformers does not read Qwen3's head_dim from GGUF
    theirs, problems = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", config=config, gguf_file=f"model-{kind}.gguf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(problems.values()), problems
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids).logits, reference(values, runs / f"{name}-plain", tmp_path)(ids).logits, rtol=1e-5, atol=1e-5
        )


def joined(exact, stored):
    """The experts of a layer one after another, as llama.cpp has them."""
    together = {}
    for name, data in zip(exact, stored, strict=True):
        layer, _, expert = name.partition(".experts.")
        together.setdefault((layer, expert.partition(".")[2]), []).append(data)
    return [np.concatenate(arrays) for arrays in together.values()]


def test_a_gguf_file_has_the_tokenizer_with_the_models_number_of_ids(runs, tmp_path):
    pytest.importorskip("gguf")
    transformers = pytest.importorskip("transformers")
    from meshpar.training.tokenizer import train_bpe

    text = "The plan is checked before anything runs. 12 ranks, 3 meshes; it's one process's loss.\n"
    train_bpe([text] * 3, 300).save(tmp_path / "tokenizer")
    config = {**json.loads((runs / "llama-plain" / "config.json").read_text()), "vocab_size": 320}
    weights = {
        name: torch.from_numpy(value.copy())
        for name, (_, value) in raw(runs / "llama-plain" / "model.safetensors").items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.ones(320, 128)
    import safetensors.torch

    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    export_gguf(Safetensors(tmp_path), tmp_path / "q", "q8_0", tmp_path / "tokenizer", config=config)
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "q", gguf_file="model-q8_0.gguf")
    for sample in (text, "<|endoftext|>a mesh", " \n\t ü 🚀"):
        assert theirs(sample)["input_ids"] == ours(sample)["input_ids"]
    assert len(theirs) == 320 and theirs.eos_token_id == ours.eos_token_id
    data = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text())
    data["pre_tokenizer"] = {"type": "Whitespace"}
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(data))
    message = r"cuts text by .*Whitespace.*this export writes byte-level BPE with the cuts of gpt-2, "
    with pytest.raises(CheckpointError, match=message):
        export_gguf(Safetensors(tmp_path), tmp_path / "other", "q8_0", tmp_path / "tokenizer", config=config)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"model_type": "falcon"},
            (),
            "GGUF: the architecture is 'falcon'; this export knows llama, qwen2, qwen3, qwen3_moe, gemma, gpt2; for",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            (),
            "the rotary scaling is 'yarn'; this export knows default, linear and llama3",
        ),
        (
            {"use_sliding_window": True},
            (),
            "the config has use_sliding_window = True, which llama.cpp's llama does not compute",
        ),
        ({"num_hidden_layers": None}, (), "config.json has no num_hidden_layers"),
        ({}, ("--keep-high", "absent"), "no weight of two dims belongs to a module 'absent'"),
    ],
)
def test_what_llama_cpp_does_not_run_is_refused(runs, tmp_path, change, options, message):
    pytest.importorskip("gguf")
    config = json.loads((runs / "llama-plain" / "config.json").read_text()) | change
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    done = export(runs / "llama", tmp_path / "q", "--quantize", "q8_0", "--config", tmp_path / "given", *options)
    assert done.exit_code == 1 and message in done.stderr and not (tmp_path / "q").exists(), done.stderr
