"""A Hugging Face Hub on the loopback interface for the real client: no part of huggingface_hub is mocked.

`store` keeps the repositories. `api` answers the JSON interface. The server sends files for HEAD and Range requests and
takes LFS uploads whole or in parts. `traffic` injects faults and logs every request.
"""

import base64
import hashlib
import json
import os
import re
import socket
import ssl
import struct
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import yaml
from faults import Kind, Line, Request, Traffic
from loopback_store import XET_EXPIRY, Entry, Files, Repo, Store

CHUNK_BYTES = 1 << 20
CERTIFICATE = Path(__file__).with_name("loopback.pem")
TOKEN = "hf_LoopbackSecretThatMustNeverBeSeen"
_RESOLVE = re.compile(r"/(?:api/resolve-cache/models/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


Json = dict[str, Any]
REGULAR_LIMIT = 10 << 20  # files above this go to LFS, like *.safetensors always do


@dataclass(frozen=True, slots=True)
class Reply:
    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


def refused(status: int, code: str, message: str) -> Reply:
    return Reply({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})


@dataclass(slots=True)
class Api:
    """Answers requests about `store`. whoami answers `account`; multipart uploads have parts of `part_bytes`."""

    store: Store
    url: str = ""
    part_bytes: int | None = None
    lfs_suffixes: tuple[str, ...] = (".safetensors",)
    token: str | None = None
    account: Json = field(
        default_factory=lambda: {
            "name": "me",
            "type": "user",
            "isPro": False,
            "auth": {"type": "access_token", "accessToken": {"role": "write"}},
            "orgs": [{"name": "team", "roleInOrg": "write"}, {"name": "readers", "roleInOrg": "read"}],
        }
    )

    def answer(self, method: str, path: str, query: dict[str, str], body: bytes, *, token: str | None) -> Reply:
        if path == "/api/whoami-v2":
            known = token is not None and (self.token is None or token == self.token)
            return Reply(self.account) if known else refused(401, "", "Invalid user token.")
        if path == "/api/validate-yaml":
            problems = _card_problems(json.loads(body)["content"])
            return Reply({"warnings": [], "errors": problems}, 400 if problems else 200)
        if path == "/api/agent-harnesses":
            return Reply({"harnesses": []})
        with self.store.lock:
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if path.endswith(".git/info/lfs/objects/batch"):
                return self._lfs_batch(json.loads(body))
            if not path.startswith("/api/models/"):
                return refused(404, "NotFound", path)
            owner, name, *rest = path.removeprefix("/api/models/").split("/")
            repo = self.store.repos.get(f"{owner}/{name}")
            if repo is None or (repo.private and token is None):
                return refused(401 if token is None else 404, "RepoNotFound", "Repository not found")
            verb, argument = (rest[0], "/".join(rest[1:])) if rest else ("revision", "")
            handler = _HANDLERS.get((method, verb))
            if handler is None:
                return refused(404, "NotFound", path)
            return handler(self, f"{owner}/{name}", repo, argument, body)

    def _create(self, request: Json) -> Reply:
        name = f"{request.get('organization') or self.account['name']}/{request['name']}"
        if name in self.store.repos:
            return Reply({"error": "You already created this model repo", "url": f"{self.url}/{name}"}, 409)
        private = bool(request.get("private") or request.get("visibility") == "private")
        self.store.create(name, private=private)
        return Reply({"url": f"{self.url}/{name}"})

    def _info(self, name: str, repo: Repo, revision: str, body: bytes) -> Reply:
        commit = repo.find(revision or "main")
        if commit is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        siblings = [describe(p, e) | {"rfilename": p} for p, e in sorted(repo.commits[commit].items())]
        info = {"id": name, "modelId": name, "sha": commit, "private": repo.private, "siblings": siblings}
        return Reply(info | {"tags": [], "downloads": 0, "likes": 0, "disabled": False, "gated": False})

    def _create_branch(self, name: str, repo: Repo, branch: str, body: bytes) -> Reply:
        if branch in repo.refs:
            return Reply({"error": "Reference already exists"}, 409)
        start = repo.find(json.loads(body or b"{}").get("startingPoint") or "main")
        assert start is not None
        repo.refs[branch] = start
        return Reply()

    def _delete_branch(self, name: str, repo: Repo, branch: str, body: bytes) -> Reply:
        if repo.refs.pop(branch, None) is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        return Reply()

    def _tree(self, name: str, repo: Repo, revision: str, body: bytes) -> Reply:
        if repo.find(revision) is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return Reply([describe(p, e) for p, e in sorted(repo.files(revision).items())])

    def _paths_info(self, name: str, repo: Repo, revision: str, body: bytes) -> Reply:
        paths = urllib.parse.parse_qs(body.decode()).get("paths", [])
        files = repo.files(revision)
        return Reply([describe(p, files[p]) for p in paths if p in files])

    def _preupload(self, name: str, repo: Repo, revision: str, body: bytes) -> Reply:
        if repo.find(revision) is None:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repo.files(revision)
        answer = list[Json]()
        request = json.loads(body)
        hosted = self.store.read(name, ".gitignore", revision).decode() if ".gitignore" in files else ""
        folders = [line for line in request.get("gitIgnore", hosted).splitlines() if line.startswith("/")]
        for file in request["files"]:
            in_lfs = file["path"].endswith(self.lfs_suffixes) or file["size"] > REGULAR_LIMIT
            known = files.get(file["path"])
            mode = "lfs" if in_lfs else "regular"
            oid = known.etag if known is not None else None
            is_ignored = f"/{file['path']}".startswith(tuple(folders))
            answer.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": is_ignored, "oid": oid})
        return Reply({"files": answer})

    def _xet_token(self, name: str, repo: Repo, revision: str, body: bytes) -> Reply:
        headers = {
            "X-Xet-Cas-Url": self.store.cas_url,
            "X-Xet-Access-Token": "t",
            "X-Xet-Token-Expiration": str(XET_EXPIRY),
        }
        return Reply({"casUrl": self.store.cas_url, "accessToken": "t", "exp": XET_EXPIRY}, headers=headers)

    def _commit(self, name: str, repo: Repo, branch: str, body: bytes) -> Reply:
        lines = [json.loads(line) for line in body.splitlines() if line.strip()]
        head = lines.pop(0)["value"]
        if branch not in repo.refs:
            return refused(404, "RevisionNotFound", f"Invalid rev id: {branch}")
        if head.get("parentCommit") not in (None, repo.refs[branch]):
            return Reply({"error": "A commit has happened since. Please refresh and try again."}, 412)
        files = dict(repo.files(branch))
        for line in lines:
            problem = self._apply(files, line["key"], line["value"])
            if problem is not None:
                return refused(400, "BadRequest", problem)
        oid = repo.commit(branch, files)
        url = f"{self.url}/{name}/commit/{oid}"
        return Reply({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})

    def _apply(self, files: Files, key: str, value: Json) -> str | None:
        path = value["path"]
        if key == "file":
            data = base64.b64decode(value["content"])
            files[path] = Entry(len(data), data)
        elif key == "lfsFile":
            entry = self.store.stored(value["oid"], value.get("size") or self.store.size_of(value["oid"]))
            if entry is None:
                return f"LFS pointer pointed to a file that does not exist: {value['oid']}"
            files[path] = entry
        elif key == "deletedFile":
            files.pop(path, None)
        return None

    def _lfs_batch(self, request: Json) -> Reply:
        objects: list[Json] = []
        for item in request["objects"]:
            answer: Json = {"oid": item["oid"], "size": item["size"]}
            if self.store.stored(item["oid"], item["size"]) is None:
                answer["actions"] = self._upload_actions(item["oid"], item["size"])
            objects.append(answer)
        return Reply({"transfer": "multipart" if self.part_bytes else "basic", "objects": objects})

    def _upload_actions(self, sha256: str, size: int) -> Json:
        address = f"{self.url}/_lfs/{sha256}"
        if self.part_bytes and size > self.part_bytes:
            parts = {f"{i + 1:05d}": f"{address}?part={i + 1}" for i in range(-(-size // self.part_bytes))}
            header = {"chunk_size": str(self.part_bytes)} | parts
            return {"upload": {"href": f"{self.url}/_lfs_done", "header": header}}
        return {"upload": {"href": address, "header": {}}, "verify": {"href": f"{self.url}/_lfs_verify"}}


_HANDLERS = {
    ("GET", "revision"): Api._info,
    ("POST", "branch"): Api._create_branch,
    ("DELETE", "branch"): Api._delete_branch,
    ("GET", "tree"): Api._tree,
    ("POST", "paths-info"): Api._paths_info,
    ("POST", "preupload"): Api._preupload,
    ("GET", "xet-write-token"): Api._xet_token,
    ("GET", "xet-read-token"): Api._xet_token,
    ("POST", "commit"): Api._commit,
}


def _card_problems(card: str) -> list[Json]:
    """What the Hub would refuse in a card's front matter, if it has one, of the fields that k2convert writes."""
    if not card.lstrip().startswith("---"):
        return []
    data = yaml.safe_load(card.split("---")[1])
    rules = {
        "license": data.get("license") in ("mit", "apache-2.0", "other", "unknown"),
        "license_name": data.get("license") != "other" or bool(data.get("license_name")),
        "base_model_relation": data.get("base_model_relation") in (None, "quantized", "finetune", "adapter", "merge"),
        "pipeline_tag": data.get("pipeline_tag") in (None, "text-generation", "image-text-to-text"),
        "tags": all(isinstance(tag, str) for tag in data.get("tags", [])),
    }
    return [{"message": f'"{field}" is not valid'} for field, holds in rules.items() if not holds]


def describe(path: str, entry: Entry) -> Json:
    """One file as trees and paths-info list it."""
    answer: Json = {"type": "file", "path": path, "oid": entry.oid, "size": entry.size}
    if entry.sha256 is not None:
        lfs = {"oid": entry.sha256, "sha256": entry.sha256, "size": entry.size, "pointerSize": 134}
        answer |= {"lfs": lfs} | ({"xetHash": entry.xet_hash} if entry.xet_hash else {})
    return answer


class LoopbackHub:
    """A running Hub, until the end of its block."""

    def __init__(self, root: Path, *, tls: bool = False) -> None:
        self.store = Store(root)
        self.traffic = Traffic()
        self.api = Api(self.store)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self.url = self.api.url = f"{'https' if tls else 'http'}://127.0.0.1:{self._server.server_port}"
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> "LoopbackHub":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    hub: LoopbackHub

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that close the connection early: the tests do that on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `traffic` has the log."""

    def do(self) -> None:
        self.hub = cast(_Server, self.server).hub
        authorization = self.headers.get("Authorization", "")
        self.token = authorization.removeprefix("Bearer ") or None
        self.request_log = Request(
            self.command,
            self.path,
            self.headers.get("Range"),
            authorized=self.token is not None,
            port=self.client_address[1],
        )
        self.fault = self.hub.traffic.take(self.request_log)
        if self.fault is not None and self.fault.kind is Kind.STATUS:
            self._read_body()
            headers = {"Retry-After": str(self.fault.retry_after)} if self.fault.retry_after is not None else {}
            self._reply(Reply({"error": self.fault.words}, self.fault.status, headers))
        elif self.fault is not None and self.fault.kind is Kind.PAGE:
            self._read_body()
            page = b"<html>Log in</html>"
            self._send_head(200, {"Content-Type": "text/html", "Content-Length": str(len(page))})
            self.wfile.write(page)
        elif self.fault is not None and self.command in ("PUT", "POST") and self.fault.kind is Kind.RESET:
            self.rfile.read(min(self.fault.after_bytes, int(self.headers.get("Content-Length") or 0)))
            self._reset()
        else:
            self._route()

    def _route(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(parts.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        if self.command == "PUT" and path.startswith("/_lfs/"):
            self._take_upload(path.removeprefix("/_lfs/"), query)
        elif path == "/_lfs_done":
            self._join_parts(json.loads(self._read_body()))
        elif path == "/_lfs_verify":
            request = json.loads(self._read_body())
            complete = self.hub.store.blob(request["oid"]).stat().st_size == request["size"]
            self._reply(Reply({}, 200 if complete else 400))
        elif self.command in ("GET", "HEAD") and (match := _RESOLVE.fullmatch(path)) is not None:
            self._send_file(*match.groups())
        else:
            self._reply(self.hub.api.answer(self.command, path, query, self._read_body(), token=self.token))

    do_GET = do_POST = do_PUT = do_HEAD = do_DELETE = do  # noqa: N815 - names the base class calls

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _reply(self, reply: Reply) -> None:
        data = json.dumps(reply.body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))} | reply.headers
        self._send_head(reply.status, headers)
        if self.command != "HEAD":
            self.wfile.write(data)
            self.request_log.sent += len(data)

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _reset(self) -> None:
        """Close so that the client sees ECONNRESET: a linger time of zero."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True

    def _take_upload(self, sha256: str, query: dict[str, str]) -> None:
        target = self.hub.store.blob(sha256 + (f".{query['part']}" if "part" in query else ""))
        temporary = self.hub.store.root / "tmp" / f"{target.name}-{threading.get_ident()}"
        digest = hashlib.sha256()
        missing = int(self.headers["Content-Length"])
        with temporary.open("wb") as file:
            while missing:
                chunk = self.rfile.read(min(missing, CHUNK_BYTES))
                if not chunk:
                    self.close_connection = True
                    return
                missing -= len(chunk)
                self.request_log.received += len(chunk)
                digest.update(chunk)
                file.write(chunk)
                self._throttle(len(chunk), self.hub.traffic.up)
        if "part" not in query and digest.hexdigest() != sha256:
            self._reply(refused(400, "BadRequest", "The bytes do not have the announced sha256"))
            return
        temporary.replace(target)
        self._reply(Reply({}, headers={"ETag": f'"{digest.hexdigest()}"'}))

    def _join_parts(self, request: dict[str, Any]) -> None:
        store = self.hub.store
        sha256 = request["oid"]
        parts = [store.blob(f"{sha256}.{part['partNumber']}") for part in request["parts"]]
        data = b"".join(part.read_bytes() for part in parts)
        if hashlib.sha256(data).hexdigest() != sha256:
            self._reply(refused(400, "BadRequest", "The parts do not have the announced sha256"))
            return
        store.blob(sha256).write_bytes(data)
        self._reply(Reply({}))

    def _send_file(self, name: str, revision: str, path: str) -> None:
        repo = self.hub.store.repos.get(name)
        if repo is None or (repo.private and self.token is None):
            return self._reply(refused(401 if self.token is None else 404, "RepoNotFound", "Repository not found"))
        commit = repo.find(revision)
        if commit is None:
            return self._reply(refused(404, "RevisionNotFound", f"Invalid rev id: {revision}"))
        entry = repo.commits[commit].get(path)
        if entry is None:
            return self._reply(refused(404, "EntryNotFound", "Entry not found"))
        begin, end, status = _requested_range(self.headers.get("Range"), entry.size)
        if status == 416:
            return self._reply(Reply({}, 416, {"Content-Range": f"bytes */{entry.size}"}))
        headers = self._file_headers(name, commit, entry)
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{entry.size}"
        if self.fault is not None and self.fault.kind is Kind.SHORT:
            end = min(end, begin + self.fault.after_bytes)
        self._send_head(status, headers | {"Content-Length": str(end - begin)})
        if self.command == "GET":
            self._send_bytes(entry, begin, end)
        return None

    def _file_headers(self, name: str, commit: str, entry: Entry) -> dict[str, str]:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry.etag}"', "Accept-Ranges": "bytes"}
        if entry.sha256 is not None:
            headers |= {"X-Linked-Size": str(entry.size), "X-Linked-Etag": f'"{entry.sha256}"'}
        if entry.xet_hash is not None:
            token_url = f"{self.hub.url}/api/models/{name}/xet-read-token/{commit}"
            headers |= {"X-Xet-Hash": entry.xet_hash, "Link": f'<{token_url}>; rel="xet-auth"'}
        return headers | {"Content-Type": "application/octet-stream"}

    def _send_bytes(self, entry: Entry, begin: int, end: int) -> None:
        fault = self.fault
        with self.hub.store.open(entry) as file:
            file.seek(begin)
            sent = 0
            if fault is None and entry.data is None and not isinstance(self.connection, ssl.SSLSocket):
                sent = self._send_past_python(file.fileno(), begin, end)
            while sent < end - begin:
                size = CHUNK_BYTES if self.hub.traffic.bytes_per_second is None else CHUNK_BYTES // 32
                chunk = bytearray(file.read(min(size, end - begin - sent)))
                if fault is not None and sent <= fault.after_bytes < sent + len(chunk):
                    if fault.kind is Kind.CORRUPT:
                        chunk[fault.after_bytes - sent] ^= 0x10
                    elif fault.kind is Kind.RESET:
                        self.wfile.write(chunk[: fault.after_bytes - sent])
                        return self._reset()
                self.wfile.write(chunk)
                sent += len(chunk)
                self.request_log.sent = sent
                self._throttle(len(chunk), self.hub.traffic.down)
        return None

    def _send_past_python(self, file: int, begin: int, end: int) -> int:
        """Send an undisturbed body from the system's cache; returns its length."""
        size = CHUNK_BYTES if self.hub.traffic.bytes_per_second is None else CHUNK_BYTES // 32
        position = begin
        while position < end:
            count = os.sendfile(self.connection.fileno(), file, position, min(size, end - position))
            position += count
            self.request_log.sent += count
            self._throttle(count, self.hub.traffic.down)
        return end - begin

    def _throttle(self, num_bytes: int, line: Line | None) -> None:
        if line is not None:
            line.carry(num_bytes)
        if self.hub.traffic.bytes_per_second:
            time.sleep(num_bytes / self.hub.traffic.bytes_per_second)


def _requested_range(text: str | None, size: int) -> tuple[int, int, int]:
    """First byte, byte after the last, and the status to answer with."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", text or "")
    if match is None:
        return 0, size, 200
    begin = int(match[1]) if match[1] else size - int(match[2])
    end = min(int(match[2]) + 1, size) if match[1] and match[2] else size
    return begin, end, 416 if begin >= size else 206
