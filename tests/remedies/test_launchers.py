"""Rows of `launchers`: see `tests/remedies/rows.py`."""

from __future__ import annotations

from tests.remedies.rows import Tested

UNTRIED = 193

ROWS = [
    Tested(
        "a readable file; name a secret of the cluster instead, such as",
        "tests/launchers/test_secrets.py::test_a_patch_names_a_secret_of_the_cluster_instead",
        {"name a secret of the cluster": "valueFrom: {secretKeyRef: {name: tracker, key: password}}"},
    ),
    Tested(
        "names a module to import (megatron_core); remove megatron_config",
        "tests/launchers/test_trust.py::test_no_config_of_transformers_brings_code",
        {"remove megatron_config": "del adapters['megatron_config']"},
    ),
    Tested(
        "aliases (*name) are not read; write the value out",
        "tests/launchers/test_trust.py::test_a_file_without_its_aliases_is_read",
        {"write the value out": "a: 1\\nb: 1"},
    ),
]
