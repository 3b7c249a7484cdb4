"""Small colour images as uint8: CIFAR-10, or ten drawn shapes; and what is done to them before a step.

Legend: n images, B batch, H height, W width. Images are (n, H, W, 3) with rows first and channels (R, G, B) last.

Resolution order (one line says which was taken):
  1. a prepared TFDS folder (--data-dir, TFDS_DATA_DIR, ~/tensorflow_datasets), read without TensorFlow;
     or a folder with the files of CIFAR-10's binary version (data_batch_1.bin, ..., test_batch.bin);
  2. a TFDS download, only where TensorFlow is installed and the host answers within three seconds;
  3. `shapes`: ten classes of drawn shapes, made from a seed. Only `--dataset auto` may fall through to it.
TFDS itself stores PNG. A prepared folder may instead hold the images re-encoded as JPEG, which loses detail, so that
accuracies are a little below those of the original: `Images.source` then says "JPEG re-encoded", and so must whoever
quotes an accuracy. The accuracies in README.md were measured on such a folder.
"""
import hashlib
import importlib.util
import os
import socket
import sys
import threading
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

DOWNLOAD_HOST = "www.cs.toronto.edu"  # where TFDS fetches CIFAR-10 from
DATASETS = ("auto", "cifar10", "shapes")
PARTS = ("train_images", "train_labels", "test_images", "test_labels", "jpeg")  # of a cache file
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN = np.array((0.4914, 0.4822, 0.4465), np.float32)  # of CIFAR-10's training pixels by channel, 1 being white
STD = np.array((0.2470, 0.2435, 0.2616), np.float32)  # their standard deviation


class Images(NamedTuple):
    """Images uint8 (n, 32, 32, 3); labels int32 (n,), indices into classes."""
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    classes: tuple
    name: str  # cifar10 or shapes
    source: str  # one line: where it was read from


def load(dataset="auto", data_dir=""):
    """dataset: "auto", "cifar10" or "shapes" -> Images.

    Raises ValueError, naming folder and cause, where a data set asked for by name is not there.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset {dataset!r} is not one of {', '.join(DATASETS)}")
    if dataset != "shapes":
        try:
            return cifar10(data_dir)
        except FileNotFoundError as why:
            if dataset != "auto":
                raise ValueError(f"dataset cifar10: {why}. Prepare it with TFDS and pass --data-dir, or use "
                                 "--dataset shapes") from why
            print(f"cifar10 is not at hand ({why}); falling back to shapes", file=sys.stderr)
    return shapes()


# On the device ---------------------------------------------------------------------------

def normalise(images, dtype=jnp.float32):
    """uint8 (B, H, W, 3) -> dtype: each channel less CIFAR-10's mean, over its standard deviation."""
    return ((images.astype(jnp.float32) / 255 - MEAN) / STD).astype(dtype)


def augment(key, images, pad=4, cutout=8):
    """A random crop, mirroring and blank square for each image: (B, H, W, C), uint8 or float -> the same.

    pad: up to so many pixels an image is shifted by; what comes in from outside is its mirror image.
    cutout: side of a square somewhere in the image that is blanked (DeVries and Taylor 2017), cut off at the edges;
    0 for none. Blank is CIFAR-10's mean colour in uint8 and 0, the mean after `normalise`, in floats.
    One key an image, through vmap: an image's fate depends on its place in the batch, not on the batch's size.
    """
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(images)))
    return jax.vmap(partial(augment_one, pad=pad, cutout=cutout))(keys, images)


def augment_one(key, image, pad, cutout):
    H, W, C = image.shape
    crop_key, flip_key, cut_key = jax.random.split(key, 3)
    top, left = jax.random.randint(crop_key, (2,), 0, 2 * pad + 1)
    padded = jnp.pad(image, ((pad, pad), (pad, pad), (0, 0)), mode="reflect")
    image = lax.dynamic_slice(padded, (top, left, 0), (H, W, C))
    image = jnp.where(jax.random.bernoulli(flip_key), image[:, ::-1], image)
    # The square's first row and column: centres are uniform over the pixels, so some squares stick out.
    row, column = jax.random.randint(cut_key, (2,), 0, jnp.array([H, W])) - cutout // 2
    rows, columns = jnp.arange(H)[:, None] - row, jnp.arange(W) - column
    inside = (rows >= 0) & (rows < cutout) & (columns >= 0) & (columns < cutout)
    blank = (255 * MEAN).astype(image.dtype) if image.dtype == jnp.uint8 else jnp.zeros(C, image.dtype)
    return jnp.where(inside[:, :, None], blank, image)


