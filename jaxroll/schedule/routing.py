"""Which sampler a conversation of an actor goes to. Pure: counts in, a name out.

Members of a group kept together on one sampler have their prompt computed once; spread out they finish sooner. What
`replicate` says of groups and samplers that lease for themselves (`jaxroll.schedule.sharing`) holds here as well.
"""

from __future__ import annotations

from collections.abc import Mapping


def seat(seated: Mapping[str, int], groups: str, replicate: str) -> str:
    """The sampler for one more conversation, out of those that may serve it, with how many each has now.

    `groups` is where the last member of its group went ('' for the first). `together` goes there, as long as it may
    serve; `spread` to the sampler with fewest; `auto` where the group is, unless another one has nothing to do.
    """
    fewest = min(seated, key=lambda name: seated[name])
    if groups not in seated or replicate == "spread":
        return fewest
    return fewest if replicate == "auto" and not seated[fewest] else groups
