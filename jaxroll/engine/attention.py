"""What computes attention in an engine's programs."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import Mesh

from jaxroll.engine.packets import Sizes
from jaxroll.kernels import choice
from jaxroll.models.families import ModelSpec
from jaxroll.sharding import backend


def chosen(
    spec: ModelSpec, mesh: Mesh, sizes: Sizes, *, prefill: str = choice.AUTO, paged: str = choice.AUTO
) -> choice.Serving:
    """The implementations for fresh prompts and for decoding; ConfigError when a named one cannot work on `mesh`.

    Prompts are judged by the largest bucket; shorter ones are padded to the kernel's block.
    """
    site = choice.Site(spec, backend.platform(mesh), mesh.shape["tensor"], sizes.buckets[-1])
    return choice.Serving(
        choice.choose("prefill", prefill, site),
        choice.choose(
            "paged", paged, replace(site, tokens=sizes.page_tokens, longest=sizes.max_tokens, limited=sizes.pages > 0)
        ),
    )