# Drawn shapes ----------------------------------------------------------------------------

def chebyshev(u, v):
    return np.maximum(abs(u), abs(v))


def plus(u, v):
    return (np.minimum(abs(u), abs(v)) < 0.25) & (chebyshev(u, v) < 0.9)


# Whether a point belongs to the shape; u to the right, v down, in half sizes. Mirroring keeps every class.
SHAPES = {
    "disc": lambda u, v: np.hypot(u, v) < 0.9,
    "ring": lambda u, v: abs(np.hypot(u, v) - 0.7) < 0.25,
    "square": lambda u, v: chebyshev(u, v) < 0.85,
    "frame": lambda u, v: abs(chebyshev(u, v) - 0.65) < 0.25,
    "triangle": lambda u, v: (v < 0.7) & (abs(u) < (v + 1) / 1.8),
    "diamond": lambda u, v: abs(u) + abs(v) < 1,
    "plus": plus,
    "cross": lambda u, v: plus((u + v) / 2 ** 0.5, (u - v) / 2 ** 0.5),
    "bars": lambda u, v: (chebyshev(u, v) < 0.9) & (abs(abs(v) - 0.36) > 0.18),
    "columns": lambda u, v: (chebyshev(u, v) < 0.9) & (abs(abs(u) - 0.36) > 0.18),
}


def shapes(seed=0, train=8000, test=2000):
    """Images of SHAPES at random places, sizes, small angles and colours, with noise: `train` and `test` of them.

    A shape is brighter than its ground in a channel as often as darker, so a pixel's mean is the same in every
    class and a linear model has nothing to go by.
    """
    rng = np.random.default_rng(seed)
    n, side = train + test, 32
    labels = rng.permutation(np.arange(n) % len(SHAPES)).astype(np.int32)
    half = rng.uniform(7, 12, (n, 1, 1))
    row, column = rng.uniform(half, side - 1 - half, (2, n, 1, 1))
    angle = rng.uniform(-0.15, 0.15, (n, 1, 1))  # radians
    y, x = np.arange(side)[:, None] - row, np.arange(side) - column  # (n, side, 1), (n, 1, side)
    u = ((np.cos(angle) * x + np.sin(angle) * y) / half).astype(np.float32)
    v = ((np.cos(angle) * y - np.sin(angle) * x) / half).astype(np.float32)
    drawn = np.empty((n, side, side), bool)
    for label, contains in enumerate(SHAPES.values()):
        these = labels == label
        drawn[these] = contains(u[these], v[these])
    ground = rng.random((n, 1, 1, 3), np.float32)
    contrast = rng.uniform(0.2, 0.5, (n, 1, 1, 3)).astype(np.float32) * np.where(ground < 0.5, 1, -1)
    noise = 0.1 * rng.standard_normal((n, side, side, 3), np.float32)
    images = ground + contrast * drawn[..., None] + noise
    images = (255 * images.clip(0, 1)).round().astype(np.uint8)
    return Images(images[:train], labels[:train], images[train:], labels[train:], tuple(SHAPES), "shapes",
                  f"drawn from seed {seed}")


# CIFAR-10 --------------------------------------------------------------------------------

def from_planes(records):
    """Images of CIFAR's binary records, which hold the red plane, then the green and the blue one, each row by row.

    3,072 bytes (without the label) -> uint8 (32, 32, 3); or uint8 (..., 3072) -> (..., 32, 32, 3). Reshaping to
    (32, 32, 3) would give no error and no picture. Raises ValueError for another length.
    """
    planes = np.frombuffer(records, np.uint8) if isinstance(records, bytes) else records
    if planes.shape[-1] != 3 * 32 * 32:
        raise ValueError(f"a record of {planes.shape[-1]} bytes: an image without its label has {3 * 32 * 32}")
    return np.moveaxis(planes.reshape(*planes.shape[:-1], 3, 32, 32), -3, -1)


