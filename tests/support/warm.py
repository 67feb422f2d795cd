"""meshpar's commands and ranks without the seconds that a new interpreter takes to import torch: forked from a server
that has done so.

``start_warm()`` makes ``subprocess.Popen`` of this process fork ``python -m meshpar.launchers ...``, the forecast's
workers and the workers of pytest-xdist from a server, and ``multiprocessing`` fork its own server from it; ``run`` and
``train`` fork their ranks in the same way. A suite thus loads torch once, and not in each of its workers and of their
servers. Each is a real process: a child of the process that asks, with a command line, environment, folder, streams
and signals of its own. Everything else starts as ever. ``pytest --cold`` forks nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import inspect
import io
import multiprocessing.process
import multiprocessing.util
import os
import pickle
import re
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RANKS = ("meshpar.launchers.jobs.worker",)
"""What ``python -m`` runs warm from the command ``run`` or ``train``,"""
SIMULATIONS = ("meshpar.forecasting.worker",)
"""from a script,"""
SCRIPT = "tests.support.script"
COMMANDS = ("meshpar.launchers", SCRIPT, *SIMULATIONS, *RANKS)
"""and from a test."""

NOHUP = "nohup"
"""What may come before such a command."""
TEST_WORKER = "import sys;exec(eval(sys.stdin.readline()))"
"""What pytest-xdist starts a worker with, by ``python -u -c``."""
FORK_SERVER = re.compile(r"(from multiprocessing\.forkserver import main; main\()\d+, \d+(, .*)", re.DOTALL)
"""What multiprocessing starts its server with, and the numbers of its two files."""
INHERITED: list[socket.socket] = []
"""In a worker of pytest-xdist: the asking end of a server of its own, which was forked before it began."""

_OF_RANKS = (
    "torch._dynamo", "torch.distributed.launcher.api", "meshpar.launchers.cli", "meshpar.launchers.jobs.job",
    "meshpar.training", *RANKS,
)  # fmt: skip

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LEAVE = os._exit  # a rank's notes who calls it
_MOST_BYTES = 1 << 17
_COMMAND_LINE = 4000


def start_warm(preload: Sequence[str]) -> None:
    """From now on, fork the commands of this process from a server that has imported ``preload``."""
    if sys.platform == "linux":
        inherited = getattr(sys.modules.get("warm"), "INHERITED", [])
        server = _Server(preload, *inherited)
        _patch((*COMMANDS, TEST_WORKER), server)
        _patch_fork_server(server)


def _patch(modules: Sequence[str], server: _Server) -> None:
    start = subprocess.Popen._execute_child
    parameters = inspect.signature(start)

    def started(self: Any, *given: Any) -> None:
        options = parameters.bind(self, *given).arguments
        if _warm(options, modules):
            _fork(self, options, server)
        else:
            start(self, *given)

    subprocess.Popen._execute_child = started


def _patch_fork_server(server: _Server) -> None:
    spawn = multiprocessing.util.spawnv_passfds

    def spawned(path: Any, args: Sequence[Any], passed: Sequence[int]) -> int:
        if len(passed) != 2 or not FORK_SERVER.fullmatch(os.fsdecode(args[-1])):
            return int(spawn(path, args, passed))
        return server.fork(_wanted(list(map(os.fsdecode, args))), [0, 1, 2, *passed])

    multiprocessing.util.spawnv_passfds = spawned


def _warm(options: dict[str, Any], modules: Sequence[str]) -> bool:
    args, env = options["args"], options["env"] or os.environ
    args = args[1:] if list(args[:1]) == [NOHUP] else args
    known = isinstance(args, list | tuple) and (
        (list(args[:2]) == [sys.executable, "-m"] and args[2] in modules)
        or (list(args) == [sys.executable, "-u", "-c", TEST_WORKER] and TEST_WORKER in modules)
    )
    unusual = any(options[name] for name in ("preexec_fn", "pass_fds", "shell"))
    return (
        known
        and not unusual
        and all(env.get(name) == os.environ.get(name) for name in {*env, *os.environ} if name.startswith("PYTHON"))
    )


def _fork(process: Any, options: dict[str, Any], server: _Server) -> None:
    wanted = _wanted(options["args"], options["cwd"], options["env"], options["start_new_session"])
    given = (options["p2cread"], options["c2pwrite"], options["errwrite"])
    process.pid = server.fork(wanted, [number if stream == -1 else stream for number, stream in enumerate(given)])
    process._child_created = True
    process._close_pipe_fds(
        *(options[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _wanted(args: Sequence[Any], folder: Any = None, environment: Any = None, session: bool = False) -> dict[str, Any]:
    return {
        "owner": os.getpid(),
        "args": list(map(os.fspath, args)),
        "folder": os.fspath(folder or os.getcwd()),
        "environment": dict(environment or os.environ),
        "session": session,
    }


class _Server:
    """The asking end of a server, which is started with the first command."""

    def __init__(self, preload: Sequence[str] = (), connection: socket.socket | None = None) -> None:
        self._preload, self._connection, self._lock = preload, connection, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, wanted: dict[str, Any], streams: list[int]) -> int:
        with self._lock:
            self._connection = self._connection or self._started()
            prctl = ctypes.CDLL(None).prctl
            prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the server's grandchildren become children of this process
            try:
                socket.send_fds(self._connection, [pickle.dumps(wanted)], streams)
                return int(self._connection.recv(100))
            finally:
                prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        code = (
            f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import warm; warm.start({theirs.fileno()}, "
            f"{list(self._preload)!r})"
        )
        room = "#" * _COMMAND_LINE  # for the command lines of what is forked
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"{code} {room}"], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
        )
        theirs.close()
        return ours


def start(connection: int, preload: Sequence[str]) -> None:
    """Import ``preload`` and serve. Where it returns, the process is a command that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _quiet():
        _load(preload)
    _serve(socket.socket(fileno=connection))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Write no advice that packages give when they are imported, also from C++."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    yield
    os.dup2(kept, 2)
    os.close(kept)
    os.close(nothing)


