"""The policy keeps its contract, is found by its name, and finds what it should."""

import torch

import pulse_example
from pulse import Build, Plugins
from pulse.testing import check_selection_policy
from pulse.types import Geometry, SelectionView
from pulse_example import Centroid

GEOMETRY = Geometry(1, 2, 1, 4, 1024, 16, "float32", 4, (None,))
BUILD = Build(geometry=GEOMETRY)


def test_it_keeps_the_contract() -> None:
    check_selection_policy(Centroid)


def test_it_is_found_by_its_name() -> None:
    plugins = Plugins(discover=False)  # the package need not be installed
    plugins.register(pulse_example)
    assert isinstance(plugins.resolve("select", "centroid", BUILD), Centroid)


def test_it_reads_the_block_that_the_query_points_at() -> None:
    policy = Centroid(BUILD)
    policy.open("a", 4)
    policy.update(0, "a", 0, torch.eye(4).reshape(4, 1, 1, 4))  # one block per direction
    query = torch.tensor([[[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.5, 0.1]]])
    assert policy.select(0, query, SelectionView(("a",), ((1, 4),), 1)).tolist() == [[[2]]]
