"""The data sets that come with the program: images, text, tokens and made-up data."""

from __future__ import annotations

import gzip
import importlib.util
import math
import os
import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.core.errors import EnvironmentLacksError, Problem, UserError
from engine.models.data import DataFacts, DataSets, Task, indexed, keyed_generator, training_generator
from engine.models.layers import Batch
from engine.models.losses import IGNORED

# A file of data as a tensor that is mapped into memory: workers of one host share its pages.


def map_file(path: str) -> Tensor:
    """Returns the bytes of a file as a tensor that is mapped into memory; raises UserError if it cannot be read."""
    # Every worker opens the file, which a pipe does not allow.
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError([Problem("data", "a regular file", repr(path))])
    try:
        with open(path, "rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
        # Private: a write would not reach the file.
        return torch.from_file(path, shared=False, size=num_bytes, dtype=torch.uint8)
    except OSError as error:
        raise UserError([Problem("data", "a file that can be read", repr(path), str(error.strerror))]) from error
    except RuntimeError as error:
        raise UserError([Problem("data", "a file that can be mapped into memory", repr(path), str(error))]) from error


# Images with class labels, kept as bytes in memory and converted to floats in 0..1 per microbatch.
NUM_CLASSES = 10  # of all sources here


class ImageData:
    """Samples of two sets of (images, labels): uint8 [n, channels, height, width] to `peak`, perhaps scaled."""

    def __init__(
        self, training: tuple[Tensor, Tensor], validation: tuple[Tensor, Tensor], *, seed: int, peak: int, size: int = 0
    ):
        self.training_set, self.validation_set = training, validation
        self.seed, self.peak = seed, peak
        self.evaluation_sets = {"validation": len(validation[1])}
        channels, height, width = training[0].shape[1:]
        self.facts = DataFacts(
            task="classify", num_classes=NUM_CLASSES, channels=channels, height=size or height, width=size or width
        )

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` images of the training set, drawn with replacement."""
        generator = training_generator(self.seed, step, pipeline, microbatch)
        return self._samples(self.training_set, torch.randint(len(self.training_set[1]), (size,), generator=generator))

    def validation(self, index: int, size: int) -> Batch:
        """Returns the next `size` images of the validation set in its order, cyclically."""
        return self._samples(
            self.validation_set, torch.arange(index * size, (index + 1) * size) % len(self.validation_set[1])
        )

    def _samples(self, image_set: tuple[Tensor, Tensor], chosen: Tensor) -> Batch:
        images = image_set[0][chosen].float() / self.peak
        height_width = (self.facts.height, self.facts.width)
        if images.shape[-2:] != height_width:
            images = F.interpolate(images, height_width, mode="bilinear", align_corners=False)
        return Batch((images,), (image_set[1][chosen],))


def split(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Returns (training, validation): four fifths and one fifth by a permutation that does not depend on the seed."""
    order = torch.randperm(len(labels), generator=keyed_generator(0, "split"))
    training, validation = order[: len(order) * 4 // 5], order[len(order) * 4 // 5 :]
    return (images[training], labels[training]), (images[validation], labels[validation])


def digits(seed: int, *, size: int = 8) -> ImageData:
    """Opens scikit-learn's handwritten digits: 1797 gray images of 8x8, 16 shades, scaled to size x size.

    Reads the file that scikit-learn ships, without the import, which takes each worker more than a second. Raises
    EnvironmentLacksError if scikit-learn is not installed.
    """
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        text = "the digits are part of scikit-learn, which is not installed: pip install scikit-learn"
        raise EnvironmentLacksError(text)
    table = gzip.decompress((Path(package.origin).parent / "datasets/data/digits.csv.gz").read_bytes())
    rows = torch.tensor([[int(value) for value in line.split(b",")] for line in table.split()], dtype=torch.uint8)
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
    training, validation = split(images, labels)
    return ImageData(training, validation, seed=seed, peak=16, size=size)


# A folder of MNIST or CIFAR-10 files, read with struct and gzip.
#
# Formats: MNIST's idx files (``train-images-idx3-ubyte`` and its three companions, or Fashion-MNIST's, gzipped or not)
# and CIFAR-10's binary version (``data_batch_1.bin`` ..., ``test_batch.bin``). CIFAR-10's Python version is pickled,
# and a pickle can run code, so it is refused.

CIFAR_SHAPE = (3, 32, 32)
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32  # label, then the red, green and blue planes


def image_folder(path: str, seed: int) -> ImageData:
    """Opens the folder at `path`; raises UserError if its files are of neither kind, or broken."""
    folder = Path(path)
    cifar_training = sorted(folder.glob("data_batch_*.bin"))
    if cifar_training:
        images, labels = zip(*map(_read_cifar, cifar_training), strict=True)
        training = torch.cat(images), torch.cat(labels)
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
    files = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if not files:
        raise _wrong(folder, f"a folder with a file {patterns[0]}")
    return files[0]


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


# Text as bytes: the documentation topics that ship with Python, or a user's file.
#
# The first nine tenths are for training, the rest for validation. ``causal`` predicts the next byte; ``masked`` hides
# 15 % of the positions of each sample and predicts those.

NUM_BYTES = 256
MASKED_PERCENT = 15


class TokenData:
    """Samples of `sequence` bytes, uint8 in `tokens`, from random places of one long text.

    The masked task adds one token to the 256, the last, which stands for a hidden position. Raises UserError naming
    `source` where the text is too short.
    """

    def __init__(self, source: str, tokens: Tensor, task: Task, seed: int, sequence: int):
        self.facts = DataFacts(task=task, vocabulary=NUM_BYTES + (task == "masked"), sequence=sequence)
        shortest = 10 * (sequence + 1)  # so that the last tenth has one sample and the byte after it
        if len(tokens) < shortest:
            expected = f"at least {shortest} bytes (10 x (sequence + 1))"
            raise UserError([Problem("data", expected, f"{len(tokens)} bytes in {source!r}")])
        num_training = len(tokens) * 9 // 10
        self.training_tokens, self.validation_tokens = tokens[:num_training], tokens[num_training:]
        self.seed = seed

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` samples of the training text."""
        generator = training_generator(self.seed, step, pipeline, microbatch)
        return self._samples(self.training_tokens, size, generator)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples of the validation text; they do not depend on the job's seed."""
        return self._samples(self.validation_tokens, size, keyed_generator(0, "validation", index))

    def _samples(self, tokens: Tensor, size: int, generator: torch.Generator) -> Batch:
        sequence = self.facts.sequence
        starts = torch.randint(len(tokens) - sequence, (size, 1), generator=generator)
        samples = tokens[starts + torch.arange(sequence + 1)].long()
        inputs, following = samples[:, :-1].contiguous(), samples[:, 1:].contiguous()
        if self.facts.task == "causal":
            return Batch((inputs,), (following,))
        # Every sample hides the same number of positions, so that the mean over microbatches is that over samples.
        num_masked = max(1, sequence * MASKED_PERCENT // 100)
        positions = torch.rand(size, sequence, generator=generator).argsort(dim=1)[:, :num_masked]
        targets = torch.full_like(inputs, IGNORED).scatter(1, positions, inputs.gather(1, positions))
        return Batch((inputs.scatter(1, positions, self.facts.vocabulary - 1),), (targets,))


def text(task: Task, path: str, seed: int, *, sequence: int = 32) -> TokenData:
    """Opens the file at `path`, by default Python's documentation; raises UserError if unreadable or too short."""
    content = map_file(path) if path else _python_topics()
    return TokenData(path or "text", content, task, seed, sequence)


def _python_topics() -> Tensor:
    from pydoc_data.topics import topics  # half a megabyte, imported only if used

    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


# Random data that can be learned, for every task, generated from the job's seed.
#
# Vectors are drawn for each microbatch; a text or images once, when the source is opened.

NUM_TOKENS = 100_000
NUM_IMAGES = 1000


class VectorData:
    """Normal vectors; their targets are a fixed linear map of them, with outputs of variance 1."""

    def __init__(self, seed: int, *, features: int = 32, outputs: int = 1):
        self.facts = DataFacts(task="regress", features=features, outputs=outputs)
        self.seed = seed
        self.teacher = torch.randn(features, outputs, generator=keyed_generator(seed, "teacher")) / features**0.5

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` new vectors."""
        return self._samples(size, training_generator(self.seed, step, pipeline, microbatch))

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` vectors that no training microbatch draws."""
        return self._samples(size, keyed_generator(self.seed, "validation", index))

    def _samples(self, size: int, generator: torch.Generator) -> Batch:
        inputs = torch.randn(size, self.facts.features, generator=generator)
        return Batch((inputs,), (inputs @ self.teacher,))


def synthetic_tokens(task: Task, seed: int, *, sequence: int = 32) -> TokenData:
    """Returns a text in which each byte is the previous one plus 1, 2, 3 or 4; its entropy is 1.39 nats per byte."""
    increments = torch.randint(1, 5, (NUM_TOKENS,), generator=keyed_generator(seed, "tokens"))
    content = (increments.cumsum(0) % NUM_BYTES).to(torch.uint8)
    return TokenData("synthetic", content, task, seed, sequence)


def synthetic_images(seed: int, *, channels: int = 3, size: int = 32) -> ImageData:
    """Returns images of a pattern of their class plus noise of the same variance."""
    generator = keyed_generator(seed, "images")
    labels = torch.randint(NUM_CLASSES, (NUM_IMAGES,), generator=generator)
    shape = (channels, size, size)
    patterns = torch.randint(128, (NUM_CLASSES, *shape), generator=generator, dtype=torch.uint8)
    noise = torch.randint(128, (NUM_IMAGES, *shape), generator=generator, dtype=torch.uint8)
    training, validation = split(patterns[labels] + noise, labels)
    return ImageData(training, validation, seed=seed, peak=255)


# A file of token numbers, memory-mapped: every worker reads the pages that it needs, and no worker reads the file.
#
# A file has unsigned numbers of two or four bytes, in the byte order of this machine, and nothing else (the form of
# nanoGPT's prepared data). A sample has `sequence` tokens and the following ones as targets. Samples do not overlap; a
# rest at the end is left out. The first nine tenths of the samples are for training.

_TYPES = {2: torch.uint16, 4: torch.int32}  # the sign of four bytes is never set: no vocabulary is so large


class TokenWindows:
    """Samples first .. end - 1 of a file of tokens: (inputs, targets), each int64 [sequence]."""

    def __init__(self, tokens: Tensor, sequence: int, vocabulary: int, first: int, end: int, path: str):
        self._tokens, self._sequence, self._vocabulary, self._path = tokens, sequence, vocabulary, path
        self._first, self._end = first, end

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self._end - self._first

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Returns one sample; raises UserError for a token beyond the vocabulary."""
        start = (self._first + number) * self._sequence
        window = self._tokens[start : start + self._sequence + 1].long()
        largest = int(window.max())
        if largest >= self._vocabulary or int(window.min()) < 0:
            expected = f"tokens below data_args.vocabulary {self._vocabulary}"
            raise UserError([Problem("data", expected, f"{largest} behind token {start} of {self._path!r}")])
        return window[:-1], window[1:]


def tokens(path: str, seed: int, *, vocabulary: int = 50257, sequence: int = 32, token_bytes: int = 2) -> DataSets:
    """Maps the file of tokens at `path`; raises UserError if it cannot be mapped, or is too short."""
    if token_bytes not in _TYPES:
        raise UserError([Problem("data_args.token_bytes", "2 or 4", repr(token_bytes))])
    content = map_file(path)
    if len(content) % token_bytes:
        expected = f"a file of whole tokens (data_args.token_bytes {token_bytes})"
        raise UserError([Problem("data", expected, f"{len(content)} bytes in {path!r}")])
    mapped = content.view(_TYPES[token_bytes])
    num_windows = (len(mapped) - 1) // sequence
    if num_windows < 2:
        expected = f"at least {2 * sequence + 1} tokens (2 x sequence + 1)"
        raise UserError([Problem("data", expected, f"{len(mapped)} tokens in {path!r}")])
    num_training = max(1, num_windows * 9 // 10)
    training = TokenWindows(mapped, sequence, vocabulary, 0, num_training, path)
    validation = TokenWindows(mapped, sequence, vocabulary, num_training, num_windows, path)
    facts = DataFacts(task="causal", vocabulary=vocabulary, sequence=sequence)
    return indexed(training, validation, facts, seed=seed)
