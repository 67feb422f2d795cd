"""Published programs with training loops of their own: where each comes from, and its diff, which docs/ports.md has."""

import hashlib
import io
import os
import re
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs/ports.md"
FILE = re.compile(r"^diff --git a/(\S+) .*\nindex (\w+)\.\.", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A program of another repository with meshpar's verbs in its loop.

    Attributes:
        heading: of its section of the page, whose diff it has.
        source: owner and name of the repository, and the commit.
        packages: that it imports, and that meshpar does not need.
        stubs: packages that it imports, and does not use here.
        prepare: writes small data, and settings of a small model, into the program's folder.
        launched: it runs under a launcher alone, with one process, too.
        script: path inside the repository.
        arguments: of its command line; OUT stands for a folder, BATCH for the samples of a data rank.
        batch: samples of a step on all data ranks.
        on_mesh: arguments that the changed program takes; MESH stands for the mesh, MESHFILE for it without signs of
            equality.
        resume: arguments with which it continues.
        resume_on_mesh: the same for the changed program, where they differ.
        resumes_at: the epoch with which it then begins.
        variant: what differs from the program of the same heading.
        adamw_eps: of torch's AdamW, for a program that has no argument for it.
        without_effect: parameters on which the small model's output does not depend; their gradients are rounding.
        metrics: pattern of files below OUT with numbers of evaluations.
        meshes: of the page; a run on one resumes on the next.
        last_mesh: on which a run on the last one resumes.
    """

    heading: str
    source: tuple[str, str]
    packages: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    prepare: Callable[[Path], None]
    script: str
    launched: bool = False
    arguments: str
    batch: int = 8
    on_mesh: str
    resume: str
    resume_on_mesh: str = ""
    resumes_at: int = 0
    variant: str = ""
    adamw_eps: float = 1e-8
    without_effect: tuple[str, ...] = ()
    metrics: str = ""
    meshes: tuple[str, ...]
    last_mesh: str = ""

    def diff(self) -> str:
        """Return the diff of the page."""
        section = PAGE.read_text(encoding="utf-8").partition(f"\n## {self.heading}\n")[2].partition("\n## ")[0]
        return section.partition("```diff\n")[2].partition("```")[0]

    def lines_changed(self) -> int:
        """Return how many lines the diff adds, or removes where these are more."""
        lines = self.diff().splitlines()
        return max(sum(re.match(rf"\{sign}(?!\{sign}\{sign} )", line) is not None for line in lines) for sign in "+-")

    def check_out(self, folder: Path) -> None:
        """Write the program as published, from MESHPAR_PROGRAMS or by download; OSError where it cannot be had."""
        (repository, commit), local = self.source, os.environ.get("MESHPAR_PROGRAMS")
        if local is not None:
            shutil.copytree(Path(local) / repository, folder)
        else:
            url = f"https://codeload.github.com/{repository}/tar.gz/{commit}"
            with urllib.request.urlopen(url, timeout=60) as response:
                content = io.BytesIO(response.read())
            with tarfile.open(fileobj=content) as archive:
                archive.extractall(folder.parent, filter="data")
            (folder.parent / f"{repository.rpartition('/')[2]}-{commit}").rename(folder)
        for path, blob in FILE.findall(self.diff()):
            text = (folder / path).read_bytes()
            digest = hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()
            assert digest.startswith(blob), f"{path} is of another version"
        self.prepare(folder)

    def change(self, folder: Path) -> None:
        """Apply the diff."""
        subprocess.run(["git", "apply", "--unidiff-zero", "-"], cwd=folder, input=self.diff(), text=True, check=True)


def read_table() -> dict[str, dict[str, str]]:
    """Return the cells of the page's table by program and column."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    columns, _, *cells = [[cell.strip() for cell in row] for row in rows]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in cells}
