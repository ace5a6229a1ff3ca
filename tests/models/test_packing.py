"""Documents packed into one window: hidden from each other they move no other's logits, under any scheme."""

import jax
import numpy as np
import pytest

from siamese_jax.config import base_config, model_config
from siamese_jax.data.build import build_store
from siamese_jax.data.loader import WindowLoader
from siamese_jax.data.tokenizer import ByteTokenizer
from siamese_jax.models.initialize import initial_parameters
from siamese_jax.models.language import LanguageModel, document_options
from siamese_jax.residual.scheme import known_schemes

TEXTS = ["the first", "of four", "documents, in", "two windows"]
CHANGED = [TEXTS[0], "??:????", *TEXTS[2:]]
LENGTH = 22


def batch_of(texts, folder, cross_documents):
    store = build_store((("a", text) for text in texts), ByteTokenizer(), folder, progress=False)
    loader = WindowLoader(store, LENGTH, 2, shuffle=False, cross_documents=cross_documents)
    return loader.batch(0), np.searchsorted(store.document_starts, np.arange(2 * LENGTH), side="right") - 1


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """(batch, the same with every letter of the second document changed, document of each target) by packing."""
    folder = tmp_path_factory.mktemp("packing")
    made = {}
    for cross in (True, False):
        (first, documents), (second, _) = (
            batch_of(texts, folder / f"{cross}{i}", cross) for i, texts in enumerate((TEXTS, CHANGED))
        )  # fmt: skip
        made[cross] = first, second, documents.reshape(2, LENGTH)
    return made


SOME = ("siamese", "siamese_hybrid")  # the others take as long again to compile


@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=[] if name in SOME else [pytest.mark.slow]) for name in known_schemes()]
)
def test_perturbing_a_document_moves_no_other(batches, scheme):
    config = base_config()
    config.model.update({"width": 16, "num_layers": 2, "num_heads": 2, "mlp_hidden": 32, "residual": scheme})
    model = LanguageModel(model_config(config))
    params = jax.jit(initial_parameters, static_argnums=0)(model.config, jax.random.key(0))
    logits = jax.jit(lambda batch: model.apply({"params": params}, batch["inputs"], **document_options(batch)))
    for cross, (first, second, documents) in batches.items():
        if cross and scheme != "siamese_hybrid":
            continue  # that documents move each other without masks is seen once
        one, other = (np.asarray(logits(batch))[..., :257] for batch in (first, second))
        moved = np.abs(one - other).max(axis=-1)
        # An input is the token before its target: the last letter of a document stands before its end of text.
        changed = documents == 1
        assert moved[changed].max() > 1e-3
        later = (documents == 2) & (np.arange(2) == np.flatnonzero(changed.any(axis=1))[-1])[:, None]
        assert (moved[later].max() > 1e-4) == cross
        if not cross:
            assert moved[~changed].max() == 0


def test_positions_restart_with_every_document(batches):
    batch, _, documents = batches[False]
    for row in range(2):
        for number in np.unique(documents[row]):
            own = batch["positions"][row][documents[row] == number]
            assert own.tolist() == list(range(len(own)))
            assert len(np.unique(batch["segments"][row][documents[row] == number])) == 1
