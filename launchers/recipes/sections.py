"""The sections of a recipe: what may stand in each, and what it means."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, final

import torch
from pydantic import ConfigDict, Field

from meshpar.launchers.recipes.schema import Dtype, Section, section_of
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import RopeScaling, TransformerConfig
from meshpar.training.adamw_and_schedules import AdamWSettings, Scaling, Schedule
from meshpar.training.lora import LoRA
from meshpar.training.settings import Bound, Count, Every, Part, TrainSettings

_TransformerFields: Any = section_of(TransformerConfig)
_GPT2Fields: Any = section_of(GPT2Config)
_LoRAFields: Any = section_of(LoRA)
_AdamWFields: Any = section_of(AdamWSettings, partial=False)
_ScheduleFields: Any = section_of(Schedule, partial=False, without=("lr",))
_BESIDE = ("on_error", "silent_s", "grace_s")
_TrainFields: Any = section_of(TrainSettings, partial=False, without=("checkpoint_every", "seed", *_BESIDE))
_OTHERS = tuple(field.name for field in dataclasses.fields(TrainSettings) if field.name not in _BESIDE)
_BesideFields: Any = section_of(TrainSettings, partial=False, without=_OTHERS)


@final
class TransformerSection(_TransformerFields):
    """A :class:`meshpar.models.Transformer`: the fields of its config.

    Attributes:
        preset: name of a shape (``124m``, ``llama-8b``); other fields override its values.
    """

    kind: Literal["transformer"] = "transformer"
    preset: str | None = None
    weights: Path | None = None
    ignore: tuple[str, ...] = ()


@final
class GPT2Section(_GPT2Fields):
    """A :class:`meshpar.models.GPT2`: the fields of its config; the defaults are the 124M model."""

    kind: Literal["gpt2"] = "gpt2"
    weights: Path | None = None
    ignore: tuple[str, ...] = ()


@final
class HuggingFaceSection(Section):
    """A model of transformers.

    Attributes:
        config: contents of a ``config.json``, or a local folder that contains one; None: that of ``weights``.
        head: type of the head; None: the objective's (for packed text ``causal_lm``).
        weights: folder of safetensors, or of files of ``torch.save``, to start from; None: weights from the seed.
        new: patterns of parameters to initialise from the seed although weights are given: ``classifier``.
        ignore: patterns of tensors, or of modules, in the weights that the model does not have: ``lm_head``.
    """

    kind: Literal["huggingface"] = "huggingface"
    config: dict[str, Any] | str = Field(description="required without `weights`")
    head: Literal["causal_lm", "seq2seq_lm", "sequence_classification"] | None = None
    weights: Path | None = None
    new: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


class Own(Section):
    """A class of your own, and the keywords that it is called with: every other key of the section.

    Attributes:
        class_: import path of the class, ``package.module.Name``.
    """

    model_config = ConfigDict(extra="allow")

    class_: str = Field(alias="class")

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


@final
class OwnModel(Own):
    """A model of your own: ``{class: mypackage.Model, dim: 512}``."""

    kind: Literal["own"] = "own"
    weights: Path | None = None
    ignore: tuple[str, ...] = ()


Model = Annotated[TransformerSection | GPT2Section | HuggingFaceSection | OwnModel, Field(discriminator="kind")]


def model_config(section: Any, vocab_size: int) -> TransformerConfig | GPT2Config:
    """Return the shape of a ``transformer`` or ``gpt2`` section; the vocabulary is the data's where it names none."""
    no_shape = ("kind", "preset", "weights", "ignore")
    fields = {name: value for name, value in section.given().items() if name not in no_shape}
    if section.kind == "gpt2":
        return GPT2Config(**fields)
    fields |= {"rope_scaling": RopeScaling(**section.rope_scaling.given())} if section.rope_scaling is not None else {}
    if section.preset is not None:
        return TransformerConfig.preset(section.preset, **fields)
    return TransformerConfig(**{"vocab_size": rounded_vocabulary(vocab_size), **fields})


