"""The fuzzer's models, as source: a drawn model is written the way a user writes one, with only what was drawn in it.

The text is what runs and what a shrunk script shows, so nothing stands between a failure and its report. ``table``
gives the tensor-parallel layout that a user who followed docs/layout.md would write for the model.
"""

from __future__ import annotations

from typing import Any

Model = dict[str, Any]
LENGTH = 16  # rows of a table of positions, more than any drawn sequence

DOUBLED = """
class Doubled(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)
"""
ROTATE = """
def rotate(x, angles):
    a, b = x.chunk(2, -1)
    cos, sin = angles[: x.shape[-2]].cos(), angles[: x.shape[-2]].sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)
"""
NORMS = {"layer": "nn.LayerNorm({d})", "rms": "nn.RMSNorm({d})", "none": "nn.Identity()"}


def source(model: Model, *, method: bool = False) -> str:
    """Return the source of the classes, ``Model`` last.

    Args:
        model: what was drawn.
        method: give the model a method ``features`` beside ``forward``.
    """
    parts = [DOUBLED] * (model["linear"] == "subclass")
    if model["attention"]:
        parts += [ROTATE] * (model["positions"] == "rope") + [_attention(model, model["attention"])]
    if model["ff"]:
        parts.append(_feed_forward(model, model["ff"]))
    parts += [] if model["nested"] else [_block(model)]
    return "\n\n\n".join(part.strip() for part in [*parts, _model(model, method)])


def _class(name: str, init: list[str], methods: dict[str, list[str]]) -> str:
    lines = [
        f"class {name}(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in init),
    ]
    for signature, body in methods.items():
        lines += ["", f"    def {signature}:", *(f"        {line}" for line in body)]
    return "\n".join(lines)


def _linear(model: Model, inputs: int, outputs: int) -> str:
    bias = "" if model["bias"] else ", bias=False"
    if model["linear"] == "parametrized":
        return f"nn.utils.parametrizations.weight_norm(nn.Linear({inputs}, {outputs}{bias}))"
    return f"{'Doubled' if model['linear'] == 'subclass' else 'nn.Linear'}({inputs}, {outputs}{bias})"


def _attention(model: Model, a: Model) -> str:
    heads, kv, width = a["heads"], a["kv"], a["width"]
    dim, queries, keys = model["dim"], heads * width, kv * width
    if a["packed"]:
        init = [f"self.c_attn = {_linear(model, dim, 3 * queries)}"]
        cut = f"split({queries}, -1)" if a["counts"] == "split" else "chunk(3, -1)"
        products = f"self.c_attn(x).{cut}"
    else:
        init = [
            f"self.q = {_linear(model, dim, queries)}",
            f"self.k = {_linear(model, dim, keys)}",
            f"self.v = {_linear(model, dim, keys)}",
        ]
        products = "(self.q(x), self.k(x), self.v(x))"
    init.append(f"self.out = {_linear(model, queries, dim)}")
    body = [f"q, k, v = {products}"]
    if a["norm"] == "features":
        init += [f"self.q_norm = nn.RMSNorm({queries})", f"self.k_norm = nn.RMSNorm({keys})"]
        body.append("q, k = self.q_norm(q), self.k_norm(k)")
    body.append(f"q, k, v = (part.{_to_heads(a)}.transpose(1, 2) for part in (q, k, v))")
    if a["norm"] == "heads":
        init += [f"self.q_norm = nn.RMSNorm({width})", f"self.k_norm = nn.RMSNorm({width})"]
        body.append("q, k = self.q_norm(q), self.k_norm(k)")
    if model["positions"] == "rope":
        angles = f"torch.outer(torch.arange({LENGTH}.0), 0.5 ** torch.arange({width // 2}))"
        init.append(f'self.register_buffer("angles", {angles}, persistent={a["persistent"]})')
        body.append("q, k = rotate(q, self.angles), rotate(k, self.angles)")
    if a["temperature"]:
        init.append(f"self.temperature = nn.Parameter(torch.rand({heads}) + 0.5)")
        body.append("q = q * self.temperature[:, None, None]")
    grouped = ", enable_gqa=True" if kv != heads else ""
    body += [
        f"mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True{grouped})",
        "return self.out(mixed.transpose(1, 2).flatten(2))",
    ]
    return _class("Attention", init, {"forward(self, x)": body})


