"""Files from elsewhere, for every command that reads one: right, or one line that says what the file is."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import pickle
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embedrock as er
from embedrock.cli import plans
from embedrock.cli.main import FAILED, main

arrow = pytest.importorskip("pyarrow")
feather = pytest.importorskip("pyarrow.feather")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS, DIM = 40, 4
VECTORS = (np.arange(ROWS * DIM, dtype=np.float32) / 8 + 0.125).reshape(ROWS, DIM)
IDS = np.arange(ROWS)
WORDS = [f"wörd{k}" for k in IDS]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def of(write: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def lines(names: list[Any], separator: str) -> str:
    rows = ([str(name), *map(str, row)] for name, row in zip(names, VECTORS.tolist(), strict=True))
    return "".join(separator.join(row) + "\n" for row in rows)


def arrow_table() -> Any:
    return arrow.table({"id": IDS, "vector": arrow.array(list(VECTORS)), "word": WORDS})


def safetensors() -> bytes:
    text = json.dumps(
        {"vectors": {"dtype": "F32", "shape": VECTORS.shape, "data_offsets": [0, VECTORS.nbytes]}}
    ).encode()
    return struct.pack("<Q", len(text)) + text + VECTORS.tobytes()


HEAD = "id," + ",".join(f"v{k}" for k in range(DIM)) + "\n"
WORD2VEC = f"{ROWS} {DIM}\n"
BINARY = WORD2VEC.encode() + b"".join(w.encode() + b" " + v.tobytes() for w, v in zip(WORDS, VECTORS, strict=True))
COLUMN = "id,word\n" + "".join(f"{k},{word}\n" for k, word in enumerate(WORDS))
PARQUET, ARROW = (
    of(lambda file: parquet.write_table(arrow_table(), file)),
    of(lambda file: feather.write_feather(arrow_table(), file)),
)
NPZ = of(lambda file: np.savez_compressed(file, vectors=VECTORS))
NPY = of(lambda file: np.save(file, VECTORS))

# Of each command that reads a file: what it is called, what is in it, and the words after it.
IMPORTS: dict[str, tuple[str, bytes, list[str]]] = {
    "npy": ("a.npy", NPY, []),
    "npz": ("a.npz", NPZ, []),
    "raw": ("a.raw", VECTORS.tobytes(), ["--dim", str(DIM)]),
    "csv": ("a.csv", (HEAD + lines([*IDS], ",")).encode(), []),
    "tsv": ("a.tsv", (HEAD.replace(",", "\t") + lines([*IDS], "\t")).encode(), []),
    "parquet": ("a.parquet", PARQUET, []),
    "arrow": ("a.arrow", ARROW, []),
    "safetensors": ("a.safetensors", safetensors(), []),
    "glove": ("a.txt", lines(WORDS, " ").encode(), []),
    "word2vec": ("a.vec", (WORD2VEC + lines(WORDS, " ")).encode(), []),
    "word2vec-binary": ("a.bin", BINARY, []),
}
READERS: dict[str, tuple[str, bytes, list[str]]] = {
    **{
        f"import {name}": (path, data, ["import", path, "t.rock", *more])
        for name, (path, data, more) in IMPORTS.items()
    },
    "import ids": ("own.npy", of(lambda file: np.save(file, IDS)), ["import", "v.npy", "t.rock", "--ids", "own.npy"]),
    "forget text": ("ids.txt", "".join(f"{k}\n" for k in IDS).encode(), ["forget", "old.rock", "ids.txt"]),
    "forget npy": ("ids.npy", of(lambda file: np.save(file, IDS)), ["forget", "old.rock", "ids.npy"]),
    "forget text --hash": ("w.txt", "\n".join(WORDS).encode(), ["forget", "old.rock", "w.txt", "--hash"]),
    "forget npy --hash": ("w.npy", of(lambda file: np.save(file, WORDS)), ["forget", "old.rock", "w.npy", "--hash"]),
    "curve csv": ("log.csv", COLUMN.encode(), ["curve", "log.csv", "--column", "id", "--batch-size", "4"]),
    "curve parquet": ("log.parquet", PARQUET, ["curve", "log.parquet", "--column", "id", "--batch-size", "4"]),
    "plan": ("p.toml", b"[tables.user]\nrows = 40\ndim = 4\n", ["plan", "--tables", "p.toml"]),
    "vocabulary txt": ("w.txt", "\n".join(WORDS).encode(), ["vocabulary", "build", "w.txt", "--column", "0"]),
    "vocabulary csv": ("w.csv", COLUMN.encode(), ["vocabulary", "build", "w.csv", "--column", "word"]),
    "vocabulary arrow": ("w.arrow", ARROW, ["vocabulary", "build", "w.arrow", "--column", "word"]),
    "words": ("w.words", "\n".join(WORDS).encode(), ["export", "old.rock", "out.vec", "--words", "w.words"]),
}
TEXTS = [name for name, (_, data, _) in READERS.items() if b"\0" not in data]


def zipped(names: dict[str, bytes]) -> bytes:
    def write(file: Any):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in names.items():
                archive.writestr(name, data)

    return of(write)


# In place of any file, and what it is called.
OTHERS: dict[str, tuple[bytes, str]] = {
    "html": (b"\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n", "got an HTML page"),
    "html with a mark": (b"\xef\xbb\xbf<html lang='en'>\r\n<body>Sign in</body></html>", "got an HTML page"),
    "xml": (b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>', "got XML"),
    "json": (b'{"error": "Repository not found"}', "got JSON"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 99\n", "git lfs pull"),
    "annex": (b"/annex/objects/MD5E-s99--4d7a.npz\n", "git annex get"),
    "empty": (b"", "got an empty file"),
    "xlsx": (zipped({"[Content_Types].xml": b"", "xl/workbook.xml": b"x" * 99}), "Save the sheet as CSV"),
    "xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(504), "Save the sheet as CSV"),
    "fasttext": (struct.pack("<iiii", 793712314, 12, 8, 5) + bytes(400), r"fastText\. Take its \.vec file"),
    "pickle": (pickle.dumps([1, 2, 3] * 99), "got a pickle of Python. Nothing is unpickled"),
    "torch": (zipped({"model/data.pkl": b"\x80\x02", "model/data/0": bytes(64)}), "got a checkpoint of PyTorch"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(99), "got an HDF5 file"),
    "tar": (b"a.txt".ljust(257, b"\0") + b"ustar" + bytes(250), "got a tar archive"),
    "sqlite": (b"SQLite format 3\0" + bytes(99), "SQLite"),
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with rows, of which each test has a copy."""
    path = tmp_path_factory.mktemp("old") / "old.rock"
    with er.Table(rows=None, dim=DIM, path=path) as table:
        table.assign(IDS, VECTORS)
        table.commit()
    return path


