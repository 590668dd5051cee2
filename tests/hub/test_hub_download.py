"""A shard from the Hub: complete, checked, and resumed inside the file after any failure."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import pytest
from faults import Fault, Kind
from huggingface_hub import close_session
from loopback import CERTIFICATE, LoopbackHub

from k2convert.errors import DestinationError, DiskFullError, HubError
from k2convert.hub.client import Hub, RepoRef, exact_pieces
from k2convert.hub.download import NUM_CONNECTIONS, download_shard
from k2convert.hub.request_errors import HubRequestError
from k2convert.hub.segments import MIN_SEGMENT_BYTES, open_partial, segment_bytes_for
from k2convert.hub.source import RemoteRepo, file_url, resolve_source

SHARD = "model-00001-of-000005.safetensors"


@pytest.fixture
def one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("k2convert.hub.download.NUM_CONNECTIONS", 1)


def fetch(hub: Hub, source: RemoteRepo, target: Path) -> None:
    download_shard(hub, source, SHARD, target=target, stop=threading.Event())


def test_a_download_is_exact(server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path) -> None:
    fetch(hub, source, tmp_path / "in" / SHARD)
    assert (tmp_path / "in" / SHARD).read_bytes() == (tiny / SHARD).read_bytes()
    assert [p.name for p in (tmp_path / "in").iterdir()] == [SHARD]
    assert server.traffic.bytes_sent(SHARD) == (tiny / SHARD).stat().st_size
    assert 1 < len(server.traffic.matching("GET", SHARD)) <= NUM_CONNECTIONS


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_ranges_share_a_line(tls: bool, hub: Hub, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
    close_session()
    with LoopbackHub(tmp_path / "hub-server", tls=tls) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.store.add_folder("moon/tiny", tiny)
        url = file_url(hub, resolve_source(hub, RepoRef("moon/tiny")), SHARD)
        for begin, end in ((1000, 301_000), (0, 7)):
            with hub.stream_range(url, begin=begin, end=end) as pieces:
                assert b"".join(pieces) == (tiny / SHARD).read_bytes()[begin:end]
        first, second = server.traffic.matching("GET", SHARD)
        assert first.port == second.port
        server.traffic.clear()
        server.traffic.inject(Fault("GET", SHARD, Kind.RESET, after_bytes=3 * MIN_SEGMENT_BYTES + 1))
        fetch(hub, resolve_source(hub, RepoRef("moon/tiny")), tmp_path / SHARD)
    close_session()
    assert (tmp_path / SHARD).read_bytes() == (tiny / SHARD).read_bytes()


def test_a_body_of_another_length_than_its_range_is_refused() -> None:
    assert b"".join(exact_pieces(iter([b"abc", b"de"]), 5, where="shard")) == b"abcde"
    for pieces, amount in (((b"abc",), "only 3 of 5"), ((b"abc", b"def"), "more of 5"), ((), "only 0")):
        with pytest.raises(HubRequestError, match=amount) as caught:
            list(exact_pieces(iter(pieces), 5, where="shard"))
        assert caught.value.transient


def test_finished_shards_stay(server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes((tiny / SHARD).read_bytes())
    fetch(hub, source, tmp_path / SHARD)
    assert server.traffic.matching("GET", SHARD) == []


def recorded_bytes(folder: Path) -> int:
    """Bytes that the record of an unfinished download counts; it never has the shorter last segment here."""
    bits = json.loads((folder / f"{SHARD}.part.json").read_text())["done"]
    return bits.count("1") * MIN_SEGMENT_BYTES


@pytest.mark.parametrize("kind", [Kind.RESET, Kind.SHORT])
def test_a_broken_connection_continues_behind_the_last_segment(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path, one_connection: None, kind: Kind
) -> None:
    server.traffic.inject(Fault("GET", SHARD, kind, after_bytes=5 * MIN_SEGMENT_BYTES + 1))
    fetch(hub, source, tmp_path / SHARD)
    assert (tmp_path / SHARD).read_bytes() == (tiny / SHARD).read_bytes()
    first, second = server.traffic.matching("GET", SHARD)
    assert first.range is not None
    assert second.range is not None
    continued_at = int(second.range.removeprefix("bytes=").partition("-")[0])
    assert continued_at % MIN_SEGMENT_BYTES == 0
    # A reset also discards what the client's kernel had received but the client had not read.
    assert continued_at == 5 * MIN_SEGMENT_BYTES if kind is Kind.SHORT else continued_at <= 5 * MIN_SEGMENT_BYTES


def test_all_faults_are_survived(server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path) -> None:
    server.traffic.inject(
        Fault("GET", SHARD, status=503, times=2),
        Fault("GET", SHARD, status=429, retry_after=0),
        Fault("GET", SHARD, Kind.RESET, after_bytes=100_000),
        Fault("GET", SHARD, Kind.SHORT, after_bytes=70_000),
        Fault("GET", SHARD, Kind.CORRUPT, after_bytes=10),
    )
    fetch(hub, source, tmp_path / SHARD)
    assert (tmp_path / SHARD).read_bytes() == (tiny / SHARD).read_bytes()
    assert len(server.traffic.injected) == 6


def test_bytes_that_stay_wrong_get_no_name(server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    server.traffic.inject(Fault("GET", SHARD, Kind.CORRUPT, times=100))
    with pytest.raises(HubError, match=r"arrived 3 times with bytes that do not match the Hub's sha256"):
        fetch(hub, source, tmp_path / SHARD)
    assert not (tmp_path / SHARD).exists()


def test_a_hub_that_stays_broken_is_reported_and_the_work_is_kept(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path, one_connection: None
) -> None:
    server.traffic.inject(
        Fault("GET", SHARD, Kind.SHORT, after_bytes=5 * MIN_SEGMENT_BYTES + 1), Fault("GET", SHARD, times=100)
    )
    with pytest.raises(HubError, match=r"503.*Run the same command again to continue"):
        fetch(hub, source, tmp_path / SHARD)
    saved = recorded_bytes(tmp_path)
    server.traffic.clear()
    fetch(hub, source, tmp_path / SHARD)
    assert server.traffic.bytes_sent(SHARD) == (tiny / SHARD).stat().st_size - saved


def test_a_stopped_download_is_continued_inside_the_shard(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path, one_connection: None
) -> None:
    stop = threading.Event()
    server.traffic.bytes_per_second = 1_000_000.0

    def stop_in_the_middle() -> None:
        while server.traffic.bytes_sent(SHARD) < 400_000:
            time.sleep(0.005)
        stop.set()

    stopper = threading.Thread(target=stop_in_the_middle)
    stopper.start()
    with pytest.raises(HubError, match=r"stopped\. Run the same command again to continue"):
        download_shard(hub, source, SHARD, target=tmp_path / SHARD, stop=stop)
    stopper.join()
    saved = recorded_bytes(tmp_path)
    server.traffic.bytes_per_second = None
    server.traffic.clear()
    fetch(hub, source, tmp_path / SHARD)
    size = (tiny / SHARD).stat().st_size
    assert server.traffic.bytes_sent(SHARD) == size - saved
    assert saved >= 3 * MIN_SEGMENT_BYTES
    assert (tmp_path / SHARD).read_bytes() == (tiny / SHARD).read_bytes()


@pytest.mark.parametrize("record", ["", "[]", "{", '{"done": "1111"}', '{"sha256": "0", "done": "1"}', "a lie"])
def test_a_wrong_record_costs_a_download(hub: Hub, source: RemoteRepo, tiny: Path, tmp_path: Path, record: str) -> None:
    if record == "a lie":
        partial = open_partial(tmp_path / SHARD, source.shard(SHARD))
        for segment in range(7):
            partial.finish(segment)
        partial.record(force=True)
        os.close(partial.descriptor)
    else:
        (tmp_path / f"{SHARD}.part").write_bytes(os.urandom((tiny / SHARD).stat().st_size))
        (tmp_path / f"{SHARD}.part.json").write_text(record)
    fetch(hub, source, tmp_path / SHARD)
    assert (tmp_path / SHARD).read_bytes() == (tiny / SHARD).read_bytes()


def test_a_whole_file_without_lfs_hash_is_refused(hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="not in LFS"):
        download_shard(hub, source, "config.json", target=tmp_path / "config.json", stop=threading.Event())


@pytest.mark.parametrize("num_bytes", [1, 65536, 65537, 1_407_616, 10**8, 9_809_000_000])
def test_segments_are_small_in_small_files_and_at_most_8_megabytes(num_bytes: int) -> None:
    segment = segment_bytes_for(num_bytes)
    assert 64 << 10 <= segment <= 8 << 20
    assert segment % 65536 == 0


@pytest.mark.parametrize("suffix", ["", ".part", ".part.json"])
def test_a_download_and_links(suffix: str, server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path) -> None:
    server.traffic.bytes_per_second = 200_000.0  # slow enough for a record
    precious = tmp_path / "precious"
    precious.write_text("the only copy")
    (tmp_path / f"{SHARD}{suffix}").symlink_to(precious)
    with pytest.raises(DestinationError, match=rf"{SHARD}{suffix}: is a link"):
        fetch(hub, source, tmp_path / SHARD)
    assert precious.read_text() == "the only copy"
    assert (tmp_path / f"{SHARD}{suffix}").is_symlink()


def disk_is_full(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_up_under_the_record_is_said_in_one_line(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.traffic.bytes_per_second = 200_000.0
    monkeypatch.setattr("os.fsync", disk_is_full)
    with pytest.raises(DiskFullError, match=rf"{SHARD}\.part\.json: the disk is full"):
        fetch(hub, source, tmp_path / SHARD)


def test_a_record_that_cannot_be_written_does_not_hide_what_came_before(
    server: LoopbackHub, hub: Hub, source: RemoteRepo, tmp_path: Path, one_connection: None
) -> None:
    server.traffic.inject(Fault("GET", SHARD, Kind.SHORT, after_bytes=3 * MIN_SEGMENT_BYTES))
    server.traffic.inject(Fault("GET", SHARD, status=403, times=9))
    (tmp_path / f"{SHARD}.part.json.tmp").mkdir()
    with pytest.raises(HubError, match="403"):
        fetch(hub, source, tmp_path / SHARD)
