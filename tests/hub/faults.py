"""Faults that a loopback Hub injects, and the log of its requests."""

import re
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    STATUS = "status"  # answer with `status` instead of doing the work
    RESET = "reset"  # send `after_bytes` of the body, then reset the connection
    SHORT = "short"  # send `after_bytes` of the body, then close it as if it were whole
    PAGE = "page"  # answer 200 with an HTML page, as a login page does
    CORRUPT = "corrupt"  # flip a bit of the body's byte `after_bytes`


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the next `times` requests of `method` whose path and query match `pattern`."""

    method: str
    pattern: str
    kind: Kind = Kind.STATUS
    status: int = 503
    after_bytes: int = 1000
    retry_after: int | str | None = None
    times: int = 1
    words: str = "injected"


@dataclass(slots=True)
class Request:
    """One request as the server saw it: `port` is the client's, `sent` and `received` count body bytes."""

    method: str
    path: str
    range: str | None
    authorized: bool
    port: int
    status: int = 0
    sent: int = 0
    received: int = 0


class Line:
    """One direction of a network, which all connections share."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, num_bytes: int) -> None:
        """Return when the line has carried these bytes."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + num_bytes / self._bytes_per_second
            left = self._free_at - now
        time.sleep(left)


@dataclass(slots=True)
class Traffic:
    """Faults still to come and requests so far; used from all server threads."""

    requests: list[Request] = field(default_factory=list)
    injected: list[Fault] = field(default_factory=list)
    bytes_per_second: float | None = None  # of each connection
    down: Line | None = None
    up: Line | None = None
    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(self, *faults: Fault) -> None:
        with self._lock:
            for fault in faults:
                self._faults += [fault] * fault.times

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()
            self.requests.clear()
            self.injected.clear()

    def clear_faults(self) -> None:
        with self._lock:
            self._faults.clear()

    def take(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.method == request.method and re.search(fault.pattern, request.path):
                    self._faults.remove(fault)
                    self.injected.append(fault)
                    return fault
        return None

    def matching(self, method: str, pattern: str) -> list[Request]:
        with self._lock:
            return [r for r in self.requests if r.method == method and re.search(pattern, r.path)]

    def bytes_sent(self, pattern: str) -> int:
        return sum(r.sent for r in self.matching("GET", pattern))


def refused_after(path: Path, traffic: Traffic) -> threading.Thread:
    """Refuse the last shards of the tiny checkpoint when a file is there; on a slow line they are not fetched then."""
    traffic.down = Line(3_000_000)

    def refuse() -> None:
        while not path.exists():
            time.sleep(0.001)
        traffic.inject(Fault("GET", r"model-0000[45]-of-000005\.safetensors$", status=403, times=1000))

    thread = threading.Thread(target=refuse, daemon=True)
    thread.start()
    return thread
