"""Rows of `exact`: see `tests/remedies/rows.py`."""

import pytest
import torch
import torch.nn.functional as F

from meshpar import ActivationCheckpoint, FullyShard, TensorParallel, token_loss
from meshpar.testing import on_ranks
from tests.passes.positions.test_parallel import Counted
from tests.remedies import exact_loops as loops
from tests.remedies import exact_models as models
from tests.remedies.exact_loops import exact, fsdp, refused, tp
from tests.remedies.rows import Loop, Row, Tested, TwoRanks, in_one_process, run_together
from tests.support import loop_habits as habits
from tests.support.loop_sides import Net, adamw, sgd
from tests.support.models_for_parity import transformer

FSDP = "FSDP"

ROWS = [
    Tested("cannot be compared with its split in the memory that is free")
    .by("tests/trials/test_split.py::test_a_block_that_is_out_of_memory_is_tried_on_fewer_samples_or_refused")
    .helps("pass Plan(..., verify=False)", "verify=False"),
    Tested("a plain tensor met a parameter")
    .by("tests/guards/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact")
    .helps("place the plain one", "check_habits(mesh")
    .helps("compute with the whole of the other", "check_habits(mesh"),
    Tested("change the whole tensor on every rank, whole = par.whole(tensor)")
    .by("tests/guards/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact")
    .helps("change the whole tensor on every rank", "check_habits(mesh"),
    Tested("compute with the whole of it, par.whole(tensor)")
    .by("tests/guards/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact")
    .helps("compute with the whole of it", "check_habits(mesh"),
    Tested("each applied plan has a mesh of its own")
    .by("tests/guards/test_operators.py::test_a_teacher_that_is_moved_by_hand_is_refused_and_exact_as_the_message_says")
    .helps("place one as the other, par.like(tensor, other)", "teacher.like(target, source)"),
    Tested("gradients are averaged over data ranks already")
    .by("tests/guards/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact")
    .helps("leave the collective out", "check_habits(mesh")
    .helps("take par.whole(tensor)", "check_habits(mesh"),
    Tested("use par.whole(tensor).numpy() on every rank")
    .by("tests/guards/test_operators.py::test_a_mask_noise_or_a_row_is_told_and_what_is_told_is_exact")
    .helps("use par.whole(tensor).numpy() on every rank", "check_habits(mesh"),
    Tested("make such tensors under torch.no_grad()")
    .by("tests/step/test_calls.py::test_a_cache_made_in_inference_mode_is_written_or_the_error_says_what_helps")
    .helps("make such tensors under torch.no_grad(), and call the module there", "par.module(x, writable)"),
    Tested("ive collectives of your own in a loss or a hook group=par.data_group")
    .by("tests/step/test_calls.py::test_values_gathered_over_the_data_group_are_exact_beside_tp")
    .helps(
        "give collectives of your own in a loss or a hook group=par.data_group", "next_ones(features, par.data_group)"
    )
    .helps(
        "Give collectives of your own in a loss or a hook group=par.data_group", "next_ones(features, par.data_group)"
    ),
    Tested("data ranks give par.gather different numbers of samples")
    .by("tests/parallelized/test_ranks.py::test_uneven_parts_are_refused_on_every_rank_unless_asked_for")
    .helps("drop the incomplete last batch", "drop_last = values[:2]")
    .helps("pass uneven=True", "uneven=True"),
    Tested("was built for")
    .by(
        "tests/training/test_lora.py::test_adapters_that_peft_builds_after_apply_are_refused_and_what_the_message_says_is_exact"
    )
    .helps("build it before plan.apply", "apply(model, add_adapters(model, settings))")
    .helps("where no pass splits layers, peft.get_peft_model", "[FullyShard()]).apply(peft_model(seeded()).double())"),
    Tested("calibrate observers")
    .by("tests/passes/test_traps.py::test_calibrated_observers_of_quantization_train_as_in_one_process")
    .helps("calibrate observers", "net.apply(quant.disable_observer)"),
    Tested("build it again with the change, apply a plan to it, and load")
    .by("tests/exact/test_after_apply.py::test_a_model_that_is_built_again_with_a_change_as_a_message_says_is_exact")
    .helps("to change a model that was trained, build it again", "again.load_state_dict(fitting, strict=False)"),
    Tested("starts from different losses")
    .by(
        "tests/trials/test_split.py::test_a_loss_that_takes_in_what_a_rank_has_a_part_of_is_refused_and_exact_where_it_is_whole"
    )
    .helps("leave that module and the layers in it whole", "TensorParallel(styles=whole)"),
    Tested("use a mesh without tp, on which they equal one process's")
    .by(
        "tests/step/test_cycle.py::test_a_forward_mode_derivative_equals_one_process_without_tensor_parallelism_and_is_refused_with_its_reason_under_it"
    )
    .helps("use a mesh without tp", 'applied(Net(), "dp_shard=2", [FullyShard()])'),
    Tested("use ActivationCheckpoint(mode='full'), or leave such blocks out")
    .by("tests/step/test_cycle.py::test_selective_recomputation_of_a_compiled_block_that_changes_buffers_is_explained")
    .helps("use ActivationCheckpoint(mode='full')", 'ActivationCheckpoint(mode="full"), compiled')
    .helps("leave such blocks out: Compile(blocks=...)", 'Compile(backend="aot_eager", blocks=("blocks.*.ff",))'),
    Tested("make it a block of its own too")
    .by(
        "tests/step/test_cycle.py::test_a_part_that_is_called_from_outside_of_its_block_is_named_and_exact_as_a_block_of_its_own"
    )
    .helps("make it a block of its own too", 'blocks=("blocks.*", "blocks.0.ff")')
    .helps("{}(blocks=())", "blocks=()"),
    Loop("Adafactor's {} has shape {}, and of a parameter of shape {} it has {}")
    .refuses(refused(FSDP, loops.factored("other")))
    .helps("restore the optimizer by CheckpointManager", exact(FSDP, loops.factored("restored")))
    .helps("load the state of an Adafactor of this model", exact(FSDP, loops.factored("loaded"))),
    TwoRanks("ranks of {} have different random states, and the model draws random numbers")
    .refuses(lambda: loops.dropped(lambda par: torch.manual_seed(torch.distributed.get_rank())))
    .helps("call par.manual_seed(seed) before training", lambda: loops.dropped(lambda par: par.manual_seed(3))),
    Loop("data ranks train different parameters in {}: requires_grad differs")
    .refuses(refused(FSDP, loops.frozen(alike=False)))
    .helps("set it alike on every rank", exact(FSDP, loops.frozen(alike=True))),
    Loop("ranks have different numbers of micro-batches in one step")
    .refuses(refused(FSDP, loops.micro_batches(rest=True)))
    .helps("pass the same number to par.accumulate on every rank", exact(FSDP, loops.micro_batches(rest=False))),
    Loop("ranks step {} with different settings, this rank with {}")
    .refuses(refused(FSDP, loops.rate_of_loss(mean=False)))
    .helps("set them alike on every rank", exact(FSDP, loops.rate_of_loss(mean=True))),
    Loop("data ranks hold different values of the buffers {}")
    .refuses(refused(FSDP, loops.running_mean()))
    .helps("sum their input over the ranks (par.data_sum)", exact(FSDP, loops.running_mean(summed=True)))
    .helps("register the buffers with persistent=False", exact(FSDP, loops.running_mean(persistent=False, used=False))),
    Loop("call the module, or a method by par.register_method(name)")
    .refuses(refused(FSDP, loops.scored("method")))
    .helps("call the module", exact(FSDP, loops.scored("module")))
    .helps("a method by par.register_method(name)", exact(FSDP, loops.scored("registered"))),
    Loop("its weights are gathered with those of a larger unit; {}, or name it")
    .refuses(refused(FSDP, loops.scored("method")))
    .helps("name it in the pass's blocks", exact(fsdp(blocks=("blocks.*", "embed", "head")), loops.scored("method"))),
    Row("it would treat this rank's positions as the whole sequence; {}, or use", result=loops.sequence, ranks=2)
    .refuses(lambda: loops.sequence(sequence_parallel=True))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: loops.sequence(sequence_parallel=False)),
    Loop("weights changed between a forward and its backward")
    .refuses(refused(FSDP, loops.stale("kept")))
    .helps("run the backward before the change", exact(FSDP, loops.stale("backward first")))
    .helps("the forward again after it", exact(FSDP, loops.stale("forward again"))),
    Loop("requires_grad of {} changed between a forward and its backward")
    .refuses(refused(FSDP, loops.turned("between")))
    .helps("freeze and unfreeze parameters before the forward", exact(FSDP, loops.turned("before")))
    .helps("after the backward", exact(FSDP, loops.turned("after"))),
    Loop("{} was written between a forward and the end of its backward")
    .refuses(refused(FSDP, loops.written("between")))
    .helps("write after the backward", exact(FSDP, loops.written("after"), loops.written("averaged"))),
    Loop("whose weights data parallelism has freed; add the losses")
    .refuses(refused(FSDP, loops.two_losses("kept")))
    .helps("add the losses and run one backward", exact(FSDP, loops.two_losses("one backward")))
    .helps("run the forward again", exact(FSDP, loops.two_losses("forward again"))),
    Loop("an error ended an earlier backward, and the forward of this one came before it")
    .refuses(refused(FSDP, loops.failed("earlier")))
    .helps(
        "clear the gradients by optimizer.zero_grad() and run the forward again", exact(FSDP, loops.failed("cleared"))
    ),
    Loop("whose saved results selective recomputation has freed")
    .refuses(refused(tp(ActivationCheckpoint(mode="selective")), loops.two_losses("kept")))
    .helps(
        "add the losses and run one backward",
        exact(tp(ActivationCheckpoint(mode="selective")), loops.two_losses("one backward")),
    )
    .helps(
        "use ActivationCheckpoint(mode='full')", exact(tp(ActivationCheckpoint(mode="full")), loops.two_losses("kept"))
    ),
    Loop("a gradient of a gradient (create_graph=True) needs weights")
    .refuses(refused(FSDP, habits.gradient_penalty))
    .helps("use a mesh of tensor parallelism alone", exact("TP", habits.gradient_penalty))
    .helps("compute the penalty from finite differences", exact(FSDP, loops.differences())),
    Loop("{} has no method {}; give the name of one")
    .refuses(refused(FSDP, loops.named_method("scores")))
    .helps("give the name of one", exact(FSDP, loops.named_method("score"))),
    Loop("have different gradients for parameters that each keeps whole")
    .refuses(refused("TP", loops.dithered(same=False)))
    .helps("where it draws random numbers, draw them from a generator", exact("TP", loops.dithered(same=True))),
    TwoRanks("has no values yet; call par.materialize(seed=...) or (weights=...) before the first forward")
    .refuses(loops.valued)
    .helps(
        "call par.materialize(seed=...) or (weights=...)", lambda: loops.valued(seed=0) and loops.valued(weights=True)
    ),
    Loop("{} was written in a backward, by a hook")
    .refuses(refused(FSDP, loops.written_by_hook(inside=True)))
    .helps("write after it, outside of the module's calls", exact(FSDP, loops.written_by_hook(inside=False))),
    Loop("take the count from the tensor: x.unflatten(-1, (-1, head_dim))")
    .refuses(refused("TP", models.heads("view")))
    .helps("take the count from the tensor", exact("TP", models.heads("unflatten"), models.heads("chunk"))),
    Row(
        "use TensorParallel(sequence_parallel=False), or batches without attention_mask",
        result=lambda: models.padded(True),
        ranks=2,
    )
    .refuses(lambda: models.padded(True, TensorParallel(sequence_parallel=True)))
    .helps("use TensorParallel(sequence_parallel=False)", lambda: models.padded(True, TensorParallel()))
    .helps(
        "batches without attention_mask and without packed documents",
        lambda: models.padded(False, TensorParallel(sequence_parallel=True)),
    ),
    Row("give it the style 'rowwise' in the tensor-parallel table ('{}': 'rowwise')")
    .refuses(lambda: models.layers(_1=None))
    .helps("give it the style 'rowwise' in the tensor-parallel table", lambda: models.layers(_1="rowwise"))
    .helps("leave the layer before it whole", lambda: models.layers(_0=None, _1=None)),
    Loop("call the module that owns the weight (x = self.head(x)) instead of using its weight directly")
    .refuses(refused("TP", models.tied(calls=False)))
    .helps("call the module that owns the weight", exact("TP", models.tied(calls=True)))
    .helps(
        "take that module out of the tensor-parallel table", exact(tp(styles={"head": None}), models.tied(calls=False))
    ),
    Loop("call the block that owns it (x = self.block(x))")
    .refuses(refused(FSDP, models.linears(calls=False)))
    .helps("call the block that owns it", exact(FSDP, models.linears(calls=True)))
    .helps("call par.module from outside", exact(FSDP, models.logits_of("module")))
    .helps(
        "let a method of the model's own enter by par.register_method(name)",
        exact(FSDP, models.logits_of("registered")),
    ),
    TwoRanks("cast the input to the parameter's dtype, or keep cast_forward_inputs=True")
    .refuses(lambda: models.narrow(cast_forward_inputs=False))
    .helps("cast the input to the parameter's dtype", lambda: models.narrow(cast=True, cast_forward_inputs=False))
    .helps("keep cast_forward_inputs=True", models.narrow)
    .helps(
        "list the module in layout.fp32", lambda: models.narrow(fp32=("layers.*", "head"), cast_forward_inputs=False)
    ),
    Loop("write x = x + y instead of x += y, and F.relu(x) instead of F.relu(x, inplace=True)")
    .refuses(refused(FSDP, models.changing(lambda x: x.add_(x))))
    .helps(
        "write x = x + y instead of x += y",
        exact(FSDP, models.changing(lambda x: x + x), models.changing(lambda x: F.relu(x))),
    ),
    Loop("put such code on the module before plan.apply (torch.nn.utils.parametrizations)")
    .refuses(refused(FSDP, models.normalized("assigned")))
    .helps("put such code on the module before plan.apply", exact(FSDP, models.normalized("parametrized")))
    .helps("keep what a loss reads in a list or a dict", exact(FSDP, models.normalized("kept"))),
    Loop("run the same number of steps on every rank, and look at the first error")
    .refuses(
        lambda: models.explained(RuntimeError("[../third_party/gloo] Connection closed by peer [127.0.0.1]:30151"))
    )
    .helps("run the same number of steps on every rank", exact(FSDP, loops.trained()))
    .helps("cut the data to the same length, DistributedSampler(..., drop_last=True)", exact(FSDP, loops.dealt())),
    Row(
        "run the model without the plan: if it fails in the same way, the model is at fault",
        result=models.grouped,
        ranks=2,
    )
    .refuses(lambda: models.grouped({"0.q": "colwise", "0.k": "colwise_gather", "0.out": "rowwise"}))
    .helps("run the model without the plan", models.grouped)
    .helps(
        "otherwise correct the styles", lambda: models.grouped({"0.q": "colwise", "0.k": "colwise", "0.out": "rowwise"})
    )
    .helps("keep the layers there whole (the style None)", lambda: models.grouped({})),
    Loop("{} changes its buffer {} in forward, which recomputation would do twice")
    .refuses(refused(("dp_shard=2", [ActivationCheckpoint(), FullyShard()]), loops.trained(loops.CountsFirst)))
    .helps(
        "leave such blocks out: ActivationCheckpoint(blocks=...)",
        exact(
            ("dp_shard=2", [ActivationCheckpoint(blocks=("blocks.1",)), FullyShard()]), loops.trained(loops.CountsFirst)
        ),
    ),
    Loop("but their backward starts from different losses")
    .refuses(refused("TP", loops.random_loss(alike=False)))
    .helps("draw random numbers of the loss alike on these ranks", exact("TP", loops.random_loss(alike=True))),
    Loop("holds {} parameters from before plan.apply")
    .refuses(refused(FSDP, loops.built(first=True)))
    .helps("build the optimizer after plan.apply, from par.module.parameters()", exact(FSDP, loops.built(first=False))),
    Loop("which torch cannot do with parameters that are split unevenly over ranks")
    .refuses(refused(FSDP, loops.stepped_by(loops.lbfgs)))
    .helps("use Replicate()", exact("Replicate", loops.stepped_by(loops.lbfgs)))
    .helps("another optimizer, such as AdamW or SGD", exact(FSDP, loops.stepped_by(adamw), loops.stepped_by(sgd))),
    Loop("which torch before 2.13 cannot do with parameters")
    .refuses(refused("TP", loops.before_2_13(loops.lbfgs)))
    .helps("use a mesh without tp", exact("Replicate", loops.before_2_13(loops.lbfgs)))
    .helps("another optimizer, such as AdamW or SGD", exact("TP", loops.before_2_13(adamw), loops.before_2_13(sgd))),
    Row("which torch cannot do with parameters on several meshes", result=0.0, ranks=2)
    .refuses(lambda: loops.experts(loops.lbfgs))
    .helps("use a mesh without ep", lambda: loops.experts(loops.lbfgs, "dp_shard=2") - loops.experts(loops.lbfgs, ""))
    .helps(
        "another optimizer, such as AdamW or SGD",
        lambda: max(abs(loops.experts(kind) - loops.experts(kind, "")) for kind in (adamw, sgd)),
    ),
    Row(
        "the module got labels, but each rank has only a part of the positions",
        result=lambda: float(token_loss(models.seeded(transformer)(input_ids=loops.IDS).logits, loops.IDS)),
        ranks=2,
    )
    .refuses(lambda: models.labelled(inside=True))
    .helps("compute the sum of the loss from the logits and aligned labels", lambda: models.labelled(inside=False)),
    TwoRanks("the module got {} positions, and par.split gave parts of {}")
    .refuses(lambda: models.evaluated_whole(split=False))
    .helps("pass every batch through par.split, also in evaluation", lambda: models.evaluated_whole(split=True)),
    TwoRanks("every rank got the same positions, which are not this rank's part")
    .refuses(lambda: models.logits(transformer, split=False, position_ids=loops.IDS))
    .helps("call the model with par.split(batch)", lambda: models.logits(transformer)),
    TwoRanks("use a mesh without cp for this model, or name the module")
    .refuses(lambda: models.logits(models.Summing, position_ids=loops.IDS))
    .helps(
        "use a mesh without cp for this model",
        lambda: models.logits(models.Summing, position_ids=loops.IDS, mesh="dp_shard=2"),
    )
    .helps(
        "name the module, ContextParallel(mixers=(...))",
        lambda: models.logits(models.Summing, position_ids=loops.IDS, mixers=("embed.1",)),
    ),
    TwoRanks("{} computes other values without position_ids than with the 0, 1, 2, ... of par.split")
    .refuses(lambda: models.logits(Counted))
    .helps(
        "put its positions into the batch as position_ids", lambda: models.logits(Counted, position_ids=loops.IDS + 2)
    )
    .helps("use a mesh without cp", lambda: models.logits(Counted, mesh="dp_shard=2")),
    Loop("the model recomputes a block by torch.utils.checkpoint(use_reentrant=True)")
    .refuses(refused(FSDP, loops.two_forwards(habits.Reentrant)))
    .helps("use checkpoint(..., use_reentrant=False)", exact(FSDP, loops.two_forwards(habits.Checkpointed)))
    .helps(
        "ActivationCheckpoint() in the plan",
        exact(("dp_shard=2", [ActivationCheckpoint(), FullyShard()]), loops.two_forwards(Net)),
    ),
    Loop("a post-accumulate-grad hook ran for a parameter that no rank used in this backward")
    .refuses(refused(FSDP, loops.doubled(used=False, hooked=True)))
    .helps("use every parameter in each step", exact(FSDP, loops.doubled(used=True, hooked=True)))
    .helps("change gradients between backward and step instead", exact(FSDP, loops.doubled(used=False, hooked=False))),
    Loop("a hook on a parameter gets the gradient of one backward, but here several are added up")
    .refuses(refused(FSDP, loops.squashed("hooked")))
    .helps("change gradients between the last backward and the step instead", exact(FSDP, loops.squashed("between")))
    .helps("run one backward a step", exact(FSDP, loops.squashed("one backward"))),
    Loop("an error ended a backward, so the gradients are incomplete")
    .refuses(refused(FSDP, loops.failed("not cleared")))
    .helps("call optimizer.zero_grad() after such an error", exact(FSDP, loops.failed("cleared"))),
    Loop("par.accumulate was left before its last micro-batch")
    .refuses(refused(FSDP, habits.breaking_without_zero))
    .helps("call optimizer.zero_grad() after leaving it", exact(FSDP, habits.breaking))
    .helps("run all micro-batches", exact(FSDP, habits.accumulating)),
    Loop("and the other ranks did not come there in time; call the module equally often")
    .refuses(refused(FSDP, loops.timed_out(alike=False)))
    .helps("call the module equally often on every rank", exact(FSDP, loops.timed_out(alike=True))),
    Loop("ranks are at different places of their loops")
    .refuses(refused(FSDP, loops.evaluated(alike=False)))
    .helps("Run the same calls in the same order on every rank", exact(FSDP, loops.evaluated(alike=True)))
    .helps("Call every block on every rank", exact(FSDP, loops.skipping("zero")))
    .helps("make a skipped part one block with its neighbours", exact(fsdp(blocks=("body",)), loops.skipping("skip"))),
    Loop("data ranks have gradients for different parameters; here these have none")
    .refuses(loops.different_gradients)
    .helps("call the same blocks on every rank", exact(FSDP, loops.skipping("all")))
    .helps("to leave out a block, multiply its output by 0", exact(FSDP, loops.skipping("zero"))),
    Loop("ranks took different steps")
    .refuses(refused(FSDP, loops.stepped(alike=False)))
    .helps("step on every rank alike", exact(FSDP, loops.stepped(alike=True))),
    Loop("parameter.data was assigned a {}, and the parameter is a {}")
    .refuses(refused(FSDP, loops.assigned("plain")))
    .helps("assign a tensor made from it (parameter.data * 0.9)", exact(FSDP, loops.assigned("made from it")))
    .helps("par.like(parameter, values) of a whole one", exact(FSDP, loops.assigned("placed"))),
    Loop("draws random numbers for a tensor that ranks hold together")
    .refuses(refused(FSDP, loops.drawn(alike=False)))
    .helps("call torch.manual_seed(seed) with one seed on every rank before it", exact(FSDP, loops.drawn(alike=True))),
    Loop("Put {} into the model before plan.apply and materialize; {}")
    .refuses(refused(FSDP, loops.new_module(before=False)))
    .helps("Put {} into the model before plan.apply and materialize", exact(FSDP, loops.new_module(before=True))),
    Loop("Put a parameter into the model before plan.apply; copy values")
    .refuses(refused(FSDP, loops.new_parameter("after")))
    .helps("Put a parameter into the model before plan.apply", exact(FSDP, loops.new_parameter("before")))
    .helps("copy values into the parameters that are there", exact(FSDP, loops.new_parameter("loaded")))
    .helps("register as a buffer what forward assigns", exact(FSDP, loops.trained(loops.Remembers))),
    Loop("left the module after plan.apply, or became another's")
    .refuses(refused(FSDP, loops.without_head(stays=False)))
    .helps("leave it in the module and do not call it", exact(FSDP, loops.without_head(stays=True))),
    Loop("the class of a {} in the module was replaced after plan.apply")
    .refuses(refused(FSDP, loops.other_class("after")))
    .helps("give it its class before plan.apply", exact(FSDP, loops.other_class("before")))
    .helps("replace its forward", exact(FSDP, loops.other_class("forward"))),
    Row(
        "a parameter was written through .data between two forwards of an evaluation",
        result=loops.evaluated_alone,
        ranks=2,
    )
    .refuses(lambda: loops.evaluations(through_data=True))
    .helps("write through the parameter itself, under torch.no_grad()", lambda: loops.evaluations(through_data=False)),
    Loop("{} was written between two micro-batches of a step, which share gathered weights")
    .refuses(lambda: loops.halved_on_stages(between=True))
    .helps("write after par.backward", lambda: loops.halved_on_stages(between=False)),
    Row("these modules compute other values split over ranks than whole")
    .refuses(lambda: models.sparse({}))
    .helps(
        "check their styles in the layout's tensor-parallel table",
        lambda: (
            models.sparse({"blocks.*.up": "colwise_gather", "blocks.*.down": "colwise_gather"})
            + models.sparse({"blocks.*.up": None, "blocks.*.down": None, "head": "head"})
            + models.sparse({"blocks.*.scale": "grad_sum"}, scale=True)
            + models.sparse({"blocks.*.gain": None}, gain=True)
        ),
    ),
]


test_the_printed_remedy_helps = in_one_process(ROWS)


@pytest.mark.parametrize("part", range(3))
@on_ranks(2)
def test_the_printed_remedies_help_on_two_ranks(part):
    run_together(ROWS[part::3], 2)
