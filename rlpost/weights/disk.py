"""Links over a directory that trainer and engines see: each version is a Hugging Face model of its own, or a delta's message.

    DIRECTORY/version-00000012/model-00001-of-00002.safetensors ... config.json, tokenizer files, MANIFEST.json
    DIRECTORY/version-00000013/message.bin, MANIFEST.json

The manifest is written last: without it a version is not there. ``DIRECTORY`` may be an fsspec URL (s3://, gs://, memory:// ...);
then files are made and read in a local temporary directory and copied as wholes. Versions behind the newest that every engine
acknowledged are deleted, except models that users asked to keep by copying them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import shutil
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlpost.types import InfrastructureError, SyncPlan, WeightsManifest
from rlpost.weights.buckets import DTYPE_BYTES, Bucket, piece_bytes, row_elements
from rlpost.weights.links import Carrier, LinkSettings, Placing, nowhere

FILE_BYTES = 4 * 10**9
VERSION_NAME = re.compile(r"version-(\d{8,})")
MANIFEST, MESSAGE, INDEX = "MANIFEST.json", "message.bin", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
POLL_S = 0.02
"""How often an engine looks for a manifest: on a shared file system it may show later than it was written."""


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One safetensors file: its name, the bytes before the data, and each tensor's offset in the file."""

    name: str
    header: bytes
    offsets: dict[int, int]
    size: int


def plan_files(manifest: WeightsManifest, tensors: Sequence[int]) -> list[FilePlan]:
    """Which tensor lies where; a file is closed when the next tensor would make it larger than ``FILE_BYTES``."""
    sizes = {t: row_elements((1, *manifest.shapes[t])) * DTYPE_BYTES[manifest.dtypes[t]] for t in tensors}
    groups: list[list[int]] = [[]]
    filled = 0
    for tensor in tensors:
        if groups[-1] and filled + sizes[tensor] > FILE_BYTES:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += sizes[tensor]
    plans = []
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in group:
            entries[manifest.names[tensor]] = {
                "dtype": SAFETENSORS_DTYPES[manifest.dtypes[tensor]],
                "shape": list(manifest.shapes[tensor]),
                "data_offsets": [offset, offset + sizes[tensor]],
            }
            offset += sizes[tensor]
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        header = struct.pack("<Q", len(text)) + text
        offsets = {t: len(header) + entries[manifest.names[t]]["data_offsets"][0] for t in group}
        plans.append(FilePlan(name=name, header=header, offsets=offsets, size=len(header) + offset))
    return plans


class Directory:
    """The shared directory, local or behind fsspec."""

    def __init__(self, location: str) -> None:
        self.location = location
        self.remote: Any = None
        if "://" in location and not location.startswith("file://"):
            import fsspec

            self.remote, self.root = fsspec.core.url_to_fs(location)
        else:
            self.root = location.removeprefix("file://")

    def path(self, version: int, name: str = "") -> str:
        """Of a version, or of a file of it."""
        return f"{self.root}/version-{version:08d}" + (f"/{name}" if name else "")

    def work_directory(self, version: int) -> Path:
        """A new, empty local directory in which the version is made."""
        if self.remote is not None:
            return Path(tempfile.mkdtemp(prefix="rlpost-weights-"))
        path = Path(self.path(version))
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def publish(self, made: Path, version: int) -> None:
        """Bring all files to where engines look, the manifest last."""
        if self.remote is None:
            return
        self.delete(version)
        names = sorted((file.name for file in made.iterdir()), key=lambda name: name == MANIFEST)
        try:
            for name in names:
                self.remote.put_file(str(made / name), self.path(version, name))
        except BaseException:
            with contextlib.suppress(OSError):
                self.delete(version)
            raise
        shutil.rmtree(made)

    def fetch(self, version: int, target: Path) -> Path:
        """A local directory with all files of a version (``target`` when they had to be copied)."""
        if self.remote is None:
            return Path(self.path(version))
        for name in self.remote.ls(self.path(version), detail=False):
            self.remote.get_file(name, str(target / Path(name).name))
        return target

    def read_manifest(self, version: int) -> dict[str, Any] | None:
        """The manifest of a version, or None while it is not there."""
        path = self.path(version, MANIFEST)
        try:
            content = self.remote.cat_file(path) if self.remote is not None else Path(path).read_bytes()
        except FileNotFoundError:
            return None
        found: dict[str, Any] = json.loads(content)
        return found

    def versions(self) -> list[int]:
        """All that have a directory."""
        try:
            entries = self.remote.ls(self.root, detail=False) if self.remote is not None else os.listdir(self.root)
        except FileNotFoundError:
            return []
        found = [VERSION_NAME.fullmatch(Path(entry).name) for entry in entries]
        return sorted(int(match[1]) for match in found if match)

    def delete(self, version: int) -> None:
        """A version and its files; harmless when it is not there."""
        with contextlib.suppress(FileNotFoundError):
            if self.remote is not None:
                self.remote.rm(self.path(version), recursive=True)
            else:
                shutil.rmtree(self.path(version))


