"""Every wrong input ends with exit code 2 and one line that names the values, and leaves the run folder alone."""

import shutil

import pytest
from programs import (
    CONFIG,
    SAMPLE,
    checkpoints_of,
    shared_place,
    snapshot,
    undisturbed,
    write_corpus,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return shared_place(tmp_path_factory)


@pytest.fixture
def refused(place, tmp_path):
    """Runs train.py on wrong input and checks how it ends; the folder must stay as it was, or not be made."""

    def check(*arguments: str, words: tuple, workdir=None, json_flag: bool = False):
        workdir = workdir or tmp_path / "run"
        before = snapshot(workdir)
        ended = place.run(*arguments, *(["--json"] if json_flag else []))
        assert ended.code == 2, ended
        assert ended.err.startswith("error: ") and ended.err.count("\n") == 1, ended.err
        missing = [word for word in words if str(word) not in ended.err]
        assert not missing, f"{missing} not in {ended.err}"
        assert ended.out == ""
        assert snapshot(workdir) == before

    return check


OVERRIDES = [
    ("model.norm_epsilon=0", ("model.norm_epsilon is 0.0", "above 0")),
    ("schedule.peak=inf", ("schedule.peak is inf", "finite")),
    ("model.dtype=float64", ("float64", "JAX_ENABLE_X64=1")),
    ("model.widht=3", ("'model.widht'", "nearest: model.width")),
    ("modle.width=3", ("'modle.width'", "nearest: model.width")),
    ("model.residual_options.attn_nrm=True", ("attn_nrm", "nearest: model.residual_options.attn_norm")),
    ("model.width=wide", ("config.model.width=wide", "int")),
    ("model.width=1.5", ("config.model.width=1.5", "int")),
    ("schedule.peak=high", ("config.schedule.peak=high", "float")),
    ("model.scan=maybe", ("config.model.scan=maybe", "boolean")),
    ("model=3", ("config.model=3",)),
    ("model.num_heads=3", ("model.num_heads 3", "model.width 16")),
    ("model.num_layers=0", ("model.num_layers is 0", "at least 1")),
    ("model.residual=siamese_hybird", ("'siamese_hybird'", "nearest: siamese_hybrid", "pre", "post")),
    ("model.norm=rmx", ("'rmx'", "rms")),
    ("model.activation=relux", ("'relux'", "swiglu")),
    ("model.remat=some", ("'some'", "full")),
    ("model.dtype=int8", ("'int8'", "bfloat16")),
    ("model.attention=flash", ("'flash'", "auto")),
    ("model.residual_options.depth_scale=log", ("depth_scale", "'log'", "layer2, layer, subblock, none")),
    ("model.residual_options.post_norm=read", ("'siamese_hybrid' has no option 'post_norm'", "depth_scale")),
    ("optimizer.kind=adam", ("optimizer.kind is 'adam'", "'adamw'", "'muon'")),
    ("optimizer.b1=1.5", ("optimizer.b1 is 1.5",)),
    ("schedule.kind=linear", ("schedule.kind is 'linear'", "'cosine'", "'wsd'")),
    ("schedule.warmup_steps=31", ("schedule.warmup_steps is 31", "30 updates")),
    ("schedule.peak=nan", ("schedule.peak is nan",)),
    ("training.accumulation=3", ("training.accumulation 3", "training.batch_size 4")),
    ("training.z_loss=nan", ("training.z_loss is nan",)),
    ("training.batch_size=0", ("training.batch_size is 0", "at least 1")),
    ("training.steps=0", ("0 updates",)),
    ("logging.every=0", ("logging.every is 0", "at least 1")),
    ("mesh.data=3", ("mesh.data 3", "1 device(s)", "-1")),
    ("mesh.data=0", ("mesh.data 0", "1 or more")),
    ("mesh.fsdp=2", ("mesh.fsdp 2", "1 device(s)")),
    ("mesh.fsdp=-1", ("mesh.data -1", "mesh.fsdp -1", "at most one is -1")),
    ("model.offload_streams=True", ("model.offload_streams", "model.remat")),
    ("training.sequences_per_device=-1", ("training.sequences_per_device is -1", "at least 0")),
    ("data.validation_fraction=1.5", ("data.validation_fraction is 1.5", "between 0 and 1")),
    ("data.source=/nothing/here.txt", ("/nothing/here.txt", "does not exist")),
    ("data.source=train.py", ("train.py", "unknown ending", ".jsonl")),
    ("data.tokenizer=/nothing/tokenizer.json", ("/nothing/tokenizer.json", "does not exist")),
    ("data.length=100000", ("100000", "fewer than one window")),
    ("model.vocab_size=200", ("token ids up to 256", "model.vocab_size = 200", "at least 257")),
    ("training.init_from=/nothing", ("training.init_from /nothing", "no checkpoint")),
]


@pytest.mark.parametrize(("override", "words"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_value_is_refused(place, tmp_path, refused, override, words):
    refused(*place.arguments(tmp_path / "run", override), words=words)


CONFIGS = [
    ("config.model.width = 16", "config.model.widht = 16", ("line 7", "'widht'", "nearest: model.width")),
    ("config.model.width = 16", "config.modle.width = 16", ("line 7", "'modle'", "nearest: mode")),
    ("config.model.width = 16", "config.model.width = 'a'", ("line 7", "'width'", "int")),
    ("config.model.width = 16", "config.model.width = 1 / 0", ("line 7", "ZeroDivisionError")),
    ("config.model.width = 16", "config.model.width = = 16", ("line 7", "SyntaxError")),
    ("config.model.width = 16", "import nothing_of_that_name", ("line 7", "nothing_of_that_name")),
    ("def get_config", "def get_configuration", ("no function get_config()",)),
    ("    return config", "    pass", ("returned None", "must return a configuration")),
]


@pytest.mark.parametrize(("right", "wrong", "words"), CONFIGS, ids=[wrong for _, wrong, _ in CONFIGS])
def test_a_wrong_configuration_file_is_refused(place, tmp_path, refused, right, wrong, words):
    path = place.write_config("wrong.py", CONFIG.replace(right, wrong))
    refused(f"--config={path}", f"--workdir={tmp_path / 'run'}", words=(path, *words))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--config=CONFIG",), ("--workdir is missing",)),
        (("--workdir=WORKDIR",), ("--config is missing",)),
        (("--config=/nothing.py", "--workdir=WORKDIR"), ("'/nothing.py'", "configs/quickstart.py")),
        (("--config=CONFIG", "--workdir=WORKDIR", "--step=3"), ("'step'",)),
        (("--config=CONFIG", "--workdir=WORKDIR", "more"), ("'more'", "--help")),
        (("--config=CONFIG", "--workdir"), ("--workdir",)),
        (("--config=CONFIG", "--workdir=WORKDIR", "--config.model.width"), ("config.model.width",)),
    ],
    ids=lambda value: " ".join(value),
)
def test_wrong_flags_are_refused(place, tmp_path, refused, arguments, words):
    swap = {"CONFIG": str(place.config), "WORKDIR": str(tmp_path / "run")}
    for name, value in swap.items():
        arguments = [argument.replace(name, value) for argument in arguments]
    refused(*arguments, words=words)


def test_a_wrong_input_ends_a_real_process_alike(place, tmp_path):
    """The others are forked from one process; this one is started from scratch."""
    ended = place.start(*place.arguments(tmp_path / "run", "model.widht=3"), "--json").ended()
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == "error: unknown configuration key 'model.widht' (nearest: model.width)\n"
    assert not (tmp_path / "run").exists()


def test_a_file_without_text_is_refused(place, tmp_path, refused):
    empty = tmp_path / "empty.txt"
    empty.write_bytes(b"")
    refused(*place.arguments(tmp_path / "run", f"data.source={empty}"), words=(empty, "empty (0 bytes)"))


def test_a_file_that_is_not_utf8_is_refused_with_the_offset(place, tmp_path, refused):
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"a" * 1000 + b"\xe9" + b"b" * 1000)
    words = (latin, "not UTF-8", "0xe9 at offset 1000")
    refused(*place.arguments(tmp_path / "run", f"data.source={latin}"), words=words)


