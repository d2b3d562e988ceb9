"""What bytes the user asked for: the content of the checkpoint that this server would read from disk."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rfork.checkpoint import checkpoint_content
from rfork.config import Config
from rfork.errors import ConfigError, NoSeedAvailable
from rfork.identity import Content

_ANY = ("*.safetensors", "*.bin", "*.pt")
_SAFETENSORS = ("*.safetensors",)
READS = {
    "auto": _ANY,
    "layered": _ANY,
    "bitsandbytes": _ANY,
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "runai_streamer": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "sharded_state": _SAFETENSORS,
    "presharded": _SAFETENSORS,
    "mistral": ("consolidated*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
}
"""Load format → the files that it reads: those of the first pattern that matches any. Other formats read what no file
in the folder vouches for, or make other weights of it."""

Stamp = tuple[str, int, int, int, int, int]
"""Where a file really is, and what would change with its bytes: device, inode, size, times of change in ns."""


def format_of(load_config: Any) -> str:
    """The load format as its name."""
    name = getattr(load_config, "load_format", load_config)
    return str(getattr(name, "value", name))


def disk_format(settings: Config, load_config: Any) -> str:
    """The load format by which a client would read the disk instead of forking."""
    return settings.fallback if settings.fallback in READS else format_of(load_config)


def expected_content(settings: Config, model_path: str, revision: str | None, load_format: str = "auto") -> Content:
    """The pinned content, else the digest of the weight files that `load_format` reads at `model_path` (a folder, a
    file, or a model in the local hub cache).

    Raises NoSeedAvailable where neither exists: without a file to look at, nobody can tell which bytes a name stands
    for. ConfigError if a file can't be read.
    """
    if settings.content is not None:
        return settings.content
    if load_format not in READS:
        raise NoSeedAvailable(f"no file vouches for what load format {load_format!r} makes of it")
    files = weight_files(model_path, revision, load_format)
    if not files:
        raise NoSeedAvailable(
            f"no weight files at {model_path!r} to tell which bytes are asked for; "
            'name them with --rfork-config \'{"content": "checkpoint:…"}\' (`/rfork/v1/status` of a seed shows its own)'
        )
    try:
        return _content_of(tuple((path, _stamp(path)) for path in files))
    except OSError as error:
        raise ConfigError(f"can't read weight file {error.filename}: {error.strerror}") from error


@functools.lru_cache(maxsize=8)
def _content_of(files: tuple[tuple[Path, Stamp], ...]) -> Content:
    """Read again where a file is another one by now."""
    return checkpoint_content(path for path, _ in files)


def _stamp(path: Path) -> Stamp:
    real = path.resolve()
    about = real.stat()
    return str(real), about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns


def weight_files(model_path: str, revision: str | None, load_format: str = "auto") -> list[Path]:
    """Weight files that this load format reads; empty where none is."""
    path = Path(model_path)
    if path.is_file():
        return [path]
    folder = checkpoint_folder(model_path, revision)
    if folder is None:
        return []
    for pattern in READS[load_format]:
        found = sorted(p for p in folder.glob(pattern) if p.is_file())
        if found:
            return found
    return []


def checkpoint_folder(model_path: str, revision: str | None) -> Path | None:
    """The folder of a checkpoint, be it a path or a model in the local hub cache; None where neither is here."""
    path = Path(model_path)
    return path if path.is_dir() else _hub_snapshot(model_path, revision)


@functools.lru_cache(maxsize=8)
def _hub_snapshot(model_id: str, revision: str | None) -> Path | None:
    """The folder of a model in the local hub cache, without asking the hub."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model_id, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        return None
