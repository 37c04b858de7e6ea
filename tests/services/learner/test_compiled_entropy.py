"""The compiled entropy is that of the eager function, and needs a compiler."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.algorithm import entropy_from_logits
from trackway.learner.head import compiled_entropy
from trackway.learner.learner import Learner
from trackway.wire.trajectory import Trajectory

pytestmark = [
    pytest.mark.slow,
    # Of what torch's own compiler imports.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The distutils package is deprecated:DeprecationWarning"),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@needs_compiler
@pytest.mark.usefixtures("nothing_compiled")
def test_the_entropy_and_its_gradient_are_the_eager_ones_and_do_not_depend_on_the_other_rows():
    importlib.util.find_spec("pip")  # as libraries do; on Python 3.11 setuptools then has no distutils of its own
    compiled = compiled_entropy(torch.empty(64), with_gradient=True)
    functions = counters["stats"]["unique_graphs"]
    logits = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))

    def results(entropy: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = rows.clone().requires_grad_()
        entropies = entropy(given)
        entropies.sum().backward()
        assert given.grad is not None
        return entropies.detach(), given.grad

    ours, theirs = results(compiled, logits), results(entropy_from_logits, logits)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for count in (0, 1, 4):
        part = results(compiled, logits[:count])
        torch.testing.assert_close(part, (ours[0][:count], ours[1][:count]), rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == functions


@needs_compiler
@pytest.mark.parametrize("head", [{}, {"use_fused_kernels": True, "chunk_size": 4}], ids=["whole", "in chunks"])
def test_an_update_with_it_is_the_eager_one_and_compiles_once(
    tiny_model: Path, rollout: Callable[..., Trajectory], head: dict[str, object]
):
    batch = [rollout(row // 2, row % 2, float(row % 2), response_ids=[row, 2, 3, 4, 5, 6]) for row in range(4)]
    keys = {"entropy_coeff": 0.1, "lr": 1e-3, **head}
    eager = Learner(learner_config(tiny_model, **keys)).update(batch).metrics
    learner = Learner(learner_config(tiny_model, use_torch_compile=True, **keys))
    compiled = counters["stats"]["unique_graphs"]

    metrics = learner.update(batch).metrics

    assert metrics == pytest.approx(eager, abs=1e-5)
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.usefixtures("nothing_compiled")
def test_without_a_compiler_the_key_and_the_remedy_are_named(tiny_model: Path):
    without = inductor.patch({"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True})
    error = (
        r"^expected a compiler that torch\.compile can use for actor\.use_torch_compile \(on CPUs a C\+\+ compiler, "
        r"such as the package g\+\+\), got .*: .*; install it, or set the key to false$"
    )

    with without, pytest.raises(ValueError, match=error):
        Learner(learner_config(tiny_model, **{"actor_rollout_ref.actor.fsdp_config.use_torch_compile": True}))
