"""ContextParallel: a part of every sequence on each rank, with the numbers of one process."""

import copy
import dataclasses
import functools
from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshpar import (
    ActivationCheckpoint,
    Compile,
    ContextParallel,
    Float8,
    FullyShard,
    HybridShard,
    MeshparError,
    ModelLayout,
    Plan,
    PlanError,
    Replicate,
    TensorParallel,
    attention,
    attention_mask,
    chunked_token_loss,
    token_loss,
)
from meshpar.models.huggingface import layout_for
from meshpar.passes.positions.attention import block_mask, causal_mask
from meshpar.passes.positions.parallel import runs
from meshpar.testing import assert_parity, on_ranks, token_steps
from tests.support.models_for_parity import VOCAB, gpt2, huggingface, huggingface_gpt2, on_meta, transformer
from tests.support.tiers import daily


def with_documents(steps, length=16):
    """Give every batch documents of uneven lengths."""
    for number, batch in enumerate(batch for micros in steps for micro in micros for batch in micro):
        first = 1 + (5 * number + 3) % (length - 2)
        batch["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
    return steps


MESHES = {
    2: [("dp_shard=1,cp=2", [FullyShard()])],
    4: [
        ("dp_replicate=1,cp=4", [Replicate()]),
        ("dp_shard=2,cp=2", [ActivationCheckpoint(), FullyShard()]),
        ("dp_shard=1,cp=2,tp=2", [TensorParallel(sequence_parallel=True, loss_parallel=True), FullyShard()]),
    ],
    8: [
        ("dp_replicate=2,dp_shard=2,cp=2", [HybridShard()]),
        ("dp_shard=2,cp=2,tp=2", [TensorParallel(), FullyShard()]),
    ],
}
MODELS = {
    "transformer": transformer,
    "gpt2": gpt2,
    "hf-gpt2": huggingface_gpt2,
    "llama": lambda: huggingface("Llama"),
    "gemma2": lambda: huggingface("Gemma2", sliding_window=4, query_pre_attn_scalar=8, attn_implementation="eager"),
}


CASES = [
    (ranks, place, transport) for ranks in (2, 4) for place in range(ranks - 1) for transport in ("gather", "heads")
]


@pytest.mark.parametrize(("ranks", "place", "transport"), daily(CASES, (2, 0, "gather"), (4, 2, "heads")))
def test_a_part_of_the_sequence_on_each_rank_equals_one_process(ranks, place, transport):
    on_ranks(ranks)(in_parts)("transformer", transport, place)


OTHERS = [(model, transport) for model in ("gpt2", "hf-gpt2", "llama", "gemma2") for transport in ("gather", "heads")]


@pytest.mark.parametrize(("model", "transport"), daily(OTHERS, ("gemma2", "gather")))
def test_a_part_of_the_sequence_is_exact_for_models_by_others(model, transport):
    on_ranks(2)(in_parts)(model, transport)


@pytest.mark.nightly
@pytest.mark.parametrize("place", range(3))
def test_a_part_of_the_sequence_is_exact_without_guards(place):
    on_ranks(4)(in_parts)("transformer", "gather", place, guards="off")


def in_parts(model, transport, place=None, guards="always"):
    ranks = torch.distributed.get_world_size()
    meshes, parts = MESHES[ranks], max(2, ranks // 2)
    for mesh, passes in meshes if place is None else [meshes[place]]:
        steps = [
            *token_steps(VOCAB, parts=parts, micro_batches=2, steps=1),
            *with_documents(token_steps(VOCAB, parts=parts, micro_batches=2, steps=2)),
        ]
        assert_parity(MODELS[model], mesh, [ContextParallel(transport=transport), *passes], steps, guards=guards)


@contextmanager
def in_blocks_of(positions, **others):
    """Make and read masks in pieces of so many positions."""
    with (
        mock.patch("meshpar.passes.positions.parallel.BLOCK", positions),
        mock.patch.multiple("meshpar.passes.positions.attention", BLOCK=positions, **others),
    ):
        yield


@pytest.mark.parametrize("transport", daily(["gather", "heads"], "heads"))
@on_ranks(2)
def test_a_mask_in_pieces_is_the_whole_mask(transport):
    with in_blocks_of(3):
        in_parts("transformer", transport)
        steps = with_documents(token_steps(VOCAB, parts=2))
        assert_parity(Strange, "dp_shard=1,cp=2", [ContextParallel(transport=transport), FullyShard()], steps)


def test_one_process_attends_in_pieces_as_it_does_at_once():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 4, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    positions = torch.cat([torch.arange(5), torch.arange(11)])[None]

    def run():
        mask = attention_mask(Bare(), positions, window=7, dtype=q.dtype)
        out = attention(Bare(), q, k, v, mask)
        return mask, out, torch.autograd.grad(out.square().sum(), (q, k, v))

    whole = run()
    with in_blocks_of(3):
        pieces = run()
        with pytest.raises(MeshparError, match="over 8 positions got the mask of 16"):
            attention(Bare(), q[:, :, :8], k[:, :, :8], v[:, :, :8], pieces[0])
    assert isinstance(whole[0], torch.Tensor) and not isinstance(pieces[0], torch.Tensor)
    torch.testing.assert_close(pieces[1:], whole[1:])


@pytest.mark.parametrize("transport", daily(["gather", "heads"], "gather"))
@on_ranks(2)
def test_flex_attention_reads_the_mask_that_attention_reads_in_pieces(transport):
    from torch.nn.attention import flex_attention

    steps = with_documents(token_steps(VOCAB, parts=2))
    called = mock.Mock(side_effect=lambda: flex_attention.flex_attention)
    with (
        in_blocks_of(3, _FLEX=("cpu",), _LEAST_CHANNELS=1, _compiled_flex=called),
        # On a CPU torch refuses gradients, though what it checks its kernels against has them, and runs without the
        # compiler.
        mock.patch.multiple(
            flex_attention, _validate_device=lambda *_: None, _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True
        ),
    ):
        assert_parity(Strange, "dp_shard=1,cp=2", [ContextParallel(transport=transport), FullyShard()], steps)
        assert called.call_count >= 12, "two layers, three steps, on ranks and in one process"


def test_blocks_of_the_mask_hold_what_the_mask_holds():
    chance = torch.Generator().manual_seed(0)
    for length, window in ((512, None), (700, None), (700, 90), (1024, 300)):
        begins = torch.rand(2, length, generator=chance) < 4 / length
        numbers = begins.long().cumsum(1)
        for rank in range(2):
            rows = torch.cat([torch.arange(run.start, run.stop) for run in runs(length, 2, rank, balance=True)])
            blocks = block_mask(numbers, rows, window)
            sees = causal_mask(numbers, None, window=window)[:, :, rows]
            padded = torch.nn.functional.pad(sees, (0, -length % 128, 0, -len(rows) % 128))
            tiles = padded.unflatten(-1, (-1, 128)).unflatten(2, (-1, 128))
            indices = ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
            kept, whole = (
                type(blocks).from_kv_blocks(*pair, seq_lengths=(len(rows), length)).to_dense().bool()
                for pair in indices
            )
            some, every = tiles.any(5).any(3), tiles.all(5).all(3)
            assert (kept | whole)[some].all(), "a block with something to see is skipped"
            assert every[whole].all(), "a block that is seen in part is seen whole"
            assert not (kept & whole).any()
            if length % 512 == 0:
                assert (kept | whole).equal(some) and whole.equal(every), "more blocks than the mask needs"


def test_the_blocks_of_32768_tokens_are_made_without_their_matrix():
    positions = torch.cat([torch.arange(length) for length in (9000, 13000, 10768)])[None]
    largest = Largest()
    with mock.patch("meshpar.passes.positions.attention._FLEX", ("cpu",)), largest:
        mask = attention_mask(Bare(), positions)
    assert mask.blocks.shape == (1, 1, 32768, 32768) and largest.bytes < 1 << 20, "32,768 x 32,768 bytes are a GiB"


@pytest.mark.long
def test_the_compiled_kernel_attends_by_these_blocks():
    drawn = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 1500, 16, generator=drawn) for heads in (4, 2, 2))
    with mock.patch("meshpar.passes.positions.attention._FLEX", ("cpu",)), torch.no_grad():
        mask = attention_mask(Bare(), torch.cat([torch.arange(500), torch.arange(1000)])[None], window=300)
        found, want = (
            attention(Bare(), q, k, v, one_mask) for one_mask in (mask, dataclasses.replace(mask, blocks=None))
        )
    assert mask.blocks.sparsity() > 60
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operator made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            self.bytes = max(self.bytes, leaf.numel() * leaf.element_size() if isinstance(leaf, torch.Tensor) else 0)
        return made


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 700])
def test_flex_attention_on_a_gpu_gives_the_gradients_of_a_mask(window):
    torch.manual_seed(0)
    with torch.device("cuda"):
        q, k, v = (torch.randn(1, heads, 3000, 32, requires_grad=True) for heads in (4, 2, 2))
        positions = torch.cat([torch.arange(1100), torch.arange(1900)])[None]
    mask = attention_mask(Bare(), positions, window=window)
    assert mask.blocks is not None
    found, want = (
        (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
        for out in (attention(Bare(), q, k, v, one_mask) for one_mask in (mask, dataclasses.replace(mask, blocks=None)))
    )
    for have, wanted in zip(found, want, strict=True):
        torch.testing.assert_close(have, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    torch.cuda.reset_peak_memory_stats()
    long = torch.randn(1, 1, 32768, 32, device="cuda", requires_grad=True)
    attention(
        Bare(), long, long, long, attention_mask(Bare(), torch.arange(32768, device="cuda")[None])
    ).sum().backward()
    assert torch.cuda.max_memory_allocated() < 1 << 29, "a mask of 32,768 x 32,768 takes a GiB"


@on_ranks(2)
def test_a_mask_that_lets_a_query_see_later_keys_is_not_cut():
    from transformers.models.llama import modeling_llama

    def together(batch, head, query, key):
        return (query < 12) & (key < 12)

    mask = functools.partial(modeling_llama.create_causal_mask, or_mask_function=together)
    with mock.patch.object(modeling_llama, "create_causal_mask", mask):
        steps = [*token_steps(VOCAB, parts=2, steps=1), *with_documents(token_steps(VOCAB, parts=2, steps=1))]
        assert_parity(MODELS["llama"], "dp_shard=1,cp=2", [ContextParallel(balance=False), FullyShard()], steps)


@on_ranks(2)
def test_the_first_step_may_compute_its_loss_in_chunks():
    par = Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]).apply(transformer())
    part = par.split({"input_ids": torch.arange(16)[None], "labels": torch.arange(1, 17)[None]})
    labels = part.pop("labels")
    first = chunked_token_loss(par.module, part, labels, chunk=3, reduction="sum")
    torch.testing.assert_close(first, token_loss(par.module(**part).logits, labels, reduction="sum"))


