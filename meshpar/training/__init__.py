"""A training job's parts around the model: text, tokens, batches, objectives, schedules, metrics and the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshpar.process.imports import lazily

if TYPE_CHECKING:
    from meshpar.process.devices import peak_flops
    from meshpar.training.adamw_and_schedules import AdamWSettings, LossScaler, Schedule, build_adamw, scale_rates
    from meshpar.training.data import Batches, LoaderSettings
    from meshpar.training.elastic import Change, Replicas
    from meshpar.training.evaluation import Evaluation, Harness, MultipleChoice, Samples, generate, log_likelihoods
    from meshpar.training.examples import ExampleFile, ExampleSplit
    from meshpar.training.experts import ExpertLoad
    from meshpar.training.lighthouse import Lighthouse
    from meshpar.training.loop import Trainer
    from meshpar.training.lora import Adapters, LoRA, WithAdapters, add_adapters
    from meshpar.training.metrics import peak_memory
    from meshpar.training.objectives import CausalLM, Distillation, Objective, Seq2Seq, SequenceClassification, freeze
    from meshpar.training.samples import LabelledExamples, MixedSamples, PackedTokens, PairedExamples
    from meshpar.training.send_to_trackers import Trackers, facts_of
    from meshpar.training.settings import TrainSettings
    from meshpar.training.tokens import TokenFile, write_tokens
    from meshpar.training.trackers import TrackedRun, Tracker

__all__ = [
    "AdamWSettings", "Adapters", "Batches", "CausalLM", "Change", "Distillation", "Evaluation", "ExampleFile",
    "ExampleSplit", "ExpertLoad", "Harness", "LabelledExamples", "Lighthouse", "LoRA", "LoaderSettings", "LossScaler",
    "MixedSamples", "MultipleChoice", "Objective", "PackedTokens", "PairedExamples", "Replicas", "Samples", "Schedule",
    "Seq2Seq", "SequenceClassification", "TokenFile", "TrackedRun", "Tracker", "Trackers", "TrainSettings", "Trainer",
    "WithAdapters", "add_adapters", "build_adamw", "facts_of", "freeze", "generate", "log_likelihoods", "peak_flops",
    "peak_memory", "scale_rates", "write_tokens",
]  # fmt: skip

_HOMES = {
    "data": ("Batches", "LoaderSettings"), "elastic": ("Change", "Replicas"),
    "evaluation": ("Evaluation", "Harness", "MultipleChoice", "Samples", "generate", "log_likelihoods"),
    "examples": ("ExampleFile", "ExampleSplit"), "experts": ("ExpertLoad",), "lighthouse": ("Lighthouse",),
    "loop": ("Trainer",), "lora": ("Adapters", "LoRA", "WithAdapters", "add_adapters"),
    "metrics": ("peak_flops", "peak_memory"),
    "objectives": ("CausalLM", "Distillation", "Objective", "Seq2Seq", "SequenceClassification", "freeze"),
    "adamw_and_schedules": ("AdamWSettings", "LossScaler", "Schedule", "build_adamw", "scale_rates"),
    "samples": ("LabelledExamples", "MixedSamples", "PackedTokens", "PairedExamples"), "settings": ("TrainSettings",),
    "tokens": ("TokenFile", "write_tokens"), "send_to_trackers": ("Trackers", "facts_of"),
    "trackers": ("TrackedRun", "Tracker"),
}  # fmt: skip

__getattr__, __dir__ = lazily(__name__, _HOMES)
