"""Answers of a server: the log-probabilities of windows of token ids, and the folder that keeps them.

    FOLDER/answers.json        who was asked, and for what; written before the first answer
    FOLDER/window-003.json     the answer to window 3
    FOLDER/again-000.json      the answer to window 0, asked a second time
    FOLDER/.k2convert/lock     held by the running process (records/lock.py)

Every file is sealed by its checksum, and complete or absent. One that is damaged is asked for again, and so is one of
another window or server: an answer names its question. Files of others are neither read nor removed, and no link is
followed.
"""

import base64
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from k2convert.checkpoint.files import list_folder, write_atomically, writing
from k2convert.checkpoint.folders import make_folder, opened_folder, remove_empty_folder, remove_file, remove_folder
from k2convert.checkpoint.names import ANSWERS_NAME, WORK_FOLDER
from k2convert.errors import DestinationError, EndpointError, ResumeError
from k2convert.evaluation.connection import redacted
from k2convert.records.document import Count, plain, read_sealed, seal
from k2convert.records.evaluation import EvaluationText
from k2convert.records.events import SILENT, Events
from k2convert.records.fingerprint import describe_changes
from k2convert.records.lock import lock_destination

Row = Mapping[int, tuple[Any, Any]]
"""Token id -> its log-probability and its text, as a server gave them."""

_MAX_ABOVE_ZERO: Final = 1e-3  # of a log-probability, by rounding
_MAX_SUM: Final = 1.01  # of probabilities, by rounding
_LEAST: Final = -1e6  # vLLM writes -9999 for minus infinity
_MAX_WORD: Final = 40
_MAX_ID: Final = (1 << 31) - 1
_ANSWER: Final = re.compile(r"(window|again)-\d{3,}\.json(\.tmp)?")

MAX_VALUES: Final = 1 << 20
"""Log-probabilities of one answer. As JSON they are 100 MB, and several times as much in memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Log-probabilities of the next token at every position of a window but the last.

    ids    i32 [tokens - 1, K], the most likely tokens, the likeliest first; of equals the lowest id
    log_p  f32 [tokens - 1, K], theirs
    token  f32 [tokens - 1], that of the text's next token
    words  texts of the text's tokens and of the likeliest ones, by id, as far as the server gave them
    """

    ids: NDArray[np.int32]
    log_p: NDArray[np.float32]
    token: NDArray[np.float32]
    words: Mapping[str, str]

    def check(self) -> None:
        """Raise ValueError unless these can be log-probabilities of distinct tokens."""
        values = np.concatenate([self.log_p, self.token[:, None]], axis=1)
        if not np.isfinite(values).all():
            raise ValueError("has a log-probability that is not finite")
        sums = np.exp(self.log_p, dtype=np.float64).sum(axis=1)
        if values.max() > _MAX_ABOVE_ZERO or sums.max() > _MAX_SUM:
            raise ValueError(
                "gives numbers that are not log-probabilities: probabilities add up to more than 1. Check what the "
                "server does to them."
            )
        ordered = np.sort(self.ids, axis=1)
        if ordered.min() < 0 or (ordered[:, 1:] == ordered[:, :-1]).any():
            raise ValueError("gives a token twice, or a token id below 0. Check the server.")


