"""Problems that several ranks share: what each rank runs, and what one process makes of the same."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace

import torch
from problems import tensors
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel as torch_context_parallel

import sparge
from sparge import SparseConfig
from sparge.distributed import ring
from sparge.distributed.wire import Team, Transfer
from sparge.integrations.transformers.attention import sparge_attention

SPARSE = SparseConfig(rule=("threshold", "gap"), threshold=0.02, gap=1.0, quantization="none")
EXACT = SparseConfig(rule="topk", topk=1.0, quantization="none")


@dataclass(frozen=True)
class Case:
    mesh: tuple[int, int]  # ring, ulysses
    config: SparseConfig = SPARSE
    sizes: dict = field(default_factory=dict)  # of problems.tensors
    arguments: dict = field(default_factory=dict)  # of sparge.attention
    sharding: str = "contiguous"
    lengths: tuple[int, ...] | None = None  # tokens of each rank; None: evenly
    segments: tuple[tuple[int, ...], ...] | None = None  # of each rank
    hidden: int = 0  # every so-manieth key is padding
    ends: tuple[int, ...] | None = None  # of packed sequences
    broken: float | None = None  # a number that one key and one value hold

    @property
    def ranks(self) -> int:
        return self.mesh[0] * self.mesh[1]

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = tensors(7, **({"heads": 4, "q_len": 512, "contrast": 4.0} | self.sizes))
        if self.broken is not None:
            k[0, 0, 300, 3] = v[0, -1, 200, 2] = self.broken  # the value in no sampled tile of 4,200
        return q, k, v

    def padding(self, k_len: int) -> Tensor | None:
        return torch.arange(k_len) % self.hidden != 1 if self.hidden else None

    def shares(self, length: int) -> list[list[int]]:
        """The tokens of each rank, from the words of the documentation."""
        if self.segments is not None:
            totals = [sum(of_all) for of_all in zip(*self.segments, strict=True)]
            starts = [sum(totals[:n]) for n in range(len(totals))]
            shares = []
            for rank in range(self.ranks):
                mine = []
                for n, start in enumerate(starts):
                    before = start + sum(of_rank[n] for of_rank in self.segments[:rank])
                    mine += range(before, before + self.segments[rank][n])
                shares.append(mine)
            return shares
        if self.sharding == "contiguous":
            lengths = self.lengths or [len(x) for x in torch.arange(length).tensor_split(self.ranks)]
            ends = [sum(lengths[:n]) for n in range(self.ranks + 1)]
            return [list(range(*pair)) for pair in pairwise(ends)]
        chunks = torch.arange(length).tensor_split(2 * self.ranks)
        return [torch.cat((chunks[n], chunks[-1 - n])).tolist() for n in range(self.ranks)]

    def run_alone(self) -> tuple[Tensor, Tensor, sparge.Stats]:
        q, k, v = self.whole()
        valid = self.padding(k.shape[2])
        if self.ends is not None:
            packed = (x[0].transpose(0, 1) for x in (q, k, v))
            ends = torch.tensor(self.ends)
            longest = int(ends.diff().max())
            return sparge.varlen_attention(*packed, ends, ends, longest, longest, **self._settings())
        mask = None if valid is None else valid.expand(q.shape[0], 1, 1, -1)
        return sparge.attention(q, k, v, mask, enable_gqa=True, **self._settings())

    def _settings(self) -> dict:
        return {**self.arguments, "config": self.config, "return_lse": True, "return_stats": True}

    def run_shard(self, rank: int) -> dict:
        """Everything a test may want to know of one rank."""
        mesh = init_device_mesh("cpu", self.mesh, mesh_dim_names=("ring", "ulysses"))
        q, k, v = self.whole()
        rows, keys = (self.shares(x.shape[2])[rank] for x in (q, k))
        valid = self.padding(k.shape[2])
        mine = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        segments = None if self.segments is None else self.segments[rank]
        with recorded() as record, sparge.context_parallel(mesh, sharding=self.sharding, segments=segments) as traffic:
            if self.ends is not None:
                ends = torch.tensor(self.ends)
                longest = int(ends.diff().max())
                packed = (x[0].transpose(0, 1) for x in mine)
                out = sparge.varlen_attention(*packed, ends, ends, longest, longest, **self._settings())
            else:
                mask = None if valid is None else valid[keys].expand(q.shape[0], 1, 1, -1)
                out = sparge.attention(*mine, mask, enable_gqa=True, **self._settings())
        values, lse, stats = out
        return {"rows": rows, "values": values, "lse": lse, "stats": stats, "sent": traffic.sent, **record}


class recorded:  # noqa: N801 (used as a function)
    """Keeps the ring's masks, and the order in which things happen there."""

    def __enter__(self) -> dict:
        self.record = {"masks": [], "events": []}
        self.kept = [(owner, name, getattr(owner, name)) for owner, name in self._places()]
        for owner, name, function in self.kept:
            setattr(owner, name, self._wrapped(name, function))
        return self.record

    def __exit__(self, *error: object) -> None:
        for owner, name, function in self.kept:
            setattr(owner, name, function)

    def _places(self) -> list[tuple[type, str]]:
        return [(ring.Span, "_select"), (ring.Span, "_merge"), (Team, "start"), (Transfer, "wait")]

    def _wrapped(self, name, function):
        def call(owner, *arguments, **settings):
            result = function(owner, *arguments, **settings)
            self.record["events"].append(name)
            if name == "_select":
                self.record["masks"].append((owner.rows.start, owner.rows.stop, result.to_dense()))
            return result

        return call


