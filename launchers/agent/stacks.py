"""Stack traces of a running job, when a person asks: by a file in the folder of a start's logs, or by SIGUSR2."""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meshpar.core.errors import LaunchError, MeshparError
from meshpar.process.leftovers import write_durably

_REQUEST, _ANSWERS = "stacks.request", "rank-*.stacks.json"
_LOOK_S = 1.0
_progress: list[Callable[[], object]] = []


@contextmanager
def answer_requests(logs: Path, rank: int) -> Iterator[None]:
    """Let a thread answer requests in a folder of logs, and SIGUSR2 write the stacks to standard error at once."""
    ended, file = threading.Event(), logs / _ANSWERS.replace("*", str(rank))

    def answer() -> None:
        answered = _read(logs / _REQUEST)
        while not ended.wait(_LOOK_S):
            with suppress(Exception):  # a full disk, a folder that is gone: the job goes on
                if (request := _read(logs / _REQUEST)) and request != answered:
                    answered = request
                    write_durably(file, json.dumps({"request": request, **_describe(rank), "stacks": _stacks()}))

    with suppress(OSError):
        logs.mkdir(parents=True, exist_ok=True)
        write_durably(file, json.dumps({"request": "", **_describe(rank)}))  # who is there to answer
    registered, stream = signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL, sys.__stderr__
    if registered and stream is not None:
        with suppress(OSError, ValueError):  # a standard error that is no file
            faulthandler.register(signal.SIGUSR2, file=stream, all_threads=True)
    thread = threading.Thread(target=answer, name="meshpar-stacks", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)
        if registered:
            faulthandler.unregister(signal.SIGUSR2)
        with suppress(OSError):
            file.unlink(missing_ok=True)
            (logs / _REQUEST).unlink(missing_ok=True)
            logs.rmdir()  # where nothing else was written


def note_progress(progress: Callable[[], object]) -> None:
    """Let answers say how far this process is."""
    _progress[:] = [progress]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _describe(rank: int) -> dict[str, Any]:
    where: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "groups": {}}
    where |= {"step": str(read_probe(_progress[0])) if _progress else "not known"}
    if "torch.distributed" in sys.modules:
        from meshpar._torch.groups import last_collectives  # loads torch, which a script's rank may do without

        with suppress(Exception):
            where["groups"] = {group: list(pair) for group, pair in last_collectives().items()}
    return where


def _stacks() -> dict[str, str]:
    """Return the stack of each thread by its name, the main thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, answering = threading.main_thread().ident, threading.get_ident()
    threads = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    texts = {ident: "".join(traceback.format_stack(frame)) for ident, frame in threads if ident != answering}
    return {names.get(ident, f"thread {ident}"): text for ident, text in texts.items()}


def show_stacks(run: Path, wait_s: float, *, all_threads: bool = False) -> str:
    """Ask every rank of a run's newest start, and return the stacks, ranks of the same one together."""
    starts: dict[Path, Path] = {}  # the newest of each replica
    for file in sorted((run / "logs").glob(f"**/{_ANSWERS}"), key=lambda file: file.parent.stat().st_mtime):
        starts[file.parent.parent] = file.parent
    if not starts:
        raise LaunchError(f"{run} has no rank that answers; expected the folder of a run that trains now: runs/NAME")
    texts = [_ask(logs, wait_s, all_threads=all_threads) for logs in starts.values()]
    titles = [f"{logs.parent.name}:\n" if len(starts) > 1 else "" for logs in starts.values()]
    return "\n\n".join(f"{title}{text}" for title, text in zip(titles, texts))


def _answers(logs: Path) -> Iterator[dict[str, Any]]:
    """Yield what ranks have written; a file that is gone, damaged or a link is none of theirs."""
    from meshpar.checkpoints.storage.disk import ReadFile  # loads torch, which a script's rank may do without
    from meshpar.checkpoints.storage.files import read_json

    for file in logs.glob(_ANSWERS):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, MeshparError):
            read = read_json(ReadFile(file, links=False))
            groups = {str(group): (int(number), str(what)) for group, (number, what) in read["groups"].items()}
            stacks = {str(thread): str(stack) for thread, stack in read.get("stacks", {}).items()}
            texts = {name: str(read[name]) for name in ("host", "request", "step")}
            yield {"rank": int(read["rank"]), "pid": int(read["pid"]), "groups": groups, "stacks": stacks, **texts}


def _ask(logs: Path, wait_s: float, *, all_threads: bool) -> str:
    request, deadline = secrets.token_hex(8), time.monotonic() + wait_s
    write_durably(logs / _REQUEST, request)
    while True:
        ranks = sorted(_answers(logs), key=lambda rank: rank["rank"])
        silent = [rank for rank in ranks if rank["request"] != request]
        if not silent or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_S / 5)
    said: dict[int, Mapping[str, Any]] = {rank["rank"]: rank for rank in ranks if rank["request"] == request}
    alike: dict[str, list[int]] = {}
    for number, answer in said.items():
        stacks = list(answer["stacks"].items())[: None if all_threads else 1]
        text = "\n".join(f"  {name}:\n{stack.rstrip()}" for name, stack in stacks)
        alike.setdefault(text, []).append(number)
    lines = []
    for number, answer in said.items():
        last = "; ".join(f"{group}: {what} (number {count})" for group, (count, what) in answer["groups"].items())
        lines.append(
            f"rank {number} on {answer['host']} (process {answer['pid']}): step {answer['step']}; "
            f"last collective of each group: {last or 'none'}"
        )
    lines += [
        f"rank {rank['rank']} on {rank['host']} (process {rank['pid']}) does not answer within {wait_s:g} s: it is "
        "stopped or dead, or its native code holds the interpreter; "
        f"there, kill -USR2 {rank['pid']} lets it write its stacks to its log in {logs}"
        for rank in silent
    ]
    lines += find_late(said)
    lines += [f"\nranks {', '.join(map(str, numbers))}:\n{text}" for text, numbers in alike.items()]
    return "\n".join(lines)


def read_probe(probe: Callable[[], object]) -> object:
    """Return what a probe says; the name of its error where it raises one, which is no progress either."""
    try:
        value = probe()
        return tuple(value.items()) if isinstance(value, dict) else value
    except Exception as error:  # noqa: BLE001 - of the program's own code, which must not end the watch
        return type(error).__name__


def find_late(answers: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Return a line for each group in which ranks are behind at a collective."""
    lines = []
    for group in sorted({name for answer in answers.values() for name in answer["groups"]}):
        members = {rank: answer["groups"][group] for rank, answer in answers.items() if group in answer["groups"]}
        last, what = max(map(tuple, members.values()))
        behind = ", ".join(str(rank) for rank, (number, _) in sorted(members.items()) if number < last)
        if behind:
            lines.append(f"ranks that did not arrive at {what}, number {last} of {group}: {behind}")
    return lines
