"""Azure Blob Storage on loopback: Azurite, Microsoft's emulator, which npm installs (``make lab``) and Node runs."""

import base64
import datetime
import hashlib
import hmac
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.object_store import SECRET, free_ports, wait_for

_BESIDE = Path(sys.prefix) / "azurite" / "node_modules" / ".bin"
AZURITE = (
    shutil.which("azurite-blob", path=f"{_BESIDE}{os.pathsep}{os.environ.get('PATH', '')}")
    if shutil.which("node")
    else None
)
MISSING = "" if AZURITE else "no server for az:// to test with: make lab (Node and npm install azurite)"
ACCOUNT, KEY = "anaccount", base64.b64encode(SECRET.encode()).decode()
WRONG = {"AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"another").decode()}


def environment(port: int) -> dict[str, str]:
    """Return the variables that point Azure's clients to the server."""
    return {
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
    }


def bucket(name: str) -> str:
    """Make a container and return its URL. obstore makes none, so that this request is signed here."""
    date = f"{datetime.datetime.now(datetime.UTC):%a, %d %b %Y %H:%M:%S GMT}"
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    signed = (
        "PUT"
        + "\n" * 12
        + "".join(f"{key}:{value}\n" for key, value in headers.items())
        + f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    )
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()).decode()
    url = f"{os.environ['AZURE_STORAGE_ENDPOINT']}/{name}?restype=container"
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    urllib.request.urlopen(urllib.request.Request(url, method="PUT", headers=headers)).close()
    return f"az://{name}"


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Run the server with its files in ``folder``; yield its port."""
    assert AZURITE is not None
    folder.mkdir(parents=True, exist_ok=True)
    (port,) = free_ports(1)
    command = [
        AZURITE, "--blobPort", str(port), "--location", str(folder), "--silent", "--disableTelemetry",
        "--skipApiVersionCheck",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/", process, folder / "log")
            yield port
        finally:
            process.kill()
            process.wait()