CAUSAL = {"is_causal": True}
GROUPED = {"kv_heads": 2}
FEW = SparseConfig(rule="topk", topk=0.25, subblocks=(1, 1), sinks=0, quantization="none")
TEXT = replace(FEW, protected=((0, 40), (-20, None)))
PAPER = SparseConfig(rule="cdf", cdf=0.6, subblocks=(1, 1), similarity=0.05, quantization="none")
BUDGET = SparseConfig(rule="topk", topk=(0.1, 0.1, 1.0, 1.0), quantization="none", max_error=0.05)
PROBE = SparseConfig(rule=("threshold", "gap", "probe"), threshold=0.2, gap=0.1, probe=0.02, quantization="none")
PROBE_PER_HEAD = replace(PROBE, probe=(0.01, 0.02, 0.03, 0.05), probe_rows=2)
PROBE_ALL = SparseConfig(rule="probe", probe=0.0, quantization="none")
PER_HEAD = SparseConfig(rule="threshold", threshold=(0.01, 0.05, 0.1, 0.2), quantization="none")

CASES = {
    # two ranks
    "ring": Case((2, 1)),
    "ring causal zigzag": Case((2, 1), arguments=CAUSAL, sharding="zigzag", sizes=GROUPED),
    "ring int8": Case((2, 1), SparseConfig(quantization="int8"), {"q_len": 300}, CAUSAL),
    "ring fp8": Case((2, 1), SparseConfig(quantization="int8-fp8"), {"q_len": 300}, CAUSAL, "zigzag"),
    "ring fp8 with outliers": Case(
        (2, 1), SparseConfig(quantization="int8-fp8"), {"q_len": 4200, "heads": 1}, lengths=(4100, 100), broken=900.0
    ),
    "ring second stage": Case((2, 1), SparseConfig(rule="topk", topk=1.0, pv_threshold=-2.0, quantization="none")),
    "ring bfloat16": Case((2, 1), sizes={"dtype": torch.bfloat16, "dim": 32}, arguments=CAUSAL),
    "ring budget": Case((2, 1), replace(BUDGET, max_error=0.005), GROUPED, CAUSAL, "zigzag"),
    "ring fp8 budget": Case((2, 1), replace(BUDGET, quantization="int8-fp8"), {"q_len": 300}, CAUSAL),
    "ring budget that is kept": Case((2, 1), replace(BUDGET, max_error=0.9), GROUPED, CAUSAL, "zigzag"),
    "ring probe": Case((2, 1), PROBE, {**GROUPED, "q_len": 1000}, CAUSAL, "zigzag"),
    "ring probe alone, fp8": Case((2, 1), SparseConfig(rule="probe", quantization="int8-fp8"), {"q_len": 700}),
    "ring probe, budget": Case((2, 1), replace(PROBE_PER_HEAD, max_error=0.02), {"q_len": 600}, CAUSAL),
    "ring broken": Case((2, 1), arguments=CAUSAL, broken=torch.nan),
    "ring infinite": Case((2, 1), broken=torch.inf),
    "ulysses": Case((1, 2), sizes=GROUPED, arguments={**CAUSAL, "layout": "BHSD"}),
    "ulysses one key head": Case((1, 2), sizes={"kv_heads": 1}, sharding="zigzag", arguments=CAUSAL),
    "ulysses three heads": Case((1, 2), sizes={"heads": 3, "kv_heads": 1}, lengths=(333, 179)),
    "ulysses odd groups": Case((1, 2), sizes={"heads": 6, "kv_heads": 2}),
    "ulysses second stage": Case((1, 2), SparseConfig(rule="topk", topk=1.0, pv_threshold=-2.0, quantization="none")),
    "ulysses int8": Case((1, 2), SparseConfig(quantization="int8"), {"q_len": 300}, CAUSAL),
    "ulysses budget": Case((1, 2), SparseConfig(rule="topk", topk=0.1, quantization="none", max_error=0.05)),
    "ulysses packed": Case((1, 2), ends=(0, 200, 200, 330, 512), arguments=CAUSAL),
    "ulysses padded": Case((1, 2), sizes={"batch": 2}, hidden=3),
    "all, ring": Case((2, 1), EXACT, GROUPED, CAUSAL, "zigzag"),
    "all, ring in 8 bits": Case((2, 1), replace(EXACT, quantization="int8-fp8"), {"q_len": 256, "heads": 2}),
    "all, ring of a probe": Case((2, 1), PROBE_ALL, {**GROUPED, "q_len": 1024}, CAUSAL, "zigzag"),
    "all, ulysses": Case((1, 2), EXACT, GROUPED, CAUSAL),
    # four ranks
    "all, both": Case((2, 2), EXACT, GROUPED, CAUSAL, "zigzag"),
    "all, ring of four of a probe": Case((4, 1), replace(PROBE_ALL, probe_rows=8), {"heads": 2}),
    "all, both with a probe": Case((2, 2), PROBE_ALL, GROUPED, CAUSAL, "zigzag"),
    "ring of four": Case((4, 1), sizes={"q_len": 1000}, arguments=CAUSAL, sharding="zigzag"),
    "ring of four, uneven": Case((4, 1), sizes={"q_len": 700}, lengths=(1, 77, 500, 122), arguments=CAUSAL),
    "ring of four, short": Case((4, 1), sizes={"q_len": 150}, arguments=CAUSAL, sharding="zigzag"),
    "ring of four, cross": Case((4, 1), sizes={"q_len": 130, "k_len": 900}, arguments=CAUSAL),
    "ring of four, wide blocks": Case(
        (4, 1), SparseConfig(rule="gap", gap=1.0, block=(192, 128), quantization="none"), {"q_len": 1000, "v_dim": 24}
    ),
    "ring of four, windowed": Case(
        (4, 1), SparseConfig(rule="topk", topk=1.0, sinks=0, quantization="none"), arguments={"window": (100, 0)}
    ),
    "ring of four, padded": Case((4, 1), sizes={"batch": 2, "q_len": 600, **GROUPED}, hidden=3, arguments=CAUSAL),
    "ring of four, paper": Case((4, 1), PAPER, {"q_len": 640}, CAUSAL, "zigzag"),
    "ring of four, text": Case((4, 1), TEXT, {"q_len": 900}),
    "ring of four, text and image cut apart": Case(
        (4, 1), TEXT, {"q_len": 420}, segments=((10, 100), (10, 100), (10, 90), (10, 90))
    ),
    "ring of four, budget": Case(
        (4, 1), BUDGET, {"q_len": 700, "batch": 2}, CAUSAL, lengths=(1, 77, 500, 122), hidden=3
    ),
    "ring of four, packed budget": Case((4, 1), BUDGET, ends=(0, 300, 330, 330, 512), arguments=CAUSAL),
    "ring of four, packed": Case((4, 1), ends=(0, 300, 330, 330, 512), arguments=CAUSAL),
    "ring of four, packed zigzag": Case((4, 1), ends=(0, 100, 512), sharding="zigzag", arguments=CAUSAL),
    "ring of four, probe": Case((4, 1), PROBE_PER_HEAD, {"q_len": 1000, **GROUPED}, CAUSAL, "zigzag"),
    "ring of four, probe, uneven": Case(
        (4, 1), replace(PROBE, block=(64, 32)), {"q_len": 700, "batch": 2}, {"window": (300, 40)},
        lengths=(1, 77, 500, 122), hidden=3,
    ),
    "ring of four, probe, short": Case((4, 1), PROBE, {"q_len": 150}, CAUSAL, "zigzag"),
    "ring of four, probe, packed": Case((4, 1), PROBE, ends=(0, 300, 330, 330, 512), arguments=CAUSAL),
    "ring of four, probe, text": Case(
        (4, 1), replace(PROBE, protected=((0, 40),)), {"q_len": 420},
        segments=((10, 100), (10, 100), (10, 90), (10, 90)),
    ),
    "ulysses of four, two key heads": Case((1, 4), PER_HEAD, GROUPED, CAUSAL, "zigzag"),
    "both": Case((2, 2), PER_HEAD, {**GROUPED, "q_len": 700}, CAUSAL, "zigzag"),
    "both, uneven": Case((2, 2), sizes={"q_len": 600, "kv_heads": 1}, lengths=(200, 77, 101, 222), arguments=CAUSAL),
    "both, budget": Case((2, 2), BUDGET, {"q_len": 600}, CAUSAL),
    "both, probe": Case((2, 2), PROBE_PER_HEAD, {**GROUPED, "q_len": 700}, CAUSAL, "zigzag"),
    "both, fp8": Case((2, 2), SparseConfig(quantization="int8-fp8"), {"q_len": 300, **GROUPED}, CAUSAL),
    "both, packed": Case((2, 2), ends=(0, 300, 512), sizes=GROUPED, arguments=CAUSAL),
}  # fmt: skip


