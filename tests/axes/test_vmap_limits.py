"""What torch.vmap cannot run names lockstep, which can; what it can run has lockstep's numbers."""

from typing import Any

import pytest
import torch

import fzero


def on_ranks(simulate: Any, program: Any, x: torch.Tensor) -> torch.Tensor:
    mesh = fzero.mesh(dp=2, simulate=simulate)
    return mesh.spmd(lambda x: fzero.collectives.pmean(program(x)))(mesh.split(x))


def test_spectral_norm_in_training_names_lockstep_which_runs_it():
    module = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(5, 4))
    apply, params, buffers = fzero.nn.functional(module)
    x = torch.randn(4, 5)
    with pytest.raises(RuntimeError, match="Batching rule not implemented") as caught:
        on_ranks("vmap", lambda x: apply(params, buffers, x)[0].square().mean(), x)
    assert 'fzero.mesh(..., simulate="lockstep")' in "".join(caught.value.__notes__)
    result = on_ranks("lockstep", lambda x: apply(params, buffers, x)[0].square().mean(), x)
    torch.testing.assert_close(result, module(x).square().mean())


def test_a_ctc_loss_of_simulated_ranks_is_that_of_lockstep():
    torch.manual_seed(0)
    w, x = torch.randn(5, 4), torch.randn(4, 6, 5)

    def loss(x: torch.Tensor) -> torch.Tensor:
        n = len(x)
        texts, lengths = torch.tensor([[1, 2, 3]]).expand(n, 3), torch.full((n,), 3)
        scores = (x @ w).log_softmax(-1).transpose(0, 1)
        return torch.nn.functional.ctc_loss(scores, texts, torch.full((n,), 6), lengths)

    expected = on_ranks("lockstep", loss, x)
    torch.testing.assert_close(on_ranks("vmap", loss, x), expected)
    torch.testing.assert_close(expected, loss(x))
