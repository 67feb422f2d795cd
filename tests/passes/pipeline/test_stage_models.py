"""Models of images, latents and timesteps over stages, as people write them, against one process in float64."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshpar import FullyShard, MeshparError, ModelLayout, PipelineParallel, Plan, PlanError, Replicate, StagesLayout
from meshpar.checkpoints import CheckpointManager
from meshpar.losses.chunked import token_log_probs
from meshpar.passes.pipeline.running import Layers
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import on_ranks
from meshpar.training import scale_rates
from tests.support.comparison import assert_gradients, gradients, on_one_rank
from tests.support.models_for_parity import on_meta, transformer
from tests.support.tiers import daily

WIDTH, CLASSES, STEPS = 8, 5, 3


def pixels(module, channels):
    return torch.zeros(2, channels, 8, 8, dtype=next(module.parameters()).dtype)


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=2):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def perceptron(width=WIDTH):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(), perceptron()

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """As timm writes it: class token and positions are outermost; ``scales`` and ``bias`` are between blocks."""

    def __init__(self, pool="token", layers=4):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 2, 2)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 17, WIDTH))
        self.scales = nn.Parameter(torch.linspace(0.8, 1.2, layers))
        self.bias, self.unused = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(3))
        self.blocks = nn.ModuleList(Encoder() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.pool = pool

    def meshpar_layout(self):
        return ModelLayout(blocks=("blocks.*",), stages=StagesLayout(example=pixels(self, 3)))

    def features(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed + self.bias
        for number, block in enumerate(self.blocks):
            x = self.scales[number] * block(x)
        return self.norm(x)

    def forward(self, images):
        x = self.features(images)
        return self.head((x.mean(1) if self.pool == "mean" else x[:, 0]) + self.bias)


class Towered(ViT):
    """Towers for a second input, which may be absent."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def inputs(self, sides=False):
        return (torch.ones(2, 3, 8, 8), torch.ones(2, WIDTH)) if sides else (torch.ones(2, 3, 8, 8),)

    def forward(self, images, sides=None):
        scores = super().forward(images)
        return scores if sides is None else scores + self.towers[1](self.towers[0](sides)).mean()


class Classifier(nn.Module):
    """A backbone inside, whose class token is around the blocks and not the outermost module's."""

    def __init__(self):
        super().__init__()
        self.backbone, self.probe = ViT(), nn.Linear(WIDTH, CLASSES)
        del self.backbone.head

    def meshpar_layout(self):
        return ModelLayout(blocks=("backbone.blocks.*",), stages=StagesLayout(example={"images": pixels(self, 3)}))

    def forward(self, images):
        return self.probe(self.backbone.features(images)[:, 0])


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, t):
        return self.mlp(sinusoidal(t).to(self.mlp[0].weight.dtype))


def sinusoidal(t):
    angles = t[:, None] * torch.exp(-math.log(1e4) * torch.arange(WIDTH // 2, device=t.device) / (WIDTH // 2))
    return torch.cat([angles.cos(), angles.sin()], -1)


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.attn, self.mlp = Attention(), perceptron()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x, c):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.adaLN_modulation(c)[:, None].chunk(6, -1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class FinalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 2 * 2 * 4)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x, c):
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, -1)
        return self.linear(self.norm(x) * (1 + scale) + shift)


class DiT(nn.Module):
    """As its authors write it: every block, and the final layer, get the embedding of timestep and label."""

    def __init__(self, carries=("t_embedder", "y_embedder"), positions="parameter"):
        super().__init__()
        self.x_embedder = nn.Conv2d(4, WIDTH, 2, 2)
        self.t_embedder, self.y_embedder = TimestepEmbedder(), nn.Embedding(CLASSES, WIDTH)
        if positions == "parameter":
            self.pos_embed = nn.Parameter(0.1 * torch.randn(1, 16, WIDTH))
        else:  # a table that is never called
            self.table = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(4))
        self.final_layer, self.carries = FinalLayer(), carries

    def meshpar_layout(self):
        example = {"x": pixels(self, 4), "t": torch.zeros(2, dtype=torch.long)}
        example["y"] = torch.zeros(2, dtype=torch.long)
        return ModelLayout(blocks=("blocks.*",), stages=StagesLayout(carries=self.carries, example=example))

    def unpatchify(self, x):
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), side, side, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(len(x), 4, 2 * side, 2 * side)

    def forward(self, x, t, y):
        positions = self.pos_embed if hasattr(self, "pos_embed") else self.table.weight
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + positions
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class Residual(nn.Module):
    def __init__(self, into, out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, into), nn.Conv2d(into, out, 3, padding=1)
        self.time, self.norm2 = nn.Linear(WIDTH, out), nn.GroupNorm(2, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, h, emb):
        x = self.conv1(F.silu(self.norm1(h))) + self.time(emb)[:, :, None, None]
        return self.skip(h) + self.conv2(F.silu(self.norm2(x)))