def run_cases(rank: int, world: int) -> dict[str, object]:
    """Every case for as many ranks, by name; what a case raises is its result."""
    found: dict[str, object] = {}
    for name, case in CASES.items():
        if case.ranks == world:
            try:
                found[name] = case.run_shard(rank)
            except Exception as error:  # the other cases shall run
                found[name] = error
    return found


def events_between(events: list[str], first: str, last: str) -> list[Counter]:
    """What happened between each `first` and the next `last`."""
    spans, current = [], None
    for event in events:
        if event == first:
            current = Counter()
        elif event == last and current is not None:
            spans.append(current)
            current = None
        elif current is not None:
            current[event] += 1
    return spans


# ---- hosts


def run_hosts() -> dict[str, object]:
    """Two ranks: torch's own context parallel, torch's attention, transformers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    case = CASES["ring causal zigzag"]
    q, k, v = case.whole()
    found: dict[str, object] = {}
    ours = functools.partial(sparge.context_parallel, mesh, sharding="zigzag", ring="cp")
    with torch_context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]), ours():
        shard = sparge.attention(q, k, v, is_causal=True, enable_gqa=True, config=case.config)
        with sparge.patched(case.config) as calls:
            patched = scaled_dot_product(q, k, v, is_causal=True, enable_gqa=True)
        found["calls"] = calls.sparse
        compiled = torch.compile(sparge.attention, fullgraph=True, backend="eager")
        traced = compiled(q, k, v, is_causal=True, enable_gqa=True, config=case.config)
        with sparge.patched():
            found["patched dense"] = said(lambda: scaled_dot_product(q, k, v, attn_mask=torch.zeros(256, 256)))
    for name, x in (("torch", shard), ("patched", patched), ("compiled", traced)):
        found[name] = sparge.gather_sequence(x, mesh, sharding="zigzag", ring="cp")
    layer = SimpleNamespace(is_causal=True, num_key_value_groups=1)
    few = torch.randn(1, 2, 64, 16)
    with ours():
        softcapped = functools.partial(sparge_attention, layer, few, few, few, None, softcap=3.0)
        found["transformers dense"] = said(softcapped)
        found["compiled dense"] = said(torch.compile(softcapped, fullgraph=True, backend="eager"))
    return found


def scaled_dot_product(*arguments, **settings) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(*arguments, **settings)


def said(call) -> str:
    """The sentence that a call raises."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return "nothing"