class Convolved(nn.Module):
    """A block whose feed-forward part looks at its neighbours, which no name tells."""

    def __init__(self, dim, reach):
        super().__init__()
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.near = nn.Conv1d(dim, dim, reach, padding=reach - 1)

    def forward(self, x, mask):
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        x = x + self.out(attention(self, q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.near(x.transpose(1, 2)).transpose(1, 2)[:, : x.shape[1]]


class Strange(nn.Module):
    def __init__(self, reaches=(1, 1), shifted=False, dim=32):
        super().__init__()
        self.embed, self.head, self.shifted = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB), shifted
        self.layers = nn.ModuleList(Convolved(dim, reach) for reach in reaches)
        self.kept = []

    def forward(self, input_ids, position_ids=None):
        mask, x = attention_mask(self, position_ids, window=5), self.embed(input_ids)
        self.kept.append(x)
        x = x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] if self.shifted else x
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(logits=self.head(x))

    def meshpar_layout(self):
        return ModelLayout(blocks=("layers.*",), attention=("layers.*",))


class Counted(Strange):
    """Counts from 2 where nobody says, as some encoders do."""

    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(32, 32)

    def forward(self, input_ids, position_ids=None):
        places = torch.arange(2, 2 + input_ids.shape[1])[None] if position_ids is None else position_ids
        mask = attention_mask(self, position_ids)
        x = self.embed(input_ids) + self.places(places)
        for layer in self.layers:
            x = layer(x, mask)
        return SimpleNamespace(logits=self.head(x))


