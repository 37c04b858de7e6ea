"""A file written tensor by tensor is the file that safetensors writes."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from trackway.learner.weights.sharded_files import in_file_order, write_tensors

TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a.step": torch.tensor(3.0),
    "c": torch.tensor(7),
    "d": torch.tensor([1, 2, 3], dtype=torch.uint8),
    "e.empty": torch.zeros(0, 4, dtype=torch.float64),
    "f": torch.randn(4, 2).bfloat16().t(),
}


def test_it_has_the_bytes_of_the_librarys_own(tmp_path: Path):
    named = in_file_order(TENSORS)

    write_tensors(tmp_path / "ours", named, iter(named.values()))

    save_file({name: tensor.contiguous() for name, tensor in TENSORS.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