def cifar10(data_dir=""):
    """CIFAR-10 as TFDS or the binary version has it. Raises FileNotFoundError saying why it can't be had."""
    given = data_dir or os.environ.get("TFDS_DATA_DIR", "")
    root = Path(given or "~/tensorflow_datasets").expanduser()
    if not (root / "cifar10").is_dir():
        if (root / "test_batch.bin").is_file():
            return Images(**read_binary(root), classes=CLASSES, name="cifar10", source="CIFAR-10's binary version")
        reason = download_impossible(DOWNLOAD_HOST)
        if reason:
            raise FileNotFoundError(f"no folder cifar10 in {root}, and no download: {reason}")
        import tensorflow_datasets as tfds
        tfds.builder("cifar10", data_dir=root, file_format="array_record").download_and_prepare()
    versions = sorted(p for p in (root / "cifar10").iterdir() if (p / "dataset_info.json").is_file())
    if not versions:
        raise FileNotFoundError(f"{root / 'cifar10'} holds no prepared version")
    prepared = versions[-1]
    cached = cache_file("cifar10", prepared)
    arrays = read_cache(cached)
    if arrays is None:
        print("decoding cifar10 (once: about 40 s for 60,000 images)", file=sys.stderr)
        arrays = write_cache(cached, read_prepared("cifar10", root, prepared))
    source = f"TFDS cifar10 {prepared.name}" + (", JPEG re-encoded" if arrays.pop("jpeg") else "")
    return Images(**arrays, classes=CLASSES, name="cifar10", source=source)


def read_binary(folder):
    """The four arrays of a folder with the binary version, by name: there a record is a label and an image's planes."""
    arrays = {}
    for split, names in {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}.items():
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"{folder} lacks {', '.join(missing)} of CIFAR-10's binary version")
        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        if len(records) % (1 + 3 * 32 * 32):
            raise FileNotFoundError(f"{folder}: the {split} files hold no whole number of records of 3,073 bytes")
        records = records.reshape(-1, 1 + 3 * 32 * 32)
        arrays[f"{split}_images"] = np.ascontiguousarray(from_planes(records[:, 1:]))
        arrays[f"{split}_labels"] = records[:, 0].astype(np.int32)
    return arrays


def read_prepared(name, root, prepared):
    """The four arrays of a prepared TFDS folder, by name, and whether it holds them as JPEG ("jpeg", a bool)."""
    if any(prepared.glob("*.tfrecord*")):
        raise FileNotFoundError(f"{prepared} holds tfrecord files, which only TensorFlow reads: prepare it again "
                                'with file_format="array_record"')
    import tensorflow_datasets as tfds
    arrays = {}
    for split in ("train", "test"):
        try:
            stored = tfds.data_source(name, split=split, data_dir=root, decoders={"image": tfds.decode.SkipDecoding()})
            arrays["jpeg"] = np.array(stored[0]["image"].startswith(b"\xff\xd8"))  # how a JPEG file begins
            records = list(tfds.data_source(name, split=split, data_dir=root))
        except Exception as why:  # TFDS raises its own types for a damaged folder
            raise FileNotFoundError(f"{prepared}: the part {split!r} can't be read ({why})") from why
        arrays[f"{split}_images"] = np.stack([record["image"] for record in records])
        arrays[f"{split}_labels"] = np.array([record["label"] for record in records], np.int32)
    return arrays


def download_impossible(host):
    """None, or why a download should not be tried: TFDS alone would retry for minutes without a network."""
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow, which TFDS prepares with, is not installed"
    found = []
    lookup = threading.Thread(target=lambda: found.append(resolves(host)), daemon=True)
    lookup.start()
    lookup.join(3)
    return None if found == [True] else f"{host} does not resolve within 3 seconds"


def resolves(host):
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


# Cache -----------------------------------------------------------------------------------

def cache_file(name, prepared):
    """In the user's cache folder, never beside the data, which may be read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or (
        os.environ.get("LOCALAPPDATA") if os.name == "nt" else None) or "~/.cache"
    source = hashlib.sha256(str(prepared.resolve()).encode()).hexdigest()[:12]
    return Path(base).expanduser() / "jax-worked-examples" / f"{name}-{prepared.name}-{source}.npz"


def digest(arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(arrays[part]) for part in PARTS)).hexdigest()


def read_cache(path):
    """The arrays by name, or None where the file is missing, truncated or not ours."""
    try:
        with np.load(path) as stored:
            arrays = {part: stored[part] for part in PARTS}
            return arrays if digest(arrays) == str(stored["sha256"]) else None
    except FileNotFoundError:
        return None
    except Exception as why:  # np.load raises several types for a damaged file; all mean: build it again
        print(f"rebuilding the cache {path.name}: {why}", file=sys.stderr)
        return None


def write_cache(path, arrays):
    """Stores the arrays under a temporary name, then renames; an unwritable cache folder costs only time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "wb") as out:
            np.savez(out, **arrays, sha256=digest(arrays))
        os.replace(temporary, path)
    except OSError as why:
        print(f"the cache {path} can't be written ({why}); decoding the data again next time", file=sys.stderr)
    return arrays
