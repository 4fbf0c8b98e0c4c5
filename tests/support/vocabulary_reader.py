"""A reader of vocabularies on disk, written from docs/format.md alone: no line of Embedrock takes part.

python tests/support/vocabulary_reader.py words.rock
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

PAYLOAD = 4092
WORD = (1 << 64) - 1


def sip_hash(text: bytes, salt: list[int]) -> int:
    """Return SipHash-2-4 (Aumasson and Bernstein, 2012), modulo 2^63 - 1."""
    v = [salt[0] ^ 0x736F6D6570736575, salt[1] ^ 0x646F72616E646F6D]
    v += [salt[0] ^ 0x6C7967656E657261, salt[1] ^ 0x7465646279746573]

    def turned(x: int, bits: int) -> int:
        return (x << bits | x >> (64 - bits)) & WORD

    def mixed(rounds: int) -> None:
        for _ in range(rounds):
            v[0], v[2] = (v[0] + v[1]) & WORD, (v[2] + v[3]) & WORD
            v[1], v[3] = turned(v[1], 13) ^ v[0], turned(v[3], 16) ^ v[2]
            v[0] = turned(v[0], 32)
            v[2], v[0] = (v[2] + v[1]) & WORD, (v[0] + v[3]) & WORD
            v[1], v[3] = turned(v[1], 17) ^ v[2], turned(v[3], 21) ^ v[0]
            v[2] = turned(v[2], 32)

    padded = text + bytes(-(len(text) + 1) % 8) + bytes([len(text) % 256])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        mixed(2)
        v[0] ^= word
    v[2] ^= 0xFF
    mixed(4)
    return (v[0] ^ v[1] ^ v[2] ^ v[3]) % (2**63 - 1)


def read_pages(folder: Path, entry: dict[str, Any], uuid: str) -> np.ndarray:
    """Return the payloads of all pages of a file, uint8 (pages, 4092)."""
    data, name = (folder / entry["file"]).read_bytes(), entry["file"]
    assert len(data) == entry["size"], f"{name} has {len(data)} bytes"
    numbers = struct.pack("<4I", 2, PAYLOAD, PAYLOAD + 4, zlib.crc32(name.encode()))
    page = (b"EMBROCK1" + numbers + bytes.fromhex(uuid) + data[40:48]).ljust(4092, b"\0")
    assert data[:4096] == page + struct.pack("<I", zlib.crc32(page)), f"the header of {name} is another one"
    assert entry["salt"] == zlib.crc32(page), f"{name} is another file of that name"
    stored = np.frombuffer(data[4096:], np.uint8).reshape(-1, 4096)
    for number, one in enumerate(stored):
        seal = zlib.crc32(struct.pack("<q", number) + one[:PAYLOAD].tobytes())
        mark = (entry["salt"] + number * 0x9E3779B1) % 2**32
        assert struct.pack("<I", seal ^ mark) == one[PAYLOAD:].tobytes(), f"page {number} of {name} is damaged"
    return stored[:, :PAYLOAD]


def read_blocks(pages: np.ndarray, ends: np.ndarray, width: int) -> list[list[tuple[Any, ...]]]:
    """Return the entries of each block: its words but for the last, and its string."""
    blocks, first = [], 0
    for end in ends.tolist():
        data = pages[first:end].tobytes()
        (count,) = struct.unpack_from("<I", data)
        words = np.frombuffer(data, "<u4", width * count, 4).reshape(count, width)
        texts, last, entries = data[4 + 4 * width * count :], 0, []
        for row in words.tolist():
            entries.append((*row[:-1], texts[last : row[-1]]))
            last = row[-1]
        assert not texts[last:].strip(b"\0")
        blocks.append(entries)
        first = end
    return blocks


def read_file(folder: Path, entry: dict[str, Any], manifest: dict[str, Any]) -> list[bytes]:
    """Return the strings of a file, in order of their ids."""
    pages = read_pages(folder, entry, manifest["uuid"])
    strings, hashes = entry["string_pages"], entry["string_pages"] + entry["hash_pages"]
    index, at, parts = pages[hashes:].tobytes(), 0, []
    for blocks in (entry["string_blocks"], entry["string_blocks"], entry["hash_blocks"], entry["hash_blocks"]):
        parts.append(np.frombuffer(index, "<i8", blocks, at))
        at += 8 * blocks
    by_id = read_blocks(pages[:strings], parts[1], 1)
    assert parts[0].tolist() == np.cumsum([0, *map(len, by_id)])[:-1].tolist()
    found = [text for block in by_id for (text,) in block]
    assert len(found) == entry["count"]
    if "symbols" in entry:
        seen = bytes.fromhex(entry["symbols"])
        assert sum(map(len, found)) <= entry["text_bytes"]
        assert max(map(len, found)) <= entry["longest"]
        assert all(seen[byte // 8] >> byte % 8 & 1 for text in found for byte in set(text))
    by_hash = read_blocks(pages[strings:hashes], parts[3], 3)
    keys = [[sip_hash(text, manifest["salt"]) for _, _, text in block] for block in by_hash]
    assert [block[0] for block in keys] == parts[2].tolist()
    flat = [key for block in keys for key in block]
    assert flat == sorted(flat)
    for block, own in zip(by_hash, keys, strict=True):
        for (tag, number, text), key in zip(block, own, strict=True):
            assert (tag, found[number]) == (key >> 31, text)
    assert sorted(number for block in by_hash for _, number, _ in block) == list(range(entry["count"]))
    return found


def read_vocabulary(folder: Path) -> tuple[dict[str, Any], list[bytes]]:
    """Return the last commit, and its strings in order of their ids."""
    newest = max((folder / "vocabulary").glob("[0-9]*.json"))
    line, *rest = newest.read_bytes().split(b"\n")
    assert rest == [hashlib.sha256(line).hexdigest().encode(), b""], f"{newest.name} is damaged"
    manifest, strings = json.loads(line), list[bytes]()
    shapes = {key in entry for entry in manifest["runs"] for key in ("text_bytes", "longest", "symbols")}
    assert shapes <= {manifest["format"] == 3}
    assert ("steps" in manifest) == (manifest["format"] > 1)
    for entry in manifest["runs"]:
        assert entry["first"] == len(strings)
        strings += read_file(folder, entry, manifest)
    assert len(strings) == manifest["count"]
    return manifest, strings


if __name__ == "__main__":
    described, words = read_vocabulary(Path(sys.argv[1]))
    print(f"commit {described['commit']}: {len(words)} strings, {words[:5]}, ...")
