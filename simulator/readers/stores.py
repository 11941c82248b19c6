"""Graph stores on disk: an `.npz` or a folder of `.npy` files to named arrays, their hash, and back."""

import hashlib
import os
import shutil
import uuid
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from simulator.errors import SpecError

Arrays = Mapping[str, NDArray[Any]]

# What numpy and zipfile raise for files that are cut off, damaged or of another format.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)
# Of an .npz file, which is a zip file, and of an .npy file.
_FIRST_BYTES = (b"PK", b"\x93N")
# Bytes that are hashed at a time: small enough to stay out of memory's way, large enough to cost no calls.
_HASHED_BYTES = 1 << 26


class Numbers(StrEnum):
    """What an array may hold; the value names it in errors."""

    INTEGERS = "integers"
    BOOLEANS = "booleans"
    REALS = "real numbers"

    @property
    def dtype_kinds(self) -> str:
        """Codes of the numpy types that hold them."""
        return {Numbers.INTEGERS: "iu", Numbers.BOOLEANS: "b", Numbers.REALS: "fiub"}[self]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Store:
    """The arrays of a graph store by name, those of a folder memory-mapped and read-only."""

    path: Path
    arrays: Arrays

    def sha256(self) -> str:
        """Return the hash of all arrays as they lie on disk, the same for a folder and an `.npz`."""
        return arrays_sha256(self.arrays)

    def error(self, name: str, rule: str, value: object, fix: str) -> SpecError:
        """Return the exception for an array, or a setting, that breaks a rule."""
        return SpecError(f"{self.path}: {name} {rule}, got {value}; {fix}")

    def array(self, name: str, numbers: Numbers, shape: tuple[int | str, ...]) -> NDArray[Any]:
        """Return an array of a given type and shape, where a text such as "E" stands for any length.

        Raises:
            SpecError: if it is missing or different.
        """
        if name not in self.arrays:
            raise self.error(
                name, "must be in the store", f"only {', '.join(self.arrays) or 'no arrays'}", "save it too"
            )
        array = self.arrays[name]
        if array.dtype.kind not in numbers.dtype_kinds:
            raise self.error(name, f"must hold {numbers}", f"{array.dtype}", "convert it before saving")
        lengths = [length if isinstance(want, str) else want for length, want in zip(array.shape, shape, strict=False)]
        if list(array.shape) != lengths or len(array.shape) != len(shape):
            wanted = f"[{', '.join(map(str, shape))}]"
            raise self.error(name, f"must have shape {wanted}", list(array.shape), "reshape it before saving")
        return array

    def require_within(self, name: str, array: NDArray[Any], low: int, high: int, fix: str) -> None:
        """Raise `SpecError` with the first offender unless all entries of an array lie within `low` and `high`."""
        if array.size == 0 or (array.min() >= low and array.max() <= high):
            return
        where = np.unravel_index(np.argmax((array < low) | (array > high)), array.shape)
        place = ", ".join(str(int(index)) for index in where)
        raise self.error(f"{name}[{place}]", f"must be within {low} and {high}", array[where], fix)


def load_store(path: Path) -> Store:
    """Return the arrays of a graph store.

    Raises:
        SpecError: if there is no such file or folder, or an array cannot be read without unpickling objects.
    """
    if os.path.isdir(path):
        files = {file.stem: file for file in sorted(path.glob("*.npy"))}
        return Store(path=path, arrays={name: load_npy(file) for name, file in files.items()})
    if not os.path.exists(path):
        raise SpecError(f"{path}: path must be an .npz file or a folder of .npy files, got nothing there; correct it")
    return Store(path=path, arrays=_load_npz(path))


def _load_npz(path: Path) -> dict[str, NDArray[Any]]:
    """Return all arrays of an `.npz` file."""
    where = str(path)
    try:
        with path.open("rb") as opened:
            if (
                opened.read(len(_FIRST_BYTES[0])) not in _FIRST_BYTES
            ):  # numpy would speak of pickles, and how to load them
                raise ValueError("a file of another kind")
            opened.seek(0)
            file = np.load(opened, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            arrays = {}
            for name in file.files:
                where = f"{path}: {name}"
                arrays[name] = file[name]
            return arrays
    except _UNREADABLE as error:
        raise _unreadable(where, "an .npz file", error) from error


def load_npy(path: Path) -> NDArray[Any]:
    """Return the array of an `.npy` file, memory-mapped and read-only.

    Raises:
        SpecError: if it is missing, cut off, of another format, or holds Python objects.
    """
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except _UNREADABLE as error:
        raise _unreadable(str(path), "an .npy file", error) from error


def _unreadable(where: str, kind: str, error: Exception) -> SpecError:
    """Return the exception for a file that numpy cannot read."""
    reason = str(error).rstrip(".") or type(error).__name__
    return SpecError(f"{where} must be whole in {kind} of numbers or text without objects, got {reason}; save it again")


def save_store(arrays: Arrays, folder: Path) -> None:
    """Write arrays to a new folder that appears with all of them or not at all.

    Raises:
        SpecError: if the folder exists and is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    staging.mkdir()
    try:
        for name, array in arrays.items():
            np.save(staging / f"{name}.npy", array, allow_pickle=False)
        try:
            os.rename(staging, folder)
        except OSError as error:
            if not folder.exists():
                raise
            message = f"{folder}: folder must be new, got one that exists; remove it or write elsewhere"
            raise SpecError(message) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_npy(array: NDArray[Any], path: Path) -> None:
    """Write an array to an `.npy` file that appears, or replaces an older one, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.npy")
    try:
        np.save(staging, array, allow_pickle=False)
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def arrays_sha256(arrays: Arrays) -> str:
    """Return the hash of names, types, shapes and bytes of arrays, by name in order."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype.str} {array.shape}\n".encode())
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _HASHED_BYTES):
            digest.update(flat[start : start + _HASHED_BYTES].data)
    return digest.hexdigest()
