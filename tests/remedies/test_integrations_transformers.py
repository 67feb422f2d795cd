"""Rows of `integrations.transformers`, whose messages its own tests meet (`tests/remedies/rows.py`)."""

from tests.remedies.rows import Tested

ROWS = (
    Tested("drop it, and let the plan's passes divide the model")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("use one of them: their step on a shard is that on the whole tensor")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("use one of them", '{"optim": "sgd"}'),
    Tested("drop it, because its optimizers factor whole matrices")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("set it, so that each token counts once on any mesh")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("set it", '{"average_tokens_across_devices": True}'),
    Tested("set bf16=True instead")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("set bf16=True", '{"bf16": True}'),
    Tested("use bf16=True, which rounds no weight")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("use bf16=True", '{"bf16": True}'),
    Tested("drop it, because it replaces modules that passes have divided")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("set per_device_train_batch_size: one rank alone may lack memory")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("set per_device_train_batch_size", '{"per_device_train_batch_size": 4}'),
    Tested("use one of these")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("use one of these", '{"train_sampling_strategy": "sequential"}'),
    Tested("set per_device_train_batch_size to a data rank's samples")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("set per_device_train_batch_size", '{"per_device_train_batch_size": 4}'),
    Tested("torch_compile is True, and axis {} splits layers by features")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("drop torch_compile", "rows=Streamed()"),
    Tested("call save_model, and upload the folder")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("call save_model", "make(**instead).save_model("),
    Tested("write output_dir to a file system that all nodes share")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("write output_dir", "make(**instead)"),
    Tested("drop it, because its signal reaches ranks in different steps")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("drop it, because it reads parameters, of which a rank has a part")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("drop it, because no module is wrapped in DistributedDataParallel")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("drop it, because the reference model is frozen on the mesh")
    .by("tests/integrations/test_trl.py::test_what_of_trl_a_mesh_would_change_is_refused")
    .helps("drop it", "make()"),
    Tested("{} has not been compared with one process; expected Trainer, ")
    .by("tests/integrations/test_trl.py::test_what_of_trl_a_mesh_would_change_is_refused")
    .helps("train in a loop of your own", "make()"),
    Tested("drop it, and generate after training")
    .by("tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused")
    .helps("drop it", "make(**instead)"),
    Tested("axis {} divides sequences, and Trainer's batches and losses are of whole ones")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("use a mesh without {}", "trainer(optimizer_cls_and_kwargs")
    .helps("a loop of your own", "par.split"),
    Tested("axis {} divides layers, and {} computes a loss and metrics of its own on")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("use compute_loss_func= with Trainer", "compute_loss_func=")
    .helps("a mesh without {}", "trainer(OwnOptimizer"),
    Tested("optimizers has an optimizer or a schedule of the whole model's parameters")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("choose them by optim= and lr_scheduler_type=, pass optimizer_cls_and_kwargs=", "optimizer_cls_and_kwargs=(")
    .helps("override create_optimizer", "trainer(OwnOptimizer"),
    Tested("no process group is open; wrap the script in `with meshpar.distributed():`")
    .by("tests/integrations/test_transformers.py::test_what_is_no_trainer_or_no_plan_is_refused")
    .helps("wrap the script in", "with distributed("),
    Tested("has adapters of one process; expected a checkpoint of a trainer on a mesh")
    .by("tests/integrations/test_transformers.py::check_adapters_of_one_process")
    .helps("load them by PeftModel.from_pretrained(model, folder, is_trainable=True)", "is_trainable=True"),
    Tested("{} data ranks cannot share its last samples as one process would use them")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("load it without streaming", "trainer(rows=Rows(8)")
    .helps("use a mesh of tp alone", 'plan=Plan("tp=2", [TensorParallel()]), rows=Streamed()'),
    Tested("averages its loss over the labels of a rank, because it gets no number of the labels on all ranks")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("pass compute_loss_func=", "compute_loss_func=squares_over_items"),
    Tested("set it, and start `vllm serve`, because no rank has whole weights")
    .by("tests/integrations/test_trl.py::check_policies")
    .helps("set it", 'vllm_mode="server"'),
    Tested("are no part of the weights that vLLM gets ({})")
    .by("tests/integrations/test_trl.py::test_adapters_that_are_no_part_of_the_weights_that_are_sent_are_refused")
    .helps("pass such an adapter", "(server.url,), {})")
    .helps("drop use_vllm", "use_vllm=False"),
    Tested("has ranks with the same {} {} would count twice")
    .by("tests/integrations/test_trl.py::check_policies")
    .helps("use a mesh of dp_replicate and dp_shard", 'make("dp_replicate=2")'),
    Tested("the last batch of an epoch repeats samples, and the collator joined {} samples of all")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("set dataloader_drop_last=True", "options=whole_batches"),
    Tested("splits layers by features, and peft's adapters add to whole layers")
    .by("tests/integrations/test_transformers.py::check_refusals")
    .helps("use a mesh without {}", "trainer(model=get_peft_model(")
    .helps("add adapters by", "meshpar.training.add_adapters in a loop"),
    Tested("loss is {}, which has not been compared with one process; expected {}: pass one of them")
    .by("tests/integrations/test_sentences.py::check_refusals")
    .helps("pass one of them", "loss=CosineSimilarityLoss")
    .helps("train in a loop of your own with par.gather", "with par.gather"),
    Tested("has gather_across_devices=False, with which a text is compared with those of its")
    .by("tests/integrations/test_sentences.py::check_refusals")
    .helps("pass gather_across_devices=True", "gather_across_devices=True))"),
    Tested("data ranks would draw a step's batches from several of the datasets")
    .by("tests/integrations/test_sentences.py::check_refusals")
    .helps("join them by datasets.concatenate_datasets", "rows=concatenate_datasets("),
    Tested("drop it, because others choose among the samples of one rank")
    .by("tests/integrations/test_sentences.py::check_refusals")
    .helps("drop it", "train(rows="),
    Tested("has weights of one process; expected a checkpoint of a trainer on a mesh")
    .by("tests/integrations/test_sentences.py::check_weights_of_one_process")
    .helps("load them by SentenceTransformer(folder)", "model = SentenceTransformer(str("),
)
