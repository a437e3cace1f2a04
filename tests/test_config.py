import dataclasses
import math

import pytest
import torch
from problems import refused

from sparge import SparseConfig
from sparge.config import BLOCK_KEYS, BLOCK_ROWS, RULES, SUBBLOCKS

PER_HEAD_SETTINGS = ("threshold", "gap", "cdf", "topk", "probe", "similarity", "pv_threshold")
USING_ALL = {"rule": RULES}


def test_defaults_are_the_documented_ones():
    config = SparseConfig()
    assert config.rule == ("gap", "probe")
    assert (config.gap, config.probe, config.probe_rows) == (4.0, 0.003, 4)
    assert (config.subblocks, config.block, config.sinks) == ((4, 4), (128, 64), 1)
    assert config.similarity is None
    assert config.pv_threshold is None
    assert config.quantization == "auto"
    assert config.protected == ()


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseConfig().threshold = 0.5


def test_is_a_dictionary_key_whatever_its_settings_came_from():
    tuned = {"gap": [1.0, 2.0], "similarity": torch.tensor([0.1, 0.2]), "protected": [[0, 4]], "block": [64, 32]}
    same = {"gap": (1.0, 2.0), "similarity": (0.1, 0.2), "protected": ((0, 4),), "block": (64, 32)}
    a, b = SparseConfig(**tuned), SparseConfig(**same | {"similarity": tuple(torch.tensor([0.1, 0.2]).tolist())})
    assert a == b
    assert {a: "found"}[b] == "found"


def test_rule_is_a_name_or_several_each_named_once():
    assert SparseConfig(rule="gap").rule == ("gap",)
    assert SparseConfig(rule=["topk", "cdf"]).rule == ("topk", "cdf")
    assert SparseConfig(rule=("cdf", "topk", "cdf")).rule == ("cdf", "topk")


@pytest.mark.parametrize("rule", ["top-k", "", (), ("topk", "nope"), 3, None, ("topk", 1), {"topk"}])
def test_refuses_unknown_rules(rule):
    with refused(ValueError, "rule", repr(rule), "'threshold'"):
        SparseConfig(rule=rule)


OUTSIDE = {
    "threshold": (-0.001, 1.001, math.inf),
    "gap": (-0.5, -math.inf),
    "cdf": (-0.01, 1.01, 2, math.inf),
    "topk": (-0.01, 1.5),
    "probe": (-0.01, 1.5),
    "similarity": (-1.5, 1.01),
    "pv_threshold": (0.0, 0, 3.0, math.inf),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in OUTSIDE for value in OUTSIDE[name]])
def test_refuses_numbers_outside_their_range(name, value):
    with refused(ValueError, name, repr(value)):
        SparseConfig(**USING_ALL, **{name: value})
    inside = -0.5 if name == "pv_threshold" else 0.5
    with refused(ValueError, name, repr(float(value))):
        SparseConfig(**USING_ALL, **{name: torch.tensor([inside, value], dtype=torch.float64)})


@pytest.mark.parametrize("name", PER_HEAD_SETTINGS)
@pytest.mark.parametrize("value", [math.nan, (0.5, math.nan), torch.tensor([math.nan])], ids=["one", "tuple", "tensor"])
def test_refuses_nan(name, value):
    if name == "pv_threshold" and isinstance(value, tuple):
        value = (-0.5, math.nan)
    with refused(ValueError, name, "nan"):
        SparseConfig(**USING_ALL, **{name: value})


@pytest.mark.parametrize("name", PER_HEAD_SETTINGS)
@pytest.mark.parametrize("value", ["0.5", True, (0.5, "x"), [[0.5]], 1j, {0.5}], ids=repr)
def test_refuses_what_is_not_a_number(name, value):
    if name == "pv_threshold" and isinstance(value, tuple):
        value = (-0.5, "x")
    with refused(TypeError, name, repr(value)):
        SparseConfig(**USING_ALL, **{name: value})


@pytest.mark.parametrize("name", PER_HEAD_SETTINGS)
def test_refuses_an_empty_sequence(name):
    with refused(ValueError, name, "empty"):
        SparseConfig(**USING_ALL, **{name: ()})


@pytest.mark.parametrize("name", ["threshold", "gap", "cdf"])
def test_only_needed_settings_may_be_none(name):
    with refused(TypeError, name, "None"):
        SparseConfig(**USING_ALL, **{name: None})


@pytest.mark.parametrize("name", RULES)
def test_refuses_a_setting_that_its_rule_would_ignore(name):
    others = tuple(rule for rule in RULES if rule != name)
    with refused(ValueError, f"{name}=0.25", "ignored", repr(others)):
        SparseConfig(rule=others, **{name: 0.25})
    with refused(ValueError, name, "ignored"):
        SparseConfig(rule=others, **{name: (0.25, 0.25)})


