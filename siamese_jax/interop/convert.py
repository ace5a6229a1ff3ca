"""Converts models between PyTorch checkpoints and run folders of this library, both ways, bit for bit.

    python -m siamese_jax.interop.convert --from=CHECKPOINT --to=DIR
    python -m siamese_jax.interop.convert --from=DIR --to=model.safetensors
    python -m siamese_jax.interop.convert --from=DIR --to=EXPORT --layout=huggingface

From PyTorch: CHECKPOINT is a .safetensors, .pt or .bin file, an index of several (model.safetensors.index.json),
or a folder with one of them (.pth is read as .pt); its YAML or JSON configuration lies beside it (or
--config_file names it). Read are
  reference     OLMo v1, HybridNorm and SiameseNorm (hybrid-pre) as the reference code names them
  huggingface   Llama, Qwen3, OLMo and OLMo 2 as transformers names them
  deit, dit     DeiT (timm's names, its ViT too) and DiT, Pre-Norm and SiameseNorm; their configuration holds the
                arguments of the class; what it lacks, or all of it, the shapes of the weights tell
DIR becomes a run folder that eval.py takes, with a config.py for train.py. Weights are float32 there.

To PyTorch: DIR is a run folder; its newest sound checkpoint is taken unless --step says otherwise, and the
running average where the run keeps one. --to is a .safetensors file (configuration beside it, with the suffix
.json) or a folder to make. The layout is that of the origin, of a run too that was trained on from converted
weights (training.init_from), or the reference's, unless --layout is given.

Nothing that exists is written over, and what is written appears whole or not at all. .pt and .bin need PyTorch
(pip install torch). Exit codes: 0 done, 2 wrong input, 1 anything else.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping
from typing import Any

import flax.traverse_util
import jax
import numpy as np
import yaml
from absl import flags
from tqdm import tqdm

from siamese_jax import __version__, program
from siamese_jax.checkpoint import open_weights, write_weights
from siamese_jax.config import base_config, model_config, resolved
from siamese_jax.data.tokenizer import absolute_spec, make_tokenizer
from siamese_jax.errors import FaultError, InputError
from siamese_jax.interop import huggingface, images, reference
from siamese_jax.interop.keys import read_json, read_yaml
from siamese_jax.interop.layout import Layout, check_tensors
from siamese_jax.interop.weights import PICKLES, SAFETENSORS, SafetensorsWriter, open_weights_file
from siamese_jax.models.families import check_model, family_name, parameter_shapes
from siamese_jax.models.language import LanguageConfig
from siamese_jax.models.transformer import TransformerConfig
from siamese_jax.run_folder import CHECKPOINTS, CONFIG, read_config, write_json

LAYOUTS = {
    "reference": reference.layout,
    "huggingface": huggingface.layout,
    "deit": images.vision_layout,
    "dit": images.diffusion_layout,
}
LAYOUTS_OF = {"language": ("reference", "huggingface"), "vision": ("deit",), "diffusion": ("dit",)}
DTYPES = ("float32", "bfloat16", "float16")
WEIGHTS = "model.safetensors"
STEP = 0  # of a converted checkpoint: no update was done here

flags.DEFINE_string("from", None, "PyTorch checkpoint (file, index or folder), or a run folder.")
flags.DEFINE_string("to", None, "Run folder to make; or .safetensors file, or folder, to export to.")
flags.DEFINE_string("config_file", None, "YAML or JSON configuration; the one beside the weights unless given.")
flags.DEFINE_string(
    "tokenizer", None, "From PyTorch: tokenizers JSON file, or bytes; a tokenizer.json beside the weights is found."
)
flags.DEFINE_bool(
    "exclude_padding", False,
    "From PyTorch: keep rows that only pad the vocabulary out of the softmax; PyTorch has them in it.",
)  # fmt: skip
flags.DEFINE_enum("layout", None, sorted(LAYOUTS), "To PyTorch: whose names; those of the origin unless given.")
flags.DEFINE_enum("dtype", "float32", DTYPES, "To PyTorch: type of the weights.")
flags.DEFINE_integer("step", None, "To PyTorch: step of the checkpoint; the newest sound one unless given.")
program.define_json_flag()


# ------------------------------------------------------------------------------ from PyTorch


def read_foreign_config(weights: pathlib.Path, given: str | None) -> tuple[pathlib.Path, dict[str, Any]]:
    """(file, model configuration) of a PyTorch checkpoint; of a training configuration, its `model` part."""
    path = pathlib.Path(given) if given else _config_beside(weights)
    try:
        text = path.read_text(encoding="utf-8")
        found = read_json(text) if path.suffix == ".json" else read_yaml(text)
    except FileNotFoundError as error:
        raise InputError(f"there is no configuration file {path}") from error
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise InputError(
            f"the configuration {path} cannot be read: {' '.join(str(error).split())[:150]}"
        ) from error
    if isinstance(found, dict) and isinstance(found.get("model"), dict):
        found = found["model"]
    if not isinstance(found, dict):
        raise InputError(f"the configuration {path} is a {type(found).__name__}, not a table of keys")
    return path, found


def find_foreign_config(
    source: pathlib.Path,
    given: str | None,
    shapes: Mapping[str, tuple[int, ...]],
    say: Callable[[str], None] = print,
) -> tuple[str, dict[str, Any]]:
    """(where it is from, model configuration): what that of an image model lacks, its shapes tell."""
    family = images.family_of(shapes)
    if not family:
        path, found = read_foreign_config(source, given)
        return path.name, found
    name, found = "", {}
    with contextlib.suppress(NoConfiguration):
        path, found = read_foreign_config(source, given)
        name = f"{path.name} and "
        if not given and not images.holds_arguments(found, family):
            say(f"note: {path.name} has no arguments of this model's class: it is not read")
            name, found = "", {}
    return f"{name}the shapes of its weights", images.told_by_shapes(shapes, found)


class NoConfiguration(InputError):
    """There is none beside the weights."""


def _config_beside(weights: pathlib.Path) -> pathlib.Path:
    names = ["config.json", "config.yaml", "config.yml"]
    folder = weights if weights.is_dir() else weights.parent
    if not weights.is_dir():
        names = [f"{weights.stem}{suffix}" for suffix in (".json", ".yaml", ".yml")] + names
    for name in names:
        if (folder / name).is_file() and folder / name != weights:
            return folder / name
    raise NoConfiguration(f"no configuration beside {weights} (looked for {', '.join(names)}): give --config_file")


def foreign_model(
    theirs: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], exclude_padding: bool = False
) -> tuple[str, TransformerConfig, Layout]:
    """(name of the layout, our configuration, layout) of a PyTorch model; InputError where there is none here."""
    family = images.family_of(shapes)
    if family and exclude_padding:
        raise InputError("--exclude_padding: an image model has no vocabulary")
    if family == "vision":
        name, model = "deit", images.vision_config(theirs, shapes)
    elif family == "diffusion":
        name, model = "dit", images.diffusion_config(theirs, shapes)
    elif huggingface.is_huggingface(theirs):
        if exclude_padding:
            raise InputError(
                "--exclude_padding: a configuration of transformers does not say which rows are padding"
            )
        name, model = "huggingface", huggingface.language_config(theirs)
    else:
        name, model = "reference", reference.language_config(theirs, shapes, exclude_padding)
    check_model(model)
    return name, model, LAYOUTS[name](model)


def import_checkpoint(
    source: str,
    to: str,
    *,
    config_file: str | None = None,
    tokenizer: str | None = None,
    exclude_padding: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Makes the run folder `to` of a PyTorch checkpoint; what was done, as a dict that JSON can hold."""
    folder = pathlib.Path(to)
    if folder.suffix in (SAFETENSORS, *PICKLES):
        raise InputError(f"--to {to}: from PyTorch a run folder is made, not a {folder.suffix} file")
    _check_absent(folder)
    with open_weights_file(source) as weights:
        found = dict(weights.shapes)
        config_name, theirs = find_foreign_config(pathlib.Path(source), config_file, found, say)
        layout_name, model, layout = foreign_model(theirs, found, exclude_padding)
        if layout_name == "huggingface":
            _check_tied(source, weights, model)
            found = {name: shape for name, shape in found.items() if not huggingface.superfluous(name, model)}
        check_tensors(layout.tensors(), found, f"{source} ({config_name})")
        layout.check_fixed(weights.read, str(source), weights.types)
        for name in found:
            weights.check_type(name)
        fingerprint = None
        if isinstance(model, LanguageConfig):
            tokenizer, fingerprint = _tokenizer_of(source, tokenizer, say)
        elif tokenizer:
            raise InputError("--tokenizer: an image model reads no text, leave it out")
        else:
            say(f"configuration: {config_name}: {', '.join(f'{key} {value}' for key, value in theirs.items())}")
        config = _run_config(model, theirs, tokenizer)
        if family_name(model) == "vision":
            say(f"data.normalise: {config.data.normalise} (imagenet for colours, as DeiT; timm's ViT wants half)")
        about = {
            "tokens": 0,
            "metrics": {},
            "config": resolved(config),
            "data": {"tokenizer": fingerprint},
            "converted": {"from": str(source), "layout": layout_name, "config": _plain(theirs)},
            "library": __version__,
        }
        say(f"{source}: {layout_name} layout, {_described(model, layout)}, {weights.size:,} bytes")
        with _building(folder) as building:
            entries = layout.entries(model)
            with _progress(layout) as bar:

                def read(path: str) -> np.ndarray:
                    return entries[path.removeprefix("params/")].join(
                        lambda name: _counted(bar, weights.read(name))
                    )

                shapes = {"params": parameter_shapes(model)}
                write_weights(building / CHECKPOINTS, STEP, shapes, read, about)
            write_json(building / CONFIG, about["config"])
            (building / "config.py").write_text(_config_py(config, source, to), encoding="utf-8")
            building.rename(folder)
    return {
        "from": str(source), "to": str(to), "layout": layout_name, "residual": model.residual,
        "parameters": _count(layout), "tensors": len(layout.tensors()), "step": STEP,
        "example": "TEXT" if isinstance(model, LanguageConfig) else "IMAGES",
    }  # fmt: skip


