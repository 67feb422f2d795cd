"""One rank of one peer of benchmarks/peers.py: ``python peer_ranks.py PEER PLAN FOLDER``, told over its standard input
what to do.

Every peer trains transformers' Llama of ``FOLDER/weights`` on ``FOLDER/tokens.bin`` with the same loss, optimizer and
clipping; what differs is who shards the model and who runs the loop.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

PLANS = {
    "FSDP, 2 ranks": {"dp_shard": 2},
    "FSDP, 4 ranks": {"dp_shard": 4},
    "HSDP, 2 x 2": {"dp_replicate": 2, "dp_shard": 2},
    "FSDP x TP, 2 x 2": {"dp_shard": 2, "tp": 2},
    "DDP, 2 ranks": {"dp_replicate": 2},
}
LENGTH, MICRO_BATCH, VOCABULARY, LR, CLIP, LOG_EVERY = 128, 4, 8192, 3e-4, 1.0, 10
BATCHES = 400


class Session:
    """What the controller and this rank say to each other, and the batches, which a peer's loop asks for one after the
    other.

    When the loop asks for a batch, everything that belongs to the step before is done; so the time of a turn is what
    the loop takes, however it is written.
    """

    def __init__(self, plan: str, folder: Path) -> None:
        self.plan, self.folder = PLANS[plan], folder
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.data_size = self.world // self.plan.get("tp", 1)
        self.data_rank = self.rank // self.plan.get("tp", 1)
        self.loss: Tensor = torch.zeros(())
        self.note = ""
        self.module: nn.Module | None = None
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print is no answer

    def turns(self, source: Iterator[Any] | None = None) -> Iterator[Any]:
        """Yield batches: of the next step, as often as the controller says. ``source``: where they come from, None:
        :meth:`data`.
        """
        batches = source if source is not None else self.data()
        yield next(batches)
        self.say(**self._held(), losses=[self._mean_loss()])
        while (line := sys.stdin.readline()) and (count := int(line)):
            losses = []
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                yield next(batches)
                losses.append(self.loss)
            seconds = time.perf_counter() - start
            self.say(seconds=seconds, losses=[self._mean_loss(loss) for loss in losses], rss=_peak_rss())
        self._out.flush()
        os._exit(0)

    def data(self) -> Iterator[dict[str, Tensor]]:
        """Yield this data rank's batches as a loop by hand reads them: straight from the mapped file, in order."""
        import numpy as np

        ids = np.memmap(self.folder / "tokens.bin", dtype=np.uint16, mode="r")
        for step in range(BATCHES):
            first = (step * self.data_size + self.data_rank) * MICRO_BATCH
            window = ids[first * LENGTH : (first + MICRO_BATCH) * LENGTH + 1].astype(np.int64)
            yield {
                "input_ids": torch.from_numpy(window[:-1].reshape(MICRO_BATCH, LENGTH)),
                "labels": torch.from_numpy(window[1:].reshape(MICRO_BATCH, LENGTH)),
            }

    def say(self, **what: Any) -> None:
        """Answer with a line of JSON."""
        self._out.write(json.dumps(what) + "\n")
        self._out.flush()

    def _mean_loss(self, loss: Tensor | None = None) -> float:
        """Return the mean over all ranks, the tensor-parallel ones of which have the same."""
        value = (self.loss if loss is None else loss).detach().clone().float()
        dist.all_reduce(value)
        return float(value) / self.world

    def _held(self) -> dict[str, Any]:
        """Tell what this rank holds: how many parameters are split, and their bytes here beside those of the whole."""
        assert self.module is not None
        parameters = list(self.module.parameters())
        split = [parameter for parameter in parameters if hasattr(parameter, "to_local")]
        here = sum(
            (parameter.to_local() if hasattr(parameter, "to_local") else parameter).nbytes for parameter in parameters
        )  # type: ignore[operator]
        return {
            "split": len(split),
            "parameters": len(parameters),
            "share": here / sum(parameter.numel() * 4 for parameter in parameters),
            "rss": _peak_rss(),
            "note": self.note,
        }


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean cross entropy of a batch, all of whose tokens count."""
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with one kernel a group; the groups are apart by mesh, which the kernels ask for."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        groups.setdefault((parameter.ndim >= 2, getattr(parameter, "device_mesh", None)), []).append(parameter)
    settings = [{"params": group, "weight_decay": 0.1 if decays else 0.0} for (decays, _), group in groups.items()]
    return torch.optim.AdamW(settings, lr=LR, betas=(0.9, 0.95), eps=1e-8, fused=True)


def clip(model: nn.Module) -> None:
    """Clip by the joint norm; torch's own function where it can, else by meshes (it refuses parameters of several)."""
    meshes: dict[Any, list[Tensor]] = {}
    for parameter in model.parameters():
        meshes.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    if len(meshes) == 1:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        return
    norms: list[Any] = [
        torch.nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in meshes.values()
    ]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in meshes.values():
        torch._foreach_mul_([_local(parameter.grad) for parameter in group], (CLIP / (total + 1e-6)).clamp(max=1.0))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def loop(
    session: Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    backward: Any = Tensor.backward,
    clips: Any = clip,
) -> None:
    """Train as one does by hand; every so many steps the ranks' loss is joined and read."""
    session.module = model
    model.train()
    seen: list[Tensor] = []
    for batch in session.turns():
        loss = loss_of(model, batch)
        backward(loss)
        clips(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        session.loss = loss.detach()
        seen.append(session.loss)
        if len(seen) == LOG_EVERY:
            mean = torch.stack(seen).mean()
            dist.all_reduce(mean)
            float(mean)
            seen.clear()


def meta_model(session: Session) -> Any:
    """Return the Llama on meta."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(session.folder / "weights")
    config.use_cache = False
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shard(model: Any, plan: dict[str, int], mesh: Any) -> None:
    """FSDP2, HSDP and FSDP x TP as a careful user of torch writes them."""
    from torch.distributed.fsdp import fully_shard

    if "tp" in plan:
        tensor_parallel(model, mesh["tp"])
    data = mesh[tuple(axis for axis in plan if axis != "tp")]
    for layer in model.model.layers:
        fully_shard(layer, mesh=data)
    fully_shard(model, mesh=data, reshard_after_forward=False)


def tensor_parallel(model: Any, mesh: Any) -> None:
    """Megatron's split, with one preparation of the input for q, k and v, and one for gate and up."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        parallelize_module,
    )

    whole = {"hidden_states": Replicate()}
    table: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for number in range(len(model.model.layers)):
        at, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        table[at] = PrepareModuleInput(
            input_kwarg_layouts=whole, desired_input_kwarg_layouts=whole, use_local_output=False
        )
        table[mlp] = PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=False
        )
        table |= {f"{at}.{name}_proj": ColwiseParallel() for name in "qkv"} | {f"{at}.o_proj": RowwiseParallel()}
        table |= {f"{mlp}.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {
            f"{mlp}.down_proj": RowwiseParallel()
        }
    parallelize_module(model, mesh, table)


