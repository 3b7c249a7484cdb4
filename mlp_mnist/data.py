"""Images of digits (or clothes) as uint8: MNIST, Fashion-MNIST, or the digits that scikit-learn carries.

Resolution order (one line says which was taken):
  1. a prepared TFDS folder (--data-dir, TFDS_DATA_DIR, ~/tensorflow_datasets), read without TensorFlow;
  2. a TFDS download, only where TensorFlow is installed and the host answers within three seconds;
  3. `digits`: scikit-learn's 1,797 handwritten digits. Only `--dataset auto` may fall through to it.
"""
import hashlib
import importlib.util
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DOWNLOAD_HOSTS = {"mnist": "storage.googleapis.com",  # where TFDS fetches each data set from
                  "fashion_mnist": "fashion-mnist.s3-website.eu-central-1.amazonaws.com"}
DATASETS = ("auto", *DOWNLOAD_HOSTS, "digits")
PARTS = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass(frozen=True)
class Dataset:
    """Images uint8 (n, 28, 28), 0 background; labels int32 (n,), 0 to 9."""
    name: str
    source: str  # one line: where it was read from
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(dataset, data_dir=""):
    """dataset: "auto", "mnist", "fashion_mnist" or "digits" -> Dataset.

    Raises ValueError, naming folder and cause, where a data set asked for by name is not there.
    """
    if dataset not in DATASETS:
        raise ValueError(f"dataset {dataset!r} is not one of {', '.join(DATASETS)}")
    if dataset != "digits":
        name = "mnist" if dataset == "auto" else dataset
        try:
            return from_tfds(name, data_dir)
        except FileNotFoundError as why:
            if dataset != "auto":
                raise ValueError(f"dataset {name}: {why}. Prepare it with TFDS and pass --data-dir, or use "
                                 "--dataset digits") from why
            print(f"mnist is not at hand ({why}); falling back to digits", file=sys.stderr)
    return digits()


def flatten(images):
    """uint8 (n, 28, 28) -> float32 (n, 784) in [0, 1]; NumPy arrays stay NumPy, JAX arrays JAX."""
    return images.reshape(len(images), -1).astype(np.float32) / np.float32(255)


def digits():
    """scikit-learn's copy of the UCI test set of handwritten digits (1,797 of 8 x 8, values 0 to 16).

    Each pixel becomes 3 x 3 pixels, with a border of 2, as MNIST has one: 28 x 28. The split is by index: every
    fifth example (4, 9, 14, ...) tests, 359 in all, and 1,438 train, so that the same writers are in both parts.
    """
    from sklearn.datasets import load_digits  # here: the import takes a second, and MNIST doesn't need it
    bunch = load_digits()
    images = np.kron(bunch.images * (255 / 16), np.ones((1, 3, 3))).round().astype(np.uint8)
    images, labels = np.pad(images, ((0, 0), (2, 2), (2, 2))), bunch.target.astype(np.int32)
    test = np.arange(len(labels)) % 5 == 4
    return Dataset("digits", "scikit-learn's load_digits, upsampled to 28 x 28",
                   images[~test], labels[~test], images[test], labels[test])


# Through TFDS ----------------------------------------------------------------------------

def from_tfds(name, data_dir=""):
    """The Dataset `name` as TFDS has it. Raises FileNotFoundError saying why it can't be had."""
    given = data_dir or os.environ.get("TFDS_DATA_DIR", "")
    root = Path(given or "~/tensorflow_datasets").expanduser()
    if not (root / name).is_dir():
        reason = download_impossible(DOWNLOAD_HOSTS[name])
        if reason:
            raise FileNotFoundError(f"no folder {name} in {root}, and no download: {reason}")
        import tensorflow_datasets as tfds
        tfds.builder(name, data_dir=root, file_format="array_record").download_and_prepare()
    versions = sorted(p for p in (root / name).iterdir() if (p / "dataset_info.json").is_file())
    if not versions:
        raise FileNotFoundError(f"{root / name} holds no prepared version")
    prepared = versions[-1]
    cached = cache_file(name, prepared)
    arrays = read_cache(cached)
    if arrays is None:
        print(f"decoding {name} (once: about 40 s for 70,000 images)", file=sys.stderr)
        arrays = write_cache(cached, read_prepared(name, root, prepared))
    return Dataset(name, f"TFDS {name} {prepared.name}", **arrays)


def read_prepared(name, root, prepared):
    """The four arrays of a prepared folder, by name."""
    if any(prepared.glob("*.tfrecord*")):
        raise FileNotFoundError(f"{prepared} holds tfrecord files, which only TensorFlow reads: prepare it again "
                                'with file_format="array_record"')
    import tensorflow_datasets as tfds
    arrays = {}
    for split in ("train", "test"):
        try:
            records = list(tfds.data_source(name, split=split, data_dir=root))
        except Exception as why:  # TFDS raises its own types for a damaged folder
            raise FileNotFoundError(f"{prepared}: the part {split!r} can't be read ({why})") from why
        arrays[f"{split}_images"] = np.stack([record["image"][:, :, 0] for record in records])
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
    """The four arrays by name, or None where the file is missing, truncated or not ours."""
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