@dataclass
class DiskRendezvous:
    """Nothing to meet at: the directory is there."""

    settings: LinkSettings
    address: tuple[str, int] = ("", 0)

    @classmethod
    def serve(cls, settings: LinkSettings, _device: torch.device) -> DiskRendezvous:
        """See Carrier."""
        return cls(settings)

    def join(self) -> DiskOutlet:
        """See Carrier."""
        return DiskOutlet(self.settings)


class DiskOutlet:
    """Writes versions. Any error of the file system is an InfrastructureError that names the directory."""

    def __init__(self, settings: LinkSettings) -> None:
        self._directory = Directory(settings.directory)
        self._model_path = settings.model_path
        self._made: Path | None = None
        self._files: dict[str, Any] = {}

    def begin(self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> None:
        """Open the version's files."""
        self._abandon()
        self._plan, self._manifest, self._left = plan, manifest, list(buckets)
        self._plans = plan_files(manifest, sorted({piece.tensor for bucket in buckets for piece in bucket.pieces})) if buckets else []
        with self._named_errors():
            self._made = self._directory.work_directory(plan.version)
            for file in self._plans:
                handle = self._files[file.name] = (self._made / file.name).open("wb")
                handle.write(file.header)
                handle.flush()
                os.posix_fallocate(handle.fileno(), 0, file.size)  # a full disk is known before anything was sent

    def send(self, buffer: torch.Tensor) -> Callable[[], None]:
        """See Outlet."""
        assert self._made is not None, "begin() comes first"
        content = buffer.cpu().numpy().data
        with self._named_errors():
            if not self._plans:
                (self._made / MESSAGE).write_bytes(content)
                return lambda: None
            for piece in self._left.pop(0).pieces:
                file = next(file for file in self._plans if piece.tensor in file.offsets)
                size = piece_bytes(self._manifest, piece)
                row = row_elements(self._manifest.shapes[piece.tensor]) * DTYPE_BYTES[self._manifest.dtypes[piece.tensor]]
                written = os.pwrite(
                    self._files[file.name].fileno(),
                    content[piece.offset : piece.offset + size],
                    file.offsets[piece.tensor] + piece.start * row,
                )
                if written != size:
                    raise OSError(f"only {written} of {size} bytes were written")
        return lambda: None

    def finish(self) -> None:
        """Close the files, add what makes it a Hugging Face model, then the manifest."""
        assert self._made is not None
        with self._named_errors():
            for handle in self._files.values():
                handle.flush()
                os.fsync(handle.fileno())
                handle.close()
            self._files = {}
            if self._plans:
                self._complete_model(self._made)
            content = {
                "version": self._plan.version,
                "mode": self._plan.mode,
                "base_version": self._plan.base_version,
                "files": {file.name: file.stat().st_size for file in sorted(self._made.iterdir())},
            }
            partial = self._made / (MANIFEST + ".partial")
            partial.write_text(json.dumps(content, indent=1))
            os.replace(partial, self._made / MANIFEST)
            self._directory.publish(self._made, self._plan.version)
        self._made = None

    def _complete_model(self, made: Path) -> None:
        if len(self._plans) > 1:
            names = self._manifest.names
            weight_map = {names[tensor]: file.name for file in self._plans for tensor in file.offsets}
            (made / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        if self._model_path:
            from rlpost.checkpoint.export import copy_model_files

            copy_model_files(Path(self._model_path), made, self._manifest.dtypes[0])

    def acknowledge(self, version: int) -> None:
        """Delete what is older than ``version``."""
        with contextlib.suppress(OSError):
            for old in self._directory.versions():
                if old < version:
                    self._directory.delete(old)

    def close(self) -> None:
        """Leave nothing half written."""
        self._abandon()

    def _abandon(self) -> None:
        for handle in self._files.values():
            with contextlib.suppress(OSError):
                handle.close()
        self._files = {}
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
            self._made = None

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._abandon()
            raise InfrastructureError(
                f"weights of version {self._plan.version} could not be written to {self._directory.location}: "
                f"{error.strerror or error}; make room there or set weights.directory to another place"
            ) from error


class DiskInlet:
    """Reads versions."""

    def __init__(self, settings: LinkSettings, _device: torch.device) -> None:
        self._directory = Directory(settings.directory)
        self._timeout_s = settings.timeout_s

    def stream(
        self, plan: SyncPlan, manifest: WeightsManifest, buckets: Sequence[Bucket], sizes: Sequence[int], place: Placing = nowhere
    ) -> Iterator[torch.Tensor]:
        """See Inlet. Raises InfrastructureError when the version does not appear in time or is not whole."""
        content = self._wait_for_manifest(plan)
        with tempfile.TemporaryDirectory(prefix="rlpost-weights-") as scratch:
            directory = self._directory.fetch(plan.version, Path(scratch))
            for name, size in content["files"].items():
                if name != MANIFEST and (not (directory / name).exists() or (directory / name).stat().st_size != size):
                    raise InfrastructureError(f"{directory / name} is not whole: the manifest says {size} bytes")
            if not buckets:
                yield torch.frombuffer(bytearray((directory / MESSAGE).read_bytes()), dtype=torch.uint8)
                return
            yield from _read_buckets(directory, manifest, buckets)

    def _wait_for_manifest(self, plan: SyncPlan) -> dict[str, Any]:
        deadline = time.monotonic() + self._timeout_s
        while (content := self._directory.read_manifest(plan.version)) is None:
            if time.monotonic() > deadline:
                raise InfrastructureError(f"version {plan.version} did not appear in {self._directory.location} in {self._timeout_s:.0f} s")
            time.sleep(POLL_S)
        if (content["mode"], content["base_version"]) != (plan.mode, plan.base_version):
            raise InfrastructureError(
                f"{self._directory.location} holds version {plan.version} as {content['mode']} from {content['base_version']}, "
                f"expected {plan.mode} from {plan.base_version}"
            )
        return content

    def close(self) -> None:
        """Nothing is open."""


def _read_buckets(directory: Path, manifest: WeightsManifest, buckets: Sequence[Bucket]) -> Iterator[torch.Tensor]:
    plans = plan_files(manifest, sorted({piece.tensor for bucket in buckets for piece in bucket.pieces}))
    with contextlib.ExitStack() as stack:
        maps: dict[int, tuple[torch.Tensor, int]] = {}
        for file in plans:
            handle = stack.enter_context((directory / file.name).open("rb"))
            mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            content = torch.frombuffer(mapped, dtype=torch.uint8)
            if bytes(content[: len(file.header)].numpy()) != file.header:
                raise InfrastructureError(f"{directory / file.name} holds other tensors than the trainer's manifest says")
            maps |= {tensor: (content, offset) for tensor, offset in file.offsets.items()}
        for bucket in buckets:
            buffer = torch.empty(bucket.size, dtype=torch.uint8)
            for piece in bucket.pieces:
                content, offset = maps[piece.tensor]
                row = row_elements(manifest.shapes[piece.tensor]) * DTYPE_BYTES[manifest.dtypes[piece.tensor]]
                size = piece_bytes(manifest, piece)
                first = offset + piece.start * row
                buffer[piece.offset : piece.offset + size] = content[first : first + size]
            yield buffer


CARRIER = Carrier(live=False, serve=DiskRendezvous.serve, enter=DiskInlet)
