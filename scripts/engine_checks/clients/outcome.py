"""What a client found: a line for each check, and one JSON document for the driver."""

import argparse
import json
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(slots=True)
class Outcome:
    """The checks of one checkpoint in one engine. `notes` are facts that are neither right nor wrong."""

    engine: str
    passed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def check(self, title: str, good: bool, detail: str = "") -> None:
        """Record a check and print its line."""
        text = f"{title}: {detail}" if detail else title
        (self.passed if good else self.failed).append(text)
        print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)

    def note(self, text: str) -> None:
        """Record a fact and print it."""
        self.notes.append(text)
        print(f"     {text}", flush=True)

    def refused(self, error: Exception, folder: Path) -> int:
        """Record that the engine does not load the checkpoint, write outcome.json and return the exit code."""
        traceback.print_exception(error)
        self.check("the engine loads it", False, f"{type(error).__name__}: {error}")
        return self.save(folder)

    def save(self, folder: Path) -> int:
        """Write outcome.json; return the exit code: 1 if a check failed."""
        (folder / "outcome.json").write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
        return 1 if self.failed else 0


@dataclass(frozen=True, slots=True)
class Arguments:
    """What the driver asks of a client: ids of whole windows, and a prompt to continue by `new_tokens` tokens."""

    checkpoint: Path
    out: Path
    as_released: bool
    windows: list[list[int]]
    prompt: list[int]
    new_tokens: int


def read_arguments(description: str | None) -> Arguments:
    """Parse `CHECKPOINT REQUEST OUT [--as-released]`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("checkpoint", type=Path, help="converted checkpoint")
    parser.add_argument("request", type=Path, help="JSON: windows, prompt, new_tokens")
    parser.add_argument("out", type=Path, help="folder for outcome.json and logits.safetensors")
    parser.add_argument("--as-released", action="store_true", help="do not repair a known defect of the engine")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    request = json.loads(options.request.read_text(encoding="utf-8"))
    return Arguments(options.checkpoint, options.out, options.as_released, **request)


def save_logits(folder: Path, logits: list[torch.Tensor], greedy: list[int] | None = None) -> None:
    """Write logits f32 [W, T, vocabulary], and the ids of the greedy text if there is one."""
    tensors = {"logits": torch.stack([window.float().cpu() for window in logits]).contiguous()}
    if greedy is not None:
        tensors["greedy"] = torch.tensor(greedy)
    save_file(tensors, folder / "logits.safetensors")
