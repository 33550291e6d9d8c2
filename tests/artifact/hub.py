"""A hub on this machine: what huggingface_hub says to one in an upload, and what came of it."""

import base64
import contextlib
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """What was created and committed.

    Args:
        private: Of every repository, whatever was asked for.
        refuses: A part of the addresses that it answers with 403; "" is all, None is none.
        stores: The end of names of the files that it wants beside the commit, as large ones are.
        holds: Repository to files, to be fetched.
    """

    def __init__(self, *, private=None, refuses=None, stores=(), holds=None):
        self.repos, self.files, self.private, self.refuses = {}, {}, private, refuses
        self.stores, self.holds, self.stored = stores, holds or {}, {}
        self.messages, self.tokens, self.asked = [], set(), []

    def answer(self, method, path, body):
        self.asked.append(path)
        if self.refuses is not None and self.refuses in path:
            return 403, {"error": "You may not."}
        found = self._held(path)
        if found is not None:
            return found
        ways = {
            "/api/whoami-v2": self._whoami,
            "/api/repos/create": self._create,
            "/api/validate-yaml": self._validate,
            "/info/lfs/objects/batch": self._batch,
            "/store/": self._store,
            "/preupload/": self._preupload,
            "/commit/": self._commit,
        }
        way = next((way for part, way in ways.items() if part in path), self._info)
        return way(path, body)

    def _whoami(self, path, body):
        return 200, {"type": "user", "name": "me", "orgs": []}

    def _validate(self, path, body):
        return 200, {"warnings": [], "errors": []}

    def _create(self, path, body):
        asked = json.loads(body)
        owner = asked.get("organization")
        name = f"{owner}/{asked['name']}" if owner else asked["name"]
        self.repos[name] = asked
        return 200, {"url": f"{self.url}/{name}", "id": name}

    def _batch(self, path, body):
        return 200, {"transfer": "basic", "objects": list(self._places(json.loads(body)))}

    def _store(self, path, body):
        self.stored[path.removeprefix("/store/")] = body
        return 200, {}

    def _preupload(self, path, body):
        files = [
            {
                "path": one["path"],
                "uploadMode": "lfs" if one["path"].endswith(self.stores) else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for one in json.loads(body)["files"]
        ]
        return 200, {"files": files}

    def _commit(self, path, body):
        for line in body.decode().splitlines():
            one = json.loads(line)
            value = one["value"]
            if one["key"] == "header":
                self.messages.append(value["summary"])
            if one["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            if one["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]
        oid = "0" * 40
        repo = path.removeprefix("/api/models/").partition("/commit/")[0]
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/{oid}", "commitOid": oid}

    def _info(self, path, body):
        name = path.removeprefix("/api/models/").partition("/revision")[0]
        if name not in self.repos and self.private is None:
            return 404, {"error": "Repository not found"}
        asked = self.repos.get(name, {})
        is_private = asked.get("private", False) if self.private is None else self.private
        is_private = is_private or (asked.get("visibility") == "private" and self.private is None)
        return 200, {"id": name, "private": is_private, "sha": "0" * 40, "tags": [], "siblings": []}

    def _places(self, asked):
        for one in asked["objects"]:
            place = {"href": f"{self.url}/store/{one['oid']}"}
            yield {"oid": one["oid"], "size": one["size"], "actions": {"upload": place}}

    def _held(self, path):
        """A repository's list of files, or a file."""
        for repo, files in self.holds.items():
            if path.startswith(f"/api/models/{repo}/tree/"):
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                    for name, data in files.items()
                ]
                return 200, listed
            if path.startswith(f"/api/models/{repo}"):
                siblings = [{"rfilename": name} for name in files]
                return 200, {"id": repo, "private": False, "sha": "0" * 40, "siblings": siblings}
            if path.startswith(f"/{repo}/resolve/"):
                name = path.removeprefix(f"/{repo}/resolve/").partition("/")[2]
                return (200, files[name]) if name in files else (404, {"error": "no such file"})
        return None


@contextlib.contextmanager
def local_hub(**settings):
    """A hub that listens while the block runs; ``hub.url`` is its address."""
    hub = Hub(**settings)

    class Handler(BaseHTTPRequestHandler):
        def _answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.tokens.add(self.headers.get("Authorization"))
            status, values = hub.answer(self.command, self.path.partition("?")[0], body)
            data = values if isinstance(values, bytes) else json.dumps(values).encode()
            self.send_response(status)
            if isinstance(values, bytes):
                self.send_header("ETag", f'"{hashlib.sha1(values).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
            elif status == 404:
                missing = "Entry" if "/resolve/" in self.path else "Repo"
                self.send_header("X-Error-Code", f"{missing}NotFound")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
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
