"""WeightMap: one table, both ways."""

import json
import random

import pytest
import torch

from meshpar.core.errors import LayoutError
from meshpar.weights import Fuse, Permute, Rename, Split, Transpose, WeightMap
from tests.support.models_for_parity import Given


def tensors(**shapes):
    generator = torch.Generator().manual_seed(0)
    return {name.replace("__", "."): torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def whole(source, name):
    out = torch.empty(source.shapes()[name], dtype=source.dtypes()[name])
    source.read(name, (), out)
    return out


def test_a_rule_with_many_stars_is_refused_and_parts_are_matched_one_by_one():
    with pytest.raises(LayoutError, match=r"has 40 '\*' in one part of a name; expected at most 4"):
        WeightMap((Rename("a" + "*a" * 40, "b" + "*b" * 40),)).theirs("a" * 60)
    many = ".".join(["*a*"] * 30)
    name = ".".join(["a" * 30] * 30) + ".z"
    assert WeightMap((Rename(f"{many}.x", f"{many}.y"),)).theirs(name) == (name,)
    assert WeightMap((Rename("l*.a*b*.w", "m*.*.*.v"),)).theirs("l1.axbyb.w") == ("m1.xby..v",)


LLAMA = WeightMap(
    (
        Split("layers.*.qkv.*", ("layers.*.q.*", "layers.*.k.*", "layers.*.v.*"), parts=(4, 2, 2)),
        Permute("layers.*.q.*", "layers.*.q.*", outer=2, inner=2),
        Permute("layers.*.k.*", "layers.*.k.*", outer=2, inner=2),
        Fuse(("layers.*.gate.*", "layers.*.up.*"), "layers.*.gate_up.*"),
        Transpose("layers.*.down.weight", "layers.*.down.weight"),
        Rename("layers.*.*.*", "model.layers.*.part.*.*"),
        Rename("norm.weight", "model.norm.weight"),
    )
)
OURS = tensors(
    **{
        f"layers__{i}__{name}": shape
        for i in range(2)
        for name, shape in {
            "qkv__weight": (32, 6),
            "qkv__bias": (32,),
            "gate__weight": (10, 6),
            "up__weight": (10, 6),
            "down__weight": (6, 10),
        }.items()
    },
    norm__weight=(6,),
    head__weight=(7, 6),
)


def test_names_carry_wildcards_over_in_order_both_ways():
    names = WeightMap(
        (Rename("layers.*.up.*", "model.layers.*.mlp.up_proj.*"), Rename("norm.weight", "model.norm.weight"))
    )
    assert names.theirs("layers.12.up.weight") == ("model.layers.12.mlp.up_proj.weight",)
    assert names.ours("model.layers.12.mlp.up_proj.bias") == ("layers.12.up.bias",)
    assert names.theirs("head.weight") == names.ours("head.weight") == ("head.weight",)
    assert names.theirs("layers.1.2.up.weight") == ("layers.1.2.up.weight",)


def test_stages_chain_so_that_a_part_is_renamed_after_the_split():
    assert LLAMA.theirs("layers.3.qkv.bias") == tuple(f"model.layers.3.part.{letter}.bias" for letter in "qkv")
    assert LLAMA.ours("model.layers.3.part.gate_up.weight") == ("layers.3.gate.weight", "layers.3.up.weight")


def test_published_tensors_are_what_the_rules_say():
    published = LLAMA.publish(Given(OURS))
    q, k, v = OURS["layers.1.qkv.weight"].split((16, 8, 8))
    assert torch.equal(whole(published, "model.layers.1.part.v.weight"), v)
    permuted = q.view(4, 2, 2, 6).transpose(1, 2).reshape(16, 6), k.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6)
    for name, expected in zip("qk", permuted):
        assert torch.equal(whole(published, f"model.layers.1.part.{name}.weight"), expected)
    gate_up = torch.cat([OURS["layers.0.gate.weight"], OURS["layers.0.up.weight"]])
    assert torch.equal(whole(published, "model.layers.0.part.gate_up.weight"), gate_up)
    assert torch.equal(whole(published, "model.layers.0.part.down.weight"), OURS["layers.0.down.weight"].T)
    assert torch.equal(whole(published, "head.weight"), OURS["head.weight"])


def test_out_and_in_again_is_the_identity_for_every_slice():
    again = LLAMA.view(LLAMA.publish(Given(OURS)))
    assert again.shapes() == Given(OURS).shapes() and again.dtypes() == Given(OURS).dtypes()
    random.seed(1)
    for name, tensor in OURS.items():
        for _ in range(20):
            index = tuple(slice(*sorted(random.choices(range(size + 1), k=2))) for size in tensor.shape)
            out = torch.full_like(tensor[index], float("nan"), dtype=torch.float64)
            again.read(name, index, out)
            assert torch.equal(out, tensor[index].double()), (name, index)


