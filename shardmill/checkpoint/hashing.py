"""sha256 of files, tensors and trees, and the check that weights are finite, on several cores.

Bytes are read in chunks of CHUNK_BYTES, so memory stays at a few MB whatever the size. hashlib and numpy work
outside the interpreter lock, so threads run in parallel.
"""

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from shardmill.checkpoint.cache import ByteSpan, HashCache, file_state
from shardmill.checkpoint.headers import TensorInfo
from shardmill.checkpoint.paths import opened
from shardmill.errors import CheckpointError
from shardmill.files import is_left_by_macos
from shardmill.printable import printable

CHUNK_BYTES = 1 << 20
THREADS = 4
SHOWN = 3

# dtype -> (signed view, unsigned view, bits of +Inf). IEEE floats order like integers: as signed ones, every
# positive NaN is above +Inf; as unsigned ones, every negative NaN is above -Inf, which adds the sign bit.
_FLOATS = {
    "BF16": ("<i2", "<u2", 0x7F80),
    "F16": ("<i2", "<u2", 0x7C00),
    "F32": ("<i4", "<u4", 0x7F800000),
}


@dataclass(frozen=True)
class Scan:
    """sha256 of each weight file and of each tensor's bytes, both by name."""

    files: dict[str, str]
    tensors: dict[str, str]


@dataclass(frozen=True)
class _Digest:
    sha256: str
    fault: str = ""


def scan_checkpoint(
    folder: Path, tensors: Mapping[str, TensorInfo], cache: HashCache | None = None, threads: int = THREADS
) -> Scan:
    """Hash the files and the tensors of a checkpoint, and check that BF16, F16 and F32 values are finite.

    Raises CheckpointError naming the tensors that hold NaN or Inf, or a file that changed meanwhile.
    """
    files = sorted({info.file for info in tensors.values()})
    whole = {file: _whole(folder / file) for file in files}
    spans = {
        name: ByteSpan(info.start, info.end, info.dtype if info.dtype in _FLOATS else "")
        for name, info in sorted(tensors.items())
    }
    wanted = {folder / file: [whole[file]] for file in files}
    for name, span in spans.items():
        wanted[folder / tensors[name].file].append(span)
    digests = _digest_spans(wanted, cache, threads)
    of_tensor = {name: digests[folder / tensors[name].file, span] for name, span in spans.items()}
    faults = [f"{printable(name)} ({digest.fault})" for name, digest in of_tensor.items() if digest.fault]
    if faults:
        more = f" and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        raise CheckpointError(
            f"{folder}: not every weight is finite: {', '.join(faults[:SHOWN])}{more}; use another checkpoint"
        )
    return Scan(
        {file: digests[folder / file, whole[file]].sha256 for file in files},
        {name: digest.sha256 for name, digest in of_tensor.items()},
    )


def hash_files(paths: Iterable[Path], cache: HashCache | None = None, threads: int = THREADS) -> dict[Path, str]:
    """Return sha256 of whole files."""
    whole = {path: _whole(path) for path in paths}
    digests = _digest_spans({path: [span] for path, span in whole.items()}, cache, threads)
    return {path: digests[path, span].sha256 for path, span in whole.items()}


def hash_file(path: Path, cache: HashCache | None = None) -> str:
    """Return sha256 of one whole file."""
    return hash_files([path], cache)[path]


def tree_hash(path: Path, cache: HashCache | None = None, threads: int = THREADS) -> str:
    """Return sha256 of a file's bytes; of a directory, the sha256 over its sorted relative paths and their sha256.

    Names, contents and empty directories count; modes, times, the directory's own place and files that macOS
    adds do not. A link to a file counts as that file. Raises CheckpointError for a link to a directory, because
    following it may never end.
    """
    return tree_hashes(path, cache, threads)[0]


