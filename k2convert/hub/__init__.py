"""Everything that talks to the Hugging Face Hub: the only package that imports huggingface_hub, and only when called.

    client    names (`hf://owner/name@revision`), one connection with retries
    request_errors  what a failed request means, and what to do
    source    a repository pinned to a commit: files, headers by range requests, small files
    segments  the record of which parts of a half-downloaded file are on disk
    download  one shard in parallel ranges, resumed inside the file, checked against the Hub's sha256
    preflight what must hold before anything is converted for a destination on the Hub
    publish   work branch, shards in groups, one atomic commit on main
    card      the repository's README

Only calls are used that huggingface_hub 1.20 and 2.x share. Its HTTP client changed with the major (httpx, httpx2), so
neither is named here: errors are caught as `HfHubHTTPError`, its base class, and the built-in connection errors.
"""
