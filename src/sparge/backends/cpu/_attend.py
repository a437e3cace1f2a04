"""The CPU attention kernel, written as LLVM IR and compiled for the machine it runs on.

One call of the kernel is one thread's share: it draws query blocks from a shared counter until none is left,
so rows that keep many blocks do not hold up the others. Tiles are kept transposed (queries along the vector
lanes): the softmax then needs no horizontal reductions, and K and V are read one scalar at a time, as
broadcasts, so neither has to be packed into panels. Sixty-four query rows are one group, the unit of the
second-stage filter.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from llvmlite import binding, ir

GROUP = 64  # query rows that share one second-stage decision, on every backend
TILE_ROWS = 4  # keys (QK) or channels (PV) per register tile

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
MINUS_INFINITY = float("-inf")

# 2**x on [-0.5, 0.5], relative error 5.1e-09. The constant term is exactly 1: a running maximum that does not change
# must scale by 1, or long rows drift.
EXP2_COEFFICIENTS = (
    0.00015453162937243783,
    0.001339086336403265,
    0.009618082557306342,
    0.055503571142205096,
    0.24022650760567874,
    0.6931471880262282,
    1.0,
)


@dataclass(frozen=True)
class Machine:
    """What code generation needs to know of a CPU."""

    lanes: int  # float32 values per vector register
    tile_vectors: int  # vectors of queries per register tile


@dataclass(frozen=True)
class Shape:
    """What one compiled kernel is specialised for; lengths, heads and strides stay run-time values."""

    head_dim: int
    value_dim: int
    block_q: int
    block_k: int
    dtype: str  # "float32", "bfloat16" or "float16"
    second_stage: bool

    @property
    def padded_value_dim(self) -> int:
        return -(-self.value_dim // TILE_ROWS) * TILE_ROWS

    @property
    def groups(self) -> int:
        return self.block_q // GROUP


# The kernel's arguments, in call order.
POINTERS = (
    "query", "key", "value", "output",
    "row_max", "row_sum", "skipped",  # per query row, in base 2; per query block
    "key_valid",  # uint8 [B, Nk], or null: every key is valid
    "v_finite",  # uint8 [B, Hkv, key blocks]
    "order", "kept_start", "kept",  # query blocks, heaviest first; their kept key blocks (CSR, descending)
    "pv_threshold",  # per query head, in base 2
    "counter", "scratch",
)  # fmt: skip
INTEGERS = (
    "work_items", "query_heads", "group_size", "query_blocks", "key_blocks", "q_len", "k_len",
    "offset", "left", "right",  # row r sees keys r + offset - left ... r + offset + right
    "q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row",
    "v_batch", "v_head", "v_row", "o_batch", "o_head", "o_row",
)  # fmt: skip


def scratch_floats(shape: Shape) -> int:
    """Scratch one thread needs: Q, running max, sum and O of each group; one S/P tile; one K and one V block."""
    per_group = GROUP * (shape.head_dim + shape.padded_value_dim + 2)
    return shape.groups * per_group + shape.block_k * (GROUP + shape.head_dim + shape.padded_value_dim)


class Emitter(ir.IRBuilder):
    """IRBuilder with loops, typed memory access and the few vector operations the kernel needs."""

    def __init__(self, block: ir.Block, module: ir.Module, machine: Machine) -> None:
        super().__init__(block)
        self.llvm = module
        self.lanes = machine.lanes
        self.vector = ir.VectorType(F32, machine.lanes)
        self.int_vector = ir.VectorType(I32, machine.lanes)

    @contextmanager
    def loop(self, stop: ir.Value | int, start: int = 0, step: int = 1) -> Iterator[ir.Value]:
        """for i in range(start, stop, step), the index a 64-bit integer."""
        before, head = self.block, self.append_basic_block()
        body, after = self.append_basic_block(), self.append_basic_block()
        self.branch(head)
        self.position_at_end(head)
        index = self.phi(I64)
        index.add_incoming(I64(start), before)
        self.cbranch(self.icmp_signed("<", index, stop if isinstance(stop, ir.Value) else I64(stop)), body, after)
        self.position_at_end(body)
        yield index
        index.add_incoming(self.add(index, I64(step)), self.block)
        self.branch(head)
        self.position_at_end(after)

    def accumulate(
        self,
        count: int,
        initial: Sequence[ir.Value],
        body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]],
        unroll: int = 1,
    ) -> list[ir.Value]:
        """Carry values in registers through `count` steps of `body(step, values) -> values`."""
        while count % unroll:
            unroll //= 2
        before, head, after = self.block, self.append_basic_block(), self.append_basic_block()
        self.branch(head)
        self.position_at_end(head)
        step = self.phi(I64)
        step.add_incoming(I64(0), before)
        carried = [self.phi(value.type) for value in initial]
        for phi, value in zip(carried, initial, strict=True):
            phi.add_incoming(value, before)
        values: list[ir.Value] = list(carried)
        for ahead in range(unroll):
            values = body(self.add(step, I64(ahead)), values)
        following = self.add(step, I64(unroll))
        for phi, value in zip(carried, values, strict=True):
            phi.add_incoming(value, self.block)
        step.add_incoming(following, self.block)
        self.cbranch(self.icmp_signed("<", following, I64(count)), head, after)
        self.position_at_end(after)
        return values

    def offset(self, base: ir.Value, *terms: ir.Value | int) -> ir.Value:
        """base[sum of terms]."""
        total: ir.Value = I64(0)
        for term in terms:
            total = self.add(total, term if isinstance(term, ir.Value) else I64(term))
        return self.gep(base, [total])

    def read(self, base: ir.Value, *terms: ir.Value | int) -> ir.Value:
        return self.load(self.offset(base, *terms))

    def read_vector(self, base: ir.Value, *terms: ir.Value | int) -> ir.Value:
        return self.load(self.bitcast(self.offset(base, *terms), self.vector.as_pointer()), align=4)

    def write_vector(self, value: ir.Value, base: ir.Value, *terms: ir.Value | int) -> None:
        self.store(value, self.bitcast(self.offset(base, *terms), self.vector.as_pointer()), align=4)

    def spread(self, scalar: ir.Value) -> ir.Value:
        """A vector whose lanes all hold `scalar`."""
        kind = ir.VectorType(scalar.type, self.lanes)
        one = self.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        lanes = ir.Constant(ir.VectorType(I32, self.lanes), [I32(0)] * self.lanes)
        return self.shuffle_vector(one, ir.Constant(kind, ir.Undefined), lanes)

    def constant(self, value: float) -> ir.Constant:
        return ir.Constant(self.vector, [F32(value)] * self.lanes)

    def integers(self, values: Sequence[int]) -> ir.Constant:
        return ir.Constant(self.int_vector, [I32(v) for v in values])

    def intrinsic(self, name: str, *arguments: ir.Value) -> ir.Value:
        """Call llvm.<name> on float32 vectors."""
        full_name = f"llvm.{name}.v{self.lanes}f32"
        function = self.llvm.globals.get(full_name)
        if function is None:
            kind = ir.FunctionType(self.vector, [self.vector] * len(arguments))
            function = ir.Function(self.llvm, kind, full_name)
        return self.call(function, arguments)

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, fused where the machine can."""
        return self.intrinsic("fmuladd", a, b, c)

    def is_nan(self, x: ir.Value) -> ir.Value:
        return self.fcmp_unordered("uno", x, x)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.select(self.fcmp_ordered(">", a, b), a, b)

    def smaller_int(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.select(self.icmp_signed("<", a, b), a, b)

    def larger_int(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.select(self.icmp_signed(">", a, b), a, b)

    def exp2(self, x: ir.Value) -> ir.Value:
        """2**x for x <= 0: exactly zero below -126, NaN for NaN."""
        whole = self.intrinsic("rint", x)
        fraction = self.fsub(x, whole)
        result: ir.Value = self.constant(EXP2_COEFFICIENTS[0])
        for coefficient in EXP2_COEFFICIENTS[1:]:
            result = self.fused(result, fraction, self.constant(coefficient))
        normal = self.fcmp_ordered(">=", x, self.constant(-126.0))
        power = self.fptosi(self.select(normal, whole, self.constant(0.0)), self.int_vector)
        exponent = self.shl(power, self.integers([23] * self.lanes))
        scaled = self.bitcast(self.add(self.bitcast(result, self.int_vector), exponent), self.vector)
        tiny = self.fcmp_ordered("<", x, self.constant(-126.0))
        return self.select(tiny, self.constant(0.0), scaled)


class Sight:
    """Which rows of a group see which keys of one block. Positions are relative to the block, in 32 bits."""

    def __init__(self, kernel: AttendKernel, group_row: ir.Value, position: ir.Value, first_key: ir.Value) -> None:
        e, arg = kernel.e, kernel.arg
        self.kernel, self.first_key = kernel, first_key
        far = 1 << 24  # beyond any block, well inside 32 bits

        def relative(value: ir.Value) -> ir.Value:
            near = e.larger_int(e.smaller_int(e.sub(value, first_key), I64(far)), I64(-far))
            return e.spread(e.trunc(near, I32))

        self.first_seen = relative(e.sub(position, arg["left"]))
        self.last_seen = relative(e.add(position, arg["right"]))
        self.rows_left = e.spread(e.trunc(e.smaller_int(e.sub(arg["q_len"], group_row), I64(GROUP)), I32))
        self.keys_left = e.sub(arg["k_len"], first_key)
        self.mask_row = e.mul(kernel.batch, arg["k_len"])

    def seen(self, key: ir.Value) -> list[ir.Value]:
        """Lane masks of the group's rows for one key of the block."""
        e, kernel = self.kernel.e, self.kernel
        token = e.smaller_int(e.add(self.first_key, key), e.sub(kernel.arg["k_len"], I64(1)))
        valid = self._key_is_valid(e.add(self.mask_row, token))
        usable = e.spread(e.and_(valid, e.icmp_signed("<", key, self.keys_left)))
        column = e.spread(e.trunc(key, I32))
        masks = []
        for v in range(kernel.vectors):
            lane = e.integers(range(v * e.lanes, (v + 1) * e.lanes))
            seen = e.and_(usable, e.icmp_signed("<", lane, self.rows_left))
            seen = e.and_(seen, e.icmp_signed(">=", column, e.add(self.first_seen, lane)))
            masks.append(e.and_(seen, e.icmp_signed("<=", column, e.add(self.last_seen, lane))))
        return masks

    def _key_is_valid(self, index: ir.Value) -> ir.Value:
        e, mask = self.kernel.e, self.kernel.arg["key_valid"]
        before = e.block
        with e.if_then(e.icmp_signed("!=", e.ptrtoint(mask, I64), I64(0))):
            flag = e.icmp_signed("!=", e.load(e.gep(mask, [index])), I8(0))
            inside = e.block
        merged = e.phi(I1)
        merged.add_incoming(I1(1), before)
        merged.add_incoming(flag, inside)
        return merged


class AttendKernel:
    """Emits the kernel for one shape on one kind of machine."""

    def __init__(self, shape: Shape, machine: Machine) -> None:
        self.shape, self.machine = shape, machine
        self.vectors = GROUP // machine.lanes
        self.module = ir.Module(name="sparge")
        self.module.triple = binding.get_default_triple()
        element = {"float32": F32, "bfloat16": I16, "float16": F16}[shape.dtype]
        pointer_types = {
            "query": element, "key": element, "value": element, "output": element,
            "skipped": I64, "key_valid": I8, "v_finite": I8,
            "order": I32, "kept_start": I64, "kept": I32, "counter": I64,
        }  # fmt: skip
        types = [pointer_types.get(name, F32).as_pointer() for name in POINTERS]
        types += [I64 for _ in INTEGERS] + [F32]
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), types), name="attend")
        self.arg = dict(zip((*POINTERS, *INTEGERS, "scale"), function.args, strict=True))
        self.e = Emitter(function.append_basic_block("entry"), self.module, machine)
        self._lay_out_scratch()
        self._draw_query_blocks(function)

    def _lay_out_scratch(self) -> None:
        s, e = self.shape, self.e
        sizes = {
            "queries": s.groups * GROUP * s.head_dim,  # [group][channel][row], times scale * log2(e)
            "outputs": s.groups * GROUP * s.padded_value_dim,  # [group][channel][row]
            "running_max": s.groups * GROUP,
            "running_sum": s.groups * GROUP,
            "scores": s.block_k * GROUP,  # [key][row]
            "keys": s.block_k * s.head_dim,
            "values": s.block_k * s.padded_value_dim,
        }
        start = 0
        self.buffer = {}
        for name, size in sizes.items():
            self.buffer[name] = e.offset(self.arg["scratch"], start)
            start += size

    def _draw_query_blocks(self, function: ir.Function) -> None:
        e, arg = self.e, self.arg
        draw, work, done = (function.append_basic_block(name) for name in ("draw", "work", "done"))
        e.branch(draw)
        e.position_at_end(draw)
        drawn = e.atomic_rmw("add", arg["counter"], I64(1), "monotonic")
        e.cbranch(e.icmp_signed("<", drawn, arg["work_items"]), work, done)
        e.position_at_end(work)
        self._attend_query_block(e.sext(e.read(arg["order"], drawn), I64))
        e.branch(draw)
        e.position_at_end(done)
        e.ret_void()

    def _attend_query_block(self, item: ir.Value) -> None:
        e, arg, s = self.e, self.arg, self.shape
        self.first_row = e.mul(e.srem(item, arg["query_blocks"]), I64(s.block_q))
        batch_head = e.sdiv(item, arg["query_blocks"])
        self.batch = e.sdiv(batch_head, arg["query_heads"])
        self.head = e.srem(batch_head, arg["query_heads"])
        self.kv_head = e.sdiv(self.head, arg["group_size"])
        self.rows_start = e.mul(batch_head, arg["q_len"])
        if s.second_stage:
            self.pv_threshold = e.read(arg["pv_threshold"], self.head)
        self._start_rows()
        stop = e.read(arg["kept_start"], item, 1)
        begin = e.read(arg["kept_start"], item)
        with e.loop(e.sub(stop, begin)) as step:
            block = e.sext(e.read(arg["kept"], begin, step), I64)
            first_key = e.mul(block, I64(s.block_k))
            self._copy_block("key", "k", "keys", first_key, s.head_dim, s.head_dim)
            self._copy_block("value", "v", "values", first_key, s.value_dim, s.padded_value_dim)
            with e.loop(s.groups) as group:
                self._attend_tile(item, group, first_key)
        self._finish_rows()

    def _base(self, name: str, prefix: str, head: ir.Value) -> ir.Value:
        e, arg = self.e, self.arg
        return e.offset(arg[name], e.mul(self.batch, arg[f"{prefix}_batch"]), e.mul(head, arg[f"{prefix}_head"]))

    def _as_float(self, value: ir.Value) -> ir.Value:
        e = self.e
        if self.shape.dtype == "float32":
            return value
        if self.shape.dtype == "float16":
            return e.fpext(value, F32)
        return e.bitcast(e.shl(e.zext(value, I32), I32(16)), F32)

    def _from_float(self, value: ir.Value) -> ir.Value:
        e = self.e
        if self.shape.dtype == "float32":
            return value
        if self.shape.dtype == "float16":
            return e.fptrunc(value, F16)
        bits = e.bitcast(value, I32)
        to_even = e.and_(e.lshr(bits, I32(16)), I32(1))
        rounded = e.lshr(e.add(bits, e.add(to_even, I32(0x7FFF))), I32(16))
        is_nan = e.is_nan(value)  # rounding could carry a NaN into infinity
        return e.trunc(e.select(is_nan, I32(0x7FC0), rounded), I16)

    def _start_rows(self) -> None:
        """Transpose and scale this block's queries; zero the running state. Rows past the end are zeros."""
        e, arg, s = self.e, self.arg, self.shape
        query = self._base("query", "q", self.head)
        with e.loop(s.block_q) as row:
            group, lane = e.sdiv(row, I64(GROUP)), e.srem(row, I64(GROUP))
            token = e.add(self.first_row, row)
            real = e.icmp_signed("<", token, arg["q_len"])
            safe = e.select(real, token, I64(0))
            factor = e.select(real, arg["scale"], F32(0.0))
            source = e.mul(safe, arg["q_row"])
            target = e.add(e.mul(group, I64(GROUP * s.head_dim)), lane)
            with e.loop(s.head_dim) as channel:
                value = e.fmul(self._as_float(e.read(query, source, channel)), factor)
                e.store(value, e.offset(self.buffer["queries"], target, e.mul(channel, I64(GROUP))))
            e.store(F32(MINUS_INFINITY), e.offset(self.buffer["running_max"], row))
            e.store(F32(-0.0), e.offset(self.buffer["running_sum"], row))
        with e.loop(s.groups * GROUP * s.padded_value_dim) as index:
            e.store(F32(0.0), e.offset(self.buffer["outputs"], index))

    def _copy_block(self, name: str, prefix: str, target: str, first_key: ir.Value, width: int, padded: int) -> None:
        """Copy one key block to float32; rows past the end and padded channels become zeros."""
        e, arg, s = self.e, self.arg, self.shape
        source = self._base(name, prefix, self.kv_head)
        real_rows = e.smaller_int(I64(s.block_k), e.sub(arg["k_len"], first_key))
        with e.loop(real_rows) as row:
            start = e.mul(e.add(first_key, row), arg[f"{prefix}_row"])
            with e.loop(width) as channel:
                value = self._as_float(e.read(source, start, channel))
                e.store(value, e.offset(self.buffer[target], e.mul(row, I64(padded)), channel))
            with e.loop(padded, start=width) as channel:
                e.store(F32(0.0), e.offset(self.buffer[target], e.mul(row, I64(padded)), channel))
        with e.loop(e.mul(e.sub(I64(s.block_k), real_rows), I64(padded))) as index:
            e.store(F32(0.0), e.offset(self.buffer[target], e.mul(real_rows, I64(padded)), index))

    def _attend_tile(self, item: ir.Value, group: ir.Value, first_key: ir.Value) -> None:
        """One group of 64 rows against one key block: scores, filter, online softmax, P V."""
        e, arg = self.e, self.arg
        group_row = e.add(self.first_row, e.mul(group, I64(GROUP)))
        position = e.add(group_row, arg["offset"])
        lowest = e.larger_int(I64(0), e.sub(position, arg["left"]))
        last = e.add(e.smaller_int(e.add(group_row, I64(GROUP)), arg["q_len"]), e.add(arg["offset"], arg["right"]))
        highest = e.smaller_int(arg["k_len"], last)
        sees = e.and_(
            e.icmp_signed("<", first_key, highest),
            e.icmp_signed(">", e.add(first_key, I64(self.shape.block_k)), lowest),
        )
        sees = e.and_(sees, e.icmp_signed("<", group_row, arg["q_len"]))
        with e.if_then(sees):
            self._score(group)
            self.first_key = first_key
            with e.if_else(self._is_partial(group_row, position, first_key)) as (partial, full):
                with partial:
                    self._fold(item, group, Sight(self, group_row, position, first_key))
                with full:
                    self._fold(item, group, None)

    def _score(self, group: ir.Value) -> None:
        """scores[key][row] = K Q, a register tile of four keys by a few vectors of rows at a time."""
        e, s = self.e, self.shape
        queries = e.offset(self.buffer["queries"], e.mul(group, I64(GROUP * s.head_dim)))
        for first in range(0, self.vectors, self.machine.tile_vectors):
            columns = [v * self.machine.lanes for v in range(first, first + self.machine.tile_vectors)]
            with e.loop(s.block_k, step=TILE_ROWS) as key:
                rows = [
                    e.offset(self.buffer["keys"], e.mul(e.add(key, I64(r)), I64(s.head_dim))) for r in range(TILE_ROWS)
                ]

                def step(channel: ir.Value, tile: list[ir.Value], rows=rows, columns=columns) -> list[ir.Value]:
                    start = e.mul(channel, I64(GROUP))
                    right = [e.read_vector(queries, start, column) for column in columns]
                    left = [e.spread(e.read(row, channel)) for row in rows]
                    return self._outer_product(left, right, tile)

                zeros = [e.constant(0.0)] * (TILE_ROWS * len(columns))
                tile = e.accumulate(s.head_dim, zeros, step, unroll=4)
                for r in range(TILE_ROWS):
                    for c, column in enumerate(columns):
                        target = e.mul(e.add(key, I64(r)), I64(GROUP))
                        e.write_vector(tile[r * len(columns) + c], self.buffer["scores"], target, column)

    def _outer_product(self, left: list[ir.Value], right: list[ir.Value], tile: list[ir.Value]) -> list[ir.Value]:
        pairs = [(a, b) for a in left for b in right]
        return [self.e.fused(a, b, acc) for (a, b), acc in zip(pairs, tile, strict=True)]

    def _is_partial(self, group_row: ir.Value, position: ir.Value, first_key: ir.Value) -> ir.Value:
        """Whether some row of the group does not see some key of the block."""
        e, arg = self.e, self.arg
        end = e.add(first_key, I64(self.shape.block_k))
        last_row = e.add(position, I64(GROUP - 1))
        conditions = (
            e.icmp_signed(">", end, arg["k_len"]),
            e.icmp_signed(">", e.add(group_row, I64(GROUP)), arg["q_len"]),
            e.icmp_signed("<", e.add(position, arg["right"]), e.sub(end, I64(1))),
            e.icmp_signed(">", e.sub(last_row, arg["left"]), first_key),
            e.icmp_signed("!=", e.ptrtoint(arg["key_valid"], I64), I64(0)),
        )
        return functools.reduce(e.or_, conditions)

    def _fold(self, item: ir.Value, group: ir.Value, sight: Sight | None) -> None:
        """Online softmax over the score tile, then O = O * alpha + P V; or nothing, if the filter says so."""
        e, s = self.e, self.shape
        state = e.mul(group, I64(GROUP))
        columns = [v * self.machine.lanes for v in range(self.vectors)]
        scores = self.buffer["scores"]
        lanes = ir.VectorType(I1, self.machine.lanes)
        none_yet = [ir.Constant(lanes, [I1(0)] * self.machine.lanes)] * len(columns)
        sees = [ir.Constant(lanes, [I1(1)] * self.machine.lanes)] * len(columns)
        if sight is not None:

            def hide(key: ir.Value, any_seen: list[ir.Value]) -> list[ir.Value]:
                seen = sight.seen(key)
                for column, visible in zip(columns, seen, strict=True):
                    place = (scores, e.mul(key, I64(GROUP)), column)
                    e.write_vector(e.select(visible, e.read_vector(*place), e.constant(MINUS_INFINITY)), *place)
                return [e.or_(a, b) for a, b in zip(any_seen, seen, strict=True)]

            sees = e.accumulate(s.block_k, none_yet, hide)

        def largest(key: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
            row, best = e.mul(key, I64(GROUP)), carried[: len(columns)]
            found = [e.read_vector(scores, row, column) for column in columns]
            best = [e.larger(a, b) for a, b in zip(found, best, strict=True)]
            if not s.second_stage:
                return best
            undefined = [e.or_(u, e.is_nan(x)) for x, u in zip(found, carried[len(columns) :], strict=True)]
            return best + undefined

        initial = [e.constant(MINUS_INFINITY)] * len(columns) + (none_yet if s.second_stage else [])
        found = e.accumulate(s.block_k, initial, largest, unroll=4)
        local, undefined = found[: len(columns)], found[len(columns) :]
        old = [e.read_vector(self.buffer["running_max"], state, c) for c in columns]
        new = [e.larger(a, b) for a, b in zip(local, old, strict=True)]
        if not s.second_stage:
            self._fold_values(state, columns, old, new, sight)
            return
        # Rows that see nothing here never ask for the block. Rows whose difference is NaN (infinite scores, or none
        # but -inf so far) do, and so does everyone where values are not finite: skipping would hide that.
        gaps = [e.fsub(a, b) for a, b in zip(local, new, strict=True)]
        near = [e.fcmp_unordered(">=", gap, e.spread(self.pv_threshold)) for gap in gaps]
        wanted = [e.and_(s_, e.or_(n, u)) for s_, n, u in zip(sees, near, undefined, strict=True)]
        kv_row = e.add(e.mul(self.batch, e.sdiv(self.arg["query_heads"], self.arg["group_size"])), self.kv_head)
        block = e.add(e.mul(kv_row, self.arg["key_blocks"]), e.sdiv(self.first_key, I64(s.block_k)))
        broken = e.icmp_signed("==", e.read(self.arg["v_finite"], block), I8(0))
        with e.if_else(e.or_(self._any(wanted), broken)) as (keep, skip):
            with keep:
                self._fold_values(state, columns, old, new, sight)
            with skip:
                count = e.offset(self.arg["skipped"], item)
                e.store(e.add(e.load(count), e.zext(self._any(sees), I64)), count)

    def _any(self, masks: list[ir.Value]) -> ir.Value:
        bits = self.e.bitcast(functools.reduce(self.e.or_, masks), ir.IntType(self.machine.lanes))
        return self.e.icmp_unsigned("!=", bits, bits.type(0))

    def _fold_values(
        self,
        state: ir.Value,
        columns: list[int],
        old: list[ir.Value],
        new: list[ir.Value],
        sight: Sight | None,
    ) -> None:
        """Weights are positive or +0.0 where a row sees a key and -0.0 where it does not. A row's sum starts at -0.0,
        so its sign tells for free whether the row has seen anything, and the products can leave hidden values alone."""
        e, s = self.e, self.shape
        scores = self.buffer["scores"]
        hidden = [e.fcmp_ordered("==", m, e.constant(MINUS_INFINITY)) for m in new]
        shift = [e.select(h, e.constant(0.0), m) for h, m in zip(hidden, new, strict=True)]

        def exponentiate(key: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            row = e.mul(key, I64(GROUP))
            weights = [e.exp2(e.fsub(e.read_vector(scores, row, c), m)) for c, m in zip(columns, shift, strict=True)]
            if sight is not None:
                weights = [e.select(ok, w, e.constant(-0.0)) for ok, w in zip(sight.seen(key), weights, strict=True)]
            for column, weight in zip(columns, weights, strict=True):
                e.write_vector(weight, scores, row, column)
            return [e.fadd(total, weight) for total, weight in zip(sums, weights, strict=True)]

        sums = e.accumulate(s.block_k, [e.constant(-0.0)] * len(columns), exponentiate)
        # exp2(-inf - shift) is zero, so a first block needs no case of its own.
        alpha = [e.exp2(e.fsub(m, n)) for m, n in zip(old, shift, strict=True)]
        for column, maximum, total, factor in zip(columns, new, sums, alpha, strict=True):
            e.write_vector(maximum, self.buffer["running_max"], state, column)
            place = (self.buffer["running_sum"], state, column)
            e.write_vector(e.fused(e.read_vector(*place), factor, total), *place)
        self._add_values(state, columns, alpha, careful=sight is not None)

    def _add_values(self, state: ir.Value, columns: list[int], alpha: list[ir.Value], careful: bool) -> None:
        """outputs[channel][row] = outputs * alpha + V P, four channels by a few vectors of rows at a time.

        `careful` leaves out hidden products, which would be NaN where a hidden value is not finite.
        """
        e, s = self.e, self.shape
        outputs = e.offset(self.buffer["outputs"], e.mul(state, I64(s.padded_value_dim)))
        width = self.machine.tile_vectors
        for first in range(0, self.vectors, width):
            part = columns[first : first + width]
            with e.loop(s.padded_value_dim, step=TILE_ROWS) as channel:
                rows = [e.mul(e.add(channel, I64(r)), I64(GROUP)) for r in range(TILE_ROWS)]
                places = [(outputs, row, column) for row in rows for column in part]
                factors = alpha[first : first + width] * TILE_ROWS
                # Summed apart from the running output: adding every key to a large sum would lose its low bits.
                zeros = [e.constant(0.0)] * len(places)

                def step(key: ir.Value, tile: list[ir.Value], channel=channel, part=part) -> list[ir.Value]:
                    row, source = e.mul(key, I64(GROUP)), e.mul(key, I64(s.padded_value_dim))
                    right = [e.read_vector(self.buffer["scores"], row, column) for column in part]
                    left = [e.spread(e.read(self.buffer["values"], source, channel, r)) for r in range(TILE_ROWS)]
                    product = self._outer_product(left, right, tile)
                    if not careful:
                        return product
                    seen = [e.icmp_signed(">=", e.bitcast(w, e.int_vector), e.integers([0] * e.lanes)) for w in right]
                    # NaN weights may carry the sign bit; they are seen.
                    seen = [e.or_(ok, e.is_nan(w)) for ok, w in zip(seen, right, strict=True)]
                    return [
                        e.select(ok, new, old) for ok, new, old in zip(seen * TILE_ROWS, product, tile, strict=True)
                    ]

                products = e.accumulate(s.block_k, zeros, step, unroll=4)
                for place, factor, product in zip(places, factors, products, strict=True):
                    e.write_vector(e.fused(e.read_vector(*place), factor, product), *place)

    def _finish_rows(self) -> None:
        """Normalise, transpose back and store; a row that saw nothing stores zeros."""
        e, arg, s = self.e, self.arg, self.shape
        output = self._base("output", "o", self.head)
        real_rows = e.smaller_int(I64(s.block_q), e.sub(arg["q_len"], self.first_row))
        with e.loop(real_rows) as row:
            group, lane = e.sdiv(row, I64(GROUP)), e.srem(row, I64(GROUP))
            total = e.read(self.buffer["running_sum"], row)
            saw_nothing = e.icmp_signed("==", e.bitcast(total, I32), I32(-(1 << 31)))  # still -0.0
            factor = e.fdiv(F32(1.0), total)
            source = e.add(e.mul(group, I64(GROUP * s.padded_value_dim)), lane)
            token = e.add(self.first_row, row)
            target = e.mul(token, arg["o_row"])
            with e.loop(s.value_dim) as channel:
                value = e.fmul(e.read(self.buffer["outputs"], source, e.mul(channel, I64(GROUP))), factor)
                value = e.select(saw_nothing, F32(0.0), value)
                e.store(self._from_float(value), e.offset(output, target, channel))
            e.store(e.read(self.buffer["running_max"], row), e.offset(arg["row_max"], self.rows_start, token))
            e.store(total, e.offset(arg["row_sum"], self.rows_start, token))


@functools.cache
def missing_features(dtype: str) -> str | None:
    """Why this CPU cannot run the kernel for a dtype, or None."""
    features = binding.get_host_cpu_features()
    x86 = binding.get_default_triple().startswith(("x86", "i386", "i686"))
    if x86 and dtype == "float16" and not features.get("f16c"):
        return "this CPU cannot convert float16 (F16C)"
    return None


def _machine() -> tuple[binding.TargetMachine, Machine]:
    """A target for this CPU, new for every kernel: the engine that compiles with it comes to own it."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=features.flatten(), opt=3
    )
    if features.get("avx512f"):
        return target, Machine(lanes=16, tile_vectors=4)
    if features.get("avx") and features.get("fma"):
        return target, Machine(lanes=8, tile_vectors=2)
    return target, Machine(lanes=4, tile_vectors=4 if features.get("neon") else 2)


class Compiled:
    """A kernel and the engine that owns its code."""

    def __init__(self, shape: Shape) -> None:
        target, machine = _machine()
        module = binding.parse_assembly(str(AttendKernel(shape, machine).module))
        module.verify()
        builder = binding.create_pass_builder(target, binding.create_pipeline_tuning_options(speed_level=3))
        builder.getModulePassManager().run(module, builder)
        self._engine = binding.create_mcjit_compiler(module, target)
        self._engine.finalize_object()
        argument_types = [ctypes.c_void_p] * len(POINTERS) + [ctypes.c_int64] * len(INTEGERS) + [ctypes.c_float]
        address = self._engine.get_function_address("attend")
        self.call = ctypes.CFUNCTYPE(None, *argument_types)(address)


_compiled: dict[Shape, Compiled] = {}
_compiling = threading.Lock()  # LLVM's engines are not made for two threads at once


def compiled(shape: Shape) -> Compiled:
    """The kernel for a shape; kept for the life of the process, since other threads may be running it."""
    with _compiling:
        if shape not in _compiled:
            _compiled[shape] = Compiled(shape)
        return _compiled[shape]


def bind(shape: Shape, tensors: dict[str, torch.Tensor], integers: dict[str, int], scale: float) -> Callable[[], None]:
    """One thread's call, arguments in the kernel's order; it keeps the code and the tensors alive."""
    code = compiled(shape)

    def call() -> None:
        pointers = [tensors[name].data_ptr() if name in tensors else None for name in POINTERS]
        code.call(*pointers, *(integers[name] for name in INTEGERS), scale)

    return call
