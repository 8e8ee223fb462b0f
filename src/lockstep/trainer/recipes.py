"""The folder of a run's model, made or downloaded by a recipe when it isn't there.

Next: `setup.py`, which loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, ConfigError
from lockstep.models.checkpoint import load_config
from lockstep.models.gguf import fetch_smollm2
from lockstep.models.hub import fetch_hub
from lockstep.models.random_weights import make_random, random_spec
from lockstep.models.spec import ModelSpec
from lockstep.models.tiny import make_tiny, tiny_spec
from lockstep.trainer.spec import ModelSource

RECIPES: dict[str, tuple[Callable[..., object], Callable[..., ModelSpec]]] = {
    "tiny": (make_tiny, tiny_spec),
    "random": (make_random, random_spec),
}
"""What makes a model from `model.args`, and what tells its shape."""
DOWNLOADS: dict[str, Callable[..., Path]] = {"smollm2": fetch_smollm2, "hub": fetch_hub}
"""What brings a model from elsewhere. What is there already isn't looked at."""


def prepare_model(source: ModelSource) -> Path:
    """The model's folder, made by its recipe when it isn't there."""
    path = Path(source.path)
    made = (path / "config.json").is_file()
    if source.recipe in RECIPES:
        make, _ = RECIPES[source.recipe]
        with _args_told(source):
            if made:
                check_recipe(source)
            else:
                make(path, **source.args)
        return path
    if made:
        return path
    if source.recipe in DOWNLOADS:
        with _args_told(source):
            return DOWNLOADS[source.recipe](path, **source.args)
    raise CheckpointError(
        "there is no model here",
        where=str(path),
        why="a folder with config.json, *.safetensors and tokenizer files is needed",
        fix="give model.path such a folder, or a model.recipe that makes one",
    )


@contextmanager
def _args_told(source: ModelSource) -> Iterator[None]:
    """Arguments that a recipe doesn't take, or lacks, as an error of ours."""
    try:
        yield
    except TypeError as error:
        fix = f"see what recipe {source.recipe} takes in docs/configuration.md"
        raise ConfigError(str(error), where="model.args", fix=fix) from error


def check_recipe(source: ModelSource) -> None:
    """Refuses a folder that holds another shape than the recipe's arguments ask for: they would have no effect."""
    if load_config(source.path) != recipe_shape(source):
        raise CheckpointError(
            "the model that is here has another shape than model.args ask for",
            where=source.path,
            why="a recipe makes a model only where there is none",
            fix="give another model.path, or remove the folder",
        )


def recipe_shape(source: ModelSource) -> ModelSpec:
    """The shape that a recipe's arguments describe. Raises TypeError for arguments that it doesn't have."""
    shape: dict[str, Any] = {k: v for k, v in source.args.items() if k != "seed"}
    return RECIPES[source.recipe][1](**shape)