@on_ranks(2)
def test_a_strangers_model_that_calls_attention_is_exact_and_what_else_mixes_positions_is_named():
    plan = [ContextParallel(), FullyShard()]
    assert_parity(Strange, "dp_shard=1,cp=2", plan, with_documents(token_steps(VOCAB, parts=2)))
    par = Plan("dp_shard=1,cp=2", plan).apply(Strange())
    par.module(**par.split({"input_ids": torch.arange(16)[None]}))
    assert [tensor.shape[1] for tensor in par.module.kept] == [8], "the test of positions leaves no trace"
    for model, balance, message in (
        (Strange(reaches=(3, 3)), True, r"layers.0.near \(Conv1d\) mixes positions"),
        (Strange(reaches=(1, 3)), True, r"layers.1.near \(Conv1d\) mixes positions"),
        (Strange(shifted=True), True, "Strange mixes positions, or counts them itself"),
        # rank 0 alone would see nothing
        (Strange(shifted=True), False, "Strange mixes positions, or counts them itself"),
    ):
        par = Plan("dp_shard=1,cp=2", [ContextParallel(balance=balance), FullyShard()]).apply(model)
        with pytest.raises(MeshparError, match=message), torch.no_grad():
            par.module(**par.split({"input_ids": torch.arange(16)[None]}))


