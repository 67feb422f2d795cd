"""What a training job needs around a model: text, tokens, batches, objectives, schedules, metrics and the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.lazy import lazily

if TYPE_CHECKING:
    from meshpar.training.data import Batches, LoaderSettings, PackedTokens
    from meshpar.training.distillation import Distillation
    from meshpar.training.examples import ExampleFile, ExampleSplit
    from meshpar.training.loop import Trainer
    from meshpar.training.metrics import peak_flops, peak_memory
    from meshpar.training.objectives import CausalLM, Objective, Seq2Seq, SequenceClassification
    from meshpar.training.optimizer import AdamWSettings, build_adamw
    from meshpar.training.padding import LabelledExamples
    from meshpar.training.schedule import Schedule
    from meshpar.training.settings import TrainSettings
    from meshpar.training.tokens import TokenFile, write_tokens

__all__ = [
    "AdamWSettings",
    "Batches",
    "CausalLM",
    "Distillation",
    "ExampleFile",
    "ExampleSplit",
    "LabelledExamples",
    "LoaderSettings",
    "Objective",
    "PackedTokens",
    "Schedule",
    "Seq2Seq",
    "SequenceClassification",
    "TokenFile",
    "TrainSettings",
    "Trainer",
    "build_adamw",
    "peak_flops",
    "peak_memory",
    "write_tokens",
]

_HOMES = {
    "AdamWSettings": "optimizer",
    "Batches": "data",
    "CausalLM": "objectives",
    "Distillation": "distillation",
    "ExampleFile": "examples",
    "ExampleSplit": "examples",
    "LabelledExamples": "padding",
    "LoaderSettings": "data",
    "Objective": "objectives",
    "PackedTokens": "data",
    "Schedule": "schedule",
    "Seq2Seq": "objectives",
    "SequenceClassification": "objectives",
    "TokenFile": "tokens",
    "TrainSettings": "settings",
    "Trainer": "loop",
    "build_adamw": "optimizer",
    "peak_flops": "metrics",
    "peak_memory": "metrics",
    "write_tokens": "tokens",
}

# The loop loads what a job uses, and no more.
__getattr__, __dir__ = lazily(__name__, _HOMES)