@pytest.fixture
def finished(place, tmp_path):
    """A copy of a finished run without its summary: a run that can go on."""
    folder, _ = undisturbed(place)
    workdir = tmp_path / "run"
    shutil.copytree(folder, workdir)
    (workdir / "summary.json").unlink()
    return workdir


def test_a_folder_of_another_run_is_refused(place, refused, finished):
    overrides = ("model.width=32", "training.steps=40", "seed=7")
    words = ("model.width: 16 -> 32", "training.steps: 30 -> 40", "seed: 0 -> 7", "another --workdir")
    refused(*place.arguments(finished, *overrides), words=words, workdir=finished)


def test_another_scheme_is_told_in_one_word(place, refused, finished):
    """Without the options of both."""
    words = ("(model.residual: 'siamese_hybrid' -> 'pre')",)
    refused(*place.arguments(finished, "model.residual=pre"), words=words, workdir=finished)


@pytest.mark.parametrize("json_flag", [False, True])
def test_other_data_under_a_run_are_refused(place, tmp_path, refused, json_flag):
    folder, _ = undisturbed(place)
    workdir = tmp_path / "run"
    corpus = write_corpus(tmp_path / "text.txt", seed=1)
    shutil.copytree(folder, workdir)
    (workdir / "summary.json").unlink()
    stored = workdir / "config.json"
    stored.write_text(stored.read_text().replace(str(place.corpus), str(corpus)))
    arguments = place.arguments(workdir, f"data.source={corpus}", *SAMPLE)
    words = ("the training data changed", "checkpoint 30", corpus)
    refused(*arguments, words=words, workdir=workdir, json_flag=json_flag)