def _check_tied(source: str, weights, model: LanguageConfig) -> None:
    """InputError where a head that the configuration ties to the embedding is another matrix in the file."""
    if model.tie_embedding and {huggingface.HEAD, huggingface.TABLE} <= weights.shapes.keys():
        head, table = weights.read(huggingface.HEAD), weights.read(huggingface.TABLE)
        if not np.array_equal(head, table):
            raise InputError(
                f"{source}: tie_word_embeddings is on, but {huggingface.HEAD} is not {huggingface.TABLE}: "
                "set tie_word_embeddings to false, or remove the tensor"
            )


def _run_config(model: TransformerConfig, theirs: Mapping[str, Any], tokenizer: str | None):
    config = base_config(family_name(model))
    values = dataclasses.asdict(model)
    options = dict(values.pop("residual_options"))
    for key, value in values.items():
        config.model[key] = value
    for key, value in options.items():
        config.model.residual_options[key] = value
    if tokenizer is None:
        config.data.normalise = "imagenet" if config.family == "vision" and model.channels == 3 else "half"
        return config
    config.data.tokenizer = tokenizer
    length = theirs.get("max_sequence_length") or theirs.get("max_position_embeddings")
    if isinstance(length, int) and length > 0:
        config.data.length = length
    return config


def _tokenizer_of(source: str, given: str | None, say) -> tuple[str, str]:
    """--tokenizer, or the tokenizer.json beside the weights, or bytes; and its fingerprint."""
    path = pathlib.Path(source)
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    spec = given or (str(beside.absolute()) if beside.is_file() else "bytes")
    spec = absolute_spec(spec)
    fingerprint = make_tokenizer(spec).fingerprint
    if not given:
        why = " (none was given or found)" if spec == "bytes" else ""
        say(f"tokenizer: {spec}{why}; --tokenizer=FILE changes it")
    return spec, fingerprint