@torch.no_grad()
def load(model: Any, folder: Path) -> None:
    """Fill an empty sharded model: each rank reads the file and keeps its parts; rotary tables are made anew."""
    from safetensors import safe_open
    from torch.distributed.tensor import DTensor, distribute_tensor

    with safe_open(folder / "weights" / "model.safetensors", "pt") as file:
        for name, parameter in model.named_parameters():
            value = file.get_tensor(name)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.attention_scaling = type(rotary).compute_default_rope_parameters(model.config)
    rotary.original_inv_freq = rotary.inv_freq


def by_hand(session: Session) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    model, sharded = meta_model(session), "dp_shard" in session.plan
    if sharded:
        mesh = init_device_mesh("cpu", tuple(session.plan.values()), mesh_dim_names=tuple(session.plan))
        shard(model, session.plan, mesh)
    model.to_empty(device="cpu")
    load(model, session.folder)
    loop(session, model if sharded else nn.parallel.DistributedDataParallel(model), optimizer_of(model))


def with_meshpar(session: Session) -> None:
    """All of meshpar's loop: its data, objective, schedule, metrics and stop signal, not only its sharding."""
    import meshpar
    from meshpar.training import (
        AdamWSettings,
        Batches,
        PackedTokens,
        Schedule,
        TokenFile,
        Trainer,
        TrainSettings,
        build_adamw,
    )

    with meshpar.distributed("cpu"):
        par = _applied(session)
        tokens = PackedTokens(TokenFile.open(session.folder / "tokens.bin"), LENGTH)
        data = Batches(tokens, micro_batch=MICRO_BATCH, data_rank=par.data_rank, data_size=par.data_size, seed=None)
        optimizer = build_adamw(par.module, AdamWSettings(lr=LR, weight_decay=0.1))
        settings = TrainSettings(steps=BATCHES, clip=CLIP, log_every=LOG_EVERY)
        schedule = Schedule(name="constant", lr=LR, steps=BATCHES)
        Trainer(par, Kept(session), Turns(session, data), optimizer, schedule, settings).run()  # type: ignore[arg-type]


