"""The configuration of a run: every key with its default, checks, and what a stored run may not change.

A configuration file starts from `base_config()` and changes values; it cannot add keys.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping

import jax
import ml_collections
from ml_collections import config_dict

from siamese_jax.errors import InputError
from siamese_jax.models.families import check_model
from siamese_jax.models.language import LanguageConfig
from siamese_jax.residual.scheme import known_schemes, resolve_options, scheme_options
from siamese_jax.training.optimizer import check_optimizer
from siamese_jax.training.schedule import check_schedule

# What may differ when a run goes on: it changes neither the model, nor the data, nor the course of training.
FREE = (
    *("checkpoint", "eval", "mesh", "logging", "data.cache_dir"),
    *("training.accumulation", "training.sequences_per_device"),  # the same update, added up in another order
    *("model.remat", "model.offload_streams", "model.attention"),
)


def _option_placeholders() -> dict:
    """Every option of every scheme as an empty, typed value: None means the scheme's default."""
    placeholders = {}
    for scheme in known_schemes():
        for option, (kind, _) in scheme_options(scheme).items():
            kind = str if typing.get_args(kind) else kind
            placeholders[option] = config_dict.placeholder(kind)
    return placeholders


def base_config() -> ml_collections.ConfigDict:
    """All keys with their defaults; locked, so that a misspelt key in a configuration file is an error."""
    model = {field.name: field.default for field in dataclasses.fields(LanguageConfig)}
    config = ml_collections.ConfigDict(
        {
            "seed": 0,  # of the initial parameters and of the order of the data
            "model": model | {"residual_options": _option_placeholders()},
            "data": {
                "source": "sotu",  # or files, folders, globs by commas (.txt .jsonl[.gz|.zst] .parquet)
                "validation_source": "",  # '' holds out a part of the source
                "validation_fraction": 0.05,
                "field": "text",  # of .jsonl and .parquet
                "tokenizer": "bytes",  # or a Hugging Face `tokenizers` JSON file
                "end_of_text": "",  # token between documents; '' finds the usual ones
                "length": 256,  # tokens of a window
                "cross_documents": True,  # attention and positions run on across documents
                "cache_dir": "",  # of token stores; '' = ~/.cache/siamese_jax
            },
            "training": {
                "steps": 1000,
                "batch_size": 16,  # windows of one update, over all devices
                "accumulation": 1,  # micro-batches of one update
                "sequences_per_device": 0,  # or: at most so many windows on a device at once; 0 = off
                "z_loss": 0.0,
                "init_from": "",  # a run folder whose newest weights a new run starts from
            },
            "optimizer": {
                "kind": "adamw",  # or muon
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-8,
                "muon_momentum": 0.95,
                "weight_decay": 0.1,
                "decay_embedding": True,
                "clip_norm": 1.0,
                "ema": 0.0,  # decay of the running average of the parameters; 0 = off
            },
            "schedule": {
                "kind": "cosine",  # cosine, wsd, constant
                "peak": 1e-3,
                "warmup_steps": 100,
                "floor": 0.1,  # of the peak
                "decay_steps": 0,  # wsd
                "decay_shape": "linear",  # wsd: linear or 1-sqrt
            },
            # Devices along each axis, -1 = what is left over: data splits the batch, fsdp the batch and the
            # parameters, tensor heads, hidden and vocabulary.
            "mesh": {"data": -1, "fsdp": 1, "tensor": 1},
            "checkpoint": {"every": 500, "keep": 3, "keep_every": 0, "strict": False},
            "eval": {
                "every": 500,  # validation; 0 = only at the end
                "batch_size": 16,
                "max_windows": 0,  # of a validation during the run; 0 = all. At the end always all
                "prompt": "",  # of the sample at the end; '' = none
                "sample_tokens": 200,
                "temperature": 0.8,
            },
            "logging": {"every": 10, "streams_every": 100},  # steps; 0 = never
        }
    )
    return config.lock()


def flat_items(config: Mapping, prefix: str = "") -> dict:
    """{'model.width': 256, ...}."""
    items = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        items |= (
            flat_items(value, f"{path}.")
            if isinstance(value, Mapping | ml_collections.ConfigDict)
            else {path: value}
        )
    return items


