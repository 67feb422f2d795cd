"""Rows of `integrations/lightning`: see `tests/remedies/rows.py`."""

from tests.remedies.rows import Tested

TRIED = (
    Tested("expected a Plan or the text of a mesh")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps('pass "dp_shard=2"', 'MeshparStrategy("dp_shard=2")')
    .helps("meshpar.Plan(", 'MeshparStrategy(Plan("dp_shard=2", [FullyShard()]))'),
    Tested("the plan divides layers over")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("use another axis", "another_axis = MeshparStrategy("),
    Tested("no plan averages the gradients of")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("name its module in plan=, too", "names=both"),
    Tested("which the LightningModule has not")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("name one of its modules", "names=both"),
    Tested("manual optimization steps inside of training_step")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("pass plan={", "names=both"),
    Tested("batch norms see the whole batch on every mesh")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("drop sync_batchnorm=True", "sync_batchnorm=False"),
    Tested("replaced, as torch.compile does")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("pass it as it is", "strategy=another_axis"),
    Tested("copies the module, which a mesh does not allow")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("use AveragedWeights", "callbacks=[AveragedWeights()]"),
    Tested("a folder of shards takes no storage_options; drop them")
    .by(
        "tests/integrations/test_lightning.py::test_what_cannot_work_is_refused_by_name_and_what_the_message_says_works"
    )
    .helps("drop them from save_checkpoint", "save_checkpoint("),
    Tested("no storage_options and no filter")
    .by(
        "tests/integrations/test_lightning.py::test_what_a_folder_of_fabric_cannot_have_is_refused_and_what_the_message_says_works"
    )
    .helps("pass save_distributed_checkpoint=False", "save_distributed_checkpoint=distributed"),
)