def random_rule(name, shape):
    ways = [Rename(name, f"{name}.r")]
    if len(shape) == 2:
        ways.append(Transpose(name, f"{name}.t"))
    dim = random.randrange(len(shape))
    if shape[dim] % 4 == 0:
        ways.append(Permute(name, f"{name}.p", outer=2, inner=2, unit=random.choice([1, shape[dim] // 4]), dim=dim))
    if shape[dim] % 3 == 0:
        parts = random.choice([(1, 2), (2, 1)])
        ways.append(Split(name, (f"{name}.a", f"{name}.b"), dim=dim - len(shape), parts=parts))
    return random.choice(ways)


@pytest.mark.parametrize("seed", range(12))
def test_any_chain_of_rules_reads_back_what_it_published(seed):
    random.seed(seed)
    source = Given(tensors(a=(12, 24), b=(24,), c__d=(6, 36, 2)))
    rules = []
    for _ in range(8):
        shapes = WeightMap(rules).publish(source).shapes()
        name = random.choice(list(shapes))
        rules.append(random_rule(name, shapes[name]))
    table = WeightMap(rules)
    published = table.publish(source)
    assert {their for name in source.tensors for their in table.theirs(name)} == set(published.shapes())
    again = WeightMap.from_json(json.loads(json.dumps(table.to_json()))).view(
        Given({n: whole(published, n) for n in published.shapes()})
    )
    for name, tensor in source.tensors.items():
        assert torch.equal(whole(again, name), tensor)


def test_fuse_of_unequal_parts_along_a_later_dim():
    table = WeightMap((Fuse(("q", "k", "v"), "qkv", dim=1, parts=(2, 1, 1)),))
    ours = tensors(q=(3, 8), k=(3, 4), v=(3, 4))
    fused = whole(table.publish(Given(ours)), "qkv")
    assert torch.equal(fused, torch.cat(list(ours.values()), dim=1))
    assert torch.equal(whole(table.view(Given({"qkv": fused})), "k"), ours["k"])


def test_the_table_travels_as_plain_data():
    assert WeightMap.from_json(json.loads(json.dumps(LLAMA.to_json()))) == LLAMA
    with pytest.raises(LayoutError, match="this version reads the weight rules rename"):
        WeightMap.from_json([{"rule": "stack", "ours": "a", "theirs": "b"}])


def test_clashes_of_names_are_refused_both_ways():
    with pytest.raises(LayoutError, match="two tensors would be called 'x'"):
        WeightMap((Rename("a", "x"), Rename("b", "x"))).publish(Given(tensors(a=(1,), b=(1,))))
    with pytest.raises(LayoutError, match="two tensors would be called 'a'"):
        WeightMap((Rename("a", "x"),)).view(Given(tensors(a=(1,), x=(1,))))


@pytest.mark.parametrize(
    ("rule", "have", "message"),
    [
        (Fuse(("a", "b"), "c"), {"a": (2,)}, "'a' is one of 2 parts, and 'b' is missing"),
        (Fuse(("a", "b"), "c"), {"a": (2, 3), "b": (3, 3)}, "needs parts of one dtype with shapes"),
        (Split("a", ("b", "c")), {"a": (3,)}, "needs dim 0 to be a multiple of 2"),
        (Transpose("a", "a"), {"a": (3,)}, "no two dims to exchange"),
        (Permute("a", "a", outer=2, inner=2), {"a": (6,)}, "needs dim 0 to be a multiple of 4"),
    ],
)
def test_a_rule_that_does_not_fit_says_why(rule, have, message):
    with pytest.raises(LayoutError, match=message):
        WeightMap((rule,)).publish(Given(tensors(**have)))


def test_rules_are_checked_when_written():
    with pytest.raises(LayoutError, match="same number of"):
        Rename("layers.*.a", "b")
    with pytest.raises(LayoutError, match="a positive part for each"):
        Split("a", ("b", "c"), parts=(1,))


def test_a_wrong_name_or_index_is_named():
    source = WeightMap().view(Given(tensors(layers__0__up=(2,))))
    with pytest.raises(LayoutError, match=r"nearest: layers"):
        source.read("layers.0.ups", (), torch.empty(2))
    with pytest.raises(LayoutError, match="without a step"):
        source.read("layers.0.up", (slice(0, 2, 2),), torch.empty(1))