class UNet(nn.Module):
    """Blocks of several resolutions, convolutions between, skips over all; ``names``: called by keyword."""

    def __init__(self, carries=("time", "conv_in", "downs.*"), names=False):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.conv_in = nn.Conv2d(3, WIDTH, 3, padding=1)
        self.downs = nn.ModuleList([Residual(WIDTH, WIDTH), Residual(WIDTH, 16)])
        self.shrinks = nn.ModuleList([nn.Conv2d(WIDTH, WIDTH, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)])
        self.ups = nn.ModuleList([Residual(32, 16), Residual(16 + WIDTH, WIDTH)])
        self.grows = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)])
        self.mid = Residual(16, 16)  # registered behind what is called later
        self.norm, self.conv_out = nn.GroupNorm(2, 2 * WIDTH), nn.Conv2d(2 * WIDTH, 3, 3, padding=1)
        self.carries, self.names = carries, names

    def meshpar_layout(self):
        example = pixels(self, 3), torch.zeros(2)
        return ModelLayout(
            blocks=("downs.*", "mid", "ups.*"), stages=StagesLayout(carries=self.carries, example=example)
        )

    def forward(self, x, t):
        emb = self.time(sinusoidal(t).to(x.dtype))
        call = (lambda block, h: block(h=h, emb=emb)) if self.names else (lambda block, h: block(h, emb))
        h = begun = self.conv_in(x)
        skips = []
        for block, shrink in zip(self.downs, self.shrinks):
            h = call(block, h)
            skips.append(h)
            h = shrink(h)
        h = call(self.mid, h)
        for block, grow in zip(self.ups, self.grows):
            h = grow(F.interpolate(h, scale_factor=2.0))
            h = call(block, torch.cat([h, skips.pop()], 1))
        return self.conv_out(F.silu(self.norm(torch.cat([h, begun], 1))))


class Flat(nn.Module):
    """A UNet of one resolution whose second half gets the first's results, and a norm in three places."""

    def __init__(self):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 3, 3, padding=1)
        self.time, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(2, WIDTH)
        self.blocks = nn.ModuleList(
            [*(Residual(WIDTH, WIDTH) for _ in range(3)), *(Residual(16, WIDTH) for _ in range(2))]
        )

    def meshpar_layout(self):
        return ModelLayout(
            blocks=("blocks.*",),
            stages=StagesLayout(carries=("time", "blocks.*"), example=[pixels(self, 3), torch.zeros(2)]),
        )

    def forward(self, x, t):
        h, emb, skips = self.norm(self.conv_in(x)), self.time(sinusoidal(t).to(x.dtype)), []
        for number, block in enumerate(self.blocks):
            if number > 2:
                h = torch.cat([self.norm(h), skips.pop()], 1)
            h = block(h, emb)
            skips += [h] * (number < 2)
        return self.conv_out(self.norm(h))


class Tied(nn.Module):
    """Uses the weight of its embedding for its scores, and that of its head's for its embedding, without a call."""

    def __init__(self, of="embed"):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH) if of == "embed" else None
        self.blocks = nn.ModuleList(Encoder() for _ in range(4))
        self.head = None if of == "embed" else nn.Linear(WIDTH, CLASSES)

    def meshpar_layout(self):
        return ModelLayout(blocks=("blocks.*",))

    def forward(self, ids):
        x = F.embedding(ids, self.head.weight) if self.embed is None else self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight) if self.head is None else self.head(x)


def published():
    import transformers

    sizes = dict(hidden_size=WIDTH, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16)
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=2, num_labels=CLASSES)
    return transformers.ViTForImageClassification(config)


MODELS = {
    "transformers' ViT": published,
    "ViT": ViT,
    "ViT, mean": lambda: ViT("mean"),
    "classifier": Classifier,
    "DiT": DiT,
    "DiT, a table": lambda: DiT(("t_embedder.mlp.2", "y_*"), "table"),
    "UNet": UNet,
    "UNet, by name": lambda: UNet(names=True),
    "flat": Flat,
    "tied, embedding": Tied,
    "tied, head": lambda: Tied("head"),
}


def made(name):
    torch.manual_seed(0)
    return MODELS[name]().double()


