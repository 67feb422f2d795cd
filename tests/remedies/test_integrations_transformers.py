"""Rows of `integrations.transformers`, whose messages its own tests meet (`tests/remedies/rows.py`)."""

from tests.remedies.rows import Tested

ROWS = (
    Tested(
        "drop it, and let the plan's passes divide the model",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "use one of them: their step on a shard is that on the whole tensor",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"use one of them": '{"optim": "sgd"}'},
    ),
    Tested(
        "drop it, because its optimizers factor whole matrices",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "set it, so that each token counts once on any mesh",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"set it": '{"average_tokens_across_devices": True}'},
    ),
    Tested(
        "set bf16=True instead",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"set bf16=True": '{"bf16": True}'},
    ),
    Tested(
        "use bf16=True, which rounds no weight",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"use bf16=True": '{"bf16": True}'},
    ),
    Tested(
        "drop it, because it replaces modules that passes have divided",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "set per_device_train_batch_size: one rank alone may lack memory",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"set per_device_train_batch_size": '{"per_device_train_batch_size": 4}'},
    ),
    Tested(
        "use one of these",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"use one of these": '{"train_sampling_strategy": "sequential"}'},
    ),
    Tested(
        "call save_model, and upload the folder",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"call save_model": "make(**instead).save_model("},
    ),
    Tested(
        "write output_dir to a file system that all nodes share",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"write output_dir": "make(**instead)"},
    ),
    Tested(
        "drop it, because its signal reaches ranks in different steps",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "drop it, because it reads parameters, of which a rank has a part",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "drop it, because no module is wrapped in DistributedDataParallel",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "drop it, because the reference model is frozen on the mesh",
        "tests/integrations/test_trl.py::test_what_of_trl_a_mesh_would_change_is_refused",
        {"drop it": "make()"},
    ),
    Tested(
        "{} has not been compared with one process; expected Trainer, ",
        "tests/integrations/test_trl.py::test_what_of_trl_a_mesh_would_change_is_refused",
        {"train in a loop of your own": "make()"},
    ),
    Tested(
        "drop it, and generate after training",
        "tests/integrations/test_transformers.py::test_a_setting_that_a_mesh_would_change_is_refused",
        {"drop it": "make(**instead)"},
    ),
    Tested(
        "axis {} divides sequences, and Trainer's batches and losses are of whole ones",
        "tests/integrations/test_transformers.py::check_refusals",
        {"use a mesh without {}": "trainer(optimizer_cls_and_kwargs", "a loop of your own": "par.split"},
    ),
    Tested(
        "axis {} divides layers, and {} computes a loss and metrics of its own on",
        "tests/integrations/test_transformers.py::check_refusals",
        {"use compute_loss_func= with Trainer": "compute_loss_func=", "a mesh without {}": "trainer(OwnOptimizer"},
    ),
    Tested(
        "optimizers has an optimizer or a schedule of the whole model's parameters",
        "tests/integrations/test_transformers.py::check_refusals",
        {
            "choose them by optim= and lr_scheduler_type=, pass optimizer_cls_and_kwargs=": "optimizer_cls_and_kwargs=(",
            "override create_optimizer": "trainer(OwnOptimizer",
        },
    ),
    Tested(
        "no process group is open; wrap the script in `with meshpar.distributed():`",
        "tests/integrations/test_transformers.py::test_what_is_no_trainer_or_no_plan_is_refused",
        {"wrap the script in": "with distributed("},
    ),
    Tested(
        "has adapters of one process; expected a checkpoint of a trainer on a mesh",
        "tests/integrations/test_transformers.py::check_adapters_of_one_process",
        {"load them by PeftModel.from_pretrained(model, folder, is_trainable=True)": "is_trainable=True"},
    ),
)
