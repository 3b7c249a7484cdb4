"""Text as character ids: tiny Shakespeare, a file of yours, or the text every Python carries.

Legend: B batch, T time. Resolution order (one line says which was taken):
  1. a prepared TFDS folder (--data-dir, TFDS_DATA_DIR, ~/tensorflow_datasets), read without TensorFlow;
  2. a TFDS download, only where TensorFlow is installed and the host answers within three seconds;
  3. `python-docs`: the text of CPython's pydoc_data.topics. Only `--dataset auto` may fall through to it.
"""
import hashlib
import importlib.util
import os
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

DOWNLOAD_HOST = "raw.githubusercontent.com"  # where TFDS fetches tiny_shakespeare from


@dataclass(frozen=True)
class Corpus:
    """A text as ids: train and val are 1-D unsigned integer arrays, vocab the characters in id order."""
    name: str
    source: str  # one line: where it was read from
    vocab: str
    train: np.ndarray
    val: np.ndarray


def load(dataset, data_dir=""):
    """dataset: "auto", "tiny_shakespeare", "python-docs" or the path of a UTF-8 text file -> Corpus.

    Raises ValueError, naming folder and cause, where a data set asked for by name is not there.
    """
    if dataset in ("auto", "tiny_shakespeare"):
        try:
            parts, source = tiny_shakespeare(data_dir)
            return encode_corpus("tiny_shakespeare", source, *parts)
        except FileNotFoundError as why:
            if dataset != "auto":
                raise ValueError(f"dataset tiny_shakespeare: {why}. Prepare it with TFDS and pass --data-dir, or use "
                                 "--dataset python-docs, or --dataset FILE.txt") from why
            print(f"tiny_shakespeare is not at hand ({why}); falling back to python-docs", file=sys.stderr)
    if dataset in ("auto", "python-docs"):
        from pydoc_data.topics import topics
        text = "\n".join(topics[name] for name in sorted(topics))
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return split_corpus("python-docs", text, "pydoc_data.topics of Python "
                            f"{sys.version_info.major}.{sys.version_info.minor}, {len(text):,} characters, "
                            f"sha256 {digest}")
    path = Path(dataset).expanduser()
    if not path.is_file():
        raise ValueError(f"dataset {dataset!r} is neither auto, tiny_shakespeare, python-docs nor a text file")
    try:
        text = path.read_text(encoding="utf-8")  # never the locale's encoding: LC_ALL=C must read the same
    except UnicodeDecodeError as why:
        raise ValueError(f"{dataset} is not UTF-8 text (byte {why.start}): convert it first") from why
    return split_corpus(path.name, text, f"{dataset}, {len(text):,} characters")


def split_corpus(name, text, source):
    """The first 90 % trains, the last 10 % validates."""
    cut = int(0.9 * len(text))
    return encode_corpus(name, source, text[:cut], text[cut:])


def encode_corpus(name, source, train, val):
    vocab = "".join(sorted(set(train + val)))
    return Corpus(name, source, vocab, encode(train, vocab), encode(val, vocab))


def encode(text, vocab):
    """Characters -> ids, uint8 or uint16. Raises ValueError that lists the characters outside the vocabulary."""
    unknown = sorted(set(text) - set(vocab))
    if unknown:
        raise ValueError(f"characters outside the vocabulary: {' '.join(map(repr, unknown))}; it has {vocab!r}")
    ids = {character: i for i, character in enumerate(vocab)}
    return np.fromiter((ids[c] for c in text), np.uint8 if len(vocab) <= 256 else np.uint16, len(text))


def decode(ids, vocab):
    return "".join(vocab[i] for i in ids)


# Batches ---------------------------------------------------------------------------------

def sample_batch(ids, key, step, batch_size, context):
    """Random crops, a pure function of (key, step): nothing to save, nothing to replay on resume.

    ids: (n,) integer -> tokens, targets: (B, T) int32, targets one character ahead.
    """
    starts = jax.random.randint(jax.random.fold_in(key, step), (batch_size,), 0, ids.shape[0] - context)
    window = ids[starts[:, None] + jnp.arange(context + 1)].astype(jnp.int32)
    return window[:, :-1], window[:, 1:]


