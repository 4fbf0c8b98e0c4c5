"""Word vectors in GloVe's format: imported, searched, and used in a classifier, frozen and tuned.

1. Write a text file of word vectors, in which words of a topic lie together. (Take your own: `--vectors glove.txt`.)
2. `embedrock import` makes a table of it, and a vocabulary with the words of its rows. Find the nearest words.
3. Make a vocabulary of the task's words. `import --only-words` takes their vectors, so rows have the task's ids.
4. Classify sentences by the mean of their words' rows: frozen, tuned, and from scratch. Few sentences are labelled, so
   words of the test may be new to a model. The vectors know them.

Run: python examples/word_vectors.py            (some ten seconds; `--sentences 100` is shorter)
With own data: replace `sentences()`. It returns lists of words, and a class for each list.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import embedrock as er
import embedrock.torch as ert

TOPICS, WORDS, CLASSES, DIM, LENGTH = 40, 50, 4, 32, 8  # topics of 50 words; each topic is of one class
rng = np.random.default_rng(0)


def write_vectors(path: Path) -> None:
    """Write vectors of words `t7_w12`: the centre of topic 7, and noise. Every tenth word is left out."""
    centres = rng.standard_normal((TOPICS, 1, DIM))
    vectors = (centres + 0.7 * rng.standard_normal((TOPICS, WORDS, DIM))).reshape(-1, DIM)
    with path.open("w") as file:
        for k in rng.permutation(len(vectors)):
            if k % 10:
                print(f"t{k // WORDS}_w{k % WORDS}", *vectors[k].round(4), file=file)


def sentences(count: int) -> tuple[list[list[str]], torch.Tensor]:
    """Return sentences, most words of which are of one topic, and the class of that topic."""
    topics = rng.integers(TOPICS, size=count)
    others = rng.integers(TOPICS, size=(count, LENGTH))
    of_words = np.where(rng.random((count, LENGTH)) < 0.6, topics[:, None], others)
    lengths, words = rng.integers(3, LENGTH + 1, count), rng.integers(WORDS, size=(count, LENGTH))
    texts = [[f"t{t}_w{w}" for t, w in zip(*pair, strict=True)] for pair in zip(of_words, words, strict=True)]
    return [text[:n] for text, n in zip(texts, lengths, strict=True)], torch.from_numpy(topics % CLASSES)


def embedrock(*command: object) -> None:
    """Run a command as in a shell."""
    subprocess.run([sys.executable, "-m", "embedrock", *map(str, command)], check=True)


def nearest(table: er.Table, words: er.Vocabulary, word: str, count: int = 5) -> list[str]:
    """Return the words whose rows have the largest cosine with that of a word."""
    rows = table.lookup(np.arange(len(words)))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    order = np.argsort(-rows @ rows[words[word]])
    return words.strings(order[1 : count + 1]).tolist()


def accuracy(bags: ert.EmbeddingBag, train: tuple, test: tuple, epochs: int) -> float:
    """Train a linear classifier of bags of words, and return the share of test sentences that it classifies."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"bags": bags, "head": torch.nn.Linear(bags.embedding_dim, CLASSES)})
    optimizer = ert.optimizer(model, rows=ert.Adam(model, lr=0.02), dense=torch.optim.Adam, lr=0.02)
    for _ in range(epochs):
        ids, offsets, classes = train
        loss = torch.nn.functional.cross_entropy(model["head"](bags(ids, offsets)), classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        ids, offsets, classes = test
        return (model["head"](bags(ids, offsets)).argmax(1) == classes).float().mean().item()


def main() -> None:
    """Compare a classifier of frozen, tuned and new rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vectors", type=Path, help="a text file of word vectors (default: one that is made)")
    parser.add_argument("--sentences", type=int, default=300, help="labelled ones (default: 300)")
    parser.add_argument("--epochs", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vectors = options.vectors or folder / "glove.txt"
        if options.vectors is None:
            write_vectors(vectors)

        embedrock("import", vectors, folder / "all.rock")
        words = er.Vocabulary(folder / "all.rock.vocabulary", mode="r")
        with er.open(folder / "all.rock", mode="r") as table, words:
            some = next(iter(words))
            print(f"{len(words)} words; nearest to {some}: {', '.join(nearest(table, words, some))}")

        texts, classes = sentences(options.sentences + 4000)
        with er.Vocabulary(folder / "task.vocabulary", unknown="[UNK]") as words:
            ids, offsets = er.jagged(texts, words.add)
            words.commit()
            count = len(words)
        embedrock("import", vectors, folder / "task.rock", "--only-words", folder / "task.vocabulary")

        start, ids, cuts = offsets[options.sentences], torch.from_numpy(ids), torch.from_numpy(offsets)
        train = ids[:start], cuts[: options.sentences], classes[: options.sentences]
        test = ids[start:], cuts[options.sentences :] - start, classes[options.sentences :]
        rows = folder / "task.rock"
        frozen = accuracy(ert.EmbeddingBag.from_pretrained(rows, freeze=True), train, test, options.epochs)
        tuned = accuracy(ert.EmbeddingBag.from_pretrained(rows, freeze=False), train, test, options.epochs)
        scratch = accuracy(ert.EmbeddingBag(count, DIM), train, test, options.epochs)
        print(
            f"accuracy by chance {1 / CLASSES:.3f}, from scratch {scratch:.3f}, frozen {frozen:.3f}, tuned {tuned:.3f}"
        )


if __name__ == "__main__":
    main()
