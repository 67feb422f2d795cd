"""transformers' Trainer on any mesh: torchrun --nproc-per-node 2 examples/trainer_on_mesh.py dp_shard=2

Another mesh is another argument: dp_replicate=2  tp=2  dp_shard=2,tp=2 (on 4 processes). The losses stay the same.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import meshpar
from meshpar.integrations.transformers import on_mesh

LENGTH, GLOBAL_BATCH, STEPS = 64, 8, 20


class Bytes(torch.utils.data.Dataset):
    """Parts of a file, of LENGTH bytes each."""

    def __init__(self, path: Path) -> None:
        text = torch.tensor(list(path.read_bytes()))
        self.parts = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.parts[index], "labels": self.parts[index]}


def main(mesh: str, run: Path) -> None:
    with meshpar.distributed("cpu"):  # torchrun's environment, or one process
        data_ranks = 2 if "dp" in mesh else 1
        arguments = TrainingArguments(
            output_dir=str(run),
            per_device_train_batch_size=GLOBAL_BATCH // data_ranks,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=10,
            save_steps=10,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        torch.manual_seed(0)
        sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4))
        library = Path(sysconfig.get_paths()["stdlib"])
        plan = meshpar.Plan(mesh, meshpar.passes_for(mesh))
        trainer = on_mesh(Trainer)(model, arguments, train_dataset=Bytes(library / "typing.py"), plan=plan)
        trainer.train(resume_from_checkpoint=(run / "checkpoint-10").is_dir())
        trainer.save_model(str(run / "export"))


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "", Path(sys.argv[2] if len(sys.argv) > 2 else "runs/trainer_on_mesh"))
