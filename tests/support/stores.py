"""The object stores to test with: servers on loopback that speak S3, Azure Blob Storage and Google Cloud Storage."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from tests.support import azure_store, google_store, object_store

STORES: dict[str, ModuleType] = {"s3": object_store, "az": azure_store, "gs": google_store}


@dataclass(frozen=True)
class Store:
    """A running server: the scheme of its URLs, and its port."""

    scheme: str
    port: int

    @property
    def wrong(self) -> dict[str, str]:
        """Variables of the environment with credentials that the server refuses; none if it refuses none."""
        return STORES[self.scheme].WRONG

    def environment(self, port: int | None = None) -> dict[str, str]:
        """Return the variables that point clients to the server, or to the port of a proxy."""
        return STORES[self.scheme].environment(port or self.port)

    def use(self) -> None:
        """Point this process to the server: ranks are forked from a process that has another environment."""
        os.environ.update(self.environment())

    def bucket(self, name: str) -> str:
        """Make a bucket and return its URL; the environment is the server's."""
        return STORES[self.scheme].bucket(name)


def missing(scheme: str) -> str:
    """Return why there is no server of a scheme here; empty if there is one."""
    return STORES[scheme].MISSING


@contextmanager
def served(scheme: str, folder: Path) -> Iterator[Store]:
    """Run a server with its files in ``folder``."""
    with STORES[scheme].served(folder) as port:
        yield Store(scheme, port)
