"""The identity of a checkpoint: the commit of its repository, or the digests of its weight files.

Names, shapes and headers cannot distinguish a fine-tune from its base. The process that loads the files computes their digests once. A
process that attaches later compares the kernel's record of the files (device, inode, size and both times) and reads a file only if that
record differs, as it does for a copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._errors import Invalid

# A file's digest is the SHA-256 of the SHA-256s of its pieces, so that several threads compute it.
_PIECE = 64 << 20
_THREADS = 8
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(?:/|$)")


class Contents:
    """The contents of a checkpoint as this process sees them. The constructor finds the files; `record` and `difference` read them, and
    `reading_beside` does so in the background."""

    def __init__(self, model: str, commit: str | None = None) -> None:
        is_local = os.path.exists(model)
        self.source = os.path.realpath(model) if is_local else model
        found = _COMMIT.search(self.source if is_local else os.path.abspath(model))
        # `commit` belongs to a repository: a local folder may have other files than the repository that its configuration names.
        self.commit = found[1] if found else None if is_local else commit
        with self._reading():
            self.files = _weight_files(Path(model))
            self._stats = {name: _stat(path) for name, path in self.files.items()}
        self._digests: dict[str, str] = {}
        # The digests of the pieces of files that threads read.
        self._pieces: dict[str, list[Future[bytes]]] = {}

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(stat[2] for stat in self._stats.values())

    def record(self) -> dict[str, Any]:
        """The identity as JSON. Reads the files unless there is a commit.

        Raises `Invalid` if there is neither a commit nor a file, if a file can't be read, or if a file changed after this object
        was made."""
        if self.commit is None and not self.files:
            raise Invalid(
                f"the weights of {self.source!r} have neither a commit nor files that can be compared: "
                "give vLLM a local folder, or a repository with a revision"
            )
        recorded: dict[str, Any] = {"source": self.source, "commit": self.commit, "files": {}}
        if self.commit is None:
            self._read(list(self.files))
            recorded["files"] = {name: {"stat": self._stats[name], "sha256": self._digests[name]} for name in self.files}
        with self._reading():
            changed = [name for name, path in self.files.items() if _stat(path) != self._stats[name]]
        if changed:
            raise Invalid(f"{self.files[changed[0]]} was changed while it was loaded: load the model again")
        return recorded

    def difference(self, recorded: dict[str, Any]) -> str | None:
        """Returns the difference from recorded contents (see `is_record`), or None. If the files are gone, an equal source counts as equal
        contents. Raises `Invalid` if a file can't be read."""
        if self.commit is not None and recorded["commit"] is not None:
            if self.commit == recorded["commit"]:
                return None
            return f"commit {self.commit}, and {recorded['commit']} in the object"
        theirs = recorded["files"]
        if not self.files:
            return None if self.source == recorded["source"] else f"{self.source} has no weight files, and the object is from {recorded['source']}"
        if recorded["commit"] is not None:
            return f"the object is from commit {recorded['commit']}, and the files of {self.source} have no commit"
        if self.files.keys() != theirs.keys():
            return f"other files: {', '.join(sorted(self.files.keys() ^ theirs.keys()))}"
        sizes = [name for name in self.files if self._stats[name][2] != theirs[name]["stat"][2]]
        if sizes:
            return f"{sizes[0]} has another size"
        self._read([name for name in self.files if self._stats[name] != theirs[name]["stat"]])
        others = [name for name, digest in self._digests.items() if digest != theirs[name]["sha256"]]
        return f"{others[0]} has other bytes" if others else None

    @property
    def read(self) -> int:
        """The bytes of files that this object has read."""
        return sum(self._stats[name][2] for name in self._digests)

    @contextmanager
    def reading_beside(self) -> Iterator[None]:
        """Reads in the background the files that `record` needs, until the end of the block."""
        with ThreadPoolExecutor(_THREADS) as threads:
            if self.commit is None:
                self._begin(threads, list(self.files))
            try:
                yield
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def _begin(self, threads: ThreadPoolExecutor, names: list[str]) -> None:
        for name in names:
            offsets = range(0, max(self._stats[name][2], 1), _PIECE)
            self._pieces[name] = [threads.submit(_piece, self.files[name], offset) for offset in offsets]

    def _read(self, names: list[str]) -> None:
        with self._reading(), ThreadPoolExecutor(_THREADS) as threads:
            self._begin(threads, [name for name in names if name not in self._digests and name not in self._pieces])
            for name in names:
                if name in self._pieces:
                    mine = b"".join(piece.result() for piece in self._pieces.pop(name))
                    self._digests[name] = hashlib.sha256(mine).hexdigest()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turns file-system errors into `Invalid`."""
        try:
            yield
        except OSError as error:
            raise Invalid(f"the weights of {self.source} can't be read: {error}") from error


def is_record(value: Any) -> bool:
    """Returns whether a value has the form of a `Contents.record`."""
    if not isinstance(value, dict) or not isinstance(value.get("source"), str) or not isinstance(value.get("files"), dict):
        return False
    return isinstance(value.get("commit", 0), (str, type(None))) and all(
        isinstance(file, dict) and isinstance(file.get("sha256"), str) and isinstance(file.get("stat"), list) and len(file["stat"]) == 5
        for file in value["files"].values()
    )


def _piece(path: Path, offset: int) -> bytes:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        file.seek(offset)
        left = _PIECE
        while left and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.digest()


def _stat(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _weight_files(model: Path) -> dict[str, Path]:
    """Returns the weight files by name: a file itself, or of a folder the index's files, or all files of the first format found."""
    if model.is_file():
        return {model.name: model}
    if not model.is_dir():
        return {}
    index = model / "model.safetensors.index.json"
    if index.is_file():
        try:
            listed = {name: model / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Invalid(f"{index} is not an index of weight files: it needs a weight_map of tensors to files") from error
        found = {name: path for name, path in listed.items() if path.is_file()}
        if found:
            return found
    for suffix in _SUFFIXES:
        found = {path.name: path for path in sorted(model.iterdir()) if path.suffix == suffix and path.is_file()}
        if found:
            return found
    return {}