@pytest.fixture
def told(old: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Returns what runs a reader on a file, and says its exit status and what it said on standard error."""
    shutil.copytree(old, "old.rock")
    np.save("v.npy", VECTORS)

    def run(reader: str, data: bytes) -> tuple[int, str]:
        path, _, words = READERS[reader]
        Path(path).write_bytes(data)
        before = {*Path().rglob("*")}
        status = main([*words, *(["--path", "v.rock"] if words[0] == "vocabulary" else [])])
        said = capsys.readouterr().err.strip()
        if status:
            assert status == FAILED, (status, said)
            assert said.count("\n") == 0, said
            assert said.startswith("embedrock: error: "), said
            assert {*Path().rglob("*")} == before, "something is left behind"
            with er.open("old.rock", mode="r") as table:
                np.testing.assert_array_equal(table.lookup(IDS), VECTORS)
        return status, said

    return run


def assert_right(reader: str):
    """Assert that a reader, which succeeded, made what the undamaged file says."""
    if reader.startswith("import"):
        with er.open("t.rock", mode="r") as table:
            np.testing.assert_array_equal(table.lookup(IDS), VECTORS)
        words = Path("t.rock.words.txt")
        assert not words.exists() or words.read_text("utf-8").splitlines() == WORDS
    elif reader.startswith("forget"):
        with er.open("old.rock", mode="r") as table:
            assert bool(table.stats()["rows_touched"]) == ("--hash" in reader)
    elif reader.startswith("vocabulary"):
        with er.Vocabulary("v.rock", mode="r") as vocabulary:
            assert vocabulary.strings(np.arange(len(vocabulary))).tolist() == WORDS
    elif reader == "words":
        assert [line.split(" ")[0] for line in Path("out.vec").read_text("utf-8").splitlines()[1:]] == WORDS


@pytest.mark.parametrize("reader", READERS)
def test_a_file_in_place_of_another_is_named(reader: str, told: Callable[..., tuple[int, str]]):
    for data, name in OTHERS.values():
        if reader.startswith("forget text") and not data:  # nobody is to be forgotten, as on most nights
            assert told(reader, data) == (0, "")
            continue
        status, said = told(reader, data)
        assert status == FAILED
        assert re.search(name, said), said


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zip": lambda data: zipped({"a.txt": data})}


@pytest.mark.parametrize(
    "packer", ["gz", "zip", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bz2", "xz"))]
)
@pytest.mark.parametrize("reader", [name for name in READERS if not name.startswith("plan")])
def test_what_is_compressed_is_read_or_named(reader: str, packer: str, told: Callable[..., tuple[int, str]]):
    """Under the name of the plain file."""
    status, said = told(reader, PACKERS[packer](READERS[reader][1]))
    is_read = reader in TEXTS or reader == "import word2vec-binary"
    assert (status == 0) == (is_read and packer != "zip" and reader != "words"), said
    if status == 0:
        assert_right(reader)
    else:
        named = ("data compressed by", "a zip archive", "a text that is compressed", "expected 1 to 1000 arrays; got 0")
        assert any(name in said for name in named), said


ENCODED: dict[str, Callable[[str], bytes]] = {
    "mark": lambda text: text.encode("utf-8-sig"),
    "utf-16": lambda text: text.encode("utf-16"),
    "utf-16 without mark": lambda text: text.encode("utf-16-le"),
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "mac": lambda text: text.replace("\n", "\r").encode(),
}
SLOWLY: dict[str, Callable[[str], bytes]] = {
    "utf-16 be": lambda text: "\ufeff".encode("utf-16-be") + text.encode("utf-16-be"),
    "utf-32": lambda text: text.encode("utf-32"),
    "notepad": lambda text: text.replace("\n", "\r\n").encode("utf-16"),
    "mac with mark": lambda text: text.replace("\n", "\r").encode("utf-8-sig"),
}


@pytest.mark.parametrize("reader", TEXTS)
@pytest.mark.parametrize("name", [*ENCODED, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOWLY)])
def test_texts_of_other_systems_are_read(reader: str, name: str, told: Callable[..., tuple[int, str]]):
    path, data, _ = READERS[reader]
    encoded = (ENCODED | SLOWLY)[name](data.decode())
    if reader == "plan":
        Path(path).write_bytes(encoded)
        tables, _ = plans._of_file(Path(path))
        assert tables == {"user": {"rows": ROWS, "dim": DIM}}
        return
    if reader == "words" and b"\nw" not in encoded:
        assert "Save it in UTF-8" in told(reader, encoded)[1]  # it is read at any place, and so not unpacked
        return
    status, said = told(reader, encoded)
    assert status == 0, said
    assert_right(reader)


CUT = [name for name in READERS if name not in ("plan", "words") and not name.startswith("forget text")]


@pytest.mark.parametrize(
    "reader", [name for name in CUT if name not in ("curve csv", "vocabulary txt", "vocabulary csv")]
)
def test_what_was_cut_off_is_refused(reader: str, told: Callable[..., tuple[int, str]]):
    """Where it can be known: also of what is compressed."""
    data = READERS[reader][1]
    for kept in (9, 30, len(data) // 2, len(data) - 3):
        cut = data[:kept].rstrip(b"0123456789.") if reader in TEXTS else data[: kept - kept % 4 + 1]
        status, said = told(reader, cut)
        assert status == FAILED, said
    if reader in TEXTS:
        for kept in (4, 40):
            status, said = told(reader, gzip.compress(data)[:kept])
            assert status == FAILED
            assert "whole compressed file" in said


@pytest.mark.parametrize("reader", TEXTS)
def test_a_cut_archive_of_text_is_refused(reader: str, told: Callable[..., tuple[int, str]]):
    if reader != "words":
        status, said = told(reader, gzip.compress(READERS[reader][1])[:-20])
        assert status == FAILED
        assert "expected a whole compressed file" in said
        status, said = told(reader, READERS[reader][1].decode().encode("utf-16")[:-1])
        assert status == FAILED
        assert "text in utf-16" in said


@pytest.mark.parametrize("reader", [name for name in TEXTS if name != "plan"])
def test_binary_data_is_no_text(reader: str, told: Callable[..., tuple[int, str]]):
    for data in (b"\x07\x00\x01\x00\xff" * 99, BINARY, NPY, PARQUET):
        status, said = told(reader, data)
        assert status == FAILED
        assert "binary" in said or "got a .npy file" in said or "got Parquet" in said


# ---------------------------------------------------------------- words


def imported(data: bytes, *more: str, name: str = "a.vec", table: str = "t.rock") -> dict[bytes, list[float]]:
    """Import a text; return its vectors by their words."""
    Path(name).write_bytes(data)
    assert main(["import", name, table, *more]) == 0
    with er.open(table, mode="r") as rows:
        words = Path(f"{table}.words.txt").read_bytes().split(b"\n")[:-1]
        return dict(zip(words, rows.lookup(np.arange(len(words))).tolist(), strict=True))


ODD_WORDS = [
    b"a\tb",
    b"a  b",
    "a\u00a0b".encode(),
    b" lead",
    b"trail ",
    b". . .",
    b"at name@domain.com",
    b"nan",
    b"\xe9",
]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b" \n"])
@pytest.mark.parametrize("neighbour", [b"the 1 2", b"of  1  2", b"two words 1 2", b"x\t1\t2"])
def test_the_bytes_of_a_word_are_its_lines_own(neighbour: bytes, end: bytes):
    for k, word in enumerate(ODD_WORDS):
        found = imported(b"2 2" + end + word + b" 0.5 0.25" + end + neighbour + end, table=f"{k}.rock")
        assert found[word] == [0.5, 0.25]
        assert [1.0, 2.0] in found.values()


def test_the_first_word_may_have_blanks(capsys: pytest.CaptureFixture[str]):
    assert imported(b". . . 0.5 0.25\nthe 1 2\n", name="a.txt") == {b". . .": [0.5, 0.25], b"the": [1, 2]}
    Path("b.txt").write_bytes(b"May 5 0.5 0.25\nthe 1 2\n")
    assert main(["import", "b.txt", "b.rock"]) == FAILED
    assert "--dim N says how many numbers follow" in capsys.readouterr().err
    assert imported(b"May 5 0.5 0.25\nthe 1 2\n", "--dim", "2", name="b.txt", table="b.rock")[b"May 5"] == [0.5, 0.25]


TWICE = b"5 2\nthe 1 1\nof 2 2\nthe 3 3\ncat 4 4\nof 5 5\n"


@pytest.mark.parametrize(("name", "counts"), [("a.vec", b"2 2\n"), ("a.txt", b"")])
def test_blank_lines_at_the_end_are_no_rows(name: str, counts: bytes):
    assert imported(counts + b"the 1 2\nof 3 4\n\n \r\n", name=name) == {b"the": [1, 2], b"of": [3, 4]}


def test_words_that_come_twice_are_told(capsys: pytest.CaptureFixture[str]):
    Path("a.vec").write_bytes(TWICE)
    assert main(["import", "a.vec", "t.rock"]) == 0
    assert "2 words came again: the last vector of each holds" in capsys.readouterr().out
    with er.Vocabulary("t.rock.vocabulary", mode="r") as words, er.open("t.rock", mode="r") as table:
        assert list(words) == ["the", "of", "cat"]
        assert table.lookup([0, 1, 2, 3]).tolist() == [[3, 3], [5, 5], [4, 4], [0, 0]]
    assert main(["import", "a.vec", "u.rock", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repeated"] == 2


@pytest.mark.parametrize("fails_at", [None, 1, 2])
@pytest.mark.parametrize("into", [False, True])
def test_only_the_words_of_a_vocabulary(
    into: bool, fails_at: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Rows have the ids of the vocabulary, which stays as it is, also after an import that was cut off."""
    with er.Vocabulary("mine.rock", unknown="[UNK]") as words:
        words.add(["cat", "dog", "the"])
        words.commit()
    er.Table(9, 2, path="old.rock", init=er.Constant(7.0)).close()
    Path("a.vec").write_bytes(TWICE)
    command = ["import", "a.vec", "old.rock" if into else "t.rock", "--only-words", "mine.rock", "--commit-every", "1"]
    monkeypatch.setattr("embedrock.cli.formats.base.MAX_BATCH_ROWS", 1)
    cut_off_at(fails_at, monkeypatch)
    if fails_at:
        assert main(command + ["--into"] * into) == 130
    assert main(command + ["--into"] * into) == 0
    assert ("vectors of 2 of its 4 words" in capsys.readouterr().out) is not into
    with er.Vocabulary("mine.rock", mode="r") as words, er.open(command[2], mode="r") as table:
        assert list(words) == ["[UNK]", "cat", "dog", "the"]
        first = 7 if into else 0
        assert table.rows == (9 if into else 4)
        assert table.lookup(range(4)).tolist() == [[first] * 2, [4, 4], [first] * 2, [3, 3]]
    assert not into or not Path("old.rock.words.txt").exists()
    assert into or Path("t.rock.words.txt").read_text() == "[UNK]\ncat\ndog\nthe\n"


def test_the_first_rows(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert imported(TWICE, "--limit", "2") == {b"the": [1, 1], b"of": [2, 2]}
    monkeypatch.setattr("embedrock.cli.formats.base.MAX_BATCH_ROWS", 2)
    assert imported(TWICE, "--limit", "3", table="u.rock") == {b"the": [3, 3], b"of": [2, 2]}
    with er.open("u.rock", mode="r") as table:
        assert table.rows == 3
    np.save("a.npy", VECTORS)
    assert main(["import", "a.npy", "v.rock", "--limit", "2", "--first-row", "5", "--json"]) == 0
    with er.open("v.rock", mode="r") as table:
        assert (table.rows, table.lookup([5, 6]).tolist()) == (7, VECTORS[:2].tolist())
    assert main(["import", "a.npy", "w.rock", "--limit", "999999"]) == 0
    with er.open("w.rock", mode="r") as table:
        assert table.rows == len(VECTORS)


def test_only_words_refused(capsys: pytest.CaptureFixture[str]):
    Path("a.vec").write_bytes(TWICE)
    np.save("a.npy", VECTORS)
    with er.Vocabulary("mine.rock") as words:
        words.add(["the", "of", "cat"])
        words.commit()
    assert main(["import", "a.npy", "t.rock", "--only-words", "mine.rock"]) == FAILED
    assert "expected rows with words; got npy, with ids or none. Leave --only-words out." in capsys.readouterr().err
    assert main(["import", "a.vec", "t.rock", "--only-words", "none.rock"]) == FAILED
    assert "none.rock" in capsys.readouterr().err
    er.Table(2, 2, path="small.rock").close()
    assert main(["import", "a.vec", "small.rock", "--only-words", "mine.rock", "--into"]) == FAILED
    assert "expected at most 2 rows, as the table has; got 3" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["import", "a.vec", "t.rock", "--only-words", "mine.rock", "--vocabulary", "new.rock"])
    assert "leave --vocabulary out" in capsys.readouterr().err
    assert not Path("t.rock").exists()


def cut_off_at(fails_at: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt the commit of this number."""
    commit, calls = er.Table.commit, 0

    def cut_off(self: er.Table, **options: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise KeyboardInterrupt
        return commit(self, **options)

    monkeypatch.setattr(er.Table, "commit", cut_off)


@pytest.mark.parametrize("fails_at", [None, 1, 2])
def test_a_vocabulary_that_fits(
    fails_at: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Also after an import that was cut off, before its first commit or after it."""
    command = ["import", "a.vec", "t.rock", "--vocabulary", "w.rock", "--commit-every", "1"]
    Path("a.vec").write_bytes(TWICE)
    monkeypatch.setattr("embedrock.cli.formats.base.MAX_BATCH_ROWS", 1)
    cut_off_at(fails_at, monkeypatch)
    if fails_at:
        assert main(command) == 130
    assert main(command) == 0
    assert "2 words came again: the last vector of each holds" in capsys.readouterr().out
    with er.Vocabulary("w.rock", mode="r") as words, er.open("t.rock", mode="r") as table:
        assert words.strings([0, 1, 2]).tolist() == ["the", "of", "cat"]
        assert table.lookup(words.lookup(["the", "of", "cat"])).tolist() == [[3, 3], [5, 5], [4, 4]]
    assert Path("t.rock.words.txt").read_text() == "the\nof\ncat\n"


def test_a_vocabulary_is_made_and_no_other_is_touched(capsys: pytest.CaptureFixture[str]):
    Path("a.vec").write_bytes(TWICE[:-3])
    assert main(["import", "a.vec", "t.rock", "--vocabulary", "w.rock"]) == FAILED
    assert not [*Path().glob("*.rock*")]
    with er.Vocabulary("w.rock") as words:
        words.add(["mine"])
        words.commit()
    Path("a.vec").write_bytes(TWICE)
    assert main(["import", "a.vec", "t.rock", "--vocabulary", "w.rock", "--restart"]) == FAILED
    assert "expected a vocabulary that is not there yet; got one that is" in capsys.readouterr().err
    assert not Path("t.rock").exists()
    with er.Vocabulary("w.rock", mode="r") as words:
        assert words.strings([0]).tolist() == ["mine"]
    np.save("a.npy", VECTORS)
    assert main(["import", "a.npy", "t.rock", "--vocabulary", "v.rock"]) == FAILED
    assert "expected rows with words; got npy, with ids or none. Leave --vocabulary out." in capsys.readouterr().err


# ---------------------------------------------------------------- as other programs write them


def test_a_mapping_is_not_left_out(capsys: pytest.CaptureFixture[str]):
    """model2vec has a vector for several tokens, and says which in "mapping"."""
    np.savez("a.npz", embeddings=VECTORS, weights=np.ones(ROWS), mapping=IDS // 2)
    assert main(["import", "a.npz", "t.rock"]) == FAILED
    assert "got an array 'mapping' int64 (40,) of which token has which" in capsys.readouterr().err
    assert main(["import", "a.npz", "t.rock", "--ids", "row-number"]) == 0
    np.savez("a.npz", embeddings=VECTORS, mapping=IDS)
    assert main(["import", "a.npz", "u.rock"]) == 0


def test_ids_of_a_dictionary(capsys: pytest.CaptureFixture[str]):
    table = arrow_table().set_column(0, "id", arrow.array(IDS).dictionary_encode())
    feather.write_feather(table, "a.feather")
    assert main(["import", "a.feather", "t.rock"]) == 0
    assert_right("import")
    feather.write_feather(table.set_column(0, "id", arrow.array(WORDS).dictionary_encode()), "b.feather")
    assert main(["import", "b.feather", "u.rock"]) == FAILED
    assert "Make integers of words" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "strings"),
    [
        (b'New York\na\tb\n"q\nx,y\n1\n', ["New York", "a\tb", '"q', "x,y", "1"]),
        (b"red\n\nblue\n", None),
    ],
)
def test_a_vocabulary_of_lines(data: bytes, strings: list[str] | None, capsys: pytest.CaptureFixture[str]):
    Path("w.txt").write_bytes(data)
    command = ["vocabulary", "build", "w.txt", "--column", "0", "--path", "v.rock"]
    if strings is None:
        assert main(command) == FAILED
        assert "w.txt, row 1: expected a string in column '0'; got null" in capsys.readouterr().err
        assert not Path("v.rock").exists()
        command, strings = [*command, "--skip-nulls"], ["red", "blue"]
    assert main(command) == 0
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings(np.arange(len(vocabulary))).tolist() == strings


def test_fields_are_strings_whatever_they_look_like():
    Path("a.csv").write_text("item,n\n001,1\nNA,2\n1,3\n")
    assert main(["vocabulary", "build", "a.csv", "--column", "item", "--path", "v.rock"]) == 0
    with er.Vocabulary("v.rock", mode="r") as vocabulary:
        assert vocabulary.strings([0, 1, 2]).tolist() == ["001", "NA", "1"]