def rounded_vocabulary(size: int) -> int:
    return -(-size // 64) * 64


@final
class LoRASection(_LoRAFields):
    """Adapters on frozen weights, see :class:`meshpar.training.lora.LoRA`; the model needs ``weights``."""


@final
class TeacherSection(Section):
    """The frozen teacher of a distillation, on the same ranks as the student.

    Attributes:
        model: the teacher; requires ``weights``.
        mesh: axes and sizes; default: the student's.
        passes: passes with their options; None: the passes that the mesh's axes require.
        dtype: dtype of the teacher's parameters; None: float32.
    """

    model: Model
    mesh: str = ""
    passes: tuple[dict[str, dict[str, Any]], ...] = ()
    dtype: Dtype | None = None


@final
class MixSection(Section):
    """One source of a mixture; missing keys have the values of ``data``.

    Attributes:
        name: name of the source in metrics (``train/loss/<name>``); None: ``source`` and the position in the list.
        weight: share of the samples; only the ratios count.
        epochs: largest number of passes over the source; None: no limit.
        source, paths, field, separator, template, validation_paths: as in ``data``.
    """

    name: str | None = None
    weight: Annotated[float, Bound(gt=0)] = 1.0
    epochs: Count | None = None
    source: Literal["stdlib", "files", "jsonl", "csv", "parquet", "tokens", "chat"] = "files"
    paths: tuple[str, ...] = ()
    field: str | None = None
    separator: str | None = None
    template: str | None = None
    validation_paths: tuple[str, ...] = ()


@final
class DataSection(Section):
    """The data, and its division into batches.

    Attributes:
        source: ``stdlib`` (the source of Python's standard library; for pairs of texts: its functions and the first
            sentence of their docstrings; for labels: its lines and their modules), ``files`` (text), ``jsonl``,
            ``csv``, ``parquet`` (also Arrow files and folders of ``datasets``), ``chat`` (conversations in such tables,
            whose assistant tokens are the labels; or ``paths: [stdlib]``), ``tokens`` (a ``.bin`` and its ``.json``),
            ``mix``, or ``dataset``. Text may be compressed by gzip or zstd.
        mix: sources, interleaved by weight: ``[{source: files, paths: [code], weight: 0.7}, {source: chat, ...}]``.
        template: chat template of ``chat``: ``chatml``, ``llama3``, or a Jinja file; None: the tokenizer's own.
        dataset: a class of your own, ``{class: mypackage.Dataset, ...keywords}``: samples that need no tokenizer.
        validation_dataset: the class of the validation data, written like ``dataset``.
        paths: files, folders and globs; one token file for ``tokens``.
        field: key of the text in a line of JSON, or its column in CSV.
        target_field: key of the target text, if the objective requires pairs of texts.
        label_field: key of the label, if the objective requires labels.
        separator: text that separates the documents of a file; None: a file is one document.
        bad_rows: ``refuse``: a row of a table without text, JSON or conversation is an error; ``skip``: such rows are
            left out, and every start prints how many.
        tokenizer: ``bytes``, ``bpe`` (trained on the text) or a folder with a ``tokenizer.json``; None: that of
            ``model.weights``, else ``bytes`` for text, none for tokens.
        vocab_size: vocabulary size of a trained BPE.
        eos: token that ends a document, if the tokenizer's folder does not name one.
        documents: ``separate``: the documents of a packed sample do not attend to each other; ``joined``: they do.
        packing: ``cut``: cut documents where a sample ends; ``best_fit``: pad samples, cut no document that fits one.
        sequence_length: tokens of a sample; a text with a target or a label is cut to this length.
        target_length: tokens of a target text, which is cut to this length.
        micro_batch: samples of a data rank in one forward pass.
        accumulate: micro-batches of a data rank per step; with ``same_bits`` those of all data ranks.
        grow: larger batches later, ``{100000: 64, 500000: 128}``: samples read -> samples of a step of all ranks, a
            multiple of ``micro_batch`` times the data ranks.
        shuffle: draw the order of an epoch from the seed.
        validation_fraction: share of the documents that is reserved for validation.
        validation_paths: files of the validation data: text, or a token file.
        workers: number of processes that read ahead; 0: the training process reads.
        pin_memory: copy batches to page-locked memory; None: if there is an accelerator.
        persistent_workers: keep the workers from one epoch to the next.
        prefetch: number of batches that each worker reads ahead.
        cache: folder that caches tokenizers and tokens.
    """

    source: Literal["stdlib", "files", "jsonl", "csv", "parquet", "chat", "tokens", "mix", "dataset"] = "stdlib"
    mix: tuple[MixSection, ...] = ()
    template: str | None = None
    dataset: Own | None = None
    validation_dataset: Own | None = None
    paths: tuple[str, ...] = ()
    field: str = "text"
    target_field: str = "target"
    label_field: str = "label"
    separator: str | None = None
    bad_rows: Literal["refuse", "skip"] = "refuse"
    tokenizer: str | None = None
    vocab_size: Annotated[int, Bound(ge=257)] = 4096
    eos: str | None = None
    documents: Literal["separate", "joined"] = "separate"
    packing: Literal["cut", "best_fit"] = "cut"
    sequence_length: Count = 256
    target_length: Count = 64
    micro_batch: Count = 8
    accumulate: Count = 1
    grow: dict[Count, Count] = Field(default_factory=dict)
    shuffle: bool = True
    validation_fraction: Part = 0.0
    validation_paths: tuple[str, ...] = ()
    workers: Annotated[int, Bound(ge=0)] = 0
    pin_memory: bool | None = None
    persistent_workers: bool = True
    prefetch: Count = 2
    cache: str = "~/.cache/meshpar"

    @property
    def validates(self) -> bool:
        parts = any(part.validation_paths for part in self.mix)
        return bool(self.validation_paths or self.validation_fraction or self.validation_dataset or parts)


def mixed_names(data: DataSection) -> list[str]:
    """Return the name of each source of a mixture: the one that is written, or ``source`` and the place in the list."""
    return [part.name or f"{part.source}{number}" for number, part in enumerate(data.mix)]


class Rated(Section):
    """How learning rates follow from the number of ranks and from the parameter.

    Attributes:
        lr: peak learning rate of the schedule.
        scale_lr: growth of ``lr`` with the data ranks, see :func:`meshpar.training.adamw_and_schedules.scaled_rate`.
        rates: factors of the learning rate by pattern of modules or parameters: ``{embed: 0.1}``.
        layer_decay: factor of the rate of each block, from the last one down; see :func:`meshpar.training.scale_rates`.
    """

    scale_lr: Scaling = "none"
    rates: dict[str, Annotated[float, Bound(gt=0)]] = Field(default_factory=dict)
    layer_decay: Annotated[float, Bound(gt=0)] | None = None


@final
class OptimizerSection(_AdamWFields, Rated):
    """AdamW, see :class:`meshpar.training.adamw_and_schedules.AdamWSettings`."""

    name: Literal["adamw"] = "adamw"


@final
class OwnOptimizer(Rated, Own):
    """An optimizer of your own, called with parameters like torch's: ``{class: mypackage.Lion, lr: 1e-4}``."""

    name: Literal["own"] = "own"
    lr: Annotated[float, Bound(gt=0)]


Optimizer = Annotated[OptimizerSection | OwnOptimizer, Field(discriminator="name")]


@final
class ScheduleSection(_ScheduleFields):
    """The learning rate, whose peak is the optimizer's; see :class:`meshpar.training.adamw_and_schedules.Schedule`."""


@final
class TrainingSection(_TrainFields):
    """Length of the training and frequency of its events, see :class:`meshpar.training.settings.TrainSettings`.

    Attributes:
        objective: name of a plugin of the group ``meshpar.objectives``, or the import path of your own class.
        objective_options: options of the objective.
        loss_scaling: scale the loss for float16; None: if a pass computes in float16.
        tensorboard: write TensorBoard scalars.
        forecast: compare the first steps with their forecast: on an accelerator with a built-in profile, or with the
            profile named here (``h100``, or a file written by ``meshpar doctor --profile``).
    """

    objective: str = "causal_lm"
    objective_options: dict[str, Any] = Field(default_factory=dict)
    loss_scaling: bool | None = None
    tensorboard: bool = True
    forecast: bool | str = True


@final
class AverageSection(Section):
    """An average of the weights, see :class:`meshpar.state.averaging.Averaged`.

    Attributes:
        decay: weight of the previous average; null: 0.999, or `power`.
        power: instead of a decay, the power form of Karras et al. (arXiv 2312.02696): 16.97 and 6.94 are their widths
            0.05 and 0.10; 0 is the plain mean over all updates (stochastic weight averaging).
        every: steps from one update to the next.
        after: number of first steps that are not averaged.
        dtype: dtype of the average.
        device: ``cpu``: host memory, to which every update then copies the weights; null: beside the weights.
        buffers: average floating-point buffers, such as the statistics of batch norm, too.
    """

    decay: Part | None = None
    power: Annotated[float, Bound(ge=0)] | None = None
    every: Count = 1
    after: Annotated[int, Bound(ge=0)] = 0
    dtype: Dtype = torch.float32
    device: Literal["cpu"] | None = None
    buffers: bool = False


@final
class ValidationSection(_BesideFields):
    """The weights that are validated, and the bounds of validations and evaluations.

    Attributes:
        weights: ``trained``, the name of an average, or ``averaged`` for the only one; of a list, ``[ema, trained]``,
            the first gives ``val/loss`` and the evaluations, and each other ``val/NAME/loss``.
    """

    weights: str | tuple[str, ...] = "trained"


@final
class CheckpointSection(Section):
    """Frequency and retention of checkpoints, and the step from which a run starts.

    Attributes:
        every: steps between two checkpoints, or ``epoch``; None: only at the end.
        keep: number of newest checkpoints to keep; None: all.
        best: metric (``val/loss``; ``+name`` for the highest) whose best step is also kept.
        background: write during training; the optimizer waits only until the state is copied.
        staging: folder on each host's disk for files that wait for their upload, with ``background`` and an output in
            an object store; None: host memory.
        resume: ``auto`` resumes from the newest undamaged checkpoint in the output folder; ``never`` refuses a folder
            that has one; a path or a URL (of a step or a run) is used if the output folder has none.
        allow: settings that may differ from those of the resumed run: ``[data.documents]``.
    """

    every: Every = None
    keep: Count | None = 3
    best: str | None = None
    background: bool = False
    staging: str | None = None
    resume: str = "auto"
    allow: tuple[Literal["data.documents"], ...] = ()