def with_meshpar_by_hand(session: Session, guards: Any = "always") -> None:
    """The loop by hand around a module to which meshpar applied its plan."""
    import meshpar

    with meshpar.distributed("cpu"):
        par = _applied(session, guards)
        loop(session, par.module, optimizer_of(par.module), clips=lambda _: par.clip_grad_norm_(CLIP))


def _applied(session: Session, guards: Any = "always") -> Any:
    """Return the model with its weights, parallel."""
    import meshpar
    from meshpar.checkpoints import Safetensors
    from meshpar.models.huggingface import from_config

    passes: list[Any] = [meshpar.TensorParallel()] if "tp" in session.plan else []
    replicates, shards = "dp_replicate" in session.plan, "dp_shard" in session.plan
    passes.append(
        meshpar.HybridShard() if replicates and shards else meshpar.FullyShard() if shards else meshpar.Replicate()
    )
    mesh, weights = ",".join(f"{axis}={size}" for axis, size in session.plan.items()), session.folder / "weights"
    par = meshpar.Plan(mesh, passes, guards=guards).apply(from_config(str(weights)))
    par.materialize(weights=Safetensors(weights))
    session.module = par.module
    return par


class Turns:
    """meshpar's batches, handed out when the controller says."""

    def __init__(self, session: Session, data: Any) -> None:
        self._session, self._data = session, data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def __iter__(self) -> Iterator[Any]:
        return self._session.turns(iter(self._data))


class Kept:
    """meshpar's causal objective, whose loss the session keeps to compare."""

    def __init__(self, session: Session) -> None:
        from meshpar.training import CausalLM

        self._session, self._inner = session, CausalLM()
        self.tokens = self._inner.tokens

    def loss(self, model: nn.Module, batch: Any) -> Any:
        total, count, more = self._inner.loss(model, batch)
        self._session.loss = total.detach() / (MICRO_BATCH * LENGTH)
        return total, count, more


def with_accelerate(session: Session) -> None:
    """As its documentation says; on a CPU it then leaves the FSDP plugin aside, and takes no ParallelismConfig."""
    _accelerate(session)


