"""The Hub's JSON interface as the real client (1.x and 2.x) speaks it: repositories, branches, trees, commits, LFS."""

import base64
import json
import urllib.parse
from dataclasses import dataclass, field
from typing import Any

import yaml
from loopback_store import XET_EXPIRY, Entry, Files, Repo, Store

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