def test_weights_of_another_shape_are_refused(place, tmp_path, refused):
    folder, _ = undisturbed(place)
    assert checkpoints_of(folder)
    arguments = place.arguments(tmp_path / "run", "model.width=32", f"training.init_from={folder}")
    refused(*arguments, words=(f"training.init_from {folder}", "checkpoint 30", "float32"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ("config.json cannot be read",)),
        ("[]", ("config.json is a list",)),
        ('{"model": {"breadth": 3}}', ("model.breadth", "nearest: ", "the version that wrote it")),
        ('{"model": {"width": "wide"}}', ("model.width = 'wide'",)),
    ],
)
def test_a_broken_config_of_the_folder_is_refused(place, refused, finished, text, words):
    (finished / "config.json").write_text(text)
    refused(*place.arguments(finished, *SAMPLE), words=words, workdir=finished)


def test_checkpoints_without_a_configuration_are_refused(place, refused, finished):
    (finished / "config.json").unlink()
    words = (finished, "has checkpoints but no config.json")
    refused(*place.arguments(finished, *SAMPLE), words=words, workdir=finished)


def test_a_broken_summary_is_refused(place, refused, finished):
    (finished / "summary.json").write_text("{")
    refused(*place.arguments(finished, *SAMPLE), words=("summary.json cannot be read",), workdir=finished)


def test_a_workdir_that_is_a_file_is_refused(place, tmp_path, refused):
    file = tmp_path / "file"
    file.write_text("here I am")
    refused(*place.arguments(file), words=(f"--workdir {file} is a file",), workdir=file)


def test_a_workdir_below_a_file_is_refused(place, tmp_path, refused):
    file = tmp_path / "file"
    file.write_text("here I am")
    refused(*place.arguments(file / "run"), words=(f"cannot write to --workdir {file / 'run'}",), workdir=file)