def _to_heads(a: Model) -> str:
    return (
        f"view(*x.shape[:2], {a['heads']}, {a['width']})"
        if a["counts"] == "view"
        else f"unflatten(-1, (-1, {a['width']}))"
    )


def _feed_forward(model: Model, ff: Model) -> str:
    dim, hidden, count = model["dim"], ff["hidden"], ff["experts"]
    up, down = _linear(model, dim, hidden), _linear(model, hidden, dim)
    if ff["kind"] == "plain":
        return _class(
            "FeedForward",
            [f"self.up = {up}", f"self.down = {down}"],
            {"forward(self, x)": ["return self.down(F.gelu(self.up(x)))"]},
        )
    if ff["kind"] == "gated":
        init = [f"self.gate = {up}", f"self.up = {up}", f"self.down = {down}"]
        return _class(
            "FeedForward", init, {"forward(self, x)": ["return self.down(F.silu(self.gate(x)) * self.up(x))"]}
        )
    init = [f"self.router = nn.Linear({dim}, {count})"]
    routes = ["weights = self.router(x).softmax(-1)"]
    if ff["kind"] != "soft":
        routes += [
            "best = weights.topk(2, -1).indices",
            "weights = weights * torch.zeros_like(weights).scatter(-1, best, 1.0)",
        ]
    if ff["kind"] == "listed":  # an expert that no token chose is not called, and has no gradient on this rank
        init += [
            f"self.up = nn.ModuleList({up} for _ in range({count}))",
            f"self.down = nn.ModuleList({down} for _ in range({count}))",
        ]
        called = (
            f"sum(weights[..., e, None] * self.down[e](F.gelu(self.up[e](x))) for e in range({count}) if "
            "bool(weights[..., e].any()))"
        )
        return _class("FeedForward", init, {"forward(self, x)": [*routes, f"return {called}"]})
    init += [
        f"self.up = nn.Parameter(torch.randn({count}, {dim}, {hidden}) / 4)",
        f"self.down = nn.Parameter(torch.randn({count}, {hidden}, {dim}) / 4)",
    ]
    body = [
        *routes,
        'h = F.gelu(torch.einsum("...d,edh->...eh", x, self.up))',
        'return torch.einsum("...eh,ehd,...e->...d", h, self.down, weights)',
    ]
    return _class("FeedForward", init, {"forward(self, x)": body})


def _norm(model: Model) -> str:
    if model["family"] == "image":
        return {"batch": f"nn.BatchNorm2d({model['dim']})", "none": "nn.Identity()"}.get(
            model["norm"], f"nn.GroupNorm(2, {model['dim']})"
        )
    return NORMS.get(model["norm"], "nn.BatchNorm1d({d})").format(d=model["dim"])


def _block(model: Model) -> str:
    dim, init, body = model["dim"], [], []
    if model["attention"]:
        init += [f"self.norm1 = {_norm(model)}", "self.mix = Attention()"]
        body.append("x = x + self.mix(self.norm1(x))")
    if model["conv"]:
        kind = "2d" if model["family"] == "image" else "1d"
        init += [
            f"self.norm3 = {_norm(model)}",
            f"self.conv = nn.Conv{kind}({dim}, {dim}, 3{', padding=1' if kind == '2d' else ''})",
        ]
        causal = "self.conv(F.pad(self.norm3(x).transpose(1, 2), (2, 0))).transpose(1, 2)"
        body.append(f"x = x + {'self.conv(self.norm3(x)).relu()' if kind == '2d' else causal}")
    if model["ff"]:
        init += [f"self.norm2 = {_norm(model)}", "self.ff = FeedForward()"]
        turn, back = (".movedim(1, -1)", ".movedim(-1, 1)") if model["family"] == "image" else ("", "")
        out = f"self.ff(self.norm2(x){turn}){back}"
        body.append(f"x = x + {out if model['dropout'] is None else f'self.drop({out})'}")
        init += [f"self.drop = nn.Dropout({model['dropout']})"] if model["dropout"] is not None else []
    if model["gain"] != "none":
        init.append(f"self.gain = nn.Parameter(torch.ones({dim}{', 1, 1' if model['family'] == 'image' else ''}))")
        body += ["x = x * self.gain"] if model["gain"] == "block" else []
    if model["counter"] == "block":
        init.append('self.register_buffer("calls", torch.zeros(()))')
        body.insert(0, "self.calls += 1.0")
    return _class("Block", init, {"forward(self, x)": [*body, "return x"]})