def test_a_packed_row_is_its_documents_one_by_one():
    torch.manual_seed(0)
    for name, model in MODELS.items():
        module = model().double() if name == "gpt2" else model()
        ids = torch.randint(0, VOCAB, (1, 14))
        lengths = [5, 1, 8]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        packed = module(input_ids=ids, position_ids=positions).logits
        alone = torch.cat([module(input_ids=part).logits for part in ids.split(lengths, 1)], 1)
        torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)
        other = ids.clone()
        other[:, :5] = torch.randint(0, VOCAB, (1, 5))
        assert module(input_ids=other, position_ids=positions).logits[:, 5:].equal(packed[:, 5:]), (
            f"{name}: documents see each other"
        )


class Sums(nn.Module):
    """A recurrence: what each position adds to a running sum, (B, L, D)."""

    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return self.down(self.up(x).tanh().cumsum(1))


class Mixed(Strange):
    """With modules that mix positions, which are regions of tensor parallelism, too."""

    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(Sums(32) for _ in range(2)), nn.LayerNorm(32)

    def forward(self, input_ids, position_ids=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return SimpleNamespace(logits=self.head(self.norm(x)))

    def meshpar_layout(self):
        tensor = {"layers.*": "region", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
        return ModelLayout(
            blocks=("layers.*",), tensor={"embed": "vocab", **tensor, "norm": "sequence", "head": "head"}
        )


OWN = {
    "gptj": ("GPTJ", {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **dict(
                hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, head_dim=8,
            ),
            **dict(
                layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2
            ),
            **dict(linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0, mlp_only_layers=[0, 1]),
        },
    ),
}  # fmt: skip
"""Models of transformers that attend past its interface, or mix positions beside attention."""


def own(name):
    import transformers

    kind, sizes = OWN[name]
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} if name == "gptj" else {}
    config = getattr(transformers, f"{kind}Config")(vocab_size=VOCAB, use_cache=False, **sizes, **dropout)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


MIXING = [(name, transport) for name in OWN for transport in ("gather", "heads")]


@pytest.mark.parametrize(("name", "transport"), daily(MIXING, ("qwen3_next", "heads")))
@on_ranks(2)
def test_what_mixes_positions_in_its_own_way_is_computed_whole(name, transport):
    steps = token_steps(VOCAB, parts=2, micro_batches=2)
    passes = [ContextParallel(transport=transport), ActivationCheckpoint(), FullyShard()]
    assert_parity(functools.partial(own, name), "dp_shard=1,cp=2", passes, steps)


@pytest.mark.parametrize("compiled", daily([False, True], False))
def test_mixers_are_named_by_the_plan_or_refused(compiled):
    named_mixers(compiled)
    import transformers

    pictures = on_meta(lambda: transformers.AutoModelForCausalLM.from_config(transformers.Gemma3Config()))
    assert layout_for(pictures).attention.mixers == (), "its tower for images sees no positions of the text"
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, use_cache=False)
    )
    with pytest.raises(
        PlanError, match=r"'backbone.layers.*.mixr', which mixes positions, matches no module.*backbone.layers.*mixer"
    ):
        Plan("dp_shard=1,cp=2", [ContextParallel(mixers=("backbone.layers.*.mixr",)), FullyShard()]).check(
            mamba, world_size=2
        )


