"""Draw changes of real files: see ``fuzz_hostile.py``, which runs the commands that read them."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml

STEP = "runs/small/checkpoints/step-00000002"
FILES = {
    "recipe": ["job.yaml", "runs/small/recipe.yaml"],
    "launch": ["runs/small/launches/001/launch.json"],
    "manifest": [f"{STEP}/meshpar.json"],
    "metadata": [f"{STEP}/.metadata"],
    "safetensors": ["hf/model-00001-of-*.safetensors", "hf/config.json"],
    "index": ["hf/model.safetensors.index.json"],
}
CANARY = "canary_of_a_file"
_NAMES = ["../../outside/evil", "/etc/passwd", "..", "", "a\0b", "x" * 100_000, "outside/link", "~/x", "file:///etc/passwd",
          "s3://bucket/x", "http://me:pw@127.0.0.1:9/x", f"{CANARY}.Run", "subprocess.Popen", "os.system", "this.c",
          f"$(touch {CANARY})", "`id`", "\u202e\x1b[2J", "<<", "%n%s"]  # fmt: skip
_NUMBERS = [1 << 31, 1 << 62, 1 << 70, 10**400, -1, 0, 1e308, float("inf"), float("nan"), 0.5, True]
_SHAPES = [[1 << 40, 1 << 40], [1 << 62], [-1], [0], [[]], [1] * 5000, [1e9], ["2"]]
_VALUES: list[Any] = [None, [], {}, [[]], {"class": f"{CANARY}.Run"}, {f"{CANARY}.Run": {}},
                      {"subprocess.Popen": {"args": ["touch", CANARY]}}, {"__tensor__": 1}]  # fmt: skip


class Mutation(NamedTuple):
    """One change of a file: what, and the seed of its choices."""

    what: str
    seed: int


@dataclass(frozen=True)
class Case:
    """A drawn case: the kind of a file, the file, and its changes in order."""

    kind: str
    file: str
    mutations: tuple[Mutation, ...]


_TREE = ("value", "value", "value", "remove", "rename", "deep value", "grow")
_TEXT = ("bits", "cut", "twice", "deep", "insert")
_FILE = ("link", "pipe", "folder", "empty")


def draw(seed: int, kinds: tuple[str, ...] = tuple(FILES)) -> Case:
    """Return the case of a seed."""
    draws = random.Random(seed)
    kind = draws.choice(kinds)
    special = {"recipe": ("alias", "tag", "key twice"), "metadata": ("pickle",) * 4}.get(kind, ("key twice",))
    whats = [*_TREE, *_TREE, *_TEXT, *special, draws.choice(_FILE)]
    if kind == "recipe":
        whats.pop()  # a person names a recipe, and may name a pipe
    changes = (Mutation(draws.choice(whats), draws.getrandbits(32)) for _ in range(draws.choice((1, 1, 2, 3))))
    return Case(kind, draws.choice(FILES[kind]), tuple(changes))


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the case with the fewest changes that still fails."""
    for mutation in case.mutations:
        fewer = replace(case, mutations=tuple(other for other in case.mutations if other != mutation))
        if fewer.mutations and fails(fewer):
            case = fewer
    return case


def plant(case: Case, folder: Path) -> None:
    """Change the file of a case in a copy of the real files."""
    (path,) = folder.glob(case.file)
    for what, seed in case.mutations:
        draws = random.Random(seed)
        if what in _FILE:
            _replace_file(path, what)
            return
        data = path.read_bytes()
        head = 8 if case.file.endswith(".safetensors") else 0
        if what in _TEXT:
            data = _change_text(data, what, draws)
        elif what == "pickle":
            data = _hostile_pickle(folder, draws)
        elif case.kind == "metadata":
            data = _change_pickle(data, draws)
        else:
            end = 8 + int.from_bytes(data[:8], "little") if head else len(data)
            text = _change_tree(data[head:end], what, draws, as_yaml=case.kind == "recipe")
            data = len(text).to_bytes(8, "little") + text + data[end:] if head else text
        path.write_bytes(data)


def _replace_file(path: Path, what: str) -> None:
    path.unlink()
    if what == "link":
        path.symlink_to("/dev/zero")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        path.touch()


def _change_text(data: bytes, what: str, draws: random.Random) -> bytes:
    place = draws.randrange(len(data) + 1)
    if what == "bits" and data:
        changed = bytearray(data)
        for _ in range(draws.choice((1, 1, 8))):
            changed[draws.randrange(draws.choice((16, len(data))) % len(data) or 1)] ^= 1 << draws.randrange(8)
        return bytes(changed)
    if what == "cut":
        return data[:place]
    if what == "twice":
        return data[:place] + data[draws.randrange(place + 1) :]
    if what == "deep":
        opening = draws.choice((b"[", b'{"a":', b"- ", b"{a: ", b"("))
        return data[:place] + opening * draws.choice((50, 3000, 200_000)) + data[place:]
    return data[:place] + draws.randbytes(draws.choice((1, 40))) + data[place:]