def inputs(name, step, rank, number=2):
    """Return a micro-batch's arguments of the model."""
    draw = torch.Generator().manual_seed(100 * step + 10 * rank + number)
    if "tied" in name:
        return (torch.randint(CLASSES, (2, 6), generator=draw),)
    channels = 4 if "DiT" in name else 3
    given = [torch.randn(2, channels, 8, 8, generator=draw, dtype=torch.float64)]
    if "ViT" not in name and name != "classifier":
        given.append(torch.randint(100, (2,), generator=draw))
    if "DiT" in name:
        given.append(torch.randint(CLASSES, (2,), generator=draw))
    return tuple(given)


def micro_batches(name, step, rank=0):
    return [inputs(name, step, rank, number) for number in range(4)]


def mean_loss(module, batch):
    scores = module(*batch)
    return getattr(scores, "logits", scores).square().mean() / 4


def in_one_process(name, ranks):
    net = made(name)
    optimizer, losses, grads = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3), [], {}
    for step in range(STEPS):
        losses.append(0.0)
        for rank in range(ranks):
            for batch in micro_batches(name, step, rank):
                loss = mean_loss(net, batch) / ranks
                loss.backward()
                losses[-1] += float(loss.detach())
        grads = grads or gradients(net)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return losses, grads, net.state_dict()


def assert_as_one_process(name, mesh, passes, ranks=1):
    par = Plan(mesh, passes).apply(made(name))
    optimizer, losses, grads = torch.optim.AdamW(par.module.parameters(), lr=1e-2, eps=1e-3), [], {}
    for step in range(STEPS):
        total = par.backward(micro_batches(name, step, par.data_rank), mean_loss)
        losses.append(float(par.data_sum(total.clone())) / ranks)
        if not step:
            grads = gradients(par.module)
            with pytest.raises(MeshparError, match="would get another number"):
                torch.nn.utils.get_total_norm([one for one in par.module.parameters() if one.grad is not None])
        par.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
    one = on_one_rank(lambda: in_one_process(name, ranks))
    torch.testing.assert_close(losses, one[0], rtol=1e-6, atol=1e-6)  # totals are float32
    torch.testing.assert_close(grads, {key: one[1][key] for key in grads}, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(dict(par.state_dict(full=True, everywhere=True)), dict(one[2]), rtol=1e-9, atol=1e-9)
    return par


@on_ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_train_as_one_process(name):
    assert_as_one_process(name, "pp=2", [PipelineParallel()])


@on_ranks(4)
@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_two_stages_of_two_shards_train_as_one_process(name):
    assert_as_one_process(name, "pp=2,dp_shard=2", [PipelineParallel(), FullyShard()], 2)


OTHERS = {
    "four stages": ("pp=4", lambda: [PipelineParallel()], 1),
    "interleaved": ("pp=2,dp_shard=2", lambda: [PipelineParallel(virtual=2), FullyShard()], 2),
    "replicas": ("pp=2,dp_replicate=2", lambda: [PipelineParallel(), Replicate()], 2),
}


@on_ranks(4)
@pytest.mark.parametrize(
    ("name", "mesh"),
    daily([(name, mesh) for name in ("ViT", "DiT", "UNet", "flat") for mesh in OTHERS], ("UNet", "interleaved")),
)
def test_other_stages_train_as_one_process(name, mesh):
    axes, passes, ranks = OTHERS[mesh]
    assert_as_one_process(name, axes, passes(), ranks)


@on_ranks(2)
def test_parameters_of_the_outermost_module_are_saved_once_and_counted_once(tmp_path):
    par = Plan("pp=2", [PipelineParallel()]).apply(made("ViT"))
    held = dict(par.module.named_parameters())
    assert {"cls_token", "pos_embed", "scales", "bias", "unused"} <= held.keys()
    assert {*par.run.find(Layers).ties.shared} == {"cls_token", "pos_embed", "scales", "bias"}
    optimizer = torch.optim.AdamW(held.values(), lr=1e-2)
    scale_rates(optimizer, par, layer_decay=0.5)
    rates = {id(one): group["lr"] for group in optimizer.param_groups for one in group["params"]}
    assert rates[id(held["cls_token"])] == 1e-2 * 0.5**5
    par.backward(micro_batches("ViT", 0), mean_loss)
    optimizer.step()
    expected = dict(par.state_dict(full=True, everywhere=True))
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, par, optimizer)
        for mesh, passes in (("pp=2", [PipelineParallel(stages=(1, 3))]), ("dp_shard=2", [FullyShard()])):
            other = Plan(mesh, passes).apply(ViT().double())
            fresh = torch.optim.AdamW(other.module.parameters(), lr=1e-2)
            scale_rates(fresh, other, layer_decay=0.5)
            checkpoints.restore(other, fresh)
            found = other.state_dict(full=True, everywhere=True)
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


