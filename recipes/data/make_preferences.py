"""Pairs of answers about Python's own functions, made from the chat rows beside this script.

    python recipes/data/make_preferences.py [FOLDER]

The better answer of a pair is the row's own. The other is the answer of a row that asks the same
about another subject, with this subject's name put in its place: right in form, wrong in fact. The
same rows give the same two files, byte for byte.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAME = "python-builtins"


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE
    for kind, most in (("train", 240), ("eval", 48)):
        pairs = make_pairs(read_rows(HERE / f"{NAME}-{kind}.jsonl"))[:most]
        write_pairs(folder / f"{NAME}-preferences-{kind}.jsonl", pairs)
        print(f"{len(pairs)} {kind} pairs in {folder}")


def read_rows(path: Path) -> list[tuple[str, str]]:
    """Question and answer of each row."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chats = [json.loads(line)["messages"] for line in lines]
    return [(question["content"], answer["content"]) for question, answer in chats]


def make_pairs(rows: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Question, better and other answer; a row whose other answer would be the same has none."""
    by_kind: dict[str, list[tuple[str, str]]] = {}
    for question, answer in rows:
        by_kind.setdefault(kind_of(question), []).append((question, answer))
    pairs = []
    for question, answer in rows:
        alike = by_kind[kind_of(question)]
        of_next, answer_of_next = alike[(alike.index((question, answer)) + 1) % len(alike)]
        other = answer_of_next.replace(f"`{subject_of(of_next)}", f"`{subject_of(question)}")
        if other != answer:
            pairs.append((question, answer, other))
    return pairs


def subject_of(question: str) -> str:
    return question.split("`")[1]


def kind_of(question: str) -> str:
    return question.replace(f"`{subject_of(question)}`", "it")


def write_pairs(path: Path, pairs: list[tuple[str, str, str]]) -> None:
    lines = [
        json.dumps(
            {
                "prompt": [{"role": "user", "content": question}],
                "chosen": [{"role": "assistant", "content": better}],
                "rejected": [{"role": "assistant", "content": other}],
            }
        )
        for question, better, other in pairs
    ]
    aside = path.with_name(f"{path.name}.part")
    aside.write_text("\n".join(lines) + "\n", encoding="utf-8")
    aside.replace(path)


if __name__ == "__main__":
    main()