def _change_tree(data: bytes, what: str, draws: random.Random, *, as_yaml: bool) -> bytes:
    try:
        tree = yaml.safe_load(data) if as_yaml else json.loads(data)
    except (ValueError, RecursionError, yaml.YAMLError):
        return _change_text(data, "bits", draws)
    if what in ("alias", "tag"):
        aliases = "".join(f"b{n}: &b{n} [{', '.join([f'*b{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9))
        tags = [f"x: !!python/object/apply:os.system ['touch {CANARY}']\n", f"x: !!python/name:{CANARY}.Run\n"]
        texts = [aliases, "x: &x\n  y: *x\n", "<<: [{a: 1}, {b: 2}]\n"] if what == "alias" else tags
        return data + draws.choice(texts).encode()
    if what == "key twice":
        return data + b"\nname: other\n" if as_yaml else data.replace(b"{", b'{"label": 1, "label": [2], ', 1)
    places = list(itertools.islice(_places(tree), 10_000))  # aliases may stand for any number
    if not places:
        return data
    place = draws.choice(places)
    outer: Any = functools.reduce(lambda node, part: node[part], place[:-1], tree)
    if what == "remove":
        del outer[place[-1]]
    elif what == "rename" and isinstance(outer, dict):
        outer[draws.choice(_NAMES)] = outer.pop(place[-1])
    elif what == "deep value":
        outer[place[-1]] = "@deep@"
        text = (yaml.safe_dump(tree) if as_yaml else json.dumps(tree)).replace("'@deep@'", "@deep@")
        depth = draws.choice((40, 900, 5000, 100_000))
        return text.replace('"@deep@"', "@deep@").replace("@deep@", "[" * depth + "]" * depth).encode()
    elif what == "grow":
        outer[place[-1]] = draws.choice(([0] * 100_000, "y" * 1_000_000, {str(n): n for n in range(30_000)}))
    else:
        pool = draws.choice((_NAMES, _NUMBERS, _SHAPES, _VALUES))
        outer[place[-1]] = copy.deepcopy(draws.choice(pool))
    return (yaml.safe_dump(tree, allow_unicode=True) if as_yaml else json.dumps(tree)).encode()


def _places(tree: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*place, key)
        if len(place) < 50:
            yield from _places(value, (*place, key))


class _Runs:
    """What runs a command where it is unpickled."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


def _hostile_pickle(folder: Path, draws: random.Random) -> bytes:
    """Return the bytes of a pickle that runs code, or takes memory or depth, if it is read as one."""
    bomb = b"\x80\x02]q\x00" + b"".join(b"(h%c" % n * 8 + b"lq%c" % (n + 1) for n in range(60)) + b"."
    return draws.choice((
        pickle.dumps(_Runs(os.system, f"touch {folder.parent}/outside/ran")),
        pickle.dumps(_Runs(eval, "__import__('os').getpid()")),
        b"c" + CANARY.encode() + b"\nRun\n)R.",
        pickle.dumps(_Runs(bytearray, 1 << 40)),
        pickle.dumps(_Runs(getattr, "", "join")),
        b"(" * 300_000, b"(" * 1000 + b"l" * 1000 + b".", b"]" + b"2" * 100_000 + b".", bomb,
        b"\x80\x04\x95" + (1 << 60).to_bytes(8, "little") + b".", b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little"),
        b"r\xff\xff\xff\x7f.", b"\x80\x02Nr\xff\xff\xff\x7f.",
    ))  # fmt: skip


def _change_pickle(data: bytes, draws: random.Random) -> bytes:
    """Change a number or a name inside of a pickle, and leave its structure."""
    text = draws.choice(
        (b"model.", b"torch", b"storage", b"Metadata", b"__0_0.distcp", b"Size", b"float32", b"K\x10", b"K ")
    )
    hostile = [
        b"../../../",
        b"os",
        b"system",
        CANARY.encode(),
        b"\x8a\x08" + b"\xff" * 7 + b"\x7f",
        b"M\xff\xff",
        b"K\x00",
        b"J\xff\xff\xff\xff",
    ]
    places = [place for place in range(len(data)) if data.startswith(text, place)]
    if not places:
        return _change_text(data, "bits", draws)
    place, new = draws.choice(places), draws.choice(hostile)
    if text[:1] != b"K":
        new = (new * len(text))[: len(text)]  # of the same length, which stands before it
    return data[:place] + new + data[place + len(text) :]
