"""Models of other people, tiny and random: how each is built, fed and entered, with a layout at most."""

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshpar import ModelLayout, TensorLayout

Batch = dict[str, Tensor]
VOCAB = 64
LABELS = 5


@dataclass(frozen=True, kw_only=True)
class Stranger:
    """A model and how its users train it.

    Attributes:
        build: makes the model; random weights.
        batch: ``(generator, samples) -> batch``; dim 0 of every tensor is the sample.
        run: ``(model, batch) -> outputs``, dim 0 the sample; enters the model as its users do.
        infer: as ``run``, for evaluation, where users enter the model in another way then; None: ``run``.
        loss: ``(model, batch) -> loss``, a mean over samples; None: the distance of ``run``'s outputs from fixed
            numbers.
        needs: the import name of the package that it comes from; "" where it is written here.
        blocks: what is gathered as one, where parts of blocks are called from outside; None: the blocks that are found.
        layout: its tensor-parallel table, where the guide's way of writing one suffices.
        dtype: of its parameters and floating inputs.
        tolerance: of every comparison, relative to the tensor's largest value.
        short: whether the suite's short form has it.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    run: Callable[[nn.Module, Batch], Tensor]
    infer: Callable[[nn.Module, Batch], Tensor] | None = None
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    needs: str = ""
    blocks: tuple[str, ...] | None = None
    layout: ModelLayout | None = None
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    short: bool = False

    def made(self, seed: int) -> nn.Module:
        """Return the model with the weights of ``seed``, ready to train."""
        torch.manual_seed(seed)
        return self.build().to(self.dtype).train()

    def fed(self, seed: int, samples: int) -> Batch:
        """Return the batch of ``seed``."""
        made = self.batch(torch.Generator().manual_seed(seed), samples)
        return {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in made.items()}

    def loss_of(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss, a mean over the batch's samples."""
        return self.loss(model, batch) if self.loss is not None else distance(self.run(model, batch))

    def inferred(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what the model's users evaluate."""
        return (self.infer or self.run)(model, batch)


def distance(outputs: Tensor) -> Tensor:
    """Return the mean squared distance from fixed numbers, so that no gradient is zero by symmetry."""
    flat = outputs.flatten(1)
    return (flat - torch.arange(flat.shape[1], dtype=flat.dtype).mul(0.7).cos()).pow(2).mean()


# -------------------------------------------------------------------------------------------------------------- batches


def images(size: int, channels: int = 3) -> Callable[[torch.Generator, int], Batch]:
    return lambda generator, samples: {"x": torch.randn(samples, channels, size, size, generator=generator)}


def tokens(length: int) -> Callable[[torch.Generator, int], Batch]:
    return lambda generator, samples: {"ids": torch.randint(2, VOCAB, (samples, length), generator=generator)}


def vectors(length: int, width: int) -> Callable[[torch.Generator, int], Batch]:
    return lambda generator, samples: {"x": torch.randn(samples, length, width, generator=generator)}


def joined(**parts: Callable[[torch.Generator, int], Batch]) -> Callable[[torch.Generator, int], Batch]:
    """Return a maker of batches that has several others' tensors, each under its name here."""
    return lambda generator, samples: {
        name: next(iter(part(generator, samples).values())) for name, part in parts.items()
    }


def integers(below: int) -> Callable[[torch.Generator, int], Batch]:
    return lambda generator, samples: {"number": torch.randint(below, (samples,), generator=generator)}


def on_x(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"])


def on_ids(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["ids"])


# ---------------------------------------------------------------------------------------------------- timm, torchvision


def timm_model(name: str, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=LABELS, **options)

    return build


def torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=LABELS)
    nn.init.normal_(model.heads.head.weight, std=0.02)  # zero at the start, with which no gradient reaches the rest
    return model


def torchvision_resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=LABELS)


# ------------------------------------------------------------------------------------------------------------ diffusers


def diffusers_unet() -> nn.Module:
    from diffusers import UNet2DModel

    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    options = dict(
        sample_size=8, in_channels=3, out_channels=3, layers_per_block=1, norm_num_groups=4, attention_head_dim=4
    )
    return UNet2DModel(block_out_channels=(8, 16), down_block_types=down, up_block_types=up, **options)


