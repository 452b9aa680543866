"""Reader of compiled HLO text: FLOPs, bytes of main memory and bytes of collectives, with loops counted by their trips.

XLA's own cost analysis counts the body of a loop once. Here every computation is weighted by the product of the trip
counts of the loops around it. libtpu's text has no `known_trip_count`, so the count is the constant with which the
condition compares its counter; a loop without one (its length is known only at run time) gets the caller's number.

Counted are
- FLOPs of `convolution` and `dot`, two per multiplication, and those of fused attention kernels (see `_kernel_flops`);
- bytes that operations outside of fusions read from or write to main memory. Arrays in other memory, such as S(1),
  vector memory, are free; a slice counts its result, and an update in place the part that it writes;
- bytes that a device sends in collectives, as in ring algorithms (`_WIRE`).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(BYTES)})\[([\d,]*)\](?:\{{([^}}]*)\}})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(r"(?:to_apply|calls|called_computations)=\{?%?([\w.\-]+)")
_FREE = frozenset(
    {
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "iota",
        "while",
        "conditional",
        "call",
        "opt-barrier",
        "add-dependency",
    }
)
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # the operand that is written into the first one
_KERNEL = 'custom_call_target="tpu_custom_call"'

# Bytes that a device sends, by the bytes of its operand and the number n of devices that take part.
_WIRE: Mapping[str, Callable[[float, int], float]] = {
    "all-gather": lambda size, n: size * (n - 1),
    "all-reduce": lambda size, n: 2 * size * (n - 1) / n,
    "reduce-scatter": lambda size, n: size * (n - 1) / n,
    "all-to-all": lambda size, n: size * (n - 1) / n,
    "ragged-all-to-all": lambda size, n: size * (n - 1) / n,
    "collective-permute": lambda size, n: size,
    "collective-broadcast": lambda size, n: size,
}


@dataclass(frozen=True)
class HloOperation:
    """One line of HLO: `shape` is its result in the compiler's notation, `rest` what follows the operands."""

    name: str
    shape: str
    kind: str
    operands: tuple[str, ...]
    rest: str


@dataclass(frozen=True)
class Collective:
    """A collective: the bytes that a device sends in all trips, the trips, kind, result, and the operation in JAX."""

    sent_bytes: float
    trips: float
    kind: str
    shape: str
    source: str


@dataclass
class Statistics:
    """The work of one device in one call. `unknown_loops` counts loops whose length is known only at run time."""

    flops: float = 0.0
    memory_bytes: float = 0.0
    kernels: int = 0
    unknown_loops: int = 0
    transfers: list[Collective] = field(default_factory=list)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a device sends in collectives."""
        return sum(one.sent_bytes for one in self.transfers)

    def by_kind(self) -> dict[str, float]:
        """The bytes sent by kind of collective."""
        found: dict[str, float] = {}
        for one in self.transfers:
            found[one.kind] = found.get(one.kind, 0.0) + one.sent_bytes
        return found


def statistics(text: str, *, unknown_trips: float = 1.0, context_tokens: float = 0.0) -> Statistics:
    """The work of the compiled program `text` for one device and one call.

    A loop whose length is known only at run time has `unknown_trips`. A decoding kernel reads `context_tokens` tokens
    of each sequence, not its whole operand, which is the pool of all pages.
    """
    computations, entry = parsed(text)
    return _Reading(computations, unknown_trips, context_tokens).read(entry)


def parsed(text: str) -> tuple[dict[str, dict[str, HloOperation]], str]:
    """The operations by computation and name, and the name of the entry computation."""
    computations: dict[str, dict[str, HloOperation]] = {}
    current, entry = "", ""
    for line in text.splitlines():
        if not line.startswith(" "):
            if head := _HEAD.match(line):
                current = head[2]
                computations[current] = {}
                entry = current if head[1] else entry
        elif current and (match := _LINE.match(line)):
            computations[current][match[1]] = _operation(match[1], match[2])
    return computations, entry


def _operation(name: str, text: str) -> HloOperation:
    shape, text = _split(text) if text.startswith("(") else text.partition(" ")[::2]
    kind, _, tail = text.strip().partition("(")
    inner, rest = _split(f"({tail}")
    inner = inner[1:-1]
    return HloOperation(
        name, shape, kind, (inner,) if kind in ("parameter", "constant") else tuple(_NAME.findall(inner)), rest
    )


def _split(text: str) -> tuple[str, str]:
    """The balanced parentheses at the start of `text`, and what follows them."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return text[: match.end()], text[match.end() :]
    return text, ""