def collect(rows: Sequence[Row | None], ids: Sequence[int], *, top_k: int) -> Answer:
    """Return the answer in the rows of a window's tokens; raises ValueError that says what is wrong with it."""
    if len(rows) != len(ids):
        what = "adds tokens"
        if len(rows) < len(ids):
            what = "cuts the text off"
        raise ValueError(f"answers for {len(rows):,} of {len(ids):,} tokens: it {what}. Serve it without that option.")
    found_ids = list[list[int]]()
    found_log_p = list[list[float]]()
    token = list[float]()
    words: dict[str, str] = {}
    for row, wanted in zip(rows[1:], ids[1:], strict=True):
        if row is None or wanted not in row:
            raise ValueError(
                "answers for other token ids than it was asked for. A proxy in between may tokenize again."
            )
        if len(row) < top_k:
            raise ValueError(
                f"gives {len(row)} of {top_k} log-probabilities. Start vLLM with --max-logprobs {top_k}, or pass "
                f"--top-k {len(row)}."
            )
        if not all(_is_entry(key, value) for key, (value, _) in row.items()):
            raise ValueError("gives a value that is no finite log-probability. Look for NaN in the server's log.")
        likeliest = sorted(row, key=lambda key, of=row: (-of[key][0], key))[:top_k]
        found_ids.append(likeliest)
        found_log_p.append([row[key][0] for key in likeliest])
        token.append(row[wanted][0])
        for key in (wanted, likeliest[0]):
            if isinstance(text := row[key][1], str):
                words.setdefault(str(key), redacted(text)[:_MAX_WORD].encode(errors="replace").decode())
    answer = Answer(
        np.array(found_ids, dtype=np.int32),
        np.array(found_log_p, dtype=np.float32),
        np.array(token, dtype=np.float32),
        words,
    )
    answer.check()
    return answer


def _is_entry(key: object, value: Any) -> bool:
    return type(key) is int and 0 <= key <= _MAX_ID and type(value) in (int, float) and _LEAST <= value <= 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Question that the answers belong to: servers, models, windows. It is the content of answers.json.

    `token_ids` are i32 [windows, tokens] in base64.

    `again` windows were asked twice. `engine` and `root` are what the server says of itself.
    """

    name: str
    engine: str
    root: str
    text: EvaluationText
    top_k: Count
    again: Count
    token_ids: str

    def __post_init__(self) -> None:
        if self.again > self.text.windows:
            raise ValueError(f"again is {self.again:,}, more than {self.text.windows:,} windows")
        if self.text.window < 2 or self.top_k < 1 or self.text.window * self.top_k > MAX_VALUES:
            raise ValueError(f"{self.text.window:,} tokens with {self.top_k:,} log-probabilities each are no question")
        self.windows()

    def windows(self) -> NDArray[np.int32]:
        """Return the windows of token ids, i32 [windows, tokens]; raises ValueError if they are not that many."""
        return _unpacked(self.token_ids, np.dtype(np.int32), (self.text.windows, self.text.window))


@dataclass(frozen=True, slots=True)
class _Record:
    """The content of a window's file: the digest of its question, and the arrays of an answer in base64."""

    question: str
    ids: str
    log_p: str
    token: str
    words: dict[str, str]


