"""Rows of `models`: see `tests/remedies/rows.py`."""

from unittest import mock

import torch
import transformers
from torch import nn

from meshpar import ActivationCheckpoint, ContextParallel, ExpertParallel, FullyShard, ModelLayout, Plan, TensorParallel
from meshpar.models import GPT2Config, Transformer, TransformerConfig
from meshpar.models.huggingface import layout_for
from meshpar.models.huggingface.styles import FullPositions
from meshpar.passes.tensor.context import Context
from meshpar.testing import on_ranks
from meshpar.training.lora import LoRA, add_adapters
from tests.remedies.rows import Row, TwoRanks, in_one_process, run_together
from tests.remedies.test_forwards import exact
from tests.support.models_for_parity import VOCAB, huggingface
from tests.support.plans import problems

CP, EP = [ContextParallel(), FullyShard()], [ExpertParallel(), FullyShard()]
CP_MESH, EP_MESH, FSDP_MESH = "dp_shard=1,cp=2", "dp_shard=1,ep=2", "dp_shard=2"


def llama(**options):
    with torch.device("meta"):
        return huggingface("Llama", **options)


def checked(mesh, passes, module):
    return problems(mesh, passes, module, layout_for(module))


def on_fsdp(module):
    """The problems of a mesh without the axis that a model cannot have."""
    return checked(FSDP_MESH, [FullyShard()], module)


def switch():
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2, num_sparse_encoder_layers=2)
    with torch.device("meta"):
        return transformers.SwitchTransformersForConditionalGeneration(transformers.SwitchTransformersConfig(**sizes))


def t5():
    sizes = dict(vocab_size=32, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2)
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def reformer():
    config = transformers.ReformerConfig(
        attn_layers=["local", "local"], hidden_size=32, feed_forward_size=32, num_attention_heads=2,
        attention_head_size=16, axial_pos_embds=True, axial_pos_shape=[4, 8], axial_pos_embds_dim=[16, 16],
        max_position_embeddings=32, vocab_size=32, is_decoder=True,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.ReformerModelWithLMHead(config)


def mamba():
    with torch.device("meta"):
        return transformers.MambaForCausalLM(
            transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, use_cache=False)
        )


def stablelm():
    with torch.device("meta"):
        return huggingface("StableLm")


def turned(kind):
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0} if kind != "default" else None
    return llama(**({"rope_parameters": rope} if rope else {}))


def mixture(**options):
    with torch.device("meta"):
        return huggingface("Mixtral", num_local_experts=4, num_experts_per_tok=2, **options)


def length(count, **limits):
    model = Transformer(
        TransformerConfig(**dict(vocab_size=16, dim=16, layers=1, heads=2, hidden=16, max_positions=8) | limits)
    )
    return tuple(model(torch.zeros(1, count, dtype=torch.int64)).logits.shape)


def config(**options):
    return TransformerConfig(**dict(vocab_size=16, dim=32, layers=1, heads=4, hidden=16) | options).dim


def padded(*, mask, sequence_parallel=True):
    """The shape of the logits of a batch, with a mask of padding or without."""
    model = huggingface("Llama")
    context = Context(
        mesh=None,
        group=None,
        features=None,
        rank=0,
        root=model,
        sequence_parallel=sequence_parallel,
        loss_parallel=False,
        random=None,
        inputs=(),
    )
    FullPositions().install("model", model.model, context)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    return tuple(model(input_ids=ids, **({"attention_mask": torch.ones_like(ids)} if mask else {})).logits.shape)


def with_own_plan():
    """A model whose plan has a style that nobody knows."""
    model = llama()
    model._tp_plan = {**model.tp_plan, **dict.fromkeys(PROJECTIONS, "diagonal")}
    return model


PROJECTIONS = [f"model.layers.*.mlp.{name}_proj" for name in ("gate", "up", "down")]


def by_peft():
    import peft

    config = peft.LoraConfig(target_parameters=["mlp.experts.gate_up_proj"])
    return peft.get_peft_model(mixture(), config).base_model.model


def by_meshpar():
    model = mixture()
    return problems(EP_MESH, EP, model, add_adapters(model, LoRA(targets=(), parameters=("experts.gate_up_proj",))))


class OwnExpert(nn.Module):
    """Holds all experts in one matrix."""

    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(64, 32, device="meta"))


