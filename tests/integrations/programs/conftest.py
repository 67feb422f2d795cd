"""What the programs' ranks need before they are forked: see the conftest of tests/nightly/strangers."""

from tests.nightly.strangers import conftest  # noqa: F401