def tree_hashes(path: Path, cache: HashCache | None = None, threads: int = THREADS) -> tuple[str, dict[str, str]]:
    """Return `tree_hash`, and the sha256 of each file in a directory by its relative path; empty for a file."""
    if not path.is_dir():
        return hash_file(path, cache), {}
    files: list[Path] = []
    empty: list[tuple[str, str]] = []
    for root, folders, names in os.walk(path):
        here = Path(root)
        linked = [name for name in folders if (here / name).is_symlink()]
        if linked:
            raise CheckpointError(f"{here / linked[0]}: links to a directory; replace it with the directory")
        counted = [name for name in names if not is_left_by_macos(name)]
        files += [here / name for name in counted]
        if not folders and not counted:
            empty.append((here.relative_to(path).as_posix() + "/", ""))  # a folder with nothing in it counts, too
    hashes = hash_files(files, cache, threads)
    inside = {file.relative_to(path).as_posix(): sha for file, sha in hashes.items()}
    return hashlib.sha256(json.dumps(sorted((*inside.items(), *empty))).encode("ascii")).hexdigest(), inside


def _whole(path: Path) -> ByteSpan:
    return ByteSpan(0, file_state(path).size)


def _digest_spans(
    wanted: Mapping[Path, Collection[ByteSpan]], cache: HashCache | None, threads: int
) -> dict[tuple[Path, ByteSpan], _Digest]:
    """Return the digest of every wanted span, from the cache or from the bytes."""
    began = time.time_ns()
    states = {path: file_state(path) for path in wanted}
    digests: dict[tuple[Path, ByteSpan], _Digest] = {}
    if cache:
        for path in wanted:
            digests.update({(path, s): _Digest(sha) for s, sha in cache.lookup(states[path]).items()})
    jobs = [(path, span) for path, spans in wanted.items() for span in spans if (path, span) not in digests]
    # Whole files first, because they take longest; then tensors in file order, while their bytes are still in memory.
    jobs.sort(key=lambda job: (job[1].start > 0, str(job[0]), job[1].start))
    with ThreadPoolExecutor(threads) as pool:
        fresh = dict(zip(jobs, pool.map(lambda job: _digest_span(*job), jobs), strict=True))
    for path in {path for path, _ in jobs}:
        after = file_state(path)
        if not after.same_content(states[path]):
            raise CheckpointError(f"{path}: changed while it was being hashed; run again once it is complete")
        if cache and after == states[path]:
            good = {span: d.sha256 for (owner, span), d in fresh.items() if owner == path and not d.fault}
            cache.record(states[path], good, began)
    return digests | fresh


def _digest_span(path: Path, span: ByteSpan) -> _Digest:
    sha, fault, at = hashlib.sha256(), "", span.start
    buffer = memoryview(bytearray(min(CHUNK_BYTES, span.end - span.start)))
    with opened(path) as stream:
        stream.seek(at)
        while at < span.end:
            count = stream.readinto(buffer[: span.end - at])
            if not count:
                raise CheckpointError(f"{path}: ends at byte {at} of {span.end}; fetch it again")
            chunk = buffer[:count]
            sha.update(chunk)
            if span.dtype and not fault:
                fault = _find_fault(chunk, span.dtype, at - span.start)
            at += count
    return _Digest(sha.hexdigest(), fault)


def _find_fault(chunk: memoryview, dtype: str, offset: int) -> str:
    """Name the first NaN or Inf in the chunk, which lies `offset` bytes into its tensor; empty if all are finite."""
    import numpy as np  # slow to import, and most jobs find their work done

    signed, unsigned, infinity = _FLOATS[dtype]
    bits = np.frombuffer(chunk, unsigned)
    sign = 1 << (8 * bits.itemsize - 1)
    if bits.view(signed).max() < infinity and bits.max() < (sign | infinity):
        return ""
    magnitudes = bits & (sign - 1)
    index = int(np.argmax(magnitudes >= infinity))
    kind = "NaN" if magnitudes[index] > infinity else "Inf"
    return f"{kind} at element {offset // bits.itemsize + index}"
