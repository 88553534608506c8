"""Where a torch model runs, without torch: a stand-in says whether there is CUDA."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zfabric.errors import ConfigError
from zfabric_workers.torchdevice import check_device, choose_device, packages


def torch_of(*, cuda):
    told = []
    return SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: cuda), set_num_threads=told.append, told=told
    )


@pytest.mark.parametrize(
    ("device", "cuda", "chosen"),
    [("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", True, "cuda")],
)
def test_auto_is_cuda_where_there_is_one(device, cuda, chosen):
    assert choose_device(torch_of(cuda=cuda), device, 0) == chosen


def test_cuda_that_is_not_there_is_refused_with_the_way_out():
    with pytest.raises(ConfigError, match="--opt device=cpu"):
        choose_device(torch_of(cuda=False), "cuda", 0)


def test_threads_are_left_to_torch_unless_told():
    torch = torch_of(cuda=False)
    choose_device(torch, "cpu", 0)
    choose_device(torch, "cpu", 3)
    assert torch.told == [3]


def test_a_device_that_nobody_has_is_refused():
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        check_device("tpu")


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch):
    def missing(name):
        raise ImportError(f"no {name}", name=name)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"needs torch: pip install 'zfabric\[embed\]'"):
        packages("embed", ["sentence_transformers"])
