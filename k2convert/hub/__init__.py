"""Everything that talks to the Hugging Face Hub: the only package that imports huggingface_hub, and only when called.

    client          names (`hf://owner/name@revision`), one connection with retries; bounds for the memory of hf_xet
    request_errors  what a failed request means, and what to do
    source          a repository pinned to a commit: files, headers by range requests, small files
    source_card     what the source's card says, and what of it the Hub accepts
    segments        the record of the parts of a half-downloaded file that are on disk
    ranges          byte ranges of shards, fetched into a folder and freed again
    download        one shard in parallel ranges, resumed inside the file, checked by its sha256; and one named file
    preflight       the checks before anything is converted for a destination on the Hub
    branch          the work branch of a job: shards in groups, then one atomic commit on main

Only calls that huggingface_hub 1.20 and 2.x share are used. The HTTP client changed with the major version (httpx,
httpx2), so this package names neither. It catches `HfHubHTTPError`, its base class, and the built-in connection errors.
"""
