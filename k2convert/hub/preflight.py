"""The checks before anything is converted for a destination on the Hub, so that no job is refused after hours.

They change nothing, so a dry run does them too. A notice names what cannot be known in advance, such as an account's
exact storage plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from k2convert.checkpoint.files import mapping_or_empty
from k2convert.errors import HubError
from k2convert.hub.client import MAIN, SCHEME, Hub, parse_repo
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.source import RemoteFile, RemoteRepo, list_files

MAX_FILE_BYTES = 50_000_000_000  # the Hub's hard limit over HTTP; it recommends 20 GB
RECOMMENDED_FILE_BYTES = 20_000_000_000
FREE_PRIVATE_BYTES = 100_000_000_000  # private storage of a free account
PRO_PRIVATE_BYTES = 1_000_000_000_000
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


@dataclass(frozen=True, slots=True)
class Target:
    """A checked destination: repository and branch, with the branch's commit and files if it has its own."""

    repo: str
    private: bool
    head: str | None
    files: dict[str, RemoteFile]
    notices: tuple[str, ...]
    revision: str = MAIN

    @property
    def version(self) -> str | None:
        """The branch, if it is not main."""
        return None if self.revision == MAIN else self.revision

    @property
    def name(self) -> str:
        """The name of the result: owner/name[@branch]."""
        return self.repo if self.version is None else f"{self.repo}@{self.version}"

    @property
    def has_weights(self) -> bool:
        return any(path.endswith(_WEIGHTS) for path in self.files)


def check_target(
    hub: Hub,
    *,
    repo: str,
    private: bool,
    file_bytes: Mapping[str, int],
    licence: str | None,
    source: RemoteRepo | None,
    revision: str = MAIN,
) -> Target:
    """Check token, name, visibility, sizes and license; raises HubError for anything that would fail later."""
    if parse_repo(f"hf://{repo}") is None or (source is not None and repo == source.repo):
        raise HubError(f"{repo}: is the source itself. Choose a different name.")
    from huggingface_hub import get_token

    if get_token() is None:
        raise HubError("the Hub needs a token with write access. Set HF_TOKEN or log in with `hf auth login`.")
    api: Any = hub.api()  # whoami is typed as a bare dict
    account = hub.call("check the token", lambda: _checked_account(api.whoami()))
    namespace = repo.partition("/")[0]
    _check_right_to_write(account, repo, namespace)
    too_large = [name for name, size in file_bytes.items() if size > MAX_FILE_BYTES]
    if too_large:
        raise HubError(f"{repo}: {too_large[0]} is larger than 50 GB, the Hub's limit per file. Split it first.")
    main, was_private = _look_up(hub, repo, MAIN)
    if was_private is False and private:
        raise HubError(f"{repo}: is public, but a private repository was requested. Pass --public to use it.")
    is_private = private if was_private is None else was_private
    notices = [*_size_notices(account, namespace, file_bytes, private=is_private)]
    if was_private and not private:
        notices.append(f"{repo} is private, and --public does not change that. Change it on the settings page")
    if source is not None and source.private and not is_private:
        notices.append(f"{source.repo} is private, but the result will be public")
    if licence is None:
        notices.append("the source states no license, and the card says so. Check that you may publish the result")
    head = main
    if revision != MAIN and main is not None:
        head, _ = _look_up(hub, repo, revision)
        head = None if head == main else head  # a run that was killed before its commit leaves such a branch
    files = {} if head is None else list_files(hub, repo, head)
    return Target(repo, is_private, head, files, tuple(notices), revision)


def _checked_account(answer: object) -> dict[str, object]:
    """Return the Hub's answer; raises TypeError if it is not of the form that is read here."""
    account = mapping_or_empty(answer)
    orgs: Any = account.get("orgs") or []
    auth: Any = account.get("auth") or {}
    if not isinstance(account.get("name"), str) or not isinstance(auth, dict) or not isinstance(orgs, list):
        raise TypeError("not an account")
    if not all(isinstance(org, dict) for org in cast(list[Any], orgs)):
        raise TypeError("not organizations")
    return account


def _check_right_to_write(account: dict[str, object], repo: str, namespace: str) -> None:
    user = account.get("name")
    organizations = {o.get("name"): o for o in cast(list[dict[str, object]], account.get("orgs") or [])}
    if namespace != user and namespace not in organizations:
        writable = (name for name, organization in organizations.items() if organization.get("roleInOrg") != "read")
        names = ", ".join(sorted({str(user), *map(str, writable)}))
        raise HubError(f"{repo}: the token belongs to {user}, who cannot write to {namespace}. Choose from: {names}.")
    if namespace != user and organizations[namespace].get("roleInOrg") == "read":
        raise HubError(f"{repo}: {user} can only read in {namespace}. Ask its owner for the write role.")
    token = mapping_or_empty(mapping_or_empty(account.get("auth")).get("accessToken"))
    role = token.get("role")
    if role == "read":
        raise HubError(f"{repo}: the token can only read. Use one with write access (huggingface.co/settings/tokens).")
    scopes: Mapping[str, Any] = mapping_or_empty(token.get("fineGrained"))
    if role == "fineGrained" and not any(
        "repo.write" in (scope.get("permissions") or [])
        and mapping_or_empty(scope.get("entity")).get("name") in (repo, namespace)
        for scope in map(mapping_or_empty, scopes.get("scoped") or [])
    ):
        raise HubError(
            f"{repo}: the fine-grained token has no write permission for it. "
            f"Give it 'Write access to contents and settings of repositories' under {namespace}."
        )


def _look_up(hub: Hub, repo: str, revision: str) -> tuple[str | None, bool | None]:
    """Return the commit of a branch, and whether its repository is private; Nones if it does not exist."""
    api = hub.api()
    try:
        info = hub.call(f"look up {repo}", lambda: api.model_info(repo, revision=revision))
    except HubRequestError as error:
        if error.status in (401, 404):
            return None, None
        raise
    return info.sha, bool(info.private)


def _size_notices(
    account: dict[str, object], namespace: str, file_bytes: Mapping[str, int], *, private: bool
) -> list[str]:
    total = sum(file_bytes.values())
    largest = max(file_bytes.values(), default=0)
    notices = list[str]()
    if largest > RECOMMENDED_FILE_BYTES:
        notices.append(f"the largest file has {largest / 1e9:.1f} GB; the Hub recommends at most 20 GB")
    is_pro = bool(account.get("isPro"))
    limit = PRO_PRIVATE_BYTES if is_pro else FREE_PRIVATE_BYTES
    if private and total > limit:
        kind = "a PRO account" if is_pro else "a free account"
        quota = f"{limit / 1e9:,.0f} GB"
        if namespace != account.get("name"):
            kind = "an organization"
            quota = "what its plan says (free: 100 GB)"
        notices.append(
            f"{total / 1e9:,.0f} GB are for a private repository; {kind} has {quota} of private storage. "
            "If that is not enough, the Hub refuses uploads midway: use --public or a larger plan"
        )
    return notices


def other_weights_error(target: Target) -> HubError:
    """Return the error for a branch that has the weights of something else."""
    other = "a different revision"
    if target.revision == MAIN:
        other = f"{SCHEME}{target.repo}@v2"
    return HubError(
        f"{target.repo}: {target.revision} already holds other weights, and they are not replaced. Publish to {other}, "
        "or choose a new repository."
    )
