"""python -m tests.benchmarks.steps [STOCK_VENV]: tables on stdout, records beside this file."""

import json
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.steps.measure import Work, compare, summary
from tests.rehearsal.models import write_model
from tplora.base.source import resolve_model
from tplora.recipe.check import read_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2-135m-lora.toml"
NAMES = ["tplora", "stock", "plain", "dtensor"]


def main(stock: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        # stock cuts a vocabulary into equal pieces only
        tiny = write_model("llama", Path(folder) / "tiny-llama", vocab_size=1024)
        recipe = read_recipe(RECIPE, [])
        smollm2 = resolve_model(recipe.model, recipe_folder=RECIPE.parent).path
        works = [
            (Work(tiny, 2, length=256), NAMES, 15),
            (Work(tiny, 4, length=256), NAMES, 15),
            (Work(smollm2, 3, length=128), NAMES, 7),
            (Work(tiny, 1, length=256), ["tplora", "plain"], 31),
            (Work(smollm2, 1, length=128), ["tplora", "plain"], 15),
        ]
        with (Path(__file__).parent / "records.jsonl").open("w") as file:
            for work, names, num_repeats in works:
                records = compare(work, names, stock=stock, num_repeats=num_repeats)
                file.writelines(json.dumps(record) + "\n" for record in records)
                file.flush()
                print(f"\n{Path(work.path).name}, tp {work.tp_size}, 1 x {work.length} tokens")  # noqa: T201
                for name, row in summary(records, "tplora").items():
                    print(f"  {name:8}", {key: round(n, 3) for key, n in row.items()}, flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else Path(tempfile.gettempdir(), "tplora-stock-venv"))
