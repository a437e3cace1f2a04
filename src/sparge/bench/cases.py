"""What is measured: the cases, and the named grids of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

MASKS = ("uniform", "skewed", "real")
SPARSITIES = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95)
K = 1024
LEAST_SKEWED_SPARSITY = 0.375  # below, the full half of a skewed mask would keep more blocks than there are


@dataclass(frozen=True)
class Case:
    """One problem. A `real` case takes its shape and causal order from the captured file, sparsity from the mask."""

    tokens: int
    head_dim: int = 128
    causal: bool = False
    sparsity: float = 0.6
    mask: str = "uniform"
    group: int = 1  # query heads per key/value head
    quantization: str = "int8-fp8"  # or "int8", "none", "auto": what suits the device
    bar: float = 0.0  # the speed-up this case has to reach; 0: none is stated

    def __post_init__(self) -> None:
        if self.mask not in MASKS:
            raise ValueError(f"mask must be one of {MASKS}, not {self.mask!r}.")
        if self.mask == "skewed" and self.sparsity < LEAST_SKEWED_SPARSITY:
            raise ValueError(f"a skewed mask needs a sparsity of {LEAST_SKEWED_SPARSITY} or more, not {self.sparsity}.")

    @property
    def label(self) -> str:
        order = "causal" if self.causal else "full"
        group = f" group {self.group}" if self.group > 1 else ""
        return f"{self.tokens} D{self.head_dim} {order} {self.mask} {self.sparsity:.0%}{group} {self.quantization}"


def _distinct(cases: Iterable[Case]) -> tuple[Case, ...]:
    """The first of those that differ in nothing but their bar."""
    first: dict[Case, Case] = {}
    for case in cases:
        first.setdefault(replace(case, bar=0.0), case)
    return tuple(first.values())


QUICK = (
    Case(1 * K, 64, quantization="auto"),
    Case(2 * K, 64, sparsity=0.0, quantization="auto"),
    Case(2 * K, 64, quantization="auto"),
    Case(2 * K, 64, causal=True, quantization="auto"),
    Case(2 * K, 128, sparsity=0.8, group=4, quantization="auto"),
    Case(4 * K, 64, mask="skewed", quantization="auto"),
)

BARS = (
    Case(32 * K, sparsity=0.0, bar=1.6),
    Case(32 * K, sparsity=0.6, bar=3.8),
    Case(32 * K, sparsity=0.8, bar=7.0),
    Case(32 * K, 64, bar=3.4),
    Case(32 * K, causal=True, bar=3.4),
    Case(16 * K),
    Case(8 * K, bar=2.6),
    Case(4 * K, bar=1.5),
    Case(32 * K, mask="skewed"),
    Case(32 * K, quantization="int8"),
    Case(32 * K, quantization="none"),
    Case(32 * K, 256),
    Case(32 * K, group=4),
)

FULL = _distinct(
    (
        *BARS,
        # captured tensors
        *(Case(8 * K, 64, True, mask="real", quantization=q) for q in ("int8-fp8", "int8", "none")),
        # sparsity
        *(Case(32 * K, 128, causal, sparsity) for causal in (False, True) for sparsity in SPARSITIES),
        *(Case(32 * K, 64, sparsity=sparsity) for sparsity in SPARSITIES),
        *(Case(32 * K, 256, sparsity=sparsity) for sparsity in (0.0, 0.6, 0.9)),
        # length
        *(Case(n * K, 128, causal) for causal in (False, True) for n in (1, 2, 4, 8, 16, 32, 64, 128)),
        *(Case(n * K, 64) for n in (4, 8, 16, 128)),
        Case(8 * K, 256),
        # grouped queries
        *(Case(32 * K, causal=causal, group=group) for causal in (False, True) for group in (4, 8)),
        # uneven work
        *(Case(32 * K, sparsity=sparsity, mask="skewed") for sparsity in (0.4, 0.6, 0.8, 0.9, 0.95)),
        Case(32 * K, causal=True, mask="skewed"),
        # number formats
        *(Case(32 * K, sparsity=s, quantization=q) for q in ("int8", "none") for s in (0.0, 0.6, 0.9)),
        *(Case(8 * K, quantization=quantization) for quantization in ("int8", "none")),
    )
)

CPU_BARS = {(False, 0.6): 2.0, (True, 0.6): 1.7, (False, 0.8): 3.5, (True, 0.8): 3.5}
CPU = tuple(
    Case(n * K, dim, causal, sparsity, quantization="none", bar=CPU_BARS.get((causal, sparsity), 0.0))
    for n in (8, 16)
    for dim in (64, 128)
    for causal in (False, True)
    for sparsity in (0.0, 0.6, 0.8)
)

GRIDS = {"quick": QUICK, "bars": BARS, "full": FULL, "cpu": CPU}


def cases_of(grid: str, captured: bool) -> tuple[Case, ...]:
    """The cases of a grid; a captured file adds its own where the grid has none."""
    cases = GRIDS[grid]
    if captured and not any(case.mask == "real" for case in cases):
        cases = (*cases, Case(8 * K, 64, True, mask="real", quantization="auto"))
    return cases
