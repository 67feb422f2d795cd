"""Recipes: every fault at once, with file, line, path and the nearest name; resolved text reads back."""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from meshpar import ContextParallel, FullyShard, HybridShard, RecipeError, Replicate, TensorParallel
from meshpar.core.patterns import nearest, suggestion
from meshpar.launchers.jobs import build, checks, datasets
from meshpar.launchers.recipes.loading import load_recipe, resolve, shipped
from meshpar.launchers.recipes.recipe import Recipe, make_passes, received
from meshpar.launchers.recipes.yamlfile import parse_document
from meshpar.training.tokens import write_tokens

SMALL = """\
name: small
mesh: dp_shard=2
model: {dim: 32, layers: 2, heads: 2, hidden: 48}
data:
  source: stdlib
optimizer:
  lr: 1e-3
training:
  steps: 5
"""


def read(text: str = SMALL, *overrides: str, trust: bool = False) -> Recipe:
    document = parse_document(text, "small.yaml")
    from meshpar.launchers.recipes.yamlfile import apply_overrides

    apply_overrides(document, overrides)
    return resolve(document, trust=trust)


def problems(text: str = SMALL, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as raised:
        read(text, *overrides)
    head, *lines = str(raised.value).split("\n  ")
    assert head == f"{len(lines)} problem{'s' if len(lines) > 1 else ''} in this recipe"
    return lines


def only(text: str = SMALL, *overrides: str) -> str:
    found = problems(text, *overrides)
    assert len(found) == 1, found
    return found[0]


def test_numbers_are_those_of_yaml_1_2() -> None:
    recipe = read(SMALL, "optimizer.lr=3e-4", "optimizer.eps=1E-8", "training.clip=.inf", "name=12:30:00")
    values = (recipe.optimizer.lr, recipe.optimizer.eps, recipe.training.clip, recipe.name)
    assert values == (3e-4, 1e-8, float("inf"), "12:30:00")


def test_the_resolved_text_reads_back_as_the_same_recipe() -> None:
    passes = "passes=[ActivationCheckpoint, FullyShard: {param_dtype: bf16}]"
    recipe = read(SMALL, passes, "model.rope_scaling.factor=4", "optimizer.eps=1e-8")
    text = recipe.to_yaml()
    again = resolve(parse_document(text, "recipe.yaml"))
    assert again == recipe
    assert again.to_yaml() == text
    assert "param_dtype: bfloat16" in text
    assert "kv_heads" not in text  # what was not written stays the shape's own business


@pytest.mark.parametrize("more", [(), ("model={class: tests.support.models_for_parity.Masked, vocab: 300}",)])
def test_ranks_receive_the_recipe_that_the_launcher_read_and_name_its_lines(more: tuple[str, ...]) -> None:
    recipe = read(SMALL, "passes=[FullyShard: {param_dtype: bf16}]", "optimizer.eps=1e-8", *more)
    recipe = recipe.noting(["a note"])
    there = received(json.loads(json.dumps(recipe.sent())))
    assert there == recipe and there.notes == ("a note",)
    for field in ("model", "training.steps", "optimizer.eps", "passes.0", "mesh"):
        assert there.where(field) == recipe.where(field)


def test_every_fault_is_told_at_once_with_line_path_and_nearest_name() -> None:
    text = """\
mesh: dp_shad=2=
model: {dim: 64.5, layrs: 2, rope_scaling: {facto: 3}}
data: {source: stdlb, micro_batch: 0}
training: {steps: "5", validate_every: 0.5}
optimiser: {lr: 1e-3}
optimizer: {betas: [0.9]}
passes:
- FullShard
- FullyShard:
    param_dtype: float17
    offlod: cpu
"""
    assert problems(text) == [
        "small.yaml:2: model.dim: expected an integer or null, got 64.5",
        "small.yaml:2: model.rope_scaling.facto: unknown key; nearest: factor",
        "small.yaml:2: model.layrs: unknown key; nearest: layers",
        "small.yaml:3: data.source: expected 'stdlib', 'files', 'jsonl', 'csv', 'parquet', 'chat', 'tokens', 'mix' or "
        "'dataset', got 'stdlb'",
        "small.yaml:3: data.micro_batch: must be greater than or equal to 1, got 0",
        "small.yaml:6: optimizer.betas: expected a list of 2, got [0.9]",
        "small.yaml:4: training.steps: expected an integer or null, got '5'",
        "small.yaml:4: training.validate_every: expected an integer, 'epoch' or null, got 0.5",
        "small.yaml:5: optimiser: unknown key; nearest: optimizer",
        "small.yaml:1: mesh: cannot read 'dp_shad=2=' in mesh 'dp_shad=2='; write it like "
        "'dp_replicate=2,dp_shard=-1,tp=4'",
        "small.yaml:8: passes.0: no pass 'FullShard' is installed; nearest: FullyShard",
        "small.yaml:10: passes.1.FullyShard.param_dtype: expected a dtype such as float32, bfloat16 or float16, got "
        "'float17'",
        "small.yaml:11: passes.1.FullyShard.offlod: unknown key; nearest: offload",
    ]


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("wieght", ("weight", "height", "bias"), ["weight"]),
        ("FullShard", ("FullyShard", "HybridShard"), ["FullyShard"]),
        ("log_evry", ("log_every", "validate_every", "steps"), ["log_every"]),
        ("num_layerz", ("num_hidden_layers", "num_attention_heads"), ["num_hidden_layers"]),
        ("seq_len", ("target_length", "sequence_length"), ["sequence_length"]),
        ("gradient_clipping", ("clip", "steps", "accumulate"), ["clip"]),
        ("layers.3.up", ("layers.0.mlp.up", "layers.1.mlp.up", "layers.0.mlp.down"), ["layers.*.mlp.up"]),
        ("batch_size", ("vocab_size", "paths", "cache"), []),
        ("max_length", ("mix", "field", "eos"), []),
        ("epochs", ("steps", "patience", "dtype"), []),
        ("lr", ("tp", "ln", "cp"), []),
    ],
)
def test_a_name_that_is_suggested_is_near(name: str, known: tuple[str, ...], near: list[str]) -> None:
    assert nearest(name, known) == near
    listed = suggestion(name, [f"other{number}" for number in range(9)])
    expected = f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(sorted(known))}"
    assert suggestion(name, known) == expected
    assert listed == "none of the 9 names is near"


