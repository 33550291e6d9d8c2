"""The recipes that come with tplora: list them, copy one together with the rows it names."""

import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tplora.errors import ArtifactError, RecipeError

__all__ = ["ShippedRecipe", "copy_recipe", "list_recipes", "shelf"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """One recipe on the shelf."""

    name: str
    path: Path
    summary: str
    """The first sentence of its header that is not the command."""


def shelf() -> Path:
    """The folder of shipped recipes: ``recipes/`` beside the package, in a clone of tplora."""
    return Path(__file__).resolve().parents[2] / "recipes"


def list_recipes(folder: Path) -> list[ShippedRecipe]:
    """Every recipe in ``folder``, by name."""
    return [
        ShippedRecipe(name=path.stem, path=path, summary=_summary(path))
        for path in sorted(folder.glob("*.toml"))
    ]


def copy_recipe(name: str, *, folder: Path, to: Path) -> list[Path]:
    """Copy a recipe and the files its ``[data]`` names to the folder ``to``; return what was made.

    Raises:
        RecipeError: If there is no such recipe, with those there are.
        ArtifactError: If a file is in the way. Then nothing is copied.
    """
    known = {recipe.name: recipe.path for recipe in list_recipes(folder)}
    if name not in known:
        raise RecipeError([f"recipes copy {name}: no such recipe; {_known(known, folder)}"])
    source = known[name]
    targets = {source: to / source.name}
    for rows in _data_files(source):
        targets[source.parent / rows] = to / rows
    for target in targets.values():
        if target.exists():
            raise ArtifactError(f"{target}: exists already; name another folder or move it away")
    for original, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, target)
    return list(targets.values())


def _known(known: dict[str, Path], folder: Path) -> str:
    if known:
        return f"there are {', '.join(known)}"
    return f"there are none in {folder}: they come with a clone of tplora's repository"


def _data_files(recipe: Path) -> list[Path]:
    data = tomllib.loads(recipe.read_text(encoding="utf-8")).get("data", {})
    named = [Path(data[key]) for key in ("train", "eval") if key in data]
    return [path for path in named if not path.is_absolute() and (recipe.parent / path).is_file()]


def _summary(recipe: Path) -> str:
    header = []
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        header.append(line.lstrip("# "))
    prose = " ".join(line for line in header if line and not line.startswith("tplora "))
    return prose.split(". ")[0].rstrip(".")