def _load(preload: Sequence[str]) -> None:
    for name in preload:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    if conversions := sys.modules.get("transformers.conversion_mapping"):
        conversions.get_checkpoint_conversion_mapping("")  # builds its table, which each rank would do
    gc.collect()
    gc.freeze()


def write_command(path: Path) -> Path:
    """Write a command ``meshpar`` for other hosts, which loads once what its forked ranks need."""
    code = (
        f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import warm; warm.command() {'#' * _COMMAND_LINE}"
    )
    path.write_text(f'#!/bin/bash\nexec {sys.executable} -c "{code}" "$@"\n')
    path.chmod(0o755)
    return path


def command() -> None:
    """Run meshpar's command line. Where it returns, the process is a rank that has ended."""
    _load(_OF_RANKS)
    if sys.argv[1] in ("run", "train") and _serves(RANKS):
        return
    sys.path[0] = os.getcwd()
    vars(sys.modules["__main__"]).pop("warm", None)
    _run_as_main("meshpar.launchers")


def _serve(asked: socket.socket) -> None:
    """Fork what is asked for until whoever asks has ended."""
    while True:
        data, streams, _, _ = socket.recv_fds(asked, _MOST_BYTES, 5)
        if not data:
            os._exit(0)
        reading, writing = os.pipe()
        if not (between := os.fork()):
            if child := os.fork():
                os.write(writing, str(child).encode())
                os._exit(0)
            for stream in (reading, writing):
                os.close(stream)
            asked.close()
            _become(**pickle.loads(data), streams=streams)
            return
        os.waitpid(between, 0)
        asked.send(os.read(reading, 100))
        for stream in (reading, writing, *streams):
            os.close(stream)


def _become(
    owner: int, args: list[str], folder: str, environment: dict[str, str], session: bool, streams: list[int]
) -> None:
    """Run a module, or what ``-c`` gives, in this process as ``python`` does in a new one."""
    import torch

    while os.getppid() != owner:
        if not Path("/proc", str(owner)).exists():
            os._exit(1)
        time.sleep(0.001)
    if args[0] == NOHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the command does
        args = args[1:]
    _name(args)
    for number, stream in enumerate(streams[:3]):
        os.dup2(stream, number)
        os.close(stream)
    if session:
        os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if code := FORK_SERVER.fullmatch(args[-1]):
        listening, alive = streams[3:]
        exec(f"{code[1]}{listening}, {alive}{code[2]}", {})
        return
    if args[-1] == TEST_WORKER:
        _run_test_worker()
        return
    started = RANKS if args[2] == "meshpar.launchers" and args[3] in ("run", "train") else ()
    started = (*SIMULATIONS, *RANKS) if args[2] == SCRIPT else started
    if started and _serves(started):
        return
    _open_streams()
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.path[0], sys.argv = folder, args[2:]
    multiprocessing.process.ORIGINAL_DIR = folder  # from which a pool finds the script
    vars(sys.modules["__main__"]).pop("warm", None)
    _run_as_main(args[2])


def _run_as_main(module: str) -> None:
    """Run a module and leave as an interpreter does, without freeing what the server has loaded."""
    code: Any = None
    try:
        runpy._run_module_as_main(module)
    except SystemExit as end:
        code = end.code
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        written = False
    else:
        written = isinstance(code, int | None)
    if not written:  # the message and the exit code are the interpreter's
        sys.exit(code)
    _LEAVE((code or 0) & 0xFF)


def _run_test_worker() -> None:
    """Run a worker of pytest-xdist, which finds the asking end of its own server in ``INHERITED``."""
    import torch

    asking = _forked_server()
    if asking is None:
        return
    INHERITED[:] = [asking]
    _open_streams()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    sys.path[0], sys.argv = "", ["-c"]
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(TEST_WORKER, vars(main))


def _serves(modules: Sequence[str]) -> bool:
    """Fork a server of this process's own for ``modules``; true in a process that came from it and has ended."""
    asking = _forked_server()
    if asking is None:
        return True
    _patch(modules, _Server(connection=asking))
    return False


def _forked_server() -> socket.socket | None:
    """Fork a server and return its asking end; None in a process that came from it and has ended."""
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        return ours
    ours.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nothing, number)
    os.close(nothing)
    _serve(theirs)
    return None


def _name(args: Sequence[str]) -> None:
    """Show ``args`` as this process's command line, which is read from its own memory."""
    begin, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    line = b"".join(os.fsencode(argument) + b"\0" for argument in args)
    if len(line) <= end - begin:
        ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def _open_streams() -> None:
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        bytes_out = io.BufferedWriter(io.FileIO(number, "wb", closefd=False))
        by_line = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(bytes_out, encoding="utf-8", errors=errors, line_buffering=by_line or unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def ranks_of(launcher: int) -> list[int]:
    """Return the ranks that a launcher has started, without the server that it has here."""
    started = map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split())
    return [pid for pid in started if RANKS[0].encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")]