def size_bytes(shape: str, *, everywhere: bool = False) -> float:
    """The bytes of an array or tuple in main memory; with `everywhere`, those in other memory too."""
    return sum(
        BYTES[dtype] * math.prod(_dims(dims))
        for dtype, dims, layout in _ARRAY.findall(shape)
        if everywhere or "S(" not in layout
    )


def _dims(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size]


def _shape_of(text: str) -> list[int]:
    """The sizes of the first array in `text`."""
    match = _ARRAY.search(text)
    return _dims(match[2]) if match else []


class _Reading:
    def __init__(
        self, computations: Mapping[str, Mapping[str, HloOperation]], unknown_trips: float, context_tokens: float
    ) -> None:
        self._computations, self._unknown, self._context = computations, unknown_trips, context_tokens
        self._found = Statistics()

    def read(self, entry: str) -> Statistics:
        self._walk(entry, 1.0, fused=False)
        self._found.transfers.sort(key=lambda one: -one.sent_bytes)
        return self._found

    def _walk(self, name: str, trips: float, *, fused: bool) -> None:
        operations = self._computations.get(name, {})
        for one in operations.values():
            self._count(one, name, operations, trips, fused=fused)
            if one.kind == "while":
                self._walk(_called(one, "body"), trips * self._trips(one), fused=fused)
            elif one.kind == "conditional":  # the branch that costs most
                branches = _branches(one)
                if branches:
                    self._walk(max(branches, key=self._weight), trips, fused=fused)
            elif not _combines(one):
                for called in _CALLED.findall(one.rest):
                    self._walk(called, trips, fused=fused or one.kind == "fusion")

    def _weight(self, name: str) -> float:
        alone = _Reading(self._computations, self._unknown, self._context)
        alone._walk(name, 1.0, fused=False)
        return alone._found.memory_bytes + alone._found.flops

    def _trips(self, loop: HloOperation) -> float:
        if known := re.search(r'known_trip_count":\{"n":"(\d+)"', loop.rest):
            return int(known[1])
        found = trips(
            self._computations.get(_called(loop, "condition"), {}), self._computations.get(_called(loop, "body"), {})
        )
        if found is None:
            self._found.unknown_loops += 1
            return self._unknown
        return found

    def _count(
        self, one: HloOperation, inside: str, around: Mapping[str, HloOperation], trips: float, *, fused: bool
    ) -> None:
        found = self._found
        shapes = [around[name].shape if name in around else "" for name in one.operands]
        kernel = one.kind == "custom-call" and _KERNEL in one.rest
        if kernel:
            found.kernels += 1
        if one.kind in ("convolution", "dot"):
            found.flops += trips * (_convolution_flops if one.kind == "convolution" else _dot_flops)(one, shapes)
        elif kernel:
            found.flops += trips * _kernel_flops(one, shapes, self._context)
        kind = one.kind.removesuffix("-start")
        if kind in _WIRE and not one.kind.endswith("-done") and not (fused and _continues(inside, around)):
            devices = _group_size(one.rest)
            operand = sum(size_bytes(shape, everywhere=True) for shape in shapes)
            source = re.search(r'op_name="([^"]*)"', one.rest)
            sent = trips * _WIRE[kind](operand, devices)
            found.transfers.append(Collective(sent, trips, kind, one.shape[:80], source[1] if source else ""))
        if not fused:
            found.memory_bytes += trips * self._moved_bytes(one, shapes, kernel)

    def _moved_bytes(self, one: HloOperation, shapes: Sequence[str], kernel: bool) -> float:
        """The bytes of main memory that an operation reads and writes."""
        if one.kind in _FREE or one.kind.endswith("-done"):
            return 0.0
        if one.kind in _SLICES:
            return 2 * size_bytes(one.shape)
        if one.kind in _UPDATES and len(shapes) > _UPDATES[one.kind]:
            return 2 * size_bytes(shapes[_UPDATES[one.kind]])
        if one.kind == "fusion":
            return self._fused_bytes(_called(one, "calls"), one.shape, shapes)
        if one.kind == "custom-call" and not kernel:
            return 0.0  # buffers, bit casts and hints
        if kernel and "paged" in one.name:
            return _paged_bytes(shapes, self._context) + size_bytes(one.shape)
        if one.kind.endswith("-start"):
            return _started_bytes(one, shapes)
        return sum(map(size_bytes, shapes)) + size_bytes(one.shape)

    def _fused_bytes(self, name: str, shape: str, shapes: Sequence[str]) -> float:
        inside = self._computations.get(name, {})
        if not inside:
            return sum(map(size_bytes, shapes)) + size_bytes(shape)
        users = _users(inside)
        total = self._written_bytes(list(inside.values())[-1], shape, inside)
        for one in inside.values():
            if one.kind == "parameter" and int(one.operands[0]) < len(shapes):
                total += min(size_bytes(shapes[int(one.operands[0])]), self._read_bytes(one.name, users))
        return total

    def _written_bytes(self, root: HloOperation, shape: str, inside: Mapping[str, HloOperation]) -> float:
        """The bytes that a fusion writes to main memory: of an array that it updates in place, only the update."""
        if root.kind == "tuple":
            parts = _elements(shape)
            return sum(
                self._written_bytes(inside[name], part, inside)
                for name, part in zip(root.operands, parts, strict=False)
                if name in inside
            )
        if root.kind == "bitcast" and root.operands[0] in inside:
            return self._written_bytes(inside[root.operands[0]], shape, inside)
        if root.kind == "parameter" or root.kind in _WIRE or root.kind == "get-tuple-element":
            return 0.0
        if root.kind in _UPDATES and len(root.operands) > _UPDATES[root.kind]:
            update = inside.get(root.operands[_UPDATES[root.kind]])
            return min(size_bytes(shape), 2 * size_bytes(update.shape, everywhere=True) if update else math.inf)
        if root.kind == "fusion" and (nested := self._computations.get(_called(root, "calls"))):
            return self._written_bytes(list(nested.values())[-1], shape, nested)
        return size_bytes(shape)

    def _read_bytes(self, name: str, users: Mapping[str, Sequence[HloOperation]]) -> float:
        """The bytes that a fusion reads of a parameter: only slices of it, nothing of what it updates in place.

        Infinite if it reads the whole.
        """
        total = 0.0
        for user in users.get(name, ()):
            if user.kind == "bitcast":
                total += self._read_bytes(user.name, users)
            elif user.kind in _SLICES and user.operands[0] == name:
                total += size_bytes(user.shape, everywhere=True)
            elif user.kind == "fusion" and (nested := self._computations.get(_called(user, "calls"))):
                inner = {one.operands[0]: one.name for one in nested.values() if one.kind == "parameter"}
                deeper = _users(nested)
                places = [str(at) for at, operand in enumerate(user.operands) if operand == name]
                total += sum(self._read_bytes(inner[at], deeper) for at in places if at in inner)
            elif not (user.kind in _UPDATES and user.operands[0] == name) and user.kind not in (*_WIRE, "tuple"):
                return math.inf
        return total