def diffusers_dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    options = dict(
        in_channels=4, out_channels=4, num_layers=2, sample_size=8, patch_size=2, num_embeds_ada_norm=10,
        norm_num_groups=4,
    )  # fmt: skip
    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, **options)
    for block in model.transformer_blocks:
        block.norm1.emb.class_embedder.dropout_prob = (
            0.0  # no option; labels dropped at random are another batch on every mesh
        )
    return model


def noised(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"], batch["steps"]).sample


def noised_with_labels(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"], timestep=batch["steps"], class_labels=batch["labels"]).sample


def diffusers_vae() -> nn.Module:
    from diffusers import AutoencoderKL

    options = dict(block_out_channels=(8, 16), latent_channels=4, norm_num_groups=4, sample_size=16)
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, **options
    )


def vae_loss(model: nn.Module, batch: Batch) -> Tensor:
    latents = model.encode(batch["x"]).latent_dist
    return distance(model.decode(latents.mode()).sample) + latents.kl().mean() * 1e-3


# -------------------------------------------------------------------------------------------- open_clip, x-transformers


def open_clip_model() -> nn.Module:
    from open_clip.model import CLIP

    vision = dict(image_size=16, layers=2, width=32, patch_size=8, head_width=8)
    text = dict(context_length=8, vocab_size=VOCAB, width=32, heads=4, layers=2)
    return CLIP(16, vision, text)


def open_clip_forward(model: nn.Module, batch: Batch) -> Tensor:
    image, text, scale = model(batch["x"], batch["ids"])
    return image * text * scale


def open_clip_encode(model: nn.Module, batch: Batch) -> Tensor:
    return model.encode_image(batch["x"], normalize=True) * model.encode_text(batch["ids"], normalize=True)


def x_transformer() -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(
        num_tokens=VOCAB, max_seq_len=16, attn_layers=Decoder(dim=32, depth=2, heads=4, attn_dim_head=8)
    )


# ------------------------------------------------------------------------------- sentence-transformers and transformers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(VOCAB - 5))]


@cache
def bert_folder() -> str:
    """Return a folder with a tiny BERT and its tokenizer, as a published one has."""
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tempfile.mkdtemp(prefix="meshpar-strangers-")
    vocabulary = Path(folder) / "vocab.txt"
    vocabulary.write_text("\n".join(WORDS))
    sizes = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, max_position_embeddings=16
    )
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = BertConfig(vocab_size=VOCAB, architectures=["BertModel"], **sizes, **quiet)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = BertModel(config).state_dict()
    # By hand: in a process group, save_pretrained leaves most of the files to rank 0, and every rank has a folder of
    # its own here.
    config.to_json_file(Path(folder) / "config.json", use_diff=False)
    save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
    BertTokenizerFast(vocab=dict(zip(WORDS, range(VOCAB)))).save_pretrained(folder)
    return folder


def sentence_transformer() -> nn.Module:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    body = Transformer(bert_folder())
    for parameter in body.parameters():
        nn.init.normal_(parameter, std=0.3)  # the folder holds the same weights for every seed
    return SentenceTransformer(modules=[body, Pooling(32), Normalize()], device="cpu")


def sentences(batch: Batch) -> list[str]:
    return [" ".join(WORDS[5 + int(number) % (VOCAB - 5)] for number in row) for row in batch["ids"]]


def embedded(model: nn.Module, batch: Batch) -> Tensor:
    return model(model.tokenize(sentences(batch)))["sentence_embedding"]


def encoded(model: nn.Module, batch: Batch) -> Tensor:
    return model.encode(sentences(batch), convert_to_tensor=True, show_progress_bar=False)


def huggingface(name: str, config: str, **options: object) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, name)(getattr(transformers, config)(**options))

    return build


def transformers_clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    text = dict(vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=1, bos_token_id=0, pad_token_id=1, **sizes)
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config=dict(image_size=16, patch_size=8, **sizes), projection_dim=16)
    )


def clip_forward(model: nn.Module, batch: Batch) -> Tensor:
    found = model(input_ids=batch["ids"], pixel_values=batch["x"])
    return found.image_embeds * found.text_embeds * found.logits_per_image.diagonal()[:, None]


def clip_features(model: nn.Module, batch: Batch) -> Tensor:
    images = model.get_image_features(pixel_values=batch["x"])
    texts = model.get_text_features(input_ids=batch["ids"])
    return getattr(images, "pooler_output", images) * getattr(texts, "pooler_output", texts)


def whisper(model: nn.Module, batch: Batch) -> Tensor:
    return model(input_features=batch["x"], decoder_input_ids=batch["ids"]).logits


