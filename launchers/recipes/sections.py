"""The sections of a recipe: what may stand in each, and what it means."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import ConfigDict, Field

from meshpar.launchers.recipes.schema import Dtype, Section, section_of
from meshpar.models.gpt2 import GPT2Config
from meshpar.models.transformer_config import TransformerConfig
from meshpar.training.lora import LoRA
from meshpar.training.optimizer import AdamWSettings, Scaling, Schedule
from meshpar.training.settings import Bound, Count, Every, Part, TrainSettings

_TransformerFields: Any = section_of(TransformerConfig)
_GPT2Fields: Any = section_of(GPT2Config)
_LoRAFields: Any = section_of(LoRA)
_AdamWFields: Any = section_of(AdamWSettings, partial=False)
_ScheduleFields: Any = section_of(Schedule, partial=False, without=("lr",))
_TrainFields: Any = section_of(TrainSettings, partial=False, without=("checkpoint_every", "seed"))


@final
class TransformerSection(_TransformerFields):
    """A :class:`meshpar.models.Transformer`: the fields of its config.

    Attributes:
        preset: a shape by name (``124m``, ``llama-8b``), from which the other fields depart.
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
        config: the contents of a ``config.json``, or the folder that holds one; None: that of ``weights``. Nothing is downloaded.
        head: what stands on the model; None: what the objective needs (for packed text ``causal_lm``).
        weights: a folder of safetensors to start from; None: drawn from the seed.
        new: patterns of parameters that are drawn from the seed although there are weights: ``classifier.*`` on a pretrained encoder.
        ignore: patterns of tensors, or of modules, in the weights that the model has no use for: ``lm_head`` under a classifier.
    """

    kind: Literal["huggingface"] = "huggingface"
    config: dict[str, Any] | str = Field(description="required without `weights`")
    head: Literal["causal_lm", "seq2seq_lm", "sequence_classification"] | None = None
    weights: Path | None = None
    new: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


class Own(Section):
    """A class of the user's own, and the keywords that it is called with: every other key of the section.

    Attributes:
        class_: its import path, ``package.module.Name``.
    """

    model_config = ConfigDict(extra="allow")

    class_: str = Field(alias="class")

    @property
    def keywords(self) -> dict[str, Any]:
        """The keywords as written."""
        return dict(self.model_extra or {})


@final
class OwnModel(Own):
    """A model of the user's own: ``{class: mypackage.Model, dim: 512}``.

    Attributes:
        weights: a folder of safetensors to start from; None: drawn from the seed.
        ignore: patterns of tensors, or of modules, in the weights that the model has no use for.
    """

    kind: Literal["own"] = "own"
    weights: Path | None = None
    ignore: tuple[str, ...] = ()


Model = Annotated[TransformerSection | GPT2Section | HuggingFaceSection | OwnModel, Field(discriminator="kind")]


@final
class LoRASection(_LoRAFields):
    """Adapters beside frozen weights, see :class:`meshpar.training.lora.LoRA`; the model needs ``weights``."""


@final
class TeacherSection(Section):
    """The frozen teacher of a distillation, on the same ranks as the student.

    Attributes:
        model: the teacher; it needs ``weights`` to have anything to teach.
        mesh: axes and sizes; without them the student's.
        passes: name -> options; None: those that the mesh's axes call for.
        dtype: of its parameters; None: float32.
    """

    model: Model
    mesh: str = ""
    passes: tuple[dict[str, dict[str, Any]], ...] = ()
    dtype: Dtype | None = None


@final
class MixSection(Section):
    """One source of a mixture; keys that are not written are those of ``data``.

    Attributes:
        name: of the source, in metrics (``train/loss/<name>``); None: ``source`` and the place in the list.
        weight: its share of the samples; only the ratios count.
        epochs: how often it is read at most; None: again and again.
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
    """The data, and how it becomes batches.

    Attributes:
        source: ``stdlib`` (the source of Python's standard library; for pairs of texts its functions with the first sentence of their
            docstrings, for labels its lines with their modules), ``files`` (text), ``jsonl``, ``csv``, ``parquet`` (also Arrow files and
            folders of ``datasets``), ``chat`` (conversations in such tables, of which the assistant's tokens count; or ``paths:
            [stdlib]``), ``tokens`` (a ``.bin`` and its ``.json``), ``mix``, or ``dataset``. Text may be compressed by gzip or zstd.
        mix: several sources, interleaved by weight: ``[{source: files, paths: [code], weight: 0.7}, {source: chat, ...}]``.
        template: of ``chat``: ``chatml``, ``llama3``, or a file in Jinja; None: the tokenizer's own.
        dataset: a class of your own, ``{class: mypackage.Dataset, ...keywords}``: samples that need no tokenizer.
        validation_dataset: the same, to validate on.
        paths: files, folders and globs; one token file for ``tokens``.
        field: the key of the text in a line of JSON, or its column in CSV.
        target_field: the key of the target text, where the objective wants pairs of texts.
        label_field: the key of the label, where it wants labels.
        separator: text that divides a file into documents; None: a file is one document.
        tokenizer: ``bytes``, ``bpe`` (trained on the text) or a folder with a ``tokenizer.json``; None: that of ``model.weights``, else
            ``bytes`` for text, none for tokens.
        vocab_size: of a trained BPE.
        eos: the token that ends a document, where the tokenizer's folder does not say.
        documents: ``separate``: the documents of a packed sample do not see each other; ``joined``: a sample is one text.
        packing: ``cut`` documents where a sample ends, or ``best_fit``: cut none that fits a sample, and pad.
        sequence_length: tokens of a sample; a text with a target or a label is cut to it.
        target_length: tokens of a target text, which is cut to it.
        micro_batch: samples of a data rank in one forward pass.
        accumulate: micro-batches in a step.
        shuffle: whether an epoch's order is drawn from the seed.
        validation_fraction: part of the documents that is kept for validation.
        validation_paths: text (or a token file) of its own to validate on.
        workers: processes that read ahead; 0: the training process itself.
        pin_memory: copy batches to page-locked memory; None: where there is an accelerator.
        persistent_workers: keep the workers from one epoch to the next.
        prefetch: batches that each worker keeps ready.
        cache: where tokenizers and tokens are kept.
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
    tokenizer: str | None = None
    vocab_size: Annotated[int, Bound(ge=257)] = 4096
    eos: str | None = None
    documents: Literal["separate", "joined"] = "separate"
    packing: Literal["cut", "best_fit"] = "cut"
    sequence_length: Count = 256
    target_length: Count = 64
    micro_batch: Count = 8
    accumulate: Count = 1
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
        """Whether there is anything to validate on."""
        own = self.validation_paths or self.validation_fraction or self.validation_dataset
        return bool(own) or any(each.validation_paths for each in self.mix)


def mixed_names(data: DataSection) -> list[str]:
    """Return the name of each source of a mixture: the one that is written, or ``source`` and the place in the list."""
    return [each.name or f"{each.source}{place}" for place, each in enumerate(data.mix)]


@final
class OptimizerSection(_AdamWFields):
    """AdamW, see :class:`meshpar.training.optimizer.AdamWSettings`.

    Attributes:
        lr: the peak that the schedule reaches.
        scale_lr: how ``lr`` grows with the number of data ranks, see :func:`meshpar.training.optimizer.scaled_rate`.
    """

    name: Literal["adamw"] = "adamw"
    scale_lr: Scaling = "none"


@final
class OwnOptimizer(Own):
    """An optimizer of the user's own: ``{class: mypackage.Lion, lr: 1e-4, weight_decay: 0.1}``, called with parameters as torch's are.

    Attributes:
        lr: the peak that the schedule reaches.
        scale_lr: how ``lr`` grows with the number of data ranks, see :func:`meshpar.training.optimizer.scaled_rate`.
    """

    name: Literal["own"] = "own"
    lr: Annotated[float, Bound(gt=0)]
    scale_lr: Scaling = "none"


Optimizer = Annotated[OptimizerSection | OwnOptimizer, Field(discriminator="name")]


@final
class ScheduleSection(_ScheduleFields):
    """The learning rate over the run, see :class:`meshpar.training.optimizer.Schedule`; its peak is the optimizer's ``lr``.

    Attributes:
        steps: the length that it is laid out for, where the run stops before or goes on after; None: the run's.
        warmup_ratio: the warm-up as a part of the length, in place of ``warmup_steps``.
    """

    steps: Count | None = None
    warmup_ratio: Part = 0.0


@final
class TrainingSection(_TrainFields):
    """How long, and what how often, see :class:`meshpar.training.settings.TrainSettings`.

    Attributes:
        objective: a plugin of the group ``meshpar.objectives``, or the import path of a class of your own.
        objective_options: its options.
        loss_scaling: for float16; None: where a pass computes in float16.
        tensorboard: write TensorBoard scalars.
        forecast: make the job's forecast beside its first steps and say how they compare: on an accelerator with a profile of its own,
            or with the profile named here (``h100``, or a file that ``meshpar doctor --profile`` wrote).
    """

    objective: str = "causal_lm"
    objective_options: dict[str, Any] = Field(default_factory=dict)
    loss_scaling: bool | None = None
    tensorboard: bool = True
    forecast: bool | str = True


@final
class CheckpointSection(Section):
    """When checkpoints are written, which stay, and what a run starts from.

    Attributes:
        every: steps between two, ``epoch``, or None: at the end only.
        keep: how many of the newest stay; None: all.
        best: a metric (``val/loss``; ``+name`` for the highest) whose best step stays as well.
        background: write beside training; the optimizer is held back only while the state is copied.
        staging: with ``background`` and an output in an object store: a folder on each host's own disk for files on the way there, instead
            of host memory.
        resume: ``auto`` continues from the newest undamaged one in the output folder; ``never`` refuses a folder that holds any;
            a path or a URL (of a step or a run) is taken where the output folder holds none.
        allow: settings that may differ from those of the run that is resumed: ``[data.documents]``.
    """

    every: Every = None
    keep: Count | None = 3
    best: str | None = None
    background: bool = False
    staging: str | None = None
    resume: str = "auto"
    allow: tuple[Literal["data.documents"], ...] = ()