def test_overrides_name_themselves_in_messages() -> None:
    for override, message in {
        "training.stps=5": "training.stps: unknown key; nearest: steps",
        "optimiser.lr=1": "optimiser: unknown key; nearest: optimizer",
        "data.workers=-1": "data.workers: must be greater than or equal to 0, got -1",
    }.items():
        assert only(SMALL, override).startswith(f"override '{override}': {message}")


def test_overrides_that_cannot_be_applied_are_all_told() -> None:
    with pytest.raises(RecipeError) as raised:
        read(SMALL, "x", "model.dim.a=3", "training.steps=[")
    named = [line.partition(": ")[0] for line in str(raised.value).splitlines()]
    assert named == ["override 'x'", "override 'model.dim.a=3'", "override 'training.steps=['"]


def test_overrides_reach_into_passes_by_place_and_by_name() -> None:
    text = SMALL + "passes: [ActivationCheckpoint, FullyShard]\n"
    recipe = read(text, "passes.FullyShard.offload=cpu", "passes.0.ActivationCheckpoint.every=2")
    assert recipe.passes == ({"ActivationCheckpoint": {"every": 2}}, {"FullyShard": {"offload": "cpu"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "small.yaml is not a recipe: expected fields (model: ..., data: ...), got list"),
        ("name: [\n", "small.yaml is not YAML"),
    ],
)
def test_text_that_is_no_recipe_is_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        read(text)