def of_logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["ids"], use_cache=False).logits


def of_hidden(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["x"].flatten(1)).last_hidden_state


WHISPER = dict(
    vocab_size=VOCAB, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
    encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=8, max_target_positions=16, dropout=0.0, use_cache=False,
    pad_token_id=0, bos_token_id=0, eos_token_id=0, decoder_start_token_id=0,
)  # fmt: skip
MAMBA = dict(
    vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, conv_kernel=3, expand=2, time_step_rank=4,
    use_cache=False,
)  # fmt: skip
WAV2VEC2 = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, conv_dim=(8, 8), conv_stride=(2, 2),
    conv_kernel=(3, 3), num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
    activation_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False,
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- plain torch


class Recurrent(nn.Module):
    """The tutorial's tagger: an embedding, a recurrent network, a linear layer."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 16)
        self.rnn = kind(16, 24, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, LABELS)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.rnn(self.embed(ids))[0])


class Translator(nn.Module):
    """torch's own Transformer between two embeddings and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 32), nn.Embedding(VOCAB, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 48, dropout=0.0, batch_first=True)
        self.generator = nn.Linear(32, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.generator.weight.dtype)
        return self.generator(
            self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True)
        )


def graph_network() -> nn.Module:
    from torch_geometric.nn import GCN

    return GCN(in_channels=6, hidden_channels=16, num_layers=3, out_channels=LABELS)


NODES = 6


def graphs(generator: torch.Generator, samples: int) -> Batch:
    edges = torch.randint(NODES, (samples, 2, 10), generator=generator)
    return {"x": torch.randn(samples, NODES, 6, generator=generator), "edges": edges}


def on_graphs(model: nn.Module, batch: Batch) -> Tensor:
    """Run a batch of graphs as one graph of separate parts, as torch_geometric's loader makes it."""
    samples = len(batch["x"])
    edges = batch["edges"] + torch.arange(samples)[:, None, None] * NODES
    return model(batch["x"].flatten(0, 1), edges.transpose(0, 1).flatten(1)).unflatten(0, (samples, NODES))