def even_windows(ids, context, count):
    """(tokens, targets), (count, T) each, spread evenly over ids: the fixed set that every evaluation uses."""
    starts = np.linspace(0, len(ids) - context - 1, count).astype(int)
    window = ids[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return window[:, :-1], window[:, 1:]


def all_windows(ids, context, ignore):
    """(tokens, targets), (m, T) each: consecutive windows in which each character but the first is a target once;
    what is left of the last window holds `ignore` as its targets."""
    m = -(-(len(ids) - 1) // context)
    tokens, targets = np.zeros(m * context, np.int32), np.full(m * context, ignore, np.int32)
    tokens[:len(ids) - 1], targets[:len(ids) - 1] = ids[:-1], ids[1:]
    return tokens.reshape(m, context), targets.reshape(m, context)


# tiny Shakespeare through TFDS -----------------------------------------------------------

def tiny_shakespeare(data_dir=""):
    """((train, val), source). TFDS splits 90/5/5; validation and test joined are nanoGPT's validation part.

    Raises FileNotFoundError saying why it can't be had.
    """
    given = data_dir or os.environ.get("TFDS_DATA_DIR", "")
    root = Path(given or "~/tensorflow_datasets").expanduser()
    if not (root / "tiny_shakespeare").is_dir():
        reason = download_impossible()
        if reason:
            raise FileNotFoundError(f"no folder tiny_shakespeare in {root}, and no download: {reason}")
        import tensorflow_datasets as tfds
        tfds.builder("tiny_shakespeare", data_dir=root, file_format="array_record").download_and_prepare()
    versions = sorted(p for p in (root / "tiny_shakespeare").iterdir() if (p / "dataset_info.json").is_file())
    if not versions:
        raise FileNotFoundError(f"{root / 'tiny_shakespeare'} holds no prepared version")
    prepared = versions[-1]
    cached = cache_file(prepared)
    parts = read_cache(cached) or write_cache(cached, read_prepared(root, prepared))
    return parts, f"TFDS tiny_shakespeare {prepared.name}"


def read_prepared(root, prepared):
    if any(prepared.glob("*.tfrecord*")):
        raise FileNotFoundError(f"{prepared} holds tfrecord files, which only TensorFlow reads: prepare it again "
                                'with file_format="array_record"')
    import tensorflow_datasets as tfds

    def text(split):
        try:
            records = tfds.data_source("tiny_shakespeare", split=split, data_dir=root)
            return b"".join(record["text"] for record in records).decode()
        except Exception as why:  # TFDS raises its own types for a damaged folder
            raise FileNotFoundError(f"{prepared}: the part {split!r} can't be read ({why})") from why
    return text("train"), text("validation") + text("test")


def download_impossible():
    """None, or why a download should not be tried: TFDS alone would retry for minutes without a network."""
    if importlib.util.find_spec("tensorflow") is None:
        return "TensorFlow, which TFDS prepares with, is not installed"
    found = []
    lookup = threading.Thread(target=lambda: found.append(resolves(DOWNLOAD_HOST)), daemon=True)
    lookup.start()
    lookup.join(3)
    return None if found == [True] else f"{DOWNLOAD_HOST} does not resolve within 3 seconds"


def resolves(host):
    try:
        return bool(socket.getaddrinfo(host, 443))
    except OSError:
        return False


def cache_file(prepared):
    """In the user's cache folder, never beside the data, which may be read-only."""
    base = os.environ.get("XDG_CACHE_HOME") or (
        os.environ.get("LOCALAPPDATA") if os.name == "nt" else None) or "~/.cache"
    source = hashlib.sha256(str(prepared.resolve()).encode()).hexdigest()[:12]
    return Path(base).expanduser() / "jax-worked-examples" / f"tiny_shakespeare-{prepared.name}-{source}.npz"


def read_cache(path):
    """(train, val), or None where the file is missing, truncated or not ours."""
    try:
        with np.load(path) as stored:
            train, val = (stored[name].tobytes() for name in ("train", "val"))
            intact = hashlib.sha256(train + val).hexdigest() == str(stored["sha256"])
            return (train.decode(), val.decode()) if intact else None
    except FileNotFoundError:
        return None
    except Exception as why:  # np.load raises several types for a damaged file; all mean: build it again
        print(f"rebuilding the cache {path.name}: {why}", file=sys.stderr)
        return None


def write_cache(path, parts):
    """Stores (train, val) under a temporary name, then renames; an unwritable cache folder costs only time."""
    train, val = (part.encode() for part in parts)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "wb") as out:
            np.savez(out, train=np.frombuffer(train, np.uint8), val=np.frombuffer(val, np.uint8),
                     sha256=hashlib.sha256(train + val).hexdigest())
        os.replace(temporary, path)
    except OSError as why:
        print(f"the cache {path} can't be written ({why}); reading the data again next time", file=sys.stderr)
    return parts