def with_accelerate_forced(session: Session) -> None:
    """accelerate told that this is a kind of device on which it shards, so that its FSDP2 can be compared at all."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    _accelerate(session)


def _accelerate(session: Session) -> None:
    import transformers
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DistributedType

    plan = session.plan
    sizes = {
        "dp_shard_size": plan["dp_shard"],
        "dp_replicate_size": plan.get("dp_replicate", 1),
        "tp_size": plan.get("tp", 1),
    }
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
    )
    options: dict[str, Any] = {"fsdp_plugin": plugin}
    if len(plan) > 1 or PartialState(cpu=True).distributed_type != DistributedType.MULTI_CPU:
        options["parallelism_config"] = ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=True, **options)
    made = {}
    if "tp" in plan:
        made = {"tp_plan": "auto", "tp_size": plan["tp"], "device_mesh": accelerator.torch_device_mesh["tp"]}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        session.folder / "weights", dtype=torch.float32, use_cache=False, **made
    )
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    session.note = f"{accelerator.distributed_type.value}, {type(model).__name__}"
    parameters = list(model.parameters())
    loop(session, model, optimizer, accelerator.backward, lambda _: accelerator.clip_grad_norm_(parameters, CLIP))


def with_transformers(session: Session) -> None:
    import transformers
    from transformers.distributed import DistributedConfig

    dist.init_process_group("gloo")
    plan = session.plan
    config = DistributedConfig(
        fsdp_size=plan["dp_shard"], dp_replicate_size=plan.get("dp_replicate", 1), tp_size=plan.get("tp", 1)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        session.folder / "weights", distributed_config=config, dtype=torch.float32, use_cache=False
    )
    loop(session, model, optimizer_of(model))


def with_lightning(session: Session) -> None:
    import lightning
    from lightning.fabric.strategies import ModelParallelStrategy
    from torch.distributed.device_mesh import init_device_mesh

    plan = session.plan

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        # Its own mesh has a data and a tensor axis; a third is for the user to make.
        if "dp_replicate" in plan:
            mesh = init_device_mesh("cpu", tuple(plan.values()), mesh_dim_names=tuple(plan))
            shard(model, plan, mesh)
        else:
            names = {"dp_shard": "data_parallel", "tp": "tensor_parallel"}
            shard(model, plan, {**{axis: mesh[names[axis]] for axis in plan}, ("dp_shard",): mesh["data_parallel"]})
        return model

    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=session.data_size, tensor_parallel_size=plan.get("tp", 1)
    )
    fabric = lightning.Fabric(accelerator="cpu", devices=session.world, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = meta_model(session)
    wrapped = fabric.setup(model)
    load(wrapped.module, session.folder)
    optimizer = fabric.setup_optimizers(optimizer_of(wrapped))

    def clips(model: Any) -> None:
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)

    if "tp" in plan:
        session.note = "clipped by hand: its own clip_gradients fails on parameters of two meshes"
    loop(session, wrapped, optimizer, fabric.backward, clip if "tp" in plan else clips)


def with_torchtitan(session: Session) -> None:
    """torchtitan's own trainer on its own small Llama, to see whether it starts on this device at all."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.build()
    raise RuntimeError("torchtitan starts on this device: give it the benchmark's model")


PEERS: dict[str, Callable[[Session], None]] = {
    "torch by hand": by_hand,
    "torch by hand, once more": by_hand,
    "meshpar": with_meshpar,
    "meshpar, loop by hand": with_meshpar_by_hand,
    "meshpar, loop by hand, guards off": lambda session: with_meshpar_by_hand(session, "off"),
    "accelerate": with_accelerate,
    "accelerate, made to shard": with_accelerate_forced,
    "transformers DistributedConfig": with_transformers,
    "Lightning Fabric": with_lightning,
    "torchtitan": with_torchtitan,
}


def prepare(folder: Path) -> None:
    """Write the model that all train, and the tokens."""
    import numpy as np
    import transformers

    from meshpar.training import write_tokens

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder / "weights")
    ids = np.random.default_rng(0).zipf(1.3, BATCHES * MICRO_BATCH * 4 * LENGTH + 1) % (VOCABULARY - 1) + 1
    write_tokens(folder / "tokens.bin", [ids.astype(np.uint16)], vocab_size=VOCABULARY, eos_id=0)


def main(arguments: Sequence[str]) -> None:
    if arguments[0] == "prepare":
        prepare(Path(arguments[1]))
        return
    peer, plan, folder = arguments
    torch.set_num_threads(1)
    session = Session(plan, Path(folder))
    try:
        PEERS[peer](session)
    except Exception as error:  # noqa: BLE001  a peer that fails is a result, told with its error
        import traceback

        traceback.print_exc()
        session.say(error=f"{type(error).__name__}: {error}")
        os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
