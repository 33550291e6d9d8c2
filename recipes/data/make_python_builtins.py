"""Chat rows about Python's own functions, read from the interpreter that runs this script.

    python recipes/data/make_python_builtins.py [FOLDER]

Every answer is a fact of the running interpreter: a signature, a docstring's first sentence, a
module, a line of base classes. The same interpreter gives the same two files, byte for byte. No
subject of the eval rows occurs in the train rows, and both hold the same kinds of question.
"""

import builtins
import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Modules that are the same on every platform and speak of plain values.
MODULES = (
    "bisect", "calendar", "colorsys", "copy", "difflib", "fnmatch", "functools", "heapq", "html",
    "inspect", "itertools", "json", "keyword", "math", "operator", "random", "shlex", "shutil",
    "statistics", "string", "tempfile", "textwrap", "tokenize", "traceback", "unicodedata",
    "urllib.parse", "uuid", "zlib",
)  # fmt: skip
TYPES = (str, bytes, list, dict, set, tuple, int, float)
MAX_WORDS = 40
EVERY_EVAL = 12  # one subject in twelve is kept for evaluation

Row = tuple[str, str]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    train, evaluation = make_rows()
    write_rows(folder / "python-builtins-train.jsonl", train)
    write_rows(folder / "python-builtins-eval.jsonl", evaluation)
    print(f"{len(train)} train and {len(evaluation)} eval rows in {folder}")


def make_rows() -> tuple[list[Row], list[Row]]:
    """Question and answer pairs, split by subject; each kind of subject is split alike."""
    train: list[Row] = []
    evaluation: list[Row] = []
    for subjects in (functions(), methods(), exceptions()):
        rows = dict(subjects)
        for index, name in enumerate(sorted(rows)):
            (evaluation if index % EVERY_EVAL == EVERY_EVAL - 1 else train).extend(rows[name])
    order = random.Random(0)
    order.shuffle(train)
    order.shuffle(evaluation)
    return train, evaluation


def functions() -> Iterator[tuple[str, list[Row]]]:
    """The built-in functions, and the public functions of the modules."""
    for module in (builtins, *map(importlib.import_module, MODULES)):
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name)
            is_own = getattr(value, "__module__", None) in (module.__name__, f"_{module.__name__}")
            if inspect.isroutine(value) and is_own and name.isidentifier() and name[0] != "_":
                prefix = "" if module is builtins else f"{module.__name__}."
                home = (
                    "one of Python's built-in functions"
                    if module is builtins
                    else f"a function of the `{module.__name__}` module"
                )
                yield f"{prefix}{name}", ask_about(f"{prefix}{name}", value, home)


def methods() -> Iterator[tuple[str, list[Row]]]:
    """The public methods of the built-in types."""
    for kind in TYPES:
        for name in dir(kind):
            if name[0] != "_" and callable(getattr(kind, name)):
                full = f"{kind.__name__}.{name}"
                home = f"a method of the built-in type `{kind.__name__}`"
                yield full, ask_about(full, getattr(kind, name), home)


def exceptions() -> Iterator[tuple[str, list[Row]]]:
    """The built-in exceptions, with the classes that catch them too."""
    for name, value in vars(builtins).items():
        is_exception = isinstance(value, type) and issubclass(value, BaseException)
        if not is_exception or name != value.__name__ or name == "BaseException":
            continue  # an alias, such as IOError, or the root
        ancestors = [cls.__name__ for cls in value.__mro__[1:-1]]
        chain = ", then ".join(f"`{one}`" for one in ancestors)
        answer = f"`{name}` is a built-in exception. Its base classes are, nearest first: {chain}."
        rows = [(f"What does the Python exception `{name}` inherit from?", answer)]
        yield name, [row for row in rows if len(row[1].split()) <= MAX_WORDS]


def ask_about(name: str, value: Callable[..., object], home: str) -> list[Row]:
    rows = []
    sentence = first_sentence(value)
    if sentence:
        rows.append((f"What does `{name}` do in Python?", f"`{name}` is {home}. {sentence}"))
    call = call_of(name, value)
    if call:
        rows.append((f"How do I call `{name}` in Python?", call))
    return rows


def first_sentence(value: object) -> str | None:
    """The docstring's first sentence, if it reads as one."""
    paragraph = (inspect.getdoc(value) or "").split("\n\n")[0]
    text = re.sub(r"`+", "`", " ".join(paragraph.split()))
    sentence = re.split(r"(?<=[a-z0-9)`'\"])[.:](?:\s|$)", text)[0].rstrip(". ")
    is_plain = sentence.isascii() and not re.search(r"[<>|*=@]|->|\.\.\.|e\.g$|i\.e$", sentence)
    has_words = 4 <= len(sentence.split()) <= MAX_WORDS - 12
    is_balanced = all(sentence.count(a) == sentence.count(b) for a, b in ("()", "[]", "{}"))
    if not (is_plain and has_words and is_balanced) or sentence.count("`") % 2:
        return None
    return f"{sentence}." if sentence[0].isupper() else None


def call_of(name: str, value: Callable[..., object]) -> str | None:
    """How it is called, and which arguments it cannot do without."""
    try:
        parameters = list(inspect.signature(value).parameters.values())
    except (TypeError, ValueError):
        return None  # some C functions do not tell
    parameters = [one for one in parameters if one.name != "self"]
    shown = str(inspect.Signature(parameters))
    needed = [
        f"`{one.name}`"
        for one in parameters
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if not parameters or "<" in shown or len(shown) > 100 or not shown.isascii():
        return None
    if not needed:
        return f"Call it as `{name}{shown}`. No argument is required."
    verb = "is" if len(needed) == 1 else "are"
    listed = " and ".join([", ".join(needed[:-1]), needed[-1]]) if len(needed) > 1 else needed[0]
    return f"Call it as `{name}{shown}`. Only {listed} {verb} required."


def write_rows(path: Path, rows: list[Row]) -> None:
    lines = []
    for question, answer in rows:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
        lines.append(json.dumps({"messages": messages}) + "\n")
    aside = path.with_name(f"{path.name}.part")
    aside.write_text("".join(lines), encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    main()
