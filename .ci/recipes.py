"""Write the table of docs/recipes.md: memory and time of the configs of released models, as estimates by formula.

python .ci/recipes.py          # write the page
python .ci/recipes.py --check  # fail if the page is out of date
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from jaxroll import config as configs  # noqa: E402
from jaxroll.config import Config  # noqa: E402
from jaxroll.config.derived import episode_tokens, page_size  # noqa: E402
from jaxroll.models import families  # noqa: E402
from jaxroll.models.families import ModelSpec  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"
FLOPS_SHARE, BANDWIDTH_SHARE = 0.4, 0.6  # assumed: of the peak, in training and in decoding
BEGIN, END = "<!-- begin: .ci/recipes.py -->", "<!-- end -->"
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Chip:
    """Peak rates of a device, as its vendor states them."""

    name: str
    bf16_flops: float
    bytes_per_s: float
    memory_gb: float


CHIPS = (Chip("v5p", 459e12, 2.765e12, 95), Chip("H100", 989e12, 3.35e12, 80))


def spec_of(config: Config) -> ModelSpec:
    """The model of the config by its size; its folder need not be here."""
    return families.spec(config.model.size, compute_dtype=config.model.dtype)


def learner_gb(config: Config) -> float:
    """GB of a learner device: float32 parameters, gradients and two moments; inputs of all layers; logits."""
    spec, learner = spec_of(config), config.learner
    state = 16 * families.parameter_count(spec) / (learner.mesh.devices / learner.mesh.data)
    tokens = math.ceil(learner.micro_batch_rows / learner.mesh.shards) * learner.row_tokens / learner.mesh.sequence
    layers = tokens * spec.width * (spec.layers + 1) * _BYTES[spec.compute_dtype]
    logits = min(learner.logits_mb * 2**20, 4 * tokens * spec.vocab_size / learner.mesh.tensor)
    return (state + layers + logits) / 1e9


def sampler_bytes(config: Config) -> tuple[float, float]:
    """Bytes of a sampler device: its part of the parameters in the model's dtype, and the KV cache of its slots."""
    spec, sampler = spec_of(config), config.sampler
    size, mesh = _BYTES[spec.compute_dtype], sampler.mesh
    experts = 3 * spec.layers * spec.width * spec.hidden * spec.experts
    parameters = (families.parameter_count(spec) - experts) / mesh.tensor + experts / (mesh.tensor * mesh.expert)
    longest = max(episode_tokens(config), sampler.prefill_buckets[-1])
    page = page_size(sampler.page_tokens, longest)
    tokens = sampler.slots / mesh.shards * math.ceil(longest / page) * page
    heads = max(1, spec.kv_heads / mesh.tensor)
    return size * parameters, 2 * size * spec.layers * heads * spec.head_dim * tokens


def learner_s(config: Config, chip: Chip) -> float:
    """Seconds of a step: 8 floating-point operations per active parameter and token, with recomputed layers."""
    schedule = config.schedule
    tokens = schedule.groups_per_step * schedule.group_size * episode_tokens(config)
    flops = 8 * families.active_parameter_count(spec_of(config)) * tokens
    return flops / (config.learner.mesh.devices * chip.bf16_flops * FLOPS_SHARE)


def sampler_s(config: Config, chip: Chip) -> float:
    """Seconds to sample the answers of a step: every token reads the parameters and half of a full KV cache."""
    schedule, sampler = config.schedule, config.sampler
    waves = schedule.groups_per_step * schedule.group_size / (sampler.slots * sampler.count)
    parameters, cache = sampler_bytes(config)
    reads = config.sampling.max_tokens * (parameters + cache / 2)
    return math.ceil(waves) * reads / (chip.bytes_per_s * BANDWIDTH_SHARE)


def recipes() -> dict[str, Config]:
    """The configs with a released model, by file name, smaller models first."""
    found = {path.name: configs.load(path) for path in sorted((ROOT / "configs").glob("*.py"))}
    named = {name: config for name, config in found.items() if config.model.path}
    return dict(sorted(named.items(), key=lambda one: families.parameter_count(spec_of(one[1]))))


def _row(name: str, config: Config) -> str:
    parameters, cache = sampler_bytes(config)
    task = Path(config.task.path).stem if config.task.path else config.task.name
    times = [f"{learner_s(config, chip):.2g} / {sampler_s(config, chip):.2g}" for chip in CHIPS]
    cells = (
        task,
        f"`{name}`",
        f"{families.parameter_count(spec_of(config)) / 1e9:.2f}",
        f"{config.learner.mesh.devices} + {config.sampler.count * config.sampler.mesh.devices}",
        f"{learner_gb(config):.1f}",
        f"{(parameters + cache) / 1e9:.1f}",
        *times,
    )
    return f"| {' | '.join(cells)} |"


def block() -> str:
    """The generated part of the page."""
    chips = "; ".join(
        f"{chip.name}: {chip.bf16_flops / 1e12:.0f} TFLOP/s in bfloat16, {chip.bytes_per_s / 1e9:,.0f} GB/s, "
        f"{chip.memory_gb:.0f} GB"
        for chip in CHIPS
    )
    columns = (
        "task",
        "config",
        "parameters, 10⁹",
        "devices, learner + sampler",
        "GB per learner device",
        "GB per sampler device",
        *(f"s per step, {chip.name}: learner / sampler" for chip in CHIPS),
    )
    rows = [_row(name, config) for name, config in recipes().items()]
    head = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    note = (
        f"Vendors' figures per device: {chips}.\n"
        f"Assumed: {FLOPS_SHARE} of the peak in training, {BANDWIDTH_SHARE} of the bandwidth in decoding."
    )
    return "\n".join([*head, *rows, "", note])


def page() -> str:
    """The page with its generated part as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{block()}\n{END}{after}"


def main() -> int:
    """0, or 1 if the page is out of date."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != page():
        print(f"{PAGE} is out of date: run python .ci/recipes.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