def _model(model: Model, method: bool) -> str:
    dim, classes = model["dim"], model["classes"]
    init, body = _inputs(model)
    init.append(_blocks(model))
    body += _run_blocks(model)
    last = "nn.LayerNorm" if model["norm"] in ("layer", "batch") else "nn.RMSNorm"
    init.append(f"self.norm = {last}({dim})")
    if model["family"] == "image":
        body.append("x = x.mean((2, 3))")
    body.append("x = self.norm(x)")
    scale = ""
    if model["scalar"]:
        init.append("self.scale = nn.Parameter(torch.tensor(0.7))")
        scale = "self.scale * "
    if model["tied"] == "functional":
        logits = f"{scale}(x @ self.embed.weight.T)"
    else:
        init.append(
            f"self.head = nn.Linear({dim}, "
            f"{classes}{', bias=False' if model['tied'] == 'shared' or not model['bias'] else ''})"
        )
        init += ["self.head.weight = self.embed.weight"] * (model["tied"] == "shared")
        logits = f"{scale}self.head(x)"
    init += ["self.unused = nn.Parameter(torch.ones(5))"] * model["unused"]
    if model["counter"] == "root":
        init.append('self.register_buffer("calls", torch.zeros(()))')
        body.insert(0, "self.calls += 1.0")
    if method:
        return _class(
            "Model",
            init,
            {
                "features(self, x)": [*body, "return x"],
                "forward(self, x)": ["x = self.features(x)", f"return {logits}"],
            },
        )
    return _class("Model", init, {"forward(self, x)": [*body, f"return {logits}"]})


def _inputs(model: Model) -> tuple[list[str], list[str]]:
    dim = model["dim"]
    if model["family"] == "image":
        return [f"self.stem = nn.Conv2d(3, {dim}, 3, padding=1)"], ["x = self.stem(x)"]
    if model["family"] == "features":
        return [f"self.stem = nn.Linear({model['inputs']}, {dim})"], ["x = self.stem(x)"]
    init, body = [f"self.embed = nn.Embedding({model['classes']}, {dim})"], ["h = self.embed(x)"]
    if model["positions"] == "learned":
        init.append(f"self.place = nn.Embedding({LENGTH}, {dim})")
        body.append("h = h + self.place(torch.arange(x.shape[1]))")
    return init, [*body, "x = h"]


def _blocks(model: Model) -> str:
    layers = model["layers"]
    if model["nested"]:
        norm, parts = (
            _norm(model),
            [*(["Attention()"] * bool(model["attention"])), *(["FeedForward()"] * bool(model["ff"]))],
        )
        inner = ", ".join(f"{norm}, {part}" for part in parts)
        return f"self.blocks = nn.ModuleList(nn.ModuleList([{inner}]) for _ in range({layers}))"
    if model["repeat"] == "listed":
        return f"self.blocks = nn.ModuleList([block := Block(), {'Block(), ' * (layers - 1)}block])"
    return f"self.blocks = nn.ModuleList(Block() for _ in range({layers}))"