def in_one_matrix():
    model = llama()
    model.model.layers[0].mlp.joint = OwnExpert()
    return model


def generated(mesh, passes):
    torch.manual_seed(0)
    model = Plan(mesh, passes).apply(huggingface("Llama")).module
    return model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)


def of_one_process():
    torch.manual_seed(0)
    return huggingface("Llama").generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=0)


IDS = torch.arange(8)[None]
EMBEDDINGS = torch.linspace(-1, 1, 8 * 32).view(1, 8, 32)


def roberta():
    return huggingface("Roberta", is_decoder=True, max_position_embeddings=64, hidden_dropout_prob=0.0).eval()


def by_kinds(mesh, passes):
    """A model whose mask looks at a kind of each token."""
    kinds, make = torch.zeros(1, 8), transformers.masking_utils.create_causal_mask

    def mask(**given):
        return make(**given, and_mask_function=lambda batch, head, query, key: kinds[batch, key] == 0)

    with mock.patch("transformers.models.llama.modeling_llama.create_causal_mask", mask):
        return exact(lambda: huggingface("Llama"), mesh, passes)


def encoder():
    sizes = dict(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=32, num_heads=4, num_layers=2, dropout_rate=0.0)
    return transformers.T5EncoderModel(transformers.T5Config(**sizes))