def _users(inside: Mapping[str, HloOperation]) -> dict[str, list[HloOperation]]:
    """The operations that read each value of a computation."""
    users: dict[str, list[HloOperation]] = {}
    for one in inside.values():
        for operand in dict.fromkeys(one.operands):
            users.setdefault(operand, []).append(one)
    return users


def _elements(shape: str) -> list[str]:
    """The arrays of a tuple's shape; of nested tuples, too."""
    return [match[0] for match in _ARRAY.finditer(shape)]


def trips(condition: Mapping[str, HloOperation], body: Mapping[str, HloOperation]) -> int | None:
    """The trips of a loop whose counter starts at 0: the constant of its condition by the step of its body.

    None if the condition compares with no constant. libtpu unrolls loops over shards, whose counter then grows by 2.
    """
    for one in condition.values():
        direction = re.search(r"direction=(LT|LE|GT|GE|NE)", one.rest) if one.kind == "compare" else None
        sides = [condition.get(name) for name in one.operands] if direction else []
        constants = [side.operands[0] for side in sides if side is not None and side.kind == "constant"]
        if direction and constants and constants[0].lstrip("-").isdigit():
            limit = int(constants[0]) + (direction[1] == "LE")
            counter = next((side for side in sides if side is not None and side.kind == "get-tuple-element"), None)
            return max(0, math.ceil(limit / _step(counter, body)))
    return None


