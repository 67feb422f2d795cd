"""Training over stages against one process: micro-batches of different sizes and lengths, and the models."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from meshpar import ModelLayout, Plan, StagesLayout
from meshpar.tensors.placements import whole_tensor
from meshpar.testing import token_loss_sum
from tests.support.comparison import gradients, on_one_rank
from tests.support.models_for_parity import VOCAB, huggingface, huggingface_gpt2, transformer

SHAPES = ((2, 6), (1, 10), (3, 4), (2, 8), (1, 6), (2, 4), (4, 8))  # samples and positions of micro-batches


def batches(rank, seed=0, number=4):
    """Return micro-batches of one data rank, of different lengths and numbers of samples."""
    draw = torch.Generator().manual_seed(100 * seed + rank)
    found = []
    for shape in SHAPES[:number]:
        ids = torch.randint(VOCAB, shape, generator=draw)
        labels = torch.cat([ids[:, 1:], torch.full((shape[0], 1), -100)], 1)
        found.append({"input_ids": ids, "labels": labels})
    return found


def count(batch):
    return int((batch["labels"] != -100).sum())


def scaled_loss(scale):
    return lambda module, batch: token_loss_sum(module, batch)[0] * scale


def trained(make, mesh, passes, number=4, steps=3):
    """Train and return losses, norms, first gradients and last weights by name, of all stages."""
    torch.manual_seed(0)
    par = Plan(mesh, passes).apply(make())
    optimizer = torch.optim.AdamW(par.module.parameters(), lr=1e-2, eps=1e-3, fused=True)
    losses, norms, grads = [], [], {}
    for step in range(steps):
        mine = [par.split(batch) for batch in batches(par.data_rank, step, number)]
        total = par.backward(mine, scaled_loss(par.token_scale(sum(map(count, mine)))))
        if not step:
            grads = gradients(par.module)
        norms.append(float(par.clip_grad_norm_(1.0)))
        losses.append(float(par.data_sum(total.clone()) / par.loss_size))
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole_tensor(parameter).clone() for name, parameter in par.module.named_parameters()}
    return losses, norms, grads, weights


def one_process(make, data_ranks, number=4, steps=3):
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)
    losses, norms, grads = [], [], {}
    for step in range(steps):
        every = [batch for rank in range(data_ranks) for batch in batches(rank, step, number)]
        tokens = sum(map(count, every))
        total = 0.0
        for batch in every:
            loss = token_loss_sum(model, batch)[0] / tokens
            loss.backward()
            total += float(loss.detach())
        if not step:
            grads = gradients(model)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, grads, {name: parameter.detach() for name, parameter in model.named_parameters()}


def assert_as_one_process(make, mesh, passes, data_ranks=1, number=4):
    losses, norms, grads, weights = trained(make, mesh, passes, number)
    expected = on_one_rank(lambda: one_process(make, data_ranks, number))
    torch.testing.assert_close((losses, norms), expected[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads, {name: expected[2][name] for name in grads}, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(weights, {name: expected[3][name] for name in weights}, rtol=1e-5, atol=1e-5)
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, list(weights))
    assert set().union(*names) == set(expected[3])


def ctrl():
    import transformers

    sizes = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=4, n_head=4, dff=48)
    config = transformers.CTRLConfig(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, use_cache=False)
    return transformers.CTRLLMHeadModel(config)


class _Mixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden, begun, first=None):
        value = self.value(hidden)
        mixed = value if first is None else (value + first) / 2
        return hidden + self.out(torch.tanh(mixed + begun)), value


class Crossing(nn.Module):
    """Each block sees the embedding and the first block's values, and the second half skips to the first one."""

    def __init__(self, layers=6, width=16, carries=("embed", "layers.*")):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(_Mixing(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.carries = carries

    def meshpar_layout(self):
        return ModelLayout(blocks=("layers.*",), stages=StagesLayout(carries=self.carries))

    def forward(self, input_ids, **_):
        hidden = begun = nn.functional.layer_norm(self.embed(input_ids), (self.embed.embedding_dim,))
        first, skips, cached = None, [], []
        for place, layer in enumerate(self.layers):
            if place >= len(self.layers) / 2:
                hidden = hidden + 0.5 * skips.pop()
            hidden, value = layer(hidden, begun, first)
            first = value if first is None else first
            cached.append(value)
            if place < len(self.layers) // 2:
                skips.append(hidden)
        return SimpleNamespace(logits=self.head(hidden), cache=SimpleNamespace(values=cached))


class Plain(nn.Module):
    """Linear blocks between an embedding and a head: for what holds whatever the model is."""

    def __init__(self, layers=4, tied=False, width=8):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def meshpar_layout(self):
        return ModelLayout(blocks=("layers.*",), tensor={"layers.*": "colwise_gather"})

    def forward(self, input_ids, **_):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return SimpleNamespace(logits=self.head(self.norm(hidden)))


MODELS = {
    "Llama": lambda: huggingface("Llama", num_hidden_layers=4),
    "tied Llama": lambda: huggingface("Llama", num_hidden_layers=3, tie_word_embeddings=True),
    "Granite": lambda: huggingface(
        "Granite", num_hidden_layers=4, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0
    ),
    "Gemma2": lambda: huggingface("Gemma2", num_hidden_layers=4, sliding_window=4),
    "Qwen3Moe": lambda: huggingface(
        "Qwen3Moe", num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "GPT-2": lambda: huggingface_gpt2(),
    "Bloom": lambda: huggingface(
        "Bloom", n_layer=4, n_head=2, hidden_dropout=0.0, attention_dropout=0.0
    ),  # a norm before its blocks
    "OPT": lambda: huggingface("OPT", num_hidden_layers=4, word_embed_proj_dim=16, dropout=0.0),  # a projection
    "Camembert": lambda: huggingface(  # tied to a part of its head, whose name is the first
        "Camembert", num_hidden_layers=4, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    ),
    "CTRL": ctrl,  # writes into what its embedding returns
    "Transformer": lambda: transformer(layers=4),
}