ROWS = [
    Row("leave it whole: TensorParallel(styles={pattern: None})")
    .refuses(lambda: checked("tp=2", [TensorParallel()], with_own_plan()))
    .helps(
        "leave it whole: TensorParallel(styles={pattern: None})",
        lambda: checked("tp=2", [TensorParallel(styles=dict.fromkeys(PROJECTIONS))], with_own_plan()),
    ),
    Row("{} is below peft's own adapters, which add to whole weights")
    .refuses(lambda: checked(EP_MESH, EP, by_peft()))
    .helps("add adapters that ranks can divide by meshpar.training.add_adapters", by_meshpar)
    .helps("use a mesh without ep", lambda: on_fsdp(by_peft())),
    Row("{} holds its experts as {} in {}, and ExpertParallel divides parameters whose first dim counts experts")
    .refuses(lambda: checked(EP_MESH, EP, in_one_matrix()))
    .helps("use a mesh without ep", lambda: on_fsdp(in_one_matrix())),
    Row("generate makes one position after another, and each rank has a part of them", result=of_one_process, ranks=2)
    .refuses(lambda: generated(CP_MESH, CP))
    .helps("generate on a mesh without cp", lambda: generated(FSDP_MESH, [FullyShard()])),
    TwoRanks("a model that counts its positions itself is split by its input_ids, got none")
    .refuses(lambda: exact(roberta, CP_MESH, CP, given={"inputs_embeds": EMBEDDINGS}))
    .helps(
        "use a mesh without cp", lambda: exact(roberta, FSDP_MESH, [FullyShard()], given={"inputs_embeds": EMBEDDINGS})
    ),
    TwoRanks("the model's mask looks at more than positions (kinds of tokens, blocks)")
    .refuses(lambda: by_kinds(CP_MESH, CP))
    .helps("use a mesh without cp", lambda: by_kinds(FSDP_MESH, [FullyShard()])),
    TwoRanks("{} adds a bias of its own to its scores, of a rank's positions")
    .refuses(lambda: exact(encoder, CP_MESH, [ContextParallel(mixers=("encoder.block.0",)), FullyShard()]))
    .helps("use a mesh without cp", lambda: exact(encoder, FSDP_MESH, [FullyShard()])),
    Row("{} got an attention_mask; transformers applies it to the embeddings", result=(1, 8, VOCAB))
    .refuses(lambda: padded(mask=True))
    .helps("pack the batch instead of padding it", lambda: padded(mask=False))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: padded(mask=True, sequence_parallel=False)),
    Row("n_head ({}) does not divide n_embd ({})", result=32)
    .refuses(lambda: GPT2Config(n_embd=30, n_head=4))
    .helps("choose n_embd as a multiple of n_head", lambda: GPT2Config(n_embd=32, n_head=4).n_embd),
    Row("heads ({}) does not divide dim ({}); set head_dim, or change heads", result=32)
    .refuses(lambda: config(heads=5))
    .helps("set head_dim", lambda: config(heads=5, head_dim=8))
    .helps("change heads", lambda: config(heads=2)),
    Row("kv_heads ({}) does not divide heads ({})", result=32)
    .refuses(lambda: config(kv_heads=3))
    .helps("choose a divisor", lambda: config(kv_heads=2)),
    Row("experts is {} and qk_norm is False", result=32)
    .refuses(lambda: config(experts=4))
    .helps("set qk_norm=True", lambda: config(experts=4, qk_norm=True)),
    Row("the sequence has {} positions; expected at most {}", result=(8, 16))
    .refuses(lambda: length(9))
    .helps("shorten it", lambda: length(8)[1:]),
    Row("or raise the limit in the model's config", result=(1, 9, 16))
    .refuses(lambda: length(9))
    .helps("raise the limit in the model's config", lambda: length(9, max_positions=16)),
    Row("transformers gives {} no tp_plan")
    .refuses(lambda: checked("tp=2", [TensorParallel()], stablelm()))
    .helps("drop TensorParallel", lambda: on_fsdp(stablelm()))
    .helps(
        "pass a ModelLayout with a tensor table to apply",
        lambda: problems(
            "tp=2",
            [TensorParallel()],
            stablelm(),
            ModelLayout(
                blocks=("model.layers.*",),
                tensor={
                    "model.layers.*.mlp.gate_proj": "colwise",
                    "model.layers.*.mlp.up_proj": "colwise",
                    "model.layers.*.mlp.down_proj": "rowwise",
                },
            ),
        ),
    ),
    Row("{} adds a balance loss of each rank's own tokens to its loss")
    .refuses(lambda: on_fsdp(mixture(output_router_logits=True)))
    .helps(
        "set model.config.output_router_logits = False and training.balance_loss",
        lambda: on_fsdp(mixture(output_router_logits=False)),
    ),
    Row("{} has a key/value cache (config.use_cache)")
    .refuses(lambda: checked(FSDP_MESH, [ActivationCheckpoint(), FullyShard()], llama(use_cache=True)))
    .helps(
        "set model.config.use_cache = False",
        lambda: checked(FSDP_MESH, [ActivationCheckpoint(), FullyShard()], llama(use_cache=False)),
    ),
    Row("{} attends by {}, and ContextParallel serves 'sdpa' and 'eager'")
    .refuses(lambda: checked(CP_MESH, CP, llama(attn_implementation="flex_attention")))
    .helps(
        "build the model with attn_implementation='sdpa'",
        lambda: checked(CP_MESH, CP, llama(attn_implementation="sdpa")),
    ),
    Row("{} attends from one sequence to another, and ContextParallel splits one")
    .refuses(lambda: checked(CP_MESH, CP, t5()))
    .helps("use a mesh without cp", lambda: on_fsdp(t5())),
    Row("{} has embeddings of places for one length alone (axial_pos_embds)")
    .refuses(lambda: checked(CP_MESH, CP, reformer()))
    .helps("use a mesh without cp", lambda: on_fsdp(reformer())),
    Row("{} turns its positions by the longest that it sees")
    .refuses(lambda: checked(CP_MESH, CP, turned("dynamic")))
    .helps("use a mesh without cp", lambda: on_fsdp(turned("dynamic"))),
    Row("{} takes no position_ids, and ContextParallel gives each rank positions of its own")
    .refuses(lambda: checked(CP_MESH, CP, mamba()))
    .helps("use a mesh without cp", lambda: on_fsdp(mamba()))
    .helps(
        "name what mixes positions, ContextParallel(mixers=(...))",
        lambda: checked(CP_MESH, [ContextParallel(mixers=("backbone.layers.*.mixer",)), FullyShard()], mamba()),
    ),
    Row("{} is a list of modules, and each of their parameters is one expert's")
    .refuses(lambda: checked(EP_MESH, EP, switch()))
    .helps("use a mesh without ep", lambda: on_fsdp(switch()))
    .helps("stack them in one module that is called with", lambda: checked(EP_MESH, EP, mixture())),
    Row("{} has no experts to divide")
    .refuses(lambda: checked(EP_MESH, EP, llama()))
    .helps("drop ExpertParallel and ep from the mesh", lambda: checked("dp_shard=1", [FullyShard()], llama())),
]


test_the_printed_remedy_helps = in_one_process(ROWS)


@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks():
    run_together(ROWS, 2)
