"""A folder of MNIST or CIFAR-10 files, read with struct and gzip.

Formats: MNIST's idx files (``train-images-idx3-ubyte`` and its three companions, or Fashion-MNIST's, gzipped or not)
and CIFAR-10's binary version (``data_batch_1.bin`` ..., ``test_batch.bin``). CIFAR-10's Python version is pickled, and
a pickle can run code, so it is refused.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.models.datasets.images import NUM_CLASSES, ImageData

CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32  # label, then the red, green and blue planes


def image_folder(path: str, seed: int) -> ImageData:
    """Opens the folder at `path`; raises UserError if its files are of neither kind, or broken."""
    folder = Path(path)
    cifar_training = sorted(folder.glob("data_batch_*.bin"))
    if cifar_training:
        training = _join([_read_cifar(file) for file in cifar_training])
        validation = _read_cifar(_only(folder, "test_batch.bin"))
    elif any(folder.glob("data_batch_*")):
        expected = "the binary version of CIFAR-10 (data_batch_1.bin ...)"
        raise _wrong(folder, expected, "the Python version is pickled and is not read; take cifar-10-binary.tar.gz")
    elif any(folder.glob("train-images*")):
        training, validation = _read_mnist(folder, "train"), _read_mnist(folder, "t10k")
        if training[0].shape[1:] != validation[0].shape[1:]:
            raise _wrong(folder, "images of one size in train- and t10k- files")
    else:
        raise _wrong(folder, "a folder of MNIST idx files or CIFAR-10 data_batch_*.bin files")
    return ImageData(training, validation, seed=seed, peak=255)


def _wrong(path: Path, expected: str, hint: str = "") -> UserError:
    return UserError([Problem("data", expected, repr(str(path)), hint)])


def _only(folder: Path, *patterns: str) -> Path:
    found = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not found:
        raise _wrong(folder, f"a folder with a file {patterns[0]}")
    return found[0]


def _read(file: Path) -> bytes:
    try:
        content = file.read_bytes()
        return gzip.decompress(content) if file.suffix == ".gz" else content
    except (OSError, EOFError, zlib.error) as error:
        raise _wrong(file, "a file that can be read", str(error)) from error


def _read_cifar(file: Path) -> tuple[Tensor, Tensor]:
    content = _read(file)
    if not content or len(content) % CIFAR_RECORD_BYTES:
        raise _wrong(file, f"records of {CIFAR_RECORD_BYTES} bytes", f"it has {len(content)} bytes")
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, CIFAR_RECORD_BYTES)
    return _checked(file, records[:, 1:].reshape(-1, *CIFAR_SHAPE), records[:, 0])


def _join(sets: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.cat([images for images, _ in sets]), torch.cat([labels for _, labels in sets])


def _read_mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    # Some copies of the files have a dot in place of the hyphen.
    image_file = _only(folder, f"{part}-images-idx3-ubyte*", f"{part}-images.idx3-ubyte*")
    label_file = _only(folder, f"{part}-labels-idx1-ubyte*", f"{part}-labels.idx1-ubyte*")
    images, labels = _read_idx(image_file, 3), _read_idx(label_file, 1)
    if len(images) != len(labels):
        raise _wrong(label_file, f"one label for each of {len(images)} images", f"it has {len(labels)}")
    return _checked(label_file, images.unsqueeze(1), labels)


def _read_idx(file: Path, num_dimensions: int) -> Tensor:
    """Reads an idx file of unsigned bytes: 0, 0, type 8, number of dimensions, the sizes big-endian, the values."""
    content = _read(file)
    header_bytes = 4 + 4 * num_dimensions
    if content[:4] != bytes((0, 0, 8, num_dimensions)) or len(content) < header_bytes:
        raise _wrong(file, f"an idx file of unsigned bytes with {num_dimensions} dimensions")
    sizes = struct.unpack(f">{num_dimensions}I", content[4:header_bytes])
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8)[header_bytes:]
    num_values = math.prod(sizes)
    if num_values == 0 or len(values) != num_values:
        raise _wrong(file, f"{num_values} bytes after the header", f"it has {len(values)}")
    return values.reshape(sizes)


def _checked(file: Path, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    largest = int(labels.max())
    if largest >= NUM_CLASSES:
        raise _wrong(file, f"labels 0..{NUM_CLASSES - 1}", f"the largest is {largest}")
    return images, labels.long()