class AnswerFolder:
    """The answers of one server to the windows of a text.

    `root` is the folder that the user chose, below which no link is followed: the parent of `folder` unless given.
    """

    def __init__(self, folder: Path, asked: Asked, *, root: Path | None = None) -> None:
        self.folder = folder
        self.asked = asked
        self.windows = asked.windows()
        self._root = folder.parent if root is None else root
        self._digest = blake3(seal(asked)).hexdigest()

    @property
    def wanted(self) -> list[tuple[int, bool]]:
        """The questions: every window, then the first ones again."""
        asked = self.asked
        return [*((i, False) for i in range(asked.text.windows)), *((i, True) for i in range(asked.again))]

    @contextmanager
    def begun(self, *, events: Events = SILENT) -> Generator[None]:
        """Begin to keep answers, or resume, and lock the folder for the block; raises ResumeError, LockedError."""
        path = self.folder / ANSWERS_NAME
        if self.folder.is_dir() and not (self.folder / WORK_FOLDER).is_dir() and list_folder(self.folder):
            raise DestinationError(
                f"{self.folder}: is not empty, and its files are not from k2convert. Remove it, or choose a different "
                "folder."
            )
        make_folder(self.folder / WORK_FOLDER, root=self._root)
        with lock_destination(self.folder, events=events):
            found = _find(Asked, path)
            if found is None:
                self._remove_answers()  # nobody knows what was asked
                write_atomically(path, seal(self.asked), root=self._root)
            elif changes := describe_changes(plain(found), plain(self.asked)):
                raise ResumeError(
                    f"{self.folder}: holds other answers: {changes}. Repeat the command with the same options, choose "
                    "a different name, or delete this folder."
                )
            yield

    def remove(self) -> None:
        """Remove what this class wrote: the answers first, the mark that the folder is ours last.

        Files of others stay, and with them the folder.
        """
        self._remove_answers()
        self._remove_file(self.folder / ANSWERS_NAME)
        remove_folder(self.folder / WORK_FOLDER, root=self._root)
        remove_empty_folder(self.folder, root=self._root)

    def forget(self, window: int) -> None:
        """Remove an answer, so that it is asked for again."""
        self._remove_file(self._path(window, again=False))

    def _remove_answers(self) -> None:
        for path in list_folder(self.folder):
            if _ANSWER.fullmatch(path.name):
                self._remove_file(path)

    def _remove_file(self, path: Path) -> None:
        with writing(path), suppress(FileNotFoundError), opened_folder(self.folder, root=self._root) as folder:
            remove_file(path, folder)

    def read(self, window: int, *, again: bool = False) -> Answer | None:
        """Return an answer; None if it is missing or damaged."""
        path = self._path(window, again)
        record = _find(_Record, path)
        if record is None or record.question != self._question(path):
            return None
        shape = self.asked.text.window - 1, self.asked.top_k
        try:
            answer = Answer(
                _unpacked(record.ids, np.dtype(np.int32), shape),
                _unpacked(record.log_p, np.dtype(np.float32), shape),
                _unpacked(record.token, np.dtype(np.float32), shape[:1]),
                record.words,
            )
            answer.check()
        except ValueError:
            return None
        return answer

    def need(self, window: int, *, again: bool = False) -> Answer:
        """Return an answer; raises EndpointError if it is missing or damaged."""
        answer = self.read(window, again=again)
        if answer is None:
            raise EndpointError(
                f"{self._path(window, again)}: missing or damaged. Run the command that writes this folder again: it "
                "asks for what is missing."
            )
        return answer

    def write(self, window: int, answer: Answer, *, again: bool) -> None:
        """Keep an answer; raises DiskFullError, DestinationWriteError."""
        path = self._path(window, again)
        record = _Record(
            question=self._question(path),
            ids=packed(answer.ids),
            log_p=packed(answer.log_p),
            token=packed(answer.token),
            words=dict(answer.words),
        )
        write_atomically(path, seal(record), root=self._root)

    def _path(self, window: int, again: bool) -> Path:
        return self.folder / f"{'again' if again else 'window'}-{window:03}.json"

    def _question(self, path: Path) -> str:
        """Return the digest of what is asked for in a file: the server, the text and the window."""
        return blake3(f"{self._digest} {path.name}".encode()).hexdigest()


def open_saved(folder: Path) -> AnswerFolder:
    """Open a folder of kept answers; raises EndpointError."""
    asked = _find(Asked, folder / ANSWERS_NAME)
    if asked is None:
        raise EndpointError(
            f"{folder}: is neither the address of a server nor a folder of answers. Write http://HOST:PORT/v1, or a "
            "folder that `compare --save` wrote."
        )
    return AnswerFolder(folder, asked)


def _find(kind: type[Any], path: Path) -> Any:
    """Return a sealed file's content; None if it is missing, damaged or of another form."""
    try:
        return read_sealed(kind, path)
    except ValueError:  # a malformed file
        return None


def packed(array: NDArray[Any]) -> str:
    """Return an array as a document has it, in base64."""
    return base64.b64encode(array.astype(array.dtype.newbyteorder("<")).tobytes()).decode()


def _unpacked(text: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    data = base64.b64decode(text, validate=True)
    return np.frombuffer(data, dtype=dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def word(answer: Answer, token: int) -> str:
    """Return the text of a token, or a blank and its id if the server gave no text."""
    return answer.words.get(str(token), f" {token}")
