"""A hub on this machine: what huggingface_hub says to one in an upload, and what came of it."""

import base64
import contextlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """What was created and committed."""

    def __init__(self, *, private=None, refuses=False):
        self.repos, self.files, self.private, self.refuses = {}, {}, private, refuses
        self.messages = []

    def answer(self, method, path, body):
        if self.refuses:
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = (
                f"{asked['organization']}/{asked['name']}"
                if asked.get("organization")
                else asked["name"]
            )
            self.repos[name] = asked
            return 200, {"url": f"{self.url}/{name}", "id": name}
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        if "/preupload/" in path:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]
            return 200, {"files": files}
        if "/commit/" in path:
            lines = [json.loads(line) for line in body.decode().splitlines()]
            self.messages += [one["value"]["summary"] for one in lines if one["key"] == "header"]
            for one in lines:
                if one["key"] == "file":
                    value = one["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            oid = "0" * 40
            repo = path.removeprefix("/api/models/").partition("/commit/")[0]
            return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}
        name = path.removeprefix("/api/models/").partition("/revision")[0]
        asked = self.repos.get(name, {})
        is_private = asked.get("private", False) if self.private is None else self.private
        is_private = is_private or (asked.get("visibility") == "private" and self.private is None)
        return 200, {"id": name, "private": is_private, "sha": "0" * 40, "tags": [], "siblings": []}


@contextlib.contextmanager
def local_hub(**settings):
    """A hub that listens while the block runs; ``hub.url`` is its address."""
    hub = Hub(**settings)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, values = hub.answer(self.command, self.path.partition("?")[0], body)
            data = json.dumps(values).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _answer  # noqa: N815

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
