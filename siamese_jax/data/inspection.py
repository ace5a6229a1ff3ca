"""What a token store holds, for a reader: counts, lengths, sources and the beginnings of documents."""

import itertools

import numpy as np

from siamese_jax.data.store import TokenStore

QUANTILES = {"shortest": 0.0, "10 %": 0.1, "median": 0.5, "90 %": 0.9, "longest": 1.0}
MOST_SOURCES = 10
SAMPLE_TOKENS = 80
_BAR = 40  # characters


def inspect_store(store: TokenStore, tokenizer, num_samples: int) -> dict:
    """Counts, document lengths in tokens (their end of text included), largest sources, decoded samples.

    The samples are the beginnings of documents that are evenly spaced over the store.
    """
    lengths = np.diff(store.document_starts)
    documents = (
        np.unique(np.linspace(0, store.num_documents - 1, num_samples, dtype=np.int64)) if num_samples else []
    )
    sources = {
        name: int(store.document_starts[last + 1] - store.document_starts[first])
        for name, (first, last) in store.sources.items()
    }
    largest = sorted(sources.items(), key=lambda item: -item[1])[:MOST_SOURCES]
    edges = 2 ** np.arange(int(lengths.max()).bit_length() + 1)
    counts = np.histogram(lengths, edges)[0].tolist()
    return {
        "path": str(store.path),
        "tokenizer": store.meta["tokenizer"],
        "vocab_size": store.vocab_size,
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "bytes": store.num_bytes,
        "bytes_per_token": store.num_bytes / store.num_tokens,
        "duplicates_left_out": store.meta.get("duplicates", 0),
        "fingerprint": store.fingerprint,
        "lengths": {name: float(np.quantile(lengths, q)) for name, q in QUANTILES.items()}
        | {"mean": float(lengths.mean())},
        "histogram": [
            {"from": int(first), "below": int(end), "documents": count}
            for (first, end), count in zip(itertools.pairwise(edges.tolist()), counts, strict=True)
            if count
        ],
        "sources": {"number": len(sources), "largest": dict(largest)},
        "samples": [_sample(store, tokenizer, int(number)) for number in documents],
    }


def _sample(store: TokenStore, tokenizer, number: int) -> dict:
    first, end = store.document_starts[number : number + 2].tolist()
    name = next(name for name, (one, last) in store.sources.items() if one <= number <= last)
    ids = store.tokens[first : min(end, first + SAMPLE_TOKENS)].tolist()
    return {
        "document": number,
        "source": name,
        "tokens": end - first,
        "ids": ids[:12],
        "text": tokenizer.decode(ids),
    }


def format_inspection(seen: dict) -> str:
    """The same as text."""
    lines = [
        f"{seen['path']}: {seen['documents']:,} documents, {seen['tokens']:,} tokens, {seen['bytes']:,} bytes "
        f"({seen['bytes_per_token']:.2f} a token), tokenizer {seen['tokenizer']['name']}, vocabulary "
        f"{seen['vocab_size']:,}, fingerprint {seen['fingerprint'][:16]}"
    ]
    lines.append(
        "  tokens of a document: " + ", ".join(f"{name} {value:,.0f}" for name, value in seen["lengths"].items())
    )
    most = max(row["documents"] for row in seen["histogram"])
    for row in seen["histogram"]:
        bar = "#" * max(1, round(_BAR * row["documents"] / most))
        lines.append(f"  {row['from']:>11,} to {row['below'] - 1:>11,}  {row['documents']:>9,}  {bar}")
    number, largest = seen["sources"]["number"], seen["sources"]["largest"]
    listed = ", ".join(f"{name} {tokens:,}" for name, tokens in largest.items())
    lines.append(f"  {number:,} source(s){', the largest in tokens' if number > len(largest) else ''}: {listed}")
    for one in seen["samples"]:
        text = " ".join(one["text"].split())
        lines.append(f"  document {one['document']:,} ({one['source']}, {one['tokens']:,} tokens): {text!r}")
    return "\n".join(lines)
