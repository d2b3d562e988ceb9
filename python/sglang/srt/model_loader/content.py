"""What bytes the user asked for: the content of the checkpoint that this server would read from disk."""

from __future__ import annotations

import functools
from pathlib import Path

from rfork.config import Config
from rfork.errors import ConfigError, NoSeedAvailable
from rfork.identity import Content, checkpoint_content

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def expected_content(settings: Config, model_path: str, revision: str | None) -> Content:
    """The pinned content, else the digest of the weight files at `model_path` (a folder, a file, or a model in the
    local hub cache).

    Raises NoSeedAvailable where neither exists: without a file to look at, nobody can tell which bytes a name stands
    for.
    """
    if settings.content is not None:
        return settings.content
    files = weight_files(model_path, revision)
    if not files:
        raise NoSeedAvailable(
            f"no weight files at {model_path!r} to tell which bytes are asked for; "
            'name them with --rfork-config \'{"content": "checkpoint:…"}\' (`/rfork/v1/status` of a seed shows its own)'
        )
    return _content_of(tuple(files))


@functools.lru_cache(maxsize=8)
def _content_of(files: tuple[Path, ...]) -> Content:
    try:
        return checkpoint_content(files)
    except OSError as error:
        raise ConfigError(f"can't read weight file {error.filename}: {error.strerror}") from error


def weight_files(model_path: str, revision: str | None) -> list[Path]:
    """Weight files of one format, the first in SGLang's order of preference that is there; empty where none is."""
    path = Path(model_path)
    if path.is_file():
        return [path]
    folder = checkpoint_folder(model_path, revision)
    if folder is None:
        return []
    for suffix in WEIGHT_SUFFIXES:
        found = sorted(p for p in folder.iterdir() if p.suffix == suffix and p.is_file())
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