@on_ranks(2)
def test_seeds_give_the_weights_of_one_process():
    def built(build, mesh, passes, init):
        model = on_meta(build)
        layout = replace(model.meshpar_layout(), init=init) if init else None
        return dict(Plan(mesh, passes).apply(model, layout).materialize(seed=3).module.named_parameters())

    def init(module):
        for one in module.parameters(recurse=False):
            nn.init.normal_(one)

    for build, own in ((ViT, init), (lambda: transformer(layers=3), None)):
        expected = {name: whole_tensor(one) for name, one in built(build, "dp_shard=2", [FullyShard()], own).items()}
        found = built(build, "pp=2", [PipelineParallel()], own)
        assert all(torch.equal(one, expected[name]) for name, one in found.items())


@on_ranks(2)
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("name", ["UNet", "DiT"])
def test_loops_that_fill_modules_touch_the_parameters_of_their_stage_alone(name, virtual):
    par = Plan("pp=2", [PipelineParallel(virtual=virtual)]).apply(made(name))
    before, filled = dict(par.module.named_parameters()), 0
    for module in par.module.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.constant_(module.weight, 0.5)
            module.weight.data.mul_(2)
            if module.bias is not None:
                module.bias.data.fill_(1)
            filled += 1
    held = dict(par.module.named_parameters())
    assert filled and held.keys() == before.keys() and all(held[key] is one for key, one in before.items())
    of = [f"{key}.weight" for key, module in par.module.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert all(torch.equal(one, torch.ones_like(one)) for key, one in before.items() if key in of)
    par.backward(micro_batches(name, 0), mean_loss)


@on_ranks(2)
def test_log_probabilities_are_those_of_one_process_with_gradients_in_a_step_and_without_in_a_call():
    def built():
        torch.manual_seed(0)
        return transformer(layers=4, tied=True)

    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(1, 17).view(2, 8)}
    for virtual in (1, 2):
        par, one = Plan("pp=2", [PipelineParallel(virtual=virtual)]).apply(built()), built()
        expected = token_log_probs(one, batch, temperature=0.7)
        with torch.no_grad():
            found = par.token_log_probs(batch, temperature=0.7)
        torch.testing.assert_close(tuple(found), tuple(value.detach() for value in expected), rtol=1e-5, atol=1e-6)
        with pytest.raises(MeshparError, match=r"run a step by par\.backward"):
            par.token_log_probs(batch)

        def loss(module, given, par=par):
            return sum(value.sum() for value in par.token_log_probs(given, temperature=0.7))

        torch.testing.assert_close(par.backward([batch], loss), sum(value.sum() for value in expected).detach())
        sum(value.sum() for value in expected).backward()
        assert_gradients(par.module, one, rtol=1e-4, atol=1e-5)


def refusals(model, mesh="pp=2", ranks=2, layout=None, **options):
    try:
        Plan(mesh, [PipelineParallel(**options)]).check(model, layout, world_size=ranks)
    except PlanError as error:
        return "\n".join(error.problems)
    return ""


class Written(DiT):
    """Adds to what an embedding returned, in place."""

    def forward(self, x, t, y):
        positions, c = self.pos_embed, self.t_embedder(t)
        c += self.y_embedder(y)
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + positions
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class Twice(DiT):
    """Embeds two timesteps by one module."""

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t) + self.t_embedder(t + 1)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


class Reads(ViT):
    def forward(self, images):
        return super().forward(images if images.sum() > 1 else -images)


class Numbering(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids), ids + 1


class Numbered(Tied):
    """Embeds twice, by numbers that its first embedding returns."""

    def __init__(self):
        super().__init__()
        self.embed, self.other = Numbering(CLASSES, WIDTH), nn.Embedding(CLASSES + 1, WIDTH)

    def forward(self, ids):
        x, numbers = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x + self.other(numbers), self.embed.weight)


class Keeping(Residual):
    def forward(self, h, emb):
        self.kept = self.conv1(h)
        return super().forward(h, emb)


class Keeps(Flat):
    """Reads what its first block keeps in an attribute."""

    def __init__(self):
        super().__init__()
        self.blocks[0] = Keeping(WIDTH, WIDTH)

    def forward(self, x, t):
        return super().forward(x, t) + self.blocks[0].kept[:, :3]


def test_what_is_refused_says_what_would_help():
    said = refusals(DiT(carries=()))
    assert "its output uses results of t_embedder.mlp.2, y_embedder beside what" in said
    assert "write ModelLayout(stages=StagesLayout(carries=('t_embedder.mlp.2', 'y_embedder')))" in said
    assert not refusals(DiT(carries=("t_embedder.mlp.2", "y_embedder")))
    said = refusals(UNet(carries=("time",)))
    assert "write ModelLayout(stages=StagesLayout(carries=('time', 'conv_in', 'downs.*')))" in said
