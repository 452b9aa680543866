"""The choice of the attention implementation, its reason, and refusals."""

import dataclasses

import pytest

from jaxroll.errors import ConfigError
from jaxroll.kernels.choice import DENSE_TOKENS, Choice, Site, check, choose
from jaxroll.models import families

QWEN = families.spec("qwen3_0p6b", compute_dtype="bfloat16")
TINY = families.spec("tiny", compute_dtype="bfloat16")
WINDOWS = dataclasses.replace(QWEN, windows=(256, 0) * 14)


def site(spec=QWEN, *, platform="tpu", tensor=1, tokens=512) -> Site:
    return Site(spec, platform, tensor, tokens)


def model(**change) -> families.ModelSpec:
    return dataclasses.replace(QWEN, **change)


@pytest.mark.parametrize(
    ("use", "platform", "tokens", "name"),
    [
        ("packed", "tpu", 512, "splash"), ("prefill", "tpu", 512, "splash"), ("paged", "tpu", 64, "pallas"),
        ("packed", "gpu", 512, "triton"), ("prefill", "gpu", 512, "cudnn"), ("paged", "gpu", 64, "pallas"),
        ("packed", "cpu", 512, "xla"), ("prefill", "cpu", 512, "xla"), ("paged", "cpu", 64, "dense"),
    ],
)  # fmt: skip
def test_auto_takes_the_kernel_of_the_platform(use, platform, tokens, name):
    assert choose(use, "auto", site(platform=platform, tokens=tokens)).name == name
    assert choose(use, "xla", site(platform=platform, tokens=tokens)) == Choice("xla", "as configured")


# use, what is wrong with the site, the kernel that a config may name, and words of the reason
MISFITS = [
    ("packed", site(TINY), "splash", "128 lanes and a head 32"),
    ("paged", site(TINY, tokens=64), "pallas", "128 lanes and a head 32"),
    ("packed", site(model(compute_dtype="float32")), "splash", "model.dtype is float32"),
    ("prefill", site(platform="gpu", spec=model(compute_dtype="float32")), "cudnn", "model.dtype is float32"),
    ("packed", site(tensor=16), "splash", "cannot be divided evenly over 16 devices"),
    ("paged", site(tensor=3, tokens=64), "pallas", "cannot be divided evenly over 3 devices"),
    ("prefill", site(tokens=16), "splash", "rows have 16 tokens"),
    ("prefill", site(platform="gpu", tokens=16), "cudnn", "rows have 16 tokens"),
    ("packed", site(model(head_dim=96), platform="gpu"), "triton", "heads have 96"),
    ("prefill", site(model(head_dim=192), platform="gpu"), "cudnn", "heads have 192"),
    ("paged", site(tokens=20), "pallas", "pages have 20"),
    ("paged", site(platform="gpu", tokens=8), "pallas", "powers of two from 16"),
    ("paged", site(platform="gpu", tokens=48), "pallas", "powers of two from 16"),
    ("packed", site(WINDOWS, platform="gpu"), "triton", "window of 256 tokens cuts rows of 512"),
    ("prefill", site(WINDOWS, platform="gpu"), "cudnn", "window of 256 tokens cuts rows of 512"),
    ("paged", site(model(kv_dtype="int8"), tokens=64), "pallas", "does not read quantized pages"),
    ("paged", site(WINDOWS, tokens=64), "pallas", "window of 256 tokens cuts rows of unknown length"),
]


@pytest.mark.parametrize(("use", "where", "named", "words"), MISFITS)
def test_unsupported_shapes_are_refused_by_name_and_skipped_with_a_reason_by_auto(use, where, named, words):
    with pytest.raises(ConfigError, match=words) as refusal:
        choose(use, named, where)
    assert refusal.value.value == named
    passed = choose(use, "auto", where)
    assert passed.name == "xla"
    assert words in passed.reason and named in passed.reason


@pytest.mark.parametrize(
    ("use", "named", "platform"),
    [("packed", "splash", "cpu"), ("packed", "triton", "tpu"), ("prefill", "cudnn", "tpu"), ("paged", "pallas", "cpu")],
)
def test_a_kernel_of_another_platform_is_refused(use, named, platform):
    with pytest.raises(ConfigError, match=f"this is {platform}"):
        choose(use, named, site(platform=platform))


@pytest.mark.parametrize(
    ("use", "tokens", "longest", "name"),
    [
        ("packed", 256, 0, "triton"),
        ("prefill", 256, 0, "cudnn"),
        ("paged", 64, 256, "pallas"),
        ("paged", 64, 257, "xla"),
    ],
)
def test_a_window_that_cuts_no_row_leaves_the_choice_as_it_is(use, tokens, longest, name):
    where = dataclasses.replace(site(WINDOWS, platform="gpu", tokens=tokens), longest=longest)
    assert choose(use, "auto", where).name == name
    assert choose("packed", "auto", site(WINDOWS)).name == "splash", "it has windows"


def test_on_an_unknown_platform_only_choices_that_work_nowhere_are_refused():
    check("packed", "splash", site(platform=""))
    check("packed", "auto", site(TINY, platform=""))
    with pytest.raises(ConfigError, match=r"learner\.attention"):
        check("packed", "splash", site(model(compute_dtype="float32"), platform=""))


def test_the_contiguous_cache_needs_room_for_the_longest_request_in_every_slot():
    where = dataclasses.replace(site(platform="cpu", tokens=16), limited=True)
    with pytest.raises(ConfigError, match=r"but sampler\.cache_pages or memory_fraction limit"):
        choose("paged", "dense", where)
    passed = choose("paged", "auto", where)
    assert passed.name == "xla" and "but sampler.cache_pages or memory_fraction limit" in passed.reason


@pytest.mark.parametrize(("longest", "name"), [(DENSE_TOKENS, "dense"), (DENSE_TOKENS + 1, "xla")])
def test_auto_reads_long_requests_page_by_page(longest, name):
    where = dataclasses.replace(site(platform="cpu", tokens=16), longest=longest)
    assert choose("paged", "auto", where).name == name
    assert choose("paged", "dense", where).name == "dense"
