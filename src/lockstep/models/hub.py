"""A model folder from the Hugging Face hub: the one file that downloads.

Only what a checkpoint is made of is fetched: configuration, tokenizer, safetensors. No pickle and no code, whatever else lies
there. All files are of one commit, and the architecture is looked at before the weights. Files arrive in a folder beside the
target, which is renamed when it is complete; a download that was broken off goes on there.

Next: `checkpoint.py`, which reads the folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.errors import CheckpointError, UserError
from lockstep.models.checkpoint import load_config

WANTED = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|vocab)\.json|merges\.txt"
    r"|tokenizer[\w.]*|chat_template\.\w+|model[\w-]*\.safetensors(\.index\.json)?"
)
"""Names of files at the top of a repository."""


def fetch_hub(path: str | Path, *, name: str, revision: str = "main") -> Path:
    """The folder `path` with the model `name` (`Qwen/Qwen3-1.7B`) at a branch, tag or commit, downloaded.

    Gated and private models need `HF_TOKEN` in the environment, or `hf auth login`. Raises CheckpointError for a model that isn't
    there, that has no safetensors, or of an architecture that can't be computed here; UserError when the hub can't be reached.
    """
    import huggingface_hub as hub

    target = Path(path)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError("something else is here already", where=str(target), fix="name another folder")
    with _told(name, revision):
        info = hub.HfApi().model_info(name, revision=revision)
        files = [f.rfilename for f in info.siblings or () if WANTED.fullmatch(f.rfilename)]
        if not any(file.endswith(".safetensors") for file in files):
            fix = "take another model, or convert it"
            raise CheckpointError("has no safetensors", where=name, why="other weights are pickles", fix=fix)
        half = target.with_name(f".{target.name}-{str(info.sha)[:12]}.part")
        hub.snapshot_download(name, revision=info.sha, local_dir=half, allow_patterns=["config.json"])
        load_config(half)
        hub.snapshot_download(name, revision=info.sha, local_dir=half, allow_patterns=files)
    shutil.rmtree(half / ".cache", ignore_errors=True)
    half.rename(target)
    return target


@contextmanager
def _told(name: str, revision: str) -> Iterator[None]:
    """What the hub says, as an error of ours."""
    from huggingface_hub import errors

    try:
        yield
    except UserError:
        raise
    except errors.GatedRepoError as error:
        fix = f"accept its terms at https://huggingface.co/{name}, and set HF_TOKEN"
        raise CheckpointError(
            "is gated", where=name, why="the hub wants to know who you are", fix=fix
        ) from error
    except errors.RepositoryNotFoundError as error:
        fix = "check the spelling; a private model needs HF_TOKEN"
        raise CheckpointError("the hub has no such model", where=name, fix=fix) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the model has no revision {revision!r}", where=name) from error
    except errors.HFValidationError as error:
        raise CheckpointError("is no name of a model", where=name, fix="as in Qwen/Qwen3-1.7B") from error
    except Exception as error:
        # A connection has many ways to fail, and the library lets those of two others through.
        why = f"{type(error).__name__}: {error}"
        fix = "try again, which goes on where this stopped, or bring a folder from `hf download NAME --local-dir DIR`"
        raise UserError("the model could not be downloaded", where=name, why=why, fix=fix) from error