def _step(counter: HloOperation | None, body: Mapping[str, HloOperation]) -> int:
    """The number by which a trip increases the counter; 1 if that cannot be seen."""
    root = list(body.values())[-1] if body else None  # the compiler writes the root last
    index = re.search(r"index=(\d+)", counter.rest) if counter else None
    if root is None or index is None or root.kind != "tuple" or int(index[1]) >= len(root.operands):
        return 1
    total, one = 0, body.get(root.operands[int(index[1])])
    while one is not None and one.kind in ("add", "copy"):
        sides = [body[name] for name in one.operands if name in body]
        total += sum(int(side.operands[0]) for side in sides if side.kind == "constant")
        one = next((side for side in sides if side.kind != "constant"), None)
    same = one is not None and one.kind == "get-tuple-element" and f"index={index[1]}" in one.rest
    return total if same and total > 0 else 1


def _called(one: HloOperation, key: str) -> str:
    match = re.search(rf"\b{key}=%?([\w.\-]+)", one.rest)
    return match[1] if match else ""


def _branches(one: HloOperation) -> list[str]:
    if listed := re.search(r"branch_computations=\{([^}]*)\}", one.rest):
        return _NAME.findall(listed[1]) or [part.strip() for part in listed[1].split(",")]
    return [name for key in ("true_computation", "false_computation") if (name := _called(one, key))]


def _continues(name: str, operations: Mapping[str, HloOperation]) -> bool:
    """True for the later parts of a collective that the compiler spreads over the fusions of other work.

    Each part repeats the operation; only the one that starts it is counted.
    """
    text = "".join(one.rest for one in operations.values() if one.kind == "custom-call")
    return "AsyncCollectiveStart" not in text and ("async_collective" in name or "AsyncCollectiveDone" in text)


def _combines(one: HloOperation) -> bool:
    """True if the computations that `one` names combine two scalars, as those of a reduction do."""
    return one.kind.removesuffix("-start") in (
        "reduce",
        "reduce-window",
        "all-reduce",
        "reduce-scatter",
        "scatter",
        "sort",
        "map",
        "select-and-scatter",
    )


def _group_size(rest: str) -> int:
    """The number of devices of a collective's group."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", mesh[1]))
        return math.prod(int(sizes.get(name, 1)) for name in re.findall(r"'([^']*)'", mesh[2]))
    if grid := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(grid[1])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", rest):
        return listed[1].count(",") + 1
    return 2


def _dot_flops(one: HloOperation, shapes: Sequence[str]) -> float:
    left, contracted = _shape_of(shapes[0]), re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.rest)
    depth = math.prod(left[axis] for axis in _dims(contracted[1])) if contracted and left else 1
    return 2.0 * math.prod(_shape_of(one.shape)) * depth


def _convolution_flops(one: HloOperation, shapes: Sequence[str]) -> float:
    """2 · batch · outputs · inputs of a group · pairs of positions inside the padded array, per spatial axis."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.rest)
    if not labels or len(shapes) < 2:
        return 0.0
    (left, right, out), sizes = labels.groups(), [_shape_of(text) for text in (*shapes[:2], one.shape)]
    if any(len(label) != len(size) for label, size in zip((left, right, out), sizes, strict=True)):
        return 0.0
    window = _window(one.rest)
    total = 2.0 * sizes[2][out.index("b")] * sizes[2][out.index("f")] * sizes[1][right.index("i")]
    for axis in range(sum(label.isdigit() for label in left)):
        name = str(axis)
        pads = window.get("pad", [])
        low = int(pads[axis].partition("_")[0]) if axis < len(pads) else 0
        total *= _pairs(
            sizes[0][left.index(name)],
            sizes[1][right.index(name)],
            sizes[2][out.index(name)],
            low,
            *(
                int(window[key][axis]) if axis < len(window.get(key, [])) else 1
                for key in ("stride", "lhs_dilate", "rhs_dilate")
            ),
        )
    return total


