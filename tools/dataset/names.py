"""Find the names of a dataset's documents in its source."""

from collections.abc import Collection, Iterator

from configs.messages import progress
from configs.schema import UserError
from data.dataset_folder import Dataset
from data.prepare.corpus import Corpus
from data.prepare.listing import find_corpus
from data.record import read_record


def names_of(dataset: Dataset, beginnings: Collection[tuple[int, str]]) -> dict[tuple[int, str], str]:
    """Return documents' names by their texts' bytes and beginnings. Read the source, and return nothing if it is not on
    this machine or has changed."""
    by_size: dict[int, list[str]] = {}
    for size, beginning in beginnings:
        by_size.setdefault(size, []).append(beginning)
    names: dict[tuple[int, str], str] = {}
    for corpus in _sources(dataset):
        for file in progress(corpus.files, unit="files", desc="naming documents"):
            for document in corpus.documents(file):
                text = "".join(corpus.texts(document.text)) if document.text else ""
                size = len(text.encode())
                for beginning in by_size.get(size, ()):
                    if text.startswith(beginning.rstrip("\ufffd")):  # the cut may be inside a letter
                        names.setdefault((size, beginning), document.name)
    return names


def _sources(dataset: Dataset) -> Iterator[Corpus]:
    """Yield the dataset's sources that are here and unchanged."""
    made_from = read_record(dataset.folder)["made_from"] if (dataset.folder / "dataset.json").exists() else {}
    for option, version in (("source", "version"), ("val_source", "val_version")):
        source = made_from.get(option, "")
        if source and "://" not in source and not source.startswith("hf:"):
            options = [made_from.get(name, "") for name in ("text_column", "separator", "text_extensions")]
            try:
                corpus = find_corpus(source, options[0], "skip", *options[1:], conversations=dataset.conversations)
            except UserError:  # the source is gone
                continue
            if corpus.version == made_from[version]:
                yield corpus
