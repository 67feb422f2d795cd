"""Layouts of timm's vision transformers and open_clip's towers: models of their structure equal one process."""

from collections import OrderedDict

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention

from meshpar import FullyShard, ModelLayout, Plan, PlanError, TensorParallel
from meshpar.models import vision_layout
from meshpar.models.vision import layout_for
from meshpar.testing import on_ranks
from tests.support.tiers import daily


class Attention(nn.Module):
    """timm's: the head count and the width are attributes."""

    def __init__(self, dim, heads, *, qk_norm=False):
        super().__init__()
        self.num_heads, self.head_dim, self.attn_dim = heads, dim // heads, dim
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm = (nn.LayerNorm(dim // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x):
        batch, count, _ = x.shape
        fused = self.qkv(x).reshape(batch, count, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = fused.unbind(0)
        mixed = scaled_dot_product_attention(self.q_norm(query), self.k_norm(key), value)
        return self.proj(mixed.transpose(1, 2).reshape(batch, count, self.attn_dim))


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, **options):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn, self.mlp = Attention(dim, heads, **options), Mlp(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """timm's structure, of images (B, 3, 16, 16)."""

    def __init__(self, dim=32, heads=4, **options):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 8, 8)
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, dim)), nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.Sequential(*(Block(dim, heads, **options) for _ in range(2)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, images):
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        return self.head(self.norm(self.blocks(x))[:, 0])


class ResidualAttentionBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        layers = [("c_fc", nn.Linear(dim, 4 * dim)), ("gelu", nn.GELU()), ("c_proj", nn.Linear(4 * dim, dim))]
        self.mlp = nn.Sequential(OrderedDict(layers))

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class Tower(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.resblocks = nn.ModuleList(ResidualAttentionBlock(dim, heads) for _ in range(2))

    def forward(self, x):
        for block in self.resblocks:
            x = block(x)
        return x


class Clip(nn.Module):
    """open_clip's structure: a tower of images and one of text."""

    def __init__(self, dim=32):
        super().__init__()
        self.visual = nn.ModuleDict({"conv1": nn.Conv2d(3, dim, 8, 8), "transformer": Tower(dim)})
        self.token_embedding, self.transformer = nn.Embedding(64, dim), Tower(dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images, text):
        image = self.visual["transformer"](self.visual["conv1"](images).flatten(2).transpose(1, 2)).mean(1)
        return normalize(image, dim=-1), normalize(self.transformer(self.token_embedding(text))[:, -1], dim=-1)


def timms(**options):
    timm = pytest.importorskip("timm")
    sizes = dict(num_classes=10, img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4)
    return timm.create_model("vit_tiny_patch16_224", **sizes, **options)


def open_clips():
    pytest.importorskip("open_clip")
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    image = CLIPVisionCfg(layers=2, width=32, head_width=8, patch_size=8, image_size=16)
    return CLIP(32, image, CLIPTextCfg(context_length=12, vocab_size=64, width=32, heads=4, layers=2))


BUILDS = {
    "vit": VisionTransformer,
    "vit of normed heads": lambda: VisionTransformer(qk_norm=True),
    "clip": Clip,
    "timm": timms,
    "open_clip": open_clips,
}
PLANS = {"tp=2": [TensorParallel()], "dp_shard=2,tp=2": [TensorParallel(), FullyShard()]}


def steps(model, build, rank=0, ranks=1):
    """Train on this data rank's samples, and return the losses."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    draw = torch.Generator().manual_seed(1)
    for _ in range(4):
        images = torch.randn(8, 3, 16, 16, generator=draw)
        labels, text = torch.randint(10, (8,), generator=draw), torch.randint(64, (8, 12), generator=draw)
        images, labels, text = (part.chunk(ranks)[rank] for part in (images, labels, text))
        if "vit" in build or build == "timm":
            loss = cross_entropy(model(images), labels)
        else:
            image, words, *_ = model(images, text)
            loss = (image - words).square().sum(-1).mean()  # within a sample: data ranks average
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def built(build):
    torch.manual_seed(0)
    return BUILDS[build]()


@pytest.mark.parametrize("mesh", daily(PLANS, "tp=2"))
@pytest.mark.parametrize("build", daily(BUILDS, "vit", "clip"))
@on_ranks("mesh")
def test_a_mesh_equals_one_process(build, mesh):
    alone, model = built(build), built(build)
    layout = vision_layout(model)
    par = Plan(mesh, PLANS[mesh]).apply(model, layout)
    split = dict(par.module.named_parameters())
    blocks = "blocks.0" if "vit" in build or build == "timm" else "visual.transformer.resblocks.0"
    first = "fc1" if "vit" in build or build == "timm" else "c_fc"
    assert split[f"{blocks}.mlp.{first}.weight"].to_local().numel() * dist.get_world_size() == 32 * 128
    expected, found = steps(alone, build), steps(par.module, build, par.data_rank, par.data_size)
    torch.testing.assert_close(par.data_sum(found) / par.data_size, expected, rtol=1e-5, atol=1e-5)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(par.whole(split[name].detach()), parameter.detach(), rtol=1e-4, atol=1e-4, msg=name)


def test_the_heads_of_timms_attention_are_split_and_torchs_attention_is_whole():
    found = vision_layout(VisionTransformer(qk_norm=True))
    assert found.blocks == ("blocks.*",)
    assert found.tensor.heads == {"blocks.*.attn.qkv": 4}
    assert found.tensor.styles == {
        "blocks.*.attn": "region:num_heads,attn_dim",
        "blocks.*.attn.k_norm": "grad_sum",
        "blocks.*.attn.proj": "rowwise",
        "blocks.*.attn.q_norm": "grad_sum",
        "blocks.*.attn.qkv": "packed_colwise:3",
        "blocks.*.mlp.fc1": "colwise",
        "blocks.*.mlp.fc2": "rowwise",
    }
    found = vision_layout(Clip())
    assert found.blocks == ("visual.transformer.resblocks.*", "transformer.resblocks.*")
    assert sorted(name.rpartition(".")[2] for name in found.tensor.styles) == ["c_fc", "c_fc", "c_proj", "c_proj"]


def test_models_of_these_packages_get_it_by_themselves(monkeypatch):
    assert layout_for(VisionTransformer()) is None, "a class of one's own asks for it"
    monkeypatch.setattr(VisionTransformer, "__module__", "timm.models.vision_transformer")
    assert layout_for(VisionTransformer()) == vision_layout(VisionTransformer())
    with pytest.raises(PlanError, match="num_heads is 4, which tp=8 does not divide"):
        Plan("tp=8", [TensorParallel()]).check(VisionTransformer(), layout_for(VisionTransformer()), world_size=8)


def test_a_layout_names_counts_that_the_module_has():
    def problems(counts):
        styles = dict(vision_layout(VisionTransformer()).tensor.styles) | {"blocks.*.attn": f"region:{counts}"}
        Plan("tp=2", [TensorParallel()]).check(VisionTransformer(), ModelLayout(blocks=("blocks.*",), tensor=styles), 2)

    with pytest.raises(PlanError, match=r"attn.scale is None, .* divides it; expected a whole number"):
        problems("scale,attn_dim")
    problems("num_heads,attn_dim")
    with pytest.raises(PlanError, match="no tensor-parallel style 'region:1'"):
        problems("1")