def _window(rest: str) -> dict[str, list[str]]:
    found = re.search(r"window=\{([^}]*)\}", rest)
    parts = (part.split("=") for part in found[1].split()) if found else ()
    return {key: value.split("x") for key, value in parts}


@functools.cache
def _pairs(size: int, window: int, out: int, low: int, stride: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """The number of (output, window) positions that meet an element of the input, not padding or a gap."""
    at = np.arange(out)[:, None] * stride + np.arange(window)[None] * rhs_dilate - low
    inside = (at >= 0) & (at <= (size - 1) * lhs_dilate) & (at % lhs_dilate == 0)
    return int(inside.sum())


def _kernel_flops(one: HloOperation, shapes: Sequence[str], context_tokens: float) -> float:
    """FLOPs of a fused attention kernel, by its name: products of queries with the keys that a causal mask leaves.

    2 products forward, 3 for the gradient of the queries, 4 for those of keys and values, 5 for all of them (splash
    attention's `dkv` then has a result with one more axis); a decoding kernel has one query per sequence and
    `context_tokens` keys.
    """
    arrays = [_shape_of(text) for text in shapes if len(_shape_of(text)) >= 3 and not text.startswith("s")]
    if not arrays:
        return 0.0
    if "paged" in one.name:
        return 4.0 * math.prod(arrays[0]) * context_tokens
    if len(arrays) < 2:
        return 0.0
    fused = "dkv" in one.name and any(len(_shape_of(text)) > len(arrays[0]) for text in _elements(one.shape))
    products = (
        5
        if fused or "bwd" in one.name or "fused" in one.name
        else next((n for key, n in (("dkv", 4), ("dq", 3), ("fwd", 2)) if key in one.name), 2)
    )
    return 2.0 * products * math.prod(arrays[0]) * arrays[1][-2] / 2


def _paged_bytes(shapes: Sequence[str], context_tokens: float) -> float:
    """The bytes that a decoding kernel reads: `context_tokens` keys and values of each sequence, and small operands."""
    pools = [text for text in shapes if len(_shape_of(text)) == 4 and "S(" not in text]
    large = sorted(pools, key=size_bytes)[-2:]
    sequences = next((_shape_of(text)[0] for text in shapes if _shape_of(text)), 0)
    total = 0.0
    for text in large:
        _, pages, tokens, _ = _shape_of(text)
        per_token = size_bytes(text) / max(1, pages * tokens)
        total += min(size_bytes(text), per_token * context_tokens * sequences)
    return total + sum(size_bytes(text) for text in shapes if text not in large)


def _started_bytes(one: HloOperation, shapes: Sequence[str]) -> float:
    """The bytes of an operation that is started here; its result also names its operands."""
    elements, given = _elements(one.shape), len(shapes)
    if one.kind == "copy-start":
        return size_bytes(elements[0]) + sum(map(size_bytes, shapes))
    results = elements[given:] if len(elements) > given else elements
    if one.kind.removesuffix("-start") in _WIRE:
        return sum(map(size_bytes, shapes)) + sum(map(size_bytes, results))
    return size_bytes(results[0], everywhere=True) + size_bytes(results[0]) if results else 0.0