@pytest.mark.parametrize("rows", [0, 3, 16, 2.0, True, None, "4"])
def test_refuses_unsupported_probe_rows(rows):
    with refused(ValueError, "probe_rows", repr(rows)):
        SparseConfig(rule="probe", probe_rows=rows)
    with refused(ValueError, "probe_rows=2", "ignored", "'probe'"):
        SparseConfig(rule="gap", probe_rows=2)


@pytest.mark.parametrize(
    "block",
    [
        (128, 16),
        (100, 64),
        (32, 64),
        (512, 64),
        (128, 256),
        (64,),
        (64, 64, 64),
        128,
        "128x64",
        None,
        (0, 64),
        (-64, 64),
    ],
)
def test_refuses_unsupported_block_sizes(block):
    with refused(ValueError, "block", repr(block), str(BLOCK_ROWS), str(BLOCK_KEYS)):
        SparseConfig(block=block)


@pytest.mark.parametrize("rows", BLOCK_ROWS)
@pytest.mark.parametrize("keys", BLOCK_KEYS)
def test_takes_every_supported_block_size(rows, keys):
    assert SparseConfig(block=(rows, keys)).block == (rows, keys)


@pytest.mark.parametrize("subblocks", [(3, 4), (4, 16), (0, 1), (4,), 4, None, (-1, 1)])
def test_refuses_unsupported_subblocks(subblocks):
    with refused(ValueError, "subblocks", repr(subblocks), str(SUBBLOCKS)):
        SparseConfig(subblocks=subblocks)


@pytest.mark.parametrize("name", ["fp8", "INT8", "", None, 8])
def test_refuses_unknown_quantization(name):
    with refused(ValueError, "quantization", repr(name), "'int8-fp8'"):
        SparseConfig(quantization=name)


@pytest.mark.parametrize("sinks", [-1, 1.0, "1", None, True])
def test_refuses_bad_sinks(sinks):
    with refused(ValueError, "sinks", repr(sinks)):
        SparseConfig(sinks=sinks)


@pytest.mark.parametrize(
    "protected", [5, "0:4", ((0, 4, 8),), (0, 4), ((0.0, 4),), ((None, 4),), ((0, "4"),), ((0, True),)]
)
def test_refuses_bad_protected_ranges(protected):
    with refused(TypeError, "protected", repr(protected)):
        SparseConfig(protected=protected)


@pytest.mark.parametrize("setting", ["gap", "max_error", "threshold"])
def test_integers_that_no_float_holds(setting):
    huge, rule = 10**400, ("gap", "threshold")
    if setting == "gap":
        assert SparseConfig(rule=rule, gap=huge).gap == float("inf")
        return
    with refused(ValueError, setting):
        SparseConfig(rule=rule, **{setting: huge})


@pytest.mark.parametrize("empty", [(10, 5), (7, 7), (-1, -5), (3, 0), (-256, 0)])
def test_refuses_protected_ranges_that_hold_nothing(empty):
    """(10, 5) can never protect a token: accepting it would be accepting and ignoring it."""
    with refused(ValueError, "protected", repr(empty)):
        SparseConfig(protected=(empty,))


def test_protected_ranges_resolve_like_slices():
    config = SparseConfig(protected=((0, 4), (-3, None), (90, 200), (500, None)))
    inside = [pair for pair in config.protected_ranges(100) if pair[0] < pair[1]]
    assert inside == [(0, 4), (97, 100), (90, 100)]


@pytest.mark.parametrize(
    ("settings", "everything"),
    [
        ({}, False),
        ({"rule": "topk", "topk": 1.0}, True),
        ({"rule": "topk", "topk": 1}, True),
        ({"rule": ("topk", "cdf"), "cdf": 1.0}, True),
        ({"rule": "threshold", "threshold": 0}, True),
        ({"rule": "gap", "gap": math.inf}, True),
        ({"rule": "topk", "topk": 0.999}, False),
        ({"rule": "threshold", "threshold": 1.0}, False),
        ({"rule": "gap", "gap": 0.0}, False),
        ({"rule": "topk", "topk": (1.0, 0.5)}, False),
    ],
)
def test_keeps_everything_only_where_a_rule_is_certain_to(settings, everything):
    assert SparseConfig(**settings).keeps_everything is everything


@pytest.mark.parametrize("name", PER_HEAD_SETTINGS)
def test_per_head_settings_must_match_the_heads(name):
    values = (-0.5, -0.25, -1.0) if name == "pv_threshold" else (0.5, 0.25, 0.125)
    config = SparseConfig(**USING_ALL, **{name: values})
    config.check_heads(3)
    assert config.per_head(name, 3, torch.device("cpu")).tolist() == list(values)
    with refused(ValueError, name, "3 values", "4 heads"):
        config.check_heads(4)


def test_one_number_serves_every_head():
    assert SparseConfig().per_head("gap", 3, torch.device("cpu")).tolist() == [4.0, 4.0, 4.0]