def _run_blocks(model: Model) -> list[str]:
    if model["nested"]:
        return [
            "for parts in self.blocks:",
            "    for norm, part in zip(parts[::2], parts[1::2]):",
            "        x = x + part(norm(x))",
        ]
    over = "(*self.blocks, self.blocks[0])" if model["repeat"] == "twice" else "self.blocks"
    own = {
        None: "block(x)",
        "reentrant": "checkpoint(block, x, use_reentrant=True)",
        "non_reentrant": "checkpoint(block, x, use_reentrant=False)",
    }
    lines = [f"for block in {over}:", f"    x = {own[model['recompute']]}"]
    return lines + ["x = x * self.blocks[0].gain"] * (model["gain"] == "parent")


def block_patterns(model: Model) -> tuple[str, ...]:
    """Return the layout's blocks."""
    return ("blocks.*.*",) if model["nested"] else ("blocks.*",)


def table(model: Model, knobs: dict[str, Any]) -> dict[str, str]:
    """Return pattern -> style for tensor parallelism, as the guide says to write it.

    Args:
        model: what was drawn.
        knobs: ``regions`` to wrap attention and feed-forward in a region each; ``split`` to also split the first and
            the last layer.
    """
    found: dict[str, str] = {}
    if model["family"] == "tokens" and knobs["split"]:
        found["embed"] = "vocab"
    if model["positions"] == "learned":
        found["place"] = "sequence"
    prefix = {"mix": "blocks.*.mix", "ff": "blocks.*.ff", "norms": ["blocks.*.norm1", "blocks.*.norm2"]}
    if model["nested"]:
        order = [*(["mix"] * bool(model["attention"])), *(["ff"] * bool(model["ff"]))]
        prefix = {part: f"blocks.*.{2 * place + 1}" for place, part in enumerate(order)}
        prefix["norms"] = [f"blocks.*.{2 * place}" for place in range(len(order))]  # type: ignore[assignment]
    elif model["gain"] != "none":
        found["blocks.*"] = "sequence"
    if model["family"] == "tokens":
        names = [
            name for name, there in zip(prefix["norms"], (model["attention"], model["ff"])) if there or model["nested"]
        ]
        found |= dict.fromkeys(names, "sequence") | {"norm": "sequence"}
    found |= _attention_table(model, prefix["mix"], knobs["regions"]) if model["attention"] else {}
    found |= _feed_forward_table(model, str(prefix.get("ff")), knobs["regions"]) if model["ff"] else {}
    if knobs["split"] and model["tied"] != "functional":
        found["head"] = "head" if model["family"] == "tokens" else "colwise_gather"
    return found


def _attention_table(model: Model, name: Any, regions: bool) -> dict[str, str]:
    a, found = model["attention"], {name: "region"} if regions else {}
    found |= {f"{name}.c_attn": "packed_colwise:3"} if a["packed"] else {f"{name}.{part}": "colwise" for part in "qkv"}
    found[f"{name}.out"] = "rowwise"
    return found | ({f"{name}.{part}_norm": "grad_sum" for part in "qk"} if a["norm"] else {})


def _feed_forward_table(model: Model, name: str, regions: bool) -> dict[str, str]:
    kind = model["ff"]["kind"]
    if kind not in (
        "plain",
        "gated",
    ):  # the experts stay whole, and see this rank's positions under sequence parallelism
        own = (
            {"": "sequence", ".router": "sequence"}
            if kind != "listed"
            else {".router": "sequence", ".up.*": "sequence", ".down.*": "sequence"}
        )
        return {f"{name}{part}": style for part, style in own.items()}
    found = {name: "region"} if regions else {}
    found |= {f"{name}.gate": "colwise"} if kind == "gated" else {}
    return found | {f"{name}.up": "colwise", f"{name}.down": "rowwise"}


def heads(model: Model) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the layout's ``heads`` and ``copied_heads``."""
    a = model["attention"]
    if not a:
        return {}, ()
    name = "blocks.*.1" if model["nested"] else "blocks.*.mix"
    if a["packed"]:
        return {f"{name}.c_attn": a["heads"]}, ()
    return {f"{name}.q": a["heads"], f"{name}.k": a["kv"], f"{name}.v": a["kv"]}, (f"{name}.k", f"{name}.v")
