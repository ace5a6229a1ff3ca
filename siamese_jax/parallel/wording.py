"""The words of the roll call: in what the processes do not fit together, and who they are, in one line.

A process is compared by its hello: a dict of its index, number of processes, host and facts.
"""

LONGEST_TEXT = 500  # characters of an error text
LONGEST_VALUE = 12  # characters of a fact in a message
MOST_NAMED = 8  # indices in a message

ADVICE = {
    "configuration": "start all with the same --config and overrides",
    "arguments": "start all with the same arguments",
    "workdir": "start all with the same --workdir",
    "library": "install the same version on every host",
    "jax": "install the same version on every host",
}


def oddity(mine: dict, others: list[dict]) -> str | None:
    """One line on the first thing in which the processes do not fit together, or None."""
    others = sorted(others, key=lambda hello: hello["index"])
    for hello in others:
        if hello["processes"] != mine["processes"]:
            same = [other["index"] for other in others if other["processes"] == hello["processes"]]
            return (
                f"{names(same)} expected {hello['processes']} processes, process 0 expected {mine['processes']}: "
                "start all with the same --processes"
            )
    for first, second in zip([mine, *others], others, strict=False):
        if first["index"] == second["index"]:
            return (
                f"two processes have index {first['index']}, on hosts {one_line(first['host'])} and "
                f"{one_line(second['host'])}: give each its own index, 0 to {mine['processes'] - 1}"
            )
    facts = dict.fromkeys(name for hello in [mine, *others] for name in hello["facts"])
    return next((text for name in facts if (text := _odd_fact(name, mine, others))), None)


def _odd_fact(name: str, mine: dict, others: list[dict]) -> str | None:
    expected = mine["facts"].get(name)
    odd = next((value for hello in others if (value := hello["facts"].get(name)) != expected), expected)
    if odd == expected:
        return None
    same = [hello["index"] for hello in others if hello["facts"].get(name) == odd]
    verb = "has" if len(same) == 1 else "have"
    other = "other" if name in ("arguments", "prompts") else "another"
    advice = ADVICE.get(name, f"start all with the same {one_line(name)}")
    return (
        f"{names(same)} {verb} {other} {one_line(name)} ({_short(odd, expected)}) than process 0 "
        f"({_short(expected, odd)}): {advice}"
    )


def _short(value: str | None, other: str | None) -> str:
    """The first characters of a fact, or those where it parts from the other value."""
    if value is None:
        return "none"
    value, other = one_line(value), one_line(other or "")
    pairs = enumerate(zip(value, other, strict=False))
    start = next((at for at, (mine, its) in pairs if mine != its), min(len(value), len(other)))
    start = 0 if start < LONGEST_VALUE else start - LONGEST_VALUE // 2
    cut = value[start : start + LONGEST_VALUE]
    return f"{'...' if start else ''}{cut}{'...' if start + LONGEST_VALUE < len(value) else ''}"


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:LONGEST_TEXT]


def listed(indices: list[int]) -> str:
    more = len(indices) - MOST_NAMED
    return ", ".join(map(str, indices[:MOST_NAMED])) + (f" and {more} more" if more > 0 else "")


def names(indices: list[int]) -> str:
    """The processes with these indices, in words."""
    if len(indices) == 1:
        return f"process {indices[0]}"
    if len(indices) > MOST_NAMED:
        return f"processes {listed(indices)}"
    return f"processes {listed(indices[:-1])} and {indices[-1]}"
