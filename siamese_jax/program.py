"""How every program starts and ends: flags with clear errors, and exit codes.

0 done · 2 a wrong configuration or input, one line on stderr · 1 a fault, one line · 130 interrupted.
"""

import functools
import hashlib
import json
import logging
import math
import os
import pathlib
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import app, flags
from absl import logging as absl_logging
from ml_collections import ConfigDict, config_flags

from siamese_jax import __version__
from siamese_jax.config import base_config, flat_items, nearest_key, resolved
from siamese_jax.errors import FaultError, InputError
from siamese_jax.models.families import FAMILIES
from siamese_jax.parallel import start_up

OK, FAULT, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130
FLAGS = flags.FLAGS
flags.disclaim_key_flags()  # the flags below belong to the program that asks for them, and to its --help


def define_config_flag() -> None:
    """--config=FILE and --config.a.b=VALUE."""
    config_flags.DEFINE_config_file(
        "config", None, "Configuration file; --config.a.b=VALUE changes one of its values.", lock_config=True
    )


def define_json_flag() -> None:
    """--json."""
    flags.DEFINE_bool("json", False, "Print one JSON object on stdout; everything else goes to stderr.")


def json_values(value: Any) -> Any:
    """The same with None for every number that JSON does not have (NaN, infinity)."""
    if isinstance(value, dict):
        return {key: json_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_values(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(result: dict, as_text: Callable[[dict], str]) -> None:
    """The result of a program, from process 0: as one JSON object on stdout with --json, else as text."""
    if not FLAGS.json:
        say(as_text(result))
    elif start_up.is_main():
        print(json.dumps(json_values(result), allow_nan=False))


def facts(config: ConfigDict | None = None, **others: str) -> dict[str, str]:
    """What must be equal on all processes of a run: the configuration, if any, the versions, and `others`."""
    known = {"library": __version__, "jax": jax.__version__, **others}
    if config is None:
        return known
    text = json.dumps(resolved(config), sort_keys=True)
    return {"configuration": hashlib.sha256(text.encode()).hexdigest(), **known}


def shared_arguments() -> str:
    """The command line without what tells one process from another."""
    return " ".join(word for word in sys.argv[1:] if not word.lstrip("-").startswith(("process=", "process ")))


def say(line: str = "") -> None:
    """A line for the reader, from process 0: on stdout, or on stderr where --json keeps stdout for one object."""
    if not start_up.is_main():
        return
    for_json = FLAGS.is_parsed() and FLAGS.get_flag_value("json", False)
    print(line, file=sys.stderr if for_json else sys.stdout, flush=True)


def say_here(line: str) -> None:
    """A line for the reader from this process, whichever it is; on stderr."""
    print(line, file=sys.stderr, flush=True)


def required(name: str) -> str:
    """The value of a flag, or InputError that says to give it."""
    value = FLAGS.get_flag_value(name, None)
    if not value:
        raise InputError(f"--{name} is missing: give it, or see --help")
    return value


def _check_overrides(arguments: Sequence[str], family: str) -> None:
    """InputError for --config.KEY=... where the family has no KEY; names the nearest key."""
    known = flat_items(base_config(family))
    groups = {key.rsplit(".", depth)[0] for key in known for depth in (1, 2) if key.count(".") >= depth}
    for argument in arguments:
        name = argument.partition("=")[0].lstrip("-").removeprefix("no")
        key = name.removeprefix("config.")
        if name.startswith("config.") and key not in known and key not in groups:
            raise InputError(f"unknown configuration key {key!r}{nearest_key(key, family)}")


def _check_config_files(arguments: Sequence[str]) -> str:
    """The family of the last configuration file named, language without one."""
    family = "language"
    for i, argument in enumerate(arguments):
        name, has_value, value = argument.lstrip("-").partition("=")
        if name != "config" or not argument.startswith("-"):
            continue
        path = value if has_value else (arguments[i + 1] if i + 1 < len(arguments) else "")
        if not pathlib.Path(path).is_file():
            near = sorted(str(found) for found in pathlib.Path("configs").glob("*.py"))
            listed = f"; there are: {', '.join(near)}" if near else ""
            raise InputError(f"there is no configuration file {path!r}{listed}")
        family = _try_config_file(path)
    return family


def _try_config_file(path: str) -> str:
    """The family of its configuration; InputError that names the line, where ml_collections would show pages."""
    try:
        found = runpy.run_path(path)
        if "get_config" not in found:
            raise InputError(f"the configuration file {path} has no function get_config()")
        config = found["get_config"]()
    except InputError:
        raise
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in trace if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f"{path}, line {line}" if line else path
        raise InputError(f"{place}: {_reason(error)}") from error
    if not isinstance(config, ConfigDict):
        raise InputError(f"get_config() of {path} returned {config!r:.40}: it must return a configuration")
    family = config.get("family", "language")
    return family if family in FAMILIES else "language"


def _reason(error: Exception) -> str:
    """What is wrong in a configuration file, in one line; ml_collections' lists of keys are left out."""
    text = _one_line(error)
    unknown = re.search(r'(?:Key|instead of) "(\w+)"', text)
    if isinstance(error, AttributeError):
        unknown = unknown or re.match(r"[\\']+(\w+)[\\']", text)
    if isinstance(error, AttributeError | KeyError) and unknown:
        return f"unknown configuration key {unknown[1]!r}{nearest_key(unknown[1])}"
    if isinstance(error, SyntaxError):
        text = error.msg
    return f"{type(error).__name__}: {text}"


def _parse(arguments: Sequence[str], takes_files: bool) -> list[str]:
    """Sets the flags; returns the arguments that are none, if the program takes files."""
    if {"--help", "-h", "-help", "--helpfull"} & set(arguments[1:]):
        print(sys.modules["__main__"].__doc__.strip(), end="\n\n")
        print(FLAGS.main_module_help(), flush=True)
        sys.exit(OK)
    family = _check_config_files(arguments[1:])  # first: a file may bring a scheme with options of its own
    _check_overrides(arguments[1:], family)
    try:
        rest = FLAGS(list(arguments))
    except flags.Error as error:
        raise InputError(f"{_one_line(error)} (see --help)") from error
    if len(rest) > 1 and not takes_files:
        raise InputError(f"unknown argument {rest[1]!r}: every option starts with -- (see --help)")
    return rest[1:]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).replace("\\n", " ").split()).strip("\\ ")
    quoted = text[:1] in ("'", '"') and text[:1] == text[-1:]  # as KeyError does
    return text[1:-1] if quoted else text