def test_fields_of_other_models_are_their_own() -> None:
    assert "model.n_layr: unknown key; nearest: n_layer" in only(SMALL, "model={kind: gpt2, n_layr: 2}")
    assert "passes.0: expected a pass's name, or one name with its options" in only(SMALL, "passes=[{FullyShard: 3}]")
    assert "data.paths: tokens are one .bin file, got 2" in only(SMALL, "data={source: tokens, paths: [a.bin, b.bin]}")
    tokens = "data={source: tokens, paths: [a.bin], tokenizer: bpe}"
    assert "data.tokenizer: the input is tokens already" in only(SMALL, tokens)


def test_balance_of_experts_that_a_model_lacks_does_not_start() -> None:
    (found,) = checks.check_job(read(SMALL, "training.balance_rate=0.01"), 2)
    message = "training: balance_rate=0.01 moves a bias (E,) beside each router, and Transformer has 0 for 0"
    assert found.startswith(f"small.yaml:8: {message}")
    balanced = read(SMALL, "model={experts: 4, shared_experts: 1, qk_norm: true}", "training.balance_rate=0.01")
    assert checks.check_job(balanced, 2) == []


def test_weights_bring_their_config_and_tokenizer(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    text = f"model: {{kind: huggingface, weights: {folder}}}\ntraining: {{steps: 1}}\n"
    (tmp_path / "tune.yaml").write_text(text)
    with pytest.raises(RecipeError, match=r"config: no config.json in .*published"):
        load_recipe(tmp_path / "tune.yaml", ["data.tokenizer=bytes"])
    message = r"weights: a/name does not exist; expected a folder \(nothing is downloaded: `hf download"
    with pytest.raises(RecipeError, match=message) as error:
        load_recipe(tmp_path / "tune.yaml", ["model.weights=a/name"])
    assert str(error.value).startswith("1 problem ")
    there = load_recipe(tmp_path / "tune.yaml", ["model.weights=/models/name"], disks=False)
    assert there.model.config == "/models/name", "on another machine"
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    message = r"data.tokenizer: missing: .*published has no tokenizer.json; name the folder"
    with pytest.raises(RecipeError, match=message):
        load_recipe(tmp_path / "tune.yaml")
    assert load_recipe(tmp_path / "tune.yaml", ["data.tokenizer=bytes"]).data.tokenizer == "bytes"
    (folder / "tokenizer.json").write_text("{}")
    recipe = load_recipe(tmp_path / "tune.yaml")
    assert (recipe.model.config, recipe.data.tokenizer) == (str(folder), str(folder))


def test_an_unknown_recipe_names_those_that_come_with_meshpar() -> None:
    with pytest.raises(RecipeError, match=r"no recipe file quikstart.*nearest: quickstart"):
        load_recipe("quikstart")


@pytest.mark.parametrize(
    ("data", "more", "message"),
    [
        ("{mix: [{source: files}]}", [], "data.mix: source: files with paths []; expected none for stdlib"),
        (
            "{mix: [{source: stdlib}], paths: [x]}",
            [],
            "paths, validation_paths and template are written in each source",
        ),
        ("{source: mix}", [], "data.mix: a mixture is written mix:"),
        ("{mix: [{source: stdlib, weight: 0}]}", [], "must be greater than 0, got 0"),
        ("{mix: [{source: stdlib, weight: .inf}]}", [], "data.mix: expected weights above 0 and finite"),
        ("{mix: [{source: stdlib, weight: 1e-99}, {source: stdlib}]}", [], "expected weights above 0 and finite"),
        ("{mix: [{source: stdlib, name: stdlib1}, {source: stdlib}]}", [], "share a name in ['stdlib1', 'stdlib1']"),
        ("{mix: [{source: stdlib}]}", ["training.epochs=1"], "a mixture ends with the epochs of its sources"),
        ("{mix: [{source: stdlib}]}", ["checkpoint.every=epoch"], "a mixture with a source that repeats"),
        ("{mix: [{source: stdlib, wieght: 1}]}", [], "unknown key; nearest: weight"),
        (
            "{source: chat, paths: [stdlib]}",
            [],
            "tokenizer bytes has no chat template; write template: chatml or llama3",
        ),
        ("{mix: [{source: jsonl, paths: [x.json]}]}", [], "source: jsonl reads files ending in .jsonl, got 'x.json'"),
        ("{source: parquet, paths: [x.txt]}", [], "parquet reads files ending in .parquet or .arrow, got 'x.txt'"),
        ("{source: stdlib, eos: x}", [], "data.eos: tokenizer bytes ends a document with its own token"),
        ("{source: stdlib, template: chatml}", [], "a chat template requires source: chat"),
        ("{mix: [{source: stdlib}]}", ["training.objective=seq2seq"], "from pairs, and a mixture contains texts"),
    ],
)
def test_mixtures_and_packing_that_cannot_be_are_refused(data: str, more: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        read(SMALL, f"data={data}", *more)
    assert message in str(caught.value)


def test_a_mixture_reads_back_and_is_checked(tmp_path: Path) -> None:
    mix = (
        "data={mix: [{source: stdlib, weight: 2, epochs: 3}, {name: b, source: chat, paths: [stdlib], template: "
        "llama3}], tokenizer: %s}"
    )
    recipe = read(SMALL, mix % "bpe")
    assert read(recipe.to_yaml()) == received(recipe.sent()) == recipe
    assert checks.check_job(recipe, 2) == []
    write_tokens(tmp_path / "a.bin", [[1] * 600], vocab_size=300, eos_id=0)
    (tmp_path / "b.txt").write_text("text " * 200)
    two = f"data={{mix: [{{source: tokens, paths: [{tmp_path}/a.bin]}}, {{source: files, paths: [{tmp_path}/b.txt]}}]}}"
    found = "\n".join(checks.check_job(read(SMALL, two), 2))
    message = "the sources of a mix are of different tokenizers: tokens0 has vocab_size 300 and eos_id 0, files1 has"
    assert f"data.mix: {message}" in found
    (found,) = checks.check_job(read(SMALL, mix % "bytes"), 2)
    assert re.search(r"data.mix.1.paths: the tokenizer has no token <\|begin_of_text\|>, .*write tokenizer: bpe", found)


def test_a_file_that_cannot_be_read_is_one_problem_at_its_own_field(tmp_path, monkeypatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("text " * 2000)

    def read_others(refused: str, path: Path) -> Iterator[str]:
        if path.name == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return iter(["text "])

    for field, name in (("paths", "a.txt"), ("validation_paths", "b.txt")):
        recipe = read(SMALL, f"data={{source: files, paths: [{tmp_path}/a.txt], validation_paths: [{tmp_path}/b.txt]}}")
        with monkeypatch.context() as patch:
            patch.setattr("meshpar.training.text._read", functools.partial(read_others, name))
            (found,) = checks.check_job(recipe, 2)
        assert re.fullmatch(rf".*: data.{field}: {tmp_path}/{name} cannot be read: .*Permission denied.*", found)


def test_a_model_without_position_ids_is_refused_before_a_rank_starts() -> None:
    own = "model={class: tests.support.models_for_parity.Masked, vocab: 300}"
    (found,) = checks.check_job(read(SMALL, "mesh=''", own, trust=True), 1)
    assert re.search(r"data.documents: Masked takes no position_ids.*; write data.documents: joined", found)
    assert checks.check_job(read(SMALL, "mesh=''", own, "data.documents=joined", trust=True), 1) == []


def test_the_recipes_that_come_with_meshpar_are_right() -> None:
    assert {"quickstart", "gpt2", "hsdp_tp"} <= set(shipped())
    for name in shipped():
        recipe = load_recipe(name)
        assert received(json.loads(json.dumps(recipe.sent()))) == recipe
    gpt2 = load_recipe("gpt2")
    model = build.build_model(gpt2, datasets.vocab_size_of(gpt2))
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    large = load_recipe("hsdp_tp", ["data.tokenizer=bytes", "data.source=stdlib", "data.paths=[]"])
    assert checks.check_job(large, 64) == []


@pytest.mark.parametrize(
    ("mesh", "passes"),
    [
        ("", []),
        ("dp_shard=2", [FullyShard()]),
        ("dp_replicate=2", [Replicate()]),
        ("dp_replicate=2,dp_shard=2,tp=2", [TensorParallel(), HybridShard()]),
        ("auto", [HybridShard()]),
        ("auto,tp=2", [TensorParallel(), HybridShard()]),
        ("auto,cp=2,tp=2", [ContextParallel(), TensorParallel(), HybridShard()]),
    ],
)
def test_without_passes_the_axes_call_for_them(mesh: str, passes: list[Any]) -> None:
    assert make_passes(read(SMALL, f"mesh='{mesh}'").passes) == passes


def test_guards_reach_the_plans_of_model_and_teacher() -> None:
    teacher = "teacher={model: {kind: gpt2, weights: nowhere}, mesh: dp_shard=2, passes: [FullyShard]}"
    recipe = read(SMALL, "guards=first", teacher, "training.objective=distillation")
    assert build.plan_of(recipe).guards == build.teacher_plan_of(recipe).guards == "first"
    assert (
        build.plan_of(read(SMALL)).guards == "always"
        and build.plan_of(read(SMALL, "guards=off", "preflight=off")).guards == "off"
    )
    with pytest.raises(RecipeError, match="guards: expected 'always', 'first' or 'off'"):
        read(SMALL, "guards=never")


def test_options_become_the_values_that_the_pass_takes() -> None:
    options = "param_dtype: bfloat16, reshard_after_forward: 4, blocks: [layers.*], prefetch_forward: 2"
    (made,) = make_passes(read(SMALL, f"passes=[FullyShard: {{{options}}}]").passes)
    values = {"reshard_after_forward": 4, "blocks": ("layers.*",), "prefetch_forward": 2}
    assert made == FullyShard(param_dtype=torch.bfloat16, **values)


def test_yaml_of_another_trainer_is_refused_with_the_page_that_lists_its_keys() -> None:
    text = "max_steps: 20\nnum_train_epochs: 1\nfsdp_config: {backward_prefetch: backward_pre}\n"
    with pytest.raises(RecipeError) as refused:
        read(SMALL + text)
    said = str(refused.value)
    assert "num_train_epochs: this is a key of transformers' Trainer or of accelerate" in said
    assert said.count("docs/migrate.md") == 1 and "max_steps: unknown key" in said
    for old, remedy in (
        ("passes: [fsdp: {sharding_strategy: FULL_SHARD}]\n", "no pass 'fsdp' is installed"),
        ("passes: [FullyShard: {limit_all_gathers: true}]\n", "limit_all_gathers: unknown key"),
    ):
        assert remedy in only(SMALL + old)


def test_a_recipe_is_written_as_it_is_resolved(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    text = load_recipe(str(path), ["training.steps=7"]).to_yaml()
    again = resolve(parse_document(text, str(path)))
    assert again == load_recipe(path, ["training.steps=7"]) and "- FullyShard: {}" in text


def test_the_vocabulary_comes_from_the_data_unless_a_shape_has_its_own(tmp_path: Path) -> None:
    def vocab(*overrides: str) -> int:
        recipe = read(SMALL, *overrides)
        return build.build_model(recipe, datasets.vocab_size_of(recipe)).config.vocab_size  # type: ignore[union-attr, return-value]

    assert vocab() == 320  # 257 bytes and the end, up to a multiple of 64
    assert vocab("data.tokenizer=bpe", "data.vocab_size=1000") == 1024
    assert vocab("model.vocab_size=300") == 300
    assert vocab("model={preset: 124m}") == 50_304
    assert vocab("model={kind: gpt2}") == 50_257


def test_check_finds_every_problem_of_plan_data_and_objective() -> None:
    absent = "data={source: files, paths: [/nowhere/*.txt]}"
    recipe = read(SMALL, "mesh=dp_shard=2,tp=3", absent, "training.objective=cusal_lm")
    found = checks.check_job(recipe, 6)
    assert any("/nowhere/*.txt" in line for line in found)
    assert any("2 heads, which tp=3 does not divide" in line for line in found)
    assert any("no objective 'cusal_lm' is installed" in line for line in found)
