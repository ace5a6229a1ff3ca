"""Tokenises text once into token stores that train.py and eval.py read: data.source=FOLDER.

    python -m siamese_jax.data.prepare --source=sotu --out=stores/sotu
    python -m siamese_jax.data.prepare --source=sotu --train_tokenizer=4096 --out=stores/sotu_bpe --inspect
    python -m siamese_jax.data.prepare --source='web/*.jsonl.gz' --tokenizer=neox.json --deduplicate --out=web
    python -m siamese_jax.data.prepare --source=tfds:c4/en --tokenizer=neox.json --out=stores/c4
    python -m siamese_jax.data.prepare --source='olmo/*.npy' --tokenizer=neox.json --out=stores/olmo
    python -m siamese_jax.data.prepare --out=stores/web --inspect

Sources
  sotu                the State of the Union speeches; those of 2010 and later are for validation
  files               .txt (one document each), .jsonl, .jsonl.gz, .jsonl.zst, .parquet (--field names the text);
                      folders, globs, lists by commas, read in that order
  tfds:NAME[:SPLIT]   a prepared data set of TensorFlow Datasets (--data_dir), read without TensorFlow; SPLIT is any
                      of its splits, as train[:10%]. Of a set that is not there the command for it is said at once
  .npy, .bin          tokens that another code base wrote (OLMo, nanoGPT): only where documents start is written,
                      the arrays are read where they lie
Tokenizers (--tokenizer): bytes, a tokenizer.json of Hugging Face's tokenizers, a .model of SentencePiece (pip
install sentencepiece), tiktoken:ENCODING (pip install tiktoken). --train_tokenizer=SIZE trains a byte-level BPE on
the training part and puts it into --out as tokenizer.json; with --split on that part, as OUT.tokenizer.json.

--out gets train/ and validation/, or with --split=all (train, validation) that one part itself. Documents keep
their order; an end of text closes each. The bytes written do not depend on --workers. Killed or stopped, the same
command goes on where it was; until it is done, programs refuse the folder. --deduplicate leaves out every document
whose text has come before. --inspect shows counts, lengths and decoded samples; without --source what is there.
Exit codes: 0 done, 2 wrong input, 1 anything else, 130 interrupted.
"""

# The processes that tokenise import this module again: what it needs is imported below, where they do not come.
if __name__ == "__main__":
    from siamese_jax import program
    from siamese_jax.data import preparation

    preparation.define_flags()
    program.run(preparation.main)