# -------------------------------------------------------- the way of nanoGPT: one fused projection, tied head, own init


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int, counts_heads: bool) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)
        self.n_head, self.n_embd, self.counts_heads = heads, width, counts_heads

    def forward(self, x: Tensor) -> Tensor:
        if self.counts_heads:  # the guide's edit: the head's size is the model's, the number of heads the tensor's
            parts = [part.unflatten(-1, (-1, self.n_embd // self.n_head)) for part in self.c_attn(x).chunk(3, -1)]
        else:
            parts = [part.view(*x.shape[:2], self.n_head, -1) for part in self.c_attn(x).split(self.n_embd, dim=2)]
        q, k, v = (part.transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.drop(self.c_proj(mixed.flatten(2) if self.counts_heads else mixed.contiguous().view(x.shape)))


class GeluBlock(nn.Module):
    def __init__(self, width: int, heads: int, counts_heads: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attn = FusedAttention(width, heads, counts_heads)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GptOfOneFile(nn.Module):
    def __init__(self, counts_heads: bool = False, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        blocks = nn.ModuleList(GeluBlock(width, heads, counts_heads) for _ in range(layers))
        parts = {
            "wte": nn.Embedding(VOCAB, width),
            "drop": nn.Dropout(0.0),
            "h": blocks,
            "ln_f": nn.LayerNorm(width, bias=False),
        }
        self.transformer = nn.ModuleDict(parts)
        self.wpe = nn.Parameter(torch.empty(16, width))
        self.lm_head = nn.Linear(width, VOCAB, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        nn.init.normal_(self.wpe, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer.drop(self.transformer.wte(idx) + self.wpe[: idx.shape[1]])
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(batch["ids"], batch["ids"].roll(-1, 1))[1]
    assert loss is not None
    return loss


GPT_LAYOUT = ModelLayout(
    blocks=("transformer.h.*",),
    tensor=TensorLayout(
        {
            "transformer.h.*.attn.c_attn": "packed_colwise:3",
            "transformer.h.*.attn.c_proj": "rowwise",
            "transformer.h.*.mlp.c_fc": "colwise",
            "transformer.h.*.mlp.c_proj": "rowwise",
        },
        heads={"transformer.h.*.attn.c_attn": 4},
    ),
    tied=(("transformer.wte.weight", "lm_head.weight"),),
)


# ------------------- the way of nanochat: weights cast where they are used, norms without weights, a capped head of its own


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class CastingLinear(nn.Linear):
    """A linear layer whose weights stay in their own dtype and follow its input's where they are used."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class RotaryAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_dim = width // heads
        self.c_q, self.c_k, self.c_v, self.c_proj = (CastingLinear(width, width, bias=False) for _ in range(4))
        self.gate = CastingLinear(8, heads, bias=False)

    def forward(self, x: Tensor, extra: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v, extra = (
            tensor.unflatten(-1, (-1, self.head_dim)) for tensor in (self.c_q(x), self.c_k(x), self.c_v(x), extra)
        )
        v = (
            v + 2 * torch.sigmoid(self.gate(x[..., :8]))[..., None] * extra
        )  # the values of the token itself, smeared into every layer
        q, k = (rms(self.rotated(tensor, cos, sin)) for tensor in (q, k))
        mixed = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (q, k, v)), is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))

    @staticmethod
    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class SquaredReluBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attn = RotaryAttention(width, heads)
        self.c_fc, self.c_proj = (
            CastingLinear(width, 2 * width, bias=False),
            CastingLinear(2 * width, width, bias=False),
        )

    def forward(self, x: Tensor, extra: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(rms(x), extra, cos, sin)
        return x + self.c_proj(F.relu(self.c_fc(rms(x))).square())


class ChatModel(nn.Module):
    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, width)
        self.h = nn.ModuleList(SquaredReluBlock(width, heads) for _ in range(layers))
        self.value_embeds = nn.ModuleDict({str(place): nn.Embedding(VOCAB, width) for place in range(layers)})
        self.resid_lambdas, self.x0_lambdas = nn.Parameter(torch.ones(layers)), nn.Parameter(torch.full((layers,), 0.1))
        self.lm_head = CastingLinear(width, VOCAB, bias=False)
        angles = torch.arange(16)[:, None] * 100.0 ** -torch.linspace(0, 1, width // heads // 2)
        self.register_buffer("cos", angles.cos()[:, None], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None], persistent=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None, loss_reduction: str = "mean") -> Tensor:
        cos, sin = self.cos[: idx.shape[1]], self.sin[: idx.shape[1]]
        x = first = rms(self.wte(idx))
        for place, block in enumerate(self.h):
            x = self.resid_lambdas[place] * x + self.x0_lambdas[place] * first
            x = block(x, self.value_embeds[str(place)](idx), cos, sin)
        logits = 15 * torch.tanh(self.lm_head(rms(x)) / 15)
        return (
            logits
            if targets is None
            else F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)
        )


def chat_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch["ids"], batch["ids"].roll(-1, 1))


# ------------------------------------------------------------------------------------------------------------ the table


def _mlp_table(blocks: str, up: str, down: str, head: Mapping[str, str] | None = None) -> ModelLayout:
    return ModelLayout(
        blocks=(blocks,), tensor={f"{blocks}.{up}": "colwise", f"{blocks}.{down}": "rowwise"} | dict(head or {})
    )


def _text_and_image(size: int, length: int) -> Callable[[torch.Generator, int], Batch]:
    return joined(x=images(size), ids=tokens(length))


STRANGERS: dict[str, Stranger] = {
    "timm ViT": Stranger(
        needs="timm",
        build=timm_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4),
        batch=images(16), run=on_x, layout=_mlp_table("blocks.*", "mlp.fc1", "mlp.fc2"), short=True,
    ),
    "timm ConvNeXt": Stranger(
        needs="timm", build=timm_model("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 8, 16, 16)), batch=images(32), run=on_x,
    ),
    "timm Swin": Stranger(
        needs="timm",
        build=timm_model("swin_tiny_patch4_window7_224", img_size=32, window_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), drop_path_rate=0.0),
        batch=images(32), run=on_x,
    ),
    "timm ResNet (batch norm)": Stranger(
        needs="timm", build=timm_model("resnet18", layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), zero_init_last=False),
        batch=images(32), run=on_x, short=True,
    ),
    "torchvision ViT": Stranger(needs="torchvision", build=torchvision_vit, batch=images(16), run=on_x),
    "torchvision ResNet (batch norm)": Stranger(needs="torchvision", build=torchvision_resnet, batch=images(32), run=on_x),
    "diffusers UNet2D": Stranger(
        needs="diffusers", build=diffusers_unet, batch=joined(x=images(8), steps=integers(1000)), run=noised,
    ),
    "diffusers DiT": Stranger(
        needs="diffusers", build=diffusers_dit, batch=joined(x=images(8, 4), steps=integers(1000), labels=integers(10)),
        # which the output layer calls, too
        run=noised_with_labels, blocks=("transformer_blocks.*", "transformer_blocks.0.norm1.emb"),
    ),
    "diffusers VAE by forward": Stranger(
        needs="diffusers", build=diffusers_vae, batch=images(16), run=lambda model, batch: model(batch["x"]).sample,
    ),
    "diffusers VAE by encode and decode": Stranger(
        needs="diffusers", build=diffusers_vae, batch=images(16), loss=vae_loss, short=True,
        run=lambda model, batch: model.decode(model.encode(batch["x"]).latent_dist.mode()).sample,
    ),
    "open_clip by forward": Stranger(
        needs="open_clip", build=open_clip_model, batch=_text_and_image(16, 8), run=open_clip_forward, infer=open_clip_encode,
    ),
    "open_clip by encode_image and encode_text": Stranger(
        needs="open_clip", build=open_clip_model, batch=_text_and_image(16, 8), run=open_clip_encode,
    ),
    "x-transformers": Stranger(
        needs="x_transformers", build=x_transformer, batch=tokens(12), run=on_ids, short=True,
        layout=ModelLayout(
            blocks=("attn_layers.layers.*.1",),
            tensor={"attn_layers.layers.*.1.ff.0.0": "colwise", "attn_layers.layers.*.1.ff.2": "rowwise"},
        ),
    ),
    "sentence-transformers": Stranger(
        needs="sentence_transformers", build=sentence_transformer, batch=tokens(8), run=embedded, infer=encoded,
    ),
    "transformers CLIP": Stranger(
        needs="transformers", build=transformers_clip, batch=_text_and_image(16, 8), run=clip_forward, infer=clip_features,
    ),
    "transformers CLIP by get_image_features": Stranger(
        needs="transformers", build=transformers_clip, batch=_text_and_image(16, 8), run=clip_features,
    ),
    "transformers Whisper": Stranger(
        needs="transformers", build=huggingface("WhisperForConditionalGeneration", "WhisperConfig", **WHISPER),
        batch=joined(x=vectors(8, 16), ids=tokens(6)), run=whisper,
    ),
    "transformers Mamba": Stranger(
        needs="transformers", build=huggingface("MambaForCausalLM", "MambaConfig", **MAMBA), batch=tokens(10), run=of_logits,
        tolerance=1e-5,  # its norms and its scan compute in float32, whatever its dtype
    ),
    "transformers Wav2Vec2": Stranger(
        needs="transformers", build=huggingface("Wav2Vec2Model", "Wav2Vec2Config", **WAV2VEC2), batch=vectors(64, 1), run=of_hidden,
    ),
    "LSTM": Stranger(build=lambda: Recurrent(nn.LSTM), batch=tokens(10), run=on_ids, short=True),
    "GRU": Stranger(build=lambda: Recurrent(nn.GRU), batch=tokens(10), run=on_ids),
    "nn.Transformer": Stranger(
        build=Translator, batch=joined(source=tokens(7), target=tokens(9)), run=lambda model, batch: model(batch["source"], batch["target"]),
        layout=ModelLayout(
            blocks=("transformer.encoder.layers.*", "transformer.decoder.layers.*"),
            tensor={f"transformer.{side}.layers.*.{name}": style for side in ("encoder", "decoder")
                    for name, style in (("linear1", "colwise"), ("linear2", "rowwise"))},
        ),
    ),
    "torch_geometric GCN": Stranger(needs="torch_geometric", build=graph_network, batch=graphs, run=on_graphs),
    "nanoGPT's way": Stranger(
        build=GptOfOneFile, batch=tokens(12), loss=gpt_loss, run=lambda model, batch: model(batch["ids"])[0],
    ),
    "nanoGPT's way, heads counted as in the guide": Stranger(
        build=lambda: GptOfOneFile(counts_heads=True), batch=tokens(12), loss=gpt_loss, run=lambda model, batch: model(batch["ids"])[0],
        layout=GPT_LAYOUT, short=True,
    ),
    "nanochat's way": Stranger(build=ChatModel, batch=tokens(12), loss=chat_loss, run=on_ids, short=True),
}  # fmt: skip