def nearest_key(key: str) -> str:
    """' (nearest: data.length)' or nothing."""
    known = list(flat_items(base_config()))
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f" (nearest: {near[0]})" if near else ""


def language_config(config: ml_collections.ConfigDict) -> LanguageConfig:
    """The model part of a configuration as the model's own dataclass, checked, scheme options filled in."""
    values = dict(config.model.items())
    options = resolve_options(values["residual"], dict(values["residual_options"].items()))
    model = LanguageConfig(**values | {"residual_options": tuple(sorted(options.items()))})
    check_model(model)
    return model


def check_config(config: ml_collections.ConfigDict) -> None:
    """InputError for the first thing in a configuration that cannot work; nothing is computed."""
    language_config(config)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule, config.training.steps)
    at_least = {
        "data.length": 1, "training.batch_size": 1, "training.accumulation": 1, "training.z_loss": 0,
        "training.sequences_per_device": 0,
        "checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.keep_every": 0, "eval.every": 0,
        "eval.batch_size": 1, "eval.max_windows": 0, "eval.sample_tokens": 0, "eval.temperature": 0,
        "logging.every": 1, "logging.streams_every": 0,
    }  # fmt: skip
    values = flat_items(config)
    for key, least in at_least.items():
        if not values[key] >= least:  # NaN too
            raise InputError(f"{key} is {values[key]}: it must be at least {least}")
    for key in ("model.init_std", "model.norm_epsilon", "model.rope_theta"):
        if not values[key] > 0:
            raise InputError(f"{key} is {values[key]}: it must be above 0")
    if not math.isfinite(config.schedule.peak):
        raise InputError(f"schedule.peak is {config.schedule.peak}: it must be finite")
    if "float64" in (config.model.dtype, config.model.stream_dtype) and not jax.config.jax_enable_x64:
        raise InputError("model.dtype or model.stream_dtype is float64: jax has it only with JAX_ENABLE_X64=1 set")
    if not 0 < config.data.validation_fraction < 1:
        raise InputError(
            f"data.validation_fraction is {config.data.validation_fraction}: it must lie between 0 and 1"
        )
    batch, parts = config.training.batch_size, config.training.accumulation
    if batch % parts:
        raise InputError(f"training.accumulation {parts} does not divide training.batch_size {batch}")
    if parts > 1 and config.training.sequences_per_device:
        raise InputError(
            f"training.accumulation {parts} and training.sequences_per_device "
            f"{config.training.sequences_per_device} both divide an update: leave one at its default"
        )


def resolved(config: ml_collections.ConfigDict) -> dict:
    """The configuration as plain JSON values, with only the scheme's own options, all filled in."""
    plain = json.loads(config.to_json())
    plain["model"]["residual_options"] = dict(language_config(config).residual_options)
    return plain


def from_resolved(plain: Mapping, where: str) -> ml_collections.ConfigDict:
    """A configuration from what `resolved` stored; keys that have come since then keep their defaults."""
    config = base_config()
    for path, value in flat_items(plain).items():
        *groups, key = path.split(".")
        group = config
        for name in groups:
            group = group.get(name, ml_collections.ConfigDict())
        if key not in group:
            raise InputError(
                f"{where} has the key {path} that this version does not know{nearest_key(path)}: "
                "use the version that wrote it"
            )
        try:
            group[key] = value
        except TypeError as error:
            kind = group.get_type(key).__name__
            raise InputError(f"{where} has {path} = {value!r}: it must be of type {kind}") from error
    return config


def differences(stored: Mapping, wanted: Mapping) -> list[str]:
    """'key: stored -> wanted' for every key that a run may not change when it goes on.

    The options of two different residual schemes are not compared: the same name may mean different things.
    """
    old, new = flat_items(stored), flat_items(wanted)
    other_scheme = old.get("model.residual") != new.get("model.residual")
    free = (*FREE, "model.residual_options") if other_scheme else FREE
    return [
        f"{key}: {old.get(key, '(none)')!r} -> {new.get(key, '(none)')!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(key == f or key.startswith(f + ".") for f in free)
    ]
