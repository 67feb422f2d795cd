"""Models for rows of `exact`: those whose errors are explained, and those of which ranks have positions."""

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrize

from meshpar import ContextParallel, FullyShard, ModelLayout, Plan, TensorParallel, token_loss
from meshpar.guards.explain import Explanation
from meshpar.step.inner_calls import Calls
from tests.passes.positions.test_parallel import Strange, Sums
from tests.remedies.exact_loops import IDS, Methods, habit, of, trained
from tests.support.loop_sides import DIM, FEATURES, LAYOUT, Block, Net, batch, sgd
from tests.support.models_for_parity import transformer
from tests.support.plans import TwoLayers

# Errors that are explained


class Heads(Block):
    """Four heads of four features, counted in several ways."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        if how in ("split", "chunk"):
            self.down = nn.Linear(DIM, DIM)

    def forward(self, x):
        h = self.up(self.norm(x))
        if self.how == "view":
            h = h.view(len(h), 4, 4).softmax(-1).flatten(1)
        elif self.how == "unflatten":
            h = h.unflatten(-1, (-1, 4)).softmax(-1).flatten(1)
        else:
            one, other = h.split(DIM, dim=-1) if self.how == "split" else h.chunk(2, dim=-1)
            h = one * other
        return x + self.down(h)


PACKED = ModelLayout(blocks=("blocks.*",), tensor={"blocks.*.up": "packed_colwise:2", "blocks.*.down": "rowwise"})


def heads(how):
    return trained(of(functools.partial(Heads, how)), PACKED if how in ("split", "chunk") else LAYOUT)


class Padded(nn.Module):
    """Multiplies hidden states by a mask of padding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)

    def forward(self, ids, attention_mask=None):
        x = self.norm(self.embed(ids))
        return self.head(x if attention_mask is None else x * attention_mask[..., None])


def padded(masked, *passes):
    """The logits of a batch with or without a mask; of one process without passes."""
    net = Padded()
    if passes:
        layout = ModelLayout(tensor={"embed": "vocab", "norm": "sequence", "head": "head"})
        net = Plan("tp=2", passes, verify=False).apply(net, layout).module
    return net(IDS[:, :8], torch.ones(1, 8) if masked else None)


FOUR_LAYERS = {"0": "colwise", "1": "rowwise", "2": "colwise", "3": "rowwise"}


def proved(module, batch, styles, **options):
    """Compare a split with the model itself, without processes."""
    layout = ModelLayout(tensor={name: style for name, style in styles.items() if style})
    Plan("tp=2", [TensorParallel(**options)]).prove(module, batch, layout)
    return ()


def layers(**styles):
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    return proved(module, torch.ones(1, 4, 8), FOUR_LAYERS | {name[1:]: style for name, style in styles.items()})


class Tied(Net):
    """Uses a weight by itself, or calls its module."""

    def __init__(self, *, calls):
        super().__init__()
        self.calls = calls

    def forward(self, x):
        x = self.encode(x)
        return self.head(x) if self.calls else F.linear(x, self.head.weight, self.head.bias)


WITH_HEAD = ModelLayout(blocks=LAYOUT.blocks, tensor={**LAYOUT.tensor.styles, "head": "colwise_gather"})


def tied(*, calls):
    return trained(functools.partial(Tied, calls=calls), WITH_HEAD)


class Linears(Net):
    """Blocks of one layer each, whose weight the model uses by itself or calls."""

    def __init__(self, *, calls):
        super().__init__()
        self.calls = calls

    def make_block(self):
        return nn.Linear(DIM, DIM)

    def encode(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.calls else F.linear(x, block.weight, block.bias)
        return x


WHOLE_BLOCKS = ModelLayout(blocks=("blocks.*",))


def linears(*, calls):
    return trained(functools.partial(Linears, calls=calls), WHOLE_BLOCKS)


@habit
def logits_of(side, how):
    """The logits of hidden states, by a method that uses a weight; or of a batch, by the module."""
    net = side.apply(side.net(Methods))
    if how == "registered" and not side.alone:
        side.par.register_method("logits")
    for x, y in side.batches(2):
        loss = mse_loss(net(x) if how == "module" else net.logits(F.pad(x, (0, DIM - FEATURES))), y)
        loss.backward()
        side.loss(loss)
        net.zero_grad()


def narrow(*, cast=False, fp32=(), **options):
    """Whether the output of layers under mixed precision is that of one process, which casts after each layer."""
    torch.manual_seed(0)
    net, x = TwoLayers(), torch.sin(torch.arange(16.0)).view(2, 8)
    plan = Plan("dp_shard=2", [FullyShard(param_dtype=torch.bfloat16, **options)])
    module = plan.apply(copy.deepcopy(net), ModelLayout(fp32=fp32)).module
    found, dtype = module(x.bfloat16() if cast else x), torch.float32 if fp32 else torch.bfloat16
    for layer in (*net.layers, net.head):
        x = layer.to(dtype)(x.to(dtype)).bfloat16()
    return torch.equal(found, x)


class Changing(Block):
    """Changes its input in place, or not."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        return super().forward(self.change(x))


def changing(change):
    return trained(of(functools.partial(Changing, change)))


class Unit(nn.Module):
    def forward(self, weight):
        return F.normalize(weight, dim=1)


class Normalized(Net):
    """Assigns a weight, or what a loss reads, in its forward."""

    def __init__(self, how):
        super().__init__()
        self.how, self.kept = how, {}
        if how == "parametrized":
            parametrize.register_parametrization(self.head, "weight", Unit())

    def forward(self, x):
        if self.how == "assigned":
            self.head.weight = F.normalize(self.head.weight, dim=1)
        self.kept["penalty"] = self.head.weight.square().mean()
        return super().forward(x)


@habit
def normalized(side, how):
    net = side.apply(side.net(lambda: Normalized(how)))
    for x, y in side.steps(net, sgd(net)):
        loss = mse_loss(net(x), y)
        (loss + 0.1 * net.kept["penalty"] if how == "kept" else loss).backward()


def explained(error):
    """Meet an error in a module under a plan."""

    def fails():
        raise error

    explanation = Explanation(Net(), "dp_shard=2", features=None, unit_pass="FullyShard")
    return Calls(Net(), explanation.explained).explained(fails, (), {})


class Grouped(nn.Module):
    """Attention of six heads of queries and two of keys."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.out = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 12)

    def forward(self, x):
        q, k = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q(x), self.k(x)))
        return self.out(F.scaled_dot_product_attention(q, k, k, enable_gqa=True).transpose(1, 2).flatten(2))