def run(main: Callable[..., None], takes_files: bool = False) -> None:
    """Parses the flags, runs main() and exits with the code that its ending deserves.

    A program that takes files gets the arguments that are no flags: main(files).
    """
    try:
        files = _parse(sys.argv, takes_files)
        if takes_files:
            main = functools.partial(main, files)
        app.run(lambda _: _ending(main), argv=sys.argv[:1], flags_parser=lambda argv: argv)
    except InputError as error:
        _leave("error", error, WRONG_INPUT)
    except BrokenPipeError:  # of --help that nobody reads to its end
        os._exit(FAULT)


def _quiet_logging() -> None:
    """Log lines from warnings up, as they are; absl's start sets it otherwise."""
    absl_logging.set_verbosity(absl_logging.WARNING)
    absl_logging.get_absl_handler().setFormatter(logging.Formatter("%(message)s"))
    logging.getLogger("tensorboardX").setLevel(logging.ERROR)  # of NaN it warns once a number
    sys.unraisablehook = _show_unraisable


def _show_unraisable(unraisable) -> None:
    """Silences TensorStore, which shouts from its threads after a failed save; FaultError tells what failed."""
    if "Event loop is closed" not in str(unraisable.exc_value):
        sys.__unraisablehook__(unraisable)


def _ending(main: Callable[[], None]) -> int:
    _quiet_logging()
    try:
        main()
        start_up.leave()
    except InputError as error:
        _leave("error", error, WRONG_INPUT)
    except FaultError as error:
        _leave("fault", error, FAULT)
    except KeyboardInterrupt:
        _leave("fault", "interrupted", INTERRUPTED)
    except BrokenPipeError:
        os._exit(FAULT)
    except Exception as error:
        if not start_up.is_shared():
            raise
        traceback.print_exc()
        _leave("fault", f"{type(error).__name__}: {_one_line(error)[:300]}", FAULT)
    return OK


def _leave(kind: str, what: Any, code: int) -> None:
    """Ends with one line. Where there are other processes they are told first, and then nothing is waited for."""
    shared = start_up.is_shared()
    start_up.fail(f"{kind}: {what}")
    line = "interrupted" if code == INTERRUPTED else f"{kind}: {start_up.label()}{what}"
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()
    if code == FAULT or shared:
        os._exit(code)  # what libraries still want to write on a full disk would be pages of tracebacks
    sys.exit(code)