@on_ranks(4)
def named_mixers(compiled):
    context = ContextParallel(mixers=("layers.*",))
    steps = token_steps(VOCAB, parts=2)
    more = [ActivationCheckpoint(), Compile(backend="aot_eager")] if compiled else []
    passes = [context, TensorParallel(sequence_parallel=False), *more, FullyShard()]
    assert_parity(Mixed, "dp_shard=1,cp=2,tp=2", passes, steps)
    par = Plan("dp_shard=1,cp=2,tp=2", [context, TensorParallel(sequence_parallel=True), FullyShard()]).apply(Mixed())
    with pytest.raises(
        MeshparError, match=r"Sums computes whole sequences of 16 .* use TensorParallel\(sequence_parallel=False\)"
    ):
        par.module(**par.split({"input_ids": torch.arange(16)[None]}))
    torch.manual_seed(0)
    alone = Mixed()
    par = Plan("dp_shard=2,tp=2", [TensorParallel(sequence_parallel=True), FullyShard()]).apply(copy.deepcopy(alone))
    ids = torch.arange(16)[None]
    torch.testing.assert_close(par.module(ids).logits, alone(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(PlanError, match=r"transport='ring'.*must be 'gather' or 'heads'"):
        Plan("dp_shard=1,cp=2", [ContextParallel(transport="ring"), FullyShard()]).check(transformer(), world_size=2)
    refused()


FIRST_STEPS = [
    [ActivationCheckpoint(mode="selective")],
    pytest.param([Compile(backend="aot_eager")], marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("passes", FIRST_STEPS, ids=str)
@on_ranks(2)
def test_the_test_of_positions_leaves_no_trace_in_the_first_step(passes):
    assert_parity(
        transformer,
        "dp_shard=1,cp=2",
        [ContextParallel(), *passes, FullyShard()],
        with_documents(token_steps(VOCAB, parts=1, steps=2)),
    )


@on_ranks(2)
def test_what_computes_in_few_bits_is_no_mixing():
    for passes in ([Float8(emulate=True), FullyShard()], [FullyShard(param_dtype=torch.bfloat16)]):
        par = Plan("dp_shard=1,cp=2", [ContextParallel(), *passes]).apply(transformer(dim=64, hidden=64))
        par.module(**par.split({"input_ids": torch.arange(16)[None]})).logits.sum().backward()


@on_ranks(2)
def test_models_of_one_config_do_not_exchange_for_each_other():
    one = huggingface("Llama")
    other = type(one)(one.config)
    plans = [Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]).apply(network) for network in (one, other)]
    assert one.config is not other.config
    ids, documents = torch.arange(16)[None], torch.cat([torch.arange(5), torch.arange(11)])[None]
    for par, positions in (
        (plans[0], torch.arange(16)[None]),
        (plans[1], documents),
        (plans[0], torch.arange(16)[None]),
    ):
        alone = type(one)(huggingface("Llama").config)
        alone.load_state_dict({name: tensor.full_tensor() for name, tensor in par.module.state_dict().items()})
        want = alone(input_ids=ids, position_ids=positions).logits
        have = par.module(**par.split({"input_ids": ids, "position_ids": positions})).logits
        torch.testing.assert_close(have, par.split(want), atol=1e-5, rtol=1e-5)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])


@on_ranks(2)
def refused():
    ids, rank = torch.arange(8)[None], torch.distributed.get_rank()
    for model, names in (
        (transformer, ("input_ids", "labels", "position_ids")),
        (MODELS["llama"], ("input_ids", "none", "position_ids", "none", "none", "labels")),
    ):
        par = Plan("dp_shard=1,cp=2", [ContextParallel(), FullyShard()]).apply(model())
        with pytest.raises(MeshparError, match=r"got no position_ids, and each rank has a part .* par.split\(batch\)"):
            par.module(input_ids=ids + rank)
        with pytest.raises(MeshparError, match=r"every rank got the same positions.*par.split\(batch\)"):
            par.module(input_ids=ids, position_ids=ids)
        part = par.split({"input_ids": ids, "labels": ids})
        with pytest.raises(MeshparError, match="the module got labels"):  # by place; by name: the table of remedies
            par.module(*(part.get(name) for name in names))
        par.module(**par.split({"input_ids": ids}))
        with pytest.raises(MeshparError, match=r"got 8 positions, and par.split gave parts of \[4\]"):
            par.module(input_ids=ids, position_ids=ids)
    with pytest.raises(MeshparError, match="generate makes one position after another"):
        par.module.generate(ids)