def grouped(styles=None):
    net, x = (
        nn.Sequential(Grouped(), nn.Linear(12, 12), nn.Linear(12, 12)),
        torch.sin(torch.arange(60.0)).view(1, 5, 12),
    )
    torch.manual_seed(1)
    for layer in (net[1], net[2]):
        layer.reset_parameters()
    if styles is not None:
        layout = ModelLayout(blocks=("0",), tensor={"1": "colwise", "2": "rowwise", **styles})
        net = Plan("tp=2", [TensorParallel()]).apply(net, layout).module
    return net(x)


class Sparse(Block):
    """Works across the features between its layers, or scales them by one number."""

    def __init__(self, *, scale=False, gain=False):
        super().__init__()
        self.scale = nn.Linear(1, 1) if scale else None
        self.gain = nn.Linear(1, 1) if gain else None

    def forward(self, x):
        h = self.up(self.norm(x))
        if self.scale is not None:
            return x + self.down(self.scale(h.unsqueeze(-1)).squeeze(-1))
        if self.gain is not None:
            return x + self.gain(self.down(torch.tanh(h)).unsqueeze(-1)).squeeze(-1)
        return x + self.down(torch.relu(h - h.std(-1, keepdim=True)))


def sparse(styles, **options):
    net = of(functools.partial(Sparse, **options))()
    layout = ModelLayout(blocks=("blocks.*",), tensor={**LAYOUT.tensor.styles, **styles})
    Plan("tp=2", [TensorParallel()]).prove(net, batch(0)[0].float(), layout)
    return ()


# Positions


class Summing(Strange):
    """Mixes positions in its embedding, too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(self.embed, Sums(32))


CP = "dp_shard=1,cp=2"


def seeded(build):
    torch.manual_seed(0)
    return build()


def logits(build, *, mesh=CP, split=True, mixers=(), **given):
    """Whether the logits of this rank's part of a batch are one process's."""
    whole = {"input_ids": IDS, **given}
    passes = [ContextParallel(mixers=mixers), FullyShard()] if mesh == CP else [FullyShard()]
    par = Plan(mesh, passes).apply(seeded(build))
    with torch.no_grad():
        found = par.module(**(par.split(whole) if split else whole)).logits
        return torch.allclose(found, par.split(seeded(build)(**whole).logits), atol=1e-4)


def evaluated_whole(*, split):
    """Train on a part, and evaluate the whole batch, or a part of it."""
    par = Plan(CP, [ContextParallel(), FullyShard()]).apply(seeded(transformer))
    part = par.split({"input_ids": IDS})
    par.module(**part).logits.sum().backward()
    with torch.no_grad():
        found = par.module(**(part if split else {"input_ids": IDS, "position_ids": IDS})).logits
        return torch.allclose(found, par.split(seeded(transformer)(input_ids=IDS).logits), atol=1e-4)


def labelled(*, inside):
    """The loss of labels that are aligned with their positions."""
    par = Plan(CP, [ContextParallel(), FullyShard()]).apply(seeded(transformer))
    part = par.split({"input_ids": IDS, "labels": IDS})
    if inside:
        return par.module(**part)
    labels = part.pop("labels")
    loss = token_loss(par.module(**part).logits, labels, reduction="sum") * par.token_scale(labels.numel())
    return float(par.data_sum(loss.detach()) / par.loss_size)