# ---- calls that must fail, alike on every rank


def refused_calls() -> dict[str, object]:
    """By name: what a rank calls, given its rank."""

    def attention(rank: int, odd: dict | None = None, block: dict | None = None, **settings) -> None:
        sizes = {"heads": settings.pop("heads", 4), "q_len": 64} | (odd if odd and rank == 1 else {})
        q, k, v = tensors(1, **sizes)
        if settings.pop("double", False) and rank == 1:
            q, k, v = (x.double() for x in (q, k, v))
        if settings.pop("one mask", False):
            settings["attn_mask"] = torch.ones(1, 1, 1, 64, dtype=torch.bool) if rank == 1 else None
        config = settings.pop("configs", (None, None))[rank]
        with sparge.context_parallel(ring_of_two(), **(block or {})):
            sparge.attention(q, k, v, config=config, **settings)

    ring_of_two = functools.partial(init_device_mesh, "cpu", (2,), mesh_dim_names=("ring",))
    ulysses_of_two = functools.partial(init_device_mesh, "cpu", (2,), mesh_dim_names=("ulysses",))
    q, k, v = tensors(1, q_len=64)

    def one_head(mesh) -> None:
        with sparge.context_parallel(mesh):
            sparge.attention(q[:, :1], k[:, :1], v[:, :1])

    def inside(call) -> None:
        with sparge.context_parallel(ring_of_two()):
            call()

    def packed(ends: list[int], longest: int) -> None:
        mine = (x[0].transpose(0, 1) for x in (q, k, v))
        sparge.varlen_attention(*mine, torch.tensor(ends), torch.tensor(ends), longest, longest)

    return {
        "heads": lambda rank: attention(rank, {"heads": 6}),
        "batch": lambda rank: attention(rank, {"batch": 2}),
        "head_dim": lambda rank: attention(rank, {"dim": 32}),
        "dtype": lambda rank: attention(rank, {"dtype": torch.float16}),
        "float64": lambda rank: attention(rank, double=True),
        "config": lambda rank: attention(rank, configs=(SPARSE, EXACT)),
        "causal": lambda rank: attention(rank, is_causal=rank == 1),
        "padding": lambda rank: attention(rank, **{"one mask": True}),
        "return_lse": lambda rank: attention(rank, return_lse=rank == 1),
        "sharding": lambda rank: attention(rank, block={"sharding": ("contiguous", "zigzag")[rank]}),
        "zigzag lengths": lambda rank: attention(rank, {"q_len": 90}, block={"sharding": "zigzag"}),
        "segments": lambda rank: attention(rank, block={"segments": (10, 50 + rank)}),
        "too many ranks": lambda rank: one_head(ulysses_of_two()),
        "per head": lambda rank: attention(rank, configs=(SparseConfig(gap=(1.0, 2.0)),) * 2),
        "ends": lambda rank: inside(lambda: packed([0, 64], 64)),
        "other ends": lambda rank: inside(lambda: packed([0, 100 + rank, 128], 128)),
        "longest": lambda rank: inside(lambda: packed([0, 128], 64)),
        "function": lambda rank: inside(lambda: packed([0, 128], 128)) if rank else attention(rank, heads=2),
        "own mask": lambda rank: inside(lambda: sparge.block_sparse_attention(q, k, v, sparge.predict_mask(q, k))),
        "predict": lambda rank: inside(lambda: sparge.predict_mask(q, k)),
        "mesh": lambda rank: sparge.context_parallel("two ranks").__enter__(),
        "mesh names": lambda rank: sparge.context_parallel(init_device_mesh("cpu", (2,))).__enter__(),
        "other names": lambda rank: sparge.context_parallel(
            init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "ring"))
        ).__enter__(),
        "unknown sharding": lambda rank: sparge.shard_sequence(q, ring_of_two(), sharding="striped"),
        "bad segments": lambda rank: sparge.context_parallel(ring_of_two(), segments=(3.5,)).__enter__(),
        "bad timeout": lambda rank: sparge.context_parallel(ring_of_two(), timeout=-1).__enter__(),
        "nothing": lambda rank: attention(rank),
    }
