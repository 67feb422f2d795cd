"""Programs that others published on accelerate: where each comes from, and the lines that put it on a mesh."""

import difflib
import hashlib
import os
import urllib.request
from dataclasses import dataclass
from pathlib import Path

ONE_PROCESS = {"tp=2": 1, "dp_shard=2": 2, "dp_shard=2,tp=2": 2, "dp_replicate=2,dp_shard=2": 4}
"""Mesh -> data ranks: the processes of plain accelerate that see the same samples in the same order."""
SHARDED = {mesh: count for mesh, count in ONE_PROCESS.items() if "tp" not in mesh}

ACCELERATE = ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83")
TRANSFORMERS = ("huggingface/transformers", "ae05b2ae619aa28fdfdcb8244009d585b7e1fed7")
DIFFUSERS = ("huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A program of another repository, and how it is run.

    Attributes:
        source: owner and name of the repository, and the commit.
        path: inside the repository.
        sha256: of its text.
        changes: text -> text with which it runs on a mesh; MESH stands for the mesh.
        repairs: text -> text that it needs in several processes of plain accelerate, too.
        arguments: of its command line; BATCH stands for the samples of one process, OUT for a folder.
        batch: the samples of all processes in a step.
        resume: the arguments by which it continues from the middle of its run; empty where it cannot.
        meshes: mesh -> data ranks.
    """

    source: tuple[str, str]
    path: str
    sha256: str
    changes: dict[str, str]
    repairs: dict[str, str]
    arguments: str
    batch: int = 8
    resume: str = ""
    meshes: dict[str, int]

    def read(self) -> str:
        """Return the text as published, from MESHPAR_PROGRAMS or by download; OSError where it cannot be had."""
        if self is PLAIN:
            return (Path(__file__).parent / self.path).read_text(encoding="utf-8")
        content = self.read_file(self.path)
        assert hashlib.sha256(content).hexdigest() == self.sha256, f"{self.path} is of another version"
        return content.decode()

    def read_file(self, path: str) -> bytes:
        """Return a file of the program's repository."""
        (repository, commit), local = self.source, os.environ.get("MESHPAR_PROGRAMS")
        if local is not None:
            return (Path(local) / repository / path).read_bytes()
        url = f"https://raw.githubusercontent.com/{repository}/{commit}/{path}"
        with urllib.request.urlopen(url, timeout=20) as response:
            return response.read()

    def repaired(self, text: str) -> str:
        """Return the text that runs on plain accelerate."""
        return replace_each(text, self.repairs)

    def on_mesh(self, text: str, mesh: str) -> str:
        """Return the text with meshpar under it."""
        return replace_each(self.repaired(text), {old: new.replace("MESH", mesh) for old, new in self.changes.items()})

    def lines_changed(self, text: str) -> int:
        """Return how many lines of the changed text the published one has not."""
        changed = difflib.ndiff(text.splitlines(), self.on_mesh(text, "dp_shard=2").splitlines())
        return sum(line.startswith("+ ") for line in changed)


def replace_each(text: str, changes: dict[str, str]) -> str:
    for old, new in changes.items():
        assert old in text, f"{old!r} is not in the program"
        text = text.replace(old, new)
    return text


def imported(names: str) -> dict[str, str]:
    return {f"from accelerate import {names}\n": f"from meshpar.integrations.accelerate import {names}\n"}


PROGRAMS = {
    "gradient_accumulation_for_autoregressive_models": Program(
        source=ACCELERATE,
        path="examples/by_feature/gradient_accumulation_for_autoregressive_models.py",
        sha256="61a8680c477a1f015ffb69c4d4169b50208449aea159eb97bddf1ea97ed08133",
        changes=imported("Accelerator, DistributedType")
        | {"accelerator = Accelerator(\n            ": 'accelerator = Accelerator(\n            plan="MESH", '},
        repairs={},
        arguments="--cpu --gradient_accumulation_steps=2 --per_device_batch_size=BATCH",
        batch=4,
        meshes=ONE_PROCESS,
    ),
    "nlp_example": Program(
        source=ACCELERATE,
        path="examples/nlp_example.py",
        sha256="199f1d6d2b38bf2bb5b6904fa6f93418d0dce715bb9be53ecb8f90699160f0d9",
        changes=imported("Accelerator, DistributedType") | {"Accelerator(cpu=": 'Accelerator(plan="MESH", cpu='},
        repairs={},
        arguments="--cpu",
        meshes=ONE_PROCESS,
    ),
    "run_clm_no_trainer": Program(
        source=TRANSFORMERS,
        path="examples/pytorch/language-modeling/run_clm_no_trainer.py",
        sha256="f4038a958f94409278a2deea7db73af1675f235621f70fd8839dde12e839d9fd",
        changes=imported("Accelerator, DistributedType")
        | {"Accelerator(gradient_accumulation_steps": 'Accelerator(plan="MESH", gradient_accumulation_steps'},
        # accelerate has no TPU any more
        repairs={"DistributedType.TPU": "DistributedType.XLA"},
        arguments="--train_file train.txt --validation_file validation.txt --model_name_or_path causal --block_size 16 "
        "--per_device_train_batch_size BATCH --per_device_eval_batch_size BATCH --num_train_epochs 2 --seed 7 "
        "--learning_rate 1e-2 --weight_decay 0.1 --num_warmup_steps 2 --lr_scheduler_type cosine "
        "--checkpointing_steps epoch --output_dir OUT",
        resume="--resume_from_checkpoint OUT/epoch_0",
        meshes=ONE_PROCESS,
    ),
    "run_glue_no_trainer": Program(
        source=TRANSFORMERS,
        path="examples/pytorch/text-classification/run_glue_no_trainer.py",
        sha256="207999be0c3d676ce20776de6df0bf3c1a8f7a99f65bbee6a6bf6b7d710b6259",
        changes=imported("Accelerator") | {"else Accelerator()": 'else Accelerator(plan="MESH")'},
        repairs={},
        arguments="--train_file train.json --validation_file validation.json --model_name_or_path classifier "
        "--per_device_train_batch_size BATCH --per_device_eval_batch_size BATCH --num_train_epochs 2 --seed 7 "
        "--learning_rate 5e-3 --checkpointing_steps epoch --output_dir OUT",
        resume="--resume_from_checkpoint OUT/epoch_0",
        meshes=ONE_PROCESS,
    ),
    "train_unconditional": Program(
        source=DIFFUSERS,
        path="examples/unconditional_image_generation/train_unconditional.py",
        sha256="0314b03f4fa7eed825389e7e3e97c87188c24b49d0974dfc7710d6a16325acfe",
        changes=imported("Accelerator, InitProcessGroupKwargs")
        | {
            "        kwargs_handlers=[kwargs],\n": '        kwargs_handlers=[kwargs], plan="MESH",\n',
            "        ema_model.to(accelerator.device)\n\n    # We need": "        ema_model = accelerator.prepare(ema_model)\n\n    # We need",
            "        if accelerator.is_main_process:\n            if epoch": "        if True:\n            if epoch",
        },
        # rank 0 alone saves its random state
        repairs={
            "                if accelerator.is_main_process:\n                    if global_step": "                if True:\n                    if global_step"
        },
        arguments="--train_data_dir images --model_config_name_or_path unet --resolution 8 --train_batch_size BATCH "
        "--num_epochs 2 --use_ema --checkpointing_steps 5 --save_images_epochs 1 --ddpm_num_steps 20 "
        "--ddpm_num_inference_steps 2 --eval_batch_size 2 --lr_warmup_steps 2 --learning_rate 1e-3 --output_dir OUT",
        resume="--resume_from_checkpoint checkpoint-5",
        meshes=SHARDED,
    ),
    "train_text_to_image_lora": Program(
        source=DIFFUSERS,
        path="examples/text_to_image/train_text_to_image_lora.py",
        sha256="6634df6b80bc428a4ed8229a3a7023dc8c7439dc2ed8e633dae2b12560a3958d",
        changes=imported("Accelerator")
        | {
            "        log_with=args.report_to,\n": '        log_with=args.report_to, plan="MESH",\n',
            "    accelerator.wait_for_everyone()\n    if accelerator.is_main_process:\n        unet": "    state = accelerator.get_state_dict(unet)\n    if accelerator.is_main_process:\n        unet",
            "(get_peft_model_state_dict(unwrapped_unet))": "(get_peft_model_state_dict(unwrapped_unet, state))",
        },
        repairs={
            "                    if accelerator.is_main_process:\n                        # _before_": "                    if True:\n                        # _before_"
        },
        arguments="--pretrained_model_name_or_path diffusion --train_data_dir images --resolution 16 "
        "--train_batch_size BATCH --num_train_epochs 2 --checkpointing_steps 5 --learning_rate 1e-2 --seed 7 "
        "--lr_warmup_steps 2 --output_dir OUT",
        resume="--resume_from_checkpoint checkpoint-5",
        meshes=SHARDED,
    ),
}

PLAIN = Program(
    source=("", ""),
    path="plain_accelerate.py",
    sha256="",
    changes=imported("Accelerator") | {"Accelerator(gradient": 'Accelerator(plan="MESH", gradient'},
    repairs={},
    arguments="--per_device_train_batch_size BATCH --output_dir OUT",
    resume="--resume_from_checkpoint OUT/epoch_0",
    meshes=ONE_PROCESS,
)
"""A program of the same shape that lies in this folder."""