def _config_py(config, source: str, to: str) -> str:
    """A configuration file that starts from these weights."""
    default, is_text = base_config(config.family), config.family == "language"
    data = ("tokenizer", "length") if is_text else ("normalise",)
    changed = [
        f"    config.model.{key} = {value!r}"
        for key, value in config.model.items()
        if key != "residual_options" and value != default.model[key]
    ]
    changed += [
        f"    config.model.residual_options.{key} = {value!r}"
        for key, value in config.model.residual_options.items()
        if value is not None
    ]
    lines = [
        f'"""The model of {pathlib.Path(source).name}, from its weights; set data, training and schedule."""',
        "", "from siamese_jax.config import base_config", "", "", "def get_config():",
        "    config = base_config()" if is_text else f"    config = base_config({config.family!r})",
        *changed,
        *(f"    config.data.{key} = {config.data[key]!r}" for key in data),
        f"    config.training.init_from = {str(pathlib.Path(to).absolute())!r}",
        "    return config", "",
    ]  # fmt: skip
    return "\n".join(lines)


# ------------------------------------------------------------------------------ to PyTorch


def export_checkpoint(
    source: str,
    to: str,
    *,
    layout: str | None = None,
    dtype: str = "float32",
    step: int | None = None,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Writes the weights of a run folder for PyTorch; what was done, as a dict that JSON can hold."""
    target = pathlib.Path(to)
    is_file = target.suffix == SAFETENSORS
    if target.suffix in PICKLES:
        raise InputError(f"--to {to}: what is written is a {SAFETENSORS} file or a folder, not {target.suffix}")
    _check_absent(target)
    if is_file:
        _check_absent(target.with_suffix(".json"))
    config = read_config(source)
    model = model_config(config)
    with open_weights(pathlib.Path(source) / CHECKPOINTS, step, log=say) as opened:
        origin = opened.about.get("converted") or {}
        fitting = LAYOUTS_OF[config.family]
        if layout and layout not in fitting:
            raise InputError(
                f"--layout {layout} is not for the {config.family} model of {source}: it has {', '.join(fitting)}"
            )
        layout_name = layout or origin.get("layout", fitting[0])
        built = LAYOUTS[layout_name](model)
        base = origin.get("config", {}) if origin.get("layout") == layout_name else {}
        theirs = _foreign_config(layout_name, model, base, config, dtype)
        top = "ema/params" if config.optimizer.ema > 0 else "params"
        entries = {f"{top}/{path}": entry for path, entry in built.entries(model).items()}
        _check_stored(source, model, top, opened.shapes)
        say(f"{source}: checkpoint {opened.step}, {layout_name} layout, {_described(model, built)}")
        if isinstance(model, LanguageConfig) and model.vocab_size < model.padded_vocab:
            say(
                f"note: rows {model.vocab_size} to {model.padded_vocab - 1} of the vocabulary only pad it: "
                "PyTorch takes them into its softmax, this library does not"
            )

        with _building(target) as building:
            with SafetensorsWriter(building / WEIGHTS, built.tensors(), dtype) as writer, _progress(built) as bar:
                for name, entry in entries.items():
                    for tensor_name, tensor in entry.split(opened.read(name)):
                        writer.write(tensor_name, _counted(bar, tensor))
                for name, tensor in built.fixed.items():
                    writer.write(name, tensor)
            if is_file or layout_name != "reference":
                write_json(building / "config.json", theirs)
            else:
                (building / "config.yaml").write_text(yaml.safe_dump({"model": theirs}, sort_keys=False))
            if is_file:
                (building / "config.json").rename(target.with_suffix(".json"))
                (building / WEIGHTS).rename(target)
            else:
                building.rename(target)
        averaged = top != "params"
        return {
            "from": str(source), "to": str(to), "layout": layout_name, "residual": model.residual,
            "parameters": _count(built), "tensors": len(built.tensors()), "step": opened.step, "averaged": averaged,
            "dtype": dtype,
        }  # fmt: skip


def _foreign_config(layout: str, model: TransformerConfig, base: Mapping, config, dtype: str) -> dict[str, Any]:
    if layout in ("deit", "dit"):
        return images.reference_config(model, base)
    if layout == "huggingface":
        return huggingface.huggingface_config(model, base, config.data.length, dtype)
    return reference.reference_config(model, {"max_sequence_length": config.data.length} | dict(base))


def _check_stored(
    source: str, model: TransformerConfig, top: str, stored: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    wanted = flax.traverse_util.flatten_dict({top: parameter_shapes(model)}, sep="/")
    found = {name: tuple(leaf.shape) for name, leaf in stored.items() if name.startswith(f"{top}/")}
    check_tensors({name: leaf.shape for name, leaf in wanted.items()}, found, f"the checkpoint of {source}")


# ------------------------------------------------------------------------------ both


@contextlib.contextmanager
def _building(target: pathlib.Path):
    """A hidden folder beside `target` to build in; what is not moved out of it goes, and so do new parents."""
    target = target.absolute()
    building = target.with_name(f".{target.name}.part")
    new_parents = [parent for parent in target.parents if not os.path.exists(parent)]
    try:
        shutil.rmtree(building, ignore_errors=True)  # of a run that was killed
        building.mkdir(parents=True)
        yield building
    except OSError as error:
        where = f"cannot write --to {target}: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise FaultError(f"{where}: free space, then start again") from error
        raise InputError(f"{where}: choose another place") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
        if not os.path.lexists(target):
            for parent in new_parents:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _check_absent(path: pathlib.Path) -> None:
    if os.path.lexists(path):
        raise InputError(f"{path} exists: it is never written over; name another --to or remove it")


def _described(model: TransformerConfig, layout: Layout) -> str:
    return f"{model.residual}, {_count(layout):,} parameters"


def _count(layout: Layout) -> int:
    return sum(int(np.prod(shape)) for shape in layout.tensors().values())


def _progress(layout: Layout) -> tqdm:
    return tqdm(total=4 * _count(layout), unit="B", unit_scale=True, delay=2, leave=False, dynamic_ncols=True)


def _counted(bar: tqdm, array: np.ndarray) -> np.ndarray:
    bar.update(array.nbytes)
    return array


def _plain(theirs: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(theirs), default=str))


def main() -> None:
    given = flags.FLAGS
    source, to = program.required("from"), program.required("to")
    if not os.path.exists(source):
        raise InputError(f"--from {source} does not exist")
    outward = (pathlib.Path(source) / CHECKPOINTS).is_dir()
    wrong = ("config_file", "tokenizer", "exclude_padding") if outward else ("layout", "dtype", "step")
    for name in wrong:
        if given[name].present:
            direction = "a run folder" if outward else "a PyTorch checkpoint"
            raise InputError(f"--{name} has no meaning where --from is {direction}: leave it out")
    started = time.perf_counter()
    if outward:
        result = export_checkpoint(
            source, to, layout=given.layout, dtype=given.dtype, step=given.step, say=program.say
        )
    else:
        result = import_checkpoint(
            source, to, config_file=given.config_file, tokenizer=given.tokenizer,
            exclude_padding=given.exclude_padding, say=program.say,
        )  # fmt: skip
    result["seconds"] = round(time.perf_counter() - started, 2)
    if given.json:
        print(json.dumps(result))
        return
    program.say(f"{to}: {result['tensors']} tensors in {result['seconds']} s")
    if outward:
        how = "AutoModelForCausalLM.from_pretrained" if result["layout"] == "huggingface" else "load_state_dict"
        program.say(f"next: {how} in PyTorch, or back with --from={to}")
    else:
        program.say(f"next: python eval.py --workdir={to} --data.source={result['example']}")
        program.say(f"      python train.py --config={to}/config.py --workdir=NEW   (starts from these weights)")


if __name__ == "__main__":
    program.run(main)
